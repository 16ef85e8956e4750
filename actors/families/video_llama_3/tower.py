"""The vision tower of VideoLLaMA 3: SigLIP at any size, with rotary positions only.

Computes what transformers.models.video_llama_3 computes in get_image_features for images, whose
patches are a token each.
"""

from __future__ import annotations

from actors.families.clip.tower import LAST_NORM, NAMES, PATCHES
from actors.models.layers.block import Style
from actors.models.layers.patches import Merger
from actors.models.layers.weights import Dimensions, Weights, affine, expected_blocks
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_model.", "projector.readout.")

PROJECTOR = ("0", "2")


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower, (up, down) = Dimensions.read(spec), PROJECTOR
    expected = {
        **affine(PATCHES, (tower.width, 3, tower.patch_size, tower.patch_size)),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,)),
        **affine(up, (spec.width, tower.width)),
        **affine(down, (spec.width, spec.width)),
    }
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, PackedTower)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    last, up, down = (weights.affine(name) for name in (LAST_NORM, *PROJECTOR))
    projector = Merger(last, up, down, epsilon=epsilon)
    return PackedParts(
        embedding=weights.embedding(PATCHES, spec),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=lambda x, tapped: projector(x),
    )
