"""What one replica wrote, any other finds. What is damaged, foreign, late or absent is a miss."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from fakeredis import TcpFakeServer

from actors.errors import ConfigError
from actors.options import ActorOptions, SharedCacheOptions, validated
from actors.store import shared_cache
from actors.store.kept import Key
from actors.store.shared_cache import LocalFolder, SharedCache, Store, open_store, packed, unpacked
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Embedding, Timings
from encoder_service.bench.cluster import free_ports

KEY: Key = ("model", "image", "digest")
MADE = Embedding(
    np.arange(96, dtype=np.uint8),
    "float32",
    (6, 4),
    (1, 4, 6),
    "graph",
    Timings(1, 2, 3),
    replica="first",
    frame_tokens=(2, 4),
    kept_rows=(0, 1, 3, 5, 6, 7),
)


@pytest.fixture(params=["file", "redis", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        (port,) = free_ports(1)
        server = TcpFakeServer(("127.0.0.1", port))
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield f"redis://127.0.0.1:{port}/0"
        server.shutdown()
        server.server_close()
        thread.join()
    else:
        yield f"file://{tmp_path}/shared" if request.param == "file" else f"memory://{tmp_path}"


def opened(store: Store, weights: str = "weights") -> SharedCache:
    return SharedCache(store, weights, EncoderMetrics())


def sample(cache: SharedCache, name: str, **labels: str) -> float:
    return cache._metrics.registry.get_sample_value(f"encoder_shared_cache_{name}", labels) or 0


def put(cache: SharedCache, key: Key = KEY, embedding: Embedding = MADE) -> None:
    """Returns when it is written."""
    cache.put(key, embedding)
    cache._writers.shutdown()


async def test_another_process_finds_what_one_wrote(url: str) -> None:
    options = SharedCacheOptions(url=url)
    first, second = opened(open_store(options)), opened(open_store(options))
    assert await first.get(KEY, 6) is None
    put(first)
    found = await second.get(KEY, 6)
    assert found is not None
    assert (found.source, found.timings.encode_seconds) == ("cache", 0)
    assert bytes(found.data) == bytes(MADE.data)  # type: ignore[arg-type]
    same = ("dtype", "shape", "grid_thw", "frame_tokens", "kept_rows")
    assert [getattr(found, one) for one in same] == [getattr(MADE, one) for one in same]
    assert await second.get((*KEY, "evs 0.5"), 6) is None
    assert await second.get(KEY, 5) is None, "as many rows as the item must have"
    assert (sample(second, "hits_total"), sample(second, "misses_total")) == (1, 2)
    assert await opened(open_store(options), "other weights").get(KEY, 6) is None
    for cache in (first, second):
        assert sample(cache, "failures_total", operation="read") == 0
        cache.close()


def test_any_damage_is_seen() -> None:
    value = packed("weights", KEY, MADE)
    assert unpacked(value, "weights", KEY).shape == (6, 4)
    for place in range(len(value)):
        damaged = bytearray(value)
        damaged[place] ^= 1
        with pytest.raises(ValueError, match="damaged"):
            unpacked(bytes(damaged), "weights", KEY)
    for length in range(len(value)):
        with pytest.raises(ValueError, match="damaged"):
            unpacked(value[:length], "weights", KEY)
    with pytest.raises(ValueError, match="another item"):
        unpacked(value, "weights", (*KEY, "evs 0.5"))


async def test_a_damaged_entry_is_a_miss_that_pauses_nothing(tmp_path: Path) -> None:
    cache = opened(LocalFolder(tmp_path, 10**6))
    put(cache)
    (path,) = tmp_path.glob("*/*")
    path.write_bytes(path.read_bytes()[:-1])
    assert await cache.get(KEY, 6) is None
    assert sample(cache, "failures_total", operation="read") == 1
    put(other := opened(LocalFolder(tmp_path, 10**6)))
    assert await cache.get(KEY, 6) is not None, "written anew"
    other.close()
    cache.close()


def test_only_its_owner_reads_a_folder_that_a_replica_makes(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    before = os.umask(0)
    try:
        LocalFolder(folder, 10_000).write("name", bytes(10))
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o777 for one in (folder, folder / "na")] == [0o700] * 2


def named(number: int) -> str:
    """A name as long as SharedCache's."""
    return f"{number:02}".ljust(64, "0")


def test_a_folder_keeps_to_its_size_and_evicts_what_was_used_longest_ago(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path, 10_000)
    for number in range(50):
        name = named(number)
        folder.write(name, bytes(1000))
        past = time.time() - 1000 + number
        os.utime(tmp_path / name[:2] / name, (past, past))
        folder.read(named(0))
        assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 11_000
    assert folder.read(named(0)) is not None
    assert folder.read(named(49)) is not None
    assert folder.read(named(1)) is None
    abandoned = tmp_path / f"{uuid4().hex}.part"
    abandoned.write_bytes(bytes(1000))
    os.utime(abandoned, (past, past - 3600))
    again = LocalFolder(tmp_path, 3000)  # with less room, after a restart
    again.write(named(50), bytes(1000))
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 3000
    assert not list(tmp_path.glob("*.part"))


def test_other_files_of_a_folder_are_never_evicted(tmp_path: Path) -> None:
    others = [tmp_path / "en" / "thesis.tex", tmp_path / "video.part"]
    others[0].parent.mkdir()
    for other in others:
        other.write_bytes(bytes(5000))
        os.utime(other, (0, 0))
    LocalFolder(tmp_path, 1000).write(named(1), bytes(900))
    assert all(other.exists() for other in others)


def test_many_processes_may_share_a_folder(tmp_path: Path) -> None:
    """Writers of the same names, readers and evictions, all at once: all or nothing."""
    folders = [LocalFolder(tmp_path, 20_000) for _ in range(4)]
    wrong = list[bytes]()

    def work(folder: LocalFolder) -> None:
        for number in range(200):
            name = named(number % 37)
            folder.write(name, name.encode() * 16)
            if (found := folder.read(name)) not in (None, name.encode() * 16):
                wrong.append(found or b"")

    threads = [threading.Thread(target=work, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not list(tmp_path.glob("**/*.part"))


class Broken:
    """Counts calls that fail, or that take too long."""

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds
        self.calls = 0

    def read(self, name: str) -> bytes | None:
        self.calls += 1
        time.sleep(self.seconds)
        raise ConnectionError(name)

    def write(self, name: str, value: bytes) -> None:
        self.read(name)


@pytest.mark.parametrize("seconds", [0, 0.2])
def test_a_store_that_is_down_is_left_alone_for_a_while(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cache, "READ_SECONDS", 0.02)

    async def run() -> None:
        store = Broken(seconds)
        cache = opened(store)
        began = time.monotonic()
        for _ in range(20):
            assert await cache.get(KEY, 6) is None
            cache.put(KEY, MADE)
        assert time.monotonic() - began < 0.15
        assert store.calls == 1
        assert sample(cache, "failures_total", operation="read") == 1
        assert sample(cache, "skipped_total") == 20
        monkeypatch.setattr(shared_cache, "monotonic", lambda: began + 11)
        assert await cache.get(KEY, 6) is None
        assert store.calls == 2
        cache.close()

    asyncio.run(run())


class Slow:
    def read(self, name: str) -> bytes | None:
        time.sleep(0.15)
        return packed("weights", KEY, MADE)

    def write(self, name: str, value: bytes) -> None:
        pass


def test_many_look_ups_at_once_do_not_pause_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "READ_SECONDS", 0.4)

    async def run() -> None:
        cache = opened(Slow())
        found = await asyncio.gather(*(cache.get(KEY, 6) for _ in range(40)))
        assert 4 <= sum(one is not None for one in found) < 40
        assert sample(cache, "failures_total", operation="read") == 0
        assert await cache.get(KEY, 6) is not None
        cache.close()

    asyncio.run(run())


def test_what_waits_to_be_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cache, "MOST_UNWRITTEN_BYTES", 250)
    cache = opened(Broken(0.2))
    for _ in range(10):
        cache.put(KEY, MADE)
    assert sample(cache, "skipped_total") == 8
    cache._writers.shutdown()
    assert cache._unwritten_bytes == 0


def test_what_cannot_be_opened_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cache\.shared\.url: .*nonsense"):
        open_store(SharedCacheOptions(url="nonsense://x"))
    for url in ("file://folder", "file://folder/below", "file:///", "file://"):
        with pytest.raises(ConfigError, match="write file:///folder"):
            open_store(SharedCacheOptions(url=url))
    monkeypatch.setattr(shared_cache, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"xxhash and redis: pip install '.\[cache"):
        open_store(SharedCacheOptions(url="redis://127.0.0.1"))
    with pytest.raises(ValueError, match="url"):
        SharedCacheOptions(url="/var/cache")


@pytest.mark.parametrize(
    "url", ["redis://:secret/9@h/0", "redis://u:secret@h:x", "Redis://:secret@h"]
)
def test_a_password_is_not_quoted(url: str) -> None:
    def configured() -> None:
        values = {"model": {"id": "x"}, "cache": {"shared": {"url": url}}}
        shared = validated(ActorOptions, values).cache.shared
        assert shared
        open_store(shared)

    with pytest.raises(ConfigError, match=r"cache\.shared\.url") as caught:
        configured()
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__, "nor in a traceback"
