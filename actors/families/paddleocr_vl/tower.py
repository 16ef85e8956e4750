"""The vision tower of PaddleOCR-VL: SigLIP at any size, with rotary and bilinear positions.

Computes what transformers.models.paddleocr_vl computes in PaddleOCRVisionModel and
PaddleOCRProjector for images.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.families.clip.tower import LAST_NORM, NAMES, POOLING, tower_shapes
from actors.models.layers.block import Style, layer_norm
from actors.models.layers.patches import Merger, Positions, centred_bilinear_taps
from actors.models.layers.weights import LAYERS, Dimensions, Expected, Weights, affine
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = tuple(
    prefix + part
    for prefix, parts in (
        ("", ("visual.vision_model.", "mlp_AR.")),
        ("model.", ("visual.vision_model.", "projector.")),
    )
    for part in parts
)
"""As published, and as transformers names them."""

UNUSED = POOLING | {"embeddings.packing_position_embedding.weight", "embeddings.position_ids"}
"""SigLIP's pooling, and another table of positions."""

PROJECTOR_EPSILON = 1e-5


def family(spec: ModelSpec) -> Family[PackedParts]:
    return Family(PREFIXES, expected, dimensions, parts, PackedTower, UNUSED)


def dimensions(spec: ModelSpec) -> Dimensions:
    return Dimensions.read(spec, **LAYERS)


def expected(spec: ModelSpec) -> Expected:
    tower = dimensions(spec)
    side = int(spec.vision["image_size"]) // tower.patch_size
    return {
        **tower_shapes(tower, side**2),
        **affine(LAST_NORM, (tower.width,)),
        **affine("pre_norm", (tower.width,)),
        **affine("linear_1", (tower.merged, tower.merged)),
        **affine("linear_2", (spec.width, tower.merged)),
    }


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower = dimensions(spec)
    epsilon = float(spec.vision["layer_norm_eps"])
    last = weights.affine(LAST_NORM)
    merger = Merger(
        norm=weights.affine("pre_norm"),
        up=weights.affine("linear_1"),
        down=weights.affine("linear_2"),
        epsilon=PROJECTOR_EPSILON,
    )

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(layer_norm(x, last, epsilon))

    table = weights.place(weights.tensors["embeddings.position_embedding.weight"])
    return PackedParts(
        embedding=weights.embedding("embeddings.patch_embedding", spec.mean, spec.std),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=head,
        positions=Positions(table, centred_bilinear_taps, taps=4),
        theta=float(spec.vision["rope_theta"]),
    )
