"""DeepSeek-OCR's towers, SAM and then CLIP, and the linear layer to the language model's width.

Computes what deepseek-ai/DeepSeek-OCR computes (in transformers: unlimited_ocr), under the
checkpoint's own names. Both paths run the same weights: `global` over whole images, `local` over
crops; a view is one attention segment of fixed length. Knows nothing of graphs or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models import packed, sam, views
from actors.models.deepseek_ocr_config import (
    SAM_BLOCKS,
    WINDOW,
    Architecture,
    crop_sizing,
)
from actors.models.layers.block import Affine, BlocksForm, Style, layer_norm
from actors.models.packed_weights import CLIP_NAMES, Weights
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS
from actors.types import ItemPlan

CLIP_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Tables:
    """What one path adds to its views, all of which are of one size."""

    side: int
    """Rows, or columns, of patches."""
    positions: Tensor
    """[side, side, width of SAM], with the bias of the patch embedding."""
    relatives: Sequence[sam.Relative]
    """Of each layer of SAM."""
    start: Tensor
    """[1 + tokens, width of CLIP]: positions; the class token in the first row."""


class DeepseekOcrTower:
    """See Tower. No item needs more metadata than the number of its views."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        attention: Attention,
        blocks: BlocksForm,
    ) -> None:
        self.spec = spec
        self.sizing = crop_sizing(spec)
        self.arch = arch = Architecture.of(spec)
        self.attention = attention
        self.dtype = weights.dtype
        self.device = weights.device
        self.embedding = weights.embedding("patch_embed.proj", spec.mean, spec.std)
        self.sam = [
            sam.Layer(layer, 0 if index in arch.whole_view else WINDOW)
            for index, layer in enumerate(weights.blocks(SAM_BLOCKS, arch.sam.depth))
        ]
        self.neck = neck(weights)
        self.before_clip = weights.affine("pre_layrnorm")
        style = Style(arch.clip.heads, "quick_gelu", CLIP_EPSILON)
        self.clip = blocks(weights.blocks(CLIP_NAMES, arch.clip.depth), style, attention, ())
        self.projector = weights.affine("layers")
        self.newline = weights.place(weights.tensors["newline"])[None]
        self.separator = weights.place(weights.tensors["seperator"])[None]
        sides = (self.sizing.image_patches, self.sizing.crops.side_patches)
        self.tables = {
            path: tables(weights, arch, self.embedding, side)
            for path, side in zip(PATHS, sides, strict=True)
        }

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """See Tower. A budget holds whole views: what is over them is not computed."""
        count = tokens // self.view_tokens(path)
        table = self.tables[path]
        return {
            "patches": ((count * table.side**2, self.embedding.weight.shape[1]), torch.uint8),
            **self.attention.inputs(count * len(table.start), count),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """See Tower."""
        one, rows = self.view_tokens(path), len(self.tables[path].start)
        used = sum(plan.path_tokens[PATHS.index(path)] for plan in plans) // one
        return self.attention.metadata([rows] * used, tokens // one * rows, tokens // one)

    def forward(self, path: str, values: Values) -> Tensor:
        """See Tower. `global` ends each row of tokens in a newline."""
        table = self.tables[path]
        x = F.linear(packed.centred(values["patches"], self.dtype), self.embedding.weight)
        x = x.view(-1, table.side, table.side, x.shape[1]) + table.positions
        for layer, relative in zip(self.sam, table.relatives, strict=True):
            x = sam.forward(x, layer, relative, self.arch.sam.heads)
        features = self.neck(x)
        y = F.pad(features, (0, 0, 1, 0)) + table.start
        y = layer_norm(y, self.before_clip, CLIP_EPSILON)
        y, _ = self.clip(y.flatten(0, 1), None, None, values)
        y = y.view(-1, *table.start.shape)[:, 1:]
        rows = F.linear(torch.cat([y, features], -1), self.projector.weight, self.projector.bias)
        if path == "local":
            return rows.flatten(0, 1)
        side = self.sizing.image_side
        newlines = self.newline.expand(len(rows), side, 1, -1)
        return torch.cat([rows.unflatten(1, (side, side)), newlines], 2).flatten(0, 2)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """See Tower: an item's crops as one grid, then the whole, then the separator."""
        whole, crops = outputs
        order = views.order(plans, self.sizing, len(whole), len(crops))
        if self.device.type == "cuda":  # so that the engine's thread does not wait for the copy
            order = order.pin_memory().to(self.device, non_blocking=True)
        return torch.cat([whole, crops, self.newline, self.separator]).index_select(0, order)

    def view_tokens(self, path: str) -> int:
        """Tokens of one view."""
        return self.sizing.view_tokens[PATHS.index(path)]


def neck(weights: Weights) -> sam.Neck:
    """What ends SAM."""
    narrow, mix, *halving = (
        weights.place(weights.tensors[f"{name}.weight"])
        for name in ("neck.0", "neck.2", "net_2", "net_3")
    )
    return sam.Neck(narrow, weights.affine("neck.1"), mix, weights.affine("neck.3"), halving)


def tables(weights: Weights, arch: Architecture, embedding: Affine, side: int) -> Tables:
    """For views of `side` x `side` patches."""
    named = weights.tensors
    positions = weights.place(sam.resampled(named["pos_embed"][0], side)) + embedding.bias
    known = named["embeddings.position_embedding.weight"].float()
    grid = known[1:].view(arch.clip_side, arch.clip_side, -1)
    first = known[:1] + named["embeddings.class_embedding"].float()
    relatives = []
    for index in range(arch.sam.depth):
        rows, columns = (named[f"blocks.{index}.attn.rel_pos_{axis}"] for axis in "hw")
        square = side if index in arch.whole_view else WINDOW
        relatives.append(sam.relative_positions(rows, columns, square, weights.place))
    rest = sam.resampled(grid, side // sam.SHRINKING).flatten(0, 1)
    return Tables(
        side=side,
        positions=positions,
        relatives=relatives,
        start=weights.place(torch.cat([first, rest])),
    )
