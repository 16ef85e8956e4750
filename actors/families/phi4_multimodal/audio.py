"""The audio encoder of Phi-4-multimodal, and its projector for sounds without images.

Computes what transformers.models.phi4_multimodal computes in Phi4MultimodalAudioEmbedding, for each
sound as if it were alone in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.conformer import (
    Attending,
    ConformerLayer,
    ConformerParts,
    ConformerStyle,
    ConformerTower,
    Convolution,
    FeedForward,
    expected_halvings,
    pointwise,
    separable_halvings,
    together,
)
from actors.models.layers.block import Affine, swiglu
from actors.models.layers.weights import Dimensions, Expected, Weights, affine, numbered
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("embed_tokens_extend.audio_embed.encoder.", "embed_tokens_extend.audio_embed.")

PUBLISHED = {
    "gate_up_proj": "net.0.linear",
    "down_proj": "net.2",
    **{f"{one}_proj": f"linear_{one}" for one in "qkv"},
    "o_proj": "linear_out",
    "up_proj_for_speech": "audio_projection.speech.0",
    "down_proj_for_speech": "audio_projection.speech.2",
    "up_proj_for_vision_speech": "audio_projection.vision.0",
    "down_proj_for_vision_speech": "audio_projection.vision.2",
}
"""transformers' names, and those of the model's own code where they differ."""

FIRST, OUT = "embed.conv.0", "embed.out"
LATER = (("embed.conv.2", "embed.conv.3"), ("embed.conv.5", "embed.conv.6"))
BIASES = "relative_attention_bias_layer.bias_values.weight"
MEAN, SCALE = "encoder_embedding.global_mean", "encoder_embedding.global_invstd"
EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class PhiAudioParts(ConformerParts):
    mean: Tensor
    scale: Tensor
    """[mels], for frames."""
    biases: Tensor
    """[heads, 2 x the longest distance]: added to the scores of keys so far before a query, or, in
    the second half, after it."""


def named(spec: ModelSpec, name: str) -> str:
    return PUBLISHED[name] if spec.family == "phi4mm" else name


def family(spec: ModelSpec) -> Family[PhiAudioParts]:
    tower = Dimensions.read(spec, depth="num_blocks")
    width, vision, mels = tower.width, spec.vision, int(spec.vision["input_size"])
    up, down = (named(spec, f"{one}_proj_for_speech") for one in ("up", "down"))
    expected = {
        **expected_halvings(LATER, FIRST, OUT, int(vision["nemo_conv_channels"]), width, mels),
        **dict.fromkeys((MEAN, SCALE), (mels,)),
        BIASES: (2 * int(vision["bias_max_distance"]), tower.heads),
        **affine(up, (spec.width, width)),
        **affine(down, (spec.width, spec.width)),
    }
    for block in numbered("encoders", tower.depth):
        expected |= expected_layer(spec, block, tower)
    with_images = (named(spec, f"{one}_proj_for_vision_speech") for one in ("up", "down"))
    unused = frozenset(name for one in with_images for name in affine(one, (1,)))
    return Family(PREFIXES, expected, tower.head_size, parts, PhiAudioTower, unused)


def expected_layer(spec: ModelSpec, block: str, tower: Dimensions) -> Expected:
    width, taps, name = tower.width, int(spec.vision["kernel_size"]), partial(named, spec)
    shapes: dict[str, tuple[int, ...]] = {"layer_norm_att": (width,), "layer_norm": (width,)}
    for one in ("feed_forward_in", "feed_forward_out"):
        shapes[f"{one}.layer_norm"] = (width,)
        shapes[f"{one}.{name('gate_up_proj')}"] = (2 * tower.mlp_width, width)
        shapes[f"{one}.{name('down_proj')}"] = (width, tower.mlp_width)
    for one in "qkvo":
        shapes[f"self_attn.{name(f'{one}_proj')}"] = (width, width)
    shapes |= {
        "conv.layer_norm": (width,),
        "conv.glu.ext_pw_conv_1d": (2 * width, width, 1),
        "conv.dw_sep_conv_1d.dw_conv": (width, 1, taps),
        "conv.dw_sep_conv_1d.pw_conv": (width, width, 1),
        "conv.ext_pw_conv_1d": (width, width, 1),
    }
    expected: Expected = {f"{block}.conv.glu.b{one}": (1, width, 1) for one in (1, 2)}
    for one, shape in shapes.items():
        expected |= affine(f"{block}.{one}", shape)
    return expected


def parts(spec: ModelSpec, weights: Weights) -> PhiAudioParts:
    tower = Dimensions.read(spec, depth="num_blocks")
    up, down = (weights.affine(named(spec, f"{one}_proj_for_speech")) for one in ("up", "down"))
    return PhiAudioParts(
        halvings=separable_halvings(weights, LATER, FIRST),
        out=weights.affine(OUT),
        layers=[layer_of(spec, weights, one) for one in numbered("encoders", tower.depth)],
        style=ConformerStyle(tower.heads, "layer", EPSILON, swiglu, swiglu, later=0),
        head=lambda x: down.linear(F.gelu(up.linear(x))),
        mean=weights.place(weights.tensors[MEAN]),
        scale=weights.place(weights.tensors[SCALE]),
        biases=weights.place(weights.tensors[BIASES].t().contiguous()),
    )


def layer_of(spec: ModelSpec, weights: Weights, block: str) -> ConformerLayer:
    name, conv = partial(named, spec), f"{block}.conv"
    glu = pointwise(weights, f"{conv}.glu.ext_pw_conv_1d")
    more = [weights.place(weights.tensors[f"{conv}.glu.b{one}"]).flatten() for one in (1, 2)]
    taps = weights.affine(f"{conv}.dw_sep_conv_1d.dw_conv")

    def fed(one: str) -> FeedForward:
        return FeedForward(
            weights.affine(f"{one}.layer_norm"),
            gate_first(weights.affine(f"{one}.{name('gate_up_proj')}")),
            weights.affine(f"{one}.{name('down_proj')}"),
        )

    return ConformerLayer(
        before=fed(f"{block}.feed_forward_in"),
        attending=Attending(
            weights.affine(f"{block}.layer_norm_att"),
            weights.affine(*(f"{block}.self_attn.{name(f'{one}_proj')}" for one in "qkv")),
            weights.affine(f"{block}.self_attn.{name('o_proj')}"),
        ),
        convolution=Convolution(
            norm=weights.affine(f"{conv}.layer_norm"),
            up=gate_first(Affine(glu.weight, glu.bias + torch.cat(more))),
            taps=taps.weight.flatten(1),
            bias=taps.bias,
            middle=pointwise(weights, f"{conv}.dw_sep_conv_1d.pw_conv").linear,
            down=pointwise(weights, f"{conv}.ext_pw_conv_1d"),
        ),
        after=fed(f"{block}.feed_forward_out"),
        norm=weights.affine(f"{block}.layer_norm"),
    )


def gate_first(layer: Affine) -> Affine:
    """Swaps the halves of a gated layer into the order of our SwiGLU."""
    weight, bias = (torch.cat(each.chunk(2)[::-1]) for each in (layer.weight, layer.bias))
    return Affine(weight, bias)


class PhiAudioTower(ConformerTower):
    """Attention within windows; positions beyond a sound that fill its last window are zeros."""

    parts: PhiAudioParts

    def scaled(self, frames: Tensor) -> Tensor:
        return (frames - self.parts.mean) * self.parts.scale

    def embedded(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        x, own = super().embedded(patches)
        return x * own[:, None], own

    def context(self, ends: Tensor, own: Tensor) -> tuple[Tensor, ...]:
        """What is added to scores: [heads, positions, positions]."""
        longest, count = self.parts.biases.shape[1] // 2, len(ends)
        places = torch.arange(count, device=ends.device)
        distance = (places - places[:, None]).clamp(-longest, longest - 1)
        added = self.parts.biases.index_select(1, (distance + longest).flatten())
        added = added.view(-1, count, count)
        return (added.masked_fill(~together(ends), -torch.inf),)

    def scored(self, qkv: Tensor, terms: tuple[Tensor, ...], context: tuple[Tensor, ...]) -> Tensor:
        query, key, value = qkv[:, None]
        (added,) = context
        return F.scaled_dot_product_attention(query, key, value, attn_mask=added[None])[0]
