"""The vision tower of Qwen2.5-VL: RMS norms, SwiGLU, and windows in all but a few layers.

Patches of a window follow each other from `patchify` on, so that both kinds of layers see their
segments in one piece; the rows go back to their order at the very end. Computes what
transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel computes
for images, under the checkpoint's own names. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models import packed
from actors.models.layers.block import WINDOW, BlocksForm, Style
from actors.models.packed_tower import CACHED_GRIDS, PackedTower, Parts, grids_of
from actors.models.packed_weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

NAMES = BlockNames(
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    unbiased=frozenset({"norm1", "norm2"}),
)


def dimensions(spec: ModelSpec) -> Dimensions:
    """Raises CheckpointError for a key that is missing."""
    return Dimensions.read(spec)


def expected(spec: ModelSpec) -> Expected:
    """Name and shape of every tensor of the tower, without the checkpoint's prefix."""
    tower = dimensions(spec)
    patch = (3, int(spec.vision["temporal_patch_size"]), tower.patch_size, tower.patch_size)
    return {
        **affine("patch_embed.proj", (tower.width, *patch), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("merger.ln_q", (tower.width,), bias=False),
        **affine("merger.mlp.0", (tower.merged, tower.merged)),
        **affine("merger.mlp.2", (spec.width, tower.merged)),
    }


def parts(spec: ModelSpec, weights: Weights) -> Parts:
    """The tower's, from tensors as `expected` names them."""
    tower = dimensions(spec)
    merger = packed.Merger(
        norm=weights.affine("merger.ln_q"),
        up=weights.affine("merger.mlp.0"),
        down=weights.affine("merger.mlp.2"),
        kind="rms",
    )

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        return merger(x)

    windowed = frozenset(range(tower.depth)) - set(spec.vision["fullatt_block_indexes"])
    return Parts(
        embedding=weights.embedding("patch_embed.proj", spec.mean, spec.std),
        later=weights.later_embedding("patch_embed.proj", spec.std),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "swiglu", norm="rms", windowed=windowed),
        head=head,
    )


class WindowedTower(PackedTower):
    """A packed tower whose patches lie window after window within each grid."""

    def __init__(
        self, spec: ModelSpec, parts: Parts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts, attention, blocks)
        self.windows = lru_cache(CACHED_GRIDS)(partial(windows_of_grid, spec))

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """See Tower."""
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
        """See Tower."""
        unit = self.sizing.merge_size**2
        orders, sizes = zip(*(self.windows(*grid) for grid in grids_of(plans)), strict=True)
        starts = [0, *accumulate(len(order) for order in orders[:-1])]
        rows = torch.cat(
            [order.argsort() + start for order, start in zip(orders, starts, strict=True)]
        )
        lengths = [unit * size for each in sizes for size in each]
        windows = self.attention.metadata(
            lengths, tokens * unit, self.most_windows(tokens, segments)
        )
        return {
            **super().metadata(path, plans, tokens, segments),
            **{WINDOW + name: value for name, value in windows.items()},
            # Padded: what an earlier and larger pack left there may lie beyond this budget.
            "rows": F.pad(rows, (0, tokens - len(rows))).int(),
        }

    def forward(self, path: str, values: Values) -> Tensor:
        """See Tower."""
        return super().forward(path, values).index_select(0, values["rows"])

    def rows_of_grid(self, rows: int, columns: int) -> dict[str, Tensor]:
        """See PackedTower; window after window."""
        order, _ = self.windows(rows, columns)
        return {
            name: value.unflatten(0, (len(order), -1))[order].flatten(0, 1)
            for name, value in super().rows_of_grid(rows, columns).items()
        }

    def most_windows(self, tokens: int, segments: int) -> int:
        """Of grids with so many tokens in all: narrow ones waste most, a window's side of each."""
        return tokens // window_side(self.spec) + segments


def window_side(spec: ModelSpec) -> int:
    """Tokens of a window's side."""
    patch, merge = int(spec.vision["patch_size"]), int(spec.vision["spatial_merge_size"])
    return int(spec.vision["window_size"]) // (patch * merge)


def windows_of_grid(spec: ModelSpec, rows: int, columns: int) -> tuple[Tensor, list[int]]:
    """The tokens of a grid of patches in their order here, and how many each window has."""
    merge = int(spec.vision["spatial_merge_size"])
    return packed.window_order(rows // merge, columns // merge, window_side(spec))
