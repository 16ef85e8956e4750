"""The vision tower of Qwen2.5-VL: RMS norms, SwiGLU, and windows in all but a few layers.

Patches arrive window by window (WindowedSizing), so that segments are contiguous in both kinds of
layers; rows return to raster order at the very end. Computes what transformers.models.qwen2_5_vl
computes in Qwen2_5_VisionTransformerPretrainedModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import CheckpointError
from actors.families.qwen2_vl import tower as qwen2vl
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import WINDOW, BlocksForm, Style
from actors.models.layers.weights import BlockNames, Dimensions, Expected, Weights
from actors.models.packed import CACHED_GRIDS, PackedParts, PackedTower, grids_of
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import WindowedSizing
from actors.types import ItemPlan

NAMES = BlockNames(
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    unbiased=frozenset({"norm1", "norm2"}),
)


def family(spec: ModelSpec) -> Family[PackedParts]:
    return Family(qwen2vl.PREFIXES, expected, Dimensions.read, parts, WindowedTower)


def expected(spec: ModelSpec) -> Expected:
    return qwen2vl.shapes(spec, Dimensions.read(spec), NAMES, norm_bias=False)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower = Dimensions.read(spec)
    windowed = frozenset(range(tower.depth)) - set(spec.vision["fullatt_block_indexes"])
    style = Style(tower.heads, "swiglu", norm="rms", windowed=windowed)
    return qwen2vl.packed_parts(spec, weights, tower.depth, NAMES, style)


class WindowedTower(PackedTower):
    """A packed tower whose patches are ordered window by window within each grid."""

    def __init__(
        self, spec: ModelSpec, parts: PackedParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts, attention, blocks)
        if not isinstance(spec.sizing, WindowedSizing):
            raise CheckpointError(f"model.id {spec.id!r}: this tower needs a sizing in windows")
        self.window = spec.sizing.window
        self.windows = lru_cache(CACHED_GRIDS)(spec.sizing.order)

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        patches = tokens * self.sizing.merge_size**2
        windows = self.attention.inputs(patches, self.most_windows(tokens, segments))
        return {
            **super().inputs(path, tokens, segments),
            **{WINDOW + name: shape for name, shape in windows.items()},
            "rows": ((tokens,), torch.int32),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        unit = self.sizing.merge_size**2
        orders, sizes = zip(*(self.windows(*grid) for grid in grids_of(plans)), strict=True)
        starts = [0, *accumulate(len(order) for order in orders[:-1])]
        rows = torch.cat(
            [
                torch.from_numpy(order.argsort() + start)
                for order, start in zip(orders, starts, strict=True)
            ]
        )
        lengths = [unit * size for each in sizes for size in each]
        windows = self.attention.metadata(
            lengths, tokens * unit, self.most_windows(tokens, segments)
        )
        return {
            **super().metadata(path, plans, tokens, segments),
            **{WINDOW + name: value for name, value in windows.items()},
            # Padded: what an earlier, larger pack left there may exceed this budget.
            "rows": F.pad(rows, (0, tokens - len(rows))).int(),
        }

    def forward(self, path: str, values: Values) -> Tensor:
        return super().forward(path, values).index_select(0, values["rows"])

    def rows_of_grid(self, rows: int, columns: int) -> dict[str, Tensor]:
        """As PackedTower, window by window."""
        order = torch.from_numpy(self.windows(rows, columns)[0])
        return {
            name: value.unflatten(0, (len(order), -1))[order].flatten(0, 1)
            for name, value in super().rows_of_grid(rows, columns).items()
        }

    def most_windows(self, tokens: int, segments: int) -> int:
        """A bound for grids with this many tokens in all; a narrow grid wastes up to a window's
        side."""
        return tokens // self.window + segments
