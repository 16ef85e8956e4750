"""The vision towers of InternVL 2, 2.5, 3 and 3.5: 300M with LayerNorm, 6B with RMSNorm.

Computes what transformers.models.internvl.modeling_internvl computes in InternVLVisionModel and
InternVLMultiModalProjector, under the checkpoint's own names, of which there are two schemes. Knows
nothing of graphs, budgets or where weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.internvl_config import Architecture
from actors.models.layers.block import BlockWeights, Style
from actors.models.packed_weights import Weights
from actors.models.tiled import TileParts, merge_order, tile_sizing
from actors.spec.model_spec import ModelSpec

PROJECTOR_EPSILON = 1e-5
"""torch.nn.LayerNorm's own: the projector's is not configured."""


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    """The tower's, from tensors as internvl_config.expected names them."""
    arch = Architecture.of(spec)
    embedding = weights.embedding(arch.names.patches, spec.mean, spec.std)
    norm, up, down = (weights.affine(name) for name in arch.names.projector)

    def head(x: Tensor) -> Tensor:
        x = F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, PROJECTOR_EPSILON)
        return F.linear(F.gelu(F.linear(x, up.weight, up.bias)), down.weight, down.bias)

    return TileParts(
        embedding=embedding.weight,
        start=weights.place(start(spec, weights.tensors, arch)),
        layers=[layer(weights, arch, f"{arch.names.block}.{i}") for i in range(arch.depth)],
        style=Style(arch.heads, "gelu", arch.epsilon, arch.norm),
        head=head,
    )


def start(spec: ModelSpec, tensors: Mapping[str, Tensor], arch: Architecture) -> Tensor:
    """See TileParts.start, in float32."""
    names = arch.names
    positions = tensors[names.positions][0].float()
    precise = Weights(tensors, positions.device, torch.float32)
    bias = precise.embedding(names.patches, spec.mean, spec.std).bias
    patches = merge_order(positions[1:], tile_sizing(spec)) + bias
    return torch.cat([positions[:1] + tensors[names.class_token][0].float(), patches])


def layer(weights: Weights, arch: Architecture, block: str) -> BlockWeights:
    """One layer; the scales of its two branches are part of what ends them."""
    names = arch.names
    qk_norm = None
    if arch.qk_norm:
        scales = [weights.tensors[f"{block}.{name}.weight"] for name in names.qk_norm]
        qk_norm = weights.place(torch.stack(scales))
    return BlockWeights(
        norm1=weights.affine(f"{block}.{names.norms[0]}"),
        qkv=weights.affine(*(f"{block}.{name}" for name in names.qkv)),
        proj=weights.scaled(f"{block}.{names.proj}", f"{block}.{names.scales[0]}"),
        norm2=weights.affine(f"{block}.{names.norms[1]}"),
        up=weights.affine(f"{block}.mlp.fc1"),
        down=weights.scaled(f"{block}.mlp.fc2", f"{block}.{names.scales[1]}"),
        qk_norm=qk_norm,
    )
