"""Attention on compute capability 9.0 with its own instructions: hopper.cu, compiled at run time.

Knows how that kernel is written out and launched, not who builds its table (see hopper_tiles.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from actors.kernels import nvrtc
from actors.kernels.tensor_map import tensor_map

GROUPS = 3
"""Warp groups that compute, of 64 queries each."""
TILE_ROWS, STRIP_ROWS = 64 * GROUPS, 64
"""Queries of a tile and of a strip of the table."""
ARCHITECTURE = "sm_90a"
CAPABILITY = (9, 0)
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
FILES = ("hopper_items.cu", "hopper_softmax.cu", "hopper_copies.cu", "hopper.cu")
LANE_BYTES = 128
"""Bytes of a swizzled row in shared memory: 64 columns."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """Keys a block and stages of the ring: what fits into registers and shared memory."""

    keys: int
    stages: int

    @property
    def kept_patches(self) -> int:
        """The longest segment whose keys and values fit into the ring together."""
        return self.keys * self.stages


SHAPES = {64: (Shape(80, 9), Shape(96, 8)), 72: (Shape(80, 6),), 80: (Shape(80, 6),)}
"""For each head size that there are kernels of, one of each shape: see hopper_tiles.py.

80 keys divide the 400 patches of a common image; long segments are faster with 96.
"""


def attend_(qkv: Tensor, table: Tensor, kernel: nvrtc.Kernel, keys: int) -> Tensor:
    """Attention of qkv [rows, 3, heads, head size], contiguous, 16-bit, written over its q.

    Returns that q as [rows, heads x head size], a view; rows that no item of the table covers keep
    their q. `kernel` is one of this device, dtype and head size, of so many keys a block.
    """
    rows, _, heads, size = qkv.shape
    flat, rest = qkv.view(rows, -1), max(size - 64, 8)
    maps = b"".join(
        [
            tensor_map(flat, (keys, 64)),
            tensor_map(flat, (STRIP_ROWS, 64)),
            tensor_map(flat, (keys, rest)),
            tensor_map(flat, (keys, rest), 2 * rest),
            tensor_map(flat, (STRIP_ROWS, rest), 2 * rest),
        ]
    )
    processors = torch.cuda.get_device_properties(qkv.device).multi_processor_count
    kernel.launch((processors, 1, 1), qkv, table, maps, heads)
    return flat[:, : heads * size]


@cache
def kernels_for(
    device: torch.device, dtype: torch.dtype, size: int
) -> tuple[nvrtc.Kernel, ...] | None:
    """One for each shape of such a qkv; None, and one line in the log, where they cannot be had.

    Compiling one takes about a second, so they are kept.
    """
    if size not in SHAPES or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability != CAPABILITY:
        log.info("attention by Triton: hopper.cu is not for compute capability %d.%d", *capability)
        return None
    try:
        with torch.cuda.device(device):
            return tuple(build(TYPES[dtype], size, shape) for shape in SHAPES[size])
    except (OSError, RuntimeError) as error:
        log.warning("attention by Triton, which is slower: hopper.cu cannot be used: %s", error)
        return None


def build(element: str, size: int, shape: Shape) -> nvrtc.Kernel:
    """See nvrtc.build."""
    text, threads = source(element, size, shape), 128 * (GROUPS + 1)
    return nvrtc.build(text, "attend", ARCHITECTURE, threads, shared_bytes(size, shape))


def shared_bytes(size: int, shape: Shape) -> int:
    """Of the ring and the queries; see hopper.cu. The first up to 1023 bytes are for alignment."""
    kept, queries, rest = shape.kept_patches, GROUPS * STRIP_ROWS, (size - 64) // 8
    lots = (3 if rest else 2) * kept + queries
    ones = 0 if rest else 16
    return 1024 + (lots + ones) * LANE_BYTES + (kept + queries) * rest * 16


def source(element: str, size: int, shape: Shape) -> str:
    """All that is compiled, as one text."""
    defined = {
        "ELEMENT": "unsigned short",
        "TYPE": f'"{element}"',
        "SIZE": size,
        "GROUPS": GROUPS,
        "KEYS": shape.keys,
        "STAGES": shape.stages,
        "SCALE": f"{size**-0.5 * 1.4426950408889634!r}f",  # log2(e)
    }
    folder = Path(__file__).parent
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in defined.items()),
            (folder / "hopper_ptx.cu").read_text(),
            product("multiply_qk", element, shape.keys),
            product("multiply_pv", element, size + 8, transposed=True),
            *((folder / name).read_text() for name in FILES),
        ]
    )


def product(
    name: str, element: str, columns: int, *, shared: bool = False, transposed: bool = False
) -> str:
    """A CUDA function: d [64, columns] (+)= a [64, 16] in registers x b [16, columns], shared.

    Written out because the instruction names each of its columns / 2 registers a thread. `shared`:
    a is in shared memory as well; `transposed`: b is.
    """
    count = columns // 2
    a = ["a"] if shared else ["a0", "a1", "a2", "a3"]
    outputs = ", ".join(f"%{i}" for i in range(count))
    first = f"%{count}" if shared else "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
    b, add = count + len(a), count + len(a) + 1
    flags = f"1, 1, 0, {int(transposed)}" if shared else f"1, 1, {int(transposed)}"
    bound = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    read = ", ".join(f'"{"l" if shared else "r"}"({each})' for each in a)
    declared = ", ".join(f"{'u64' if shared else 'u32'} {each}" for each in a)
    return f"""
DEVICE void {name}(float (&d)[{count}], {declared}, u64 b, int add) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{add}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} {{{outputs}}}, "
        "{first}, %{b}, add, {flags};\\n}}"
        : {bound} : {read}, "l"(b), "r"(add));
}}
"""
