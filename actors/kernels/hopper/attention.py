"""Attention within segments on compute capability 9.0: attention.cu over a table of work items."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.kernels import LOG2_E, Shapes, Values
from actors.kernels.attention_fp8 import LongAttention, rotate_given
from actors.kernels.break_points import break_point, in_use
from actors.kernels.hopper import cuda
from actors.kernels.hopper.cuda import ELEMENTS, LoadedKernel, tensor_map

GROUPS = 3  # consumer warpgroups, each with 64 queries at a time
TILE_ROWS, STRIP_ROWS = 64 * GROUPS, 64  # queries of a tile and of a strip of the table
LANE_BYTES = 128  # a swizzled row in shared memory: 64 columns
PADDED = (72,)  # head sizes with columns to spare in the GEMM of the scores; see attention.cu
HEADROOM = {"bf16": 32.0, "f16": 4.0}  # weights start below 2 ** -HEADROOM and may grow to 2
LAUNCH_OPERATIONS = 1.35e12
"""Floating-point operations of a launch where break points are in use, at most: 2.5 ms at 540
TFLOP/s."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ring:
    """The circular buffer of keys and values: as large as registers and shared memory allow."""

    keys: int  # in each stage
    stages: int
    from_patches: int = 0  # the smallest budget that uses it
    cluster: int = 1  # blocks (CTAs) that share keys and values: each copies a part to all of them
    groups: int = GROUPS
    side: int = 0  # of views with relative positions; see VIEW_RINGS

    @property
    def kept_patches(self) -> int:
        """The longest segment whose keys and values fit into the ring together."""
        return self.keys * self.stages


RINGS = {
    64: (Ring(80, 9), Ring(96, 8, from_patches=4096)),
    72: (Ring(80, 6), Ring(96, 5, from_patches=8193, cluster=2)),
    80: (Ring(80, 6), Ring(80, 6, from_patches=8193, cluster=2)),
}
"""The rings of each head size that the kernel is built for, small budgets first. Each has a kernel.

80 keys divide the 400 patches of a common image. Long segments are faster with 96 keys at head
sizes 64 and 72, and with clusters at 72 and 80.
"""

VIEW_RINGS = {64: Ring(64, 12, side=64), 40: Ring(80, 9, side=40)}
"""The ring for square views of this many patches per side, whose relative positions are added to
the scores. Head size 64. A stage holds whole rows of a view; see Terms in attention.cu. There is
none for 48 patches per side, the crops of DeepSeek-OCR 2."""

NULL = bytes(8)


class HopperAttention:
    """See Attention. Compute capability 9.0, bfloat16 and float16, head sizes 64, 72 and 80."""

    name = "hopper"

    def __init__(
        self, kernels: Sequence[LoadedKernel], size: int, long: LongAttention | None = None
    ) -> None:
        """`kernels`: those of kernels_for for the device, dtype and head size. `long`: for layers
        whose long segments run in FP8, if there are any."""
        self.forms = list(zip(RINGS[size], kernels, strict=True))
        self.long = long

    def inputs(self, patches: int, segments: int) -> Shapes:
        """The table, int32: a first row with the count of entries, then one row per entry. For FP8,
        also a table of the short segments, and the inputs of `long`."""
        table = ((1 + patches // TILE_ROWS + segments, 4), torch.int32)
        long = self.long.inputs(patches) if self.long else {}
        return {
            "attention_items": table,
            **({"attention_short_items": table} if long else {}),
            **long,
        }

    def metadata(self, lengths: Sequence[int], patches: int, segments: int) -> dict[str, Tensor]:
        """Items of the longest segment come first, because they take longest."""
        inputs, (ring, _) = self.inputs(patches, segments), self.form(patches)
        (rows, _), _ = inputs["attention_items"]
        tables = {"attention_items": item_table(lengths, ring, rows)}
        if self.long and "attention_short_items" in inputs:
            fewest = self.long.fewest
            short = item_table(lengths, ring, rows, [length < fewest for length in lengths])
            tables["attention_short_items"] = short
            tables |= self.long.metadata(lengths, patches)
        return tables

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """Overwrites q with the result. Rows that no item of the table covers keep their q."""
        form, table = self.form(len(qkv)), values["attention_items"]
        for part in launches(qkv):
            attend_(qkv, table, *form, part)
        return queries(qkv)

    def fp8(self, qkv: Tensor, values: Values, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        if self.long is None or "attention_short_items" not in values:
            rotate_given(qkv, cos, sin)
            return self(qkv, values)
        self.long(qkv, values, cos, sin)
        return self(qkv, {"attention_items": values["attention_short_items"]})

    def form(self, patches: int) -> tuple[Ring, LoadedKernel]:
        return next(form for form in reversed(self.forms) if patches >= form[0].from_patches)


def attend_(
    qkv: Tensor,
    table: Tensor,
    ring: Ring,
    kernel: LoadedKernel,
    part: tuple[int, int] = (0, 1),
    terms: Tensor | bytes = NULL,
) -> None:
    """One of the launches over qkv. `part`: see launches."""
    rows, _, heads, size = qkv.shape
    flat, rest, keys = qkv.view(rows, -1), max(size - 64, 8), ring.keys // ring.cluster
    maps = b"".join(
        [
            tensor_map(flat, (keys, 64)),
            tensor_map(flat, (STRIP_ROWS, 64)),
            tensor_map(flat, (keys, rest)),
            tensor_map(flat, (keys, rest), 2 * rest),
            tensor_map(flat, (STRIP_ROWS, rest), 2 * rest),
        ]
    )
    sms = torch.cuda.get_device_properties(qkv.device).multi_processor_count
    blocks = (sms // ring.cluster * ring.cluster, 1, 1)
    kernel.launch(blocks, qkv, table, maps, heads, *part, terms)


def queries(qkv: Tensor) -> Tensor:
    """q of [patches, 3, heads, head size] as [patches, heads x head size], without a copy."""
    return qkv[:, 0].flatten(1)


def attend_views_(qkv: Tensor, terms: Tensor, side: int, kernel: LoadedKernel) -> Tensor:
    """Attention within square views, of qkv [views x side ** 2, 3, heads, 64], for a side of
    VIEW_RINGS. Overwrites q and returns it, as HopperAttention does.

    `terms` [views x side ** 2, heads, 2, side]: what is added to the scores of a query, times
    log2(e): for each row of keys, and for each column.
    """
    table = view_table(qkv.device, len(qkv) // side**2, side)
    attend_(qkv, table, VIEW_RINGS[side], kernel, terms=terms)
    return queries(qkv)


@cache
def view_table(device: torch.device, views: int, side: int) -> Tensor:
    """Cached, because a graph that is being captured cannot copy it to the device."""
    entries = views * math.ceil(side**2 / TILE_ROWS)
    return item_table([side**2] * views, VIEW_RINGS[side], 1 + entries).to(device)


def launches(qkv: Tensor) -> Iterator[tuple[int, int]]:
    """The index and the count of the launches over qkv.

    One, unless break points are in use and it would take over 2.5 ms if all rows were one segment.
    Then there are break points before, between and after the launches.
    """
    rows, _, heads, size = qkv.shape
    operations = 4 * rows**2 * heads * size
    count = math.ceil(operations / LAUNCH_OPERATIONS) if in_use() else 1
    for index in range(count):
        if count > 1:
            break_point()
        yield index, count
    if count > 1:
        break_point()


def item_table(
    lengths: Sequence[int], ring: Ring, size: int, chosen: Sequence[bool] = ()
) -> Tensor:
    """int32 [size, 4]: (number of entries, strips, 0, 0), then the entries. Unused rows are zero.

    `strips` is 0, unless only one segment has entries and the ring does not hold it at once.
    `chosen`: which segments get entries; empty: all.

    A segment that the ring holds at once has one entry; a longer one has an entry per tile of a
    cluster. An entry is its segment's start and end, the index of that segment's first entry, and
    65536 x the most strips of an entry + the number of the segment's entries.
    """
    length = np.asarray(lengths, dtype=np.int32)
    end = length.cumsum(dtype=np.int32)
    longest_first = np.argsort(-length, kind="stable")
    if chosen:
        longest_first = longest_first[np.asarray(chosen)[longest_first]]
    length, end = length[longest_first], end[longest_first]
    strips = -(-length // STRIP_ROWS)
    long, tile = length > ring.kept_patches, ring.groups * ring.cluster
    most = np.where(long, tile, np.maximum(strips, 1)).astype(np.int32)
    counts = -(-strips // most)
    first = counts.cumsum(dtype=np.int32) - counts
    segments = np.stack([end - length, end, first, most << 16 | counts], axis=1)
    table = np.zeros((size, 4), dtype=np.int32)
    table[0, 0] = counts.sum()
    if len(length) == 1 and long[0]:
        table[0, 1] = strips[0]
    table[1 : 1 + counts.sum()] = segments.repeat(counts, axis=0)
    return torch.from_numpy(table)


@cache
def kernels_for(
    device: torch.device, dtype: torch.dtype, size: int, side: int = 0
) -> tuple[LoadedKernel, ...] | None:
    """A kernel for each ring of this head size, or for views of this side. None, logged once, if
    they cannot be used.

    Each takes about a second to compile, so they are cached.
    """
    rings = RINGS.get(size, ()) if not side else (VIEW_RINGS[side],)
    if not rings or not torch.cuda.is_available():
        return None
    if not cuda.runs_on(torch.cuda.get_device_capability(device)):
        return None
    try:
        with torch.cuda.device(device):
            return tuple(build(ELEMENTS[dtype], size, ring) for ring in rings)
    except (ImportError, OSError, RuntimeError) as error:
        log.warning(
            "attention uses the slower Triton kernel: the Hopper kernel is not available: %s",
            error,
        )
        return None


def build(element: str, size: int, ring: Ring) -> LoadedKernel:
    cubin, threads = cuda.compiled(source(element, size, ring)), 128 * (GROUPS + 1)
    return cuda.load(cubin, "attend", threads, shared_bytes(size, ring))


def shared_bytes(size: int, ring: Ring) -> int:
    """Bytes of the ring and the queries; see attention_loads.cu. Up to 1023 are for alignment."""
    kept, queries, rest = ring.kept_patches, GROUPS * STRIP_ROWS, (size - 64) // 8
    lots = (3 if rest else 2) * kept + queries
    ones = 0 if rest else 16
    units = ring.keys if size in PADDED else 0
    return 1024 + (lots + ones) * LANE_BYTES + ((kept + queries) * rest + units) * 16


def source(element: str, size: int, ring: Ring) -> str:
    defined = {
        "SIZE": size,
        "GROUPS": GROUPS,
        "KEYS": ring.keys,
        "STAGES": ring.stages,
        "CLUSTER": ring.cluster,
        "SHARES": "true",
        "SIDE": ring.side,
        "PAD": int(size in PADDED and element == "bf16"),
        "HEADROOM": f"{HEADROOM[element]!r}f",
        "SCALE": f"{size**-0.5 * LOG2_E!r}f",
    }
    folder = Path(__file__).parent
    return cuda.source(
        element,
        defined,
        cuda.wgmma("multiply_qk", element, ring.keys),
        cuda.wgmma("multiply_pv", element, size + 8, transposed=True),
        folder / "attention_items.cu",
        folder / "attention_loads.cu",
        folder / "attention.cu",
    )
