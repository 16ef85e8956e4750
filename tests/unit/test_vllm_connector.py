"""The EC connector between the service over real HTTP and a stand-in for vLLM's own half."""

from __future__ import annotations

import asyncio
import enum
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from actors.references import Kept
from actors.types import Answer, Dtype, Media
from actors.types import Embedding as Encoded
from encoder_service.client import Client, ServiceError
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
    base.ECConnectorBase, base.ECConnectorMetadata = ECConnectorBase, ECConnectorMetadata
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


def config(url: str | None, producer: bool = False) -> Any:
    extra = {} if url is None else {"url": url}
    transfer = SimpleNamespace(is_ec_producer=producer, get_from_extra_config=extra.get)
    model = SimpleNamespace(dtype=torch.bfloat16, get_inputs_embeds_size=lambda: HIDDEN)
    return SimpleNamespace(ec_transfer_config=transfer, model_config=model)


@dataclass
class Request:
    """vllm.v1.request.Request, as far as a connector reads it."""

    identifiers: list[str]
    tokens: int

    @property
    def mm_features(self) -> list[Any]:
        return [SimpleNamespace(identifier=name) for name in self.identifiers]

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.tokens


def test_a_step_gets_its_embeddings_by_id(connector_module: ModuleType, url: str) -> None:
    connect = connector_module.EncoderServiceConnector
    scheduler = connect(config(url), ECConnectorRole.SCHEDULER)
    worker = connect(config(url), ECConnectorRole.WORKER)
    with Client(url) as client:
        files = [jpeg(64, 64), jpeg(64, 64, "chelsea.png")]
        kept = client.encode(files, reference=True)
        rows = [one.torch() for one in client.encode(files)]
        names = [one.to_vllm()["uuid"] for one in kept]
        request = Request([*names, "0123abcd", "replica.unknown"], kept[0].tokens)
        assert [scheduler.has_cache_item(name) for name in request.identifiers] == [
            True, True, False, False,
        ]  # fmt: skip
        for index in range(4):
            scheduler.update_state_after_alloc(request, index)
        worker.bind_connector_metadata(scheduler.build_connector_meta(None))
        mine = torch.zeros(1)
        cache = {names[1]: mine}
        worker.start_load_caches(cache)
        assert set(cache) == set(names)
        assert torch.equal(cache[names[0]].view(torch.uint8), rows[0].view(torch.uint8))
        assert cache[names[1]] is mine, "what is there already is not fetched again"
        assert not scheduler.build_connector_meta(None).tokens
        client.release(names[0])
        assert not scheduler.has_cache_item(names[0])
        with pytest.raises(ServiceError, match="not_found"):
            worker.start_load_caches({})
    for one in (scheduler, worker):
        one.save_caches({}, "x")
        one.shutdown()


def test_what_does_not_fit_the_prompt_is_refused(connector_module: ModuleType, url: str) -> None:
    worker = connector_module.EncoderServiceConnector(config(url), ECConnectorRole.WORKER)
    with Client(url) as client:
        (kept,) = client.encode([jpeg(64, 64)], reference=True)
    worker.bind_connector_metadata(connector_module.Loads({kept.reference: kept.tokens + 1}))
    with pytest.raises(ValueError, match="the prompt has room for"):
        worker.start_load_caches({})
    worker.shutdown()


def test_a_service_that_is_not_there_has_nothing(connector_module: ModuleType) -> None:
    one = connector_module.EncoderServiceConnector(
        config("http://127.0.0.1:9"), ECConnectorRole.SCHEDULER
    )
    assert not one.has_cache_item("replica.name")
    one.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((None,), "url is None"), (("grpc://a:1",), "url is 'grpc"), (("http://a", True), "consumer")],
)
def test_what_it_cannot_be(connector_module: ModuleType, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connector_module.EncoderServiceConnector(config(*arguments), ECConnectorRole.SCHEDULER)
