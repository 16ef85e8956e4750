"""A cache that all replicas share: embeddings by content, in a folder, Redis or object storage.

Entries outlive the replica that wrote them. The service never depends on the store: a look-up that
fails or takes too long, or a damaged entry, counts as a miss. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from math import inf
from pathlib import Path
from threading import Lock
from time import monotonic, time
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from actors.errors import ConfigError, how_to_install
from actors.options import SharedCacheOptions
from actors.store.kept import Key
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Embedding, Timings

log = logging.getLogger("ray.serve")

FORMAT = b"ENC1"
"""The start of each entry. The number changes when the same item gets other rows, as after a change
of preprocessing. Then come a checksum, seeded with the size of the head; that size; the head, in
JSON; and the rows."""
PREFIX = struct.Struct("<4sQI")
THREADS = 4
HEAD = ("dtype", "shape", "grid_thw", "frame_tokens", "kept_rows")
READ_SECONDS = 1.0
"""Time limit of a look-up. If the store takes longer, the item is encoded."""
PAUSE_SECONDS = 10.0
"""How long the store is not used after a look-up or write that failed or took too long."""
MOST_UNWRITTEN_BYTES = 256 * 2**20
"""Maximum that waits to be written. Embeddings beyond it are not written."""
EVICTED_SHARE = 0.1
"""Share of a folder's `max_bytes` that is evicted at a time, and by which a replica may exceed it.
"""
ENTRIES, PARTS = f"??/{'[0-9a-f]' * 64}", f"{'[0-9a-f]' * 32}.part"
"""The files of a folder that are ours. A folder may have others, which are never evicted."""
ABANDONED_SECONDS = 3600.0
"""Age after which an unfinished file is evicted, because the replica that wrote it has ended."""


class Store(Protocol):
    """A key-value store. Methods may raise anything, and are called from several threads."""

    def read(self, name: str) -> bytes | None:
        """The value under a name. None: there is none."""

    def write(self, name: str, value: bytes) -> None:
        """Must be atomic for concurrent readers and writers."""


class LocalFolder:
    """A local or mounted folder that several processes may share."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self._until_eviction = 0
        """How many bytes this process may still write before it evicts."""
        self._lock = Lock()

    def read(self, name: str) -> bytes | None:
        path = self._path(name)
        try:
            value = path.read_bytes()
        except FileNotFoundError:
            return None
        with suppress(OSError):
            os.utime(path)  # the most recently used
        return value

    def write(self, name: str, value: bytes) -> None:
        path = self._path(name)
        for folder in (self.path, path.parent):  # parents that mkdir creates do not get the mode
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self.path / f"{uuid4().hex}.part"
        try:
            part.write_bytes(value)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        with self._lock:
            self._until_eviction -= len(value)
            if self._until_eviction < 0:
                self._evict()

    def _path(self, name: str) -> Path:
        return self.path / name[:2] / name

    def _evict(self) -> None:
        """Evicts the least recently used, until there is room. Other processes may do the same."""
        found = []
        for path in (*self.path.glob(ENTRIES), *self.path.glob(PARTS)):
            with suppress(OSError):
                status = path.stat()
                if path.suffix != ".part" or time() > status.st_mtime + ABANDONED_SECONDS:
                    found.append((status.st_mtime, status.st_size, path))
        used = sum(size for _, size, _ in found)
        room = int(self.max_bytes * EVICTED_SHARE)
        for _, size, path in sorted(found):
            if used <= self.max_bytes - room:
                break
            with suppress(OSError):
                path.unlink()
            used -= size
        self._until_eviction = room


class Redis:
    """Redis or Valkey. Entries expire; the server's `maxmemory` is the limit in bytes."""

    def __init__(self, url: str, ttl_seconds: float) -> None:
        from redis import Redis as Client

        limit = {"socket_timeout": READ_SECONDS, "socket_connect_timeout": READ_SECONDS}
        self._client = Client.from_url(url, **limit)
        self._ttl_milliseconds = max(1, int(1000 * ttl_seconds))

    def read(self, name: str) -> bytes | None:
        found: Any = self._client.get(f"encoder:{name}")
        return None if found is None else bytes(found)

    def write(self, name: str, value: bytes) -> None:
        self._client.set(f"encoder:{name}", value, px=self._ttl_milliseconds)


class ObjectStorage:
    """Any storage that fsspec supports, such as s3://. Only the bucket's own rules limit it."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._files, self._root = url_to_fs(url)

    def read(self, name: str) -> bytes | None:
        try:
            found: bytes = self._files.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return None
        return found

    def write(self, name: str, value: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{name}", value)


def open_store(options: SharedCacheOptions) -> Store:
    """Opens a store without connecting to it. Raises ConfigError, which does not quote a
    password."""
    kind, _, rest = options.url.partition("://")
    check_packages(kind)
    if kind == "file":
        if not rest.startswith("/") or not rest.strip("/"):
            raise ConfigError(f"cache.shared.url: {options.url}: write file:///folder")
        return LocalFolder(Path(rest), options.max_bytes)
    try:
        if kind in ("redis", "rediss"):
            return Redis(options.url, options.ttl_seconds)
        return ObjectStorage(options.url)
    except ImportError as error:
        raise ConfigError(f"cache.shared.url: {error}") from None
    except ValueError:  # may quote the password as a port
        raise ConfigError(
            f"cache.shared.url: {kind}:// is not known to fsspec, or what follows is not a valid "
            "URL: percent-encode a password"
        ) from None


def check_packages(kind: str) -> None:
    needed = {"file": ["xxhash"], "redis": ["xxhash", "redis"], "rediss": ["xxhash", "redis"]}
    missing = [name for name in needed.get(kind, ["xxhash", "fsspec"]) if not find_spec(name)]
    if missing:
        raise ConfigError(f"cache.shared needs {' and '.join(missing)}: {how_to_install('cache')}")


def packed(weights: str, key: Key, embedding: Embedding) -> bytes:
    """Serialises an entry: see FORMAT."""
    from xxhash import xxh3_64_intdigest

    head = {name: getattr(embedding, name) for name in HEAD} | {"of": [weights, *key]}
    text = json.dumps(head).encode()
    rest = text + np.asarray(embedding.data).tobytes()
    return PREFIX.pack(FORMAT, xxh3_64_intdigest(rest, len(text)), len(text)) + rest


def unpacked(value: bytes, weights: str, key: Key) -> Embedding:
    """Parses an entry. Raises ValueError if it is damaged, or of another item."""
    from xxhash import xxh3_64_intdigest

    whole = value.ljust(PREFIX.size)
    (form, checksum, size), rest = PREFIX.unpack_from(whole), memoryview(whole)[PREFIX.size :]
    if form != FORMAT or xxh3_64_intdigest(rest, size) != checksum:
        raise ValueError("an entry is damaged")
    head = json.loads(bytes(rest[:size]))
    if head.pop("of") != [weights, *key]:
        raise ValueError("an entry is of another item")
    tuples: Any = {name: tuple(one) if isinstance(one, list) else one for name, one in head.items()}
    rows: Bytes = np.frombuffer(rest[size:], np.uint8)
    return Embedding(rows, source="cache", timings=Timings(0.0, 0.0, 0.0), **tuples)


class SharedCache:
    """Embeddings in a store, each with a checksum and its key. For one event loop; `put` may be
    called from any thread."""

    def __init__(self, store: Store, weights: str, metrics: EncoderMetrics) -> None:
        """`weights`: identifies the weights, so that two checkpoints of the same name do not find
        each other's rows."""
        self._store = store
        self._weights = weights
        self._metrics = metrics
        self._readers = ThreadPoolExecutor(THREADS, "cache-read")
        self._writers = ThreadPoolExecutor(THREADS, "cache-write")
        self._free_readers = asyncio.Semaphore(THREADS)
        self._lock = Lock()
        self._unwritten_bytes = 0
        self._paused_until = 0.0

    async def get(self, key: Key, tokens: int | None) -> Embedding | None:
        """The embedding under a key, with its data as an array. None: there is none with `tokens`
        rows. `tokens` None: any number of rows."""
        if self._paused():
            return None
        loop = asyncio.get_running_loop()
        began, reading = monotonic(), inf
        found = None
        try:
            async with asyncio.timeout(READ_SECONDS), self._free_readers:
                reading = monotonic()
                found = await loop.run_in_executor(self._readers, self._read, key)
        except Exception as error:
            # Late only because of other look-ups: a miss, not a failure of the store.
            late = isinstance(error, TimeoutError) and monotonic() < reading + READ_SECONDS / 2
            if not late:
                self._failed("read", error)
                return None
        if found is not None and tokens not in (None, found.shape[0]):
            found = None
        if found is None:
            self._metrics.shared_cache_misses.inc()
            return None
        self._metrics.shared_cache_hits.inc()
        self._metrics.shared_cache_seconds.observe(monotonic() - began)
        return found

    def put(self, key: Key, embedding: Embedding) -> None:
        """Queues a write, unless too much is waiting. `data` is an array, which is copied."""
        size = embedding.size_bytes
        with self._lock:
            fits = self._unwritten_bytes + size <= MOST_UNWRITTEN_BYTES and not self._paused()
            if fits:
                self._unwritten_bytes += size
        if not fits:
            self._metrics.shared_cache_skipped.inc()
            return
        copied = replace(embedding, data=np.array(embedding.data))
        with suppress(RuntimeError):  # closed
            self._writers.submit(self._write, key, copied)

    def close(self) -> None:
        """Drops what is waiting to be written."""
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)

    def _name(self, key: Key) -> str:
        return sha256(json.dumps([self._weights, *key]).encode()).hexdigest()

    def _read(self, key: Key) -> Embedding | None:
        value = self._store.read(self._name(key))
        return None if value is None else unpacked(value, self._weights, key)

    def _write(self, key: Key, embedding: Embedding) -> None:
        try:
            self._store.write(self._name(key), packed(self._weights, key, embedding))
        except Exception as error:
            self._failed("write", error)
        finally:
            with self._lock:
                self._unwritten_bytes -= embedding.size_bytes

    def _paused(self) -> bool:
        return monotonic() < self._paused_until

    def _failed(self, what: str, error: Exception) -> None:
        """Pauses the use of the store, unless only an entry is damaged."""
        self._metrics.shared_cache_failures.labels(what).inc()
        if isinstance(error, ValueError):
            log.warning("cache.shared: %s", error)
            return
        if not self._paused():  # concurrent failures are logged once
            log.warning("cache.shared is not used for %g s: %s: %r", PAUSE_SECONDS, what, error)
        self._paused_until = monotonic() + PAUSE_SECONDS
