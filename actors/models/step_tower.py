"""The tower that the Step3 families share: the whole image is one view, each crop another.

A view is one attention segment of fixed length, its patches row by row; both paths run the same
weights over views of two sizes. Knows no family, no graphs and not where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models import packed
from actors.models.layers.block import Affine, BlocksForm, BlockWeights, Style
from actors.models.step_config import window_sizing
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS
from actors.spec.windows import WindowSizing
from actors.types import ItemPlan, Size


@dataclass(frozen=True, slots=True)
class View:
    """What a path adds to each of its views, on the tower's device."""

    start: Tensor
    """[class tokens + patches, width]: the class tokens, then what is added to the patches."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos, sin: float32 [class tokens + patches, head size / 2]."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What differs between the towers, on the tower's device."""

    embedding: Tensor
    """[width, 3 x patch x patch], for `uint8 - 128`; its bias is part of `View.start`."""
    views: Mapping[str, View]
    """Of each path."""
    layers: Sequence[BlockWeights]
    style: Style
    head: Callable[[Tensor], Tensor]
    """[views, width, side, side] to [views, wider, shorter side, shorter side]."""
    projector: Affine
    """To the language model's width."""
    stem: Callable[[Tensor], Tensor] | None = None
    """What happens to the rows before the blocks."""


class StepTower:
    """See Tower. Two paths, global and local."""

    def __init__(
        self, spec: ModelSpec, parts: StepParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        self.spec = spec
        self.sizing = window_sizing(spec)
        self.parts = replace(parts, layers=())  # the blocks have them, perhaps in another form
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.blocks = blocks(parts.layers, parts.style, attention, ())

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """See Tower. A budget holds as many views as fit it wholly."""
        views, patches, rows = self._views(path, tokens)
        return {
            "patches": ((views * patches, 3 * self.sizing.patch_size**2), torch.uint8),
            **self.attention.inputs(views * rows, views),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """See Tower."""
        views, _, rows = self._views(path, tokens)
        used = sum(plan.path_tokens[PATHS.index(path)] for plan in plans)
        return self.attention.metadata([rows] * self._views(path, used)[0], views * rows, views)

    def forward(self, path: str, values: Values) -> Tensor:
        """See Tower. Rows beyond the last segment: finite, otherwise undefined."""
        view, side = self.parts.views[path], self.sizing.side_patches[PATHS.index(path)]
        rows, width = view.start.shape
        classes = rows - side**2
        x = F.linear(packed.centred(values["patches"], self.dtype), self.parts.embedding)
        x = F.pad(x.view(-1, side**2, width), (0, 0, classes, 0)) + view.start
        if self.parts.stem:
            x = self.parts.stem(x)
        cos, sin = None, None
        if view.rotary:
            cos, sin = (table.repeat(len(x), 1) for table in view.rotary)
        x, _ = self.blocks(x.flatten(0, 1), cos, sin, values)
        x = x.view(-1, rows, width)[:, classes:].unflatten(1, (side, side))
        x = self.parts.head(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        return F.linear(x.flatten(0, 1), self.parts.projector.weight, self.parts.projector.bias)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """See Tower. Of each item the crops, then the whole: transformers.models.step3p7."""
        whole, crops = (
            rows.split([plan.path_tokens[index] for plan in plans])
            for index, rows in enumerate(outputs)
        )
        return torch.cat([rows for item in zip(crops, whole, strict=True) for rows in item])

    def _views(self, path: str, tokens: int) -> tuple[int, int, int]:
        """Views of so many tokens; patches of a view; its rows, with the class tokens."""
        index = PATHS.index(path)
        patches = self.sizing.side_patches[index] ** 2
        views = tokens // self.sizing.view_tokens[index]
        return views, patches, len(self.parts.views[path].start)


def patchify(image: Tensor, sizing: WindowSizing) -> Tensor:
    """uint8 [3, height, width] to uint8 [patches of all views, 3 x patch x patch]."""
    windows = sizing.windows(Size(width=image.shape[2], height=image.shape[1]))
    if windows.shown.width == windows.shown.height:  # nothing to add unless it is thin
        longer = max(image.shape[1:])
        image = F.pad(image, (0, longer - image.shape[2], 0, longer - image.shape[1]))
    shown = packed.resize(image, windows.shown, "bilinear")
    whole = packed.resize(shown, Size(sizing.image_pixels, sizing.image_pixels), "bilinear")
    patches = cut(whole[None], sizing.patch_size)
    if windows.side:
        canvas = packed.resize(image if sizing.stretches else shown, windows.canvas, "bilinear")
        if not sizing.stretches:
            right = windows.columns * windows.side - windows.canvas.width
            below = windows.rows * windows.side - windows.canvas.height
            canvas = F.pad(canvas, (0, right, 0, below))
        grid = canvas.unflatten(2, (windows.columns, -1)).unflatten(1, (windows.rows, -1))
        square = Size(sizing.crop_pixels, sizing.crop_pixels)
        views = grid.permute(1, 3, 0, 2, 4).flatten(0, 1)
        crops = torch.stack([packed.resize(view, square, "bilinear") for view in views])
        patches = torch.cat([patches, cut(crops, sizing.patch_size)])
    return patches


def cut(views: Tensor, patch: int) -> Tensor:
    """uint8 [views, 3, side, side] to [patches, 3 x patch x patch], row by row."""
    parts = views.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))
    return packed.in_one_piece(parts.permute(0, 2, 4, 1, 3, 5)).view(-1, 3 * patch**2)
