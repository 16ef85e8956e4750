"""Embeddings that a replica keeps for a while, each under an id that nobody can guess.

Bounded in time and in bytes: the one fetched longest ago makes room. An object of shared memory is
counted whole, once, as long as one of its embeddings is kept. Knows neither Ray nor clocks: time is
an argument, in seconds of any steady clock. For one thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from secrets import token_urlsafe

import numpy as np

from actors.errors import TooLarge
from actors.options import ReferenceOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Embedding, Media, SharedBytes

ID_BYTES = 24
"""Of randomness."""
OVERHEAD_BYTES = 4096
"""What an entry takes beside its rows, so that many small ones are bounded too."""


@dataclass(frozen=True, slots=True)
class Kept:
    """An embedding and what it is of; `media` is without its bytes."""

    media: Media
    embedding: Embedding

    @classmethod
    def of(cls, media: Media, embedding: Embedding) -> Kept:
        """Without the item's bytes."""
        return cls(replace(media, data=b"", frames=()), embedding)

    @property
    def size_bytes(self) -> int:
        """Of memory, where nothing else of its object is kept."""
        data = self.embedding.data
        rows = data.object_bytes if isinstance(data, SharedBytes) else data.nbytes
        return rows + OVERHEAD_BYTES


def reference_id(replica: str, name: str) -> str:
    """What is known outside of what a replica keeps under a name."""
    return f"{replica}.{name}"


class Held:
    """Bytes of memory that entries keep from being freed."""

    def __init__(self) -> None:
        self.bytes = 0
        self._users: Counter[object] = Counter()
        """Entries of each object of shared memory."""

    def added(self, kept: Kept) -> int:
        """What it would add now."""
        data = kept.embedding.data
        there = isinstance(data, SharedBytes) and data.object_ref in self._users
        return OVERHEAD_BYTES if there else kept.size_bytes

    def add(self, kept: Kept) -> None:
        """It is kept from now on."""
        self.bytes += self.added(kept)
        if isinstance(data := kept.embedding.data, SharedBytes):
            self._users[data.object_ref] += 1

    def remove(self, kept: Kept) -> None:
        """It is no longer."""
        if isinstance(data := kept.embedding.data, SharedBytes):
            self._users[data.object_ref] -= 1
            if not self._users[data.object_ref]:
                del self._users[data.object_ref]
        self.bytes -= self.added(kept)


class References:
    """Those of one replica."""

    def __init__(self, options: ReferenceOptions, metrics: EncoderMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._ends: OrderedDict[str, float] = OrderedDict()  # ascending: all live equally long
        self._held = Held()

    @property
    def bytes(self) -> int:
        """Of memory that all of them keep from being freed."""
        return self._held.bytes

    @property
    def largest_bytes(self) -> int:
        """Of an object that can be kept."""
        return self._options.max_bytes - OVERHEAD_BYTES

    def keep(self, kept: Kept, now: float) -> str:
        """Its id. Arrays are copied: they may be views of something larger. Raises TooLarge."""
        most = self._options.max_bytes
        if kept.size_bytes > most:
            raise TooLarge(
                f"an embedding of {kept.size_bytes} bytes cannot be kept for a reference: "
                f"references.max_bytes is {most}; raise it, or take the embedding itself"
            )
        self.expire(now)
        while self.bytes + self._held.added(kept) > most:
            self._remove(next(iter(self._kept)))
            self._metrics.reference_evictions.inc()
        data = kept.embedding.data
        if isinstance(data, np.ndarray):
            kept = replace(kept, embedding=replace(kept.embedding, data=data.copy()))
        name = token_urlsafe(ID_BYTES)
        self._kept[name] = kept
        self._ends[name] = now + self._options.ttl_seconds
        self._held.add(kept)
        self._report()
        return name

    def get(self, name: str, now: float) -> Kept | None:
        """What is kept under an id, within its time to live."""
        self.expire(now)
        if name not in self._kept:
            return None
        self._kept.move_to_end(name)
        return self._kept[name]

    def release(self, name: str) -> bool:
        """Lets go before the time. False: nothing is kept under this id."""
        if name not in self._kept:
            return False
        self._remove(name)
        return True

    def expire(self, now: float) -> None:
        """Lets go of all whose time is over."""
        while self._ends and self._ends[first := next(iter(self._ends))] <= now:
            self._remove(first)

    def _remove(self, name: str) -> None:
        self._held.remove(self._kept.pop(name))
        del self._ends[name]
        self._report()

    def _report(self) -> None:
        self._metrics.references.set(len(self._kept))
        self._metrics.reference_bytes.set(self.bytes)
