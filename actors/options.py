"""The configuration of an encoder: frozen, unknown keys are errors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from actors.errors import ConfigError
from actors.types import Alpha, ModelDtype

logger = logging.getLogger("ray.serve")

Transport = Literal["shared_memory", "nixl"]
BlockForm = Literal["fast", "compile", "reference"]
"""How a tower's transformer blocks run: our own kernels, torch.compile, or plain torch."""

BlockChoice = Literal["auto", BlockForm]


OFF_IS_A_WORD = BeforeValidator(lambda value: "off" if value is False else value)
"""Needed because YAML 1.1 reads a bare `off` as false."""


class Options(BaseModel):
    """Frozen. Rejects unknown keys, values of another type (true or "1" for 1) and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Made = TypeVar("Made", bound=Options)


def validated(kind: type[Made], values: Mapping[str, Any]) -> Made:
    """Raises ConfigError, which names every wrong key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = [sentence(kind, problem) for problem in error.errors()]
        raise ConfigError("; ".join(problems)) from None


def updated(options: Made, user_config: Any, live: Mapping[str, Collection[str]]) -> Made:
    """The options updated with a deployment's `user_config`. Raises ConfigError.

    `live`: the keys of each section that can be changed while a replica runs.
    """
    if not isinstance(user_config, Mapping):
        raise ConfigError("user_config is not a mapping: give keys and values")
    values = options.model_dump(exclude_unset=True)
    for section, given in user_config.items():
        wrong = [section] if section not in live else []
        if isinstance(given, Mapping) and not wrong:
            wrong = [f"{section}.{key}" for key in given if key not in live[section]]
            given = values.get(section, {}) | given
        if wrong:
            there = [f"{name}.{key}" for name, keys in live.items() for key in sorted(keys)]
            raise ConfigError(
                f"user_config: {', '.join(map(str, wrong))}: not a key that can be changed without "
                f"a restart; those are {', '.join(there) or 'none here'}"
            )
        values[section] = given
    return validated(type(options), values)


@contextmanager
def refused(*, running: bool) -> Iterator[None]:
    """Logs a ConfigError in a running replica, because Serve would replace it if it raised."""
    try:
        yield
    except ConfigError as error:
        if not running:
            raise
        logger.error("the options stay as they were: %s", error)


def sentence(kind: type[Options], problem: Mapping[str, Any]) -> str:
    """One of pydantic's problems as a sentence. Values that may be secret are not quoted: those of
    unknown keys, of `auth`, and of `cache`, whose URL may have a password."""
    keys = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        names = known(kind, keys[:-1])
        near = get_close_matches(keys[-1], names, 1) + elsewhere(kind, keys[-1])
        meant = f". Did you mean {' or '.join(near)}?" if near else ""
        return f"{'.'.join(keys)}: no such key; known are {', '.join(names)}{meant}"
    # pydantic adds the prefix to messages of validators.
    said = str(problem["msg"]).removeprefix("Value error, ")
    if keys:
        said = f"{'.'.join(keys)}: {said}"
    if "token_sha256" in keys:
        said += "; the hexadecimal SHA-256 of a token: printf %s TOKEN | sha256sum"
    # For a section's own validator, or a missing key, the input is the whole section.
    if not {"auth", "cache"}.isdisjoint(keys) or problem["type"] in ("missing", "value_error"):
        return said
    return f"{said} (got {problem['input']!r})"


def known(kind: type[Options], section: Sequence[str]) -> list[str]:
    options: Any = kind
    for key in section:
        if key not in options.model_fields:  # an index of a list, or a key of a mapping
            continue
        (options,) = sections(options, key)
    return sorted(options.model_fields)


def sections(kind: type[Options], key: str) -> list[type[Options]]:
    """The options that a key holds, if it is a section."""
    declared = kind.model_fields[key].annotation
    kinds = [one for one in (*get_args(declared), declared) if isinstance(one, type)]
    return [one for one in kinds if issubclass(one, Options)]


def elsewhere(kind: type[Options], name: str) -> list[str]:
    """The keys of this name in all sections that are no lists."""
    found = [name] if name in kind.model_fields else []
    for key, field in kind.model_fields.items():
        if get_origin(field.annotation) is not tuple:
            for section in sections(kind, key):
                found += [f"{key}.{each}" for each in elsewhere(section, name)]
    return found


class ImagesKwargs(Options):
    """Overrides of the checkpoint's image processor: see types.ProcessorKwargs."""

    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt | None = None
    max_patches: PositiveInt | None = None


class VideosKwargs(ImagesKwargs):
    """Overrides of the checkpoint's video processor."""

    fps: PositiveFloat | None = None
    num_frames: PositiveInt | None = None


class ModelOptions(Options):
    """Which checkpoint, and in which precision."""

    id: str  # a folder, a Hugging Face repository, or (with dummy weights) the name of a preset
    revision: str | None = None  # of a repository; a folder or a preset has none
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """`dummy`: random weights, and every response says so. `auto` means safetensors."""
    dtype: ModelDtype = "bfloat16"
    output: Literal["rows", "vector"] = "rows"
    """`vector`: one vector per image instead of its rows, and one per text if the checkpoint has a
    text tower. For CLIP, SigLIP, SigLIP 2, DINOv2, DINOv3 and MLCD."""
    tower: Literal["vision", "audio"] | None = None
    """The tower to serve if a checkpoint has both, such as Qwen3-Omni's. A service serves one."""
    images_kwargs: ImagesKwargs = ImagesKwargs()
    """Defaults for requests that do not set them. Budgets are generated up to this size."""
    videos_kwargs: VideosKwargs = VideosKwargs()
    """Defaults for requests that do not set them."""


class GraphOptions(Options):
    """Which graphs are captured. Names follow vLLM's compilation config."""

    mode: Annotated[Literal["budget", "exact", "off"], OFF_IS_A_WORD] = "budget"
    """`budget` captures every budget at start. `exact` captures a pack's layout (the grids of its
    items), up to the largest budget, when it is seen for the second time, and keeps the 64 most
    recently used. `off` runs everything eagerly."""
    token_budgets: tuple[PositiveInt, ...] = Field((), strict=False)
    """In output tokens. Empty: generated over the model's range (`steps_per_doubling`). For a model
    of two paths, only the largest counts: it is the maximum of both paths. `learned`: generated
    budgets until `sizes_file` exists, then as many budgets that suit the items counted there."""
    sizes_file: str = ""
    """For `token_budgets: learned`, on each node. Replicas write the sizes of their items to it,
    and plan their budgets from it when they start."""
    steps_per_doubling: Literal[1, 2, 4, 8] = 8
    """Generated budgets per doubling, in multiples of 8 tokens or of one tile. 1: powers of two.
    More budgets mean less padding and a longer start. For models of one path."""
    global_token_budgets: tuple[PositiveInt, ...] = Field((), strict=False)
    """Budgets of the path for whole images. Empty: one image, doubled up to the maximum."""
    local_token_budgets: tuple[NonNegativeInt, ...] = Field((), strict=False)
    """Budgets of the path for crops. 0, for images without crops, is always included. Empty: one
    crop, doubled up to the maximum."""
    max_vision_items_per_batch: int = Field(0, ge=0)
    """Maximum items in a pack. 0: the largest budget divided by the smallest, or by the model's
    smallest if that is lower."""
    max_frames_per_batch: int | None = Field(None, ge=0)
    """Maximum temporal groups of frames in a pack. None: items x the model's frames per video, at
    most one per 32 tokens. 0: graphs for images only; videos run eagerly. Otherwise each budget has
    a second graph for packs with videos, so that packs of images do not get slower."""
    blocks: BlockChoice = "auto"
    """`fast`: our own kernels; Step3 and Gemma 4 have none. `compile`: torch.compile, which needs a
    C++ compiler, takes seconds at the first start, and caches its code in TORCHINDUCTOR_CACHE_DIR.
    Both need CUDA and a 16-bit dtype. `reference`: plain torch, and the only form of conformers.
    `auto`: the first of these that is supported."""

    precision: Literal["bf16", "fp8", "auto"] = "bf16"
    """`bf16`: everything in `model.dtype`. `fp8`: the linear layers listed in `precision_file` run
    in FP8 (e4m3). `auto`: `fp8` on GPUs that have it, `bf16` on others and on the CPU."""
    precision_file: str = ""
    """For `precision: fp8` and `auto`, on each node that runs FP8: the file that `encoder-service
    calibrate` wrote."""

    @model_validator(mode="after")
    def fp8_has_a_plan(self) -> Self:
        if self.precision == "bf16":
            if self.precision_file:
                raise ValueError("precision_file: only with precision: fp8 or auto")
            return self
        if not self.precision_file:
            raise ValueError(
                f"precision is {self.precision}: set precision_file to what `encoder-service "
                "calibrate` wrote"
            )
        if self.blocks == "compile":
            raise ValueError(
                f"precision is {self.precision}, and blocks: compile has no FP8: set blocks to auto"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def learned_is_a_word(cls, given: Any) -> Any:
        """Replaces `learned` by an empty tuple: budgets are generated until the file exists."""
        if not isinstance(given, Mapping) or given.get("token_budgets") != "learned":
            return given
        if not given.get("sizes_file"):
            raise ValueError("token_budgets is learned: set sizes_file, in a folder that stays")
        return {**given, "token_budgets": ()}

    @model_validator(mode="after")
    def learned_budgets_are_not_given(self) -> Self:
        given = self.token_budgets or self.global_token_budgets or self.local_token_budgets
        if self.sizes_file and (given or self.mode != "budget"):
            raise ValueError(
                "sizes_file: only with token_budgets: learned, mode: budget, and without "
                "global_token_budgets and local_token_budgets"
            )
        return self


def block_form(
    asked: BlockChoice, *, on_cuda: bool, dtype: ModelDtype, fast: bool | None
) -> BlockForm:
    """Resolves `graphs.blocks`. `fast`: see ModelSpec.fast_blocks. Raises ConfigError."""
    capable = on_cuda and dtype != "float32"
    if asked in ("fast", "compile") and not capable:
        raise ConfigError(
            f"graphs.blocks is {asked}, which needs encoder.device cuda and model.dtype bfloat16 "
            "or float16: set those, or graphs.blocks to auto"
        )
    if asked in ("fast", "compile") and fast is None:
        raise ConfigError(
            f"graphs.blocks is {asked}, but the layers of this model's family run in plain torch "
            "only: set it to auto or reference"
        )
    if asked == "fast" and not fast:
        raise ConfigError(
            "graphs.blocks is fast, but this model's family has no fast form of its blocks: set it "
            "to auto, compile or reference"
        )
    if asked != "auto":
        return asked
    if not capable or fast is None:
        return "reference"
    return "fast" if fast else "compile"


class PackingOptions(Options):
    policy: Literal["least_cost", "smallest_first"] = "least_cost"
    """`least_cost` measures the replay time of each budget at start-up, and forms the packs that
    take the least time in total. On the CPU it measures for a second and extrapolates the rest.
    `smallest_first` fills packs up to the largest budget. With `graphs.mode: exact` or `off`, both
    are the same."""


class SharedCacheOptions(Options):
    """A second cache that all replicas share and that outlives them."""

    url: str = Field(pattern=r"^[a-z0-9]+://")
    """file:///folder, redis://host:port/database, or a URL of fsspec, such as s3://bucket/prefix.
    Anyone who can write there controls the rows that clients get."""
    max_bytes: int = Field(100 * 2**30, gt=0)
    """For a folder, which evicts the least recently used. Each replica may exceed it by 10 %."""
    ttl_seconds: float = Field(7 * 86_400, gt=0)
    """For Redis, whose limit in bytes is its own `maxmemory`."""


class CacheOptions(Options):
    max_bytes: int = Field(0, ge=0)  # of embeddings that each replica caches; 0: none
    shared: SharedCacheOptions | None = None


class ReferenceOptions(Options):
    """Embeddings that a replica keeps for clients that ask for a reference."""

    ttl_seconds: float = Field(60, gt=0)
    max_bytes: int = Field(2**30, ge=0)
    """Per replica. Beyond it, the embedding fetched longest ago is evicted."""
    device_bytes: int = Field(0, ge=0)
    """Memory on each replica's device for a second copy of the latest ones, which language models
    on the same machine read from there (rows/memory.py). 0: none."""
    port: int = Field(0, ge=0, le=65_520)
    """The port from which language models and clients on other machines read rows: the first of 16
    TCP ports that a replica tries on its node. 0: the system chooses."""


class PreprocessOptions(Options):
    alpha: Alpha = "white"
    """The background on which transparent images are composited, white as in vLLM. `drop` keeps the
    colours of transparent pixels, which are often black, as transformers' load_image does."""
    prune: Annotated[Literal["off", "exact"], OFF_IS_A_WORD] = "off"
    """`exact`: merge blocks of an image that repeat a neighbour bit for bit are not encoded and
    have no rows (PixelPrune). For families with two-dimensional positions and full attention."""
    threads: PositiveInt = 2
    """Decoding threads per replica. Each works on one image or video at a time."""
    processes: int = Field(0, ge=0, le=256)
    """Decoding processes per replica, used instead of the threads, which slow down the GPU thread.
    Linux only. Each takes about 200 MB, one core when busy, and seconds to start. 0: threads."""
    max_file_seconds: float = Field(40, gt=0)
    """The longest that a process may work on one file before the file is rejected. Keep it below
    `limits.timeout_seconds`, so that the caller gets the error."""
    shared_bytes: int = Field(2**30, ge=2**20)
    """Shared memory for the files and patches of decoding processes, allocated as needed. Items
    that do not fit are decoded by the threads."""


AcceleratorType = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")]


LEAST_RESERVED = 0.0001
"""The smallest amount of a resource that Ray can reserve."""


def reservable(amount: float) -> float:
    if 0 < amount < LEAST_RESERVED:
        raise ValueError(f"{amount:g} is less than Ray can reserve: use at least {LEAST_RESERVED}")
    return amount


Reserved = Annotated[float, Field(ge=0), AfterValidator(reservable)]
"""The amount of a resource that Ray reserves per replica."""

BUILT_IN_RESOURCES = {"CPU", "GPU", "memory", "object_store_memory"}
"""Ray rejects these names among custom resources."""


class AutoscalingOptions(Options):
    """The number of replicas follows the load, within bounds."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt
    look_back_seconds: float = Field(10, gt=0)  # the load is averaged over this time
    upscale_delay_seconds: float = Field(10, ge=0)
    """How long the load must be higher before replicas are added."""
    downscale_delay_seconds: float = Field(600, ge=0)
    """How long the load must be lower before replicas are removed. Long, because a new replica has
    to load weights and capture graphs."""

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas: lower it")
        return self


class DeviceOptions(Options):
    """A deployment whose replicas own one device each."""

    replicas: PositiveInt = 1
    """To change it without a restart, set `num_replicas` in the application's `deployments`."""
    autoscaling: AutoscalingOptions | None = None  # instead of `replicas`
    num_gpus: Reserved = Field(1, le=1)
    """GPUs that Ray reserves per replica: 0 with `device: cpu`; below 1, replicas share a GPU."""
    num_cpus: Reserved = 1
    accelerator_type: AcceleratorType | None = None
    """Ray's name of the GPU type, such as `H200` or `L40S`. None: any."""
    resources: dict[str, Annotated[Reserved, Field(gt=0)]] = {}
    """Custom resources that Ray reserves per replica, to choose nodes."""
    device: Literal["cuda", "cpu"] = "cuda"
    drain_timeout_seconds: float = Field(30, gt=0)
    """How long a stopping replica may take to finish the requests it has accepted."""
    health_check_period_seconds: float = Field(5, gt=0)
    health_check_timeout_seconds: float = Field(8, gt=0)
    """A replica that misses three health checks in a row is replaced. Health checks are answered
    even under full load, because they never wait for the GPU thread."""

    @property
    def reserved_gpus(self) -> float:
        """GPUs that Ray reserves per replica."""
        return self.num_gpus

    @property
    def least_replicas(self) -> int:
        return self.autoscaling.min_replicas if self.autoscaling else self.replicas

    @property
    def most_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas

    @model_validator(mode="after")
    def count_is_given_once(self) -> Self:
        if self.autoscaling and "replicas" in self.model_fields_set:
            raise ValueError("replicas and autoscaling are both given: keep one of them")
        return self

    @model_validator(mode="after")
    def device_is_reserved(self) -> Self:
        """Otherwise a replica would use a GPU that Ray gives to others."""
        if self.device == "cpu" and self.num_gpus:
            raise ValueError("device is cpu: set num_gpus to 0")
        if self.device == "cuda" and not self.num_gpus:
            raise ValueError("device is cuda: set num_gpus to 1, or device to cpu")
        if own := BUILT_IN_RESOURCES & self.resources.keys():
            raise ValueError(
                f"resources: {', '.join(sorted(own))}: only custom resources go here: leave it "
                "out, and set num_cpus or num_gpus"
            )
        return self


class EncoderAutoscalingOptions(AutoscalingOptions):
    """The load is the outstanding work."""

    target_patches: PositiveInt = 100_000
    """Target for the mean outstanding patches per replica: the seconds that an item may wait, times
    the patches that a replica encodes per second (BENCHMARKS.md)."""
    target_seconds: float | None = Field(None, gt=0)
    """Instead of `target_patches`: the seconds that an item may wait, computed from what each
    replica measured at start. With `graphs.mode: exact` or `off` nothing is measured, and the
    number of replicas does not change."""

    @model_validator(mode="after")
    def target_is_given_once(self) -> Self:
        if self.target_seconds and "target_patches" in self.model_fields_set:
            raise ValueError("target_patches and target_seconds are both given: keep one of them")
        return self


class PoolGraphOptions(Options):
    """Budgets of a pool. None: those of `graphs`."""

    token_budgets: tuple[PositiveInt, ...] | None = Field(None, strict=False)
    global_token_budgets: tuple[PositiveInt, ...] | None = Field(None, strict=False)
    local_token_budgets: tuple[NonNegativeInt, ...] | None = Field(None, strict=False)


class PoolOptions(Options):
    """Encoders on one kind of device, in their own deployment. None: the value of `encoder`."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
    replicas: PositiveInt | None = None
    autoscaling: EncoderAutoscalingOptions | None = None
    num_gpus: Reserved | None = Field(None, le=1)
    num_cpus: Reserved | None = None
    accelerator_type: AcceleratorType | None = None
    resources: dict[str, Annotated[Reserved, Field(gt=0)]] | None = None
    device: Literal["cuda", "cpu"] | None = None
    gpu_memory_bytes: PositiveInt | None = None
    graphs: PoolGraphOptions = PoolGraphOptions()


class EncoderOptions(DeviceOptions):
    autoscaling: EncoderAutoscalingOptions | None = None
    pools: tuple[PoolOptions, ...] = Field((), strict=False)
    """Several kinds of device in one service. Empty: all encoders are equal."""
    transport: Transport = "shared_memory"
    """How rows above a megabyte reach callers in Ray. `nixl` leaves them on the encoder's device,
    where callers with a device, language models of this service and your own actors, read them
    (actors/store/nixl.py). Needs the extra `nixl`; Ray calls the interface alpha."""
    nixl_bytes: PositiveInt = 2**30
    """Memory on each replica's device for rows that are yet to be read. Rows that do not fit use
    shared memory."""
    gpu_memory_bytes: PositiveInt | None = None
    """Limit of the GPU memory that a replica allocates through torch: weights, graphs, buffers,
    `nixl_bytes`, `references.device_bytes`. The CUDA context and modules come on top. None: all
    free memory."""
    max_stall_seconds: float = Field(60, gt=0)
    """A replica that has work but finishes no pack for this long reports itself unhealthy."""

    @property
    def shutdown_seconds(self) -> float:
        """Seconds after which Serve kills a stopping replica. Serve first waits 2 s for its own
        calls; after the drain, the last answers and their tickets take up to 3 s."""
        return self.drain_timeout_seconds + 5

    @model_validator(mode="after")
    def pools_have_their_own_names(self) -> Self:
        names = [pool.name for pool in self.pools]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"pools: {', '.join(sorted(repeated))}: give each pool its own name")
        return self


class TracingOptions(Options):
    """Spans of requests, through OpenTelemetry. Needs the extra `otel`."""

    export: Annotated[Literal["off", "otlp", "file"], OFF_IS_A_WORD] = "off"
    """`otlp` sends spans to a collector over HTTP. `file` writes JSON lines, a file per process."""
    endpoint: str = ""
    """The collector's URL, such as http://collector:4318/v1/traces. Empty: taken from
    OTEL_EXPORTER_OTLP_*."""
    folder: str = ""  # where `export: file` writes, on each node

    @model_validator(mode="after")
    def file_has_a_folder(self) -> Self:
        if self.export == "file" and not self.folder:
            raise ValueError("export is file: set folder")
        return self


class ActorOptions(Options):
    model: ModelOptions
    encoder: EncoderOptions = EncoderOptions()
    graphs: GraphOptions = GraphOptions()
    packing: PackingOptions = PackingOptions()
    cache: CacheOptions = CacheOptions()
    references: ReferenceOptions = ReferenceOptions()
    preprocess: PreprocessOptions = PreprocessOptions()
    tracing: TracingOptions = TracingOptions()

    @model_validator(mode="after")
    def graphs_hold_the_dtype(self) -> Self:
        """The same check as in attention.choose, here so that `encoder-service check` finds it.
        Pools are checked one by one: see config.encoders."""
        on_cuda = self.encoder.device == "cuda" and not self.encoder.pools
        graphs = self.graphs.mode != "off"
        limit = self.encoder.gpu_memory_bytes
        if limit and self.references.device_bytes >= limit:
            raise ValueError(
                f"references.device_bytes is {self.references.device_bytes}, of the {limit} of "
                "encoder.gpu_memory_bytes, which also hold weights and graphs: lower it"
            )
        if self.model.dtype == "float32" and on_cuda and graphs:
            raise ValueError(
                "model.dtype is float32, for which there is no attention that a CUDA graph can "
                "hold: set it to bfloat16 or float16, or graphs.mode to off"
            )
        return self

    @model_validator(mode="after")
    def pools_do_not_learn(self) -> Self:
        """Pools would share a file, although they encode items of different sizes."""
        if self.encoder.pools and self.graphs.sizes_file:
            raise ValueError(
                "graphs.token_budgets is learned, which encoder.pools cannot: list the budgets, "
                "see `encoder-service capture-plan --from`"
            )
        return self

    @model_validator(mode="after")
    def blocks_run_here(self) -> Self:
        """Checks the device and dtype only. Whether the family has a fast form is known once its
        spec is read: see config.fit."""
        try:
            if not self.encoder.pools:
                self.block_form(fast=True)
        except ConfigError as error:
            raise ValueError(error.message) from error
        return self

    def block_form(self, *, fast: bool | None) -> BlockForm:
        """The form of the blocks in use. `fast`: see ModelSpec.fast_blocks. Raises ConfigError."""
        on_cuda = self.encoder.device == "cuda"
        return block_form(self.graphs.blocks, on_cuda=on_cuda, dtype=self.model.dtype, fast=fast)
