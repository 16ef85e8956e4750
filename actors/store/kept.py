"""The embeddings that a replica keeps: by content, looked up before decoding (EmbeddingCache), and
for clients, each under an unguessable id (References). Knows no Ray."""

from __future__ import annotations

import asyncio
import hmac
import threading
from base64 import urlsafe_b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from secrets import token_bytes, token_urlsafe
from typing import Any

import numpy as np

from actors.errors import Overloaded, TooLarge
from actors.options import ReferenceOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Embedding, Media, SharedBytes

Write = Callable[[], Coroutine[Any, Any, Embedding]]
"""Writes rows to Ray's shared memory."""
Key = tuple[str, ...]  # the model's fingerprint and `Media.identity`

ID_BYTES = 24  # of each half of a name
OVERHEAD_BYTES = 4096  # per entry besides its rows, so that many small ones are bounded too


class EmbeddingCache:
    """An LRU cache. Keeps references to the shared memory of large embeddings, so that the cost of
    a hit does not depend on their size, and copies of small ones. Thread-safe."""

    def __init__(self, max_bytes: int, metrics: EncoderMetrics) -> None:
        self.max_bytes = max_bytes
        self.metrics = metrics
        self.bytes = 0
        self._entries: OrderedDict[Key, Embedding] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Key, tokens: int | None) -> Embedding | None:
        """The embedding under a key. None: there is none with `tokens` rows. `tokens` None: any
        number of rows, for a pruned image."""
        if not self.max_bytes:
            return None
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and tokens not in (None, entry.shape[0]):
                self._remove(key)
                entry = None
            if entry is not None:
                self._entries.move_to_end(key)
        (self.metrics.cache_misses if entry is None else self.metrics.cache_hits).inc()
        return entry

    def put(self, key: Key, entry: Embedding) -> None:
        """Keeps an embedding, unless it alone is larger than the cache. Arrays are copied."""
        size = entry.size_bytes
        if size > self.max_bytes or key in self._entries:
            return
        if isinstance(entry.data, np.ndarray):  # outside the lock, so that lookups do not wait
            data = entry.data.copy()
            data.setflags(write=False)
            entry = replace(entry, data=data)
        with self._lock:
            if key in self._entries:
                return
            while self.bytes + size > self.max_bytes:
                self._remove(next(iter(self._entries)))
                self.metrics.cache_evictions.inc()
            self._entries[key] = entry
            self.bytes += size
            self.metrics.cache_bytes.set(self.bytes)

    def _remove(self, key: Key) -> None:
        self.bytes -= self._entries.pop(key).size_bytes
        self.metrics.cache_bytes.set(self.bytes)


@dataclass(frozen=True, slots=True)
class Kept:
    """A kept embedding and its item. `media` is without its bytes."""

    media: Media
    embedding: Embedding

    @classmethod
    def of(cls, media: Media, embedding: Embedding) -> Kept:
        return cls(media.emptied, embedding)

    @property
    def size_bytes(self) -> int:
        """Memory that it takes if no other embedding in its object is kept."""
        data = self.embedding.data
        rows = data.object_bytes if isinstance(data, SharedBytes) else data.nbytes
        return rows + self.own_bytes

    @property
    def own_bytes(self) -> int:
        """Memory that it takes in addition to its rows."""
        return len(self.embedding.scales) + OVERHEAD_BYTES

    @property
    def shared_object(self) -> object | None:
        data = self.embedding.data
        return data.object_ref if isinstance(data, SharedBytes) else None


def total_bytes(entries: Iterable[Kept]) -> int:
    """Memory that entries take together. An object in shared memory counts once, in full."""
    objects, total = set[object](), 0
    for kept in entries:
        shared = kept.shared_object
        total += kept.own_bytes if shared in objects else kept.size_bytes
        objects |= {shared} - {None}
    return total


@dataclass(frozen=True, slots=True)
class Hold:
    """An entry that a reader holds, and its block if its rows are in a BlockMemory too."""

    name: str
    kept: Kept
    block: Any


def reference_id(replica: str, name: str) -> str:
    """The id that clients get for what a replica keeps under a name."""
    return f"{replica}.{name}"


class References:
    """The embeddings that one replica keeps for clients, bounded in time and in bytes.

    A name is CONTENT.OWNER. All names of equal items have the same first half, which stands for
    whichever of them is kept; language models cache by it. Nobody can guess either half, and only
    the whole name can release an entry.

    The least recently fetched entry is evicted first. Held entries are never evicted. An object in
    shared memory counts once, in full, while any of its embeddings is kept. Times are arguments, in
    seconds of any monotonic clock. Not thread-safe.
    """

    def __init__(self, options: ReferenceOptions, metrics: EncoderMetrics) -> None:
        self._options = options
        self._metrics = metrics
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._ends: OrderedDict[str, float] = OrderedDict()
        """When entries that are not held expire. Ascending, because all live equally long."""
        self._blocks: OrderedDict[str, Any] = OrderedDict()
        self._secret = token_bytes(ID_BYTES)
        self._equal: dict[str, dict[str, None]] = {}
        """Names by their first half, oldest first."""
        self._held_by_half: dict[str, list[str]] = {}
        """By first half: the name that is held by it, once per hold."""
        self._holds: Counter[str] = Counter()
        self._released: set[str] = set()  # names that were released while they were held
        self._users: Counter[object] = Counter()  # entries of each object in shared memory
        self.opened: dict[object, list[Bytes]] = {}
        """The arrays of objects in shared memory that were read, until their last entry ends."""
        self.bytes = 0  # of all entries together

    @property
    def largest_bytes(self) -> int:
        """Size of the largest object that can be kept."""
        return self._options.max_bytes - OVERHEAD_BYTES

    def keep(self, kept: Kept, now: float, block: Any = None) -> str:
        """Keeps an embedding and returns its name. Arrays are copied, because they may be views.

        `block`: of a rows.memory.BlockMemory, with the same rows. Raises TooLarge, or Overloaded if
        held entries leave no room.
        """
        most = self._options.max_bytes
        if kept.size_bytes > most:
            raise TooLarge(
                f"an embedding of {kept.size_bytes} bytes cannot be kept for a reference: "
                f"references.max_bytes is {most}; raise it, or take the embedding itself"
            )
        self.expire(now)
        full = self.bytes + self._added_bytes(kept) > most
        if full and total_bytes([*map(self._kept.__getitem__, self._holds), kept]) > most:
            raise Overloaded(
                "the embeddings that are kept here and being read, or about to be, leave no room "
                "for this one (references.max_bytes): try again"
            )
        while self.bytes + self._added_bytes(kept) > most:
            self._remove(next(name for name in self._kept if name not in self._holds))
            self._metrics.reference_evictions.inc()
        data = kept.embedding.data
        if isinstance(data, np.ndarray):
            kept = replace(kept, embedding=replace(kept.embedding, data=data.copy()))
        half = self._content_of(kept)
        name = f"{half}.{token_urlsafe(ID_BYTES)}"
        self._equal.setdefault(half, {})[name] = None
        self.bytes += self._added_bytes(kept)
        self._users[kept.shared_object] += 1
        self._kept[name] = kept
        self._ends[name] = now + self._options.ttl_seconds
        if block is not None:
            self._blocks[name] = block
        self._report()
        return name

    def find(self, name: str, now: float) -> str | None:
        """The whole name of the entry that a name, or the first half of one, stands for. The entry
        counts as fetched. None: it expired, was evicted or released."""
        self.expire(now)
        names = [name] if "." in name else reversed(self._equal.get(name, {}))
        there = (one for one in names if one in self._kept and one not in self._released)
        if found := next(there, None):
            self._kept.move_to_end(found)
        return found

    def get(self, name: str, now: float) -> Kept | None:
        """The entry of a name, or of the first half of one. None: see `find`."""
        found = self.find(name, now)
        return self._kept[found] if found else None

    def hold(self, name: str, now: float) -> Hold | None:
        """As `get`, and keeps the entry and its block in place until one `free` per hold.

        All holds by one half are of the same entry, even if it was released meanwhile, because
        `free` could not tell which of several entries is no longer read.
        """
        by_half = self._held_by_half.get(name)
        found = by_half[0] if by_half else self.find(name, now)
        if found is None:
            return None
        self._ends.pop(found, None)
        if found in self._blocks:
            self._blocks.move_to_end(found)
        self._holds[found] += 1
        if found != name:
            self._held_by_half.setdefault(name, []).append(found)
        self._report()
        return self.held(name)

    def held(self, name: str) -> Hold:
        """The hold of a whole name that is kept, or of a first half by which an entry is held."""
        found = self._held_by_half[name][0] if name in self._held_by_half else name
        return Hold(found, self._kept[found], self._blocks.get(found))

    def free(self, name: str, now: float) -> None:
        """Ends one hold. After the last one, the entry lives as long as a new one."""
        if name in self._held_by_half:
            name = self._held_by_half[half := name].pop()
            if not self._held_by_half[half]:
                del self._held_by_half[half]
        self._holds[name] -= 1
        if not self._holds[name]:
            del self._holds[name]
            if name in self._released:
                self._released.remove(name)
                self._remove(name)
            else:
                self._ends[name] = now + self._options.ttl_seconds
        self._report()

    def give_block(self, name: str, block: Any) -> bool:
        """Gives a block with their rows to all entries of equal items that have no block. False:
        there are no such entries."""
        equal = self._equal.get(name.partition(".")[0], ())
        names = [one for one in equal if one not in self._blocks]
        self._blocks.update(dict.fromkeys(names, block))
        return bool(names)

    def evict_block(self) -> bool:
        """Drops the least recently used block of an entry that nobody holds. False: there is
        none."""
        oldest = next((name for name in self._blocks if name not in self._holds), None)
        if oldest is None:
            return False
        del self._blocks[oldest]
        return True

    def release(self, name: str) -> bool:
        """Drops an entry before it expires; a held one, once nobody holds it. False: there is
        none."""
        if name not in self._kept or name in self._released:
            return False
        if name in self._holds:
            self._released.add(name)
        else:
            self._remove(name)
        return True

    def expire(self, now: float) -> None:
        while self._ends and self._ends[first := next(iter(self._ends))] <= now:
            self._remove(first)

    def _content_of(self, kept: Kept) -> str:
        """The first half of an entry's name."""
        content = repr((kept.media.identity, kept.embedding.dtype)).encode()
        digest = hmac.digest(self._secret, content, "sha256")[:ID_BYTES]
        return urlsafe_b64encode(digest).decode()

    def _added_bytes(self, kept: Kept) -> int:
        shared = kept.shared_object
        return kept.own_bytes if shared and self._users[shared] else kept.size_bytes

    def _remove(self, name: str) -> None:
        kept = self._kept.pop(name)
        self._ends.pop(name, None)
        self._blocks.pop(name, None)
        half = name.partition(".")[0]
        del self._equal[half][name]
        if not self._equal[half]:
            del self._equal[half]
        self._users[kept.shared_object] -= 1
        if not self._users[kept.shared_object]:
            del self._users[kept.shared_object]
            self.opened.pop(kept.shared_object, None)
        self.bytes -= self._added_bytes(kept)
        self._report()

    def _report(self) -> None:
        self._metrics.references.set(len(self._kept))
        self._metrics.reference_bytes.set(self.bytes)
        self._metrics.references_held.set(len(self._holds))


class PendingWrite:
    """Takes the place of Ray's reference in a SharedBytes until rows are in Ray's shared memory.

    Most kept rows are read from this process, or released, before any router fetches them. Ray
    takes a millisecond per object, holds the GIL meanwhile, and copies the rows.
    """

    def __init__(self, write: Write, rows: Bytes | None) -> None:
        """`rows`: the bytes until they are written, if they are on the host in the dtype of the
        answer."""
        self.rows = rows
        self._write: Write | None = write
        self._writing: asyncio.Task[Embedding] | None = None

    def embedding(self) -> asyncio.Task[Embedding]:
        """Writes the rows, unless that has begun. The task's result refers to Ray's memory."""
        if self._write:
            self._writing = asyncio.create_task(self._write())
            self._writing.add_done_callback(self._done)
            self._write = None
        assert self._writing
        return self._writing

    def _done(self, writing: asyncio.Task[Embedding]) -> None:
        self.rows = None
        if not writing.cancelled():
            writing.exception()  # raised to those who ask for the rows


async def written(embedding: Embedding) -> Embedding:
    """The embedding once its rows are written. Raises what writing them raised."""
    data = embedding.data
    if not isinstance(data, SharedBytes) or not isinstance(data.object_ref, PendingWrite):
        return embedding
    # Cancelling a fetch does not cancel the write.
    return await asyncio.shield(data.object_ref.embedding())
