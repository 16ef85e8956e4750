"""From `model:` in the configuration to a tower on a device. The one list of families is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from actors.kernels import attention
from actors.kernels.attention import Attention
from actors.models import (
    clip,
    deepseek_ocr,
    deepseek_ocr_config,
    gemma3,
    glm4v,
    internvl,
    internvl_config,
    kimik25,
    kimivl,
    llama4,
    llama4_config,
    llava_onevision,
    paddleocr,
    pixtral,
    qwen2vl,
    qwen3vl,
    qwen3vl_config,
    qwen25vl,
    step3,
    step_config,
    weights,
)
from actors.models import step3_vl as perception
from actors.models.layers.block import BlocksForm
from actors.models.layers.forms import blocks_of
from actors.models.packed_tower import PackedTower
from actors.models.packed_weights import Expected, Weights
from actors.models.step_tower import StepTower
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Tower
from actors.options import BlockChoice, ModelOptions, block_form
from actors.spec import checkpoint
from actors.spec import model_spec as spec
from actors.spec.model_spec import ModelSpec

DUMMY_SEED = 0
"""Fixed: every replica of a service must give the same embeddings."""


Parts = TypeVar("Parts")


class Heads(Protocol):
    """The sizes of a tower, of which only one is asked for here."""

    @property
    def head_size(self) -> int:
        """Values of a head: the attention is chosen by it."""


@dataclass(frozen=True, slots=True)
class Family(Generic[Parts]):
    """What it takes to build a tower of one family."""

    prefixes: tuple[str, ...]
    expected: Callable[[ModelSpec], Expected]
    sizes: Callable[[ModelSpec], Heads]
    parts: Callable[[ModelSpec, Weights], Parts]
    tower: Callable[[ModelSpec, Parts, Attention, BlocksForm], Tower]
    unused: Callable[[ModelSpec], frozenset[str]] = lambda spec: frozenset()
    """Tensors that a checkpoint may have and no tower reads."""
    last_norms: tuple[str, ...] = ()
    """Norms with which a branch ends, by a part of their names: if random, a tenth of the others.
    Else what attention compares would grow from layer to layer, and a difference double in three of
    them: of 63 layers float32 was 6e-2 from float64 (256 wide; at a tenth 1e-6)."""


QWEN3VL = Family(
    qwen3vl_config.PREFIXES,
    qwen3vl_config.expected,
    qwen3vl_config.Architecture.of,
    qwen3vl.parts,
    PackedTower,
)


PIXTRAL = Family(
    pixtral.PREFIXES, pixtral.expected, pixtral.dimensions, pixtral.parts, pixtral.PixtralTower
)


def clip_family(prefixes: tuple[str, ...]) -> Family[TileParts]:
    """CLIP's or SigLIP's tower, by itself or in LLaVA."""
    return Family(prefixes, clip.expected, clip.dimensions, clip.parts, TileTower, clip.unused)


def onevision_family(prefixes: tuple[str, ...]) -> Family[llava_onevision.OnevisionParts]:
    """LLaVA-OneVision under one of its schemes of names."""
    expected, parts = llava_onevision.expected, llava_onevision.parts
    tower = llava_onevision.OnevisionTower
    return Family(prefixes, expected, clip.dimensions, parts, tower, clip.unused)


def internvl_family(names: internvl_config.Names) -> Family[TileParts]:
    """InternVL under one of its schemes of names."""
    sizes = internvl_config.Architecture.of
    return Family(names.prefixes, internvl_config.expected, sizes, internvl.parts, TileTower)


FAMILIES: Mapping[str, Family[Any]] = {
    "qwen3_vl": QWEN3VL,
    "qwen3_5": QWEN3VL,
    "qwen2_vl": Family(
        qwen2vl.PREFIXES, qwen2vl.expected, qwen2vl.dimensions, qwen2vl.parts, PackedTower
    ),
    "qwen2_5_vl": Family(
        qwen2vl.PREFIXES,
        qwen25vl.expected,
        qwen25vl.dimensions,
        qwen25vl.parts,
        qwen25vl.WindowedTower,
    ),
    "glm4v": Family(glm4v.PREFIXES, glm4v.expected, glm4v.dimensions, glm4v.parts, PackedTower),
    "kimi_vl": Family(
        kimivl.PREFIXES, kimivl.expected, kimivl.dimensions, kimivl.parts, PackedTower
    ),
    "kimi_k25": Family(
        kimivl.PREFIXES,
        kimivl.expected,
        kimivl.dimensions,
        kimik25.parts,
        kimik25.KimiK25Tower,
    ),
    "pixtral": PIXTRAL,
    "mistral3": PIXTRAL,
    "paddleocr_vl": Family(
        paddleocr.PREFIXES,
        paddleocr.expected,
        paddleocr.dimensions,
        paddleocr.parts,
        PackedTower,
        lambda spec: paddleocr.UNUSED,
    ),
    "internvl": internvl_family(internvl_config.NATIVE),
    "internvl_chat": internvl_family(internvl_config.CHAT),
    "llama4": Family(
        llama4_config.PREFIXES,
        llama4_config.expected,
        llama4_config.Architecture.of,
        llama4.parts,
        TileTower,
    ),
    "gemma3": Family(gemma3.PREFIXES, gemma3.expected, gemma3.dimensions, gemma3.parts, TileTower),
    "siglip": clip_family(clip.PREFIXES),
    "clip": clip_family(clip.PREFIXES),
    "llava": clip_family(clip.LLAVA_PREFIXES),
    "llava_onevision": onevision_family(llava_onevision.PREFIXES),
    "llava_qwen": onevision_family(llava_onevision.QWEN_PREFIXES),
    "deepseek_ocr": Family(
        deepseek_ocr_config.PREFIXES,
        deepseek_ocr_config.expected,
        deepseek_ocr_config.Architecture.of,
        lambda spec, weights: weights,
        deepseek_ocr.DeepseekOcrTower,
        lambda spec: deepseek_ocr_config.UNUSED,
    ),
    "step3p7": Family(
        step_config.PREFIXES,
        step_config.perception_expected,
        step_config.Architecture.of,
        perception.parts,
        StepTower,
    ),
    "step3_vl": Family(
        step_config.PREFIXES,
        step_config.step3_expected,
        step_config.Architecture.of,
        step3.parts,
        StepTower,
        last_norms=(".layer_norm",),
    ),
}


def load(
    options: ModelOptions,
    device: torch.device,
    *,
    captured: bool = False,
    blocks: BlockChoice = "auto",
) -> Tower:
    """Reads the tower's weights, and only those. Raises CheckpointError.

    `captured`: for graphs. Raises StartError, before anything large is read, if it cannot be.
    `blocks`: the form of the blocks. Raises ConfigError if there is none for this model and device.
    """
    model = spec.read(options)
    kernel = choose_attention(model, device, captured=captured)
    form = form_of_blocks(model, device, blocks)
    tower = assemble(model, tensors(options, model, device), device, kernel, form)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what only building took is not the graphs' that follow
    return tower


def tensors(options: ModelOptions, model: ModelSpec, device: torch.device) -> Mapping[str, Tensor]:
    """The tower's weights, under the checkpoint's names without their prefix.

    A checkpoint's lie on the CPU; random ones are made on the tower's device.
    """
    family = FAMILIES[model.family]
    expected = family.expected(model)
    if model.dummy:
        return weights.Dummy(expected, DUMMY_SEED, device, family.last_norms)
    return weights.load(checkpoint.find(options), family.prefixes, expected, family.unused(model))


def build(
    model: ModelSpec,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    blocks: BlocksForm | None = None,
) -> Tower:
    """The tower on its device, with the fastest attention, and the fastest blocks unless given."""
    blocks = blocks or form_of_blocks(model, device)
    return assemble(model, tensors, device, choose_attention(model, device), blocks)


def choose_attention(
    model: ModelSpec, device: torch.device, *, captured: bool = False
) -> Attention:
    """See attention.choose."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    head_size = FAMILIES[model.family].sizes(model).head_size
    return attention.choose(device, dtype, head_size, captured=captured)


def assemble(
    model: ModelSpec,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    kernel: Attention,
    blocks: BlocksForm,
) -> Tower:
    """The tower on its device, with this attention and these blocks."""
    dtype: torch.dtype = getattr(torch, model.dtype)
    family = FAMILIES[model.family]
    parts = family.parts(model, Weights(tensors, device, dtype))
    return family.tower(model, parts, kernel, blocks)


def form_of_blocks(
    model: ModelSpec, device: torch.device, asked: BlockChoice = "auto"
) -> BlocksForm:
    """See options.block_form."""
    on_cuda = device.type == "cuda"
    return blocks_of(block_form(asked, on_cuda=on_cuda, dtype=model.dtype, fast=model.fast_blocks))
