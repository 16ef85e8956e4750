"""An EC connector for vLLM: the server fetches embeddings from the encoder service by their ids.

    vllm serve MODEL --enable-mm-embeds --ec-transfer-config '{
        "ec_connector": "EncoderServiceConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "encoder_service.engines.vllm_connector",
        "ec_connector_extra_config": {"url": "http://127.0.0.1:8000"}}'

A request then names an embedding by "uuid", with its grid and without its rows, as
`Embedding.to_vllm()` makes it for a reference. Follows ECConnectorBase of vLLM 0.32 and 0.33;
docs/engines.md says what has been run. Only vLLM can import this module.

The scheduler's half fetches embeddings while other requests run, and sends the rows to the workers
with a step. An error thus fails one request; in a worker it would end vLLM itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from encoder_service.engines.vllm_stats import LoadMetrics, LoadStats, Stopwatch

if TYPE_CHECKING:
    import torch

    from encoder_service.client import Client

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
"""For one fetch, which its request waits for, once it has its turn."""
FETCHES_AT_ONCE = 8
"""vLLM asks for the embeddings of its whole queue."""
METADATA = frozenset(("image_grid_thw", "video_grid_thw", "timestamps"))
"""Keys of an item that brings neither rows nor pixels."""


@dataclass
class RowsToLoad(ECConnectorMetadata):  # type: ignore[misc]  # types are checked without vLLM
    """Sent to the workers with a step: [tokens, width] on the CPU under each id."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class PendingFetch:
    rows: Future[torch.Tensor]
    requests: set[str] = field(default_factory=set)
    """Ids of the requests that still need it."""
    time: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.time = Stopwatch(self.rows)


class EncoderServiceConnector(ECConnectorBase):  # type: ignore[misc]
    """Both halves of a connector: vLLM makes one in the scheduler and one in each worker."""

    def __new__(cls, vllm_config: Any, role: Any) -> Any:
        """Another class connects vLLM to an encoder in its own process: see vllm_local.py."""
        place = vllm_config.ec_transfer_config.get_from_extra_config("place", "remote")
        if place == "local":
            try:
                from encoder_service.engines.vllm_local import LocalConnector
            except ModuleNotFoundError as error:
                raise ValueError(
                    f"place local needs {error.name}, which the light client does not bring: "
                    "pip install --no-deps encoder-service"
                ) from error
            return LocalConnector(vllm_config, role)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, role: Any) -> None:
        """Raises ValueError for settings that cannot work."""
        super().__init__(vllm_config=vllm_config, role=role)
        if not hasattr(ECConnectorBase, "take_unavailable_requests"):
            raise ValueError(
                "this vLLM takes no embeddings by id, and waits for ever if one is gone: use 0.32 "
                'or newer, or "place": "local"'
            )
        if self.is_producer:
            raise ValueError('ec_role must be "ec_consumer": this connector only reads embeddings')
        url = vllm_config.ec_transfer_config.get_from_extra_config("url", None)
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(
                f"ec_connector_extra_config.url is {url!r}: it must be the encoder service's URL"
            )
        multimodal = vllm_config.model_config.multimodal_config
        if multimodal is not None and multimodal.mm_processor_cache_type == "shm":
            raise ValueError(
                "mm_processor_cache_type is shm, which hides the items' data from the scheduler: "
                "use lru"
            )
        self.fetches: dict[str, PendingFetch] = {}
        self.turns = asyncio.Semaphore(FETCHES_AT_ONCE)
        self.failed: set[str] = set()
        self.stats = LoadStats()
        self.needed = RowsToLoad()
        self.client: Client | None = None
        if role is ECConnectorRole.SCHEDULER:
            from encoder_service.client import Client  # which the place "local" does not need

            self.client = Client(url, os.environ.get("ENCODER_SERVICE_TOKEN"), TIMEOUT_SECONDS)

    def shutdown(self) -> None:
        if self.client is not None:
            self.client.close()

    # In the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all embeddings that a request still needs are here. Starts to fetch missing ones.

        The request fails if one cannot be fetched or does not fit its place in the prompt.
        """
        here = True
        for index, feature in enumerate(request.mm_features):
            if not is_reference(feature):
                continue
            name, place = feature.identifier, feature.mm_position
            if place.offset + place.length <= num_computed_tokens:
                self.drop(name, request.request_id)
                continue
            fetch = self.fetches.get(name)
            if fetch is None:
                # With LoRA of the tower, vLLM puts the adapter's name before the id.
                fetch = PendingFetch(self.begin(feature.mm_hash or name))
                self.fetches[name] = fetch
            fetch.requests.add(request.request_id)
            here = fetch.rows.done() and self.fits(request, index, fetch.rows) and here
        return here

    def begin(self, name: str) -> Future[torch.Tensor]:
        assert self.client is not None
        client, dtype = self.client.client, self._vllm_config.model_config.dtype

        async def fetched() -> torch.Tensor:
            if "." not in name:
                raise ValueError(
                    "this is vLLM's own name for an item without rows and without an id: send the "
                    "part as Embedding.to_vllm() makes it, and neither mm_processor_kwargs nor "
                    "media_io_kwargs"
                )
            async with self.turns:
                try:
                    async with asyncio.timeout(TIMEOUT_SECONDS):  # also if it trickles in
                        embedding = await client.fetch(name)
                except TimeoutError:
                    raise TimeoutError(f"not received within {TIMEOUT_SECONDS:g} s") from None
            hidden = self._vllm_config.model_config.get_inputs_embeds_size()
            if embedding.shape[1] != hidden * (1 + embedding.deepstack):
                raise ValueError(
                    f"embedding {name} of {embedding.model} is {embedding.shape[1]} wide, the "
                    f"language model {hidden}: does the encoder service run another model?"
                )
            return embedding.torch().to(dtype)

        return asyncio.run_coroutine_threadsafe(fetched(), self.client.loop)

    def fits(self, request: Any, index: int, rows: Future[torch.Tensor]) -> bool:
        """Whether there are as many rows as the prompt has room for; if not, the request fails."""
        try:
            found, room = len(rows.result()), request.get_num_encoder_embeds(index)
            if found == room:
                return True
            problem = f"{found} rows, the prompt has room for {room}"
        except Exception as error:  # no error may end vLLM's scheduler
            problem = str(error)
        name = request.mm_features[index].identifier
        log.error("request %s fails: embedding %s: %s", request.request_id, name, problem)
        self.failed.add(request.request_id)
        self.stats.count("failed")
        return False

    def take_unavailable_requests(self) -> set[str]:
        """Ids of failed requests, each returned once."""
        failed, self.failed = self.failed, set()
        return failed

    def has_cache_item(self, identifier: str) -> bool:
        """Whether an embedding is here. vLLM asks after ensure_cache_available."""
        fetch = self.fetches.get(identifier)
        return fetch is not None and fetch.rows.done() and not fetch.rows.exception()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Sends item `index` to the workers with the next step, if this connector fetched it."""
        identifier = request.mm_features[index].identifier
        if self.has_cache_item(identifier):
            fetch = self.fetches[identifier]
            self.needed.rows[identifier] = rows = fetch.rows.result()
            self.stats.loaded(rows.nbytes, fetch.time.seconds)

    def build_connector_meta(self, scheduler_output: Any) -> RowsToLoad:
        built, self.needed = self.needed, RowsToLoad()
        return built

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        for feature in request.mm_features:
            self.drop(feature.identifier, request.request_id)
        return False, None

    def drop(self, name: str, request_id: str) -> None:
        """Forgets an embedding with the last request that needs it."""
        fetch = self.fetches.get(name)
        if fetch is None:
            return
        fetch.requests.discard(request_id)
        if not fetch.requests:
            fetch.rows.cancel()
            del self.fetches[name]

    def get_ec_connector_stats(self) -> LoadStats | None:
        return self.stats.taken()

    # In vLLM's front end, for both places

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> LoadStats:
        return LoadStats(data)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> LoadMetrics:
        return LoadMetrics(*arguments)

    # In a worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Puts [tokens, width] on this worker's device under each id."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, RowsToLoad)
        for name, rows in metadata.rows.items():
            if name not in encoder_cache:
                encoder_cache[name] = rows.to(device())

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Does nothing: the service stores no embeddings but its own."""


def is_reference(feature: Any) -> bool:
    """Whether an item brings neither rows nor pixels: without its rows, vLLM would end."""
    return feature.data is not None and feature.data.keys() <= METADATA


def device() -> str:
    """This worker's device: a bare "cuda" would be device 0 for every worker."""
    from vllm.platforms import current_platform

    kind: str = current_platform.device_type
    return f"{kind}:{current_platform.current_device()}" if kind == "cuda" else kind
