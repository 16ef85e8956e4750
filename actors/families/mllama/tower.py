"""The vision tower of Llama 3.2 Vision with its projector: the states that cross-attention reads.

Computes what transformers.models.mllama computes of `pixel_values` as `cross_attention_states`, for
the tiles that show the image. All tiles of an image are one attention segment, including empty
tiles and a few rows of padding at the end of each tile. As in the published model, rows that are
empty or padding do not see each other, but the image's rows do see them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import ConfigError
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Affine, Attend, BlocksForm, BlockWeights, Style, layer_norm
from actors.models.layers.patches import centred
from actors.models.layers.weights import (
    APPENDED,
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    widened,
)
from actors.models.tiled import TileParts, TileTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.tiles import FilledTiles
from actors.types import ItemPlan

PREFIXES = ("vision_model.", "multi_modal_")

LOCAL = BlockNames(
    block="transformer.layers",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.o_proj",
    norm2="post_attention_layernorm",
    up=("mlp.fc1",),
    down="mlp.fc2",
)
LOCAL = replace(LOCAL, unbiased=frozenset({*LOCAL.qkv, LOCAL.proj}))
GLOBAL = replace(LOCAL, block="global_transformer.layers")
GATES = ("gate_attn", "gate_ffn")
"""The gates of attention and of the MLP in a global layer. tanh is applied to them."""

EPSILON = 1e-5  # torch's default for LayerNorm: of the norms outside the layers
ROWS_MULTIPLE = 8
"""A tile has rows of padding up to a multiple of this."""

HIDING = 128.0
"""In q and, negated, in k of rows that do not see each other: minus its square, scaled, is far
below any score."""


@dataclass(frozen=True, slots=True)
class MllamaParts:
    """On the tower's device. Tables have a row for each aspect ratio, the first for none."""

    tiles: TileParts
    """Its layers are the local ones, `start` what is the same in every tile, `stem` the norm before
    them, `head` the projector."""
    bias: Tensor
    """The bias of the patch embedding for `uint8 - 128`. Empty tiles do not get it."""
    starts: Tensor
    """[aspects, tiles x rows of `start` x width]: added to tiles before the local layers."""
    middles: Tensor
    """[aspects, tiles x width]: the same before the global layers."""
    shown: Tensor
    """[aspects, tiles]: 1 for tiles that show the image, 0 for empty ones."""
    between: Affine
    """The norm after the local layers."""
    layers: Sequence[BlockWeights]
    """The global ones."""


def dimensions(spec: ModelSpec) -> Dimensions:
    return Dimensions.read(spec, heads="attention_heads")


def sizing_of(spec: ModelSpec) -> FilledTiles:
    assert isinstance(spec.sizing, FilledTiles)
    return spec.sizing


def family(spec: ModelSpec) -> Family[MllamaParts]:
    tower, sizing = dimensions(spec), sizing_of(spec)
    width, rows, tiles = tower.width, sizing.tile_tokens, sizing.max_tiles
    aspects, count = len(sizing.aspects) + 1, int(spec.vision["num_global_layers"])
    taps = len(spec.vision["intermediate_layers_indices"])
    expected = {
        **affine("patch_embedding", (width, 3, tower.patch_size, tower.patch_size), bias=False),
        "class_embedding": (width,),
        "gated_positional_embedding.gate": (1,),
        "gated_positional_embedding.embedding": (rows, width),
        "gated_positional_embedding.tile_embedding.weight": (aspects, tiles * rows * width),
        **affine("layernorm_pre", (width,)),
        **affine("layernorm_post", (width,)),
        **expected_blocks(LOCAL, tower.depth, width, tower.mlp_width),
        **expected_blocks(GLOBAL, count, width, tower.mlp_width),
        **affine("projector", (spec.width, (1 + taps) * width)),
    }
    for name in ("pre", "post"):
        expected[f"{name}_tile_positional_embedding.gate"] = (1,)
        expected[f"{name}_tile_positional_embedding.embedding.weight"] = (aspects, tiles * width)
    for layer in range(count):
        expected |= {f"{GLOBAL.block}.{layer}.{gate}": (1,) for gate in GATES}
    return Family(PREFIXES, expected, tower.head_size + APPENDED, parts, MllamaTower)


def parts(spec: ModelSpec, weights: Weights) -> MllamaParts:
    tower, sizing = dimensions(spec), sizing_of(spec)
    width, tiles, named = tower.width, sizing.max_tiles, weights.tensors

    def gate(name: str) -> Tensor:
        return named[name].float().tanh()

    def gated(name: str) -> Tensor:
        """[aspects, tiles, 1, width]"""
        table = named[f"{name}_tile_positional_embedding.embedding.weight"].float()
        table = table * gate(f"{name}_tile_positional_embedding.gate")
        return table.view(len(table), tiles, 1, width)

    shared = gate("gated_positional_embedding.gate")
    start = (1 - shared) * named["gated_positional_embedding.embedding"].float()
    start[0] += named["class_embedding"].float()
    starts = named["gated_positional_embedding.tile_embedding.weight"].float() * shared
    starts = starts.view(len(starts), tiles, -1, width)
    starts[:, :, 1:] += gated("pre")
    shown = torch.zeros(len(starts), tiles)
    for index, (rows, columns) in enumerate(sizing.aspects):
        shown[index + 1, : rows * columns] = 1
    before, embedding = weights.affine("layernorm_pre"), weights.embedding("patch_embedding", spec)
    projector = weights.affine("projector")
    projector = replace(projector, weight=by_layer(projector.weight, width))
    global_gates = [
        [gate(f"{GLOBAL.block}.{layer}.{name}") for name in GATES]
        for layer in range(int(spec.vision["num_global_layers"]))
    ]
    epsilon = float(spec.vision["norm_eps"])
    return MllamaParts(
        tiles=TileParts(
            embedding=embedding.weight,
            start=weights.place(start),
            layers=[widened(one, tower.heads) for one in weights.blocks(LOCAL, tower.depth)],
            style=Style(tower.heads, "gelu", epsilon),
            head=projector.linear,
            stem=lambda x: layer_norm(x, before, EPSILON),
            taps=spec.vision["intermediate_layers_indices"],
        ),
        bias=embedding.bias,
        starts=weights.place(starts.flatten(1)),
        middles=weights.place(gated("post").flatten(1)),
        shown=weights.place(shown),
        between=weights.affine("layernorm_post"),
        layers=[
            widened(with_gates(layer, *gates), tower.heads)
            for layer, gates in zip(
                weights.blocks(GLOBAL, len(global_gates)), global_gates, strict=True
            )
        ],
    )


def by_layer(weight: Tensor, width: int) -> Tensor:
    """The projector's weight for the values of all layers one after the other. As published, those
    of the last layer are first, and the others' are interleaved."""
    last, others = weight.split([width, weight.shape[1] - width], 1)
    others = others.unflatten(1, (width, -1)).transpose(1, 2).flatten(1)
    return torch.cat([others, last], 1)


def with_gates(layer: BlockWeights, attention: Tensor, mlp: Tensor) -> BlockWeights:
    def times(linear: Affine, gate: Tensor) -> Affine:
        gate, dtype = gate.to(linear.weight.device), linear.weight.dtype
        weight, bias = ((gate * one).to(dtype) for one in (linear.weight, linear.bias))
        return replace(linear, weight=weight, bias=bias)

    return replace(layer, proj=times(layer.proj, attention), down=times(layer.down, mlp))


class PairHiding:
    """An attention in which rows with 1 in the input `hidden` do not see each other.

    The product of two values, which are appended to q and to k, is added to the scores.
    """

    def __init__(self, attend: Attend, size: int) -> None:
        """`size`: that of a head, without the appended values."""
        self.attend = attend
        self.size = size

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        hidden = HIDING * values["hidden"][:, None]
        qkv[:, 0, :, self.size], qkv[:, 1, :, self.size] = hidden, -hidden
        return self.attend(qkv, values)


class MllamaTower(TileTower):
    """A tile tower whose segments are images, each with the same number of tiles."""

    def __init__(
        self, spec: ModelSpec, parts: MllamaParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        hiding = PairHiding(attention, dimensions(spec).head_size)
        super().__init__(
            spec,
            parts.tiles,
            attention,
            lambda layers, style, attend, taps: blocks(layers, style, hiding, taps),
        )
        self.more = replace(parts, layers=(), tiles=self.parts)
        self.global_blocks = blocks(parts.layers, parts.tiles.style, hiding, ())
        kept = len(parts.tiles.start)
        self.image_tokens = kept * self.sizing.max_tiles
        self.padding = -kept % ROWS_MULTIPLE
        hidden = F.pad(
            (1 - parts.shown)[..., None].expand(-1, -1, kept), (0, self.padding), value=1
        )
        self.hidden = hidden.flatten(1)

    def images(self, tokens: int) -> int:
        """Raises ConfigError for a budget that is not whole images."""
        images, rest = divmod(tokens, self.image_tokens)
        if rest:
            raise ConfigError(
                f"graphs.token_budgets: {tokens} is not a multiple of {self.image_tokens}, "
                f"the tokens that {self.spec.id} computes per image"
            )
        return images

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        images = self.images(tokens)
        patches = images * self.sizing.max_tiles * self.sizing.side_patches**2
        return {
            "patches": ((patches, 3 * self.sizing.patch_size**2), torch.uint8),
            "aspects": ((images,), torch.int32),
            **self.attention.inputs(images * self.hidden.shape[1], images),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        images, rows = self.images(tokens), self.hidden.shape[1]
        known, side = sizing_of(self.spec).aspects, self.sizing.side_patches
        layouts = [(plan.grid_thw[1] // side, plan.grid_thw[2] // side) for plan in plans]
        return {
            "aspects": torch.tensor([known.index(one) + 1 for one in layouts], dtype=torch.int32),
            **self.attention.metadata([rows] * len(plans), images * rows, images),
        }

    def forward(self, path: str, values: Values) -> Tensor:
        (kept, width), more, aspects = self.parts.start.shape, self.more, values["aspects"]
        x = F.linear(centred(values["patches"], self.dtype), self.parts.embedding, more.bias)
        tiles = F.embedding(aspects, more.shown).view(-1, 1, 1)
        x = F.pad(x.view(len(tiles), -1, width) * tiles, (0, 0, 1, 0)) + self.parts.start
        x = x + F.embedding(aspects, more.starts).view(x.shape)
        assert self.parts.stem
        x = F.pad(self.parts.stem(x), (0, 0, 0, self.padding))
        seen = {**values, "hidden": F.embedding(aspects, self.hidden).flatten()}
        x, tapped = self.blocks(x.flatten(0, 1), None, None, seen)
        x = layer_norm(x, more.between, EPSILON).view(len(tiles), -1, width)
        x = x + F.embedding(aspects, more.middles).view(-1, 1, width)
        x, _ = self.global_blocks(x.flatten(0, 1), None, None, seen)
        x = torch.cat([*tapped, x], 1).view(len(tiles), kept + self.padding, -1)[:, :kept]
        return self.parts.head(x.flatten(0, 1))

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """The tiles that show an image are its first ones."""
        computed = outputs[0].split([plan.path_tokens[0] for plan in plans])
        return torch.cat([rows[: plan.tokens] for rows, plan in zip(computed, plans, strict=True)])
