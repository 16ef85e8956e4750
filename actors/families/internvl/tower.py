"""The vision towers of InternVL 2 to 3.5 and Qianfan-OCR: 300M with LayerNorm, 6B with RMSNorm.

Computes what transformers.models.internvl computes in InternVLVisionModel and
InternVLMultiModalProjector. There are two schemes of names: `internvl` (repositories whose names
end in -hf) and `internvl_chat` (the first ones, whose code is not in transformers). `qianfan_ocr`
uses the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Norm, Style, layer_norm
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
    table_side,
)
from actors.models.tiled import TileParts, TileTower, merge_order
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

NORMS: Mapping[str, Norm] = {"layer_norm": "layer", "rms_norm": "rms"}

PROJECTOR_EPSILON = 1e-5
"""torch's default for LayerNorm: the projector's is not configured."""


@dataclass(frozen=True, slots=True)
class InternVLNames:
    """The tensor names of one scheme, without the checkpoint's prefix."""

    prefixes: tuple[str, ...]
    classes: str
    patches: str
    positions: str
    blocks: BlockNames
    projector: tuple[str, str, str]  # norm, up, down
    qkv_bias: str  # these two: keys of vision_config
    qk_norm: str


NATIVE = InternVLNames(
    prefixes=("vision_tower.", "multi_modal_projector."),
    classes="embeddings.cls_token",
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    blocks=BlockNames(
        block="encoder.layer",
        norm1="layernorm_before",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        proj="attention.projection_layer",
        norm2="layernorm_after",
        up=("mlp.fc1",),
        down="mlp.fc2",
        scales=("lambda_1", "lambda_2"),
        qk_norm=("attention.q_norm", "attention.k_norm"),
    ),
    projector=("layer_norm", "linear_1", "linear_2"),
    qkv_bias="attention_bias",
    qk_norm="use_qk_norm",
)

CHAT = InternVLNames(
    prefixes=("vision_model.", "mlp1."),
    classes="embeddings.class_embedding",
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding",
    blocks=BlockNames(
        block="encoder.layers",
        up=("mlp.fc1",),
        down="mlp.fc2",
        scales=("ls1", "ls2"),
        qk_norm=("attn.q_norm", "attn.k_norm"),
    ),
    projector=("0", "1", "3"),
    qkv_bias="qkv_bias",
    qk_norm="qk_normalization",
)
QIANFAN = replace(CHAT, qkv_bias=NATIVE.qkv_bias, qk_norm=NATIVE.qk_norm)


def family(spec: ModelSpec) -> Family[TileParts]:
    head_size = Dimensions.read(spec).head_size
    return Family(names_of(spec).prefixes, expected(spec), head_size, parts, TileTower)


def names_of(spec: ModelSpec) -> InternVLNames:
    return {"internvl": NATIVE, "internvl_chat": CHAT, "qianfan_ocr": QIANFAN}[spec.family]


def block_names(spec: ModelSpec) -> BlockNames:
    """The names of the tensors that this tower has."""
    names, unbiased = names_of(spec), set[str]()
    blocks = names.blocks
    if NORMS[spec.vision["norm_type"]] == "rms":
        unbiased |= {blocks.norm1, blocks.norm2}
    if not spec.vision[names.qkv_bias]:
        unbiased |= set(blocks.qkv)
    qk_norm = blocks.qk_norm if spec.vision[names.qk_norm] else None
    return replace(blocks, unbiased=frozenset(unbiased), qk_norm=qk_norm)


def expected(spec: ModelSpec) -> Expected:
    tower, names = Dimensions.read(spec), names_of(spec)
    norm, up, down = names.projector
    patch = (3, tower.patch_size, tower.patch_size)
    return {
        names.classes: (1, 1, tower.width),
        names.positions: (1, 1 + table_side(spec) ** 2, tower.width),
        **affine(names.patches, (tower.width, *patch)),
        **affine(norm, (tower.merged,)),
        **affine(up, (spec.width, tower.merged)),
        **affine(down, (spec.width, spec.width)),
        **expected_blocks(block_names(spec), tower.depth, tower.width, tower.mlp_width),
    }


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    tower, names = Dimensions.read(spec), names_of(spec)
    norm, up, down = (weights.affine(name) for name in names.projector)
    epsilon = float(spec.vision["layer_norm_eps"])

    def head(x: Tensor) -> Tensor:
        return down.linear(F.gelu(up.linear(layer_norm(x, norm, PROJECTOR_EPSILON))))

    positions = weights.tensors[names.positions][0].float()
    classes = positions[:1] + weights.tensors[names.classes][0].float()
    patches = merge_order(positions[1:], tower.merge_size)
    return TileParts(
        embedding=weights.embedding(names.patches, spec).weight,
        start=weights.start(names.patches, spec, patches, classes),
        layers=weights.blocks(block_names(spec), tower.depth),
        style=Style(tower.heads, "gelu", epsilon, NORMS[spec.vision["norm_type"]]),
        head=head,
    )
