"""The vision tower of Ovis 2: AIMv2, whose tokens are mixtures of visual words.

The head gives each token a probability for each word of a visual vocabulary. The token's row is the
mean of the words' embeddings, weighted by these. Computes what transformers.models.ovis2 computes
in get_image_features as `pooler_output`. The rows of the indicators between tiles are constants,
which the language model's side has.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.aimv2 import tower as aimv2
from actors.models.layers.block import layer_norm
from actors.models.layers.weights import Dimensions, Expected, Weights, affine
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_tower.", "visual_embeddings_")

ROOT, PATCHES = "transformer.", "embeddings.patch_embedding"
HEAD, HEAD_NORM, TABLE = "head_linear", "head_norm", "table"

HEAD_EPSILON = 1e-5  # torch's default for LayerNorm: the configuration does not say
HEAD_TOKENS = 1024
"""Tokens whose probabilities the head computes at a time: 128 MB with 65536 words."""


def family(spec: ModelSpec) -> Family[TileParts]:
    return Family(PREFIXES, expected(spec), Dimensions.read(spec).head_size, parts, TileTower)


def words(spec: ModelSpec) -> tuple[int, int]:
    """The number of words in the table, and of those that a token may be, which come first."""
    count = int(spec.vision["vocab_size"])
    return count, count - int(spec.vision["num_visual_indicator_tokens"])


def expected(spec: ModelSpec) -> Expected:
    tower, (count, seen) = Dimensions.read(spec), words(spec)
    return {
        **aimv2.tower_shapes(spec, ROOT, PATCHES),
        **affine(HEAD, (seen, tower.merged), bias=False),
        **affine(HEAD_NORM, (seen,)),
        **affine(TABLE, (count, spec.width), bias=False),
    }


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    count, seen = words(spec)
    norm, table = weights.affine(HEAD_NORM), weights.affine(TABLE).weight
    # Odd numbers of words make GEMMs slow, so words that no token may be have zeros.
    linear = F.pad(weights.affine(HEAD).weight, (0, 0, 0, count - seen))

    def rows(x: Tensor) -> Tensor:
        logits = F.linear(x, linear)[:, :seen]
        shares = layer_norm(logits, norm, HEAD_EPSILON).softmax(-1)
        return F.pad(shares, (0, count - seen)) @ table

    def head(x: Tensor) -> Tensor:
        return torch.cat([rows(part) for part in x.split(HEAD_TOKENS)])

    return aimv2.parts(spec, weights, ROOT, PATCHES, head)
