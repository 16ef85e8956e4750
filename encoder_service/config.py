"""The configuration: the `args` of encoder_service.app:build in a Serve YAML file."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    StringConstraints,
    model_validator,
)

from actors.engine.budgets import Capacity, model_capacity
from actors.errors import ConfigError
from actors.options import (
    OFF_IS_A_WORD,
    ActorOptions,
    AutoscalingOptions,
    DeviceOptions,
    GraphOptions,
    ModelOptions,
    Options,
    ReferenceOptions,
    Reserved,
    updated,
    validated,
)
from actors.spec.model_spec import ModelSpec
from actors.types import Size
from router.options import LIVE_KEYS, RouterOptions

BUILD = "encoder_service.app:build"
"""The `import_path` of our applications."""

OPEN_CLUSTER = (
    "RAY_AUTH_MODE is not token: whoever reaches Ray's ports, as every user of its machines does, "
    "can run code in the cluster: set RAY_AUTH_MODE=token before Ray is started"
)

OPEN_FOLDER = (
    "other users of this machine may enter Ray's folder {folder}, which Ray makes writable for "
    "all, and put their own sockets in place of Ray's: set RAY_TMPDIR to a folder of mode 0700 "
    "before Ray is started"
)

SECTIONS = {"Encoder": "encoder", "Router": "router", "Ingress": "ingress", "Chat": "llm"}
"""Our deployments, and the section of `args` that configures each."""

POOL = "Encoder-"
"""Prefix of the names of the deployments of `encoder.pools`, which replace Encoder."""

Host = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]+$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]


class IngressOptions(Options):
    """The front door's deployment: HTTP and gRPC handlers, with a router in each replica."""

    replicas: PositiveInt = 1
    num_cpus: Reserved = 0.5
    max_ongoing_requests: PositiveInt = 1000
    """Maximum concurrent requests per replica over HTTP, and the same number over gRPC."""
    grpc_host: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.:_-]+$")] = "127.0.0.1"
    """Address to listen on for gRPC; 0.0.0.0: all addresses. For HTTP, set http_options."""
    grpc_port: int | None = Field(9000, gt=0, lt=2**16)
    """Every ingress listens on it; those on one machine share the port. None: no gRPC."""


class LimitOptions(Options):
    """Limits on requests and responses. Most are checked before anything is decoded."""

    max_body_bytes: PositiveInt = 128 * 2**20
    max_buffered_bytes: PositiveInt = 2 * 2**30
    """Maximum bytes of all requests that one ingress replica holds at a time, including the files
    fetched for them. Beyond it, requests are rejected with 429."""
    max_response_bytes: int = Field(2**30, gt=0, le=2_000_000_000)
    """Maximum bytes of a response's tensors; base64 adds a third. A gRPC message is limited to less
    than 2 GiB."""
    max_unsent_bytes: PositiveInt = 2 * 2**30
    """Maximum bytes of all responses that one ingress replica holds until their clients have read
    them. Beyond it, requests are rejected with 429. Over gRPC, only responses of one message count,
    because a stream holds only one chunk."""
    max_items: int = Field(64, gt=0, le=1000)
    max_pixels: int = Field(40_000_000, gt=0, le=178_000_000)
    """Maximum pixels of one image, as its header declares. Decoding takes up to 16 bytes of memory
    per pixel, however small the file. Raise it for maps and scans; Pillow's own limit is the
    maximum."""
    max_image_tokens: PositiveInt | None = None
    """Maximum tokens of one image. None: as many as the largest budget holds."""
    max_video_frames: PositiveInt = 20_000
    """Maximum frames of a video file, encoded or not, because frames between two encoded ones may
    have to be decoded."""
    max_video_pixels: PositiveInt = 42_000_000_000
    """Maximum pixels of all frames of a video up to the last encoded one. It bounds the decoding
    time, which depends little on the size of the file. max_video_frames frames of 1920 x 1080 are
    below it."""
    max_video_seconds: PositiveFloat = 900
    max_video_tokens: PositiveInt = 32_768
    """Maximum tokens of one video, over all encoded frame groups."""
    max_audio_seconds: PositiveFloat = 900
    """Maximum length of one sound, for models that take more than one window."""
    timeout_seconds: PositiveFloat = 60
    """Default and maximum of a request's timeout_s; also the limit for reading a body."""

    @model_validator(mode="after")
    def one_request_fits(self) -> Self:
        """Otherwise the largest request would always get 429, which tells the client to retry."""
        if self.max_buffered_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_bytes is less than max_body_bytes: raise it")
        if self.max_unsent_bytes < self.max_response_bytes:
            raise ValueError("max_unsent_bytes is less than max_response_bytes: raise it")
        return self


class FetchOptions(Options):
    """Fetching of items given as URLs, which are rejected unless their host is listed."""

    allow_hosts: tuple[Host, ...] = Field((), strict=False)
    """Host names only: no scheme, port or path."""
    max_bytes: PositiveInt = 32 * 2**20
    timeout_seconds: PositiveFloat = 10


class AuthOptions(Options):
    """Bearer tokens. If there are none, everybody has access."""

    token_sha256: tuple[Sha256, ...] = Field((), strict=False)
    """Hexadecimal SHA-256 of each token; the configuration never contains the tokens themselves."""
    token_sha256_file: str | None = None
    """A file with further digests, one per line. It is read again when it changes."""


class LoggingOptions(Options):
    """Logs of our replicas, not of Serve's proxies and controller."""

    format: Literal["text", "json"] = "text"
    access_log: bool = True
    """One line per encode, plan, chat or embeddings request, written by a thread."""


LlmEngine = Literal["transformers", "vllm"]

ONGOING: dict[LlmEngine, int] = {"transformers": 4, "vllm": 256}
"""Default of llm.max_ongoing_requests."""


class LlmAutoscalingOptions(AutoscalingOptions):
    """The load is the requests that replicas have accepted or that wait for one."""

    target_ongoing_requests: PositiveFloat | None = None
    """Target for the mean requests per replica, as in Serve. None: half of
    `llm.max_ongoing_requests`, so that replicas are added before requests have to wait."""


class LocalGraphOptions(GraphOptions):
    mode: Annotated[Literal["budget", "off"], OFF_IS_A_WORD] = "budget"
    """Not exact: each step asks whether the engine's stream is idle, which CUDA forbids while that
    stream captures a graph."""
    steps_per_doubling: Literal[1, 2, 4, 8] = 2
    """Fewer budgets than in the service, because vLLM already takes long to start."""


class LocalEncoderOptions(Options):
    """Our engine inside vLLM's process, of the chat's replica or of `vllm serve`."""

    chunk_ms: float = Field(5, gt=0)
    """Length of a slice. `Pace` decides how many of them a step of the language model waits for."""
    decode_step_tokens: int | None = Field(None, gt=0)
    """Maximum tokens of a step in which a request decodes; fewer beside a long context. None: as
    many as of any step (--max-num-batched-tokens)."""
    ahead_bytes: int = Field(2**30, gt=0)
    """Maximum size of rows that are encoded before their requests are scheduled, on the device."""
    graphs: LocalGraphOptions = LocalGraphOptions()


class LlmOptions(DeviceOptions):
    """The language model's deployment. It scales independently of the encoders."""

    autoscaling: LlmAutoscalingOptions | None = None
    engine: LlmEngine = "transformers"
    """`transformers` generates one completion at a time; `vllm` batches, and must be installed."""
    tensor_parallel_size: PositiveInt = 1
    """vllm: GPUs per replica, all on one node. Ray reserves as many."""
    engine_args: dict[str, Any] = Field({})
    """vllm: further AsyncEngineArgs, such as `gpu_memory_utilization`."""
    local_encoder: LocalEncoderOptions | None = None
    """vllm: images and videos are encoded inside vLLM's process. None: by the encoders."""
    tool_parser: str = ""
    """vllm: name of vLLM's parser of tool calls, such as `hermes`. Empty: tools are rejected."""
    model: ModelOptions | None = None
    """None: the service's own `model`. Only its language model is loaded, not its tower, so its
    `images_kwargs` and `videos_kwargs` have no effect."""
    max_ongoing_requests: PositiveInt | None = None
    """Per replica. None: 256 with vllm; 4 with transformers, where one request generates while the
    others are tokenised and encoded, and then wait."""
    max_queued_requests: PositiveInt = 64
    """Requests that wait in one ingress replica while all replicas are full. Beyond it, 429."""
    max_model_len: PositiveInt | None = None
    """Maximum prompt plus completion length in tokens. None: the model's own maximum."""
    default_max_tokens: PositiveInt = 512
    """Completion limit for requests that set no `max_tokens`."""
    video_pruning_rate: float = Field(0.0, ge=0, lt=1)
    """Share of each video's rows that is dropped before the language model reads them, where little
    changes (Efficient Video Sampling). Same as vLLM's option of this name."""
    timeout_seconds: PositiveFloat = 120
    """Time limit from the body of a request to its last token."""

    @property
    def ongoing_requests(self) -> int:
        return self.max_ongoing_requests or ONGOING[self.engine]

    @property
    def target_ongoing_requests(self) -> float:
        given = self.autoscaling.target_ongoing_requests if self.autoscaling else None
        return given or self.ongoing_requests / 2

    @property
    def reserved_gpus(self) -> float:
        return self.num_gpus * self.tensor_parallel_size

    @model_validator(mode="after")
    def target_can_be_reached(self) -> Self:
        if self.target_ongoing_requests > self.ongoing_requests:
            raise ValueError(
                f"autoscaling.target_ongoing_requests is {self.target_ongoing_requests:g}, more "
                f"than the {self.ongoing_requests} of max_ongoing_requests: lower it"
            )
        return self

    @model_validator(mode="after")
    def options_belong_to_the_engine(self) -> Self:
        for key in ("engine_args", "local_encoder", "tensor_parallel_size", "tool_parser"):
            if self.engine != "vllm" and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key}: only with engine: vllm")
        if self.local_encoder and self.tensor_parallel_size > 1:
            raise ValueError("local_encoder: only with tensor_parallel_size: 1")
        if self.engine == "vllm" and self.video_pruning_rate:
            raise ValueError("video_pruning_rate: only with engine: transformers")
        if self.tensor_parallel_size > 1 and 0 < self.num_gpus < 1:
            raise ValueError("tensor_parallel_size: only with num_gpus: 1, which each GPU counts")
        return self


class ServiceOptions(ActorOptions):
    router: RouterOptions = RouterOptions()
    ingress: IngressOptions = IngressOptions()
    limits: LimitOptions = LimitOptions()
    fetch: FetchOptions = FetchOptions()
    auth: AuthOptions = AuthOptions()
    logging: LoggingOptions = LoggingOptions()
    llm: LlmOptions | None = None
    """A language model that answers chats; None: encoders only."""

    @property
    def lasting_references(self) -> ReferenceOptions:
        """`references` that last as long as a chat whose rows vLLM reads by their ids, again after
        it has preempted the chat."""
        if self.llm is None or self.llm.engine != "vllm" or self.llm.local_encoder:
            return self.references
        ttl_seconds = max(self.references.ttl_seconds, self.llm.timeout_seconds)
        return self.references.model_copy(update={"ttl_seconds": ttl_seconds})

    @model_validator(mode="after")
    def chats_place_pruned_images(self) -> Self:
        if self.preprocess.prune != "off" and self.llm and self.llm.engine == "vllm":
            raise ValueError(
                "preprocess.prune is exact, and llm.engine vllm cannot place pruned images: set "
                "one to off, or the other to transformers"
            )
        return self


LIVE: dict[str, dict[str, Collection[str]]] = {
    "Ingress": {
        "limits": LimitOptions.model_fields.keys() - {"max_body_bytes", "max_buffered_bytes"},
        "router": LIVE_KEYS,
        "fetch": FetchOptions.model_fields.keys(),
        "auth": AuthOptions.model_fields.keys(),
        "logging": {"access_log"},
    },
    "Router": {"router": LIVE_KEYS},
}
"""The keys that a deployment's `user_config` can change without a restart, by deployment and
section. The two limits left out size the gRPC server when it starts."""


def resources(options: ServiceOptions, *, most: bool = False) -> dict[str, float]:
    """The resources that all deployments request from Ray, with the minimum number of replicas or,
    with `most`, the maximum."""
    devices: list[DeviceOptions] = [one.encoder for one in encoders(options).values()]
    if options.llm:
        devices.append(options.llm)
    found: defaultdict[str, float] = defaultdict(float)
    for front in (options.router, options.ingress):
        found["CPU"] += front.replicas * front.num_cpus
    for device in devices:
        count = device.most_replicas if most else device.least_replicas
        asked = {"GPU": device.reserved_gpus, "CPU": device.num_cpus, **device.resources}
        if device.accelerator_type:
            asked[f"accelerator_type:{device.accelerator_type}"] = 0.001  # as Ray does
        for name, amount in asked.items():
            found[name] += count * amount
    return found


def parse(args: Mapping[str, Any]) -> ServiceOptions:
    """Parses the options. Raises a ConfigError that names every wrong key."""
    options = validated(ServiceOptions, args)
    encoders(options)
    return options


def encoders(options: ServiceOptions) -> dict[str, ServiceOptions]:
    """The options of each encoder deployment: one per pool or, without pools, the service's own.

    Raises ConfigError.
    """
    if not options.encoder.pools:
        return {"Encoder": options}
    args, found = options.model_dump(exclude_unset=True), {}
    for pool in options.encoder.pools:
        given = pool.model_dump(exclude_unset=True, exclude_none=True, exclude={"name"})
        graphs = args.get("graphs", {}) | given.pop("graphs", {})
        with naming(POOL + pool.name):
            found[POOL + pool.name] = parse(
                args | {"encoder": args["encoder"] | {"pools": ()} | given, "graphs": graphs}
            )
    return found


@contextmanager
def naming(deployment: str) -> Iterator[None]:
    """Adds the pool's name to a ConfigError."""
    try:
        yield
    except ConfigError as error:
        if deployment not in SECTIONS:
            raise ConfigError(f"pool {deployment.removeprefix(POOL)}: {error}") from None
        raise


def fit(options: ServiceOptions, spec: ModelSpec) -> Capacity:
    """The capacity of one pack. Raises ConfigError for options that do not fit the model."""
    room = model_capacity(options.graphs, spec)
    options.block_form(fast=spec.fast_blocks)
    if options.graphs.precision != "bf16":
        spec.check_fp8()
    if options.preprocess.prune != "off":
        spec.check_prune()
    side = math.isqrt(options.limits.max_pixels)
    plan = spec.sizing.plan(Size(side, side))
    patches = spec.sizing.token_range()[1] * plan.patches // sum(plan.path_tokens)
    most = options.router.max_outstanding_patches
    if most < patches:
        raise ConfigError(
            f"router.max_outstanding_patches is {most}, less than the "
            f"{patches} patches of one largest image: raise it"
        )
    return room


def fitted(options: ServiceOptions, spec: ModelSpec) -> dict[str, tuple[ServiceOptions, Capacity]]:
    """The options and pack capacity of each encoder deployment, the largest budgets first.

    Raises ConfigError for options that do not fit the model.
    """
    found = {}
    for name, one in encoders(options).items():
        with naming(name):
            found[name] = one, fit(one, spec)
    return dict(sorted(found.items(), key=lambda each: each[1][1].tokens, reverse=True))


def check_scaling(options: ServiceOptions) -> None:
    """Raises ConfigError if the ingresses admit too little for autoscaling to reach its maximum."""
    most = options.router.max_outstanding_patches
    for scaling in (one.encoder.autoscaling for one in encoders(options).values()):
        if scaling is None or scaling.target_seconds:
            continue
        admitted = most * options.ingress.replicas
        asked = scaling.target_patches * (scaling.max_replicas - 1)
        if admitted <= asked:
            raise ConfigError(
                f"encoder.autoscaling reaches {scaling.max_replicas} replicas beyond {asked} "
                f"outstanding patches, and the ingresses admit {admitted}: raise "
                "router.max_outstanding_patches or the number of ingresses, or lower target_patches"
            )
    if (llm := options.llm) and llm.autoscaling:
        admitted = options.ingress.max_ongoing_requests * options.ingress.replicas
        wanted = llm.target_ongoing_requests * (llm.most_replicas - 1)
        if admitted <= wanted:
            raise ConfigError(
                f"llm.autoscaling reaches {llm.most_replicas} replicas beyond {wanted:g} requests, "
                f"and the ingresses admit {admitted}: raise ingress.max_ongoing_requests or the "
                "number of ingresses, or lower target_ongoing_requests"
            )


def is_open(folder: Path) -> bool:
    """Whether other users can enter one of Ray's folders, because the mode of the folder and of all
    its parents lets the group or everybody in. Folders that Ray creates do.

    False in a pod, which has no other users.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return False
    try:
        above = (folder, *folder.resolve().parents)
        return all(each.stat().st_mode & 0o011 for each in above if each.exists())
    except OSError:
        return False


def read_document(path: Path) -> dict[str, Any]:
    """Reads a Serve configuration file, which has a list of applications. Raises ConfigError."""
    try:
        document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        # Only the reason of an OSError, because its text would name the file again.
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    applications = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(applications, list) or not all(isinstance(one, dict) for one in applications):
        raise ConfigError(f"{path}: needs `applications:` with a list of applications")
    for index, one in enumerate(applications):
        entries = one.get("deployments") or []
        if not isinstance(entries, list) or not all(
            isinstance(each, dict) and isinstance(each.get("name"), str) for each in entries
        ):
            raise ConfigError(
                f"{path}: applications[{index}].deployments: needs a list of deployments, each "
                "with a `name`"
            )
    return document


def is_ours(application: Mapping[str, Any]) -> bool:
    return str(application.get("import_path")).replace(":", ".") == BUILD.replace(":", ".")


def counted(options: ServiceOptions, application: Mapping[str, Any]) -> ServiceOptions:
    """The options, overridden by the application's `deployments` as Serve does: replica counts, and
    the `user_config` of Ingress.

    Raises ConfigError.
    """
    entries = application.get("deployments") or []
    for entry in entries:
        name, user_config = entry.get("name"), entry.get("user_config")
        if name not in (known_names := scaled(options)):
            raise ConfigError(
                f"deployments: no deployment is named {name!r}; there are {', '.join(known_names)}"
            )
        if user_config is not None:
            try:
                changed = updated(options, user_config, LIVE.get(name, {}))
            except ConfigError as error:
                raise ConfigError(f"deployments: {name}: {error}") from None
            options = changed if name == "Ingress" else options
    there = scaled(options)
    for entry in entries:
        name, replicas = entry["name"], entry.get("num_replicas")
        section = there[name]
        if replicas is None:
            continue
        if type(replicas) is not int or replicas < 1:
            raise ConfigError(
                f"deployments: num_replicas of {name} is {replicas!r}: give a number from 1 on, "
                "or set autoscaling of encoder or llm"
            )
        if getattr(section, "autoscaling", None):
            raise ConfigError(
                f"{SECTIONS.get(name, 'encoder')}.autoscaling and num_replicas of the deployment "
                f"{name} are both given: keep one of them"
            )
        there[name] = section.model_copy(update={"replicas": replicas})
    pooled = tuple(there.pop(POOL + pool.name) for pool in options.encoder.pools)
    found = {SECTIONS[name]: section for name, section in there.items()}
    found.setdefault("encoder", options.encoder.model_copy(update={"pools": pooled}))
    return options.model_copy(update=found)


def scaled(options: ServiceOptions) -> dict[str, Any]:
    """The options of each deployment that has a replica count, by the deployment's name."""
    pools = {POOL + pool.name: pool for pool in options.encoder.pools}
    return pools | {
        name: getattr(options, key)
        for name, key in SECTIONS.items()
        if getattr(options, key) and not (pools and key == "encoder")
    }


def load_all(path: Path) -> list[ServiceOptions]:
    """The options of each of our applications. Raises ConfigError if there is none."""
    found = []
    for index, application in enumerate(read_document(path)["applications"]):
        if not is_ours(application):
            continue
        args = application.get("args", {})
        if not isinstance(args, Mapping):
            raise ConfigError(
                f"{path}: applications[{index}].args is not a mapping: give keys and values"
            )
        try:
            found.append(counted(parse(args), application))
        except ConfigError as error:
            raise ConfigError(f"{path}: applications[{index}].args: {error}") from None
    if not found:
        raise ConfigError(f"{path}: no application has `import_path: {BUILD}`")
    return found


def load(path: Path) -> ServiceOptions:
    return load_all(path)[0]
