"""The tower that the packed families share: static shapes, every layout is data.

A family gives its parts (`Parts`), most of which are weights; what happens to a pack is here. Knows
no family, no graphs, no budgets and not where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import CheckpointError
from actors.kernels.attention import Attention, Shapes, Values
from actors.models import packed
from actors.models.layers.block import Affine, BlocksForm, BlockWeights, Style
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import BlockSizing
from actors.types import ItemPlan

CACHED_GRIDS = 256


@dataclass(frozen=True, slots=True)
class Positions:
    """Learned positions, resampled to each grid and added to the embedded patches."""

    table: Tensor
    """[side x side, width]."""
    resample: packed.PositionTaps
    taps: int
    """Entries of the table that one position reads."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What differs between the towers of the packed families, on the tower's device."""

    embedding: Affine
    """For `uint8 - 128`: see packed.folded_embedding."""
    later: Tensor | None
    """[width, bytes of a patch], for what changes from the first frame of a temporal group to the
    second, in uint8; None: the tower takes no videos."""
    layers: Sequence[BlockWeights]
    style: Style
    head: Callable[[Tensor, Sequence[Tensor]], Tensor]
    """The last hidden state [patches, width] and the tapped ones, to [tokens, width of a row]."""
    taps: Sequence[int] = ()
    positions: Positions | None = None
    stem: Callable[[Tensor], Tensor] | None = None
    """What happens to embedded patches before positions are added."""
    theta: float = 10000.0


class PackedTower:
    """See Tower. One path; one attention segment an image, or a temporal group of a video."""

    def __init__(
        self, spec: ModelSpec, parts: Parts, attention: Attention, blocks: BlocksForm
    ) -> None:
        if not isinstance(spec.sizing, BlockSizing):
            raise CheckpointError(f"model.id {spec.id!r}: this tower needs a sizing in blocks")
        self.spec = spec
        self.sizing = spec.sizing
        self.parts = replace(parts, layers=())  # the blocks have them, perhaps in another form
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        width, device = len(parts.embedding.weight), parts.embedding.weight.device
        longest = self.sizing.longest_side_patches()
        if spec.video:
            longest = max(longest, spec.video.longest_side_patches())
        cos, sin = packed.rotary_tables(longest, width // parts.style.heads, parts.theta)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self.blocks = blocks(parts.layers, parts.style, attention, parts.taps)
        self.grid = lru_cache(CACHED_GRIDS)(self.rows_of_grid)

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """See Tower."""
        patches = tokens * self.sizing.merge_size**2
        shapes: Shapes = {
            "patches": ((patches, 3 * self.sizing.patch_size**2), torch.uint8),
            "places": ((patches, 2), torch.int32),
            **self.attention.inputs(patches, segments),
        }
        if positions := self.parts.positions:
            shapes["taps"] = ((patches, positions.taps), torch.int32)
            shapes["tap_weights"] = ((patches, positions.taps), torch.float32)
        return shapes

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        """See VideoTower."""
        if self.parts.later is None or not self.spec.video:
            return {}
        patches = tokens * self.sizing.merge_size**2
        return {"later": ((patches, 3 * self.sizing.patch_size**2), torch.uint8)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """See Tower."""
        lengths = list(chain.from_iterable(map(segments_of, plans)))
        grids = [self.grid(rows, columns) for rows, columns in grids_of(plans)]
        return {
            **{name: torch.cat([grid[name] for grid in grids]) for name in grids[0]},
            **self.attention.metadata(lengths, tokens * self.sizing.merge_size**2, segments),
        }

    def forward(self, path: str, values: Values) -> Tensor:
        """See Tower. Rows beyond the last segment: finite, otherwise undefined."""
        x = self.begin(values)
        cos, sin = (F.embedding(values["places"], t).flatten(1) for t in (self.cos, self.sin))
        x, tapped = self.blocks(x, cos, sin, values)  # lets the embedding's memory go
        return self.end(x, tapped, values)

    def begin(self, values: Values) -> Tensor:
        """[patches, width], what the blocks are given."""
        x = self.embedded(values)
        if self.parts.stem:
            x = self.parts.stem(x)
        return placed(x, self.parts.positions.table, values) if self.parts.positions else x

    def end(self, x: Tensor, tapped: Sequence[Tensor], values: Values) -> Tensor:
        """[tokens, width of a row], of what the blocks give."""
        return self.parts.head(x, tapped)

    def embedded(self, values: Values) -> Tensor:
        """[patches, width]. What is made of the bytes on the way goes before the blocks come."""
        first = packed.centred(values["patches"], self.dtype)
        x = F.linear(first, self.parts.embedding.weight, self.parts.embedding.bias)
        if self.parts.later is None or "later" not in values:
            return x
        # Bytes and their differences are exact in bfloat16; of an image they are zero.
        later = packed.centred(values["later"], self.dtype).sub_(first)
        return torch.addmm(x, later, self.parts.later.t())

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """See Tower."""
        return outputs[0][: sum(plan.tokens for plan in plans)]

    def rows_of_grid(self, rows: int, columns: int) -> dict[str, Tensor]:
        """The inputs that have a row a patch, for one grid."""
        places = packed.places(rows, columns, self.sizing.merge_size)
        values = {"places": places.int()}
        if positions := self.parts.positions:
            side = int(len(positions.table) ** 0.5)
            taps, weights = positions.resample(places, rows, columns, side)
            values |= {"taps": taps.int(), "tap_weights": weights}
        return values


def grids_of(plans: Sequence[ItemPlan]) -> list[tuple[int, int]]:
    """Rows and columns of each picture of each item."""
    return list(
        chain.from_iterable(
            [(rows, columns)] * (plan.patches // (rows * columns))
            for plan in plans
            for _, rows, columns in [plan.grid_thw]
        )
    )


def segments_of(plan: ItemPlan) -> list[int]:
    """Patches of each attention segment."""
    starts = range(0, plan.patches, plan.group_patches)
    return [min(plan.group_patches, plan.patches - start) for start in starts]


def placed(x: Tensor, table: Tensor, values: Values) -> Tensor:
    """x plus the learned positions, resampled to each grid; may write over x."""
    taps, weights = values["taps"], values["tap_weights"]
    if x.is_cuda:
        from actors.kernels.triton.elementwise import add_positions_  # Triton needs CUDA

        add_positions_(x, table, taps, weights)
        return x
    return x + weighted(table, taps, weights).to(x.dtype)


def weighted(table: Tensor, taps: Tensor, weights: Tensor) -> Tensor:
    """Sums [rows, width] of a table's rows `taps` [rows, n] by float32 `weights` [rows, n]."""
    total = F.embedding(taps[:, 0], table) * weights[:, 0, None]
    for tap in range(1, taps.shape[1]):
        total = total + F.embedding(taps[:, tap], table) * weights[:, tap, None]
    return total
