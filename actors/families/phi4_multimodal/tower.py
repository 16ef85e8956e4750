"""The vision tower of Phi-4-multimodal: SigLIP over the whole image and crops of a padded canvas.

Computes what transformers.models.phi4_multimodal computes in Phi4MultimodalImageEmbedding, for each
image as if it were alone in its batch. Patches that are padding must not be keys of attention, but
some of them share a token with patches of the image and are computed. Their keys are hidden by
values that are appended to each head: positive in queries, far below zero in such keys, 0 in other
keys. So any attention kernel can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.clip.tower import LAST_NORM, NAMES, PATCHES, POOLING, POSITIONS, tower_shapes
from actors.families.phi4_multimodal import audio
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Attend, BlocksForm, Style
from actors.models.layers.patches import Positions, places
from actors.models.layers.weights import (
    APPENDED,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    widened,
)
from actors.models.packed import CACHED_GRIDS, PackedParts, PackedTower
from actors.models.tower import Family, chosen
from actors.spec.model_spec import ModelSpec
from actors.spec.slices import PaddedCrops
from actors.types import Grid, ItemPlan

PREFIXES = (
    "embed_tokens_extend.image_embed.img_processor.",
    "embed_tokens_extend.image_embed.",
)

PUBLISHED = {
    **{"img_projection_up": "img_projection.0", "img_projection_down": "img_projection.2"},
    **{"global_img_feature_extensor": "glb_GN", "sub_img_feature_extensor": "sub_GN"},
}
"""transformers' names, and those of the model's own code where they differ."""

HIDDEN = -2048.0
"""The first value that is appended to hidden keys. Its product with SHOWN, divided by the root of
the head size, is below -10000, so that weights are zero."""
NEWLINE, SEPARATOR = -2, -1  # in an order of rows

KEYS = "hidden_keys"
"""The input of attention with HIDDEN for hidden keys and zero for others: [patches, 1]."""


@dataclass(frozen=True, slots=True)
class PhiParts:
    """The parts of the tower, on its device."""

    packed: PackedParts
    newline: Tensor  # [1, width of a row], after each row of tokens
    separator: Tensor  # [1, width of a row], between the crops and the whole image


class Picture(NamedTuple):
    """Rows and columns of patches, and how many of them are not padding alone."""

    rows: int
    columns: int
    shown_rows: int
    shown_columns: int


def family(spec: ModelSpec) -> Family[Any]:
    if spec.audio:
        return audio.family(spec)
    tower, named = Dimensions.read(spec, depth="used_layers"), names(spec)
    up, down, separator, newline = (named.get(one, one) for one in PUBLISHED)
    expected = {
        **tower_shapes(spec, tower),
        **affine(up, (spec.width, tower.width)),
        **affine(down, (spec.width, spec.width)),
        **{separator: (1, 1, tower.width), newline: (1, 1, 1, tower.width)},
    }
    layers = int(spec.vision["num_hidden_layers"])
    later = expected_blocks(NAMES, layers, tower.width, tower.mlp_width).keys()
    unused = POOLING | {*later, *affine(LAST_NORM, (1,)), "embeddings.position_ids"}
    return Family(PREFIXES, expected, tower.head_size + APPENDED, parts, PhiTower, unused)


def names(spec: ModelSpec) -> dict[str, str]:
    return PUBLISHED if spec.family == "phi4mm" else {}


def parts(spec: ModelSpec, weights: Weights) -> PhiParts:
    tower, named = Dimensions.read(spec, depth="used_layers"), names(spec)
    up, down = (
        weights.affine(named.get(one, one)) for one in ("img_projection_up", "img_projection_down")
    )

    def projected(x: Tensor) -> Tensor:
        return down.linear(F.gelu(up.linear(x)))

    separator, newline = (
        projected(weights.place(weights.tensors[named.get(one, one)]).view(1, -1))
        for one in ("global_img_feature_extensor", "sub_img_feature_extensor")
    )
    packed = PackedParts(
        embedding=weights.embedding(PATCHES, spec),
        layers=[widened(layer, tower.heads) for layer in weights.blocks(NAMES, tower.depth)],
        style=Style(tower.heads, "gelu_tanh", float(spec.vision["layer_norm_eps"])),
        head=lambda x, tapped: projected(x.unflatten(0, (-1, tower.merge_size**2)).mean(1)),
        positions=Positions(
            weights.place(weights.tensors[f"{POSITIONS}.weight"]), bucketed_taps, taps=1
        ),
        rotary=False,
    )
    return PhiParts(packed, newline, separator)


class HidingAttention:
    """An attention that hides the keys that the input KEYS marks."""

    def __init__(self, attend: Attend, size: int) -> None:
        """`size`: that of a head, without the appended values."""
        self.attend = attend
        self.size = size

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        qkv[:, 1, :, self.size] = values[KEYS]
        return self.attend(qkv, values)


class PhiTower(PackedTower):
    """A packed tower. An image has several pictures, each an attention segment."""

    def __init__(
        self, spec: ModelSpec, parts: PhiParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        size = Dimensions.read(spec).head_size
        super().__init__(
            spec,
            parts.packed,
            attention,
            lambda layers, style, attend, taps: blocks(
                layers, style, HidingAttention(attention, size), taps
            ),
        )
        assert isinstance(spec.sizing, PaddedCrops)
        self.crops, self.lines = spec.sizing, (parts.newline, parts.separator)
        self.picture = lru_cache(CACHED_GRIDS)(self.rows_of_picture)
        self.order = lru_cache(CACHED_GRIDS)(self.rows_of_image)

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        patches, pictures = tokens * self.sizing.merge_size**2, self.most_pictures(tokens, segments)
        return super().inputs(path, tokens, pictures) | {"padding": ((patches, 1), torch.bool)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        patches, pictures = tokens * self.sizing.merge_size**2, self.most_pictures(tokens, segments)
        shown = list(chain.from_iterable(map(self.pictures_of, plans)))
        rows = [self.picture(picture) for picture in shown]
        lengths = [picture.rows * picture.columns for picture in shown]
        return {
            **{name: torch.cat([each[name] for each in rows]) for name in rows[0]},
            **self.attention.metadata(lengths, patches, pictures),
        }

    def forward(self, path: str, values: Values) -> Tensor:
        hidden = values["padding"].to(self.dtype) * HIDDEN
        x, _ = self.blocks(self.begin(values), None, None, {**values, KEYS: hidden})
        return self.end(x, (), values)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """Per item: the crops, whose rows form one picture, the separator, the whole image."""
        found, start = [], len(self.lines)
        for plan in plans:
            order = self.order(plan.grid_thw)
            found.append(torch.where(order < 0, order + len(self.lines), order + start))
            start += plan.path_tokens[0]
        return chosen([*self.lines, outputs[0]], torch.cat(found))

    def most_pictures(self, tokens: int, segments: int) -> int:
        """An upper bound on the attention segments. `segments` counts images, not their crops."""
        return segments + tokens // self.crops.least_tokens

    def pictures_of(self, plan: ItemPlan) -> list[Picture]:
        """The whole image, then the crops."""
        side, (_, rows, columns) = self.crops.side_patches, plan.grid_thw
        pictures = [Picture(side, side, side, side)]
        for above in range(0, rows, side):
            for left in range(0, columns, side):
                shown = (plan.kept[0] - above, plan.kept[1] - left)
                pictures.append(
                    Picture(
                        *(min(side, rows - above), min(side, columns - left)),
                        *(min(side, each) for each in shown),
                    )
                )
        return pictures

    def rows_of_picture(self, picture: Picture) -> dict[str, Tensor]:
        """The inputs that have a row per patch, for one picture."""
        positions = self.parts.positions
        assert positions
        on_grid = places(picture.rows, picture.columns, self.sizing.merge_size)
        shown = torch.tensor([picture.shown_rows, picture.shown_columns])
        padding = (on_grid >= shown).any(1, keepdim=True)
        values = positions.inputs_of(on_grid, picture.shown_rows, picture.shown_columns)
        taps = values["taps"].masked_fill(padding, 0)
        return values | {"taps": taps, "padding": padding}

    def rows_of_image(self, grid: Grid) -> Tensor:
        """Where to find each row of an item among its tokens, by the grid of its crops in patches;
        NEWLINE and SEPARATOR stand for those rows."""
        rows, columns = (patches // self.sizing.merge_size for patches in grid[1:])
        side, start = self.crops.least_tokens, self.crops.square_tokens
        crops = torch.empty(rows, columns, dtype=torch.int64)
        for above in range(0, rows, side):
            for left in range(0, columns, side):
                crop = crops[above : above + side, left : left + side]
                crop.copy_(torch.arange(start, start + crop.numel()).view(crop.shape))
                start += crop.numel()
        whole = torch.arange(side**2).view(side, side)
        ended = [F.pad(each, (0, 1), value=NEWLINE).flatten() for each in (crops, whole)]
        return torch.cat([ended[0], torch.tensor([SEPARATOR]), ended[1]])


def bucketed_taps(places: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Like patches.bilinear_taps, with one entry per place: [patches, 1]. Equal to transformers:
    Phi4MultimodalVisionEmbeddings, which differs from nearest_taps in rounding."""
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    row, column = (
        torch.bucketize(
            (each * (1.0 / torch.tensor(count))).clamp(max=1 - 1e-6), bounds, right=True
        )
        for count, each in zip((rows, columns), places.float().unbind(1), strict=True)
    )
    taps = (row * side + column)[:, None]
    return taps, torch.ones(taps.shape)
