"""The vision tower of Step3 (321B): normed after each branch, two convolutions, a projector.

Computes what stepfun-ai/step3's own code computes, which transformers does not have, under the
checkpoint's names. Knows nothing of graphs, budgets or where weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import Style
from actors.models.packed_weights import CLIP_NAMES, Weights
from actors.models.step_config import Architecture, window_sizing
from actors.models.step_tower import StepParts, View
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS

CLASS_TOKENS = 4
"""The class token comes four times, as that code has it: attention weighs it fourfold."""


def parts(spec: ModelSpec, weights: Weights) -> StepParts:
    """The tower's, from tensors as step_config.step3_expected names them."""
    arch, sizing = Architecture.of(spec), window_sizing(spec)
    first, second = weights.affine("downsampler"), weights.affine("downsampler2")

    def head(x: Tensor) -> Tensor:
        x = F.conv2d(x, first.weight, first.bias, stride=2)
        return F.conv2d(x, second.weight, second.bias, stride=2, padding=1)

    return StepParts(
        embedding=weights.embedding("embeddings.patch_embedding", spec.mean, spec.std).weight,
        views={
            path: View(weights.place(start(spec, weights.tensors, arch, side)))
            for path, side in zip(PATHS, sizing.side_patches, strict=True)
        },
        layers=weights.blocks(CLIP_NAMES, arch.depth),
        style=Style(arch.heads, "quick_gelu", arch.epsilon, post_norm=True),
        head=head,
        projector=weights.affine("large_projector"),
    )


def start(spec: ModelSpec, tensors: Mapping[str, Tensor], arch: Architecture, side: int) -> Tensor:
    """See View.start, in float32: the positions of a view of side x side patches."""
    table = tensors["embeddings.position_embedding.weight"].float()
    raster = table[1:].T.reshape(1, -1, arch.table_side, arch.table_side)
    if side != arch.table_side:
        size = (side, side)
        raster = F.interpolate(
            raster, size=size, mode="bicubic", antialias=True, align_corners=False
        )
    precise = Weights(tensors, table.device, torch.float32)
    bias = precise.embedding("embeddings.patch_embedding", spec.mean, spec.std).bias
    classes = table[:1] + tensors["embeddings.class_embedding"].float()
    return torch.cat([classes.expand(CLASS_TOKENS, -1), raster.flatten(2)[0].T + bias])
