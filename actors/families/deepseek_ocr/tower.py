"""DeepSeek-OCR's towers, SAM and then CLIP, and the linear layer to the language model's width.

Computes what deepseek-ai/DeepSeek-OCR computes (in transformers: unlimited_ocr). Tensor names are
the checkpoint's own (`seperator` and `layrnorm`, too).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.deepseek_ocr import sam
from actors.kernels.attention import Attention, SegmentAttention, Values
from actors.models.layers.block import Blocks, BlocksForm, Style, layer_norm
from actors.models.layers.patches import centred, resized_table
from actors.models.layers.weights import (
    CLIP_NAMES,
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
    table_side,
)
from actors.models.tiled import ViewTower
from actors.models.tower import Family, chosen
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS
from actors.spec.tiles import Layout
from actors.spec.views import CropSizing
from actors.types import ItemPlan

PREFIXES = ("sam_model.", "vision_model.", "projector.", "image_", "view_")

UNUSED = frozenset({"embeddings.patch_embedding.weight", "embeddings.position_ids"})
"""CLIP's own patch embedding is not needed, because its patches are SAM's features."""

# Constants of the published code:
WINDOW = 14
NECK_CHANNELS = 256
MLP_RATIO = 4
CLIP_EPSILON = 1e-5

SAM_BLOCKS = BlockNames(up=("mlp.lin1",), down="mlp.lin2")

NEWLINE = -1  # marks a newline in an order of rows


def family(spec: ModelSpec) -> Family[Weights]:
    # CLIP's head size: SAM has its own attention.
    head_size = clip_dimensions(spec).head_size
    return Family(
        PREFIXES, expected(spec), head_size, lambda spec, weights: weights, DeepseekOcrTower, UNUSED
    )


@dataclass(frozen=True, slots=True)
class SamSizes:
    sam: Dimensions
    whole_view: frozenset[int]  # SAM's layers without windows
    halving: tuple[int, int]  # channels after each of the convolutions that end SAM

    @classmethod
    def of(cls, spec: ModelSpec) -> SamSizes:
        sam = spec.vision["width"]["sam_vit_b"]
        first, second = sam["downsample_channels"]
        whole_view = frozenset(sam["global_attn_indexes"])
        return cls(dimensions(spec, sam), whole_view, (int(first), int(second)))


def clip_dimensions(spec: ModelSpec) -> Dimensions:
    clip, (_, channels) = spec.vision["width"]["clip-l-14-224"], SamSizes.of(spec).halving
    if channels != clip["width"]:
        raise ValueError(f"downsample_channels {channels}: CLIP's width is {clip['width']}")
    return dimensions(spec, clip)


def clip_side(spec: ModelSpec) -> int:
    """The side of CLIP's table of positions."""
    clip = spec.vision["width"]["clip-l-14-224"]
    return int(clip["image_size"] // clip["patch_size"])


def dimensions(spec: ModelSpec, tower: Mapping[str, int]) -> Dimensions:
    return Dimensions(
        depth=tower["layers"],
        width=tower["width"],
        mlp_width=MLP_RATIO * tower["width"],
        heads=tower["heads"],
        patch_size=spec.sizing.patch_size,
        merge_size=spec.sizing.merge_size,
    )


def expected(spec: ModelSpec) -> Expected:
    clip = clip_dimensions(spec)
    width, (_, channels) = clip.width, SamSizes.of(spec).halving
    return {
        **expected_sam(spec),
        "embeddings.class_embedding": (width,),
        "embeddings.position_embedding.weight": (clip_side(spec) ** 2 + 1, width),
        **affine("pre_layrnorm", (width,)),
        **expected_blocks(CLIP_NAMES, clip.depth, width, clip.mlp_width),
        **affine("layers", (spec.width, width + channels)),
        "newline": (spec.width,),
        "seperator": (spec.width,),
    }


def expected_sam(spec: ModelSpec) -> Expected:
    """The tensors of SAM, including those of the neck and the convolutions that end it."""
    sizes, side, channels = SamSizes.of(spec), table_side(spec), NECK_CHANNELS
    sam, (first, second) = sizes.sam, sizes.halving
    shapes: Expected = {
        **affine("patch_embed.proj", (sam.width, 3, sam.patch_size, sam.patch_size)),
        "pos_embed": (1, side, side, sam.width),
        **expected_blocks(SAM_BLOCKS, sam.depth, sam.width, sam.mlp_width),
        **affine("neck.0", (channels, sam.width, 1, 1), bias=False),
        **affine("neck.1", (channels,)),
        **affine("neck.2", (channels, channels, 3, 3), bias=False),
        **affine("neck.3", (channels,)),
        **affine("net_2", (first, channels, 3, 3), bias=False),
        **affine("net_3", (second, first, 3, 3), bias=False),
    }
    for layer in range(sam.depth):
        trained = side if layer in sizes.whole_view else WINDOW
        table = (2 * trained - 1, sam.head_size)
        shapes |= {f"blocks.{layer}.attn.rel_pos_{axis}": table for axis in "hw"}
    return shapes


class OcrTower(ViewTower):
    """The base of both versions of DeepSeek-OCR: SAM, an encoder of SAM's features, a linear layer,
    and a separator after the rows of an item."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, attention)
        assert isinstance(spec.sizing, CropSizing)
        self.sizing = spec.sizing
        sizes, depth = SamSizes.of(spec), SamSizes.of(spec).sam.depth
        self.embedding = weights.embedding("patch_embed.proj", spec)
        layers = [sam.without_key_bias(layer) for layer in weights.blocks(SAM_BLOCKS, depth)]
        squares = square_attention(sizes.sam.head_size, attention)
        style = Style(sizes.sam.heads, "gelu", sam.EPSILON)
        self.sam: dict[str, Blocks] = {}
        self.positions: dict[str, Tensor] = {}
        """For each path [side, side, width of SAM], including the bias of the patch embedding."""
        for path, side in zip(PATHS, self.sizing.side_patches, strict=True):
            of_layers = [squares(side, each) for each in relative_positions(weights, sizes, side)]
            self.sam[path] = blocks(layers, style, of_layers, ())
            trained = weights.tensors["pos_embed"].view(-1, sizes.sam.width)
            table = weights.place(resized_table(trained, side)) + self.embedding.bias
            self.positions[path] = table.view(side, side, -1)
        self.neck = neck(weights)
        self.projector = weights.affine("layers")
        self.separator = weights.place(weights.tensors["seperator"])[None]

    def features(self, path: str, values: Values) -> Tensor:
        """SAM's features: [views, tokens of a view, channels]."""
        positions = self.positions[path]
        x = F.linear(centred(values["patches"], self.dtype), self.embedding.weight)
        x = x.view(-1, *positions.shape) + positions
        y, _ = self.sam[path](x.flatten(0, 2), None, None, values)
        return self.neck(y.view(x.shape))


class DeepseekOcrTower(OcrTower):
    """Both towers, one after the other."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, weights, attention, blocks)
        clip = clip_dimensions(spec)
        self.before_clip = weights.affine("pre_layrnorm")
        style = Style(clip.heads, "quick_gelu", CLIP_EPSILON)
        self.clip = blocks(weights.blocks(CLIP_NAMES, clip.depth), style, attention, ())
        self.newline = weights.place(weights.tensors["newline"])[None]
        self.start = {
            path: start(weights, side // sam.SHRINKING)
            for path, side in zip(PATHS, self.sizing.side_patches, strict=True)
        }

    def view_rows(self, path: str) -> int:
        return len(self.start[path])

    def forward(self, path: str, values: Values) -> Tensor:
        """On the path `global` each row of tokens ends in a newline."""
        features, start = self.features(path, values), self.start[path]
        y = F.pad(features, (0, 0, 1, 0)) + start
        y = layer_norm(y, self.before_clip, CLIP_EPSILON)
        y, _ = self.clip(y.flatten(0, 1), None, None, values)
        y = y.view(-1, *start.shape)[:, 1:]
        rows = self.projector.linear(torch.cat([y, features], -1))
        if path == "local":
            return rows.flatten(0, 1)
        side = self.sizing.image_side
        newlines = self.newline.expand(len(rows), side, 1, -1)
        return torch.cat([rows.unflatten(1, (side, side)), newlines], 2).flatten(0, 2)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """Per item, its crops as one grid, then the whole image, then the separator."""
        whole, crops = outputs
        places = order(plans, self.sizing, len(whole), len(crops))
        return chosen([whole, crops, self.newline, self.separator], places)


def neck(weights: Weights) -> sam.Neck:
    narrow, mix, *halving = (
        weights.place(weights.tensors[f"{name}.weight"])
        for name in ("neck.0", "neck.2", "net_2", "net_3")
    )
    return sam.Neck(narrow, weights.affine("neck.1"), mix, weights.affine("neck.3"), halving)


def square_attention(head_size: int, attention: Attention) -> type[sam.SquareAttention]:
    """The form of SAM's attention that fits the one chosen for CLIP."""
    plain = isinstance(attention, SegmentAttention) or head_size not in (16, 32, 64, 128)
    return sam.SquareAttention if plain else sam.FastSquareAttention


def relative_positions(weights: Weights, sizes: SamSizes, side: int) -> Iterator[Tensor]:
    """The tables of each layer, for views with this side; see SquareAttention.tables."""
    for index in range(sizes.sam.depth):
        window = side if index in sizes.whole_view else WINDOW
        both = [weights.tensors[f"blocks.{index}.attn.rel_pos_{axis}"] for axis in "hw"]
        yield weights.place(torch.stack([sam.distances(table, window) for table in both]))


def start(weights: Weights, side: int) -> Tensor:
    """[1 + tokens, width of CLIP]: what is added to a view: the class token, then positions."""
    known = weights.tensors["embeddings.position_embedding.weight"].float()
    first = known[:1] + weights.tensors["embeddings.class_embedding"].float()
    return weights.place(torch.cat([first, resized_table(known[1:], side)]))


def order(plans: Sequence[ItemPlan], sizing: CropSizing, whole: int, crops: int) -> Tensor:
    """Where to find each row of the items: int64 [tokens of all items].

    Indices into the `whole` rows of the global path, then the `crops` rows of the local path, then
    the newline, then the separator.
    """
    image_tokens, crop_tokens = sizing.view_tokens
    parts, before = [], whole
    for index, plan in enumerate(plans):
        if count := plan.path_tokens[1] // crop_tokens:
            columns = plan.grid_thw[2] // sizing.crops.side_patches
            grid = crop_grid((count // columns, columns), sizing.crop_side)
            parts.append(torch.where(grid == NEWLINE, whole + crops, grid + before))
            before += plan.path_tokens[1]
        parts.append(torch.arange(index * image_tokens, (index + 1) * image_tokens))
        parts.append(torch.tensor([whole + crops + 1]))
    return torch.cat(parts)


@lru_cache(maxsize=64)
def crop_grid(layout: Layout, side: int) -> Tensor:
    """Rows of an item's crops in the order of one grid, with a newline after each of its rows."""
    rows, columns = layout
    places = torch.arange(rows * columns * side**2).view(rows, columns, side, side)
    grid = places.transpose(1, 2).reshape(rows * side, columns * side)
    return F.pad(grid, (0, 1), value=NEWLINE).flatten()
