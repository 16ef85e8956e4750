"""Rows that left the engine -> what answers and the cache refer to: shared memory, or the device.

In the threads of stages.py; what is written behind its answer, in one here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import BoundedSemaphore

import torch
from torch import Tensor

from actors.spec.evs import group_tokens, retention_mask
from actors.spec.model_spec import ModelSpec
from actors.store.cache import EmbeddingCache, Entry, Key
from actors.store.entries import as_bytes, shared_rows
from actors.store.nixl import DeviceMemory
from actors.store.shared_memory import INLINE_BYTES, MOST_TOGETHER_BYTES, share_together
from actors.types import DTYPE_BYTES, Dtype, Embedding, Media, SharedBytes

MOST_BEHIND_BYTES = 16 * 2**20
"""Of rows whose answers do not wait for the copy. What they land in is held meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """In the place of Ray's reference, where an item's rows are copied behind its answer. For the
    process that does it, as long as it keeps them."""

    entry: Future[Entry]


async def written(embedding: Embedding) -> Embedding:
    """The same with Ray's reference. Raises what copying its rows raised."""
    data = embedding.data
    if not isinstance(data, SharedBytes) or not isinstance(data.object_ref, Writing):
        return embedding
    writing = data.object_ref.entry
    # Shielded: who stops waiting for it does not undo it.
    entry = await asyncio.shield(asyncio.wrap_future(writing))
    return replace(embedding, data=entry.data)


class Sharing:
    """Of one actor."""

    def __init__(
        self,
        spec: ModelSpec,
        cache: EmbeddingCache,
        memory: DeviceMemory | None,
        largest_kept_bytes: int,
    ) -> None:
        """`memory`: where rows may stay. `largest_kept_bytes`: of an object that can be kept."""
        self.spec = spec
        self.fingerprint = spec.fingerprint  # once: it is a digest of the whole configuration
        self.cache = cache
        self.memory = memory
        # What is shared together is kept together: more could be refused where each alone is not.
        most = MOST_TOGETHER_BYTES
        self.together_bytes = min(most, largest_kept_bytes) if largest_kept_bytes > 0 else most
        self._writer = ThreadPoolExecutor(1, "write")
        self._idle = BoundedSemaphore()

    def close(self) -> None:
        """When all is written."""
        self._writer.shutdown()

    def key(self, media: Media) -> Key:
        """Of its rows in the cache."""
        return (self.fingerprint, *media.identity)

    def stays(self, media: Media, dtype: Dtype) -> bool:
        """Whether its rows are left on the device: those that are pruned are on the host first."""
        if self.memory is None or not media.on_device or media.evs_rate:
            return False
        return media.plan.tokens * self.spec.width * DTYPE_BYTES[dtype] > INLINE_BYTES

    def share(self, dtype: Dtype, done: Sequence[tuple[Media, Tensor]]) -> list[Entry]:
        """Rows that left the engine, in the dtype that was asked for, to be referred to."""
        staying = [self._left(media, rows, dtype) for media, rows in done]
        rest = [
            (media, rows.cpu())
            for (media, rows), entry in zip(done, staying, strict=True)
            if entry is None
        ]
        shared = iter(self._shared(dtype, rest))
        return [entry or next(shared) for entry in staying]

    def share_behind(self, dtype: Dtype, done: Sequence[tuple[Media, Tensor]]) -> Sequence[Entry]:
        """The same for rows that are kept: those of an item alone are written behind its answer.

        Ray takes a millisecond for an object, and who fetches it comes later. One at a time: under
        load answers wait, or memory would fill with what is not written.
        """
        media, rows = done[0] if len(done) == 1 else (None, None)
        if rows is None or media is None or media.evs_rate or media.on_device:
            return self.share(dtype, done)
        size = rows.numel() * DTYPE_BYTES[dtype]
        if not INLINE_BYTES < size <= MOST_BEHIND_BYTES or not self._idle.acquire(blocking=False):
            return self.share(dtype, done)
        entry = self._writer.submit(self._write, dtype, done)
        data = SharedBytes(Writing(entry), size)
        return [Entry(data, dtype, (rows.shape[0], rows.shape[1]))]

    def _write(self, dtype: Dtype, done: Sequence[tuple[Media, Tensor]]) -> Entry:
        try:
            return self.share(dtype, done)[0]
        finally:
            self._idle.release()

    def _left(self, media: Media, rows: Tensor, dtype: Dtype) -> Entry | None:
        """Rows that stay on the device. None: they do not, or there is no room for them now."""
        if self.memory is None or not media.on_device:
            return None
        data = self.memory.put(rows, getattr(torch, dtype))
        if data is None:
            return None
        if self.cache.max_bytes:  # which keeps rows of its own, on the host
            self.cache.put(self.key(media), shared_rows(rows.cpu(), self.spec.dtype, ()))
        return Entry(data, dtype, (rows.shape[0], rows.shape[1]))

    def _shared(self, dtype: Dtype, done: Sequence[tuple[Media, Tensor]]) -> list[Entry]:
        """Rows on the host."""
        kept = [self._pruned(rows, media) if media.evs_rate else (rows, ()) for media, rows in done]
        if not self.cache.max_bytes:
            arrays = [as_bytes(rows, dtype) for rows, _ in kept]
            data = share_together(arrays, self.together_bytes)
            return [
                Entry(one, dtype, (rows.shape[0], rows.shape[1]), frame_tokens)
                for one, (rows, frame_tokens) in zip(data, kept, strict=True)
            ]
        # Each by itself, so that the cache frees what it lets go of.
        entries = []
        for (media, _), (rows, frame_tokens) in zip(done, kept, strict=True):
            entry = shared_rows(rows, self.spec.dtype, frame_tokens)
            self.cache.put(self.key(media), entry)
            same = entry.dtype == dtype
            entries.append(entry if same else shared_rows(rows, dtype, frame_tokens))
        return entries

    def _pruned(self, rows: Tensor, media: Media) -> tuple[Tensor, tuple[int, ...]]:
        """The rows that are left of a video, told apart by their main features; of each group."""
        spec, plan = self.spec, media.plan
        main = rows[:, : spec.width // (1 + spec.deepstack)].float().numpy()
        mask = retention_mask(main, plan, media.evs_rate)
        return rows[torch.from_numpy(mask)], group_tokens(mask, plan)
