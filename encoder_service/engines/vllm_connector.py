"""An EC connector: a vLLM server gets embeddings by their ids from the encoder service.

    vllm serve MODEL --enable-mm-embeds --ec-transfer-config '{
        "ec_connector": "EncoderServiceConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "encoder_service.engines.vllm_connector",
        "ec_connector_extra_config": {"url": "http://127.0.0.1:8000"}}'

A request then names an embedding by "uuid", with its grid and without its rows: what
`Embedding.to_vllm()` gives of a reference. Follows ECConnectorBase of vLLM 0.32 and 0.33, and has
run inside 0.32 on the CPU (tests/engines; what else was seen: docs/engines.md); loaded by
vLLM alone.

The scheduler's half fetches, while other requests go on, and the rows travel to the workers with a
step. So whatever goes wrong fails one request: an error in a worker would end vLLM itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from encoder_service.client import Client, Embedding

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
"""Of fetching an embedding, for which its request waits, once its turn has come."""
AT_ONCE = 8
"""Embeddings that are fetched at a time: vLLM asks for those of its whole queue."""
ROWS = ("_embeds", "pixel_values", "pixel_values_videos")
"""Ends of the names of what vLLM needs no connector for."""


@dataclass
class Loads(ECConnectorMetadata):  # type: ignore[misc]  # vLLM is not there where types are checked
    """What the workers get with a step: [tokens, width] on the CPU under each id."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Fetch:
    """An embedding on its way to the scheduler, or there."""

    rows: Future[torch.Tensor]
    requests: set[str] = field(default_factory=set)
    """Ids of those that wait for it, or are not through with it."""


class EncoderServiceConnector(ECConnectorBase):  # type: ignore[misc]
    """Both halves, as vLLM has it: one object in the scheduler, one in each worker."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        """Raises ValueError for a role or an address that it cannot have."""
        super().__init__(vllm_config=vllm_config, role=role)
        if self.is_producer:
            raise ValueError('ec_role must be "ec_consumer": this connector only reads embeddings')
        url = vllm_config.ec_transfer_config.get_from_extra_config("url", None)
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(f"ec_connector_extra_config.url is {url!r}: name the encoder service")
        multimodal = vllm_config.model_config.multimodal_config
        if multimodal is not None and multimodal.mm_processor_cache_type == "shm":
            raise ValueError(
                "mm_processor_cache_type is shm, which keeps from the scheduler what an item "
                "brings: leave it at lru"
            )
        self.fetches: dict[str, Fetch] = {}
        self.turns = asyncio.Semaphore(AT_ONCE)
        self.failed: set[str] = set()
        self.needed = Loads()
        self.client: Client | None = None
        if role is ECConnectorRole.SCHEDULER:
            self.client = Client(url, os.environ.get("ENCODER_SERVICE_TOKEN"), TIMEOUT_SECONDS)

    def shutdown(self) -> None:
        """Gives the connections back."""
        if self.client is not None:
            self.client.close()

    # In the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all that a request names, and has not computed, is here; begins to fetch it.

        What cannot be had, or is not what the prompt has room for, fails the request.
        """
        here = True
        for index, feature in enumerate(request.mm_features):
            if not named(feature):
                continue
            name, place = feature.identifier, feature.mm_position
            if place.offset + place.length <= num_computed_tokens:
                self.let_go(name, request.request_id)
                continue
            fetch = self.fetches.get(name)
            if fetch is None:
                fetch = self.fetches[name] = Fetch(self.begin(name))
            fetch.requests.add(request.request_id)
            here = fetch.rows.done() and self.fits(request, index, fetch.rows) and here
        return here

    def begin(self, name: str) -> Future[torch.Tensor]:
        """Fetches an embedding in the client's thread."""
        assert self.client is not None
        client, dtype = self.client.client, self._vllm_config.model_config.dtype

        async def fetched() -> torch.Tensor:
            async with self.turns:
                embedding = await in_time(client.fetch(name))
            hidden = self._vllm_config.model_config.get_inputs_embeds_size()
            if embedding.shape[1] != hidden * (1 + embedding.deepstack):
                raise ValueError(
                    f"embedding {name} of {embedding.model} has rows of {embedding.shape[1]}, the "
                    f"language model of {hidden}: is the encoder service that of another model?"
                )
            return embedding.torch().to(dtype)

        return asyncio.run_coroutine_threadsafe(fetched(), self.client.loop)

    def fits(self, request: Any, index: int, rows: Future[torch.Tensor]) -> bool:
        """Whether rows came, and as many as the prompt has room for; or the request fails."""
        try:
            found, room = len(rows.result()), request.get_num_encoder_embeds(index)
            if found == room:
                return True
            problem = f"{found} rows, the prompt has room for {room}"
        except Exception as error:  # whatever it is, it must not end vLLM's scheduler
            problem = str(error)
        name = request.mm_features[index].identifier
        log.error("request %s fails: embedding %s: %s", request.request_id, name, problem)
        self.failed.add(request.request_id)
        return False

    def take_unavailable_requests(self) -> set[str]:
        """Ids of those that fail, each told once."""
        failed, self.failed = self.failed, set()
        return failed

    def has_cache_item(self, identifier: str) -> bool:
        """Whether an embedding is here: vLLM asks after ensure_cache_available."""
        fetch = self.fetches.get(identifier)
        return fetch is not None and fetch.rows.done() and not fetch.rows.exception()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Sends item `index` of a request to the workers with the next step, if it is ours."""
        identifier = request.mm_features[index].identifier
        if self.has_cache_item(identifier):
            self.needed.rows[identifier] = self.fetches[identifier].rows.result()

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """What this step needs; the next one begins with nothing."""
        built, self.needed = self.needed, Loads()
        return built

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Lets go of what was fetched for it."""
        for feature in request.mm_features:
            self.let_go(feature.identifier, request.request_id)
        return False, None

    def let_go(self, name: str, request_id: str) -> None:
        """An embedding goes with the last request that needs it."""
        fetch = self.fetches.get(name)
        if fetch is None:
            return
        fetch.requests.discard(request_id)
        if not fetch.requests:
            fetch.rows.cancel()
            del self.fetches[name]

    # In a worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Puts [tokens, width] on this worker's device under each id."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for name, rows in metadata.rows.items():
            if name not in encoder_cache:
                encoder_cache[name] = rows.to(device())

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Nothing: the service has what it encoded, and takes nothing."""


async def in_time(fetch: Awaitable[Embedding]) -> Embedding:
    """Raises TimeoutError, also for what comes byte by byte, and what the fetch raises."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await fetch
    except TimeoutError:
        raise TimeoutError(f"not here within {TIMEOUT_SECONDS:g} s") from None


def named(feature: Any) -> bool:
    """Whether an item came as an id, which has a dot, and a grid: without anything to encode."""
    data = feature.data
    if "." not in feature.identifier or data is None:
        return False
    return not any(key.endswith(ROWS) for key in data)


def device() -> str:
    """This worker's own: a bare "cuda" would be the first of all workers'."""
    from vllm.platforms import current_platform

    kind: str = current_platform.device_type
    return f"{kind}:{current_platform.current_device()}" if kind == "cuda" else kind
