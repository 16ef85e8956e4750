"""The connector's place "local": the encoder's engine runs inside vLLM's own process.

    vllm serve MODEL --ec-transfer-config '{
        "ec_connector": "EncoderServiceConnector", "ec_role": "ec_consumer",
        "ec_connector_module_path": "encoder_service.engines.vllm_connector",
        "ec_connector_extra_config": {"place": "local"}}'

vLLM preprocesses images as usual. The scheduler's half passes an image's pixels to the engine and
makes its request wait. The worker's half puts the rows, which never leave the device, into vLLM's
encoder cache. Images are encoded in slices between the steps of the language model
(actors/engine/slices.py). vLLM's own tower encodes what the engine cannot.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from actors.engine.engine import Engine
from actors.engine.slices import Step, StepTimes
from actors.engine.video_chunks import rows_of
from actors.families.registry import read
from actors.options import ActorOptions
from actors.spec.model_spec import ModelSpec
from actors.startup import open_engine
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, ItemPlan
from encoder_service.engines import vllm_patches
from encoder_service.engines.vllm_options import local_options
from encoder_service.engines.vllm_patches import (
    block_sizing,
    cut_for_vllm,
    has_rows,
    patches_of,
    pixels_and_grid,
)
from encoder_service.engines.vllm_plugin import SWITCH_SECONDS, warn_unless_loaded
from encoder_service.engines.vllm_rows import is_reference, still_needed
from encoder_service.engines.vllm_stats import LoadStats, Stopwatch
from encoder_service.engines.vllm_steps import paced, step_of

log = logging.getLogger("vllm.encoder_service")  # below vLLM's logger, so that it is shown

TOWERS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VisionTransformer"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VisionTransformer"),
    "qwen3_vl": ("qwen3_vl", "Qwen3_VisionTransformer"),
    "qwen3_5": ("qwen3_vl", "Qwen3_VisionTransformer"),
}
"""Module and class of vLLM's tower for each family whose patches are the same in vLLM."""
RAW_PIXELS = {"do_rescale": False, "do_normalize": False}
"""--mm-processor-kwargs with which patches stay bytes, which are normalised on the device."""
LEFT = (
    "vLLM's own tower encodes an item, because %s (vllm:encoder_service_left_total counts such "
    "items; this one is %s)"
)
MOST_REASONS = 20
"""Maximum number of reasons in the log, so that they cannot fill it. At level DEBUG it has all."""

LAUNCHED_SECONDS = 0.005
"""How long scheduling waits for the engine's thread after the last slice of an image has been
launched: if it takes longer, the image is used a step later."""


@dataclass
class LoadedRows(ECConnectorMetadata):  # type: ignore[misc]  # types are checked without vLLM
    """Passed to the worker's half, in the same process: rows [tokens, width] by id."""

    rows: dict[str, Tensor]
    step: Step  # without tokens: the language model does not run


@dataclass(eq=False)
class LocalItem:
    """An item that waiting requests need."""

    plan: ItemPlan
    pixels: Tensor
    size_bytes: int  # of its rows
    requests: set[str] = field(default_factory=set)
    rows: Future[Tensor] | None = None  # None: not given to the engine yet
    answer: Future[Item] | None = None  # the engine's
    time: Stopwatch | None = None  # since it was given to the engine

    @property
    def done(self) -> bool:
        return self.rows is not None and self.rows.done()

    @property
    def encoded(self) -> bool:
        return self.rows is not None and self.rows.done() and not self.rows.exception()


class Left(Exception):
    """Says why vLLM's tower encodes an item."""


class LocalEncoder:
    """The engine, and the items that vLLM's waiting requests need, oldest first. All methods but
    `submit` are called from vLLM's thread."""

    def __init__(self, engine: Engine, ahead_bytes: int, times: StepTimes) -> None:
        self.engine = engine
        self.spec: ModelSpec = engine.tower.spec
        self.ahead_bytes = ahead_bytes
        assert engine.device.pace is not None
        self.pace = engine.device.pace
        self.pace.times = times
        self.half_pack_tokens = most_tokens(engine) // 2
        self.items: dict[str, LocalItem] = {}
        self.ready: set[str] = set()  # requests whose items are encoded, some still in `items`
        self.scheduling = False  # a step
        self.loading: dict[str, Tensor] = {}  # rows for the step that is being scheduled
        self.cached: Mapping[str, Tensor] = {}  # vLLM's encoder cache
        self.encoded = 0
        self.left: dict[str, set[str]] = {}  # items left to vLLM's tower, by request
        self.reasons: set[str] = set()  # those that were logged
        self.stats = LoadStats()
        self.threads = ThreadPoolExecutor(1, "patches")
        device = engine.device.device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def close(self) -> None:
        self.threads.shutdown()
        self.engine.close()
        log.info("the engine encoded %d items", self.encoded)

    def begin(self) -> None:
        """Called while a step is scheduled, more than once. Launches what is left of a pack if it
        is little, so that this step can read the prompt."""
        if self.scheduling:
            return
        self.scheduling = True
        if not self.pace.finish():
            return
        for item in self.items.values():
            if item.rows and not item.done and item.answer and item.answer.running():
                wait([item.rows], LAUNCHED_SECONDS)
                return

    def need(self, request: Any, index: int) -> bool:
        """Whether an item is encoded or left to vLLM. Otherwise it will be encoded."""
        feature = request.mm_features[index]
        name = feature.identifier
        if name in self.cached or name in self.loading:
            self.drop(name, request.request_id)
            return True
        if has_rows(feature):
            return True
        try:
            item = self.items.get(name) or self.accepted(request, index)
            self.items[name] = item
            item.requests.add(request.request_id)
            if item.done and not item.encoded:
                assert item.rows
                raise Left(f"the engine failed: {item.rows.exception()!r}")
        except Left as reason:
            self.leave(name, request.request_id, str(reason))
            return True
        except Exception as error:  # no error may end vLLM's scheduler
            self.leave(name, request.request_id, f"its data cannot be read: {error!r}")
            return True
        return item.done

    def leave(self, name: str, request_id: str, reason: str) -> None:
        """Leaves an item to vLLM's tower. Counts it once, because vLLM asks again and again."""
        names = self.left.setdefault(request_id, set())
        if name in names:
            return
        names.add(name)
        self.stats.count("left")
        new = reason not in self.reasons and len(self.reasons) < MOST_REASONS
        if new:
            self.reasons.add(reason)
        log.log(logging.WARNING if new else logging.DEBUG, LEFT, reason, name)

    def accepted(self, request: Any, index: int) -> LocalItem:
        """Raises Left if the engine cannot encode the item."""
        feature = request.mm_features[index]
        if feature.modality not in self.spec.kinds:
            raise Left(f"the engine takes no items of modality {feature.modality}")
        # With an adapter for the tower, the item's name differs from that of its pixels.
        if getattr(feature, "mm_hash", None) not in (None, feature.identifier):
            raise Left("it is of a LoRA adapter for the tower")
        pixels, grid = pixels_and_grid(feature)
        if pixels is None or grid is None:
            raise Left("it has no pixels or no grid")
        rows, columns = grid.data.tolist()[-2:]
        frames = pixels.data.shape[-2] // (rows * columns)
        video = feature.modality == "video"
        plan = block_sizing(self.spec).plan_of_grid((frames, rows, columns), video=video)
        largest, most = plan.group_tokens if video else plan.tokens, most_tokens(self.engine)
        if largest > most:
            raise Left(
                f"it has {largest} tokens, and the largest budget has {most}: add a larger one to "
                "graphs.token_budgets"
            )
        if plan.tokens != request.get_num_encoder_embeds(index):
            raise Left("vLLM prunes some of its rows")
        size_bytes = plan.tokens * self.spec.width * getattr(torch, self.spec.dtype).itemsize
        return LocalItem(plan, pixels.data, size_bytes)

    def start(self) -> None:
        """Gives waiting items to the engine, oldest first, as far as there is room for their rows.
        If nothing else can make progress, the oldest one is started regardless.

        Two items may be encoded at a time, or as many as fill half a pack. More would gain nothing,
        and copying their pixels to the device delays the step that is being launched.
        """
        held = [item for item in self.items.values() if item.rows]
        used = sum(item.size_bytes for item in held)
        encoding = [item.plan.tokens for item in held if not item.done]
        stuck = not self.ready and not encoding
        for item in self.items.values():
            if item.rows:
                continue
            tokens = sum(encoding) + item.plan.tokens
            enough = len(encoding) > 1 and tokens > self.half_pack_tokens
            if enough or (used + item.size_bytes > self.ahead_bytes and not stuck):
                break
            item.rows, stuck = Future(), False
            item.time = Stopwatch(item.rows)
            self.threads.submit(self.submit, item, item.rows)
            used += item.size_bytes
            encoding.append(item.plan.tokens)
        self.pace.waiting = sum(item.rows is None for item in self.items.values())

    def submit(self, item: LocalItem, rows: Future[Tensor]) -> None:
        """Runs in `threads`."""
        if rows.cancelled():
            return
        try:
            with torch.cuda.stream(self.stream) if self.stream else nullcontext():
                pixels = item.pixels.to(self.engine.device.device)
                patches = patches_of(pixels, item.plan, self.spec)
            if self.stream:
                self.stream.synchronize()
                with self.engine.device.running():  # the item may be dropped before they are read
                    for part in patches:
                        if part is not None:
                            part.record_stream(torch.cuda.current_stream())
            item.answer = self.engine.submit(Item(item.plan, *patches, on_device=True))
        except Exception as error:
            failed(rows, error)
            return
        item.answer.add_done_callback(partial(self.completed, rows))
        if rows.cancelled():
            item.answer.cancel()

    def completed(self, rows: Future[Tensor], answer: Future[Item]) -> None:
        if answer.cancelled():
            return
        try:
            with self.engine.device.running():  # after the copies of the rows
                found = rows_of(answer.result())
        except Exception as error:
            failed(rows, error)
            return
        with suppress(InvalidStateError):  # cancelled
            rows.set_result(found)

    def drop(self, name: str, request_id: str) -> None:
        """Forgets an item once no other request needs it."""
        item = self.items.get(name)
        if item is None:
            return
        item.requests.discard(request_id)
        if not item.requests:
            del self.items[name]
            for future in (item.rows, item.answer):
                if future:
                    future.cancel()


def most_tokens(engine: Engine) -> int:
    """Of the largest pack."""
    (most,) = engine.capacity.budgets[0][-1:] or engine.capacity.tokens
    return most


def failed(rows: Future[Tensor], error: BaseException) -> None:
    with suppress(InvalidStateError):  # cancelled
        rows.set_exception(error)


class LocalConnector(ECConnectorBase):  # type: ignore[misc]
    """Both halves of the connector. vLLM creates the worker's first, which creates the encoder."""

    encoder: ClassVar[LocalEncoder | None] = None

    def __init__(self, vllm_config: Any, role: Any) -> None:
        """Raises what open_encoder raises, and ValueError if the worker is elsewhere."""
        super().__init__(vllm_config=vllm_config, role=role)
        if role is ECConnectorRole.WORKER:
            encoder = LocalConnector.encoder = open_encoder(vllm_config)
            vllm_patches.engine_is_here = True
            scheduler = vllm_config.scheduler_config  # vLLM creates it after this
            scheduler.scheduler_cls = paced(scheduler.get_scheduler_cls(), encoder.pace)
            sys.setswitchinterval(SWITCH_SECONDS)
        elif LocalConnector.encoder is None:
            raise ValueError(
                "place is local, but the worker is in another process: leave out "
                "--distributed-executor-backend"
            )
        self.failed: set[str] = set()
        """Requests with ids of embeddings, which nobody can fetch here."""

    def shutdown(self) -> None:
        encoder, LocalConnector.encoder = LocalConnector.encoder, None
        if encoder is not None:
            encoder.close()

    # In the scheduler

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Whether all items that a request still needs are encoded, or left to vLLM."""
        encoder = the(self.encoder)
        encoder.begin()
        needed = still_needed(request, num_computed_tokens)
        here = True
        for index, feature in enumerate(request.mm_features):
            if feature.identifier not in needed:
                encoder.drop(feature.identifier, request.request_id)
            elif is_reference(feature):
                here = False
                self.fail(request.request_id, feature.identifier)
            else:
                here = encoder.need(request, index) and here
        if here and not needed.isdisjoint(encoder.items):
            encoder.ready.add(request.request_id)
        else:
            encoder.ready.discard(request.request_id)
        return here

    def fail(self, request_id: str, name: str) -> None:
        if request_id in self.failed:
            return
        self.failed.add(request_id)
        log.error(
            "request %s fails: it has the id %s, and place local fetches none: send the image "
            "itself, or start vLLM with the encoder service's url",
            request_id,
            name,
        )
        the(self.encoder).stats.count("failed")

    def take_unavailable_requests(self) -> set[str]:
        """Ids of failed requests, each returned once. vLLM (0.32) asks after each step."""
        failed, self.failed = self.failed, set()
        return failed

    def has_cache_item(self, identifier: str) -> bool:
        item = the(self.encoder).items.get(identifier)
        return item is not None and item.encoded

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Hands item `index` to the worker with the next step, if the engine has encoded it.
        Otherwise vLLM's tower encodes it in that step."""
        encoder, name = the(self.encoder), request.mm_features[index].identifier
        encoder.ready.discard(request.request_id)
        if self.has_cache_item(name):
            item = encoder.items.pop(name)
            assert item.rows
            assert item.time
            encoder.loading[name] = item.rows.result()
            encoder.encoded += 1
            encoder.stats.loaded(item.size_bytes, item.time.seconds)
            if encoder.encoded == 1:
                log.info("the engine encoded its first item")
        elif name not in encoder.loading:  # left to vLLM, or its rows have just been evicted
            cut_for_vllm(request.mm_features[index], encoder.spec)

    def build_connector_meta(self, scheduler_output: Any) -> LoadedRows:
        """Called at the end of every schedule."""
        encoder = the(self.encoder)
        encoder.scheduling = False
        encoder.pace.step_launched()
        built, encoder.loading = LoadedRows(encoder.loading, step_of(scheduler_output)), {}
        encoder.start()
        return built

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        encoder = the(self.encoder)
        encoder.ready.discard(request.request_id)
        encoder.left.pop(request.request_id, None)
        for feature in request.mm_features:
            encoder.drop(feature.identifier, request.request_id)
        return False, None

    def get_ec_connector_stats(self) -> LoadStats | None:
        """vLLM asks both halves, and adds what they report."""
        return the(self.encoder).stats.taken()

    # In the worker

    def start_load_caches(self, encoder_cache: dict[str, Tensor], **kwargs: Any) -> None:
        """Called before every step. Loads its rows, then launches slices of the waiting images."""
        encoder = the(self.encoder)
        encoder.cached = encoder_cache
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, LoadedRows)
        for name, rows in metadata.rows.items():
            if rows.is_cuda:  # from the engine's stream
                rows.record_stream(torch.cuda.current_stream())
            encoder_cache[name] = rows
        if metadata.step.tokens:
            encoder.pace.step(metadata.step)

    def save_caches(self, encoder_cache: dict[str, Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Does nothing, because vLLM's own cache keeps what vLLM has encoded."""


def the(encoder: LocalEncoder | None) -> LocalEncoder:
    assert encoder is not None, "vLLM has shut the connector down"
    return encoder


def open_encoder(vllm_config: Any) -> LocalEncoder:
    """Raises what local_options and open_engine raise, and ValueError for another family."""
    from vllm.platforms import current_platform

    log_like_vllm()
    options = local_options(vllm_config)
    model, kind = vllm_config.model_config, current_platform.device_type
    dummy = vllm_config.load_config.load_format == "dummy"
    actor = ActorOptions.model_validate(
        {
            "model": {
                "id": model.model,
                "revision": model.revision,
                "load_format": "dummy" if dummy else "auto",
                "dtype": str(model.dtype).removeprefix("torch."),
            },
            "encoder": {"device": kind, "num_gpus": int(kind != "cpu")},
            "graphs": options.graphs,
        }
    )
    spec = read(actor.model)
    family = spec.family
    if family not in TOWERS:
        raise ValueError(
            f"place is local, which is for {', '.join(TOWERS)}, not {family}: use an encoder "
            "service (url)"
        )
    if not getattr(model.multimodal_config, "mm_device_do_normalize", False):
        normalise(model.multimodal_config.mm_processor_kwargs or {}, spec)
    warn_unless_loaded()
    before = used_bytes(kind)
    engine = open_engine(actor, EncoderMetrics(), options.chunk_ms / 1000)
    log.info(
        "the vision encoder runs in this process, for images of up to %d tokens, "
        "in slices of %g ms",
        most_tokens(engine),
        options.chunk_ms,
    )
    if kind != "cpu":
        # vLLM measures free memory after this, and counts ours as if another process had taken it.
        taken = used_bytes(kind) - before + options.ahead_bytes
        vllm_config.cache_config.gpu_memory_utilization -= taken / torch.cuda.mem_get_info()[1]
        log.info("it takes %.2f GB of --gpu-memory-utilization", taken / 1e9)
    tokens = options.decode_step_tokens or vllm_config.scheduler_config.max_num_batched_tokens
    graphs = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return LocalEncoder(engine, options.ahead_bytes, StepTimes(tokens, graphs))


def log_like_vllm() -> None:
    """The engine logs as part of Ray Serve, whose lines have another format, or are not shown."""
    theirs, engine = logging.getLogger("vllm"), logging.getLogger("ray.serve")
    if theirs.handlers and not engine.handlers:
        engine.handlers, engine.propagate = [*theirs.handlers], False
        engine.setLevel(theirs.level)


def normalise(options: Mapping[str, Any], spec: ModelSpec) -> None:
    """Makes vLLM's tower normalise its input if `options` are RAW_PIXELS. Newer versions of vLLM do
    so themselves. Raises ValueError."""
    given = {key: options.get(key, True) for key in RAW_PIXELS}
    if all(given.values()):
        log.info("preprocessing is faster with --mm-processor-kwargs '%s'", json.dumps(RAW_PIXELS))
        return
    if given != RAW_PIXELS:
        raise ValueError(
            f"--mm-processor-kwargs: of {', '.join(given)} both must be false, or none"
        )
    module, name = TOWERS[spec.family]
    tower = getattr(import_module(f"vllm.model_executor.models.{module}"), name)
    forward = tower.forward

    @wraps(forward)
    def normalising(self: Any, x: Tensor, *arguments: Any, **options: Any) -> Any:
        mean, std = torch.tensor([spec.mean, spec.std], device=self.device)[..., None]
        channels = x.to(self.device, torch.float32).view(len(x), 3, -1)
        x = ((channels / 255 - mean) / std).flatten(1).to(self.dtype)
        return forward(self, x, *arguments, **options)

    tower.forward = normalising


def used_bytes(kind: str) -> int:
    """Memory in use on the device, by all processes; 0 on the CPU."""
    if kind == "cpu":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free
