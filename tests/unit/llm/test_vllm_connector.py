"""The EC connector between the service, with its rows server, and a stand-in for vLLM's own half.

Within vLLM itself: tests/engines.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from actors.rows.memory import BlockMemory
from actors.rows.protocol import RowsPlace
from actors.rows.server import RowsServer
from actors.store.kept import Kept
from actors.types import Answer, Dtype, Media
from actors.types import Embedding as Encoded
from encoder_service.api.http import build
from encoder_service.client import Client, Embedding
from encoder_service.engines import vllm_rows, vllm_stats
from encoder_service.engines.vllm import content_id
from encoder_service.engines.vllm_rows import RowsAt
from router.replicas.serve_fleet import unknown
from tests.images import jpeg
from tests.unit.front_door import service
from tests.unit.proxied import Distinct, in_a_thread
from tests.unit.rows.kept import Dictionary, serving
from tests.unit.vllm_half import HIDDEN, ECConnectorRole, Request, answering, config, stand_in


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """encoder_service.engines.vllm_connector as vLLM would load it."""
    stand_in(monkeypatch)
    import encoder_service.engines.vllm_connector as module

    yield module
    del sys.modules["encoder_service.engines.vllm_connector"]


class Keeping(Distinct):
    """Keeps what it is asked to, as a replica does."""

    def __init__(self, memory: BlockMemory | None = None) -> None:
        super().__init__()
        self.store = Dictionary(memory, deepstack=2)
        self.kept: dict[str, Kept] = {}
        self.at = RowsPlace("", "")

    async def place(self, reference: str) -> RowsPlace:
        return self.at

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **options: Any
    ) -> list[Answer]:
        answers = await super().encode(media, dtype, timeout_seconds)
        for position, (one, answer) in enumerate(zip(media, answers, strict=True)):
            if options["reference"] and isinstance(answer, Encoded):
                assert isinstance(answer.data, np.ndarray)
                rows = torch.from_numpy(answer.data.copy()).view(torch.bfloat16)
                name = f"replica.{self.store.keep(rows.view(answer.shape))}"
                self.kept[name] = Kept(one, answer)
                answers[position] = replace(answer, reference=name)
        return answers

    async def fetch(self, reference: str) -> Kept:
        if reference not in self.kept:
            raise unknown(reference)
        return self.kept[reference]

    async def release(self, reference: str) -> None:
        del self.kept[reference]
        del self.store.tensors[reference.partition(".")[2]]


@pytest.fixture
def url() -> Iterator[str]:
    """The service with its references, of which only the front door can be reached."""
    with in_a_thread(build(service(Keeping()))) as address:
        yield address


class Encoders:
    """The service, with a replica whose rows server can be reached."""

    def __init__(self, folder: Path) -> None:
        self.memory = BlockMemory.shared(2**20)
        self.fleet = Keeping(self.memory)
        self.store = self.fleet.store
        self.folder = folder
        self.stack = ExitStack()
        self.server: RowsServer | None = None
        self.begin("rows")
        app = service(self.fleet)
        self.url = self.stack.enter_context(in_a_thread(build(app)))

    def begin(self, name: str) -> None:
        """Starts the replica's rows server, again if it has died."""
        (self.folder / name).mkdir()
        served = serving(self.store, self.folder / name)
        self.server, self.fleet.at = self.stack.enter_context(served)


@pytest.fixture
def encoders(tmp_path: Path) -> Iterator[Encoders]:
    made = Encoders(tmp_path)
    yield made
    made.stack.close()


Halves = Callable[..., tuple[Any, Any]]


@pytest.fixture
def halves(connector_module: ModuleType, url: str) -> Iterator[Halves]:
    """Makes a connector of the scheduler and one of a worker."""
    made: list[Any] = []

    def make(address: str = "", **options: Any) -> tuple[Any, Any]:
        connect = connector_module.EncoderServiceConnector
        for role in ECConnectorRole:
            made.append(connect(config(address or url, **options), role))
        return made[-2], made[-1]

    yield make
    for one in made:
        one.shutdown()


def ended(scheduler: Any, request: Request, computed: int = 0) -> bool:
    """Whether all is there, once it is decided: False, and the request has failed."""
    end = time.monotonic() + 60
    while not scheduler.ensure_cache_available(request, computed):
        if scheduler.failed:
            return False
        assert time.monotonic() < end
        time.sleep(0.001)
    return True


def step(
    scheduler: Any,
    *workers: Any,
    cache: dict[str, torch.Tensor] | None = None,
    evicted: Sequence[str] = (),
) -> dict[str, torch.Tensor]:
    """What the workers have in their encoder caches, which are all the same."""
    output = SimpleNamespace(free_encoder_mm_hashes=evicted)
    metadata = pickle.loads(pickle.dumps(scheduler.build_connector_meta(output)))
    caches = [{} if cache is None else cache for _ in workers]
    for worker, each in zip(workers, caches, strict=True):
        worker.bind_connector_metadata(metadata)
        worker.start_load_caches(each)
        assert each.keys() == caches[0].keys()
        assert all(torch.equal(bits(each[name]), bits(caches[0][name])) for name in each)
    return caches[0]


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8)


def keep(url: str, count: int = 1) -> tuple[list[Embedding], list[torch.Tensor]]:
    """References, and the rows that they stand for."""
    files = [jpeg(64, 64), jpeg(64, 64, "chelsea.png")][:count]
    with Client(url) as client:
        return client.encode(files, reference=True), [one.torch() for one in client.encode(files)]


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
        ({"place": "locall"}, "place: Input should be 'remote'"),
        ({"producer": True}, "consumer"),
        ({"cache": "shm"}, "mm_processor_cache_type is shm"),
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


# Places: where rows are read past the front door


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


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


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
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    answered(scheduler, worker, kept=kept)
    answered(scheduler, worker, kept=kept)
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
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    for _ in range(2):
        answered(scheduler, worker, kept=kept)
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
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    for _ in range(2):
        answered(scheduler, worker, kept=kept)
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
    scheduler, worker = halves(encoders.url)
    (kept,), _ = keep(encoders.url)
    for _ in range(2):
        answered(scheduler, worker, kept=kept)
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
