"""The audio encoder of Gemma 4 (E2B, E4B): a conformer whose attention is causal and local.

Computes what transformers.models.gemma4 computes in Gemma4AudioModel and embed_audio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.conformer import (
    APART,
    KERNEL,
    Attending,
    ConformerLayer,
    ConformerParts,
    ConformerStyle,
    ConformerTower,
    Convolution,
    FeedForward,
    Halving,
    Module,
    around,
)
from actors.models.layers.block import Affine, layer_norm, rms_norm
from actors.models.layers.weights import KEYS, Dimensions, Expected, Weights, affine, numbered
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("audio_tower.", "embed_audio.")

STEM, OUT = "subsample_conv_projection", "output_proj"
PROJECTOR = "embedding_projection"
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""The bounds of each linear layer of the blocks, with `use_clipped_linears`."""
EPSILON = 1e-6
LONGEST_WAVE = 10_000  # of sinusoids, in positions over 2 pi
KEY_SCALE = math.log(1 + math.e) / math.log(2)
HIDDEN = -1e9  # in place of scores


@dataclass(frozen=True, slots=True)
class GemmaAudioParts(ConformerParts):
    before: int
    """How many positions before each one have terms of distance, and how many queries a block
    has."""
    cap: float
    """The limit of scores."""


def dimensions(spec: ModelSpec) -> Dimensions:
    """Feed-forwards are four times as wide."""
    tower = Dimensions.read(spec, **KEYS | {"mlp_width": "hidden_size"})
    return replace(tower, mlp_width=4 * tower.width)


def family(spec: ModelSpec) -> Family[GemmaAudioParts]:
    tower, dims = dimensions(spec), int(spec.vision["output_proj_dims"])
    first, second = channels(spec)
    expected = {
        f"{STEM}.layer0.conv.weight": (first, 1, KERNEL, KERNEL),
        f"{STEM}.layer0.norm.weight": (first,),
        f"{STEM}.layer1.conv.weight": (second, first, KERNEL, KERNEL),
        f"{STEM}.layer1.norm.weight": (second,),
        f"{STEM}.input_proj_linear.weight": (tower.width, first // 4 * second),
        **affine(OUT, (dims, tower.width)),
        **affine(PROJECTOR, (spec.width, dims), bias=False),
    }
    for block in numbered("layers", tower.depth):
        expected |= expected_layer(spec, block, tower)
    return Family(PREFIXES, expected, tower.head_size, parts, GemmaAudioTower)


def channels(spec: ModelSpec) -> tuple[int, int]:
    first, second = map(int, spec.vision["subsampling_conv_channels"])
    return first, second


def expected_layer(spec: ModelSpec, block: str, tower: Dimensions) -> Expected:
    width, mlp = tower.width, tower.mlp_width
    linears: Expected = {f"self_attn.{one}_proj": (width, width) for one in "qkv"}
    linears |= {"self_attn.post": (width, width), "lconv1d.linear_end": (width, width)}
    linears |= {"lconv1d.linear_start": (2 * width, width)}
    norms = ["norm_pre_attn", "norm_post_attn", "norm_out"]
    norms += ["lconv1d.pre_layer_norm", "lconv1d.conv_norm"]
    for one in ("feed_forward1", "feed_forward2"):
        linears |= {f"{one}.ffw_layer_1": (mlp, width), f"{one}.ffw_layer_2": (width, mlp)}
        norms += [f"{one}.pre_layer_norm", f"{one}.post_layer_norm"]
    expected: Expected = {
        **{f"{block}.{one}.linear.weight": shape for one, shape in linears.items()},
        **{f"{block}.{one}.weight": (width,) for one in norms},
        f"{block}.self_attn.relative_k_proj.weight": (width, width),
        f"{block}.self_attn.per_dim_scale": (tower.head_size,),
        f"{block}.lconv1d.depthwise_conv1d.weight": (
            *(width, 1, int(spec.vision["conv_kernel_size"])),
        ),
    }
    if spec.vision["use_clipped_linears"]:
        expected |= {f"{block}.{one}.{bound}": () for one in linears for bound in BOUNDS}
    return expected


def parts(spec: ModelSpec, weights: Weights) -> GemmaAudioParts:
    tower, vision = dimensions(spec), spec.vision
    before = int(vision["attention_context_left"]) - 1
    out, projector = weights.affine(OUT), weights.affine(PROJECTOR)
    # As published, mels come before channels; here it is the other way round.
    stem = weights.affine(f"{STEM}.input_proj_linear")
    turned = stem.weight.unflatten(1, (-1, channels(spec)[1])).transpose(1, 2).flatten(1)

    def head(x: Tensor) -> Tensor:
        rows = out.linear(x)
        return projector.linear(F.rms_norm(rows, rows.shape[-1:], eps=EPSILON))

    return GemmaAudioParts(
        halvings=[halving(weights, f"{STEM}.layer{one}") for one in range(2)],
        out=replace(stem, weight=turned),
        layers=[layer_of(spec, weights, one, before) for one in numbered("layers", tower.depth)],
        style=ConformerStyle(tower.heads, "rms", EPSILON, F.silu, F.glu, later=0),
        head=head,
        before=before,
        cap=float(vision["attention_logit_cap"]),
    )


def halving(weights: Weights, name: str) -> Halving:
    norm = weights.affine(f"{name}.norm")

    def normed(x: Tensor) -> Tensor:
        return layer_norm(x.movedim(1, 3), norm, EPSILON).movedim(3, 1)

    return Halving(weights.affine(f"{name}.conv"), 1, normed)


def layer_of(spec: ModelSpec, weights: Weights, block: str, before: int) -> ConformerLayer:
    clips, tower = bool(spec.vision["use_clipped_linears"]), dimensions(spec)

    def linear(*names: str) -> Affine:
        names = tuple(f"{block}.{name}" for name in names)
        found = weights.affine(*(f"{name}.linear" for name in names))
        return replace(found, clips=bounds(weights, names)) if clips else found

    def norm(name: str) -> Affine:
        return weights.affine(f"{block}.{name}")

    def fed(name: str) -> FeedForward:
        return FeedForward(
            norm(f"{name}.pre_layer_norm"),
            linear(f"{name}.ffw_layer_1"),
            linear(f"{name}.ffw_layer_2"),
            norm(f"{name}.post_layer_norm"),
        )

    relative = norm("self_attn.relative_k_proj").weight
    distances = weights.place(sinusoids(before, tower.width))
    keys = F.linear(distances, relative).view(-1, tower.heads, tower.head_size).permute(1, 2, 0)
    scale = weights.place(weights.tensors[f"{block}.self_attn.per_dim_scale"]).float()
    scale = F.softplus(scale) * tower.head_size**-0.5 / math.log(2)
    return ConformerLayer(
        before=fed("feed_forward1"),
        attending=Attending(
            norm("norm_pre_attn"),
            linear(*(f"self_attn.{one}_proj" for one in "qkv")),
            linear("self_attn.post"),
            terms=(scale, keys.float()[:, None]),
            after=norm("norm_post_attn"),
        ),
        convolution=Convolution(
            norm=norm("lconv1d.pre_layer_norm"),
            up=linear("lconv1d.linear_start"),
            taps=(taps := norm("lconv1d.depthwise_conv1d")).weight.flatten(1),
            bias=taps.bias,
            middle=middle(norm("lconv1d.conv_norm")),
            down=linear("lconv1d.linear_end"),
        ),
        after=fed("feed_forward2"),
        norm=norm("norm_out"),
    )


def middle(norm: Affine) -> Module:
    return lambda x: rms_norm(x, norm, EPSILON)


def bounds(weights: Weights, names: Sequence[str]) -> Tensor:
    """The `clips` of an Affine that fuses these linear layers."""
    found = [[weights.tensors[f"{name}.{bound}"] for bound in BOUNDS] for name in names]
    return weights.place(torch.stack([torch.stack(each) for each in found]))


def sinusoids(before: int, width: int) -> Tensor:
    """float32 [positions, width]: from the farthest position before another one to itself."""
    count = width // 2
    waves = torch.exp(torch.arange(count) * (-math.log(LONGEST_WAVE) / max(1, count - 1)))
    angles = torch.arange(before, -1, -1)[:, None] * waves
    return torch.cat([angles.sin(), angles.cos()], 1)


class GemmaAudioTower(ConformerTower):
    """Computes scores in float32, in blocks of queries. The keys of a block are its own and those
    of the block before it. A block may have positions of several sounds."""

    parts: GemmaAudioParts

    def context(self, ends: Tensor, own: Tensor) -> tuple[Tensor, ...]:
        """Which keys the queries of each block see: [blocks, queries, keys]. Of the positions that
        have a term of distance, transformers hides the farthest."""
        near = around(ends, self.parts.before, 0, value=APART) == ends[:, None]
        return (self.shifted(self.in_blocks(F.pad(near, (1, 0)))),)

    def scored(self, qkv: Tensor, terms: tuple[Tensor, ...], context: tuple[Tensor, ...]) -> Tensor:
        (query, key, value), (scale, distances), (seen,) = qkv.float(), terms, context
        block, fill = self.parts.before, -qkv.shape[2] % self.parts.before
        queries = self.in_blocks(query * scale)
        keys, values = (
            F.pad(each, (0, 0, block, fill)).unfold(1, 2 * block, block)
            for each in (key * KEY_SCALE, value)
        )
        scores = queries @ keys + self.shifted(queries @ distances)
        scores = (scores / self.parts.cap).tanh() * self.parts.cap
        shares = scores.masked_fill(~seen, HIDDEN).softmax(-1)
        found: Tensor = shares @ values.mT
        return found.flatten(1, 2)[:, : query.shape[1]]

    def in_blocks(self, x: Tensor) -> Tensor:
        """[..., positions, values] to [..., blocks, queries, values]."""
        block = self.parts.before
        padded = F.pad(x, (0, 0, 0, -x.shape[-2] % block))
        return padded.view(*x.shape[:-2], -1, block, x.shape[-1])

    def shifted(self, x: Tensor) -> Tensor:
        """[..., queries, distances] to [..., queries, keys of a block and the one before]: each row
        is shifted one place further."""
        block = self.parts.before
        wide = F.pad(x, (0, block)).flatten(-2)
        return wide[..., : 2 * block * block].view(*x.shape[:-1], 2 * block)
