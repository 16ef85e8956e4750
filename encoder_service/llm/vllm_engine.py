"""`llm.engine: vllm`: vLLM's AsyncLLM with our embeddings. It batches completions continuously.

vLLM gets tokens with a placeholder for every row, and the ids of the embeddings, whose rows its EC
connector (engines/vllm_connector.py) copies from the encoders, or the rows themselves. With
`llm.local_encoder` it gets patches, which the connector's engine encodes (engines/vllm_local.py).
vLLM's processor never runs, and its vision tower only for items that this engine does not take.
Follows vLLM 0.32 and 0.33: vllm/v1/engine/async_llm.py and vllm/multimodal/inputs.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, NoReturn

import torch
from prometheus_client import REGISTRY, generate_latest

from actors.errors import ConfigError, EmbeddingLost, InvalidRequest, Overloaded, Unavailable
from actors.options import ModelOptions
from actors.store.writer import tensor
from actors.types import Media
from encoder_service.config import LlmOptions
from encoder_service.engines.vllm import CONNECTOR, REFERENCE, content_id
from encoder_service.engines.vllm_options import local_options
from encoder_service.engines.vllm_patches import KEYS
from encoder_service.engines.vllm_plugin import SWITCH_SECONDS
from encoder_service.llm.calls import (
    ChatCall,
    ChatEvent,
    Finish,
    Piece,
    Reason,
    SchemaFormat,
    TextFormat,
    VllmParams,
)
from encoder_service.llm.embedder import Input, Patches
from encoder_service.llm.places import PlaceServer
from encoder_service.llm.prompt import TEXT, Placed, Prompt
from encoder_service.llm.spec import LlmSpec
from encoder_service.llm.tool_calls import ToolCalls, ToolParsers
from encoder_service.wire.formats import Document

log = logging.getLogger("ray.serve")

REASONS: dict[str, Reason] = {"stop": "stop", "length": "length", "repetition": "stop"}
AT_ONCE = 2**31 - 1
"""`stream_interval`, in tokens, of a completion that is not streamed: it comes as one output."""
TOKEN = "ENCODER_SERVICE_TOKEN"
"""The environment variable from which the connector in vLLM's process reads its token."""
RENAMED = {"response_format", "top_logprobs"}
"""Fields of VllmParams that vLLM's SamplingParams does not have."""


def engine_args(
    options: LlmOptions, own: ModelOptions, spec: LlmSpec, places: str
) -> dict[str, Any]:
    """Arguments of AsyncEngineArgs. `places`: URL of the PlaceServer, if there is one. Raises
    ConfigError if llm.engine_args repeats one of these."""
    local = options.local_encoder
    decided: dict[str, Any] = {
        "model": own.id,
        "revision": own.revision,
        "tokenizer_revision": own.revision,
        "dtype": own.dtype,
        "load_format": own.load_format,
        "trust_remote_code": False,
        "max_model_len": spec.max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enable_mm_embeds": True,
        # Without its tower, vLLM (0.32, 0.33) ignores deepstack features too.
        "limit_mm_per_prompt": {} if spec.deepstack or local else {"image": 0, "video": 0},
        "skip_mm_profiling": not local,  # without it, the tower never runs
        "mm_processor_cache_gb": 0,  # the processor never runs
    }
    extra: dict[str, Any] = {"url": places} if places else {}
    if local:
        extra = {"place": "local"} | local.model_dump(mode="json", exclude_unset=True)
    if extra:
        decided["ec_transfer_config"] = CONNECTOR | {"ec_connector_extra_config": extra}
    if twice := sorted(options.engine_args.keys() & decided.keys()):
        raise ConfigError(f"llm.engine_args.{twice[0]}: follows from other options; leave it out")
    return decided | options.engine_args


def sampling_params(
    sampling: VllmParams, max_tokens: int, stream: bool, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams, and in `structured_outputs` of StructuredOutputsParams.

    defaults: those of the checkpoint's generation_config.json.
    """
    given = {name: getattr(sampling, name) for name in VllmParams.model_fields.keys() - RENAMED}
    made = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    made |= {"max_tokens": max_tokens, "stop": list(sampling.stop)}
    made["logprobs"] = sampling.top_logprobs if sampling.logprobs else None
    if not stream:
        made["stream_interval"] = AT_ONCE
    wanted = sampling.response_format
    if wanted and not isinstance(wanted, TextFormat):
        schema = wanted.json_schema.schema_ if isinstance(wanted, SchemaFormat) else None
        made["structured_outputs"] = {"json": schema} if schema else {"json_object": True}
    return made


@dataclass(frozen=True, slots=True)
class Feature:
    """An image or a video as a span of the prompt."""

    placed: Placed
    offset: int
    rows: list[bool]
    """For each token from `offset` on, whether it is a row; text between rows is not."""


def features(made: Prompt, spec: LlmSpec) -> Iterator[Feature]:
    places = (place for place, kind in enumerate(made.kinds) if kind != TEXT)
    for one in made.placed:
        own = list(islice(places, one.tokens))
        # vLLM looks for the start token before each group of frames, so the span begins with it.
        marked = one.kind == "video" and spec.video_style.before != ""
        offset = own[0] - marked
        yield Feature(one, offset, [kind != TEXT for kind in made.kinds[offset : own[-1] + 1]])


def identity(media: Media, one: Placed, *, by_id: bool) -> str:
    """A hash that is equal for equal rows. vLLM's caches identify images by it.

    Rows by id and other items have different hashes, because the connector would otherwise take an
    item that came by value for its own.
    """
    return hashlib.sha256(repr((media.identity, one.grid_thw, by_id)).encode()).hexdigest()


def likelihoods(tokens: Sequence[int], logprobs: Any, most: int) -> tuple[Document, ...]:
    """Log probabilities in OpenAI's form. logprobs: per token, a mapping of ids to vLLM's
    Logprob."""

    def shown(one: Any) -> Document:
        text = one.decoded_token or ""
        # vLLM gives -inf for tokens that may not be chosen; JSON has no such number.
        return {
            "token": text,
            "logprob": max(one.logprob, -9999.0),
            "bytes": list(text.encode("utf-8", "replace")),
        }

    found = []
    for token, choices in zip(tokens, logprobs, strict=True):
        best = sorted(choices.values(), key=lambda one: one.rank)[:most]
        found.append(shown(choices[token]) | {"top_logprobs": [shown(one) for one in best]})
    return tuple(found)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Processes that are started meanwhile have this variable."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def check_local(config: Any) -> None:
    """Checks here what vLLM's engine would not start with, because it would not say why, and that
    its tower takes bytes. `config`: vLLM's VllmConfig. Raises ConfigError."""
    try:
        local_options(config)
    except (ConfigError, ValueError) as error:
        told = str(error).replace("ec_connector_extra_config: ", "")
        raise ConfigError(f"llm.local_encoder: {told}") from None
    if not config.model_config.multimodal_config.mm_device_do_normalize:
        raise ConfigError(
            "llm.local_encoder: vLLM's own tower, which encodes what our engine does not take, has "
            "to normalise pixels: leave mm_device_do_normalize out of llm.engine_args, and "
            "VLLM_USE_RUST_FRONTEND out of the environment"
        )


class VllmEngine:
    """A chat.ChatEngine whose scheduler and workers are vLLM's own processes."""

    def __init__(
        self,
        options: LlmOptions,
        own: ModelOptions,
        spec: LlmSpec,
        tokenizer: Any,
        places: PlaceServer | None,
    ) -> None:
        """`places`: where encoders serve the rows of ids. None: rows come by value. Raises
        ConfigError, ValueError."""
        from vllm import AsyncEngineArgs
        from vllm.config import ECTransferConfig
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        self.by_id = places is not None
        self.places = places
        args = engine_args(options, own, spec, places.url if places else "")
        if unknown := sorted(args.keys() - {field.name for field in fields(AsyncEngineArgs)}):
            raise ConfigError(
                f"llm.engine_args.{unknown[0]}: no such field in vLLM's AsyncEngineArgs"
            )
        if transfer := args.get("ec_transfer_config"):
            args["ec_transfer_config"] = ECTransferConfig(**transfer)
        self.spec = spec
        self.tools = ToolParsers(options.tool_parser, tokenizer) if options.tool_parser else None
        given = AsyncEngineArgs(**args)
        config = given.create_engine_config(UsageContext.ENGINE_CONTEXT)
        if options.local_encoder:
            check_local(config)
            sys.setswitchinterval(SWITCH_SECONDS)  # as in vLLM's own API process
        with environment(TOKEN, places.token) if places else nullcontext():
            self.engine = AsyncLLM.from_vllm_config(
                config,
                enable_log_requests=given.enable_log_requests,
                disable_log_stats=given.disable_log_stats,
            )
        self.defaults = self.engine.model_config.get_diff_sampling_param()

    async def generate(
        self, call: ChatCall, made: Prompt, inputs: Sequence[Input]
    ) -> AsyncGenerator[ChatEvent]:
        from vllm import exceptions
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        assert isinstance(call.sampling, VllmParams)
        reasons: dict[int, Reason] = {}
        completion_tokens = 0
        try:
            tools = None
            if call.tool_use and self.tools:
                tools = self.tools.begin(call.tool_use, made.ids, stream=call.stream)
            params = self._params(call.sampling, made.max_tokens, call.stream, tools)
            found = self._prompt(call, made, inputs)
            outputs = self.engine.generate(found, params, uuid.uuid4().hex)
            async with aclosing(outputs):
                async for output in outputs:
                    for one in output.outputs:
                        if one.finish_reason == "error" and any(e.reference for e in inputs):
                            raise EmbeddingLost(
                                "vLLM ended the completion (error), perhaps because it could not "
                                "read the rows of an image: send the request again"
                            )
                        completion_tokens += len(one.token_ids)
                        tokens: tuple[Document, ...] = ()
                        if one.logprobs:
                            most = call.sampling.top_logprobs
                            tokens = likelihoods(one.token_ids, one.logprobs, most)
                        text, calls = one.text, tuple[Document, ...]()
                        if tools:
                            finished = one.finish_reason is not None
                            text, calls = tools.read(
                                one.index, text, one.token_ids, finished=finished
                            )
                        if text or calls or tokens or (call.counted and one.token_ids):
                            used = (len(made.ids), completion_tokens) if call.counted else None
                            yield Piece(text, one.index, tokens, used, calls)
                        if (reason := one.finish_reason) in REASONS:
                            reasons[one.index] = REASONS[reason]
                            if tools:
                                reasons[one.index] = tools.reason(one.index, REASONS[reason])
                        elif reason:
                            raise Unavailable(
                                f"vLLM ended the completion ({reason}): send the request again"
                            )
        except exceptions.VLLMClientError as error:
            raise InvalidRequest(str(error)) from None
        except getattr(exceptions, "GracefulHTTPError", ()) as error:  # max_num_queued_reqs, ...
            raise Overloaded(str(error)) from None
        except EngineGenerateError as error:
            if isinstance(error.__cause__, ValueError):  # from checks of parameters
                raise InvalidRequest(str(error.__cause__)) from None
            raise
        except EngineDeadError:
            self._exit()
        yield Finish(
            tuple(reasons[index] for index in sorted(reasons)), len(made.ids), completion_tokens
        )

    def _params(
        self, sampling: VllmParams, max_tokens: int, stream: bool, tools: ToolCalls | None
    ) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

        given = sampling_params(sampling, max_tokens, stream, self.defaults)
        if outputs := given.get("structured_outputs"):
            given["structured_outputs"] = StructuredOutputsParams(**outputs)
        if tools:
            given |= tools.constrained(given.get("structured_outputs"))
        return SamplingParams(output_kind=RequestOutputKind.DELTA, **given)

    def _prompt(self, call: ChatCall, made: Prompt, inputs: Sequence[Input]) -> Any:
        """Builds vLLM's EngineInput as its own processor would."""
        from vllm.inputs import mm_input, tokens_input
        from vllm.multimodal.inputs import (
            MultiModalFieldConfig,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        if not made.placed:
            return tokens_input(made.ids)
        items: dict[str, list[Any]] = {}
        hashes: dict[str, list[str]] = {}
        ranges: dict[str, list[Any]] = {}
        for media, given, one in zip(call.media, inputs, features(made, self.spec), strict=True):
            kind, placed = one.placed.kind, one.placed
            per_item = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
            values = {f"{kind}_grid_thw": torch.tensor([placed.grid_thw])}
            config = dict.fromkeys(values, per_item)
            by_id = given.reference != ""
            if by_id:
                name = content_id(given.reference).encode()
                values[REFERENCE] = torch.tensor([list(name)], dtype=torch.uint8)
                config[REFERENCE] = per_item
            else:
                if isinstance(given, Patches):
                    key, data = KEYS[kind][0], given.data
                else:
                    key, data = f"{kind}_embeds", tensor(given)
                values[key] = data
                sizes = torch.tensor([len(data)])
                config[key] = MultiModalFieldConfig.flat_from_sizes(kind, sizes)
            if kind == "video" and self.spec.video_style.timed:
                values["second_per_grid_ts"] = torch.tensor([placed.seconds_per_group])
                config["second_per_grid_ts"] = per_item
            items.setdefault(kind, []).extend(
                MultiModalKwargsItems.from_hf_inputs(values, config)[kind]
            )
            hashes.setdefault(kind, []).append(identity(media, placed, by_id=by_id))
            mask = None if all(one.rows) else torch.tensor(one.rows)
            ranges.setdefault(kind, []).append(PlaceholderRange(one.offset, len(one.rows), mask))
        return mm_input(made.ids, MultiModalKwargsItems(items), hashes, ranges)

    def metrics(self) -> str:
        lines = generate_latest(REGISTRY).decode().splitlines(keepends=True)
        return "".join(line for line in lines if "vllm:" in line[:14])

    async def check_health(self) -> None:
        if self.places:
            self.places.check()
        if self.engine.errored:
            self._exit()

    def _exit(self) -> NoReturn:
        """Exits the replica, so that requests are retried elsewhere and Serve starts another."""
        log.critical("vLLM's engine has died: the replica exits")
        os._exit(1)

    def close(self) -> None:
        self.engine.shutdown()
