"""Where the EC connector reads rows past the front door: memory, sockets, lost replicas.

Within vLLM itself: tests/engines.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from actors.rows.protocol import RowsPlace
from encoder_service.client import Embedding
from encoder_service.engines import vllm_rows
from encoder_service.engines.vllm_rows import RowsAt
from tests.unit.connector_rig import Encoders, Halves, bits, ended, keep, step
from tests.unit.vllm_half import HIDDEN, Request
from tests.waiting import until


def answered(scheduler: Any, *workers: Any, kept: Embedding, name: str = "r") -> torch.Tensor:
    """The rows of one request, from when vLLM sees it until its first token. vLLM then needs the
    room in its encoder cache."""
    request = Request(name, [kept.reference], kept.tokens)
    assert ended(scheduler, request)
    scheduler.update_state_after_alloc(request, 0)
    rows = step(scheduler, *workers)[kept.reference]
    request.num_output_tokens = 1
    step(scheduler, *workers, evicted=[kept.reference])
    scheduler.request_finished(request)
    return rows


def memory_opened(halves: Halves, encoders: Encoders) -> tuple[Any, Any, Embedding]:
    """A scheduler, a worker that has opened the replica's memory, and a kept embedding."""
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    for _ in range(2):  # the second one's rows are read in place
        answered(scheduler, worker, kept=kept)
    return scheduler, worker, kept


def test_rows_come_from_the_nearest_memory_that_all_workers_have_opened(
    halves: Halves, encoders: Encoders, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.encoder_service")
    scheduler, worker = halves(encoders.url)
    (kept,), (rows,) = keep(encoders.url)
    for paths in (
        {"unix": 1, "ipc": 0},  # the worker has opened nothing yet
        {"unix": 1, "ipc": 1},
        {"unix": 1, "ipc": 2},
    ):
        assert torch.equal(bits(answered(scheduler, worker, kept=kept)), bits(rows))
        assert {path: scheduler.stats.data[path] for path in paths} == paths
        until(lambda: encoders.store.held == 0)
    assert "embeddings of replica replica come by unix" in caplog.text
    assert caplog.text.count("embeddings of replica replica come by ipc") == 1
    assert scheduler.stats.data["bytes"] == 3 * rows.nbytes
    assert scheduler.source.received.taken_bytes == 0


def test_bytes_are_received_into_memory_that_the_workers_share(
    halves: Halves, encoders: Encoders
) -> None:
    encoders.store.memory = None
    encoders.fleet.at = replace(encoders.fleet.at, unix="/nowhere")
    scheduler, *workers = (*halves(encoders.url, workers=2), halves(encoders.url, rank=1)[1])
    (kept,), (rows,) = keep(encoders.url)
    request = Request("r", [kept.reference], kept.tokens)
    assert torch.equal(bits(answered(scheduler, *workers, kept=kept)), bits(rows))
    assert ended(scheduler, request)
    until(lambda: encoders.store.held == 0)  # the bytes are here
    assert scheduler.source.received.taken_bytes > 0
    scheduler.update_state_after_alloc(request, 0)
    assert isinstance(scheduler.needed.rows[kept.reference], RowsAt)
    assert torch.equal(bits(step(scheduler, *workers)[kept.reference]), bits(rows))
    assert scheduler.source.received.taken_bytes > 0, "no token yet"
    request.num_output_tokens = 1
    step(scheduler, *workers)
    assert scheduler.source.received.taken_bytes == 0
    assert scheduler.stats.data["tcp"] == 2


def test_one_worker_that_opens_no_memory_gets_rows_like_the_others(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, one = halves(encoders.url, workers=2)
    _, other = halves(encoders.url, rank=1)
    (kept,), (rows,) = keep(encoders.url)
    can_open, opened = vllm_rows.RowLoader._open, []

    def refuse(self: Any, handle: Any) -> Any:
        opened.append(self.worker)
        own = handle != encoders.memory.handle
        return can_open(self, handle) if own or self.worker == 0 else None

    monkeypatch.setattr(vllm_rows.RowLoader, "_open", refuse)
    for _ in range(3):
        assert torch.equal(bits(answered(scheduler, one, other, kept=kept)), bits(rows))
    assert (scheduler.stats.data["ipc"], scheduler.stats.data["unix"]) == (0, 3)
    assert opened == [0, 0, 1, 1]


def test_rows_that_a_step_may_still_copy_stay_for_a_while(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "ABORTED_SECONDS", 0.3)
    scheduler, _, kept = memory_opened(halves, encoders)
    until(lambda: encoders.store.held == 0)
    request = Request("aborted", [kept.reference], kept.tokens)
    assert ended(scheduler, request)
    assert encoders.store.held == 1
    scheduler.update_state_after_alloc(request, 0)
    scheduler.request_finished(request)
    time.sleep(0.1)
    assert encoders.store.held == 1
    until(lambda: encoders.store.held == 0)
    waiting = Request("never scheduled", [kept.reference], kept.tokens)
    assert ended(scheduler, waiting)
    scheduler.request_finished(waiting)
    until(lambda: encoders.store.held == 0)


def test_many_aborted_requests_need_no_threads(halves: Halves, url: str) -> None:
    scheduler, _ = halves()
    (kept,), _ = keep(url)
    for number in range(60):
        request = Request(str(number), [kept.reference], kept.tokens, adapter=f"lora{number}:")
        assert ended(scheduler, request)
        scheduler.update_state_after_alloc(request, 0)
        scheduler.request_finished(request)
    assert threading.active_count() < 60


def test_rows_of_a_step_that_is_scheduled_stay_until_it_has_run(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "ABORTED_SECONDS", 0.3)
    scheduler, _, kept = memory_opened(halves, encoders)
    until(lambda: encoders.store.held == 0)
    running, waiting = (Request(name, [kept.reference], kept.tokens) for name in "ab")
    assert ended(scheduler, running)
    assert ended(scheduler, waiting)
    scheduler.update_state_after_alloc(running, 0)
    assert scheduler.ensure_cache_available(running, kept.tokens), "vLLM counts ahead of its steps"
    scheduler.request_finished(running)
    scheduler.request_finished(waiting)
    time.sleep(0.1)
    assert encoders.store.held == 1, "the aborted one's step may copy it"
    until(lambda: encoders.store.held == 0)


def test_rows_wait_for_room_in_the_shared_memory(halves: Halves, encoders: Encoders) -> None:
    encoders.store.memory = None
    (kept, _), (rows, _) = keep(encoders.url, 2)
    scheduler, worker = halves(encoders.url, ahead_bytes=rows.nbytes + 255)
    answered(scheduler, worker, kept=kept)
    first, second = (Request(name, [kept.reference], kept.tokens) for name in "ab")
    second.adapter = "lora:"  # so that it is another item
    assert ended(scheduler, first)
    step(scheduler, worker)
    assert not scheduler.ensure_cache_available(second, 0)
    time.sleep(0.1)
    assert not scheduler.ensure_cache_available(second, 0)
    scheduler.request_finished(first)
    assert ended(scheduler, second)
    scheduler.update_state_after_alloc(second, 0)
    assert isinstance(scheduler.needed.rows[f"lora:{kept.reference}"], RowsAt)


def test_rows_for_which_nobody_makes_room_go_with_the_step(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "ROOM_SECONDS", 0.1)
    encoders.store.memory = None
    kept, rows = keep(encoders.url, 2)
    scheduler, worker = halves(encoders.url, ahead_bytes=rows[0].nbytes + 255)
    answered(scheduler, worker, kept=kept[0])
    request = Request("r", [one.reference for one in kept], kept[0].tokens)
    assert ended(scheduler, request)
    for index in range(2):
        scheduler.update_state_after_alloc(request, index)
    kinds = sorted(type(one).__name__ for one in scheduler.needed.rows.values())
    assert kinds == ["RowsAt", "Tensor"]
    found = step(scheduler, worker)
    for one, expected in zip(kept, rows, strict=True):
        assert torch.equal(bits(found[one.reference]), bits(expected))


def test_rows_that_do_not_fit_are_freed(halves: Halves, encoders: Encoders) -> None:
    (kept,), _ = keep(encoders.url)
    for tokens, hidden in ((kept.tokens + 1, HIDDEN), (kept.tokens, HIDDEN // 2)):
        scheduler, _ = halves(encoders.url, hidden=hidden)
        request = Request("r", [kept.reference], tokens)
        assert not ended(scheduler, request)
        assert scheduler.take_unavailable_requests() == {"r"}
        scheduler.request_finished(request)
        until(lambda: encoders.store.held == 0)
    assert not ended(scheduler, Request("s", ["replica." + "x" * 32], 4))
    assert not ended(scheduler, Request("s", ["replica.short"], 4))


def test_a_replica_that_dies_fails_the_requests_that_need_it(
    halves: Halves, encoders: Encoders, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    answered(scheduler, worker, kept=kept)
    held, running = (Request(name, [kept.reference], kept.tokens) for name in ("held", "running"))
    assert ended(scheduler, held)
    assert ended(scheduler, running)
    assert scheduler.fetches[kept.reference].rows.result().path == "ipc"
    scheduler.update_state_after_alloc(running, 0)
    assert encoders.server
    encoders.server.stop()
    assert scheduler.ensure_cache_available(running, 0), "a step has its rows"
    encoders.fleet.kept.clear()
    assert not ended(scheduler, held)
    assert scheduler.take_unavailable_requests() == {"held"}
    assert "no embedding is kept under" in caplog.text
    for request in (held, running):
        scheduler.request_finished(request)
    assert not scheduler.fetches


def test_a_replica_that_cannot_be_reached_any_more_is_read_through_the_front_door(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, worker = halves(encoders.url)
    (kept,), (rows,) = keep(encoders.url)
    answered(scheduler, worker, kept=kept)
    assert encoders.server
    encoders.server.stop()
    for _ in range(2):
        assert torch.equal(bits(answered(scheduler, worker, kept=kept)), bits(rows))
    encoders.begin("again")
    answered(scheduler, worker, kept=kept)
    assert scheduler.stats.data["http"] == 3, "it is not tried with every request"
    monkeypatch.setitem(scheduler.source.avoided, "replica", 0.0)
    answered(scheduler, worker, kept=kept)
    assert scheduler.stats.data["http"] == 3


def test_rows_that_are_lost_once_a_step_needs_them_are_fetched_again_or_fail_their_request(
    halves: Halves, encoders: Encoders
) -> None:
    scheduler, worker = halves(encoders.url)
    (kept,), (rows,) = keep(encoders.url)
    answered(scheduler, worker, kept=kept)

    def found(name: str) -> torch.Tensor:
        request = Request(name, [kept.reference], kept.tokens)
        assert ended(scheduler, request)
        scheduler.source.readers["replica"].close()
        if name == "gone":
            encoders.fleet.kept.clear()
            encoders.store.tensors.clear()
        assert scheduler.has_cache_item(kept.reference), "vLLM has decided"
        scheduler.update_state_after_alloc(request, 0)
        loaded = step(scheduler, worker, evicted=[kept.reference])[kept.reference]
        scheduler.request_finished(request)
        return loaded

    assert torch.equal(bits(found("there")), bits(rows))
    assert not scheduler.take_unavailable_requests()
    zeros = found("gone")
    assert zeros.shape == rows.shape
    assert not zeros.any()
    assert scheduler.take_unavailable_requests() == {"gone"}
    again = Request("s", [kept.reference], kept.tokens)
    assert not ended(scheduler, again)
    assert again.skip_reading_prefix_cache, "it may hold zeros"
    assert scheduler.renewed == {(kept.reference, "s")}
    scheduler.request_finished(again)
    assert not scheduler.renewed


def test_a_fetch_that_another_one_replaces_is_released(
    connector_module: ModuleType, halves: Halves, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, _ = halves()
    (kept,), _ = keep(url)
    slow, released = Future[Any](), list[Any]()
    slow.set_running_or_notify_cancel()
    monkeypatch.setattr(scheduler.source, "release", released.append)
    scheduler.fetches[kept.reference] = connector_module.PendingFetch(slow, 0, {"a"})
    assert scheduler.fetched_again(Request("b", [kept.reference], kept.tokens), 0)
    assert scheduler.fetches[kept.reference].requests == {"a", "b"}
    slow.set_result("rows")
    assert released == ["rows"]


def test_memory_of_a_replica_that_is_gone_is_closed(halves: Halves, encoders: Encoders) -> None:
    scheduler, worker, kept = memory_opened(halves, encoders)
    assert set(worker.loader.opened) == {0, 1}
    scheduler.source._forget("replica", scheduler.source.readers["replica"])
    step(scheduler, worker)
    assert set(worker.loader.opened) == {0}
    for _ in range(2):
        answered(scheduler, worker, kept=kept)
    assert set(worker.loader.opened) == {0, 2}


def test_a_step_does_not_wait_for_a_replica_that_does_not_answer(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting, go_on = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        connecting.set()
        go_on.wait(20)

    monkeypatch.setattr(vllm_rows.RowSource, "_connect", hang)
    monkeypatch.setattr(vllm_rows, "MOST_AVOIDED", 2)
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    request = Request("r", [kept.reference], kept.tokens)
    assert not scheduler.ensure_cache_available(request, 0)
    assert connecting.wait(20)
    began = time.monotonic()
    step(scheduler, worker)
    assert not scheduler.ensure_cache_available(request, 0)
    assert time.monotonic() - began < 1
    go_on.set()
    assert ended(scheduler, request)
    for number in range(5):
        assert not ended(scheduler, Request("s", [f"nobody{number}.x"], 4))
        scheduler.take_unavailable_requests()
    assert len(scheduler.source.avoided) <= 2


def test_replicas_are_pinged(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "PING_SECONDS", 0.05)
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    answered(scheduler, worker, kept=kept)
    assert set(scheduler.source.readers) == {"replica"}
    assert encoders.server
    encoders.server.stop()
    until(lambda: not scheduler.source.readers)


def test_rows_that_a_replica_took_back_before_they_were_copied_fail_their_request(
    halves: Halves,
    encoders: Encoders,
    connector_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the scheduler and its workers are paused together for a minute."""
    monkeypatch.setattr(connector_module, "PAUSED_SECONDS", 0.2)
    scheduler, worker = halves(encoders.url)
    kept, rows = keep(encoders.url, 2)
    for one in kept:
        answered(scheduler, worker, kept=one)
    request = Request("r", [kept[0].reference], kept[0].tokens)
    assert ended(scheduler, request)
    scheduler.update_state_after_alloc(request, 0)
    metadata = scheduler.build_connector_meta(SimpleNamespace(free_encoder_mm_hashes=[]))
    assert encoders.server
    for connection in list(encoders.server._connections):
        connection.end()
    until(lambda: encoders.store.held == 0)
    encoders.memory.fill(encoders.store.blocks[kept[0].reference[8:]], rows[1], torch.bfloat16)
    time.sleep(0.2)
    cache: dict[str, torch.Tensor] = {}
    worker.bind_connector_metadata(metadata)
    worker.start_load_caches(cache)
    assert torch.equal(bits(cache[kept[0].reference]), bits(rows[1])), "another item's"
    request.num_output_tokens = 1
    assert scheduler.take_unavailable_requests() == {"r"}
    scheduler.request_finished(request)
    assert not scheduler.take_unavailable_requests()
    name, tokens = kept[0].reference, kept[0].tokens
    encoders.memory.fill(encoders.store.blocks[name[8:]], rows[0], torch.bfloat16)
    again = Request("s", [name], tokens)
    assert not scheduler.ensure_cache_available(again, tokens), "vLLM's prefix cache may be wrong"
    assert again.skip_reading_prefix_cache
    assert ended(scheduler, again)
    assert torch.equal(bits(step(scheduler, worker, cache=cache)[name]), bits(rows[0])), (
        "it replaced what vLLM's encoder cache had"
    )
    assert ended(scheduler, again)
    assert not scheduler.build_connector_meta(SimpleNamespace(free_encoder_mm_hashes=[])).again
    again.num_output_tokens = 1
    step(scheduler, worker)
    assert scheduler.ensure_cache_available(again, tokens), "it runs"
    scheduler.request_finished(again)
    assert not scheduler.fetches
    assert not scheduler.renewed

    other = Request("t", [name], tokens, skip_reading_prefix_cache=True)
    assert not scheduler.ensure_cache_available(other, 1)
    assert scheduler.take_unavailable_requests() == {"t"}, "other caches may hold them"
    other = Request("u", [name], tokens, skip_reading_prefix_cache=True)
    assert ended(scheduler, other)
    assert not step(scheduler, worker), "vLLM evicted it"
    scheduler.update_state_after_alloc(other, 0)
    assert torch.equal(bits(step(scheduler, worker)[name]), bits(rows[0]))
    scheduler.request_finished(other)


def test_a_replica_that_hangs_is_avoided_and_holds_up_no_other(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scheduler, worker = halves(encoders.url)
    (kept,), (rows,) = keep(encoders.url)
    go_on = threading.Event()
    connect = vllm_rows.RowSource._connect

    def hang(self: Any, name: str) -> Any:
        if name.startswith("hangs."):
            assert go_on.wait(20)
        return connect(self, name)

    monkeypatch.setattr(vllm_rows.RowSource, "_connect", hang)
    other = Request("other", ["hangs.x"], kept.tokens)
    assert not scheduler.ensure_cache_available(other, 0)
    began = time.monotonic()
    assert torch.equal(bits(answered(scheduler, worker, kept=kept)), bits(rows))
    assert time.monotonic() - began < 10
    go_on.set()
    assert not ended(scheduler, other)
    assert scheduler.take_unavailable_requests() == {"other"}

    monkeypatch.setattr("actors.rows.reader.CALL_SECONDS", 0.3)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "hangs"))
        listener.listen()
        encoders.fleet.at = RowsPlace(str(tmp_path / "hangs"), "")
        scheduler.source.readers["replica"].close()
        for seconds in (5.0, 0.25):
            began = time.monotonic()
            assert torch.equal(bits(answered(scheduler, worker, kept=kept)), bits(rows))
            assert time.monotonic() - began < seconds
    assert scheduler.stats.data["http"] == 2


def test_pings_do_not_wait_for_a_replica_that_hangs(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_rows, "PING_SECONDS", 0.05)
    monkeypatch.setattr("actors.rows.server.HOLD_SECONDS", 0.6)
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "hangs"))
        listener.listen()
        there, encoders.fleet.at = encoders.fleet.at, RowsPlace(str(tmp_path / "hangs"), "")
        assert scheduler.source._reader("hangs", "hangs.x")
        encoders.fleet.at = there
        for _ in range(2):
            answered(scheduler, worker, kept=kept)
        request = Request("r", [kept.reference], kept.tokens)
        assert ended(scheduler, request)
        time.sleep(1.5)
        assert encoders.store.held == 1
        scheduler.request_finished(request)


def test_memory_is_closed_also_where_its_replica_was_connected_to_again(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "PING_SECONDS", 0.05)
    scheduler, worker, kept = memory_opened(halves, encoders)
    scheduler.source.readers["replica"].close()
    for _ in range(2):
        answered(scheduler, worker, kept=kept)
    until(lambda: step(scheduler, worker) == {} and set(worker.loader.opened) == {0, 2})


def test_no_two_memories_share_a_column_of_the_board(
    halves: Halves, encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "COLUMNS", 3)
    scheduler, _ = halves(encoders.url)
    source, handle = scheduler.source, encoders.memory.handle
    readers: list[Any] = [Mock(alive=True) for _ in range(9)]
    first = source._offer(readers[0], handle)
    source.board[0, vllm_rows.column(first.number)] = vllm_rows.OPEN
    for reader in readers[1:7]:
        made = source._offer(reader, handle)
        assert vllm_rows.column(made.number) != vllm_rows.column(first.number)
        del source.offers[reader], made
    assert source._is_open(first.number)
    assert [source._offer(reader, handle) is None for reader in readers[6:]] == [0, 0, 1]
    assert source._offer(readers[0], None) is None, "not where another id's rows are"


def test_the_memory_of_a_lost_replica_is_not_offered(halves: Halves, encoders: Encoders) -> None:
    """It would be offered for ever if the connection was forgotten just before."""
    scheduler, _ = halves(encoders.url)
    assert scheduler.source._offer(Mock(alive=False), encoders.memory.handle) is None
    assert not scheduler.source.offers
