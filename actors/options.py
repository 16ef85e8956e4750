"""What an encoder can be told, as frozen configuration. A key that is not here is an error."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from actors.types import Dtype

Transport = Literal["shared_memory", "nixl"]


class Options(BaseModel):
    """Frozen, and refuses what it does not know: keys, true for 1, "1" for 1, infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelOptions(Options):
    """Which tower, from where, in which precision."""

    id: str
    """A folder, a Hugging Face repository, or (with dummy weights) the name of a preset."""
    revision: str | None = None
    """Of a repository; a folder or a preset has none."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """`dummy` gives random weights, and says so in every response. `auto` is safetensors."""
    dtype: Dtype = "bfloat16"
    trust: Literal["never"] = "never"
    """Code from a repository is never run; there is no other value."""


class GraphOptions(Options):
    """Which graphs are captured. Names as in vLLM's compilation config."""

    mode: Literal["budget", "exact", "off"] = "budget"
    """`budget` captures every budget at start; `exact` captures a pack's layout (the grids of its
    items) when it comes for the second time, up to the largest budget; `off` runs everything
    eagerly."""
    token_budgets: tuple[PositiveInt, ...] = Field((), strict=False)
    """Output tokens. Empty: the model's range by `steps_per_doubling`, its maximum included. A
    model of two paths takes the largest as the maximum of both, and generates the rest."""
    steps_per_doubling: Literal[1, 2, 4, 8] = 8
    """Budgets that are generated to each doubling, in multiples of 8 tokens, or of one tile's; 1:
    powers of two. More pad less, and take longer to capture. Of a model of one path."""
    global_token_budgets: tuple[PositiveInt, ...] = Field((), strict=False)
    """Of the path that sees whole images. Empty: one image, doubled up to the maximum."""
    local_token_budgets: tuple[NonNegativeInt, ...] = Field((), strict=False)
    """Of the path that sees crops; 0, for images without crops, is always one of them. Empty: one
    crop, doubled while the maximum holds."""
    max_vision_items_per_batch: int = Field(0, ge=0)
    """0: largest budget // smallest budget, or // the model's smallest if that is lower."""
    max_frames_per_batch: int | None = Field(None, ge=0)
    """Attention segments of a pack's videos: their temporal groups of frames. None: items x the
    model's frames per video; never more than one for each 32 tokens. 0: graphs for images only, as
    for a model without video; videos run eagerly. Otherwise each budget has a second graph, for
    packs with videos: images alone pay nothing for it."""
    path_streams: bool = False
    """Paths of one pack at the same time, each on a stream of its own, on CUDA. Takes more memory:
    each path's graphs have a pool of their own. Not measured yet."""
    compile: bool = False
    """Blocks that have no fast form go through torch.compile before they are captured: those whose
    norms follow attention and MLP (Step3). On CUDA in 16 bits; takes a C++ compiler and seconds
    at a first start, and keeps what it made in TORCHINDUCTOR_CACHE_DIR. Not measured yet."""
    max_exact_graphs: PositiveInt = 64
    """Layouts that `mode: exact` keeps; the one unused for longest makes room."""

    @field_validator("mode", mode="before")
    @classmethod
    def off_is_a_word(cls, value: Any) -> Any:
        """YAML 1.1 reads a bare `off` as false."""
        return "off" if value is False else value


class PackingOptions(Options):
    """Which waiting items share a graph."""

    policy: Literal["least_cost", "smallest_first"] = "least_cost"
    """`least_cost` measures each budget's replay at start and cuts where all that waits takes the
    least time. `smallest_first` fills packs up to the largest budget, as both do without budgets
    to choose from (`graphs.mode: exact` and `off`)."""


class CacheOptions(Options):
    """Embeddings kept in the actor's host memory."""

    max_bytes: int = Field(0, ge=0)
    """0 keeps none."""


class ReferenceOptions(Options):
    """Embeddings that a replica keeps for clients that asked for a reference."""

    ttl_seconds: float = Field(60, gt=0)
    """How long each may be fetched."""
    max_bytes: int = Field(2**30, ge=0)
    """Of one replica; beyond it the one fetched longest ago makes room."""


class PreprocessOptions(Options):
    """From bytes to patches."""

    threads: PositiveInt = 2
    """Threads of the replica that decode: each works on one image or video at a time."""
    processes: int = Field(0, ge=0, le=256)
    """Decoding processes per replica, used instead of the threads; Linux only. Threads that decode
    slow down the GPU thread, because they share the interpreter with it. Each process takes about
    200 MB, one core when busy, and seconds to start. 0: decode in the threads."""
    shared_bytes: int = Field(2**30, ge=2**20)
    """Shared memory that holds the files and patches of decoding processes, allocated as it is
    needed. Items that are too large for it are decoded by the threads."""


class DeviceOptions(Options):
    """A deployment that computes: one replica owns one device."""

    replicas: PositiveInt = 1
    num_gpus: float = Field(1, ge=0, le=1)
    """GPUs that Ray reserves for a replica: 0 with `device: cpu`; below 1, replicas share one."""
    num_cpus: float = Field(1, ge=0)
    device: Literal["cuda", "cpu"] = "cuda"
    drain_timeout_seconds: float = Field(30, gt=0)
    """How long a replica that is being stopped may take to finish what it accepted."""
    health_check_period_seconds: float = Field(5, gt=0)
    health_check_timeout_seconds: float = Field(8, gt=0)
    """A replica that does not answer for so long, three times in a row, is replaced: one that hangs
    after about half a minute. It may be busy as it likes: nothing that takes long runs where the
    question is answered."""

    @model_validator(mode="after")
    def device_is_reserved(self) -> Self:
        """A replica on the GPU would otherwise use one that Ray gives to others."""
        if self.device == "cpu" and self.num_gpus:
            raise ValueError("device is cpu: set num_gpus to 0")
        if self.device == "cuda" and not self.num_gpus:
            raise ValueError("device is cuda: set num_gpus to 1, or device to cpu")
        return self


class AutoscalingOptions(Options):
    """As many replicas as the outstanding patches ask for, within bounds."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt
    target_patches: PositiveInt = 100_000
    """Outstanding ones that one replica should have, in the mean: the time that an item may wait
    times the patches that a replica encodes in it (BENCHMARKS.md)."""
    look_back_seconds: float = Field(10, gt=0)
    """What the load is the mean of."""
    upscale_delay_seconds: float = Field(10, ge=0)
    """How long more must have been asked for before replicas are added."""
    downscale_delay_seconds: float = Field(600, ge=0)
    """How long fewer: a new replica has to load weights and capture graphs."""

    @model_validator(mode="after")
    def bounds_are_in_order(self) -> Self:
        """Serve would say so as well, of names of its own."""
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas is more than max_replicas")
        return self


class EncoderOptions(DeviceOptions):
    """The deployment of encoder actors."""

    autoscaling: AutoscalingOptions | None = None
    """In the place of `replicas`."""
    transport: Transport = "shared_memory"
    """How rows above a megabyte get to callers in Ray. `nixl` leaves them on the device, from where
    those who can read them have them on their own: language models here, and whoever
    uses actors/store/received.py. Needs the extra `nixl`; Ray calls the interface alpha."""
    nixl_bytes: PositiveInt = 2**30
    """Of each replica's device: where rows wait for their readers. What finds no room there goes by
    shared memory."""
    max_stall_seconds: float = Field(60, gt=0)
    """A replica with work that finishes nothing for so long reports itself unhealthy."""

    @model_validator(mode="after")
    def one_of_both(self) -> Self:
        """A number of replicas, or bounds of it."""
        if self.autoscaling and "replicas" in self.model_fields_set:
            raise ValueError("replicas and autoscaling are both given: keep one of them")
        return self

    @property
    def least_replicas(self) -> int:
        """Those that there are at any load."""
        return self.autoscaling.min_replicas if self.autoscaling else self.replicas

    @property
    def most_replicas(self) -> int:
        """Those that there are under full load."""
        return self.autoscaling.max_replicas if self.autoscaling else self.replicas


class TracingOptions(Options):
    """Spans of requests, by OpenTelemetry. Needs the extra `otel`."""

    export: Literal["off", "otlp", "file"] = "off"
    """`otlp` sends them to a collector over HTTP; `file` writes lines of JSON, a file a process."""
    endpoint: str = ""
    """Of the collector, such as http://collector:4318/v1/traces. Empty: what OTEL_EXPORTER_OTLP_*
    say."""
    folder: str = ""
    """On each node, for `export: file`."""
    sample_ratio: float = Field(1, ge=0, le=1)
    """Of the traces that begin here; a caller's own decision is kept."""

    @field_validator("export", mode="before")
    @classmethod
    def off_is_a_word(cls, value: Any) -> Any:
        """YAML 1.1 reads a bare `off` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def file_has_a_folder(self) -> Self:
        """There is no good place that we could choose."""
        if self.export == "file" and not self.folder:
            raise ValueError("export is file: set folder")
        return self


class MetricsOptions(Options):
    """Where the series go besides /metrics."""

    ray_mirror_seconds: float = Field(10, ge=0)
    """How often they are copied to Ray's own metrics ports, as ray_encoder_*; 0: never."""


class ActorOptions(Options):
    """Everything that one encoder actor needs to know."""

    model: ModelOptions
    encoder: EncoderOptions = EncoderOptions()
    graphs: GraphOptions = GraphOptions()
    packing: PackingOptions = PackingOptions()
    cache: CacheOptions = CacheOptions()
    references: ReferenceOptions = ReferenceOptions()
    preprocess: PreprocessOptions = PreprocessOptions()
    tracing: TracingOptions = TracingOptions()
    metrics: MetricsOptions = MetricsOptions()

    @model_validator(mode="after")
    def graphs_hold_the_dtype(self) -> Self:
        """Said here too, so that `encoder-service check` finds it: see attention.choose."""
        on_cuda, graphs = self.encoder.device == "cuda", self.graphs.mode != "off"
        if self.model.dtype == "float32" and on_cuda and graphs:
            raise ValueError(
                "model.dtype is float32, for which there is no attention that a CUDA graph can "
                "hold: set it to bfloat16 or float16, or graphs.mode to off"
            )
        return self

    @model_validator(mode="after")
    def compiled_for_cuda(self) -> Self:
        """On the CPU there is no graph to save launches in, and float32 stays the reference."""
        if self.graphs.compile and (self.encoder.device == "cpu" or self.model.dtype == "float32"):
            raise ValueError(
                "graphs.compile needs encoder.device cuda and model.dtype bfloat16 or float16"
            )
        return self
