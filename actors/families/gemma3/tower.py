"""The vision tower of Gemma 3: SigLIP, pooled to 256 tokens, normed, projected.

Computes what transformers.models.gemma3 computes in Gemma3MultiModalProjector over SigLIP.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from actors.families.clip.tower import LAST_NORM, NAMES, PATCHES, POSITIONS, tower_shapes
from actors.families.llava.tower import PREFIXES
from actors.models.layers.block import Style, layer_norm
from actors.models.layers.weights import Dimensions, Weights, affine
from actors.models.tiled import TileParts, TileTower, merge_order
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec


def family(spec: ModelSpec) -> Family[TileParts]:
    tower = Dimensions.read(spec)
    expected = {
        **tower_shapes(spec, tower),
        **affine(LAST_NORM, (tower.width,)),
        **affine("mm_soft_emb_norm", (tower.width,), bias=False),
        "mm_input_projection_weight": (tower.width, spec.width),
    }
    return Family(PREFIXES, expected, tower.head_size, parts, TileTower)


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    tower = Dimensions.read(spec)
    epsilon = float(spec.vision["layer_norm_eps"])
    last = weights.affine(LAST_NORM)
    # The checkpoint stores the norm's weight minus one.
    norm = weights.place(weights.tensors["mm_soft_emb_norm.weight"].float() + 1)
    projection = weights.place(weights.tensors["mm_input_projection_weight"].T)

    def head(x: Tensor) -> Tensor:
        x = layer_norm(x.view(-1, tower.merge_size**2, tower.width), last, epsilon)
        return F.linear(F.rms_norm(x.mean(1), norm.shape, norm, epsilon), projection)

    positions = weights.tensors[f"{POSITIONS}.weight"].float()
    return TileParts(
        embedding=weights.embedding(PATCHES, spec).weight,
        start=weights.start(PATCHES, spec, merge_order(positions, tower.merge_size)),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", epsilon),
        head=head,
    )
