"""Puts encoded rows where answers and caches refer to them: row memory, Ray's shared memory or the
device. Also converts rows between tensors and bytes, and between dtypes."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from actors.engine.video_chunks import fp8_rows_of, rows_of
from actors.kernels.gemm.fp8 import Fp8Rows, quantised
from actors.rows.lending import Lender
from actors.spec.model_spec import ModelSpec
from actors.spec.video import group_tokens, retention_mask
from actors.store.kept import EmbeddingCache, Key
from actors.store.nixl import DeviceMemory
from actors.store.shared_cache import SharedCache
from actors.store.shared_memory import (
    INLINE_BYTES,
    MOST_TOGETHER_BYTES,
    here,
    share,
    share_together,
)
from actors.types import (
    DTYPE_BYTES,
    Bytes,
    Dtype,
    Embedding,
    Item,
    Media,
    ReceivedBytes,
    SharedBytes,
    Timings,
)

WRITERS = 4  # threads that copy rows at the same time

Rows = Tensor | Fp8Rows


class RowWriter:
    """Turns the rows of finished items into embeddings. `write` may be called from any thread."""

    def __init__(
        self,
        spec: ModelSpec,
        cache: EmbeddingCache,
        memory: DeviceMemory | None,
        largest_kept_bytes: int,
        replica: str = "",
        shared: SharedCache | None = None,
        lender: Lender | None = None,
    ) -> None:
        """`memory`: where rows may stay on the device. `largest_kept_bytes`: the largest object
        that references can keep. `lender`: of the row memory."""
        self.spec = spec
        self.fingerprint = spec.fingerprint  # stored, because it digests the whole configuration
        self.cache = cache
        self.shared = shared
        self.shared_fingerprint = spec.nameless.fingerprint
        self.memory = memory
        self.lender = lender
        self.replica = replica
        # An object that several items share is kept whole as long as one of them is kept.
        most = MOST_TOGETHER_BYTES
        self.together_bytes = min(most, largest_kept_bytes) if largest_kept_bytes > 0 else most
        self.threads = ThreadPoolExecutor(WRITERS, "write")

    def close(self) -> None:
        self.threads.shutdown()
        if self.shared:
            self.shared.close()

    def key(self, media: Media) -> Key:
        return (self.fingerprint, *media.identity)

    def shared_key(self, media: Media) -> Key:
        """The key in the shared cache, where the same weights may have another name."""
        return (self.shared_fingerprint, *media.identity)

    @property
    def caches(self) -> bool:
        """Whether rows are cached, on the host and in the model's dtype."""
        return bool(self.cache.max_bytes or self.shared)

    def stays_on_device(self, media: Media, dtype: Dtype) -> bool:
        """Whether an item's rows are left on the device. An `evs_rate` needs them on the host."""
        if self.memory is None or not media.on_device or media.evs_rate or dtype == "float8_e4m3":
            return False
        return media.plan.tokens * self.spec.width * DTYPE_BYTES[dtype] > INLINE_BYTES

    def leaves_in_fp8(self, media: Media, dtype: Dtype) -> bool:
        """Whether the device quantises an item's rows, so that half as many bytes are read back.
        Caches and an `evs_rate` need rows in the model's own dtype."""
        return dtype == "float8_e4m3" and not self.caches and not media.evs_rate

    def in_place(self, media: Media, item: Item, dtype: Dtype) -> Embedding | None:
        """The embedding of an item whose rows can be lent from where they were read back to. None:
        they are elsewhere, or must be converted or pruned."""
        rows = item.rows
        whole = isinstance(rows, Fp8Rows) or (isinstance(rows, Tensor) and dtype == self.spec.dtype)
        if not whole or item.on_device or self.lender is None or media.evs_rate:
            return None
        data, scales = as_bytes(rows, dtype)
        if not self.lender.holds(data):
            return None
        return self.embedding(item, data, dtype, item.plan.tokens, scales=scales)

    def write(
        self, dtype: Dtype, done: Sequence[tuple[Media, Item]], *, lend: bool = False
    ) -> list[Embedding]:
        """Writes the rows of encoded items; returns their embeddings in order. `lend`: into row
        memory, if there is room. Raises what Ray's object store raises."""
        on_device = [self._left_on_device(media, item, dtype) for media, item in done]
        rest = [pair for pair, left in zip(done, on_device, strict=True) if left is None]
        on_host = iter(self._on_host(dtype, rest, lend=lend))
        return [left or next(on_host) for left in on_device]

    def _left_on_device(self, media: Media, item: Item, dtype: Dtype) -> Embedding | None:
        if self.memory is None or not (media.on_device and item.on_device):
            return None
        rows = rows_of(item)
        data = self.memory.put(rows, getattr(torch, dtype))
        if data is None:
            return None
        if self.caches:
            self._cached(media, item, on_host(rows), None)
        return self.embedding(item, data, dtype, rows.shape[0])

    async def from_shared_cache(
        self, media: Media, dtype: Dtype, tokens: int | None
    ) -> Embedding | None:
        """The embedding of an item that any replica has encoded; None if there is none."""
        if not self.shared or not (hit := await self.shared.get(self.shared_key(media), tokens)):
            return None
        hit = replace(hit, replica=self.replica)
        if hit.size_bytes > INLINE_BYTES:
            rows: Any = hit.data
            hit = replace(hit, data=await asyncio.to_thread(share, rows))
        self.cache.put(self.key(media), hit)
        return await converted(hit, dtype)

    def _cached(
        self, media: Media, item: Item, rows: Rows, mask: npt.NDArray[np.bool_] | None
    ) -> Bytes | SharedBytes:
        """Puts rows into the configured caches. Returns the data that the replica's own cache has.
        It is in a separate object, so that evicting it frees its memory."""
        data, _ = as_bytes(rows, self.spec.dtype)
        made = self.embedding(item, data, self.spec.dtype, len(rows), mask)
        if self.shared:
            self.shared.put(self.shared_key(media), made)
        if not self.cache.max_bytes:
            return data
        own = share(data)
        self.cache.put(self.key(media), replace(made, data=own))
        return own

    def _on_host(
        self, dtype: Dtype, done: Sequence[tuple[Media, Item]], *, lend: bool
    ) -> list[Embedding]:
        rows = [self._pruned(media, item) for media, item in done]
        data: list[Bytes | SharedBytes] = []
        scales = [b""] * len(rows)
        if self.caches:
            data = [self._cached(*pair, *kept) for pair, kept in zip(done, rows, strict=True)]
        if not self.cache.max_bytes or dtype != self.spec.dtype:
            made = [as_bytes(kept, dtype) for kept, _ in rows]
            values = [values for values, _ in made]
            lendable = lend and self.lender
            data = self._lendable(lendable, values) if lendable else self._shared(values)
            scales = [each for _, each in made]
        return [
            self.embedding(item, one, dtype, len(kept), mask, each)
            for (_, item), one, (kept, mask), each in zip(done, data, rows, scales, strict=True)
        ]

    def _shared(self, values: Sequence[Bytes]) -> list[Bytes | SharedBytes]:
        return share_together(values, self.together_bytes)

    def _lendable(self, lender: Lender, values: Sequence[Bytes]) -> list[Bytes | SharedBytes]:
        """The values in row memory, or in Ray's shared memory if that is full."""
        found: list[Bytes | SharedBytes] = []
        for one in values:
            if one.nbytes <= INLINE_BYTES or lender.holds(one):
                found.append(one)
            elif (block := lender.block(one.nbytes)) is not None:
                block[:] = one
                found.append(block)
            else:
                found += self._shared([one])
        return found

    def embedding(
        self,
        item: Item,
        data: Bytes | SharedBytes,
        dtype: Dtype,
        tokens: int,
        mask: npt.NDArray[np.bool_] | None = None,
        scales: bytes = b"",
    ) -> Embedding:
        """`mask`: which rows an `evs_rate` keeps."""
        kept = item.plan.kept_rows if mask is None else mask.nonzero()[0]
        waited = item.decode_queue_seconds + item.queue_seconds
        return Embedding(
            data=data,
            dtype=dtype,
            shape=(tokens, self.spec.width),
            grid_thw=item.plan.grid_thw,
            source=item.source,
            timings=Timings(waited, item.preprocess_seconds, item.encode_seconds),
            replica=self.replica,
            frame_tokens=() if mask is None else group_tokens(mask, item.plan),
            kept_rows=tuple(kept.tolist()),
            scales=scales,
        )

    def _pruned(self, media: Media, item: Item) -> tuple[Rows, npt.NDArray[np.bool_] | None]:
        """The rows that `evs_rate` keeps, on the host, and their mask."""
        if item.in_fp8:
            return fp8_rows_of(item), None
        rows = on_host(rows_of(item))
        if not media.evs_rate:
            return rows, None
        mask = retention_mask(rows.float().numpy(), media.plan, media.evs_rate)
        return rows[torch.from_numpy(mask)], mask


class RowBatch:
    """The rows of one call. Those that leave the engine together are written together, because an
    object in Ray's shared memory is expensive (share_together)."""

    def __init__(self, writer: RowWriter, dtype: Dtype, *, lend: bool = False) -> None:
        """`lend`: see RowWriter.write."""
        self._writer = writer
        self._dtype = dtype
        self._lend = lend
        self._lock = Lock()
        self._waiting: list[tuple[Media, Item]] = []
        self._next_write: asyncio.Future[dict[int, Embedding]] | None = None

    async def write(self, media: Media, item: Item) -> Embedding:
        with self._lock:
            self._waiting.append((media, item))
            if self._next_write is None:
                loop = asyncio.get_running_loop()
                self._next_write = loop.run_in_executor(self._writer.threads, self._write)
            written = self._next_write
        # Shielded, because other items wait for the same write.
        try:
            return (await asyncio.shield(written))[id(item)]
        finally:
            del written  # breaks a cycle with the traceback of a failure, which would keep the rows

    def _write(self) -> dict[int, Embedding]:
        """Writes everything that has arrived by now. Runs in a thread."""
        with self._lock:
            done, self._waiting = self._waiting, []
            self._next_write = None
        embeddings = self._writer.write(self._dtype, done, lend=self._lend)
        return {id(item): made for (_, item), made in zip(done, embeddings, strict=True)}


def tensor(embedding: Embedding) -> Tensor:
    """The rows [tokens, width], as a view of the embedding's memory, which must not be written to.
    float8_e4m3 becomes float32, in separate memory.

    The data must be in this process already (shared_memory.here, router.here.encode_here).
    """
    if isinstance(embedding.data, ReceivedBytes):
        there: Tensor = embedding.data.tensor
        return there.view(getattr(torch, embedding.dtype)).view(embedding.shape)
    assert not isinstance(embedding.data, SharedBytes), "read it first: shared_memory.here"
    with warnings.catch_warnings():
        # Shared memory is read-only, which torch cannot express.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        flat = torch.frombuffer(embedding.data, dtype=torch_dtype(embedding.dtype))
        if embedding.dtype == "float8_e4m3":
            scales = torch.frombuffer(embedding.scales, dtype=torch.float32)
            return Fp8Rows(flat.view(embedding.shape), scales).float()
    return flat.view(embedding.shape)


def on_host(rows: Tensor) -> Tensor:
    """The rows, copied through pinned memory if they are on a GPU."""
    if not rows.is_cuda:
        return rows
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    found: torch.dtype = getattr(torch, "float8_e4m3fn" if dtype == "float8_e4m3" else dtype)
    return found


def as_bytes(rows: Rows, dtype: Dtype) -> tuple[Bytes, bytes]:
    """The bytes of rows in a dtype (a view if the rows already have it), and of their scales."""
    scales = b""
    if dtype == "float8_e4m3":
        made = rows if isinstance(rows, Fp8Rows) else quantised(rows)
        rows, scales = made.values, made.scales.numpy().tobytes()
    assert isinstance(rows, Tensor), "rows in FP8 that were asked for in another dtype: a bug."
    data: Bytes = rows.to(torch_dtype(dtype)).view(torch.uint8).numpy().reshape(-1)
    return data, scales


async def converted(embedding: Embedding, dtype: Dtype) -> Embedding:
    """The embedding in another dtype, in shared memory if it is large. Raises EmbeddingLost."""
    if embedding.dtype == dtype:
        return embedding
    rows = tensor(await here(embedding))

    def convert() -> Embedding:
        data, scales = as_bytes(rows, dtype)
        return replace(embedding, data=share(data), dtype=dtype, scales=scales)

    return convert() if rows.nbytes <= INLINE_BYTES else await asyncio.to_thread(convert)
