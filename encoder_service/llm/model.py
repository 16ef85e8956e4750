"""A vision-language model of transformers without its vision tower, which is never allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures
from transformers.utils import logging

from actors.errors import CheckpointError, StartError
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset, find
from encoder_service.llm.prompt import Prompt
from encoder_service.llm.spec import LlmSpec

DUMMY_SEED = 0
"""Fixed: every replica writes the same."""


def load(options: ModelOptions, device: str) -> Any:
    """transformers' ...ForConditionalGeneration, `model.visual` None. Raises StartError."""
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
    """transformers' own configuration."""
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
    """The class, whose models forget their tower while it has shapes only and no memory."""

    def __init__(self: Any, config: Any) -> None:
        kind.__init__(self, config)  # type: ignore[misc]
        self.model.visual = None

    names = {
        "__init__": __init__,
        "_keys_to_ignore_on_load_unexpected": [r"(^|\.)visual\."],
        # transformers renames a checkpoint's tensors for its own classes alone.
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), names)


def dummy(kind: Any, config: Any, dtype: torch.dtype) -> Any:
    """As transformers initialises what a checkpoint lacks, the same in every process."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every tensor as missing
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(DUMMY_SEED)
            return kind.from_pretrained(None, config=config, state_dict={}, dtype=dtype)
    finally:
        logging.set_verbosity(level)


def inputs(prompt: Prompt, rows: Sequence[Tensor], spec: LlmSpec) -> dict[str, Any]:
    """What `forward` and `generate` take of one prompt.

    rows: [tokens, hidden x (1 + deepstack)] of each image and video of the prompt, in order, on the
    model's device. transformers computes the positions (M-RoPE) from their grids, and those of
    Qwen2.5-VL's videos from their times.
    """
    device = rows[0].device if rows else None
    input_ids = torch.tensor([prompt.ids], device=device)
    made: dict[str, Any] = {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": torch.tensor([prompt.kinds], dtype=torch.int, device=device),
    }
    outputs: dict[str, list[Tensor]] = {}
    for kind in ("image", "video"):
        ones = [one for one in prompt.placed if one.kind == kind]
        if ones:
            grids = [list(one.grid_thw) for one in ones]
            made[f"{kind}_grid_thw"] = torch.tensor(grids, device=device)
        if ones and kind == "video" and spec.video_style.timed:
            seconds = [one.seconds_per_group for one in ones]
            made["second_per_grid_ts"] = torch.tensor(seconds, device=device)
    for one, each in zip(prompt.placed, rows, strict=True):
        # One token for both: then the rows are told apart by nothing but their order.
        kind = "image" if spec.video_style.as_images else one.kind
        outputs.setdefault(kind, []).append(each)
    if outputs:
        made["mm_encoder_outputs"] = {
            kind: encoded(ones, spec.deepstack) for kind, ones in outputs.items()
        }
    return made


def encoded(rows: Sequence[Tensor], deepstack: int) -> BaseModelOutputWithPooling:
    """Embeddings as a tower of transformers would give them: main features, deepstack features."""
    features = [one.chunk(1 + deepstack, dim=1) for one in rows]
    main = [one[0] for one in features]
    if not deepstack:
        return BaseModelOutputWithPooling(pooler_output=main)
    deeper = [[one[level] for one in features] for level in range(1, 1 + deepstack)]
    return BaseModelOutputWithDeepstackFeatures(pooler_output=main, deepstack_features=deeper)
