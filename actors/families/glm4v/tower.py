"""The vision tower of GLM-4.1V, GLM-4.5V and GLM-4.6V: RMS norms, SwiGLU, bicubic positions.

Computes what transformers.models.glm4v computes in Glm4vVisionModel, and glm_ocr in
GlmOcrVisionModel, which has biases, norms of q and k, and no positions but rotary ones. So has
Glm5NextVisionModel of glm5_next, which clamps gates, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import ACTIVATIONS, Activation, Affine, Style, layer_norm, rms_norm
from actors.models.layers.patches import Positions, bicubic_taps
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    table_side,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("visual.",)

NAMES = BlockNames(up=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj", biased=False)

OCR_NAMES = replace(
    NAMES,
    biased=True,
    unbiased=frozenset({NAMES.norm1, NAMES.norm2}),
    qk_norm=("attn.q_norm", "attn.k_norm"),
)

MERGER_EPSILON = 1e-5  # torch's default for LayerNorm: the configuration does not say


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower = dimensions(spec)
    patch = (3, int(spec.vision["temporal_patch_size"]), tower.patch_size, tower.patch_size)
    names, heads, inner = names_of(spec), tower.head_size, merger_width(spec)
    expected = {
        **affine("patch_embed.proj", (tower.width, *patch)),
        **expected_blocks(names, tower.depth, tower.width, tower.mlp_width, qk_size=heads),
        **affine("post_layernorm", (tower.width,), bias=False),
        **affine("downsample", (spec.width, tower.width, tower.merge_size, tower.merge_size)),
        **affine("merger.proj", (spec.width, spec.width), bias=False),
        **affine("merger.post_projection_norm", (spec.width,)),
        **affine("merger.gate_proj", (inner, spec.width), bias=False),
        **affine("merger.up_proj", (inner, spec.width), bias=False),
        **affine("merger.down_proj", (spec.width, inner), bias=False),
    }
    if not is_ocr(spec):
        table = (table_side(spec) ** 2, tower.width)
        expected |= affine("post_conv_layernorm", (tower.width,), bias=False)
        expected |= affine("embeddings.position_embedding", table, bias=False)
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, PackedTower)


def is_ocr(spec: ModelSpec) -> bool:
    """Whether the tower is of GLM-OCR's kind."""
    return spec.family in ("glm_ocr", "glm5_next")


def merger_width(spec: ModelSpec) -> int:
    if spec.family == "glm5_next":
        return int(spec.vision["projection_intermediate_size"])
    return 3 * spec.width if is_ocr(spec) else int(spec.vision["intermediate_size"])


def names_of(spec: ModelSpec) -> BlockNames:
    return OCR_NAMES if is_ocr(spec) else NAMES


def dimensions(spec: ModelSpec) -> Dimensions:
    # The blocks' MLP is as wide as the rows of the embedding; intermediate_size is the merger's.
    keys = {} if is_ocr(spec) else {"mlp_width": "out_hidden_size"}
    return Dimensions.read(spec, **keys)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower = dimensions(spec)
    epsilon = float(spec.vision["rms_norm_eps"])
    activation: Activation = "swiglu_10" if spec.family == "glm5_next" else "swiglu"
    last = weights.affine("post_layernorm")
    # The patches of a token are adjacent, each with all its channels.
    filters = weights.tensors["downsample.weight"].permute(0, 2, 3, 1).flatten(1)
    bias = weights.tensors["downsample.bias"]
    downsample = Affine(weights.place(filters), weights.place(bias))
    proj, norm = weights.affine("merger.proj"), weights.affine("merger.post_projection_norm")
    up = weights.affine("merger.gate_proj", "merger.up_proj")
    down = weights.affine("merger.down_proj")

    stem, positions = None, None
    if not is_ocr(spec):
        first = weights.affine("post_conv_layernorm")
        table = weights.place(weights.tensors["embeddings.position_embedding.weight"])
        positions = Positions(table, bicubic_taps, taps=16)

        def stem(x: Tensor) -> Tensor:
            return rms_norm(x, first, epsilon)

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        x = rms_norm(x, last, epsilon).view(-1, tower.merged)
        x = F.linear(downsample.linear(x), proj.weight)
        x = F.gelu(layer_norm(x, norm, MERGER_EPSILON))
        return F.linear(ACTIVATIONS[activation](F.linear(x, up.weight)), down.weight)

    return PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec),
        later=weights.later_embedding("patch_embed.proj", spec),
        layers=weights.blocks(names_of(spec), tower.depth),
        style=Style(tower.heads, activation, epsilon=epsilon, norm="rms"),
        head=head,
        stem=stem,
        positions=positions,
    )
