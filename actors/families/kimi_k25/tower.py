"""The vision tower of Kimi-K2.5: Kimi-VL's, and videos in groups of frames.

The frames of a group attend to each other: a group is one attention segment. A sinusoid tells its
frames apart, and they are pooled before the projector: a group has the rows of one picture.
Computes what transformers.models.kimi_k25 computes in Kimi_K25VisionModel and get_video_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.kimi_vl import tower as kimivl
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Affine, BlocksForm, layer_norm
from actors.models.layers.patches import weighted
from actors.models.layers.weights import Expected, Weights
from actors.models.packed import PackedParts, PackedTower, segments_of
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

PROJECTOR = ("proj.0", "proj.2")


@dataclass(frozen=True, slots=True)
class KimiK25Parts:
    """On the tower's device."""

    tower: PackedParts
    """Its head is the projector alone."""
    final: Affine
    """The last norm."""
    times: Tensor
    """[1 + frames of a group, width]: added by the place in time. The first row, zeros, is for a
    picture that is alone."""


def family(spec: ModelSpec) -> Family[KimiK25Parts]:
    return Family(kimivl.PREFIXES, expected, kimivl.dimensions, parts, KimiK25Tower)


def expected(spec: ModelSpec) -> Expected:
    return kimivl.expected(spec, PROJECTOR)


def parts(spec: ModelSpec, weights: Weights) -> KimiK25Parts:
    merger = kimivl.projection(weights, PROJECTOR)
    tower = kimivl.parts(spec, weights, PROJECTOR)
    times = time_table(int(spec.vision["pos_emb_time"]), kimivl.dimensions(spec).width)
    return KimiK25Parts(
        tower=replace(tower, head=lambda x, tapped: merger(x)),
        final=weights.affine(kimivl.LAST_NORM),
        times=weights.place(times),
    )


def time_table(frames: int, width: int) -> Tensor:
    """float32 [1 + frames, width]: zeros, then transformers' compute_pos_embed."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(frames, dtype=torch.float32)[:, None] * frequencies
    return F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, 0, 1, 0))


class KimiK25Tower(PackedTower):
    """A packed tower with inputs of its own for packs with videos."""

    def __init__(
        self, spec: ModelSpec, parts: KimiK25Parts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.tower, attention, blocks)
        self.final, self.times = parts.final, parts.times

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        patches, group = tokens * self.sizing.merge_size**2, len(self.times) - 1
        return {
            "times": ((patches,), torch.int32),
            "pooled": ((patches, group), torch.int32),
            "pooled_weights": ((patches, group), torch.float32),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        values = super().metadata(path, plans, tokens, segments)
        if not any(plan.frames for plan in plans):
            return values
        times, pooled, weights, start = [], [], [], 0
        for plan in plans:
            picture = plan.grid_thw[1] * plan.grid_thw[2]
            for length in segments_of(plan):
                count = length // picture
                times.append(torch.arange(count).repeat_interleave(picture) + (count > 1))
                places = torch.arange(start, start + length).view(count, picture).T
                spare = (0, len(self.times) - 1 - count)
                pooled.append(F.pad(places, spare))
                weights.append(F.pad(torch.full((picture, count), 1 / count), spare))
                start += length
        return values | {
            "times": torch.cat(times).int(),
            "pooled": torch.cat(pooled).int(),
            "pooled_weights": torch.cat(weights),
        }

    def begin(self, values: Values) -> Tensor:
        x = super().begin(values)
        return x + F.embedding(values["times"], self.times) if "times" in values else x

    def end(self, x: Tensor, tapped: Sequence[Tensor], values: Values) -> Tensor:
        """With videos, the pooled rows of all groups become contiguous."""
        x = layer_norm(x, self.final, kimivl.EPSILON)
        if "pooled" in values:
            x = weighted(x, values["pooled"], values["pooled_weights"]).to(x.dtype)
        return self.parts.head(x, tapped)
