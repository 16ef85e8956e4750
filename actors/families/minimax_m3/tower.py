"""The vision tower of MiniMax-M3 with its projector.

Computes what transformers.models.minimax_m3_vl computes in get_image_features. A third of the
rotary frequencies is for time, which is zero for an image.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.clip.tower import NAMES, PATCHES
from actors.kernels.attention import Attention
from actors.models.layers.block import BlocksForm, Style, layer_norm
from actors.models.layers.weights import (
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    reordered,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_tower.vision_model.", "multi_modal_", "patch_merge_")

BEFORE = "pre_layrnorm"


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower, hidden = Dimensions.read(spec), int(spec.vision["projector_hidden_size"])
    frames, side = int(spec.vision["temporal_patch_size"]), tower.patch_size
    expected = {
        **affine(PATCHES, (tower.width, 3, frames, side, side), bias=False),
        **affine(BEFORE, (tower.width,)),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("projector.linear_1", (hidden, tower.width)),
        **affine("projector.linear_2", (spec.width, hidden)),
        **affine("mlp.linear_1", (hidden, spec.width * tower.merge_size**2)),
        **affine("mlp.linear_2", (spec.width, hidden)),
    }
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, MiniMaxTower)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    before, order = weights.affine(BEFORE), head_order(tower.head_size)
    widen, project, merge, last = (
        weights.affine(f"{module}.linear_{number}")
        for module in ("projector", "mlp")
        for number in (1, 2)
    )

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        """First each patch alone, then the patches of a token."""
        x = project.linear(F.gelu(widen.linear(x)))
        return last.linear(F.gelu(merge.linear(x.view(-1, merge.weight.shape[1]))))

    layers = weights.blocks(NAMES, tower.depth)
    return PackedParts(
        embedding=weights.embedding(PATCHES, spec),
        layers=[reordered(layer, tower.heads, order) for layer in layers],
        style=Style(tower.heads, "gelu", epsilon),
        head=head,
        stem=lambda x: layer_norm(x, before, epsilon),
    )


def frequencies(head_size: int) -> int:
    """The number of rotary frequencies for each of time, rows and columns."""
    return head_size // 6


def head_order(head_size: int) -> Tensor:
    """The order of a head for our rotary: frequencies of rows, then of columns.

    As published, they follow those of time, and values that are never rotated are last. Both of
    these go where our tables have zeros, after each axis.
    """
    count, spare = frequencies(head_size), head_size % 6 // 2
    time, rows, columns = torch.arange(3 * count).view(3, count)
    still = torch.cat([time, 6 * count + torch.arange(spare)])
    middle = head_size // 4 - count
    firsts = torch.cat([rows, still[:middle], columns, still[middle:]])
    seconds = firsts + torch.where(firsts < 3 * count, 3 * count, spare)
    return torch.cat([firsts, seconds])


class MiniMaxTower(PackedTower):
    """A packed tower with rotary tables of its own."""

    def __init__(
        self, spec: ModelSpec, parts: PackedParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts, attention, blocks)
        (length, columns), head_size = self.cos.shape, 4 * self.cos.shape[1]
        count = frequencies(head_size)
        powers = torch.arange(count, dtype=torch.float32) / count
        angles = torch.arange(length, dtype=torch.float32)[:, None] / self.theta**powers
        angles = F.pad(angles, (0, columns - count)).to(self.cos.device)
        self.cos, self.sin = angles.cos(), angles.sin()
