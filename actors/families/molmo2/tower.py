"""The vision tower of Molmo 2: SigLIP, and a pooling of windows of patches by attention.

Computes what transformers.models.molmo2 computes in get_image_features and get_video_features. An
image gives the rows of the overview, then those of the canvas, whose windows reach over tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Affine, BlocksForm, Style
from actors.models.layers.patches import folded_embedding
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.packed import CACHED_GRIDS
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.tiles import Layout, OverlappingTiles
from actors.spec.video import PooledWindows
from actors.types import ItemPlan

PREFIXES = ("vision_backbone.image_vit.", "vision_backbone.")

NAMES = BlockNames(
    block="transformer.resblocks",
    norm1="attention_norm",
    qkv=("attention.wq", "attention.wk", "attention.wv"),
    proj="attention.wo",
    norm2="ffn_norm",
    up=("feed_forward.w1",),
    down="feed_forward.w2",
)

PATCHES, POSITIONS = "patch_embedding", "positional_embedding"
POOLING, PROJECTOR = "image_pooling_2d", "image_projector"

ADAPTER_HEADS, ADAPTER_MLP = "adapter_num_attention_heads", "adapter_intermediate_size"
"""Keys of `vision`, from `adapter_config`."""

WINDOWS = "windows"
"""The input that says which patches give a token: int32 [tokens, patches of a window], each the
place of a patch in the pack, counted from 1. Smaller windows are padded with 0."""
ABSENT = -30000.0
"""What is added to the score of that padding."""


@dataclass(frozen=True, slots=True)
class MolmoParts:
    """The parts of the tower, on its device."""

    tiles: TileParts
    query: Affine
    inner: Affine
    """Keys, then values."""
    outer: Affine
    up: Affine
    """Gate, then up."""
    down: Affine


def family(spec: ModelSpec) -> Family[MolmoParts]:
    tower = Dimensions.read(spec, depth="used_layers")
    seen, mlp_width = len(spec.vision["features"]) * tower.width, spec.vision[ADAPTER_MLP]
    assert isinstance(spec.sizing, OverlappingTiles)
    expected = {
        **affine(PATCHES, (tower.width, 3 * tower.patch_size**2)),
        POSITIONS: (spec.sizing.side_patches**2, tower.width),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(f"{POOLING}.wo", (tower.width, tower.width)),
    }
    for name in ("wq", "wk", "wv"):
        expected |= affine(f"{POOLING}.{name}", (tower.width, seen))
    for name, shape in (
        ("w1", (mlp_width, tower.width)),
        ("w2", (spec.width, mlp_width)),
        ("w3", (mlp_width, tower.width)),
    ):
        expected |= affine(f"{PROJECTOR}.{name}", shape, bias=False)
    layers = int(spec.vision["num_hidden_layers"])
    later = expected_blocks(NAMES, layers, tower.width, tower.mlp_width).keys()
    return Family(PREFIXES, expected, tower.head_size, parts, MolmoTower, frozenset(later))


def parts(spec: ModelSpec, weights: Weights) -> MolmoParts:
    tower = Dimensions.read(spec, depth="used_layers")
    patch, named = tower.patch_size, weights.tensors
    # Its patches are stored pixel by pixel, ours channel by channel.
    pixels = named[f"{PATCHES}.weight"].unflatten(1, (patch, patch, 3)).permute(0, 3, 1, 2)
    embedding = folded_embedding(pixels[:, :, None], named[f"{PATCHES}.bias"], spec.mean, spec.std)
    tiles = TileParts(
        embedding=weights.place(embedding.weight),
        start=weights.place(named[POSITIONS].float() + embedding.bias),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu_tanh", float(spec.vision["layer_norm_eps"])),
        head=lambda x: x,
        taps=spec.vision["taps"],
    )
    return MolmoParts(
        tiles=tiles,
        query=weights.affine(f"{POOLING}.wq"),
        inner=weights.affine(f"{POOLING}.wk", f"{POOLING}.wv"),
        outer=weights.affine(f"{POOLING}.wo"),
        up=weights.affine(f"{PROJECTOR}.w1", f"{PROJECTOR}.w3"),
        down=weights.affine(f"{PROJECTOR}.w2"),
    )


class MolmoTower(TileTower):
    """A tile tower that pools windows of patches. There are fewer rows than the `tile_tokens` of
    all tiles, because tiles overlap and the windows of frames are larger."""

    def __init__(
        self, spec: ModelSpec, parts: MolmoParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.tiles, attention, blocks)
        assert isinstance(spec.sizing, OverlappingTiles)
        assert isinstance(spec.video, PooledWindows)
        self.tiles, self.frames, self.pooling = spec.sizing, spec.video, parts
        self.heads = int(spec.vision[ADAPTER_HEADS])
        self.features: Sequence[int] = spec.vision["features"]
        self.image_windows = lru_cache(CACHED_GRIDS)(self.windows_of_image)
        side = self.tiles.side_patches
        grid = torch.arange(1, side**2 + 1, dtype=torch.int32).view(side, side)
        self.overview = windowed(grid, self.tiles.window)
        self.frame = windowed(grid, self.frames.window)

    @property
    def kept(self) -> int:
        return self.tiles.side_patches**2

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        shapes = super().inputs(path, tokens, segments)
        return {**shapes, WINDOWS: ((tokens, self.tiles.window**2), torch.int32)}

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        return {WINDOWS: ((tokens, self.frames.window**2), torch.int32)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        side = self.tiles.side_patches
        films = any(plan.frames for plan in plans)
        size = (self.frames if films else self.tiles).window ** 2
        rows, start = [], 0
        for plan in plans:
            if plan.frames:
                starts = torch.arange(start, start + plan.patches, side**2, dtype=torch.int32)
                found = shifted(self.frame[None], starts[:, None, None]).flatten(0, 1)
            else:
                found = shifted(self.image_windows(plan.grid_thw[1:]), start)
            rows.append(F.pad(found, (0, size - found.shape[1])))
            start += plan.patches
        windows = torch.cat(rows)
        windows = F.pad(windows, (0, 0, 0, tokens - len(windows)))
        return {**super().metadata(path, plans, tokens, segments), WINDOWS: windows}

    def end(self, x: Tensor, values: Values) -> Tensor:
        """transformers: Molmo2Adapter."""
        layers = x.flatten(0, 1).chunk(max(self.features) + 1, 1)
        features = torch.cat([layers[layer] for layer in self.features], 1)
        windows, pooling = values[WINDOWS], self.pooling
        there = (windows > 0)[:, :, None]
        seen = F.embedding((windows - 1).clamp(min=0), features) * there
        count = there.sum(1).clamp(min=1).to(seen.dtype)
        query = pooling.query.linear(seen.sum(1) / count).unflatten(-1, (1, self.heads, -1))
        key, value = pooling.inner.linear(seen).unflatten(-1, (2, self.heads, -1)).unbind(2)
        scores = (query.float() * key.float()).sum(-1) * key.shape[-1] ** -0.5
        weights = (scores + ABSENT * ~there).softmax(1).to(value.dtype)
        pooled = pooling.outer.linear((weights[..., None] * value).sum(1).flatten(1))
        gate, up = pooling.up.linear(pooled).chunk(2, -1)
        return pooling.down.linear(F.silu(gate) * up)

    def windows_of_image(self, grid: Layout) -> Tensor:
        """The windows of the overview, then of a canvas with so many rows and columns of
        patches."""
        side, step = self.tiles.side_patches, self.tiles.step_patches
        before, after = self.tiles.margins
        rows, columns = ((count - before - after) // step for count in grid)
        places = torch.arange(1 + side**2, 1 + (1 + rows * columns) * side**2, dtype=torch.int32)
        tiles, canvas = places.view(rows, columns, side, side), torch.empty(grid, dtype=torch.int32)
        for row in range(rows):
            for column in range(columns):
                # Margins are left out where other tiles show the same, but kept at the edges.
                above, left = (before if place else 0 for place in (row, column))
                below = side - (after if row + 1 < rows else 0)
                right = side - (after if column + 1 < columns else 0)
                top, start = row * step, column * step
                canvas[top + above : top + below, start + left : start + right] = tiles[
                    row, column, above:below, left:right
                ]
        return torch.cat([self.overview, windowed(canvas, self.tiles.window)])


def windowed(grid: Tensor, window: int) -> Tensor:
    """[rows, columns] of places to windows of window x window, [windows, window ** 2], padded with
    zeros. transformers: arange_for_pooling."""
    rows, columns = (-count % window for count in grid.shape)
    around = (columns // 2, -(-columns // 2), rows // 2, -(-rows // 2))
    blocks: Tensor = F.pad(grid, around).unflatten(1, (-1, window)).unflatten(0, (-1, window))
    return blocks.transpose(1, 2).reshape(-1, window**2)


def shifted(windows: Tensor, start: Tensor | int) -> Tensor:
    """Adds `start` to the places. 0 stays 0."""
    return torch.where(windows > 0, windows + start, 0)
