"""The vision tower of Step3-VL-10B and Step-3.7: a Perception Encoder and two convolutions.

Computes what transformers.models.step3p7.modeling_step3p7 computes in Step3p7VisionModel and in the
projector, under the checkpoint's own names. Knows nothing of graphs, budgets or where weights come
from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models import packed
from actors.models.layers.block import Affine, BlockWeights, Style, layer_norm
from actors.models.packed_weights import Weights, halves
from actors.models.step_config import PERCEPTION, Architecture, window_sizing
from actors.models.step_tower import StepParts, View
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS

THETA = 10000.0
"""A constant of the published code."""


def parts(spec: ModelSpec, weights: Weights) -> StepParts:
    """The tower's, from tensors as step_config.perception_expected names them."""
    arch, sizing = Architecture.of(spec), window_sizing(spec)
    named = {name.replace(".in_proj_", ".in_proj."): t for name, t in weights.tensors.items()}
    weights = Weights(named, weights.device, weights.dtype)
    before = weights.affine("ln_pre")
    first, second = weights.affine("vit_downsampler1"), weights.affine("vit_downsampler2")

    def head(x: Tensor) -> Tensor:
        x = F.conv2d(x, first.weight, first.bias, stride=2, padding=1)
        return F.conv2d(x, second.weight, second.bias, stride=2, padding=1)

    return StepParts(
        embedding=weights.embedding("conv1", spec.mean, spec.std).weight,
        views={
            path: View(
                weights.place(start(spec, named, arch, side)), rotary(side, arch, weights.device)
            )
            for path, side in zip(PATHS, sizing.side_patches, strict=True)
        },
        layers=[rotated(layer, arch.heads) for layer in weights.blocks(PERCEPTION, arch.depth)],
        style=Style(arch.heads, "quick_gelu", arch.epsilon),
        head=head,
        projector=weights.affine("large_projector"),
        stem=lambda x: layer_norm(x, before, arch.epsilon),
    )


def start(spec: ModelSpec, tensors: Mapping[str, Tensor], arch: Architecture, side: int) -> Tensor:
    """See View.start, in float32: the positions of a view of side x side patches."""
    table = tensors["positional_embedding"].float()
    raster = table.T.view(1, -1, arch.table_side, arch.table_side)
    if side != arch.table_side:
        raster = F.interpolate(raster, size=(side, side), mode="bilinear", align_corners=False)
    precise = Weights(tensors, table.device, torch.float32)
    return raster.flatten(2)[0].T + precise.embedding("conv1", spec.mean, spec.std).bias


def rotary(side: int, arch: Architecture, device: torch.device) -> tuple[Tensor, Tensor]:
    """See View.rotary: columns before rows, both from 0."""
    places = packed.places(side, side, 1).flip(1)
    cos, sin = packed.rotary_tables(side, arch.width // arch.heads, THETA)
    return cos[places].flatten(1).to(device), sin[places].flatten(1).to(device)


def rotated(layer: BlockWeights, heads: int) -> BlockWeights:
    """The layer with q and k sorted for a rotary embedding that turns half against half."""
    parts = zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True)
    query, key, value = (Affine(weight, bias) for weight, bias in parts)
    sorted_parts = (halves(query, heads), halves(key, heads), value)
    qkv = Affine(
        torch.cat([part.weight for part in sorted_parts]),
        torch.cat([part.bias for part in sorted_parts]),
    )
    return replace(layer, qkv=qkv)
