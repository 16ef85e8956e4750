"""Reads what the service must know of a language model from its config.json, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from actors.engine.budgets import model_capacity
from actors.errors import CheckpointError, ConfigError, how_to_install
from actors.families.registry import model_type_of, video_styles
from actors.options import ModelOptions
from actors.spec.checkpoint import DAMAGED, Files, Preset, find
from actors.spec.model_spec import ModelSpec
from actors.spec.video import VideoSizing, VideoStyle
from actors.types import ModelDtype
from encoder_service.config import LlmOptions
from encoder_service.engines.vllm import GRIDS

COMMON_LENGTH = 32768
"""Context length in tokens if config.json does not say."""


@dataclass(frozen=True, slots=True)
class LlmSpec:
    id: str
    revision: str | None
    dtype: ModelDtype
    dummy: bool
    """Whether weights are random, so that generated text is meaningless."""
    deepstack: int
    """How many deepstack features follow the main ones in a row of an embedding."""
    image_token_id: int
    """Placeholder for one row of an image's embedding."""
    video_token_id: int
    """Placeholder for a video in the template's output and, for most families, for each row."""
    video: VideoSizing | None
    """How the encoders divide videos into groups of frames. None: they take no videos."""
    video_style: VideoStyle
    max_model_len: int
    """Maximum prompt plus completion length in tokens."""

    @property
    def weights(self) -> str:
        return "dummy" if self.dummy else "checkpoint"


def read(options: LlmOptions, model: ModelOptions, tower: ModelSpec) -> LlmSpec:
    """Reads the spec of `llm.model`, by default `model`. Raises CheckpointError, ConfigError."""
    own = options.model or model
    files = find(own)
    config = files.read_json("config.json") or {}
    kind = model_type_of(files, config)
    styles = video_styles()
    if kind not in styles or styles[kind].family != tower.family:
        families = sorted({style.family for style in styles.values()})
        raise ConfigError(
            f"llm: the language model architecture {kind!r} does not take embeddings of "
            f"{tower.family}; supported families are {', '.join(families)}"
        )
    if options.engine == "vllm":
        check_vllm(own, files, tower)
    if options.local_encoder:
        try:
            model_capacity(options.local_encoder.graphs, tower)
        except ConfigError as error:
            raise ConfigError(f"llm.local_encoder.{error}") from None
    text = config.get("text_config", config)  # Qwen2-VL's is flat
    try:
        hidden_size = int(text["hidden_size"])
        image_token_id, video_token_id = (
            int(config[f"{each}_token_id"]) for each in ("image", "video")
        )
        longest = int(text.get("max_position_embeddings", COMMON_LENGTH))
    except DAMAGED as error:
        raise CheckpointError(
            f"llm: {own.id!r} has no language model: its config.json lacks or misstates {error}"
        ) from None
    if hidden_size * (1 + tower.deepstack) != tower.width:
        raise ConfigError(
            f"llm.model {own.id!r} is {hidden_size} wide and takes {tower.deepstack} deepstack "
            f"features, but the encoders give rows of {tower.width} values: take one checkpoint"
        )
    if options.max_model_len and options.max_model_len > longest:
        raise ConfigError(
            f"llm.max_model_len is {options.max_model_len}, but {own.id!r} was made for "
            f"{longest}: lower it"
        )
    return LlmSpec(
        id=own.id,
        revision=own.revision,
        dtype=own.dtype,
        dummy=own.load_format == "dummy",
        deepstack=tower.deepstack,
        image_token_id=image_token_id,
        video_token_id=video_token_id,
        video=tower.video,
        video_style=styles[kind],
        max_model_len=options.max_model_len or longest,
    )


def check_vllm(own: ModelOptions, files: Files, tower: ModelSpec) -> None:
    """Raises ConfigError if vLLM is not installed, or does not support this model."""
    if find_spec("vllm") is None:
        raise ConfigError(
            "llm.engine is vllm, but the package vllm is not installed here: "
            f"{how_to_install('vllm')} on every node, or set it to transformers"
        )
    if isinstance(files, Preset):
        raise ConfigError(
            f"llm.engine is vllm, which needs a checkpoint's files, but {own.id!r} is a preset: "
            "give a folder or a repository, or set llm.engine to transformers"
        )
    if tower.family not in GRIDS:
        raise ConfigError(
            f"llm.engine is vllm, which is not supported for {tower.family}, only for "
            f"{', '.join(GRIDS)}: set it to transformers"
        )
