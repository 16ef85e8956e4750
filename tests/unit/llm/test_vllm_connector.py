"""The EC connector between the service over real HTTP and a stand-in for vLLM's own half.

Within vLLM itself: tests/engines.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from actors.store.kept import Kept
from actors.types import Answer, Dtype, Media
from actors.types import Embedding as Encoded
from encoder_service.api.http import build
from encoder_service.client import Client, Embedding
from encoder_service.engines import vllm_stats
from router.replicas.serve_fleet import unknown
from tests.images import jpeg
from tests.unit.front_door import service
from tests.unit.proxied import Distinct, in_a_thread
from tests.unit.vllm_half import HIDDEN, ECConnectorRole, Request, answering, config, stand_in


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """encoder_service.engines.vllm_connector as vLLM would load it."""
    stand_in(monkeypatch)
    import encoder_service.engines.vllm_connector as module

    yield module
    del sys.modules["encoder_service.engines.vllm_connector"]


class Keeping(Distinct):
    """Keeps what it is asked to, under names with a dot."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Kept] = {}

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **options: Any
    ) -> list[Answer]:
        answers = await super().encode(media, dtype, timeout_seconds)
        for position, (one, answer) in enumerate(zip(media, answers, strict=True)):
            if options["reference"] and isinstance(answer, Encoded):
                name = f"replica.{one.digest[:8]}"
                self.kept[name] = Kept(one, answer)
                answers[position] = replace(answer, reference=name)
        return answers

    async def fetch(self, reference: str) -> Kept:
        if reference not in self.kept:
            raise unknown(reference)
        return self.kept[reference]

    async def release(self, reference: str) -> None:
        del self.kept[reference]


@pytest.fixture
def url() -> Iterator[str]:
    """The service with its references."""
    with in_a_thread(build(service(Keeping()))) as address:
        yield address


Halves = Callable[..., tuple[Any, Any]]


@pytest.fixture
def halves(connector_module: ModuleType, url: str) -> Iterator[Halves]:
    """Makes a connector of the scheduler and one of a worker."""
    made: list[Any] = []

    def make(**options: Any) -> tuple[Any, Any]:
        connect = connector_module.EncoderServiceConnector
        for role in ECConnectorRole:
            made.append(connect(config(url, **options), role))
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
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    mine = torch.zeros(1)
    cache = {names[1]: mine}
    worker.start_load_caches(cache)
    assert set(cache) == set(names)
    assert torch.equal(cache[names[0]].view(torch.uint8), rows[0].view(torch.uint8))
    assert cache[names[1]] is mine, "what is there already stays"
    assert not scheduler.build_connector_meta(None).rows
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
    monkeypatch.setattr(connector_module, "TIMEOUT_SECONDS", 0.5)

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
    monkeypatch.setattr(connector_module, "FETCHES_AT_ONCE", 2)
    here, most, two = 0, 0, asyncio.Barrier(2)

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


def test_an_adapter_of_the_tower_does_not_hide_the_id(halves: Halves, url: str) -> None:
    scheduler, worker = halves()
    (kept,), (rows,) = keep(url)
    request = Request("r", [kept.reference], kept.tokens, adapter="lora.1:")
    assert ended(scheduler, request)
    scheduler.update_state_after_alloc(request, 0)
    worker.bind_connector_metadata(scheduler.build_connector_meta(None))
    cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(cache)
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
    ("arguments", "message"),
    [
        ((None,), "url is None"),
        (("grpc://a:1",), "url is 'grpc"),
        (("http://a", True), "consumer"),
        (("http://a", False, HIDDEN, "shm"), "mm_processor_cache_type is shm"),
    ],
)
def test_what_it_cannot_be(connector_module: ModuleType, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connector_module.EncoderServiceConnector(config(*arguments), ECConnectorRole.SCHEDULER)
