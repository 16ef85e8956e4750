"""Attention of long segments in FP8 on compute capability 9.0: see ../attention_fp8.py.

Two kernels: attention_fp8_inputs.cu rotates and quantises, attention_fp8.cu attends.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.kernels import Shapes, Values
from actors.kernels.attention_fp8 import FEWEST_KEYS, VALUE_SCALE, is_long, query_scale
from actors.kernels.hopper import cuda
from actors.kernels.hopper.attention import STRIP_ROWS, Ring, item_table
from actors.kernels.hopper.cuda import LoadedKernel, encoded_map

RING = Ring(128, 8, cluster=2, groups=2)
TILE_ROWS = STRIP_ROWS * RING.groups * RING.cluster  # queries of an entry of the table
FLUSH = 4  # blocks of keys whose sums the tensor cores keep
TOKENS = 32  # of a block of the kernel that quantises
HEADROOM = 1.0  # octaves between a row's largest weight and 448, when its reference is chosen
FOLDER = Path(__file__).parent

log = logging.getLogger(__name__)


class HopperLongAttention:
    """See LongAttention. For one head size."""

    def __init__(self, prepare: Sequence[LoadedKernel], attend: LoadedKernel) -> None:
        """`prepare`: without rotary embedding, and with it."""
        self.prepare = prepare
        self.attend = attend

    def inputs(self, patches: int) -> Shapes:
        """The table of the long segments, and for each patch whether it is in one."""
        if not is_long(patches):
            return {}
        items = 1 + patches // TILE_ROWS + patches // FEWEST_KEYS
        return {
            "attention_long_items": ((items, 4), torch.int32),
            "attention_long": ((patches + -patches % 4,), torch.uint8),
        }

    def metadata(self, lengths: Sequence[int], patches: int) -> dict[str, Tensor]:
        shapes = self.inputs(patches)
        if not shapes:
            return {}
        long = np.repeat([is_long(length) for length in lengths], lengths)
        (rows,), _ = shapes["attention_long"]
        chosen = np.zeros(rows, dtype=np.uint8)
        chosen[: len(long)] = long
        (items, _), _ = shapes["attention_long_items"]
        return {
            "attention_long_items": item_table(lengths, RING, items, is_long),
            "attention_long": torch.from_numpy(chosen),
        }

    def __call__(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> None:
        rows, _, heads, size = qkv.shape
        pitch, columns = 80 if size > 64 else 64, rows + RING.keys + -rows % 16
        # Blocks of keys reach beyond the end: what lies there is masked.
        qk = torch.empty(rows + RING.keys, 2, heads, pitch, dtype=torch.uint8, device=qkv.device)
        value = torch.empty(heads, size, columns, dtype=torch.uint8, device=qkv.device)
        table, chosen = values["attention_long_items"], values["attention_long"]
        self.prepare[cos is not None].launch(
            (-(-rows // TOKENS), 1, 1),
            qkv,
            qkv if cos is None else cos,
            qkv if sin is None else sin,
            chosen,
            qk,
            value,
            rows,
            heads,
            columns,
        )
        row = 2 * heads * pitch
        # Keys 4a + 2b + c of 16 arrive as rows 8b + 2a + c: see attention_fp8.cu.
        sizes, steps = (row, rows, 4, 2, RING.keys // 16), (row, 4 * row, 2 * row, 16 * row)
        order, kind = (2, 4, 2, RING.keys // 16), torch.uint8
        flat = (
            value.data_ptr(),
            kind,
            (columns, heads * size),
            (columns,),
            (RING.keys, size),
            RING.keys,
        )
        maps = b"".join(
            [
                encoded_map(qk.data_ptr(), kind, sizes, steps, (64, *order), 64),
                encoded_map(qk.data_ptr(), kind, sizes, steps, (16, *order), 16),
                encoded_map(*flat),
            ]
        )
        sms = torch.cuda.get_device_properties(qkv.device).multi_processor_count
        blocks, scale = sms // RING.cluster * RING.cluster, struct.pack("f", 1 / VALUE_SCALE)
        self.attend.launch((blocks, 1, 1), qkv, qk, table, maps, heads, scale)


@cache
def long_kernels(device: torch.device, size: int) -> HopperLongAttention | None:
    """None, logged once, if they cannot be used. Cached, because they take seconds to compile."""
    try:
        with torch.cuda.device(device):
            prepare = [
                cuda.load(
                    cuda.compiled(inputs_source(size, rotary)), "prepare", TOKENS * size // 8, 0
                )
                for rotary in (False, True)
            ]
            image, threads = cuda.compiled(source(size)), 128 * (RING.groups + 1)
            return HopperLongAttention(
                prepare, cuda.load(image, "attend", threads, shared_bytes(size))
            )
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("attention in 16 bits: that in FP8 cannot be used: %s", error)
        return None


def shared_bytes(size: int) -> int:
    """Stages of keys and values, and the constants that pad keys; up to 1023 are for alignment."""
    rest = 16 if size > 64 else 0
    return 1024 + RING.kept_patches * (size + 8 + 64 + rest) + RING.keys * 16


def source(size: int) -> str:
    defined = {
        "SIZE": size,
        "GROUPS": RING.groups,
        "KEYS": RING.keys,
        "STAGES": RING.stages,
        "CLUSTER": RING.cluster,
        "SHARES": "false",
        "FLUSH": FLUSH,
        "HEADROOM": f"{HEADROOM!r}f",
        **dict.fromkeys(("SPILL", "PERMUTED", "DUMP", "FIRST", "NOSOFT"), 0),
        "ORDERED": 1,
    }
    return cuda.source(
        "bf16",
        defined,
        cuda.wgmma("multiply_qk", "e4m3", RING.keys),
        cuda.wgmma("multiply_pv", "e4m3", size + 8),
        FOLDER / "attention_items.cu",
        FOLDER / "attention_fp8.cu",
    )


def inputs_source(size: int, rotary: bool) -> str:
    defined = {
        "SIZE": size,
        "STAGES": RING.stages,
        "ROTARY": int(rotary),
        "QK_SCALE": f"{query_scale(size)!r}f",
        "V_SCALE": f"{VALUE_SCALE!r}f",
    }
    return cuda.source("bf16", defined, FOLDER / "attention_fp8_inputs.cu")
