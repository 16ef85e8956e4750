"""`llm.engine: transformers`: a transformers model whose vision tower is never allocated.

It generates one completion at a time.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    GenerationConfig,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures
from transformers.utils import logging

from actors.errors import CheckpointError, StartError, TooLarge, Unavailable
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset, find
from actors.store.writer import tensor
from actors.types import Embedding
from encoder_service.config import LlmOptions
from encoder_service.llm.calls import ChatCall, ChatEvent, Finish, Piece, SamplingParams
from encoder_service.llm.embedder import Input
from encoder_service.llm.prompt import TEXT, Placed, Prompt, prompt
from encoder_service.llm.spec import LlmSpec

GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0, as in vLLM. Divided by 1e-38, logits overflow, and sampling
fails."""

Emit = Callable[[str], None]
"""Called in the generating thread with each piece of the text."""


def load(options: ModelOptions, device: str) -> Any:
    """Loads transformers' ...ForConditionalGeneration without its `visual`. Raises StartError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise StartError(
            "llm.device is cuda, but torch sees no CUDA device in this replica: check the driver "
            "and llm.num_gpus, or set llm.device to cpu and llm.num_gpus to 0"
        )
    logging.disable_progress_bar()
    config = read_config(options)
    kind = without_tower(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)])
    dtype = getattr(torch, options.dtype)
    if options.load_format == "dummy":
        return dummy(kind, config, dtype).to(device).eval()
    try:
        model, found = kind.from_pretrained(
            options.id,
            revision=options.revision,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{options.id!r} cannot be read: {error}") from error
    if wrong := sorted(found["missing_keys"] | found["unexpected_keys"]):
        raise CheckpointError(
            f"the checkpoint {options.id!r} does not fit its config.json: {len(wrong)} tensors of "
            f"the language model are missing or left over, such as {wrong[0]}"
        )
    return model.to(device).eval()


def read_config(options: ModelOptions) -> Any:
    files = find(options)
    if isinstance(files, Preset):
        config = dict(files.read_json("config.json") or {})
        return AutoConfig.for_model(**config)
    try:
        return AutoConfig.from_pretrained(
            options.id, revision=options.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json of {options.id!r}: {error}") from error


def without_tower(kind: type) -> Any:
    """Returns a subclass that drops its tower while that is on the meta device, without memory."""

    def __init__(self: Any, config: Any) -> None:
        kind.__init__(self, config)  # type: ignore[misc]
        self.model.visual = None

    names = {
        "__init__": __init__,
        "_keys_to_ignore_on_load_unexpected": [r"(^|\.)visual\."],
        # transformers renames a checkpoint's tensors only for its own classes.
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), names)


def dummy(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """A model with random weights, initialised by transformers, the same in every process."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # otherwise it lists every tensor as missing
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)  # fixed, so that every replica generates the same text
            return kind.from_pretrained(None, config=config, state_dict={}, dtype=dtype)
    finally:
        logging.set_verbosity(level)


def inputs(prompt: Prompt, rows: Sequence[Tensor], spec: LlmSpec) -> dict[str, Any]:
    """The arguments of `forward` and `generate` for one prompt.

    rows: [tokens, hidden x (1 + deepstack)] of each image and video of the prompt, in order, on the
    model's device. transformers computes the positions (M-RoPE) from their grids, and for videos
    of Qwen2.5-VL from their times.
    """
    device = rows[0].device if rows else None
    input_ids = torch.tensor([prompt.ids], device=device)
    made: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": torch.tensor([prompt.kinds], dtype=torch.int, device=device),
    }
    for kind in ("image", "video"):
        if ones := [one for one in prompt.placed if one.kind == kind]:
            grids = [list(one.grid_thw) for one in ones]
            made[f"{kind}_grid_thw"] = torch.tensor(grids, device=device)
            if kind == "video" and spec.video_style.timed:
                seconds = [one.seconds_per_group for one in ones]
                made["second_per_grid_ts"] = torch.tensor(seconds, device=device)
    outputs: dict[str, list[Tensor]] = {}
    for one, each in zip(prompt.placed, rows, strict=True):
        # Some families use the same token for both: only the order tells their rows apart.
        kind = "image" if spec.video_style.as_images else one.kind
        outputs.setdefault(kind, []).append(each)
    if outputs:
        made["mm_encoder_outputs"] = {
            kind: encoded(ones, spec.deepstack) for kind, ones in outputs.items()
        }
    return made


def pruned(
    model: Any, made: Mapping[str, Any], placed: Sequence[Placed], kept: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Returns the inputs without the tokens of rows that Efficient Video Sampling has dropped.

    kept: for each item, the indices of the rows that are left; empty means all. The remaining
    tokens keep their positions in the whole prompt, as in vLLM.
    """
    asked = {name: value for name, value in made.items() if name != "mm_encoder_outputs"}
    positions, _ = model.model.get_rope_index(**asked)
    kinds = made["mm_token_type_ids"][0]
    left = []
    for one, rows in zip(placed, kept, strict=True):
        mask = torch.full((one.tokens,), not rows)
        mask[list(rows)] = True
        left.append(mask)
    stays = kinds == TEXT
    stays[~stays] = torch.cat(left).to(stays.device)
    tokens = {
        name: made[name][:, stays] for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    order = torch.arange(int(stays.sum()), device=stays.device).view(1, 1, -1)
    return {**made, **tokens, "position_ids": torch.cat([order, positions[:, :, stays]])}


def encoded(rows: Sequence[Tensor], deepstack: int) -> BaseModelOutputWithPooling:
    """Wraps embeddings as the output of a transformers tower: main and deepstack features."""
    features = [one.chunk(1 + deepstack, dim=1) for one in rows]
    main = [one[0] for one in features]
    if not deepstack:
        return BaseModelOutputWithPooling(pooler_output=main)
    deeper = [[one[level] for one in features] for level in range(1, 1 + deepstack)]
    return BaseModelOutputWithDeepstackFeatures(pooler_output=main, deepstack_features=deeper)


class Cancelled(Exception):
    """The client has disconnected."""


class TransformersEngine:
    """A chat.ChatEngine with a single thread, which owns the device."""

    by_id = False

    def __init__(
        self, options: LlmOptions, own: ModelOptions, spec: LlmSpec, tokenizer: Any
    ) -> None:
        self.spec = spec
        self.generator = Generator(load(own, options.device), tokenizer)
        self.thread = ThreadPoolExecutor(1, "generate")
        self.broken = ""
        # Generates a short text, so that lazy initialisation is over before the replica is ready.
        made = prompt([{"role": "user", "content": "a"}], [], 2, spec, tokenizer)
        self._generate(made, [], SamplingParams(temperature=0), lambda text: None, Event())

    async def generate(
        self, call: ChatCall, made: Prompt, inputs: Sequence[Input]
    ) -> AsyncGenerator[ChatEvent]:
        embeddings = [one for one in inputs if isinstance(one, Embedding)]  # all of them
        loop, cancelled = asyncio.get_running_loop(), Event()
        texts: asyncio.Queue[str | None] = asyncio.Queue()

        def emit(text: str | None) -> None:
            loop.call_soon_threadsafe(texts.put_nowait, text)

        work = loop.run_in_executor(
            self.thread, self._generate, made, embeddings, call.sampling, emit, cancelled
        )
        work.add_done_callback(lambda _: texts.put_nowait(None))
        try:
            waiting: list[str | None] = []
            while None not in waiting:
                waiting = [await texts.get()]
                # Sends queued text as one event, because an event per token costs more.
                while not texts.empty():
                    waiting.append(texts.get_nowait())
                if text := "".join(one for one in waiting if one):
                    yield Piece(text)
            yield await work
        finally:
            cancelled.set()
            work.cancel()

    def _generate(
        self,
        made: Prompt,
        embeddings: Sequence[Embedding],
        sampling: SamplingParams,
        emit: Emit,
        cancelled: Event,
    ) -> Finish:
        """Runs in the thread that owns the device."""
        model = self.generator.model
        try:
            rows = [tensor(one).to(model.device) for one in embeddings]
            given = inputs(made, rows, self.spec)
            if any(one.kept_rows for one in embeddings):
                kept = [one.kept_rows for one in embeddings]
                given = pruned(model, given, made.placed, kept)
            return self.generator.generate(given, sampling, made.max_tokens, emit, cancelled)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            raise TooLarge(
                f"the device's memory does not hold {len(made.ids)} tokens and their answer: "
                "send less, or lower llm.max_model_len"
            ) from None
        except torch.AcceleratorError as error:
            self.broken = str(error)
            raise

    def metrics(self) -> str:
        return ""

    async def check_health(self) -> None:
        """Raises Unavailable after a device error. CUDA does not recover from most errors."""
        if self.broken:
            raise Unavailable(f"the device failed: {self.broken}")

    def close(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)


class Generator:
    """A loaded model with its tokenizer. Not thread-safe."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def generate(
        self,
        inputs: Mapping[str, Any],
        sampling: SamplingParams,
        max_tokens: int,
        emit: Emit,
        cancelled: Event,
    ) -> Finish:
        """Emits the text as it is generated. `inputs`: from inputs(). Raises Cancelled."""
        if cancelled.is_set():
            raise Cancelled
        config = self._config(sampling, max_tokens)
        stream = TextStream(self.tokenizer, sampling.stop, emit)

        def ended(input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            stop = cancelled.is_set() or stream.filter.stopped
            return torch.full((len(input_ids),), stop, device=input_ids.device)

        # Seeding the global random state is safe, because the process generates nothing else.
        torch.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed)
        with torch.inference_mode():
            self.model.generate(
                **{
                    name: value.to(self.model.device) if isinstance(value, Tensor) else value
                    for name, value in inputs.items()
                },
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([ended]),
                streamer=stream,
            )
        if cancelled.is_set():
            raise Cancelled
        stopped = stream.filter.stopped or stream.ids[-1] in self._ends(config)
        prompt_tokens = inputs["input_ids"].shape[1]
        return Finish(("stop" if stopped else "length",), prompt_tokens, len(stream.ids))

    def _config(self, sampling: SamplingParams, max_tokens: int) -> GenerationConfig:
        config = copy.deepcopy(self.model.generation_config)
        config.max_new_tokens, config.max_length, config.num_return_sequences = max_tokens, None, 1
        if sampling.temperature is not None:
            config.do_sample = sampling.temperature >= GREEDY_BELOW
            config.temperature = sampling.temperature
        if not config.do_sample:
            config.temperature = config.top_p = config.top_k = None
        elif sampling.top_p is not None:
            config.top_p = sampling.top_p
        if config.pad_token_id is None:
            config.pad_token_id = next(iter(self._ends(config)), 0)
        return config

    def _ends(self, config: GenerationConfig) -> tuple[int, ...]:
        ends = config.eos_token_id
        return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


class TextStream(BaseStreamer):  # type: ignore[misc]
    """Emits text as soon as tokens form whole characters, up to a stop text."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], emit: Emit) -> None:
        self.tokenizer = tokenizer
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.filter = StopFilter(stops)
        self.emit = emit
        self.ids: list[int] = []
        self.decoded = ""
        self.in_prompt = True

    def put(self, value: Tensor) -> None:
        """Called by `generate` with the prompt first, then with each token."""
        if self.in_prompt:
            self.in_prompt = False
            return
        for token in value.flatten().tolist():
            self.ids.append(token)
            self._show(self.decoder.step(self.tokenizer.backend_tokenizer, token) or "")

    def end(self) -> None:
        """Emits what was held back: part of a stop text, or an incomplete character."""
        whole = self.tokenizer.decode(
            self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if whole.startswith(self.decoded):
            self._show(whole[len(self.decoded) :])
        if rest := self.filter.rest():
            self.emit(rest)

    def _show(self, text: str) -> None:
        self.decoded += text
        if shown := self.filter.feed(text):
            self.emit(shown)


class StopFilter:
    """Passes text up to the first stop text, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that may be shown now; nothing after a stop text."""
        if self.stopped:
            return ""
        self.held += text
        found = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if found:
            self.stopped = True
            _, start = min(found)  # the stop text that is complete first, however the text is split
            return self._let(start)
        return self._let(len(self.held) - self._beginning())

    def rest(self) -> str:
        return "" if self.stopped else self._let(len(self.held))

    def _let(self, characters: int) -> str:
        shown, self.held = self.held[:characters], self.held[characters:]
        return shown

    def _beginning(self) -> int:
        """The length of the longest suffix that may be the start of a stop text."""
        lengths = (
            length
            for stop in self.stops
            for length in range(1, min(len(stop), len(self.held) + 1))
            if self.held.endswith(stop[:length])
        )
        return max(lengths, default=0)
