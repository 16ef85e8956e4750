"""The vision tower of PaddleOCR-VL: SigLIP at any size, with rotary and bilinear positions.

Computes what transformers.models.paddleocr_vl computes in PaddleOCRVisionModel and
PaddleOCRProjector for images.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.families.clip.tower import LAST_NORM, NAMES, PATCHES, POOLING, POSITIONS, tower_shapes
from actors.models.layers.block import Style, layer_norm
from actors.models.layers.patches import Merger, Positions, centred_bilinear_taps
from actors.models.layers.weights import Dimensions, Weights, affine
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("visual.vision_model.", "mlp_AR.", "projector.")
"""The projector has two: as published, and as in transformers."""

UNUSED = POOLING | {"embeddings.packing_position_embedding.weight", "embeddings.position_ids"}
"""SigLIP's pooling head, and another table of positions."""

PROJECTOR_EPSILON = 1e-5


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower = Dimensions.read(spec)
    expected = {
        **tower_shapes(spec, tower),
        **affine(LAST_NORM, (tower.width,)),
        **affine("pre_norm", (tower.width,)),
        **affine("linear_1", (tower.merged, tower.merged)),
        **affine("linear_2", (spec.width, tower.merged)),
    }
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, PackedTower, UNUSED)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower = Dimensions.read(spec)
    epsilon = float(spec.vision["layer_norm_eps"])
    last = weights.affine(LAST_NORM)
    norm, up, down = (weights.affine(name) for name in ("pre_norm", "linear_1", "linear_2"))
    merger = Merger(norm, up, down, epsilon=PROJECTOR_EPSILON)

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(layer_norm(x, last, epsilon))

    table = weights.place(weights.tensors[f"{POSITIONS}.weight"])
    return PackedParts(
        embedding=weights.embedding(PATCHES, spec),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=head,
        positions=Positions(table, centred_bilinear_taps, taps=4),
    )
