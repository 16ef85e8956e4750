"""How fast one layer's attention is: python -m tests.gpu.attention_speed prints two tables: in 16
bits, and of long segments with rotary embedding, in 16 bits and in FP8.

Each figure is the median of 5 replays of a CUDA graph of launches that take 30 ms together, at most
20. The long segments keep the GPU at its power limit, as a tower of many layers does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from actors.kernels.attention import choose
from actors.kernels.attention_fp8 import FEWEST_KEYS, rotate_given

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
LONG = (4096, 8160, 15376, 35344, 62500)
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
    return timed(lambda: attention(qkv, values), operations(lengths, size))


def in_both(length: int, size: int) -> tuple[float, float]:
    """Microseconds of rotary embedding and attention of one segment, in 16 bits and in FP8. Queries
    are written over, so that they are copied anew for each launch; the copy's time is subtracted.
    """
    device = torch.device("cuda")
    attention = choose(device, torch.bfloat16, size, fp8=True)
    qkv = torch.randn(length, 3, HEADS, size, dtype=torch.bfloat16, device=device)
    angle, queries = torch.rand(length, size // 2, device=device) * 6, qkv[:, 0].clone()
    cos, sin = angle.cos(), angle.sin()
    host = attention.metadata([length], length, 1)
    values: dict[str, Tensor] = {name: value.cuda() for name, value in host.items()}

    def copied() -> None:
        qkv[:, 0].copy_(queries)

    def plain() -> None:
        copied()
        rotate_given(qkv, cos, sin)
        attention(qkv, values)

    def in_fp8() -> None:
        copied()
        attention.fp8(qkv, values, cos, sin)

    work = operations([length], size)
    copy = timed(copied, 0)
    return timed(plain, work) - copy, timed(in_fp8, work) - copy


def timed(call: Callable[[], object], work: int) -> float:
    """Microseconds of a call of so many operations."""
    call()
    launches = min(LAUNCHES, max(int(MICROSECONDS * FASTEST / max(work, 1)), 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
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
    print("\n| head size, patches | 16 bits | FP8 |\n|---|---|---|")
    for size in FEWEST_KEYS:
        FEWEST_KEYS[size] = LONG[0]
        for length in LONG:
            plain, in_fp8 = in_both(length, size)
            print(f"| {size}, {length} | {plain:.1f} us | {in_fp8:.1f} us |")


if __name__ == "__main__":
    main()
