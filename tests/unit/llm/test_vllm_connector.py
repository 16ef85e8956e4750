"""The EC connector between the service and a stand-in for vLLM's own half.

Where it reads rows: test_vllm_rows.py. Within vLLM itself: tests/engines.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from encoder_service.client import Client
from encoder_service.engines import vllm_rows, vllm_stats
from encoder_service.engines.vllm import content_id
from tests.unit.connector_rig import Halves, bits, ended, keep, step
from tests.unit.vllm_half import HIDDEN, ECConnectorRole, Request, answering, config
from tests.waiting import until


def test_a_step_gets_its_embeddings_by_id(halves: Halves, url: str) -> None:
    scheduler, worker = halves()
    kept, rows = keep(url, 2)
    names = [one.to_vllm()["uuid"] for one in kept]
    request = Request("r", names, kept[0].tokens)
    assert not scheduler.has_cache_item(names[0])
    assert ended(scheduler, request)
    assert [scheduler.has_cache_item(name) for name in (*names, "0123abcd")] == [True, True, False]
    for index in range(2):
        scheduler.update_state_after_alloc(request, index)
    mine = torch.zeros(1)
    cache = {names[1]: mine}
    step(scheduler, worker, cache=cache)
    assert set(cache) == set(names)
    assert torch.equal(cache[names[0]].view(torch.uint8), rows[0].view(torch.uint8))
    assert cache[names[1]] is mine, "what is there already stays"
    assert not step(scheduler, worker)
    assert not scheduler.take_unavailable_requests()
    worker.save_caches({}, "x")


def test_an_embedding_goes_with_the_last_request_that_needs_it(halves: Halves, url: str) -> None:
    scheduler, _ = halves()
    kept, _ = keep(url, 2)
    names = [one.reference for one in kept]
    one, other = (Request(name, names, kept[0].tokens) for name in "ab")
    assert ended(scheduler, one)
    assert ended(scheduler, other)
    assert ended(scheduler, one, kept[0].tokens)
    assert set(scheduler.fetches) == set(names), "the other has computed nothing"
    scheduler.request_finished(other)
    assert list(scheduler.fetches) == names[1:]
    scheduler.request_finished(one)
    assert not scheduler.fetches


@pytest.mark.parametrize("computed", [0, 1])
def test_an_image_that_a_prompt_repeats_is_fetched_once(
    halves: Halves, url: str, computed: int
) -> None:
    """Also if vLLM's prefix cache has the first place."""
    scheduler, worker = halves()
    (kept,), (rows,) = keep(url)
    begun = counted(scheduler)
    request = Request("r", [kept.reference, kept.reference], kept.tokens)
    assert ended(scheduler, request, computed * kept.tokens)
    assert begun == [kept.reference]
    scheduler.update_state_after_alloc(request, computed)
    assert torch.equal(bits(step(scheduler, worker)[kept.reference]), bits(rows))
    assert scheduler.ensure_cache_available(request, 2 * kept.tokens)
    request.num_output_tokens = 1
    step(scheduler, worker)
    assert not scheduler.fetches
    assert scheduler.stats.data["loaded"] == len(begun) == 1


def counted(scheduler: Any) -> list[str]:
    """The ids that it fetches from now on."""
    begin, begun = scheduler.source.begin, []

    def count(name: str) -> Any:
        begun.append(name)
        return begin(name)

    scheduler.source.begin = count
    return begun


def test_what_vllms_encoder_cache_has_is_not_fetched_again(halves: Halves, url: str) -> None:
    scheduler, worker = halves()
    begun = counted(scheduler)
    kept, _ = keep(url, 2)
    one, other = (each.reference for each in kept)

    def run(request_id: str, *names: str, evicted: Sequence[str] = ()) -> None:
        request = Request(request_id, list(names), kept[0].tokens)
        assert ended(scheduler, request)
        for index, name in enumerate(names):
            if name not in cache:
                scheduler.update_state_after_alloc(request, index)
        step(scheduler, worker, cache=cache, evicted=evicted)
        for name in evicted:
            del cache[name]
        scheduler.request_finished(request)

    cache: dict[str, torch.Tensor] = {}
    for request_id in "abc":
        run(request_id, one)
    assert begun == [one]
    # vLLM may make room for an item by evicting another one of its request, which it then needs.
    run("d", other, one)
    assert begun == [one, other, one]
    assert scheduler.stats.data["loaded"] == 2
    run("e", other, one, evicted=[one])
    run("f", one)
    assert begun == [one, other, one, one]
    assert not scheduler.fetches


def test_what_vllm_may_evict_in_this_step_is_fetched(halves: Halves, url: str) -> None:
    scheduler, worker = halves()
    kept, _ = keep(url, 2)
    one, other, last = (
        Request(name, [each.reference], each.tokens)
        for name, each in zip("abc", [*kept, kept[0]], strict=True)
    )
    for request in (one, other):
        assert ended(scheduler, request)
    scheduler.update_state_after_alloc(one, 0)
    step(scheduler, worker)
    scheduler.request_finished(one)
    assert scheduler.ensure_cache_available(last, 0)
    assert scheduler.ensure_cache_available(other, 0), "for which vLLM may now evict"
    assert not scheduler.ensure_cache_available(last, 0)
    assert ended(scheduler, last)
    scheduler.update_state_after_alloc(last, 0)
    assert step(scheduler, worker)
    assert not scheduler.take_unavailable_requests()


def test_vllms_encoder_cache_may_be_emptied(
    halves: Halves, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, worker = halves()
    (kept,), (rows,) = keep(url)
    requests = [Request(name, [kept.reference], kept.tokens) for name in "abc"]
    found = []
    for number, request in enumerate(requests):
        assert ended(scheduler, request)
        assert scheduler.has_cache_item(kept.reference), "it must have rows, or vLLM would end"
        if number == 2:
            with Client(url) as client:
                client.release(kept.reference)
        scheduler.update_state_after_alloc(request, 0)
        found.append(step(scheduler, worker)[kept.reference])
        scheduler.request_finished(request)
    assert [torch.equal(bits(one), bits(rows)) for one in found] == [True, True, False]
    assert found[2].shape == rows.shape
    assert scheduler.take_unavailable_requests() == {"c"}
    assert "cannot be fetched again" in caplog.text
    assert not scheduler.fetches


def test_an_item_that_is_lost_leaves_no_other_item_of_its_request_without_rows(
    halves: Halves, url: str
) -> None:
    """vLLM would end."""
    scheduler, worker = halves()
    kept, rows = keep(url, 2)
    names = [one.reference for one in kept]
    found = []
    for request_id in "ab":
        request = Request(request_id, names, kept[0].tokens)
        assert ended(scheduler, request)
        assert all(map(scheduler.has_cache_item, names))
        for index in range(2):
            scheduler.update_state_after_alloc(request, index)
        found.append(step(scheduler, worker))
        scheduler.request_finished(request)
        with Client(url) as client:
            client.release(names[request_id == "b"])
    assert [each.keys() for each in found] == [set(names)] * 2, "its encoder cache was emptied"
    assert not found[1][names[0]].any()
    assert torch.equal(bits(found[1][names[1]]), bits(rows[1]))
    assert scheduler.take_unavailable_requests() == {"b"}
    assert not ended(scheduler, Request("c", names[1:], kept[0].tokens)), "it is fetched again"


def test_a_step_waits_once_for_what_is_fetched_again(
    halves: Halves, url: str, connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector_module, "TIMEOUT_SECONDS", 1.5)
    scheduler, worker = halves()
    kept, _ = keep(url, 2)
    request = Request("r", [one.reference for one in kept], kept[0].tokens)
    scheduler.cached = {one.reference: one.shape for one in kept}
    assert scheduler.ensure_cache_available(request, 0)
    monkeypatch.setattr(scheduler.source, "begin", lambda name: Future())
    for _ in range(2):
        began = time.monotonic()
        for index in range(2):
            scheduler.update_state_after_alloc(request, index)
        assert 1.4 < time.monotonic() - began < 2.9
        assert len(step(scheduler, worker)) == 2
        scheduler.cached = {one.reference: one.shape for one in kept}


def test_a_failed_embedding_is_counted_once(halves: Halves, url: str) -> None:
    """Although vLLM schedules again before it asks what has failed."""
    scheduler, _ = halves()
    request = Request("r", ["replica.unknown", "replica.gone"], 4)
    for _ in range(3):
        assert not ended(scheduler, request)
    until(lambda: all(fetch.rows.done() for fetch in scheduler.fetches.values()))
    assert not scheduler.ensure_cache_available(request, 0)
    assert scheduler.take_unavailable_requests() == {"r"}
    assert scheduler.stats.data["failed"] == 2


def test_a_thread_that_cannot_be_started_fails_one_request(
    halves: Halves, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept,), _ = keep(url)
    scheduler, _ = halves()
    request, other = (Request(name, [kept.reference], kept.tokens) for name in "ab")

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert not scheduler.ensure_cache_available(request, 0)
    assert scheduler.take_unavailable_requests() == {"a"}
    scheduler.request_finished(request)
    begun: list[str] = []
    monkeypatch.setattr(scheduler.source, "_fetch", begun.append)
    other.identifiers = ["replica.other"]
    scheduler.ensure_cache_available(other, 0)
    until(lambda: begun != [])
    assert begun == ["replica.other"], "nobody would free the rows of the first"


def test_rows_of_a_request_that_was_preempted_stay_until_a_later_token(
    halves: Halves, url: str
) -> None:
    """In a pipeline, tokens of steps before its preemption arrive after it is scheduled again."""
    scheduler, worker = halves()
    (kept,), _ = keep(url)
    request = Request("r", [kept.reference], kept.tokens, num_output_tokens=5)
    request.num_stale_output_tokens = 1
    assert ended(scheduler, request)
    scheduler.update_state_after_alloc(request, 0)
    step(scheduler, worker)
    request.num_output_tokens, request.num_stale_output_tokens = 6, 0
    step(scheduler, worker)
    assert scheduler.fetches, "the step that copies them may not have begun"
    request.num_output_tokens = 7
    step(scheduler, worker)
    assert not scheduler.fetches


def test_what_is_not_there_or_does_not_fit_fails_its_request(halves: Halves, url: str) -> None:
    (kept,), _ = keep(url)
    for name, tokens, hidden in (
        ("replica.unknown", kept.tokens, HIDDEN),
        (kept.reference, kept.tokens + 1, HIDDEN),
        (kept.reference, kept.tokens, HIDDEN // 2),
    ):
        scheduler, _ = halves(hidden=hidden)
        request = Request("r", [name], tokens)
        assert not ended(scheduler, request)
        assert scheduler.take_unavailable_requests() == {"r"}
        assert not scheduler.take_unavailable_requests()
        scheduler.request_finished(request)


def test_an_answer_that_never_ends_fails_its_request(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm_rows, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(vllm_rows, "PLACE_SECONDS", 0.1)

    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    with answering(trickle) as url, connected(connector_module, url) as scheduler:
        assert not ended(scheduler, Request("r", ["replica.x"], 4))
    assert "embedding replica.x: not received within 0.5 s" in caplog.text


def test_a_long_queue_is_fetched_a_few_at_a_time(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "FETCHES_AT_ONCE", 2)
    here, most, two = 0, 0, asyncio.Barrier(2)
    monkeypatch.setattr(vllm_rows.RowSource, "_connect", lambda self, name: None)

    async def refuse(writer: asyncio.StreamWriter) -> None:
        nonlocal here, most
        here += 1
        most = max(most, here)
        await two.wait()
        await asyncio.sleep(0.05)
        here -= 1
        writer.write(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")

    requests = [Request(str(i), [f"replica.{i}"], 4) for i in range(6)]
    with answering(refuse) as url, connected(connector_module, url) as scheduler:
        for request in requests:
            assert not scheduler.ensure_cache_available(request, 0)
        for request in requests:
            assert not ended(scheduler, request)
            assert scheduler.take_unavailable_requests() == {request.request_id}
    assert most == 2


def test_fetches_that_wait_for_their_turn_do_not_delay_a_shutdown(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_rows, "FETCHES_AT_ONCE", 2)
    monkeypatch.setattr(vllm_rows, "TIMEOUT_SECONDS", 1)
    monkeypatch.setattr(vllm_rows.RowSource, "_connect", lambda self, name: None)
    asked = 0

    async def silent(writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(5)

    with answering(silent) as url, connected(connector_module, url) as scheduler:
        for i in range(8):
            assert not scheduler.ensure_cache_available(Request(str(i), [f"replica.{i}"], 4), 0)
        while asked < 2:
            time.sleep(0.001)
        began = time.monotonic()
        scheduler.shutdown()
        assert time.monotonic() - began < 2
    assert asked == 2


def test_of_a_long_queue_as_much_is_fetched_as_there_is_room_for(halves: Halves, url: str) -> None:
    (kept,), (rows,) = keep(url)
    scheduler, worker = halves(ahead_bytes=3 * rows.nbytes)
    begun = counted(scheduler)
    queue = [Request(str(i), [kept.reference], kept.tokens, adapter=f"lora{i}:") for i in range(9)]
    end, most = time.monotonic() + 60, 0
    while queue:
        assert time.monotonic() < end
        here = [one for one in queue if scheduler.ensure_cache_available(one, 0)]
        most = max(most, len(scheduler.fetches))
        for request in here[:1]:  # for more vLLM has no room
            queue.remove(request)
            scheduler.update_state_after_alloc(request, 0)
            request.num_output_tokens = 1
        step(scheduler, worker)
    assert most == 3
    assert len(begun) == 9


def test_what_the_oldest_request_needs_is_fetched_whatever_it_takes(
    halves: Halves, url: str
) -> None:
    kept, rows = keep(url, 2)
    scheduler, worker = halves(ahead_bytes=rows[0].nbytes)
    large, small = (
        Request(f"r{len(names)}", names, kept[0].tokens)
        for names in ([one.reference for one in kept], [kept[1].reference + "x"])
    )
    assert not scheduler.ensure_cache_available(large, 0)
    assert not scheduler.ensure_cache_available(small, 0)
    assert list(scheduler.fetches) == [one.reference for one in kept]
    assert ended(scheduler, large)
    scheduler.request_finished(large)
    step(scheduler, worker)
    assert not ended(scheduler, small)
    assert scheduler.take_unavailable_requests() == {"r1"}


@contextmanager
def connected(module: ModuleType, url: str) -> Iterator[Any]:
    """A connector of the scheduler."""
    scheduler = module.EncoderServiceConnector(config(url), ECConnectorRole.SCHEDULER)
    yield scheduler
    scheduler.shutdown()


def test_what_brings_its_own_rows_or_pixels_is_not_asked_for(halves: Halves) -> None:
    scheduler, _ = halves()
    keys = (
        "image_embeds",
        "video_embeds",
        "pixel_values",
        "pixel_values_videos",
        "pixel_values_flat",
    )
    for key in keys:
        for name in ("photo.jpg", "0123abcd"):
            request = Request("r", [name], 4, ("image_grid_thw", key))
            assert scheduler.ensure_cache_available(request, 0)
    assert not scheduler.fetches


def test_what_comes_with_a_grid_alone_is_asked_for(connector_module: ModuleType) -> None:
    """All of content_part's keys for references, and none of those that are rows or pixels."""
    is_reference = connector_module.is_reference
    for keys in (
        ["image_grid_thw"],
        ["video_grid_thw"],
        ["video_grid_thw", "timestamps"],
        ["video_grid_thw", "second_per_grid_ts"],
    ):
        assert is_reference(SimpleNamespace(data=dict.fromkeys(keys)))
        assert not is_reference(SimpleNamespace(data=dict.fromkeys([*keys, "video_embeds"])))
    assert not is_reference(SimpleNamespace(data=None))


def test_an_id_that_vllm_replaced_fails_its_request_alone(
    halves: Halves, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, _ = halves()
    (kept,), _ = keep(url)
    replaced, whole = (Request(name, [name], kept.tokens) for name in ("0123abcd", kept.reference))
    assert not ended(scheduler, replaced)
    assert scheduler.take_unavailable_requests() == {"0123abcd"}
    assert "neither mm_processor_kwargs nor media_io_kwargs" in caplog.text
    assert ended(scheduler, whole)


def test_an_item_of_any_name_may_bring_its_id(halves: Halves, url: str) -> None:
    scheduler, worker = halves()
    (kept,), (rows,) = keep(url)
    request = Request("r", ["a hash"], kept.tokens, reference=content_id(kept.reference))
    assert ended(scheduler, request)
    scheduler.update_state_after_alloc(request, 0)
    assert torch.equal(bits(step(scheduler, worker)["a hash"]), bits(rows))


def test_an_adapter_of_the_tower_does_not_hide_the_id(halves: Halves, url: str) -> None:
    scheduler, worker = halves()
    (kept,), (rows,) = keep(url)
    request = Request("r", [kept.reference], kept.tokens, adapter="lora.1:")
    assert ended(scheduler, request)
    scheduler.update_state_after_alloc(request, 0)
    cache = step(scheduler, worker)
    found = cache[f"lora.1:{kept.reference}"]
    assert torch.equal(found.view(torch.uint8), rows.view(torch.uint8))


def test_a_vllm_that_cannot_fail_one_request_is_refused(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(connector_module.ECConnectorBase, "take_unavailable_requests")
    with pytest.raises(ValueError, match="waits for ever"):
        connector_module.EncoderServiceConnector(config("http://a"), ECConnectorRole.SCHEDULER)


def test_what_is_counted_for_a_vllm_that_does_not_ask_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_stats, "MOST_SECONDS", 2)
    stats = vllm_stats.LoadStats()
    for _ in range(3):
        stats.loaded(10, 0.5)
    assert stats.data["seconds"] == [0.5, 0.5]
    assert (stats.data["loaded"], stats.data["bytes"]) == (3, 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": None}, "url: Field required"),
        ({"url": "grpc://a:1"}, "url: String should match"),
        ({"ahead_bytes": 0}, "ahead_bytes: .* greater than 0"),
        ({"ahead_byte": 1}, "ahead_byte: Extra inputs are not permitted. Its keys are url"),
        ({"place": "locall"}, """place is 'locall': use "local" .* or "remote\""""),
        ({"producer": True}, "consumer"),
        ({"cache": "shm"}, "--mm-processor-cache-type is shm"),
        ({"deepstack": (5, 11, 17)}, "--limit-mm-per-prompt is 0 .*deepstack"),
    ],
)
def test_what_it_cannot_be(
    connector_module: ModuleType, options: dict[str, Any], message: str
) -> None:
    made = config(**{"url": "http://a"} | options)
    with pytest.raises(ValueError, match=message):
        connector_module.EncoderServiceConnector(made, ECConnectorRole.SCHEDULER)


def test_deepstack_features_need_the_tower(halves: Halves) -> None:
    assert all(halves(deepstack=(5, 11, 17), limit=1, place="remote"))
