"""The vision tower of LLaVA-OneVision: SigLIP with LLaVA's projector, and the order of its rows.

Computes what transformers.models.llava_onevision computes in get_image_features, of each image as
if it were alone in its prompt, and in get_video_features. The graph ends with the projector; what
is unpadded, scaled and pooled follows it, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import CheckpointError
from actors.kernels.attention import Attention
from actors.models import clip, packed
from actors.models.layers.block import BlocksForm
from actors.models.packed_weights import Expected, Weights
from actors.models.tiled import TileParts, TileTower, cut
from actors.spec.anyres import AnyresSizing, PooledFrames
from actors.spec.model_spec import ModelSpec
from actors.spec.tiling import Layout
from actors.types import ItemPlan, Size

PREFIXES = (*clip.LLAVA_PREFIXES, "image_", "model.image_")
QWEN_PREFIXES = (
    "model.vision_tower.vision_tower.vision_model.",
    *("model.mm_projector.", "model.image_"),
)


@dataclass(frozen=True, slots=True)
class OnevisionParts:
    """On the tower's device."""

    tiles: TileParts
    newline: Tensor
    """[1, width of a row]."""


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor that is used, without the checkpoint's prefixes."""
    return clip.expected(spec) | {"newline": (spec.width,)}


def parts(spec: ModelSpec, weights: Weights) -> OnevisionParts:
    """The tower's, from tensors as `expected` names them."""
    newline = weights.place(weights.tensors["newline"])
    return OnevisionParts(clip.parts(spec, weights), newline[None])


class OnevisionTower(TileTower):
    """See TileTower. What it computes of an item are tokens of tiles, the whole image first."""

    def __init__(
        self, spec: ModelSpec, parts: OnevisionParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.tiles, attention, blocks)
        if not isinstance(spec.sizing, AnyresSizing) or not isinstance(spec.video, PooledFrames):
            raise CheckpointError(f"model.id {spec.id!r}: this tower needs an AnyresSizing")
        self.anyres, self.frames = spec.sizing, spec.video
        self.newline = parts.newline

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """See Tower."""
        computed = outputs[0].split([plan.path_tokens[0] for plan in plans])
        rows = [
            self.video_rows(tokens, plan) if plan.frames else self.image_rows(tokens, plan)
            for tokens, plan in zip(computed, plans, strict=True)
        ]
        return torch.cat(rows)

    def image_rows(self, tokens: Tensor, plan: ItemPlan) -> Tensor:
        """transformers: pack_image_features."""
        tile, side = self.anyres.tile_tokens, self.anyres.side_patches
        rows, columns = plan.grid_thw[1:]
        grid = tokens[tile:].view(rows // side, columns // side, side, side, -1)
        grid = grid.transpose(1, 2).reshape(rows, columns, -1)
        down, across = plan.kept
        above, left = (rows - down) // 2, (columns - across) // 2
        shown = resampled(
            grid[None, above : above + down, left : left + across],
            self.anyres.scaled((down, across)),
        )[0]
        newlines = self.newline.expand(len(shown), 1, -1)
        return torch.cat([tokens[:tile], torch.cat([shown, newlines], 1).flatten(0, 1)])

    def video_rows(self, tokens: Tensor, plan: ItemPlan) -> Tensor:
        """transformers: apply_pooling. The last of a video's runs ends in the newline."""
        side, pooled = self.frames.side, self.frames.frame_side
        frames = tokens.view(plan.frames, side, side, -1)
        rows = resampled(frames, (pooled, pooled)).flatten(0, 2)
        return torch.cat([rows, self.newline]) if plan.tokens > len(rows) else rows


def patchify(image: Tensor, sizing: AnyresSizing) -> Tensor:
    """uint8 [3, height, width] to uint8 [patches of all tiles, 3 x patch x patch]."""
    size, side = Size(width=image.shape[2], height=image.shape[1]), sizing.picture_pixels
    rows, columns = sizing.layout(size)
    left, above = sizing.corner(size)
    shown = packed.resize(image, sizing.resized(size))
    canvas = image.new_zeros(3, rows * side, columns * side)
    canvas[:, above : above + shown.shape[1], left : left + shown.shape[2]] = shown
    tiles = canvas.view(3, rows, side, columns, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
    return torch.cat([tile_of(tile, sizing) for tile in (image, *tiles)])


def tile_of(image: Tensor, sizing: AnyresSizing) -> Tensor:
    """uint8 [3, height, width], stretched to one tile: [patches, 3 x patch x patch]."""
    side, whole = sizing.picture_pixels, sizing.tile_pixels
    return cut(packed.resize(image, Size(side, side))[:, :whole, :whole], sizing)


def resampled(grids: Tensor, to: Layout) -> Tensor:
    """[grids, rows, columns, width] to other rows and columns, bilinear as in transformers."""
    if grids.shape[1:3] == to:
        return grids
    scaled = F.interpolate(grids.permute(0, 3, 1, 2), to, mode="bilinear")
    return scaled.permute(0, 2, 3, 1)
