"""The vision tower of LLaVA-NeXT-Video: LLaVA-NeXT's, which pools the frames of videos.

Computes what transformers.models.llava_next_video computes in get_image_features and
get_video_features, each image as if it were alone in its prompt. The patches of a frame are
averaged before the projector. So that shapes stay fixed, each patch of a block of 2 x 2 becomes
their average, and one row of the four is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actors.families.llava_onevision import tower as llava_onevision
from actors.families.llava_onevision.tower import OnevisionParts, OnevisionTower
from actors.kernels.attention import Shapes, Values
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.video import POOLED
from actors.types import ItemPlan

FRAMES = "frames"
"""The input that says which tiles are frames of a video: bool [tiles, 1, 1]."""


def family(spec: ModelSpec) -> Family[OnevisionParts]:
    return replace(llava_onevision.family(spec), tower=NextVideoTower)


class NextVideoTower(OnevisionTower):
    def video_inputs(self, path: str, tokens: int) -> Shapes:
        return {FRAMES: ((tokens // self.sizing.tile_tokens, 1, 1), torch.bool)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        values = super().metadata(path, plans, tokens, segments)
        if not any(plan.frames for plan in plans):
            return values
        tiles = [plan.path_tokens[0] // self.sizing.tile_tokens for plan in plans]
        frames = torch.tensor([bool(plan.frames) for plan in plans])
        return values | {FRAMES: frames.repeat_interleave(torch.tensor(tiles))[:, None, None]}

    def end(self, x: Tensor, values: Values) -> Tensor:
        if FRAMES in values:
            x = torch.where(values[FRAMES], averaged(x, self.anyres.side_patches), x)
        return super().end(x, values)

    def video_rows(self, tokens: Tensor, plan: ItemPlan) -> Tensor:
        side = self.anyres.side_patches // POOLED
        return tokens.view(plan.frames, side, POOLED, side, POOLED, -1)[:, :, 0, :, 0].flatten(0, 2)


def averaged(x: Tensor, side: int) -> Tensor:
    """Replaces each patch of x [tiles, side x side, width] by the mean of its block of 2 x 2.
    transformers: LlavaNextVideoPooler."""
    blocks: Tensor = x.unflatten(1, (side // POOLED, POOLED, side // POOLED, POOLED))
    return blocks.mean((2, 4), keepdim=True).expand_as(blocks).reshape(x.shape)
