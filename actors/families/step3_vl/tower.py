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

from actors.errors import CheckpointError
from actors.kernels.attention import Attention, Values
from actors.models.layers.block import Affine, BlocksForm, BlockWeights, Style, layer_norm
from actors.models.layers.patches import centred, places, rotary_tables
from actors.models.layers.weights import (
    CLIP_NAMES,
    BlockNames,
    Expected,
    Weights,
    affine,
    expected_blocks,
    halves,
    stated,
)
from actors.models.tiled import ViewTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS
from actors.spec.views import WindowSizing
from actors.types import ItemPlan

PREFIXES = ("vision_model.", "vit_", "model.vision_model.", "model.vit_")

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

ALIASES = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""Keys of the Perception Encoder's own configuration, and transformers' names of them."""

THETA = 10000.0  # a constant of the published code

CLASS_TOKENS = 4
"""Step3's own code repeats the class token four times: attention weighs it fourfold."""


def family(spec: ModelSpec) -> Family[StepParts]:
    if spec.family == "step3p7":
        return Family(PREFIXES, perception_expected, StepSizes.of, perception_parts, StepTower)
    return Family(
        PREFIXES,
        step3_expected,
        StepSizes.of,
        step3_parts,
        StepTower,
        last_norms=(".layer_norm",),
    )


@dataclass(frozen=True, slots=True)
class StepSizes:
    depth: int
    width: int
    mlp_width: int
    heads: int
    epsilon: float
    table_side: int  # of the learned table of positions
    projector_bias: bool

    @classmethod
    def of(cls, spec: ModelSpec) -> StepSizes:
        """Reads the configuration of either tower. Raises CheckpointError."""
        with stated(spec):
            vision = {ALIASES.get(key, key): value for key, value in spec.vision.items()}
            width = int(vision["hidden_size"])
            ratio = vision.get("mlp_ratio")
            return cls(
                depth=int(vision["num_hidden_layers"]),
                width=width,
                mlp_width=int(vision["intermediate_size"] if ratio is None else width * ratio),
                heads=int(vision["num_attention_heads"]),
                epsilon=float(vision.get("layer_norm_eps", 1e-5)),
                table_side=int(vision["image_size"]) // int(vision["patch_size"]),
                projector_bias=bool(vision["projector_bias"]),
            )

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def perception_expected(spec: ModelSpec) -> Expected:
    sizes, sizing = StepSizes.of(spec), window_sizing(spec)
    width, patch = sizes.width, sizing.patch_size
    blocks = expected_blocks(PERCEPTION, sizes.depth, width, sizes.mlp_width)
    return {
        **affine("conv1", (width, 3, patch, patch), bias=False),
        "positional_embedding": (sizes.table_side**2, width),
        **affine("ln_pre", (width,)),
        **{published(name): shape for name, shape in blocks.items()},
        **affine("vit_downsampler1", (2 * width, width, 3, 3)),
        **affine("vit_downsampler2", (4 * width, 2 * width, 3, 3)),
        **affine("large_projector", (spec.width, 4 * width), bias=sizes.projector_bias),
    }


def published(name: str) -> str:
    """The checkpoint has `in_proj_weight`, as torch.nn.MultiheadAttention, not `in_proj.weight`."""
    return name.replace(".in_proj.", ".in_proj_")


def step3_expected(spec: ModelSpec) -> Expected:
    sizes, sizing = StepSizes.of(spec), window_sizing(spec)
    width, patch = sizes.width, sizing.patch_size
    first = int(spec.vision["output_hidden_size"])
    return {
        "embeddings.class_embedding": (1, width),
        **affine("embeddings.patch_embedding", (width, 3, patch, patch)),
        "embeddings.position_embedding.weight": (sizes.table_side**2 + 1, width),
        **expected_blocks(CLIP_NAMES, sizes.depth, width, sizes.mlp_width),
        **affine("downsampler", (first, width, 2, 2)),
        **affine("downsampler2", (2 * first, first, 3, 3)),
        **affine("large_projector", (spec.width, 2 * first), bias=sizes.projector_bias),
    }


def window_sizing(spec: ModelSpec) -> WindowSizing:
    if not isinstance(spec.sizing, WindowSizing):
        raise CheckpointError(f"model.id {spec.id!r}: this tower needs a sizing in windows")
    return spec.sizing


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
    """Of each path."""
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
        self.sizing = window_sizing(spec)
        self.parts = replace(parts, layers=())  # the blocks have them, perhaps in another form
        self.blocks = blocks(parts.layers, parts.style, attention, ())

    def view_rows(self, path: str) -> int:
        return len(self.parts.views[path].start)

    def forward(self, path: str, values: Values) -> Tensor:
        view, side = self.parts.views[path], self.sizing.side_patches[PATHS.index(path)]
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
        return F.linear(x.flatten(0, 1), self.parts.projector.weight, self.parts.projector.bias)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """Per item the crops, then the whole: transformers.models.step3p7."""
        whole, crops = (
            rows.split([plan.path_tokens[index] for plan in plans])
            for index, rows in enumerate(outputs)
        )
        return torch.cat([rows for item in zip(crops, whole, strict=True) for rows in item])


def perception_parts(spec: ModelSpec, weights: Weights) -> StepParts:
    sizes, sizing = StepSizes.of(spec), window_sizing(spec)
    named = {name.replace(".in_proj_", ".in_proj."): t for name, t in weights.tensors.items()}
    weights = Weights(named, weights.device, weights.dtype)
    before = weights.affine("ln_pre")
    first, second = weights.affine("vit_downsampler1"), weights.affine("vit_downsampler2")

    def head(x: Tensor) -> Tensor:
        x = F.conv2d(x, first.weight, first.bias, stride=2, padding=1)
        return F.conv2d(x, second.weight, second.bias, stride=2, padding=1)

    return StepParts(
        embedding=weights.embedding("conv1", spec.mean, spec.std).weight,
        views={
            path: ViewTable(
                weights.place(perception_start(spec, named, sizes, side)),
                rotary(side, sizes, weights.device),
            )
            for path, side in zip(PATHS, sizing.side_patches, strict=True)
        },
        layers=[rotated(layer, sizes.heads) for layer in weights.blocks(PERCEPTION, sizes.depth)],
        style=Style(sizes.heads, "quick_gelu", sizes.epsilon),
        head=head,
        projector=weights.affine("large_projector"),
        stem=lambda x: layer_norm(x, before, sizes.epsilon),
    )


def perception_start(
    spec: ModelSpec, tensors: Mapping[str, Tensor], sizes: StepSizes, side: int
) -> Tensor:
    """See ViewTable.start, in float32: the positions of a view of side x side patches."""
    table = tensors["positional_embedding"].float()
    raster = table.T.view(1, -1, sizes.table_side, sizes.table_side)
    if side != sizes.table_side:
        raster = F.interpolate(raster, size=(side, side), mode="bilinear", align_corners=False)
    precise = Weights(tensors, table.device, torch.float32)
    return raster.flatten(2)[0].T + precise.embedding("conv1", spec.mean, spec.std).bias


def rotary(side: int, sizes: StepSizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """See ViewTable.rotary: columns before rows, both from 0."""
    on_grid = places(side, side, 1).flip(1)
    cos, sin = rotary_tables(side, sizes.width // sizes.heads, THETA)
    return cos[on_grid].flatten(1).to(device), sin[on_grid].flatten(1).to(device)


def rotated(layer: BlockWeights, heads: int) -> BlockWeights:
    """The layer with q and k in the order of our rotary embedding."""
    parts = zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True)
    query, key, value = (Affine(weight, bias) for weight, bias in parts)
    sorted_parts = (halves(query, heads), halves(key, heads), value)
    qkv = Affine(
        torch.cat([part.weight for part in sorted_parts]),
        torch.cat([part.bias for part in sorted_parts]),
    )
    return replace(layer, qkv=qkv)


def step3_parts(spec: ModelSpec, weights: Weights) -> StepParts:
    sizes, sizing = StepSizes.of(spec), window_sizing(spec)
    first, second = weights.affine("downsampler"), weights.affine("downsampler2")

    def head(x: Tensor) -> Tensor:
        x = F.conv2d(x, first.weight, first.bias, stride=2)
        return F.conv2d(x, second.weight, second.bias, stride=2, padding=1)

    return StepParts(
        embedding=weights.embedding("embeddings.patch_embedding", spec.mean, spec.std).weight,
        views={
            path: ViewTable(weights.place(step3_start(spec, weights.tensors, sizes, side)))
            for path, side in zip(PATHS, sizing.side_patches, strict=True)
        },
        layers=weights.blocks(CLIP_NAMES, sizes.depth),
        style=Style(sizes.heads, "quick_gelu", sizes.epsilon, post_norm=True),
        head=head,
        projector=weights.affine("large_projector"),
    )


def step3_start(
    spec: ModelSpec, tensors: Mapping[str, Tensor], sizes: StepSizes, side: int
) -> Tensor:
    """See ViewTable.start, in float32: the positions of a view of side x side patches."""
    table = tensors["embeddings.position_embedding.weight"].float()
    raster = table[1:].T.reshape(1, -1, sizes.table_side, sizes.table_side)
    if side != sizes.table_side:
        size = (side, side)
        raster = F.interpolate(
            raster, size=size, mode="bicubic", antialias=True, align_corners=False
        )
    precise = Weights(tensors, table.device, torch.float32)
    bias = precise.embedding("embeddings.patch_embedding", spec.mean, spec.std).bias
    classes = table[:1] + tensors["embeddings.class_embedding"].float()
    return torch.cat([classes.expand(CLASS_TOKENS, -1), raster.flatten(2)[0].T + bias])
