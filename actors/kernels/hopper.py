"""Attention on compute capability 9.0 with its own instructions: hopper.cu, compiled at run time.

Knows how that kernel is written out and launched, not when it pays (see tiles.py).
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from actors.kernels import nvrtc

ROWS = 128
"""Queries a tile: the table's tiles must have as many."""
KEYS = 96
STAGES = 5
THREADS = 384
ARCHITECTURE = "sm_90a"
CAPABILITY = (9, 0)
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

log = logging.getLogger(__name__)


def attend_(qkv: Tensor, table: Tensor, kernel: nvrtc.Kernel) -> Tensor:
    """See actors.kernels.attend.attend_; `kernel` is that of these heads, head size and dtype."""
    rows, _, heads, size = qkv.shape
    processors = torch.cuda.get_device_properties(qkv.device).multi_processor_count
    kernel.launch(min(processors, (len(table) - 1) * heads), qkv, table)
    return qkv.view(rows, -1)[:, : heads * size]


def kernel_for(qkv: Tensor) -> nvrtc.Kernel | None:
    """The kernel for such a qkv; None, and one line in the log, where it cannot be built."""
    _, _, heads, size = qkv.shape
    return built(qkv.device, TYPES[qkv.dtype], heads, size)


@cache
def built(device: torch.device, element: str, heads: int, size: int) -> nvrtc.Kernel | None:
    """See kernel_for. Compiling takes about a second, so each is kept."""
    if torch.cuda.get_device_capability(device) != CAPABILITY:
        return None
    try:
        with torch.cuda.device(device):
            kernel = nvrtc.build(
                source(element, heads, size), "attend", ARCHITECTURE, THREADS, shared_bytes(size)
            )
    except (OSError, RuntimeError) as error:
        log.warning("hopper.cu cannot be used, attention of long budgets is slower: %s", error)
        return None
    log.info("attention of long budgets by hopper.cu: %d heads of %d, %s", heads, size, element)
    return kernel


def shared_bytes(size: int) -> int:
    """Keys and values of all stages; each column of 8 is followed by 16 bytes."""
    return STAGES * 2 * (size // 8) * (KEYS + 1) * 16


def source(element: str, heads: int, size: int) -> str:
    """All that is compiled, as one text."""
    defined = {
        "ELEMENT": "unsigned short",
        "TYPE": f'"{element}"',
        "HEADS": heads,
        "SIZE": size,
        "KEYS": KEYS,
        "STAGES": STAGES,
        "SCALE": f"{size**-0.5 * 1.4426950408889634!r}f",  # log2(e)
    }
    folder = Path(__file__).parent
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in defined.items()),
            (folder / "hopper_ptx.cu").read_text(),
            product("multiply_qk", element, KEYS, transposed=False),
            product("multiply_pv", element, size, transposed=True),
            (folder / "hopper.cu").read_text(),
        ]
    )


def product(name: str, element: str, columns: int, transposed: bool) -> str:
    """A CUDA function: d [64, columns] (+)= a [64, 16] in registers x b [16, columns], shared.

    Written out because the instruction names each of its columns / 2 registers a thread.
    """
    count = columns // 2
    outputs = ", ".join(f"%{i}" for i in range(count))
    inputs = ", ".join(f"%{count + i}" for i in range(4))
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
DEVICE void {name}(float (&d)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} {{{outputs}}}, "
        "{{{inputs}}}, %{count + 4}, add, 1, 1, {int(transposed)};\\n}}"
        : {bound} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}}
"""
