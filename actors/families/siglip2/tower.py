"""The vision tower of SigLIP 2 with NaFlex: SigLIP's layers over packed images of any size.

Computes what transformers.models.siglip2 computes as `last_hidden_state` of Siglip2VisionModel;
with `model.output: vector`, in get_image_features and get_text_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.clip import tower as clip
from actors.families.clip.tower import LAST_NORM, NAMES, PATCHES, POSITIONS, PREFIXES, Pooling
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import BlocksForm, Style, layer_norm
from actors.models.layers.patches import AntialiasedPositions
from actors.models.layers.weights import Expected, Weights, affine, expected_blocks
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan


def family(spec: ModelSpec) -> Family[Any]:
    tower, expected = clip.dimensions(spec), tower_shapes(spec)
    if not spec.vector:
        return Family(PREFIXES, expected, tower.head_size, parts, PackedTower, clip.POOLING)
    expected |= clip.pooling_shapes(tower.width, tower.mlp_width)
    vectors = Family(PREFIXES, expected, tower.head_size, vector_parts, PoolingTower)
    return clip.with_texts(vectors, spec)


def tower_shapes(spec: ModelSpec) -> Expected:
    """Everything up to the last norm."""
    tower = clip.dimensions(spec)
    return {
        **affine(PATCHES, (tower.width, 3 * tower.patch_size**2)),
        **affine(POSITIONS, (int(spec.vision["num_patches"]), tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,)),
    }


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, last = clip.dimensions(spec), weights.affine(LAST_NORM)
    epsilon = float(spec.vision["layer_norm_eps"])
    table = weights.tensors[f"{POSITIONS}.weight"].to(weights.device).float()
    return PackedParts(
        embedding=weights.embedding(PATCHES, spec, channels_last=True),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, clip.ACTIVATIONS[spec.vision["hidden_act"]], epsilon),
        head=lambda x, tapped: layer_norm(x, last, epsilon),
        positions=AntialiasedPositions(table),
        rotary=False,
    )


def vector_parts(spec: ModelSpec, weights: Weights) -> tuple[PackedParts, Pooling]:
    return parts(spec, weights), clip.pooling(spec, weights)


class PoolingTower(PackedTower):
    """A packed tower that gives one vector for each image."""

    def __init__(
        self,
        spec: ModelSpec,
        parts: tuple[PackedParts, Pooling],
        attention: Attention,
        blocks: BlocksForm,
    ) -> None:
        super().__init__(spec, parts[0], attention, blocks)
        self.pool = parts[1]

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        return super().inputs(path, tokens, segments) | {"ends": ((segments,), torch.int32)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        ends = torch.tensor([plan.patches for plan in plans]).cumsum(0)
        ends = F.pad(ends, (0, segments - len(plans)), value=int(ends[-1])).int()
        return super().metadata(path, plans, tokens, segments) | {"ends": ends}

    def end(self, x: Tensor, tapped: Sequence[Tensor], values: Values) -> Tensor:
        """[images that fit the budget, width]."""
        ends, places = values["ends"][:, None], torch.arange(len(x), device=x.device)
        starts = F.pad(ends[:-1], (0, 0, 1, 0))
        # An absent image sees everything, because attention to nothing is NaN.
        mask = ((starts <= places) & (places < ends)) | (starts == ends)
        return self.pool(super().end(x, tapped, values)[None], mask)
