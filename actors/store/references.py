"""Embeddings that a replica keeps for a while, each under an id that nobody can guess.

Bounded in time and in bytes: the one fetched longest ago is evicted first. An object in shared
memory counts once, in full, while any of its embeddings is kept. Knows neither Ray nor clocks: time
is an argument, in seconds of any steady clock. Not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from secrets import token_urlsafe

import numpy as np

from actors.errors import TooLarge
from actors.options import ReferenceOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Embedding, Media, SharedBytes

ID_BYTES = 24  # random bytes in an id
OVERHEAD_BYTES = 4096
"""What an entry takes besides its rows, so that many small ones are bounded too."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept embedding and the item it is of; `media` is without its bytes."""

    media: Media
    embedding: Embedding

    @classmethod
    def of(cls, media: Media, embedding: Embedding) -> Kept:
        return cls(replace(media, data=b"", frames=()), embedding)

    @property
    def size_bytes(self) -> int:
        """Memory that it takes if nothing else of its object is kept."""
        data = self.embedding.data
        rows = data.object_bytes if isinstance(data, SharedBytes) else data.nbytes
        return rows + OVERHEAD_BYTES

    @property
    def shared_object(self) -> object | None:
        data = self.embedding.data
        return data.object_ref if isinstance(data, SharedBytes) else None


def reference_id(replica: str, name: str) -> str:
    """The id that clients get for what a replica keeps under a name."""
    return f"{replica}.{name}"


class References:
    """The kept embeddings of one replica."""

    def __init__(self, options: ReferenceOptions, metrics: EncoderMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._ends: OrderedDict[str, float] = OrderedDict()  # ascending: all live equally long
        self._users: Counter[object] = Counter()
        """How many entries each object in shared memory has."""
        self.bytes = 0
        """Memory that all entries together hold."""

    @property
    def largest_bytes(self) -> int:
        """Size of the largest object that can be kept."""
        return self._options.max_bytes - OVERHEAD_BYTES

    def keep(self, kept: Kept, now: float) -> str:
        """Returns its name. Arrays are copied, because they may be views. Raises TooLarge."""
        most = self._options.max_bytes
        if kept.size_bytes > most:
            raise TooLarge(
                f"an embedding of {kept.size_bytes} bytes cannot be kept for a reference: "
                f"references.max_bytes is {most}; raise it, or take the embedding itself"
            )
        self.expire(now)
        while self.bytes + self._added_bytes(kept) > most:
            self._remove(next(iter(self._kept)))
            self._metrics.reference_evictions.inc()
        data = kept.embedding.data
        if isinstance(data, np.ndarray):
            kept = replace(kept, embedding=replace(kept.embedding, data=data.copy()))
        name = token_urlsafe(ID_BYTES)
        self.bytes += self._added_bytes(kept)
        self._users[kept.shared_object] += 1
        self._kept[name] = kept
        self._ends[name] = now + self._options.ttl_seconds
        self._report()
        return name

    def get(self, name: str, now: float) -> Kept | None:
        """The entry of a name; None once its time is over or it was evicted."""
        self.expire(now)
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name]

    def release(self, name: str) -> bool:
        """Drops an entry before its time. False: there is none."""
        if name not in self._kept:
            return False
        self._remove(name)
        return True

    def expire(self, now: float) -> None:
        while self._ends and self._ends[first := next(iter(self._ends))] <= now:
            self._remove(first)

    def _added_bytes(self, kept: Kept) -> int:
        shared = kept.shared_object
        return OVERHEAD_BYTES if shared and self._users[shared] else kept.size_bytes

    def _remove(self, name: str) -> None:
        kept = self._kept.pop(name)
        del self._ends[name]
        self._users[kept.shared_object] -= 1
        if not self._users[kept.shared_object]:
            del self._users[kept.shared_object]
        self.bytes -= self._added_bytes(kept)
        self._report()

    def _report(self) -> None:
        self._metrics.references.set(len(self._kept))
        self._metrics.reference_bytes.set(self.bytes)


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """Stands in a SharedBytes for Ray's reference while the rows are still being written.

    A small item that is kept for an id is answered before its rows are in shared memory: Ray takes
    a millisecond for an object, and whoever fetches the embedding comes later.
    """

    embedding: asyncio.Future[Embedding]


async def written(embedding: Embedding) -> Embedding:
    """The embedding once its rows are written. Raises what writing them raised."""
    data = embedding.data
    if not isinstance(data, SharedBytes) or not isinstance(data.object_ref, PendingWrite):
        return embedding
    pending: Awaitable[Embedding] = data.object_ref.embedding
    return await asyncio.shield(pending)  # a fetch that is cancelled does not undo the write
