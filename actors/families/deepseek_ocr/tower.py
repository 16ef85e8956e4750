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
from actors.models.layers.block import Affine, Blocks, BlocksForm, Style, layer_norm
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
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS
from actors.spec.tiles import Layout
from actors.spec.views import CropSizing
from actors.types import ItemPlan

PREFIXES = ("sam_model.", "vision_model.", "projector.", "image_", "view_")

UNUSED = frozenset({"embeddings.patch_embedding.weight", "embeddings.position_ids"})
"""CLIP's own patch embedding: its patches are SAM's features."""

# Constants of the published code:
WINDOW = 14
NECK_CHANNELS = 256
MLP_RATIO = 4
CLIP_EPSILON = 1e-5

SAM_BLOCKS = BlockNames(up=("mlp.lin1",), down="mlp.lin2")

NEWLINE = -1  # marks a newline in an order of rows


def family(spec: ModelSpec) -> Family[Weights]:
    # CLIP's head size: SAM has its own attention.
    head_size = OcrSizes.of(spec).clip.head_size
    return Family(
        PREFIXES, expected(spec), head_size, lambda spec, weights: weights, DeepseekOcrTower, UNUSED
    )


@dataclass(frozen=True, slots=True)
class OcrSizes:
    sam: Dimensions
    clip: Dimensions
    whole_view: frozenset[int]  # SAM's layers without windows
    halving: tuple[int, int]  # channels after each of the convolutions that end SAM
    clip_side: int  # of CLIP's table of positions

    @classmethod
    def of(cls, spec: ModelSpec) -> OcrSizes:
        towers = spec.vision["width"]
        sam, clip = towers["sam_vit_b"], towers["clip-l-14-224"]
        first, second = sam["downsample_channels"]
        if second != clip["width"]:
            raise ValueError(f"downsample_channels {second}: CLIP's width is {clip['width']}")
        return cls(
            sam=dimensions(spec, sam),
            clip=dimensions(spec, clip),
            whole_view=frozenset(sam["global_attn_indexes"]),
            halving=(int(first), int(second)),
            clip_side=clip["image_size"] // clip["patch_size"],
        )


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
    sizes = OcrSizes.of(spec)
    clip, channels = sizes.clip.width, NECK_CHANNELS
    first, second = sizes.halving
    return {
        **expected_sam(sizes, table_side(spec)),
        **affine("neck.0", (channels, sizes.sam.width, 1, 1), bias=False),
        **affine("neck.1", (channels,)),
        **affine("neck.2", (channels, channels, 3, 3), bias=False),
        **affine("neck.3", (channels,)),
        **affine("net_2", (first, channels, 3, 3), bias=False),
        **affine("net_3", (second, first, 3, 3), bias=False),
        "embeddings.class_embedding": (clip,),
        "embeddings.position_embedding.weight": (sizes.clip_side**2 + 1, clip),
        **affine("pre_layrnorm", (clip,)),
        **expected_blocks(CLIP_NAMES, sizes.clip.depth, clip, sizes.clip.mlp_width),
        **affine("layers", (spec.width, clip + second)),
        "newline": (spec.width,),
        "seperator": (spec.width,),
    }


def expected_sam(sizes: OcrSizes, side: int) -> Expected:
    """SAM's layers, and what is before them."""
    sam = sizes.sam
    shapes: Expected = {
        **affine("patch_embed.proj", (sam.width, 3, sam.patch_size, sam.patch_size)),
        "pos_embed": (1, side, side, sam.width),
        **expected_blocks(SAM_BLOCKS, sam.depth, sam.width, sam.mlp_width),
    }
    for layer in range(sam.depth):
        trained = side if layer in sizes.whole_view else WINDOW
        table = (2 * trained - 1, sam.head_size)
        shapes |= {f"blocks.{layer}.attn.rel_pos_{axis}": table for axis in "hw"}
    return shapes


@dataclass(frozen=True, slots=True)
class ViewTables:
    """What one path adds to its views, all of which have one size."""

    side: int  # patches per side
    positions: Tensor  # [side, side, width of SAM], with the bias of the patch embedding
    start: Tensor  # [1 + tokens, width of CLIP]: the class token, then positions


class DeepseekOcrTower(ViewTower):
    """Both towers, one after the other."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        attention: Attention,
        blocks: BlocksForm,
    ) -> None:
        super().__init__(spec, attention)
        assert isinstance(spec.sizing, CropSizing)
        self.sizing = spec.sizing
        self.sizes = sizes = OcrSizes.of(spec)
        self.device = weights.device
        self.embedding = weights.embedding("patch_embed.proj", spec)
        layers = [
            sam.without_key_bias(layer) for layer in weights.blocks(SAM_BLOCKS, sizes.sam.depth)
        ]
        squares = square_attention(sizes.sam.head_size, attention)
        self.sam: dict[str, Blocks] = {}
        for path, side in zip(PATHS, self.sizing.side_patches, strict=True):
            of_layers = [squares(side, each) for each in relative_positions(weights, sizes, side)]
            style = Style(sizes.sam.heads, "gelu", sam.EPSILON)
            self.sam[path] = blocks(layers, style, of_layers, ())
        self.neck = neck(weights)
        self.before_clip = weights.affine("pre_layrnorm")
        style = Style(sizes.clip.heads, "quick_gelu", CLIP_EPSILON)
        self.clip = blocks(weights.blocks(CLIP_NAMES, sizes.clip.depth), style, attention, ())
        self.projector = weights.affine("layers")
        self.newline = weights.place(weights.tensors["newline"])[None]
        self.separator = weights.place(weights.tensors["seperator"])[None]
        self.tables = {
            path: tables(weights, sizes, self.embedding, side)
            for path, side in zip(PATHS, self.sizing.side_patches, strict=True)
        }

    def view_rows(self, path: str) -> int:
        return len(self.tables[path].start)

    def forward(self, path: str, values: Values) -> Tensor:
        """On the path `global` each row of tokens ends in a newline."""
        table = self.tables[path]
        x = F.linear(centred(values["patches"], self.dtype), self.embedding.weight)
        x = x.view(-1, *table.positions.shape) + table.positions
        y, _ = self.sam[path](x.flatten(0, 2), None, None, values)
        features = self.neck(y.view(x.shape))
        y = F.pad(features, (0, 0, 1, 0)) + table.start
        y = layer_norm(y, self.before_clip, CLIP_EPSILON)
        y, _ = self.clip(y.flatten(0, 1), None, None, values)
        y = y.view(-1, *table.start.shape)[:, 1:]
        rows = self.projector.linear(torch.cat([y, features], -1))
        if path == "local":
            return rows.flatten(0, 1)
        side = self.sizing.image_side
        newlines = self.newline.expand(len(rows), side, 1, -1)
        return torch.cat([rows.unflatten(1, (side, side)), newlines], 2).flatten(0, 2)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """Per item its crops as one grid, then the whole, then the separator."""
        whole, crops = outputs
        places = order(plans, self.sizing, len(whole), len(crops))
        if self.device.type == "cuda":  # so that the engine's thread does not wait for the copy
            places = places.pin_memory().to(self.device, non_blocking=True)
        return torch.cat([whole, crops, self.newline, self.separator]).index_select(0, places)


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


def relative_positions(weights: Weights, sizes: OcrSizes, side: int) -> Iterator[Tensor]:
    """Of each layer, for views with this side: see SquareAttention.tables."""
    for index in range(sizes.sam.depth):
        window = side if index in sizes.whole_view else WINDOW
        both = [weights.tensors[f"blocks.{index}.attn.rel_pos_{axis}"] for axis in "hw"]
        yield weights.place(torch.stack([sam.distances(table, window) for table in both]))


def tables(weights: Weights, sizes: OcrSizes, embedding: Affine, side: int) -> ViewTables:
    named, width = weights.tensors, sizes.sam.width
    trained = resized_table(named["pos_embed"].view(-1, width), side).view(side, side, width)
    known = named["embeddings.position_embedding.weight"].float()
    first = known[:1] + named["embeddings.class_embedding"].float()
    rest = resized_table(known[1:], side // sam.SHRINKING)
    return ViewTables(
        side=side,
        positions=weights.place(trained) + embedding.bias,
        start=weights.place(torch.cat([first, rest])),
    )


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
