"""The EC connector between the service over real HTTP and a stand-in for vLLM's own half.

Within vLLM itself: tests/engines.
"""

from __future__ import annotations

import asyncio
import enum
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from actors.references import Kept
from actors.types import Answer, Dtype, Media
from actors.types import Embedding as Encoded
from encoder_service.client import Client, Embedding
from encoder_service.http import build
from router.references import unknown
from tests.images import jpeg
from tests.unit.front_door import service
from tests.unit.proxied import Distinct, listening

HIDDEN = 64
"""192 in a row: with two deepstack features."""


class ECConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class ECConnectorMetadata(ABC):  # noqa: B024
    pass


class ECConnectorBase(ABC):
    """The abstract methods and what they share, of vllm/distributed/ec_transfer 0.33."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        self._connector_metadata: ECConnectorMetadata | None = None
        self._vllm_config = vllm_config
        self._role = role
        self.is_producer = vllm_config.ec_transfer_config.is_ec_producer

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        self._connector_metadata = connector_metadata

    def _get_connector_metadata(self) -> ECConnectorMetadata:
        assert self._connector_metadata is not None
        return self._connector_metadata

    @abstractmethod
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None: ...

    @abstractmethod
    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None: ...

    @abstractmethod
    def has_cache_item(self, identifier: str) -> bool: ...

    @abstractmethod
    def update_state_after_alloc(self, request: Any, index: int) -> None: ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata: ...


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """encoder_service.vllm_connector as vLLM would load it."""
    folder = "vllm.distributed.ec_transfer.ec_connector"
    names = ["vllm", "vllm.distributed", "vllm.distributed.ec_transfer", folder]
    for name in [*names, f"{folder}.base", "vllm.platforms"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    base: Any = sys.modules[f"{folder}.base"]
    for one in (ECConnectorBase, ECConnectorMetadata, ECConnectorRole):
        setattr(base, one.__name__, one)
    platforms: Any = sys.modules["vllm.platforms"]
    platforms.current_platform = SimpleNamespace(device_type="cpu")
    import encoder_service.vllm_connector as module

    yield module
    del sys.modules["encoder_service.vllm_connector"]


class Keeping(Distinct):
    """Keeps what it is asked to, under names with a dot."""

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
    """The service with its references, in a thread of its own."""
    ready, end, found = threading.Event(), threading.Event(), list[str]()

    async def serve() -> None:
        async with listening(build(service(Keeping()))) as address:
            found.append(address)
            ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    end.set()
    thread.join(60)


def config(url: str | None, producer: bool = False, hidden: int = HIDDEN) -> Any:
    extra = {} if url is None else {"url": url}
    transfer = SimpleNamespace(is_ec_producer=producer, get_from_extra_config=extra.get)
    model = SimpleNamespace(dtype=torch.bfloat16, get_inputs_embeds_size=lambda: hidden)
    return SimpleNamespace(ec_transfer_config=transfer, model_config=model)


@dataclass
class Request:
    """vllm.v1.request.Request, as far as a connector reads it: items one after the other."""

    request_id: str
    identifiers: list[str]
    tokens: int
    keys: tuple[str, ...] = ("image_grid_thw",)

    @property
    def mm_features(self) -> list[Any]:
        return [
            SimpleNamespace(
                identifier=name,
                data=dict.fromkeys(self.keys),
                mm_position=SimpleNamespace(offset=i * self.tokens, length=self.tokens),
            )
            for i, name in enumerate(self.identifiers)
        ]

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.tokens


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


def test_what_brings_its_own_rows_or_pixels_is_not_asked_for(halves: Halves) -> None:
    scheduler, _ = halves()
    for key in ("image_embeds", "video_embeds", "pixel_values", "pixel_values_videos"):
        request = Request("r", ["photo.jpg"], 4, ("image_grid_thw", key))
        assert scheduler.ensure_cache_available(request, 0)
    assert scheduler.ensure_cache_available(Request("r", ["0123abcd"], 4), 0), "vLLM's own hash"
    assert not scheduler.fetches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((None,), "url is None"), (("grpc://a:1",), "url is 'grpc"), (("http://a", True), "consumer")],
)
def test_what_it_cannot_be(connector_module: ModuleType, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connector_module.EncoderServiceConnector(config(*arguments), ECConnectorRole.SCHEDULER)
