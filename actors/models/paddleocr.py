"""The vision tower of PaddleOCR-VL: SigLIP at any size, with rotary and bilinear positions.

Computes what transformers.models.paddleocr_vl computes in PaddleOCRVisionModel and
PaddleOCRProjector for images, under the checkpoint's own names. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from actors.models.gemma3 import NAMES
from actors.models.layers.block import Style, layer_norm
from actors.models.packed import Merger, centred_bilinear_taps
from actors.models.packed_tower import Parts, Positions
from actors.models.packed_weights import Dimensions, Expected, Weights, affine, expected_blocks
from actors.spec.model_spec import ModelSpec

PREFIXES = tuple(
    prefix + part
    for prefix, parts in (
        ("", ("visual.vision_model.", "mlp_AR.")),
        ("model.", ("visual.vision_model.", "projector.")),
    )
    for part in parts
)
"""As published, and as transformers calls them."""

UNUSED = frozenset(
    {
        *("embeddings.packing_position_embedding.weight", "embeddings.position_ids", "head.probe"),
        *("head.attention.in_proj_weight", "head.attention.in_proj_bias"),
        *(
            f"head.{name}.{part}"
            for name in ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
            for part in ("weight", "bias")
        ),
    }
)
"""SigLIP's pooling, and another table of positions."""

PROJECTOR_EPSILON = 1e-5


def dimensions(spec: ModelSpec) -> Dimensions:
    """Raises CheckpointError for a key that is missing."""
    return Dimensions.read(spec, depth="num_hidden_layers", heads="num_attention_heads")


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the tower, without the checkpoint's prefixes."""
    tower = dimensions(spec)
    side = int(spec.vision["image_size"]) // tower.patch_size
    patch = (3, tower.patch_size, tower.patch_size)
    return {
        **affine("embeddings.patch_embedding", (tower.width, *patch)),
        **affine("embeddings.position_embedding", (side**2, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("post_layernorm", (tower.width,)),
        **affine("pre_norm", (tower.width,)),
        **affine("linear_1", (tower.merged, tower.merged)),
        **affine("linear_2", (spec.width, tower.merged)),
    }


def parts(spec: ModelSpec, weights: Weights) -> Parts:
    """The tower's, from tensors as `expected` names them."""
    tower = dimensions(spec)
    epsilon = float(spec.vision["layer_norm_eps"])
    last = weights.affine("post_layernorm")
    merger = Merger(
        norm=weights.affine("pre_norm"),
        up=weights.affine("linear_1"),
        down=weights.affine("linear_2"),
        epsilon=PROJECTOR_EPSILON,
    )

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(layer_norm(x, last, epsilon))

    table = weights.place(weights.tensors["embeddings.position_embedding.weight"])
    return Parts(
        embedding=weights.embedding("embeddings.patch_embedding", spec.mean, spec.std),
        later=None,
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=head,
        positions=Positions(table, centred_bilinear_taps, taps=4),
        theta=float(spec.vision["rope_theta"]),
    )
