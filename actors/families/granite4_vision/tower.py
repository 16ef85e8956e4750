"""The vision tower of Granite 4 Vision: SigLIP, and a Q-Former over windows for each feature.

Computes what transformers.models.granite4_vision computes in get_image_features, for each image as
if it were alone in its prompt. The features of a token are concatenated. The patches of a tile are
in blocks of 2 x 2, each of which gives one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.clip import tower as clip
from actors.families.granite4_vision.spec import OFFSETS
from actors.families.llava_onevision.tower import OnevisionParts, OnevisionTower
from actors.kernels.attention import Attention, Values
from actors.models.layers.block import Affine, BlocksForm, layer_norm
from actors.models.layers.weights import Expected, Weights, affine
from actors.models.tiled import merge_order
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = (
    *("vision_tower.vision_model.", "vision_tower.", "image_"),
    *("layerwise_projectors.", "spatial_"),  # the names of the latter stay distinct
)

QFORMER = "qformer.encoder.layer.0"
HEAD_SIZE = 64  # of the Q-Formers
NORM_EPSILON = 1e-6  # of a projector's first norm: the configuration does not say


@dataclass(frozen=True, slots=True)
class GraniteParts:
    """The parts of the tower, on its device."""

    anyres: OnevisionParts
    projectors: Sequence[WindowProjector]


def family(spec: ModelSpec) -> Family[GraniteParts]:
    return Family(
        PREFIXES,
        expected(spec),
        clip.dimensions(spec).head_size,
        parts,
        GraniteTower,
        clip.unused(spec),
    )


def names(spec: ModelSpec) -> list[str]:
    """The names of the projectors, in the order of their features."""
    layerwise = len(spec.vision["features"]) - OFFSETS
    return [*map(str, range(layerwise)), *(f"projectors.{place}" for place in range(OFFSETS))]


def expected(spec: ModelSpec) -> Expected:
    width, out = clip.dimensions(spec).width, row_width(spec)
    if width % HEAD_SIZE:
        raise ValueError(f"hidden_size: {width} is not a multiple of {HEAD_SIZE}")
    mlp_width, query = int(spec.vision["qformer_intermediate_size"]), spec.vision["query_side"]
    shapes = clip.layer_shapes(spec) | {"newline": (out,)}
    square = (width, width)
    layers = {
        **dict.fromkeys(("norm", "qformer.layernorm"), (width,)),
        **{
            f"{QFORMER}.{kind}.{part}": size
            for kind in ("attention", "crossattention")
            for part, size in (
                *((f"attention.{name}", square) for name in ("query", "key", "value")),
                ("output.dense", square),
                ("output.LayerNorm", (width,)),
            )
        },
        f"{QFORMER}.intermediate_query.dense": (mlp_width, width),
        f"{QFORMER}.output_query.dense": (width, mlp_width),
        f"{QFORMER}.output_query.LayerNorm": (width,),
        "out_linear": (out, width),
    }
    for name in names(spec):
        shapes |= {f"{name}.query": (1, query**2, width)}
        shapes |= {f"{name}.image_positions": (1, 4 * query**2, width)}
        for layer, size in layers.items():
            shapes |= affine(f"{name}.{layer}", size)
    return shapes


def row_width(spec: ModelSpec) -> int:
    """Values of one feature."""
    return spec.width // (1 + spec.deepstack)


def parts(spec: ModelSpec, weights: Weights) -> GraniteParts:
    taps = [layer - 1 for layer in spec.vision["taps"]]
    tiles = replace(clip.parts(spec, weights, lambda x: x), taps=taps)
    newline = weights.place(weights.tensors["newline"]).repeat(1 + spec.deepstack)
    projectors = [
        WindowProjector(spec, weights, name, offset)
        for name, offset in zip(
            names(spec),
            [*[None] * (1 + spec.deepstack - OFFSETS), *range(OFFSETS)],
            strict=True,
        )
    ]
    return GraniteParts(OnevisionParts(tiles, newline[None]), projectors)


class WindowProjector:
    """transformers: Granite4VisionWindowQFormerDownsampler."""

    def __init__(self, spec: ModelSpec, weights: Weights, name: str, offset: int | None) -> None:
        """`offset`: which patch of a block of 2 x 2 its query comes from. None: from the mean of
        the block."""
        assert spec.sizing.merge_size == 2
        self.offset = offset
        self.query_side = int(spec.vision["query_side"])
        self.epsilon = float(spec.vision["qformer_layer_norm_eps"])
        self.norm, self.before, self.up, self.down, self.last, self.out = (
            weights.affine(f"{name}.{layer}")
            for layer in (
                *("norm", "qformer.layernorm", f"{QFORMER}.intermediate_query.dense"),
                *(f"{QFORMER}.output_query.dense", f"{QFORMER}.output_query.LayerNorm"),
                "out_linear",
            )
        )
        self.query = weights.place(weights.tensors[f"{name}.query"])
        positions = weights.tensors[f"{name}.image_positions"][0]
        self.positions = weights.place(merge_order(positions, 2)).unflatten(0, (-1, 4))
        self.within, self.across = (
            QueryAttention.read(weights, f"{name}.{QFORMER}.{kind}", self.epsilon)
            for kind in ("attention", "crossattention")
        )

    def __call__(self, x: Tensor, side: int) -> Tensor:
        """[tiles, patches, width] of tiles with `side` tokens a side to [tokens, out width]."""
        window, width = self.query_side, x.shape[2]
        x = layer_norm(x, self.norm, NORM_EPSILON).view(-1, side, side, 4 * width)
        x = windows(x, window).view(-1, window**2, 4, width)
        shown = x.mean(2) if self.offset is None else x[:, :, self.offset]
        y = layer_norm(shown + self.query, self.before, self.epsilon)
        y = self.across(self.within(y, y), (x + self.positions).flatten(1, 2))
        y = layer_norm(y + self.down.linear(F.gelu(self.up.linear(y))), self.last, self.epsilon)
        count = side // window
        y = y.view(-1, count, count, window, window, width).transpose(2, 3)
        return self.out.linear(y.reshape(-1, width))


@dataclass(frozen=True, slots=True)
class QueryAttention:
    """transformers: Blip2QFormerAttention."""

    query: Affine
    inner: Affine
    """Keys, then values."""
    out: Affine
    norm: Affine
    epsilon: float

    @classmethod
    def read(cls, weights: Weights, name: str, epsilon: float) -> QueryAttention:
        return cls(
            weights.affine(f"{name}.attention.query"),
            weights.affine(f"{name}.attention.key", f"{name}.attention.value"),
            weights.affine(f"{name}.output.dense"),
            weights.affine(f"{name}.output.LayerNorm"),
            epsilon,
        )

    def __call__(self, y: Tensor, seen: Tensor) -> Tensor:
        """y: the queries [windows, queries, width]. `seen`: what they attend to [windows, patches,
        width]."""
        query = self.query.linear(y).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        key, value = (
            self.inner.linear(seen).unflatten(-1, (2, -1, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return layer_norm(y + self.out.linear(attended), self.norm, self.epsilon)


def windows(x: Tensor, side: int) -> Tensor:
    """[tiles, rows, columns, width] to windows of side x side, [windows, side, side, width]."""
    x = x.unflatten(1, (-1, side)).unflatten(3, (-1, side))
    return x.transpose(2, 3).flatten(0, 2)


class GraniteTower(OnevisionTower):
    """LLaVA-NeXT's order of rows, with several features in each."""

    def __init__(
        self, spec: ModelSpec, parts: GraniteParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.anyres, attention, blocks)
        self.projectors, self.features = parts.projectors, spec.vision["features"]

    def end(self, x: Tensor, values: Values) -> Tensor:
        layers = x.chunk(max(self.features) + 1, -1)
        rows = [
            projector(layers[layer], self.anyres.token_side)
            for projector, layer in zip(self.projectors, self.features, strict=True)
        ]
        return torch.cat(rows, 1)
