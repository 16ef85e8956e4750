"""Towers whose attention segments have a fixed length: tiles, or views on two paths."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import ConfigError
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Affine, BlocksForm, BlockWeights, Style, layer_norm
from actors.models.layers.patches import centred, places
from actors.models.tower import Tower
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS, ViewSizing
from actors.spec.tiles import TileSizing
from actors.types import ItemPlan


@dataclass(frozen=True, slots=True)
class TileParts:
    """What differs between families, on the tower's device."""

    embedding: Tensor
    """[width, 3 x patch x patch], for `uint8 - 128`; its bias is part of `start`."""
    start: Tensor
    """[class token + patches of a tile, width]: the class token, if there is one; then what is
    added to the embedded patches."""
    layers: Sequence[BlockWeights]
    style: Style
    head: Callable[[Tensor], Tensor]
    """From [tokens, merge_size ** 2 x width], the concatenated patches of each token, to rows."""
    stem: Callable[[Tensor], Tensor] | None = None
    """Applied before the blocks."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos, sin: float32 [rows of `start`, head size / 2]."""
    taps: Sequence[int] = ()
    """Layers whose outputs the head gets, too, concatenated before the output of the last."""


def class_head(spec: ModelSpec, last: Affine, epsilon: float) -> Callable[[Tensor], Tensor]:
    """The last norm of a tile's rows, or of its class token alone if the model gives vectors."""
    assert isinstance(spec.sizing, TileSizing)
    rows = spec.sizing.tile_tokens

    def head(x: Tensor) -> Tensor:
        if spec.vector:
            x = x.view(-1, rows, x.shape[-1])[:, 0]
        return layer_norm(x, last, epsilon)

    return head


class TileTower(Tower):
    """One path. Every tile is a segment, so an item's metadata is its number of tiles.

    The patches of a tile follow its class token in merge-block order, whatever their order in the
    model: attention does not depend on the order, and the pixel shuffle becomes a view.
    """

    def __init__(
        self, spec: ModelSpec, parts: TileParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        self.spec = spec
        assert isinstance(spec.sizing, TileSizing)
        self.sizing = spec.sizing
        self.parts = replace(parts, layers=())  # the blocks hold them, perhaps in another form
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.blocks = blocks(parts.layers, parts.style, attention, parts.taps)

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """Raises ConfigError for a budget that is not whole tiles."""
        tiles, rest = divmod(tokens, self.sizing.tile_tokens)
        if rest:
            raise ConfigError(
                f"graphs.token_budgets: {tokens} is not a multiple of {self.sizing.tile_tokens}, "
                f"the tokens per tile of {self.spec.id}"
            )
        patches = tiles * self.sizing.side_patches**2
        return {
            "patches": ((patches, 3 * self.sizing.patch_size**2), torch.uint8),
            **self.attention.inputs(tiles * len(self.parts.start), tiles),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        rows, tile_tokens = len(self.parts.start), self.sizing.tile_tokens
        used = sum(plan.path_tokens[0] for plan in plans) // tile_tokens
        tiles = tokens // tile_tokens
        return self.attention.metadata([rows] * used, tiles * rows, tiles)

    def forward(self, path: str, values: Values) -> Tensor:
        (rows, width), patches = self.parts.start.shape, self.sizing.side_patches**2
        x = F.linear(centred(values["patches"], self.dtype), self.parts.embedding)
        x = F.pad(x.view(-1, patches, width), (0, 0, rows - patches, 0)) + self.parts.start
        if self.parts.stem:
            x = self.parts.stem(x)
        cos, sin = None, None
        if self.parts.rotary:
            cos, sin = (table.repeat(len(x), 1) for table in self.parts.rotary)
        x, tapped = self.blocks(x.flatten(0, 1), cos, sin, values)
        if tapped:
            x = torch.cat([*tapped, x], 1)
        return self.end(x.view(-1, rows, x.shape[1])[:, rows - self.kept :], values)

    @property
    def kept(self) -> int:
        """How many rows of a tile give tokens. They are the last ones."""
        return self.sizing.tile_tokens * self.sizing.merge_size**2

    def end(self, x: Tensor, values: Values) -> Tensor:
        """From the output of the blocks [tiles, patches, width] to [tokens, width of a row]."""
        return self.parts.head(x.reshape(-1, x.shape[2] * self.sizing.merge_size**2))

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        return outputs[0][: sum(plan.tokens for plan in plans)]


def merge_order(raster: Tensor, merge: int) -> Tensor:
    """Reorders a table with one row per patch of a tile from raster order to merge-block order."""
    side = math.isqrt(len(raster))
    row, column = places(side, side, merge).unbind(1)
    return raster[row * side + column]


class ViewTower(Tower):
    """One path encodes the whole image as a view, the other one each crop.

    Every view is a segment with its patches in raster order, so an item's metadata is its number of
    views. Both paths use the same weights; each has its own size of views.
    """

    def __init__(self, spec: ModelSpec, attention: Attention) -> None:
        self.spec = spec
        assert isinstance(spec.sizing, ViewSizing)
        self.views = spec.sizing
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    @abstractmethod
    def view_rows(self, path: str) -> int:
        """Rows of a view in the blocks: its patches or tokens, and its class tokens."""

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """A budget holds as many whole views as fit."""
        views, patches = self.count(path, tokens), self.views.side_patches[PATHS.index(path)] ** 2
        return {
            "patches": ((views * patches, 3 * self.views.patch_size**2), torch.uint8),
            **self.attention.inputs(views * self.view_rows(path), views),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        views, rows = self.count(path, tokens), self.view_rows(path)
        used = self.count(path, sum(plan.path_tokens[PATHS.index(path)] for plan in plans))
        return self.attention.metadata([rows] * used, views * rows, views)

    def count(self, path: str, tokens: int) -> int:
        """How many whole views fit into this many tokens."""
        return tokens // self.views.view_tokens[PATHS.index(path)]
