"""The tower that the tile families share: every tile is one attention segment of fixed length.

A family gives its parts (`TileParts`), most of which are weights. The patches of a tile lie in
merge-block order and follow its class token, wherever the model has them: attention does not ask,
and the pixel shuffle is a view. Knows no family, no graphs and not where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import CheckpointError, ConfigError
from actors.kernels.attention import Attention, Shapes, Values
from actors.models import packed
from actors.models.layers.block import BlocksForm, BlockWeights, Style
from actors.spec.model_spec import ModelSpec
from actors.spec.tiling import TileSizing, with_overview
from actors.types import ItemPlan, Size


@dataclass(frozen=True, slots=True)
class TileParts:
    """What differs between the towers of the tile families, on the tower's device."""

    embedding: Tensor
    """[width, 3 x patch x patch], for `uint8 - 128`; its bias is part of `start`."""
    start: Tensor
    """[class token + patches of a tile, width]: the class token, if there is one; what is added
    to the embedded patches."""
    layers: Sequence[BlockWeights]
    style: Style
    head: Callable[[Tensor], Tensor]
    """[tokens, merge_size ** 2 x width], a token's patches side by side, to [tokens, out width]."""
    stem: Callable[[Tensor], Tensor] | None = None
    """What happens to the rows before the blocks."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos, sin: float32 [rows of `start`, head size / 2]."""


class TileTower:
    """See Tower. One path; no item needs more metadata than the number of its tiles."""

    def __init__(
        self, spec: ModelSpec, parts: TileParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        self.spec = spec
        self.sizing = tile_sizing(spec)
        self.parts = replace(parts, layers=())  # the blocks have them, perhaps in another form
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.blocks = blocks(parts.layers, parts.style, attention, ())

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        """See VideoTower."""
        return {}

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """See Tower. Raises ConfigError for a budget that is not whole tiles."""
        tiles, rest = divmod(tokens, self.sizing.tile_tokens)
        if rest:
            raise ConfigError(
                f"graphs.token_budgets: {tokens} is no multiple of {self.sizing.tile_tokens}, "
                f"the tokens of a tile of {self.spec.id}"
            )
        patches = tiles * self.sizing.side_patches**2
        return {
            "patches": ((patches, 3 * self.sizing.patch_size**2), torch.uint8),
            **self.attention.inputs(tiles * len(self.parts.start), tiles),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """See Tower."""
        rows, tile_tokens = len(self.parts.start), self.sizing.tile_tokens
        used = sum(plan.path_tokens[0] for plan in plans) // tile_tokens
        tiles = tokens // tile_tokens
        return self.attention.metadata([rows] * used, tiles * rows, tiles)

    def forward(self, path: str, values: Values) -> Tensor:
        """See Tower. Rows beyond the last segment: finite, otherwise undefined."""
        (rows, width), patches = self.parts.start.shape, self.sizing.side_patches**2
        x = F.linear(packed.centred(values["patches"], self.dtype), self.parts.embedding)
        x = F.pad(x.view(-1, patches, width), (0, 0, rows - patches, 0)) + self.parts.start
        if self.parts.stem:
            x = self.parts.stem(x)
        cos, sin = None, None
        if self.parts.rotary:
            cos, sin = (table.repeat(len(x), 1) for table in self.parts.rotary)
        x, _ = self.blocks(x.flatten(0, 1), cos, sin, values)
        kept = self.sizing.tile_tokens * self.sizing.merge_size**2
        x = x.view(-1, rows, width)[:, rows - kept :]
        return self.parts.head(x.reshape(-1, width * self.sizing.merge_size**2))

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """See Tower."""
        return outputs[0][: sum(plan.tokens for plan in plans)]


def patchify(image: Tensor, sizing: TileSizing, mode: packed.Resample) -> Tensor:
    """uint8 [3, height, width] to uint8 [patches of all tiles, 3 x patch x patch]."""
    size = Size(width=image.shape[2], height=image.shape[1])
    rows, columns = sizing.layout(size)
    left, above = sizing.corner(size)
    picture = packed.resize(image, sizing.resized(size), mode)[:, above:, left:]
    right = columns * sizing.tile_pixels - picture.shape[2]
    below = rows * sizing.tile_pixels - picture.shape[1]
    patches = cut(packed.padded(picture, right, below), sizing)
    if with_overview(rows * columns) > 1:
        overview = packed.resize(image, Size(sizing.tile_pixels, sizing.tile_pixels), mode)
        patches = torch.cat([patches, cut(overview, sizing)])
    return patches


def cut(canvas: Tensor, sizing: TileSizing) -> Tensor:
    """uint8 [3, height, width] of whole tiles to [patches, 3 x patch x patch], tile after tile."""
    patch, merge = sizing.patch_size, sizing.merge_size
    side = (sizing.side_patches // merge, merge, patch)
    parts = canvas.unflatten(2, (-1, *side)).unflatten(1, (-1, *side))
    # Tile, block, patch of a block: each a row, then a column; then channel, row, column of pixels.
    return packed.in_one_piece(parts.permute(1, 5, 2, 6, 3, 7, 0, 4, 8)).view(-1, 3 * patch**2)


def merge_order(raster: Tensor, sizing: TileSizing) -> Tensor:
    """A table with a row for each patch of a tile, row by row, in merge-block order."""
    places = packed.places(sizing.side_patches, sizing.side_patches, sizing.merge_size)
    return raster[places[:, 0] * sizing.side_patches + places[:, 1]]


def tile_sizing(spec: ModelSpec) -> TileSizing:
    """The spec's. Raises CheckpointError if it is of another kind."""
    if not isinstance(spec.sizing, TileSizing):
        raise CheckpointError(f"model.id {spec.id!r}: this tower needs a sizing in tiles")
    return spec.sizing
