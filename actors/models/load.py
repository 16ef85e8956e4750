"""From `model:` in the configuration to a tower on a device. The one list of families is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors import attention, checkpoint, spec, weights
from actors.attention import Attention
from actors.models import (
    deepseek_ocr,
    deepseek_ocr_config,
    glm4v,
    internvl,
    internvl_config,
    kimivl,
    llama4,
    llama4_config,
    perception,
    qwen2vl,
    qwen3vl,
    qwen3vl_config,
    qwen25vl,
    step3,
    step_config,
)
from actors.models.block import Blocks, BlocksForm, BlockWeights, ReferenceBlocks, Style
from actors.models.tower import Tower
from actors.options import ModelOptions
from actors.spec import ModelSpec

DUMMY_SEED = 0
"""Fixed: every replica of a service must give the same embeddings."""


@dataclass(frozen=True, slots=True)
class Family:
    """What it takes to build a tower of one family."""

    prefixes: tuple[str, ...]
    expected: Callable[[ModelSpec], dict[str, tuple[int, ...]]]
    build: Callable[[ModelSpec, Mapping[str, Tensor], Attention, torch.device, BlocksForm], Tower]
    head_size: Callable[[ModelSpec], int]
    """Of the attention, which is chosen by it."""
    unused: frozenset[str] = frozenset()
    """Tensors that a checkpoint may have and no tower reads."""


QWEN3VL = Family(
    qwen3vl_config.PREFIXES, qwen3vl_config.expected, qwen3vl.build, qwen3vl_config.head_size
)


def internvl_family(names: internvl_config.Names) -> Family:
    """InternVL under one of its schemes of names."""
    return Family(
        names.prefixes, internvl_config.expected, internvl.build, internvl_config.head_size
    )


FAMILIES: Mapping[str, Family] = {
    "qwen3_vl": QWEN3VL,
    "qwen3_5": QWEN3VL,
    "qwen2_vl": Family(qwen2vl.PREFIXES, qwen2vl.expected, qwen2vl.build, qwen2vl.head_size),
    "qwen2_5_vl": Family(qwen2vl.PREFIXES, qwen25vl.expected, qwen25vl.build, qwen25vl.head_size),
    "glm4v": Family(glm4v.PREFIXES, glm4v.expected, glm4v.build, glm4v.head_size),
    "kimi_vl": Family(kimivl.PREFIXES, kimivl.expected, kimivl.build, kimivl.head_size),
    "internvl": internvl_family(internvl_config.NATIVE),
    "internvl_chat": internvl_family(internvl_config.CHAT),
    "llama4": Family(
        llama4_config.PREFIXES, llama4_config.expected, llama4.build, llama4_config.head_size
    ),
    "deepseek_ocr": Family(
        deepseek_ocr_config.PREFIXES,
        deepseek_ocr_config.expected,
        deepseek_ocr.build,
        deepseek_ocr_config.head_size,
        deepseek_ocr_config.UNUSED,
    ),
    "step3p7": Family(
        step_config.PREFIXES,
        step_config.perception_expected,
        perception.build,
        step_config.head_size,
    ),
    "step3_vl": Family(
        step_config.PREFIXES, step_config.step3_expected, step3.build, step_config.head_size
    ),
}


def load(options: ModelOptions, device: torch.device) -> Tower:
    """Reads the tower's weights, and only those. Raises CheckpointError."""
    model = spec.read(options)
    return build(model, tensors(options, model), device)


def tensors(options: ModelOptions, model: ModelSpec) -> dict[str, Tensor]:
    """The tower's weights on the CPU, under the checkpoint's names without their prefix."""
    family = FAMILIES[model.family]
    expected = family.expected(model)
    if model.dummy:
        return weights.dummy(expected, DUMMY_SEED)
    return weights.load(checkpoint.find(options), family.prefixes, expected, family.unused)


def build(model: ModelSpec, tensors: Mapping[str, Tensor], device: torch.device) -> Tower:
    """The tower on its device, with the fastest attention and blocks that it has there."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    family = FAMILIES[model.family]
    kernel = attention.choose(device, dtype, family.head_size(model))
    return family.build(model, tensors, kernel, device, choose_blocks(device, dtype))


def choose_blocks(device: torch.device, dtype: torch.dtype) -> BlocksForm:
    """The fastest form of the blocks that this device and dtype have, for each style."""
    if device.type == "cuda" and dtype != torch.float32:
        return fastest
    return ReferenceBlocks


def fastest(
    weights: Sequence[BlockWeights], style: Style, attention: Attention, taps: Sequence[int]
) -> Blocks:
    """On CUDA in 16 bits; styles that the fast form does not have run in the reference form."""
    from actors.models.fast import FastBlocks  # Triton is not there without CUDA

    plain = style.norm == "layer" and not style.post_norm and not style.windowed
    if plain and style.activation != "swiglu":
        return FastBlocks(weights, style, attention, taps)
    return ReferenceBlocks(weights, style, attention, taps)
