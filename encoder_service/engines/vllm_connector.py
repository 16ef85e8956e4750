"""An EC connector for vLLM: the server fetches embeddings from the encoder service by their ids.

    vllm serve MODEL --enable-mm-embeds --ec-transfer-config '{
        "ec_connector": "EncoderServiceConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "encoder_service.engines.vllm_connector",
        "ec_connector_extra_config": {"url": "http://127.0.0.1:8000"}}'

A request then names an embedding by "uuid", with its grid and without its rows, as
`Embedding.to_vllm()` makes it for a reference. Follows ECConnectorBase of vLLM 0.32 and 0.33;
docs/engines.md says what has been run. Only vLLM can import this module.

The scheduler's half finds embeddings while other requests run, and tells the workers with a step
where they are: see vllm_rows.py. An error thus fails one request; in a worker it would end vLLM
itself.
"""

from __future__ import annotations

import logging
import math
import os
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from actors.rows.protocol import MemoryHandle
from encoder_service.engines.vllm_rows import (
    TIMEOUT_SECONDS,
    FetchedRows,
    RowLoader,
    RowsAt,
    RowSource,
    still_needed,
)
from encoder_service.engines.vllm_stats import LoadMetrics, LoadStats, Stopwatch

if TYPE_CHECKING:
    from encoder_service.client import Client

log = logging.getLogger(__name__)

AHEAD_BYTES = 2**30
"""`ahead_bytes`: of embeddings that are fetched before their requests are scheduled, and of the
host memory that receives them."""
PAUSED_SECONDS = 5.0
"""Replicas wait for so long, or longer, for a reader that says nothing (rows/server.py)."""
LOST = "its rows were lost, so that vLLM's caches may have others in their place: send it again"
METADATA = frozenset(("image_grid_thw", "video_grid_thw", "timestamps", "second_per_grid_ts"))
"""Keys of an item that brings neither rows nor pixels."""


@dataclass
class RowsToLoad(ECConnectorMetadata):  # type: ignore[misc]  # types are checked without vLLM
    """Sent to the workers with a step: under each id, [tokens, width] or where they are."""

    rows: dict[str, RowsAt | torch.Tensor] = field(default_factory=dict)
    again: dict[str, RowsAt | torch.Tensor] = field(default_factory=dict)
    """Those that replace what vLLM's encoder cache has, if it still has it."""
    memories: dict[int, MemoryHandle] = field(default_factory=dict)
    """Those to have open."""


@dataclass
class PendingFetch:
    rows: Future[FetchedRows]
    expected_bytes: int
    requests: set[str] = field(default_factory=set)
    """Ids of the requests that still need it."""
    sent: set[str] = field(default_factory=set)
    """Those for which it was sent to the workers."""
    in_use: bool = False
    """A step that is under way may still copy it."""
    time: Stopwatch = field(init=False)

    def __post_init__(self) -> None:
        self.time = Stopwatch(self.rows)

    @property
    def found(self) -> FetchedRows | None:
        done = self.rows.done() and not self.rows.cancelled() and not self.rows.exception()
        return self.rows.result() if done else None

    @property
    def lost(self) -> bool:
        """The rows that were held are gone, with the connection to their replica."""
        return self.found is not None and self.found.lost


@dataclass
class LoadingRequest:
    """One to whose rows a step was sent."""

    request: Any
    tokens: int
    """That it had generated then."""
    sent: float = 0.0
    """When the latest step was, in seconds of `monotonic`."""
    rows: dict[int, FetchedRows] = field(default_factory=dict)
    """By the item's index."""


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
                    "pip install --no-deps . in the repository of encoder-service"
                ) from error
            return LocalConnector(vllm_config, role)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, role: Any) -> None:
        """Raises ValueError for settings that cannot work."""
        super().__init__(vllm_config=vllm_config, role=role)
        self.check_version()
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
        self.failed: set[str] = set()
        self.spoiled: set[str] = set()
        """Names of embeddings whose rows were lost: vLLM's caches may have others in their place.
        Of its prefix cache nobody says for how long, so they stay here; replicas rarely end."""
        self.renewed: set[tuple[str, str]] = set()
        """Such a name and a request that computes all of it from rows that were fetched since."""
        self.cached: dict[str, tuple[int, int]] = {}
        """Shapes of what vLLM's encoder cache has from us, but for what it evicts in this step."""
        self.evicting = False
        """In this step, vLLM may have made room in its encoder cache."""
        extra = vllm_config.ec_transfer_config
        self.ahead_bytes = extra.get_from_extra_config("ahead_bytes", AHEAD_BYTES)
        hidden = vllm_config.model_config.get_inputs_embeds_size()
        self.row_bytes = 2 * 4 * hidden
        """Until the first embedding is here: bfloat16, with three deepstack features."""
        self.ahead: int | None = None
        """Bytes of all fetches in this step; None: not counted yet."""
        self.oldest = ""
        """The first request that vLLM asked for in this step."""
        self.stats = LoadStats()
        self.needed = RowsToLoad()
        self.loading: dict[str, LoadingRequest] = {}
        self.loader: RowLoader | None = None
        self.client: Client | None = None
        self.source: RowSource | None = None
        if role is ECConnectorRole.SCHEDULER:
            from encoder_service.client import Client  # which the place "local" does not need

            parallel = vllm_config.parallel_config
            self.client = Client(url, os.environ.get("ENCODER_SERVICE_TOKEN"), TIMEOUT_SECONDS)
            self.source = RowSource(
                self.client,
                self.check,
                self.ahead_bytes,
                parallel.world_size // parallel.pipeline_parallel_size,  # the first stage's
            )

    def check_version(self) -> None:
        """Raises ValueError."""
        if not hasattr(ECConnectorBase, "take_unavailable_requests"):
            raise ValueError(
                "this vLLM takes no embeddings by id, and waits for ever if one is gone: use 0.32 "
                'or newer, or "place": "local"'
            )

    def shutdown(self) -> None:
        if self.source is not None and self.client is not None:
            self.source.close()
            self.client.close()

    # In the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all embeddings that a request still needs are here. Starts to fetch missing ones.

        The request fails if one cannot be fetched or does not fit its place in the prompt. What
        vLLM's encoder cache has is fetched with what it lacks, for which it may be evicted.
        """
        here, needed = True, still_needed(request, num_computed_tokens)
        if not self.evicting and needed <= self.cached.keys() - self.spoiled:
            needed = set()
        if needed and not self.oldest:
            self.oldest = request.request_id
        for index, feature in enumerate(request.mm_features):
            if not self.is_reference(feature):
                continue
            name = feature.identifier
            if name in self.spoiled and not self.renews(request, index, num_computed_tokens):
                here = False
                continue
            if name not in needed:
                if request.request_id not in self.loading:  # a step counts before it has run
                    self.drop(name, request.request_id)
                continue
            fetch = self.fetches.get(name)
            if fetch is None or (fetch.lost and request.request_id not in fetch.sent):
                if (size_bytes := self.room_for(request, index)) is None:
                    here = False
                    continue
                # With LoRA of the tower, vLLM puts the adapter's name before the id.
                rows = the(self.source).begin(feature.mm_hash or name)
                fetch = PendingFetch(rows, size_bytes, fetch.requests if fetch else set())
                self.fetches[name] = fetch
            fetch.requests.add(request.request_id)
            here = fetch.rows.done() and self.fits(request, index, fetch.rows) and here
        if here:
            for index, name in enumerate(one.identifier for one in request.mm_features):
                fetch = self.fetches.get(name) if name in self.spoiled & needed else None
                if fetch and request.request_id not in fetch.sent:
                    self.send(request, index, self.needed.again)
        self.evicting |= here and bool(needed)
        return here

    def renews(self, request: Any, index: int, num_computed_tokens: int) -> bool:
        """Whether a request computes all of an item that is spoiled. If vLLM may have read it from
        its prefix cache, it asks again without that; the request fails if this does not help."""
        feature = request.mm_features[index]
        one = feature.identifier, request.request_id
        if one not in self.renewed:
            if not request.skip_reading_prefix_cache:
                request.skip_reading_prefix_cache = True
            elif num_computed_tokens > feature.mm_position.offset:
                self.fail(request, index, LOST)
            else:
                self.renewed.add(one)
        return one in self.renewed

    def room_for(self, request: Any, index: int) -> int | None:
        """The size of an item that may be fetched. vLLM asks for its whole queue: what the oldest
        request needs is fetched at once, of the others as much as there is room for."""
        if self.ahead is None:
            found = [(fetch, fetch.found) for fetch in self.fetches.values()]
            self.ahead = sum(rows.size_bytes if rows else one.expected_bytes for one, rows in found)
        size_bytes: int = request.get_num_encoder_embeds(index) * self.row_bytes
        if self.ahead + size_bytes > self.ahead_bytes and request.request_id != self.oldest:
            return None
        self.ahead += size_bytes
        return size_bytes

    @staticmethod
    def is_reference(feature: Any) -> bool:
        """Whether an item brings neither rows nor pixels: without its rows, vLLM would end."""
        return feature.data is not None and feature.data.keys() <= METADATA

    def check(self, name: str, shape: tuple[int, int], model: str, deepstack: int) -> None:
        """Raises ValueError for rows that the language model cannot take."""
        hidden = self._vllm_config.model_config.get_inputs_embeds_size()
        if shape[1] != hidden * (1 + deepstack):
            raise ValueError(
                f"embedding {name} of {model} is {shape[1]} wide, the language model {hidden}: "
                "does the encoder service run another model?"
            )

    def fits(self, request: Any, index: int, rows: Future[FetchedRows]) -> bool:
        """Whether there are as many rows as the prompt has room for; if not, the request fails."""
        try:
            fetched, room = rows.result(), request.get_num_encoder_embeds(index)
            found = fetched.shape[0]
            if found == room:
                self.row_bytes = fetched.size_bytes // found
                return True
            problem = f"{found} rows, the prompt has room for {room}"
        except Exception as error:  # no error may end vLLM's scheduler
            problem = str(error)
        self.fail(request, index, problem)
        return False

    def fail(self, request: Any, index: int, problem: str) -> None:
        name = request.mm_features[index].identifier
        log.error("request %s fails: embedding %s: %s", request.request_id, name, problem)
        self.failed.add(request.request_id)
        self.stats.count("failed")

    def take_unavailable_requests(self) -> set[str]:
        """Ids of failed requests, each returned once. vLLM asks after each step."""
        for one in self.loading.values():
            self.distrust(one)
        failed, self.failed = self.failed, set()
        return failed

    def has_cache_item(self, identifier: str) -> bool:
        """Whether an embedding is here, or was in vLLM's encoder cache. vLLM asks after
        ensure_cache_available, for what its encoder cache lacks, and would end without rows."""
        return identifier in self.cached or self.fetched(identifier) is not None

    def fetched(self, name: str) -> FetchedRows | None:
        fetch = self.fetches.get(name)
        return fetch.found if fetch else None

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Sends item `index` to the workers with the next step, if this connector fetched it."""
        name = request.mm_features[index].identifier
        if not self.has_cache_item(name):
            return
        found = self.fetched(name)
        shape = found.shape if found else self.cached[name]
        if found is None or found.lost:
            found = self.fetched_again(request, index)
        if found and found.shape == shape:
            self.cached[name] = shape
            self.send(request, index, self.needed.rows)
        else:
            self.needed.rows[name] = torch.zeros(shape, dtype=torch.bfloat16)
            self.cached.clear()  # what else vLLM still has is fetched again
            self.spoil(name)
            self.fail(request, index, LOST)

    def send(self, request: Any, index: int, step: dict[str, RowsAt | torch.Tensor]) -> None:
        """Sends item `index`, which is here, to the workers with the next step."""
        name = request.mm_features[index].identifier
        fetch = self.fetches[name]
        found = fetch.rows.result()
        step[name] = found.rows
        if request.request_id not in fetch.sent:
            self.stats.loaded(found.size_bytes, fetch.time.seconds, found.path)
        fetch.sent.add(request.request_id)
        made = LoadingRequest(request, request.num_output_tokens)
        loading = self.loading.setdefault(request.request_id, made)
        loading.sent, loading.rows[index] = monotonic(), found

    def spoil(self, name: str) -> None:
        self.spoiled.add(name)
        self.renewed = {one for one in self.renewed if one[0] != name}

    def distrust(self, loading: LoadingRequest) -> None:
        """Fails a request whose rows may have been copied after its replica took them back: from a
        reader that says nothing for a while, as when its container is paused."""
        if monotonic() < loading.sent + PAUSED_SECONDS:
            return  # a replica that is killed takes nothing back
        for index, fetched in loading.rows.items():
            if fetched.lost:
                loading.sent = math.inf  # once is enough
                self.spoil(loading.request.mm_features[index].identifier)
                self.fail(loading.request, index, LOST)

    def fetched_again(self, request: Any, index: int) -> FetchedRows | None:
        """Rows that were lost since ensure_cache_available, or that vLLM's encoder cache no longer
        has because it was reset. vLLM waits, as its step can no longer be stopped."""
        feature = request.mm_features[index]
        name = feature.identifier
        rows = the(self.source).begin(feature.mm_hash or name)
        requests = self.fetches[name].requests if name in self.fetches else set()
        self.fetches[name] = PendingFetch(rows, 0, requests | {request.request_id})
        try:
            return rows.result(TIMEOUT_SECONDS)
        except Exception as error:  # no error may end vLLM's scheduler
            log.error("embedding %s cannot be fetched again: %r", name, error)
            return None

    def build_connector_meta(self, scheduler_output: Any) -> RowsToLoad:
        for one in list(self.loading.values()):
            # With a token, every worker has computed the whole prompt.
            if one.request.num_output_tokens > one.tokens:
                self.loaded(one.request)
        for name in scheduler_output.free_encoder_mm_hashes:
            self.cached.pop(name, None)
        self.evicting, self.ahead, self.oldest = False, None, ""
        built, self.needed = self.needed, RowsToLoad()
        built.memories = the(self.source).memories()
        return built

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        self.loaded(request)
        self.renewed -= {(one.identifier, request.request_id) for one in request.mm_features}
        return False, None

    def loaded(self, request: Any) -> None:
        """Forgets the embeddings of a request whose steps are through with them."""
        loading = self.loading.pop(request.request_id, LoadingRequest(request, -1))
        self.distrust(loading)
        aborted = request.num_output_tokens == loading.tokens
        for feature in request.mm_features:
            self.drop(feature.identifier, request.request_id, in_use=aborted)

    def drop(self, name: str, request_id: str, *, in_use: bool = False) -> None:
        """Forgets an embedding with the last request that needs it."""
        fetch = self.fetches.get(name)
        if fetch is None:
            return
        fetch.in_use |= in_use
        fetch.requests.discard(request_id)
        if not fetch.requests:
            del self.fetches[name]
            source = the(self.source)
            release = source.release_later if fetch.in_use else source.release

            def done(rows: Future[FetchedRows]) -> None:
                if not rows.cancelled() and not rows.exception():
                    release(rows.result())

            if not fetch.rows.cancel():
                fetch.rows.add_done_callback(done)

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
        if self.loader is None:
            model, parallel = self._vllm_config.model_config, self._vllm_config.parallel_config
            self.loader = RowLoader(parallel.rank, torch.device(device()), model.dtype)
        self.loader.follow(metadata.memories)
        for name in metadata.again.keys() & encoder_cache.keys():
            encoder_cache[name] = self.loader.load(metadata.again[name])
        for name, rows in metadata.rows.items():
            if name not in encoder_cache:
                encoder_cache[name] = self.loader.load(rows)

    def save_caches(
        self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any
    ) -> None:
        """Does nothing: the service stores no embeddings but its own."""


def the(source: RowSource | None) -> RowSource:
    assert source is not None, "this is the worker's half"
    return source


def device() -> str:
    """This worker's device: a bare "cuda" would be device 0 for every worker."""
    from vllm.platforms import current_platform

    kind: str = current_platform.device_type
    return f"{kind}:{current_platform.current_device()}" if kind == "cuda" else kind
