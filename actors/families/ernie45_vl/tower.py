"""The vision tower of ERNIE-4.5-VL: Qwen2-VL's blocks, a last norm, and a resampler.

Computes what transformers.models.ernie4_5_vl_moe computes in get_image_features. The resampler
joins pairs of frames; an image is paired with itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from actors.families.qwen2_vl.tower import NAMES
from actors.models.layers.block import Affine, Style, layer_norm, rms_norm
from actors.models.layers.weights import Dimensions, Weights, affine, expected_blocks
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_model.", "resampler_model.")


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower = Dimensions.read(spec)
    merged = tower.merged
    expected = {
        **affine("patch_embed.proj", (tower.width, 3 * tower.patch_size**2), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("ln", (tower.width,)),
        **affine("mlp", (spec.width, merged)),
        **affine("after_norm", (spec.width,), bias=False),
    }
    for name, frames in (("spatial_linear", 1), ("temporal_linear", 2)):
        expected |= affine(f"{name}.0", (merged, frames * merged))
        expected |= affine(f"{name}.2", (merged, merged)) | affine(f"{name}.3", (merged,))
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, PackedTower)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["rms_norm_eps"])
    last, mlp, after = (weights.affine(name) for name in ("ln", "mlp", "after_norm"))
    frames = weights.tensors["temporal_linear.0.weight"].float().unflatten(1, (2, -1))
    paired = weights.place(frames.sum(1)), weights.place(weights.tensors["temporal_linear.0.bias"])
    spatial = [weights.affine(f"spatial_linear.{layer}") for layer in (0, 2, 3)]
    temporal = [Affine(*paired), *(weights.affine(f"temporal_linear.{layer}") for layer in (2, 3))]

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        x = layer_norm(x, last, epsilon).view(-1, tower.merged)
        for up, down, norm in (spatial, temporal):
            x = layer_norm(down.linear(F.gelu(up.linear(x))), norm, epsilon)
        return rms_norm(mlp.linear(x), after, float(spec.vision["resampler_epsilon"]))

    return PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "quick_gelu", epsilon),
        head=head,
    )
