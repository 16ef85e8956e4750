"""How fast one layer's attention is: python -m tests.gpu.attention_speed prints a table.

Each figure is the median of 5 replays of a CUDA graph of 20 launches, divided by 20.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.kernels.attention import choose

SHAPES = {
    "1x400": [400],
    "8x400": [400] * 8,
    "20x400": [400] * 20,
    "125x64": [64] * 125,
    "1x1024": [1024],
    "1x4096": [4096],
    "2x4096": [4096] * 2,
    "1x8160": [8160],
}
HEADS, LAUNCHES, REPLAYS = 16, 20, 5


def microseconds(lengths: list[int], size: int) -> float:
    """Of one launch over segments of these lengths."""
    patches, device = sum(lengths), torch.device("cuda")
    attention = choose(device, torch.bfloat16, size)
    qkv = torch.randn(patches, 3, HEADS, size, dtype=torch.bfloat16, device=device)
    host = attention.metadata(lengths, patches, len(lengths))
    values: dict[str, Tensor] = {name: value.cuda() for name, value in host.items()}
    attention(qkv, values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            attention(qkv, values)
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / LAUNCHES)
    return float(sorted(times[1:])[REPLAYS // 2])


def main() -> None:
    """One row a head size: microseconds and TFLOP/s."""
    print("| head size | " + " | ".join(SHAPES) + " |")
    print("|" + "---|" * (len(SHAPES) + 1))
    for size in (64, 72, 80):
        cells = []
        for lengths in SHAPES.values():
            time = microseconds(lengths, size)
            operations = sum(4 * length**2 * HEADS * size for length in lengths)
            cells.append(f"{time:.1f} us, {operations / time / 1e6:.0f} TFLOP/s")
        print(f"| {size} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
