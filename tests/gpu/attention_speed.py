"""How fast one layer's attention is: python -m tests.gpu.attention_speed prints a table.

Each figure is the median of 5 replays of a CUDA graph of launches that take 30 ms together, at most
20. The long segments keep the GPU at its power limit, as a tower of many layers does.
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
    "1x15376": [15376],
    "1x35344": [35344],
    "1x62500": [62500],
}
HEADS, LAUNCHES, REPLAYS = 16, 20, 5
FASTEST = 600e6  # operations per microsecond
MICROSECONDS = 3e4


def microseconds(lengths: list[int], size: int) -> float:
    """Of one launch over segments of these lengths."""
    patches, device = sum(lengths), torch.device("cuda")
    attention = choose(device, torch.bfloat16, size)
    qkv = torch.randn(patches, 3, HEADS, size, dtype=torch.bfloat16, device=device)
    host = attention.metadata(lengths, patches, len(lengths))
    values: dict[str, Tensor] = {name: value.cuda() for name, value in host.items()}
    attention(qkv, values)
    launches = min(LAUNCHES, max(int(MICROSECONDS / (operations(lengths, size) / FASTEST)), 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            attention(qkv, values)
    times = []
    for _ in range(REPLAYS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return float(sorted(times[1:])[REPLAYS // 2])


def operations(lengths: list[int], size: int) -> int:
    return sum(4 * length**2 * HEADS * size for length in lengths)


def main() -> None:
    """One row a head size: microseconds and TFLOP/s."""
    print("| head size | " + " | ".join(SHAPES) + " |")
    print("|" + "---|" * (len(SHAPES) + 1))
    for size in (64, 72, 80):
        cells = []
        for lengths in SHAPES.values():
            time = microseconds(lengths, size)
            cells.append(f"{time:.1f} us, {operations(lengths, size) / time / 1e6:.0f} TFLOP/s")
        print(f"| {size} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
