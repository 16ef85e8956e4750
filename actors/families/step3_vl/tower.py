"""The two vision towers of the Step3 families, which share what surrounds their blocks.

Step3-VL-10B and Step-3.7 have a Perception Encoder: computes what transformers.models.step3p7
computes in Step3p7VisionModel and in the projector. Step3 (321B) has a tower of its own, which
normalises after each branch: computes what stepfun-ai/step3's own code does, which transformers
does not have. Two convolutions and a projector follow the blocks of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Values
from actors.models.layers.block import Affine, BlocksForm, BlockWeights, Style, layer_norm
from actors.models.layers.patches import centred, places, resized_table, rotary_tables
from actors.models.layers.weights import (
    CLIP_NAMES,
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
    neighbours_to_halves,
    reordered,
    table_side,
)
from actors.models.tiled import ViewTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import rope_theta
from actors.spec.sizing import PATHS, ViewSizing
from actors.types import ItemPlan

PREFIXES = ("vision_model.", "vit_")

PERCEPTION = BlockNames(
    block="transformer.resblocks",
    norm1="ln_1",
    qkv=("attn.in_proj",),
    proj="attn.out_proj",
    norm2="ln_2",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    scales=("ls_1.gamma", "ls_2.gamma"),
)

CLASS_TOKENS = 4
"""Step3's own code repeats the class token four times: attention weighs it fourfold."""


def family(spec: ModelSpec) -> Family[StepParts]:
    tower = Dimensions.read(spec)
    if spec.family == "step3p7":
        size = tower.rotary_head_size
        return Family(PREFIXES, perception_expected(spec), size, perception_parts, StepTower)
    return Family(
        PREFIXES,
        step3_expected(spec),
        tower.head_size,
        step3_parts,
        StepTower,
        faint=(".layer_norm",),
    )


def perception_expected(spec: ModelSpec) -> Expected:
    tower, bias = Dimensions.read(spec), bool(spec.vision["projector_bias"])
    width, patch = tower.width, tower.patch_size
    blocks = expected_blocks(PERCEPTION, tower.depth, width, tower.mlp_width)
    return {
        **affine("conv1", (width, 3, patch, patch), bias=False),
        "positional_embedding": (table_side(spec) ** 2, width),
        **affine("ln_pre", (width,)),
        # The checkpoint has `in_proj_weight`, as torch.nn.MultiheadAttention does.
        **{name.replace(".in_proj.", ".in_proj_"): shape for name, shape in blocks.items()},
        **affine("vit_downsampler1", (2 * width, width, 3, 3)),
        **affine("vit_downsampler2", (4 * width, 2 * width, 3, 3)),
        **affine("large_projector", (spec.width, 4 * width), bias=bias),
    }


def step3_expected(spec: ModelSpec) -> Expected:
    tower, bias = Dimensions.read(spec), bool(spec.vision["projector_bias"])
    width, patch = tower.width, tower.patch_size
    first = int(spec.vision["output_hidden_size"])
    return {
        "embeddings.class_embedding": (1, width),
        **affine("embeddings.patch_embedding", (width, 3, patch, patch)),
        "embeddings.position_embedding.weight": (table_side(spec) ** 2 + 1, width),
        **expected_blocks(CLIP_NAMES, tower.depth, width, tower.mlp_width),
        **affine("downsampler", (first, width, 2, 2)),
        **affine("downsampler2", (2 * first, first, 3, 3)),
        **affine("large_projector", (spec.width, 2 * first), bias=bias),
    }


@dataclass(frozen=True, slots=True)
class ViewTable:
    """What a path adds to each of its views, on the tower's device."""

    start: Tensor
    """[class tokens + patches, width]: the class tokens, then what is added to the patches."""
    rotary: tuple[Tensor, Tensor] | None = None
    """cos, sin: float32 [class tokens + patches, head size / 2]."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What differs between the families, on the tower's device."""

    embedding: Tensor
    """[width, 3 x patch x patch], for `uint8 - 128`; its bias is part of `ViewTable.start`."""
    views: Mapping[str, ViewTable]
    """The table of each path."""
    layers: Sequence[BlockWeights]
    style: Style
    head: Callable[[Tensor], Tensor]
    """[views, width, side, side] to [views, wider, shorter side, shorter side]."""
    projector: Affine
    """To the language model's width."""
    stem: Callable[[Tensor], Tensor] | None = None
    """Applied before the blocks."""


class StepTower(ViewTower):
    def __init__(
        self, spec: ModelSpec, parts: StepParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, attention)
        self.parts = replace(parts, layers=())  # the blocks hold them, perhaps in another form
        self.blocks = blocks(parts.layers, parts.style, attention, ())

    def view_rows(self, path: str) -> int:
        return len(self.parts.views[path].start)

    def forward(self, path: str, values: Values) -> Tensor:
        view, side = self.parts.views[path], self.views.side_patches[PATHS.index(path)]
        rows, width = view.start.shape
        classes = rows - side**2
        x = F.linear(centred(values["patches"], self.dtype), self.parts.embedding)
        x = F.pad(x.view(-1, side**2, width), (0, 0, classes, 0)) + view.start
        if self.parts.stem:
            x = self.parts.stem(x)
        cos, sin = None, None
        if view.rotary:
            cos, sin = (table.repeat(len(x), 1) for table in view.rotary)
        x, _ = self.blocks(x.flatten(0, 1), cos, sin, values)
        x = x.view(-1, rows, width)[:, classes:].unflatten(1, (side, side))
        x = self.parts.head(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        return self.parts.projector.linear(x.flatten(0, 1))

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """Per item, the crops, then the whole image: transformers.models.step3p7."""
        whole, crops = (
            rows.split([plan.path_tokens[index] for plan in plans])
            for index, rows in enumerate(outputs)
        )
        return torch.cat([rows for item in zip(crops, whole, strict=True) for rows in item])


def perception_parts(spec: ModelSpec, weights: Weights) -> StepParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    named = {name.replace(".in_proj_", ".in_proj."): t for name, t in weights.tensors.items()}
    weights = Weights(named, weights.device, weights.dtype)
    before = weights.affine("ln_pre")
    first, second = weights.affine("vit_downsampler1"), weights.affine("vit_downsampler2")
    table = named["positional_embedding"].float()
    order = neighbours_to_halves(tower.head_size)

    def head(x: Tensor) -> Tensor:
        x = F.conv2d(x, first.weight, first.bias, stride=2, padding=1)
        return F.conv2d(x, second.weight, second.bias, stride=2, padding=1)

    return StepParts(
        embedding=weights.embedding("conv1", spec).weight,
        views={
            path: ViewTable(
                weights.start(
                    "conv1", spec, resized_table(table, side, "bilinear", antialias=False)
                ),
                rotary(spec, side, tower.head_size, weights.device),
            )
            for path, side in zip(PATHS, sides(spec), strict=True)
        },
        layers=[
            reordered(layer, tower.heads, order)
            for layer in weights.blocks(PERCEPTION, tower.depth)
        ],
        style=Style(tower.heads, "quick_gelu", epsilon),
        head=head,
        projector=weights.affine("large_projector"),
        stem=lambda x: layer_norm(x, before, epsilon),
    )


def rotary(
    spec: ModelSpec, side: int, head_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """See ViewTable.rotary: columns before rows, both from 0."""
    on_grid = places(side, side, 1).flip(1)
    cos, sin = rotary_tables(side, head_size, rope_theta(spec.vision))
    return cos[on_grid].flatten(1).to(device), sin[on_grid].flatten(1).to(device)


def step3_parts(spec: ModelSpec, weights: Weights) -> StepParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    first, second = weights.affine("downsampler"), weights.affine("downsampler2")
    patches = "embeddings.patch_embedding"
    table = weights.tensors["embeddings.position_embedding.weight"].float()
    classes = table[:1] + weights.tensors["embeddings.class_embedding"].float()
    classes = classes.expand(CLASS_TOKENS, -1)

    def head(x: Tensor) -> Tensor:
        x = F.conv2d(x, first.weight, first.bias, stride=2)
        return F.conv2d(x, second.weight, second.bias, stride=2, padding=1)

    return StepParts(
        embedding=weights.embedding(patches, spec).weight,
        views={
            path: ViewTable(weights.start(patches, spec, resized_table(table[1:], side), classes))
            for path, side in zip(PATHS, sides(spec), strict=True)
        },
        layers=weights.blocks(CLIP_NAMES, tower.depth),
        style=Style(tower.heads, "quick_gelu", epsilon, post_norm=True),
        head=head,
        projector=weights.affine("large_projector"),
    )


def sides(spec: ModelSpec) -> tuple[int, int]:
    assert isinstance(spec.sizing, ViewSizing)
    return spec.sizing.side_patches
