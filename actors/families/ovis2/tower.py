"""The vision tower of Ovis 2: AIMv2, whose tokens are mixtures of visual words.

The head gives each token a probability for each word of a visual vocabulary; its row is the mean of
the words' embeddings by these. Computes what transformers.models.ovis2 computes in
get_image_features as `pooler_output`; the rows of the indicators between tiles are constants, which
the language model's side has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Style, layer_norm, rms_norm
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

PREFIXES = ("vision_tower.", "visual_embeddings_")

PATCHES = "transformer.embeddings.patch_embedding"
FIRST_NORM = "transformer.embeddings.rms_norm"
POSITIONS = "transformer.embeddings.position_embedding"
LAST_NORM = "transformer.rms_norm"
HEAD, HEAD_NORM, TABLE = "head_linear", "head_norm", "table"

HEAD_EPSILON = 1e-5  # torch's default for LayerNorm: the configuration does not say
HEAD_TOKENS = 1024
"""Of which the head has the probabilities at a time: of a vocabulary of 65536 words 128 MB."""


def family(spec: ModelSpec) -> Family[TileParts]:
    return Family(PREFIXES, expected(spec), Dimensions.read(spec).head_size, parts, TileTower)


def names_of(spec: ModelSpec) -> BlockNames:
    qkv = tuple(f"attention.{part}_proj" for part in "qkv")
    proj, up, down = "attention.out_proj", ("ffn.gate_proj", "ffn.up_proj"), "ffn.down_proj"
    norms = "rms_norm1", "rms_norm2"
    attention = () if spec.vision["qkv_bias"] else (*qkv, proj)
    mlp = () if spec.vision["mlp_bias"] else (*up, down)
    return BlockNames(
        block="transformer.encoder.layers",
        norm1=norms[0],
        qkv=qkv,
        proj=proj,
        norm2=norms[1],
        up=up,
        down=down,
        unbiased=frozenset({*norms, *attention, *mlp}),
    )


def words(spec: ModelSpec) -> tuple[int, int]:
    """Of the table; and those among them that a token may be, which come first."""
    count = int(spec.vision["vocab_size"])
    return count, count - int(spec.vision["num_visual_indicator_tokens"])


def expected(spec: ModelSpec) -> Expected:
    tower, (count, seen) = Dimensions.read(spec), words(spec)
    return {
        **affine(PATCHES, (tower.width, 3, tower.patch_size, tower.patch_size)),
        **affine(FIRST_NORM, (tower.width,), bias=False),
        **affine(POSITIONS, (table_side(spec) ** 2, tower.width), bias=False),
        **expected_blocks(names_of(spec), tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,), bias=False),
        **affine(HEAD, (seen, tower.merged), bias=False),
        **affine(HEAD_NORM, (seen,)),
        **affine(TABLE, (count, spec.width), bias=False),
    }


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["rms_norm_eps"])
    first, last, norm = (weights.affine(name) for name in (FIRST_NORM, LAST_NORM, HEAD_NORM))
    raster = weights.tensors[f"{POSITIONS}.weight"]
    positions = weights.place(merge_order(raster, tower.merge_size))
    count, seen = words(spec)
    # Odd numbers of words make GEMMs slow: there are zeros for those that no token is.
    linear = F.pad(weights.affine(HEAD).weight, (0, 0, 0, count - seen))
    table = weights.affine(TABLE).weight

    def stem(x: Tensor) -> Tensor:
        return rms_norm(x, first, epsilon) + positions

    def rows(x: Tensor) -> Tensor:
        logits = F.linear(x, linear)[:, :seen]
        shares = layer_norm(logits, norm, HEAD_EPSILON).softmax(-1)
        return F.pad(shares, (0, count - seen)) @ table

    def head(x: Tensor) -> Tensor:
        normed = rms_norm(x.view(-1, tower.width), last, epsilon).view(-1, tower.merged)
        return torch.cat([rows(part) for part in normed.split(HEAD_TOKENS)])

    return TileParts(
        embedding=weights.embedding(PATCHES, spec).weight,
        start=weights.start(PATCHES, spec, torch.zeros_like(raster, dtype=torch.float32)),
        layers=weights.blocks(names_of(spec), tower.depth),
        style=Style(tower.heads, "swiglu", epsilon, norm="rms"),
        head=head,
        stem=stem,
    )
