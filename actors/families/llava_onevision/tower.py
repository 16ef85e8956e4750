"""The vision tower of LLaVA-NeXT and LLaVA-OneVision: LLaVA's, and the order of its rows.

Computes what transformers.models.llava_next and llava_onevision compute in get_image_features, for
each image as if it were alone in its prompt, and in get_video_features. The graph ends with the
projector; removing the padding, scaling and pooling follow it, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.clip import tower as clip
from actors.families.llava import tower as llava
from actors.kernels.attention import Attention
from actors.models.layers.block import BlocksForm
from actors.models.layers.weights import Weights
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.tiles import AnyresSizing, Layout
from actors.spec.video import PooledFrames
from actors.types import ItemPlan

PREFIXES = (*llava.PREFIXES, "image_")
QWEN_PREFIXES = ("vision_tower.vision_tower.vision_model.", "mm_projector.", "image_")
"""For checkpoints with the names of its own code, which names the projector differently, too."""


@dataclass(frozen=True, slots=True)
class OnevisionParts:
    """The parts of the tower, on its device."""

    tiles: TileParts
    newline: Tensor  # [1, width of a row]


def family(spec: ModelSpec) -> Family[OnevisionParts]:
    return Family(
        QWEN_PREFIXES if spec.family == "llava_qwen" else PREFIXES,
        llava.expected(spec, projector(spec)) | {"newline": (spec.width,)},
        clip.dimensions(spec).head_size,
        parts,
        OnevisionTower,
        clip.unused(spec),
    )


def projector(spec: ModelSpec) -> tuple[str, str]:
    return ("0", "2") if spec.family == "llava_qwen" else llava.PROJECTOR


def parts(spec: ModelSpec, weights: Weights) -> OnevisionParts:
    newline = weights.place(weights.tensors["newline"])
    return OnevisionParts(llava.parts(spec, weights, projector(spec)), newline[None])


class OnevisionTower(TileTower):
    """A tile tower. Per item, it computes the tokens of all tiles, the whole image's first."""

    def __init__(
        self, spec: ModelSpec, parts: OnevisionParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.tiles, attention, blocks)
        assert isinstance(spec.sizing, AnyresSizing)
        self.anyres, self.frames = spec.sizing, spec.video
        self.newline = parts.newline

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        computed = outputs[0].split([plan.path_tokens[0] for plan in plans])
        rows = [
            self.video_rows(tokens, plan) if plan.frames else self.image_rows(tokens, plan)
            for tokens, plan in zip(computed, plans, strict=True)
        ]
        return torch.cat(rows)

    def image_rows(self, tokens: Tensor, plan: ItemPlan) -> Tensor:
        """transformers: pack_image_features."""
        tile, side = self.anyres.tile_tokens, self.anyres.token_side
        rows, columns = (patches // self.anyres.merge_size for patches in plan.grid_thw[1:])
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
        """transformers: apply_pooling. The last chunk of a video ends in the newline."""
        assert isinstance(self.frames, PooledFrames)
        side, pooled = self.frames.side, self.frames.frame_side
        frames = tokens.view(plan.frames, side, side, -1)
        rows = resampled(frames, (pooled, pooled)).flatten(0, 2)
        return torch.cat([rows, self.newline]) if plan.tokens > len(rows) else rows


def resampled(grids: Tensor, to: Layout) -> Tensor:
    """[grids, rows, columns, width] to other rows and columns, bilinear as in transformers."""
    if grids.shape[1:3] == to:
        return grids
    scaled = F.interpolate(grids.permute(0, 3, 1, 2), to, mode="bilinear")
    return scaled.permute(0, 2, 3, 1)
