"""A stand-in for vLLM's half of an EC connector, and services that answer as they like."""

from __future__ import annotations

import asyncio
import enum
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

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

    def take_unavailable_requests(self) -> set[str]:
        return set()


class Scheduler:
    """Of vllm/v1/core/sched/scheduler.py, as far as a connector changes it."""

    def __init__(self, running: list[Any]) -> None:
        self.running = running
        self.max_num_scheduled_tokens = 2048
        self.need_mamba_block_aligned_split = False
        self.cache_config = SimpleNamespace(block_size=544)

    def schedule(self, throttle_prefills: bool = False) -> int:
        if throttle_prefills:
            raise RuntimeError("throttled")
        return self.max_num_scheduled_tokens


def running(computed: int, prompt: int = 4000, drafts: int = 0) -> Any:
    """A request in `Scheduler.running`. `drafts`: tokens that its speculative decoding checks in
    each step."""
    total = max(prompt, computed + 1 + drafts)
    return SimpleNamespace(
        num_computed_tokens=computed,
        num_prompt_tokens=prompt,
        num_tokens_with_spec=total - 1,
        num_output_placeholders=1,  # as with async scheduling
    )


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts them where vLLM's own would be."""
    folder = "vllm.distributed.ec_transfer.ec_connector"
    names = ["vllm", "vllm.distributed", "vllm.distributed.ec_transfer", folder]
    scheduler = "vllm.v1.core.sched.scheduler"
    names += ["vllm.v1", "vllm.v1.core", "vllm.v1.core.sched", scheduler]
    for name in [*names, f"{folder}.base", "vllm.platforms"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules[scheduler])["Scheduler"] = Scheduler
    base: Any = sys.modules[f"{folder}.base"]
    for one in (ECConnectorBase, ECConnectorMetadata, ECConnectorRole):
        setattr(base, one.__name__, one)
    platforms: Any = sys.modules["vllm.platforms"]
    platforms.current_platform = SimpleNamespace(device_type="cpu")


def config(
    url: str | None,
    producer: bool = False,
    hidden: int = HIDDEN,
    cache: str = "lru",
    workers: int = 1,
    rank: int = 0,
    ahead_bytes: int = 2**20,
    deepstack: tuple[int, ...] = (),
    limit: int = 0,
    **others: Any,
) -> Any:
    """`limit`: of videos in a prompt; images have none. `others`: keys of the connector."""
    extra: dict[str, Any] = {"ahead_bytes": ahead_bytes} | ({} if url is None else {"url": url})
    extra |= others
    transfer = SimpleNamespace(
        is_ec_producer=producer,
        ec_connector_extra_config=extra,
        get_from_extra_config=extra.get,
    )
    multimodal = SimpleNamespace(
        mm_processor_cache_type=cache,
        mm_processor_kwargs=None,
        get_limit_per_prompt={"image": 0, "video": limit}.__getitem__,
    )
    vision = SimpleNamespace(deepstack_visual_indexes=deepstack)
    parallel = SimpleNamespace(world_size=workers, pipeline_parallel_size=1, rank=rank)
    model = SimpleNamespace(
        dtype=torch.bfloat16,
        get_inputs_embeds_size=lambda: hidden,
        multimodal_config=multimodal,
        hf_config=SimpleNamespace(vision_config=vision),
    )
    return SimpleNamespace(
        ec_transfer_config=transfer, model_config=model, parallel_config=parallel
    )


def configured(
    model: str,
    cards: int = 1,
    cache: str = "lru",
    scheduler: type[Any] = Scheduler,
    **options: Any,
) -> Any:
    """As `config`, for place "local". `options`: keys of the connector."""
    vllm = config(None, cache=cache)
    extra = {"place": "local", "graphs": {"token_budgets": [128]}, **options}
    vllm.ec_transfer_config.ec_connector_extra_config = extra
    vllm.ec_transfer_config.get_from_extra_config = extra.get
    vllm.parallel_config = SimpleNamespace(world_size_across_dp=cards)
    vllm.scheduler_config = SimpleNamespace(
        max_num_seqs=8, max_num_batched_tokens=2048, get_scheduler_cls=lambda: scheduler
    )
    vllm.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[8, 256, 448, 768])
    vllm.load_config = SimpleNamespace(load_format="dummy")
    vllm.model_config.model, vllm.model_config.revision = model, None
    vllm.model_config.dtype = torch.float32
    return vllm


@dataclass
class Request:
    """vllm.v1.request.Request, as far as a connector reads it: items one after the other."""

    request_id: str
    identifiers: list[str]
    tokens: int
    keys: tuple[str, ...] = ("image_grid_thw",)
    adapter: str = ""
    """Of LoRA, with a colon."""
    reference: str = ""
    """The id of all items, whatever their identifiers."""
    num_output_tokens: int = 0
    num_stale_output_tokens: int = 0
    """Of steps before it was preempted, whose tokens have not arrived."""
    skip_reading_prefix_cache: bool = False

    @property
    def mm_features(self) -> list[Any]:
        data: dict[str, Any] = dict.fromkeys(self.keys)
        if self.reference:
            coded = torch.tensor(list(self.reference.encode()), dtype=torch.uint8)
            data["reference"] = SimpleNamespace(data=coded)
        return [
            SimpleNamespace(
                identifier=self.adapter + name,
                mm_hash=name,
                data=data,
                mm_position=SimpleNamespace(offset=i * self.tokens, length=self.tokens),
            )
            for i, name in enumerate(self.identifiers)
        ]

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.tokens


@contextmanager
def answering(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> Iterator[str]:
    """A service that does with every connection as it likes."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        try:
            await answer(writer)
        except ConnectionError:  # whoever asked is gone
            pass
        finally:
            writer.close()

    async def begin() -> asyncio.Server:
        return await asyncio.start_server(connected, "127.0.0.1", 0)

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for one in others:
            one.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:  # a thread that runs on would keep pytest from ending
        loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
