"""Packed towers: images of any size share one sequence, and each is an attention segment.

A family supplies its `PackedParts`, which are mostly weights. Shapes are static; the layout of a
pack is data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Affine, BlocksForm, BlockWeights, Style
from actors.models.layers.patches import (
    AntialiasedPositions,
    Positions,
    centred,
    places,
    rotary_tables,
)
from actors.models.tower import Tower
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import rope_theta
from actors.spec.sizing import BlockSizing
from actors.spec.slices import SlicedSizing
from actors.types import ItemPlan

CACHED_GRIDS = 256


@dataclass(frozen=True, slots=True)
class PackedParts:
    """What differs between families, on the tower's device."""

    embedding: Affine
    """Takes `uint8 - 128`; see patches.folded_embedding."""
    layers: Sequence[BlockWeights]
    style: Style
    head: Callable[[Tensor, Sequence[Tensor]], Tensor]
    """From the last hidden state [patches, width] and those of `taps` to [tokens, width of a
    row]."""
    later: Tensor | None = None
    """[width, bytes of a patch]: embeds the difference, in byte values, between the second frame
    of a temporal group and the first. None: the tower takes no videos."""
    taps: Sequence[int] = ()
    """Layers whose output the head needs, besides that of the last."""
    positions: Positions | AntialiasedPositions | None = None
    stem: Callable[[Tensor], Tensor] | None = None
    """Applied to embedded patches before positions are added."""
    rotary: bool = True
    """False: the tower has no rotary embedding, and no input `places`."""


class PackedTower(Tower):
    """One path; one attention segment per image, or per temporal group of a video."""

    def __init__(
        self, spec: ModelSpec, parts: PackedParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        self.spec = spec
        assert isinstance(spec.sizing, BlockSizing)
        self.sizing = spec.sizing
        self.parts = replace(parts, layers=())  # the blocks hold them, perhaps in another form
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        width, device = len(parts.embedding.weight), parts.embedding.weight.device
        own = spec.own_sizing or self.sizing
        assert isinstance(own, BlockSizing)
        longest = max(self.sizing.longest_side_patches(), own.longest_side_patches())
        if spec.video:
            longest = max(longest, spec.video.longest_side_patches())
        self.theta = rope_theta(spec.vision)
        cos, sin = rotary_tables(longest, width // parts.style.heads, self.theta)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self.blocks = blocks(parts.layers, parts.style, attention, parts.taps)
        self.grid = lru_cache(CACHED_GRIDS)(self.rows_of_grid)

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        patches = tokens * self.sizing.merge_size**2
        shapes: Shapes = {
            "patches": ((patches, 3 * self.sizing.patch_size**2), torch.uint8),
            **self.attention.inputs(patches, segments),
        }
        if self.parts.rotary:
            shapes["places"] = ((patches, 2), torch.int32)
        return shapes | (self.parts.positions.inputs(patches) if self.parts.positions else {})

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        if self.parts.later is None or not self.spec.video:
            return {}
        patches = tokens * self.sizing.merge_size**2
        return {"later": ((patches, 3 * self.sizing.patch_size**2), torch.uint8)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        lengths = list(chain.from_iterable(map(segments_of, plans)))
        grids = [
            self.kept(plan, self.grid(rows, columns))
            for plan in plans
            for rows, columns in grids_of([plan])
        ]
        return {
            **{name: torch.cat([grid[name] for grid in grids]) for name in grids[0]},
            **self.attention.metadata(lengths, tokens * self.sizing.merge_size**2, segments),
        }

    def forward(self, path: str, values: Values) -> Tensor:
        x = self.begin(values)
        cos, sin = None, None
        if self.parts.rotary:
            cos, sin = (F.embedding(values["places"], t).flatten(1) for t in (self.cos, self.sin))
        x, tapped = self.blocks(x, cos, sin, values)  # frees the embedding's memory
        return self.end(x, tapped, values)

    def begin(self, values: Values) -> Tensor:
        """The input of the blocks: [patches, width]."""
        x = self.embedded(values)
        if self.parts.stem:
            x = self.parts.stem(x)
        return self.parts.positions.add_to(x, values) if self.parts.positions else x

    def end(self, x: Tensor, tapped: Sequence[Tensor], values: Values) -> Tensor:
        """From the output of the blocks to [tokens, width of a row]."""
        return self.parts.head(x, tapped)

    def embedded(self, values: Values) -> Tensor:
        """Returns [patches, width]. A separate method, so that the centred bytes are freed when it
        returns."""
        first = centred(values["patches"], self.dtype)
        x = F.linear(first, self.parts.embedding.weight, self.parts.embedding.bias)
        if self.parts.later is None or "later" not in values:
            return x
        # Bytes and their differences are exact in bfloat16. The differences are zero for an image.
        later = centred(values["later"], self.dtype).sub_(first)
        return torch.addmm(x, later, self.parts.later.t())

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        return outputs[0][: sum(plan.tokens for plan in plans)]

    def kept(self, plan: ItemPlan, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of an image's grid, without those of the patches that were pruned."""
        if not plan.blocks:
            return values
        rows, merged = torch.from_numpy(plan.kept_rows), self.sizing.merge_size**2
        return {
            name: value.unflatten(0, (-1, merged))[rows].flatten(0, 1)
            for name, value in values.items()
        }

    def rows_of_grid(self, rows: int, columns: int) -> dict[str, Tensor]:
        """The inputs that have a row per patch, for one grid."""
        on_grid = places(rows, columns, self.sizing.merge_size)
        values = {"places": on_grid.int()} if self.parts.rotary else {}
        if positions := self.parts.positions:
            values |= positions.inputs_of(on_grid, rows, columns)
        return values


class SlicedTower(PackedTower):
    """A packed tower whose images have several grids, each an attention segment."""

    def __init__(
        self, spec: ModelSpec, parts: PackedParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts, attention, blocks)
        assert isinstance(spec.sizing, SlicedSizing)
        self.slices = spec.sizing

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        return super().inputs(path, tokens, self.most_pictures(tokens, segments))

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        pictures, patches = self.most_pictures(tokens, segments), tokens * self.sizing.merge_size**2
        shown = self.pictures(plans)
        grids = [self.grid(rows, columns) for rows, columns in shown]
        lengths = [rows * columns for rows, columns in shown]
        return {
            **{name: torch.cat([grid[name] for grid in grids]) for name in grids[0]},
            **self.attention.metadata(lengths, patches, pictures),
        }

    def pictures(self, plans: Sequence[ItemPlan]) -> list[tuple[int, int]]:
        """Rows and columns of each picture of each item, in patches."""
        return list(chain.from_iterable(map(self.slices.pictures, plans)))

    def most_pictures(self, tokens: int, segments: int) -> int:
        """An upper bound on the attention segments. `segments` counts images, not their slices."""
        return segments + tokens // self.slices.least_tokens


def grids_of(plans: Sequence[ItemPlan]) -> list[tuple[int, int]]:
    """Rows and columns, in patches, of each picture of each item. A pruned image has fewer patches
    than its grid."""
    return list(
        chain.from_iterable(
            [(rows, columns)] * max(1, plan.patches // (rows * columns))
            for plan in plans
            for _, rows, columns in [plan.grid_thw]
        )
    )


def segments_of(plan: ItemPlan) -> list[int]:
    """The number of patches in each attention segment."""
    starts = range(0, plan.patches, plan.group_patches)
    return [min(plan.group_patches, plan.patches - start) for start in starts]
