"""Attention of long segments in FP8 on compute capability 9.0: see ../attention_fp8.py.

There are two kernels: attention_fp8_inputs.cu rotates and quantises, attention_fp8.cu computes
attention. Quantised patches are stored in slots: one per patch, in order, and unused ones before
long segments, so that each of these starts at a multiple of 16. TMA can copy the transposed values,
which are contiguous in slots, only from such places.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.kernels import Shapes, Values
from actors.kernels.attention_fp8 import FEWEST_KEYS, VALUE_SCALE, query_scale
from actors.kernels.hopper import cuda
from actors.kernels.hopper.attention import STRIP_ROWS, Ring, item_table, launches
from actors.kernels.hopper.cuda import ELEMENTS, LoadedKernel, encoded_map

RING = Ring(128, 8, cluster=2, groups=2)
TILE_ROWS = STRIP_ROWS * RING.groups * RING.cluster  # queries of an entry of the table
ALIGNED = 16  # slots
FLUSH = 4  # blocks of keys that the tensor cores sum up before their sums are added in float32
SLOTS = 32  # per block of the kernel that quantises
HEAD_PARTS = 8  # blocks that share the heads of the same slots
HEADROOM = 1.0  # octaves between a row's largest weight and 448, when its reference is chosen
FOLDER = Path(__file__).parent

log = logging.getLogger(__name__)


class HopperLongAttention:
    """See LongAttention. For one head size."""

    def __init__(self, prepare: Sequence[LoadedKernel], attend: LoadedKernel, size: int) -> None:
        """`prepare`: the kernels without and with rotary embedding."""
        self.prepare = prepare
        self.attend = attend
        self.fewest = FEWEST_KEYS[size]

    def inputs(self, patches: int) -> Shapes:
        """The table of the long segments, in slots, and for each slot its patch. If the patch is in
        a short segment, the value is -2 - patch; if the slot is unused, -1."""
        long = patches // self.fewest
        if not long:
            return {}
        slots = patches + -patches % ALIGNED + long * ALIGNED
        return {
            "attention_long_items": ((1 + patches // TILE_ROWS + long, 4), torch.int32),
            "attention_slots": ((slots,), torch.int32),
        }

    def metadata(self, lengths: Sequence[int], patches: int) -> dict[str, Tensor]:
        ((items, _), _), ((rows,), _) = self.inputs(patches).values()
        start, segments, chosen = 0, list[int](), list[bool]()
        for length in lengths:
            long = length >= self.fewest
            gap = -start % ALIGNED if long else 0
            segments += [gap, length]
            chosen += [False, long]
            start += gap + length
        counts, patch = np.asarray(lengths, np.int64), np.arange(sum(lengths), dtype=np.int32)
        gaps = np.repeat(np.cumsum(segments[::2], dtype=np.int64), counts)
        in_long = np.repeat(np.asarray(chosen[1::2], np.bool_), counts)
        slots = np.full(rows, -1, np.int32)
        slots[patch + gaps] = np.where(in_long, patch, -2 - patch)
        table = item_table(segments, RING, items, chosen)
        return {"attention_long_items": table, "attention_slots": torch.from_numpy(slots)}

    def __call__(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> None:
        _, _, heads, size = qkv.shape
        tokens, pitch = values["attention_slots"], 80 if size > 64 else 64
        slots, row = len(tokens), 2 * heads * pitch
        # The last block of keys may reach beyond the end. What lies there is masked.
        qk = torch.empty(slots + RING.keys, row, dtype=torch.uint8, device=qkv.device)
        value = torch.empty(heads * size, slots, dtype=torch.uint8, device=qkv.device)
        angles = (qkv, qkv) if cos is None or sin is None else (cos, sin)
        grid = (-(-slots // SLOTS), math.gcd(2 * heads, HEAD_PARTS), 1)
        self.prepare[cos is not None].launch(grid, qkv, *angles, tokens, qk, value, slots, heads)
        # Keys 4a + 2b + c of 16 arrive as rows 8b + 2a + c: see attention_fp8.cu.
        sizes, steps = (row, slots, 4, 2, RING.keys // 16), (row, 4 * row, 2 * row, 16 * row)
        keys, order = (qk.data_ptr(), torch.uint8, sizes, steps), (2, 4, 2, RING.keys // 16)
        by_column = (value.data_ptr(), torch.uint8, (slots, heads * size), (slots,))
        maps = b"".join(
            [
                encoded_map(*keys, (64, *order), 64),
                encoded_map(*keys, (16, *order), 16),
                encoded_map(*by_column, (RING.keys, size), RING.keys),
            ]
        )
        sms = torch.cuda.get_device_properties(qkv.device).multi_processor_count
        blocks, scale = sms // RING.cluster * RING.cluster, struct.pack("f", 1 / VALUE_SCALE)
        table = values["attention_long_items"]
        for part in launches(qkv):
            self.attend.launch((blocks, 1, 1), qkv, qk, tokens, table, maps, heads, *part, scale)


@cache
def long_kernels(device: torch.device, dtype: torch.dtype, size: int) -> HopperLongAttention | None:
    """None, logged once, if they cannot be used. Cached, because they take seconds to compile."""
    element = ELEMENTS[dtype]
    try:
        with torch.cuda.device(device):
            prepare = [
                cuda.load(
                    cuda.compiled(inputs_source(element, size, rotary)),
                    "prepare",
                    SLOTS * size // 8,
                    0,
                )
                for rotary in (False, True)
            ]
            image, threads = cuda.compiled(source(element, size)), 128 * (RING.groups + 1)
            attend = cuda.load(image, "attend", threads, shared_bytes(size))
            return HopperLongAttention(prepare, attend, size)
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("attention runs in 16 bits: the FP8 kernel is not available: %s", error)
        return None


def shared_bytes(size: int) -> int:
    """Bytes of the stages of keys and values, and of the constants that pad keys. Up to 1023 are
    for alignment."""
    rest = 16 if size > 64 else 0
    return 1024 + RING.kept_patches * (size + 8 + 64 + rest) + RING.keys * 16


def source(element: str, size: int) -> str:
    defined = {
        "SIZE": size,
        "GROUPS": RING.groups,
        "KEYS": RING.keys,
        "STAGES": RING.stages,
        "CLUSTER": RING.cluster,
        "SHARES": "false",
        "SIDE": 0,
        "FLUSH": FLUSH,
        "HEADROOM": f"{HEADROOM!r}f",
    }
    return cuda.source(
        element,
        defined,
        cuda.wgmma("multiply_qk", "e4m3", RING.keys),
        cuda.wgmma("multiply_pv", "e4m3", size + 8),
        FOLDER / "attention_items.cu",
        FOLDER / "attention_fp8.cu",
    )


def inputs_source(element: str, size: int, rotary: bool) -> str:
    defined = {
        "SIZE": size,
        "STAGES": RING.stages,
        "ROTARY": int(rotary),
        "QK_SCALE": f"{query_scale(size)!r}f",
        "V_SCALE": f"{VALUE_SCALE!r}f",
    }
    return cuda.source(element, defined, FOLDER / "attention_fp8_inputs.cu")
