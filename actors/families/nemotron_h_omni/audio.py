"""The audio encoder of Nemotron-H Omni: Parakeet, and a projector.

Computes what transformers.models.nemotron_h_omni computes in get_audio_features, for each sound as
if it were alone in its batch. If a sound's frames fill its positions, there is one more position,
which has no frames: it attends to all positions equally, and none attends to it.
"""

from __future__ import annotations

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
    around,
    expected_halvings,
    pointwise,
    separable_halvings,
    together,
)
from actors.models.layers.block import rms_norm
from actors.models.layers.weights import Dimensions, Expected, Weights, affine, numbered
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("sound_encoder.encoder.", "sound_projection.")

FIRST, OUT = "subsampling.layers.0", "subsampling.linear"
LATER = tuple((f"subsampling.layers.{one}", f"subsampling.layers.{one + 1}") for one in (2, 5))
NORM, UP, DOWN = "norm", "linear1", "linear2"
"""The names of the projector's layers."""
NORMS = tuple(
    f"norm_{part}" for part in ("feed_forward1", "self_att", "conv", "feed_forward2", "out")
)
CONVOLUTIONS = ("pointwise_conv1", "depthwise_conv", "pointwise_conv2")
STATISTICS = ("running_mean", "running_var")
EPSILON = 1e-5  # of all norms
LONGEST_WAVE = 10_000  # of sinusoids, in positions over 2 pi


def family(spec: ModelSpec) -> Family[ConformerParts]:
    tower, vision = Dimensions.read(spec), spec.vision
    width, channels = tower.width, int(vision["subsampling_conv_channels"])
    inner, bias = int(vision["projection_hidden_size"]), bool(vision["projection_bias"])
    expected = {
        **expected_halvings(LATER, FIRST, OUT, channels, width, int(vision["num_mel_bins"])),
        **affine(NORM, (width,), bias=False),
        **affine(UP, (inner, width), bias=bias),
        **affine(DOWN, (spec.width, inner), bias=bias),
    }
    blocks = numbered("layers", tower.depth)
    for block in blocks:
        expected |= expected_layer(spec, block, tower)
    unused = {f"feature_extractor.featurizer.{name}" for name in ("fb", "window")}
    # With convolution_bias false, transformers and vLLM ignore biases that are there all the same.
    left = ["norm.num_batches_tracked", *(f"{one}.bias" for one in CONVOLUTIONS)]
    unused |= {f"{block}.conv.{name}" for block in blocks for name in left}
    return Family(
        PREFIXES, expected, tower.head_size, parts, ParakeetTower, unused=frozenset(unused)
    )


def expected_layer(spec: ModelSpec, block: str, tower: Dimensions) -> Expected:
    width, mlp, taps = tower.width, tower.mlp_width, int(spec.vision["conv_kernel_size"])
    linear = partial(affine, bias=bool(spec.vision["attention_bias"]))
    convolution = partial(affine, bias=bool(spec.vision["convolution_bias"]))
    heads = (tower.heads, tower.head_size)
    expected: Expected = {f"{block}.self_attn.bias_{one}": heads for one in "uv"}
    for norm in (*NORMS, "conv.norm"):
        expected |= affine(f"{block}.{norm}", (width,))
    expected |= dict.fromkeys((f"{block}.conv.norm.{one}" for one in STATISTICS), (width,))
    for one in ("feed_forward1", "feed_forward2"):
        expected |= linear(f"{block}.{one}.linear1", (mlp, width))
        expected |= linear(f"{block}.{one}.linear2", (width, mlp))
    for one in "qkvo":
        expected |= linear(f"{block}.self_attn.{one}_proj", (width, width))
    return {
        **expected,
        **affine(f"{block}.self_attn.relative_k_proj", (width, width), bias=False),
        **convolution(f"{block}.conv.pointwise_conv1", (2 * width, width, 1)),
        **convolution(f"{block}.conv.depthwise_conv", (width, 1, taps)),
        **convolution(f"{block}.conv.pointwise_conv2", (width, width, 1)),
    }


def parts(spec: ModelSpec, weights: Weights) -> ConformerParts:
    tower = Dimensions.read(spec)
    norm, up, down = (weights.affine(name) for name in (NORM, UP, DOWN))
    style = ConformerStyle(
        *(tower.heads, "layer", EPSILON, F.silu, F.glu),
        later=int(spec.vision["conv_kernel_size"]) // 2,
    )
    return ConformerParts(
        halvings=separable_halvings(weights, LATER, FIRST),
        out=weights.affine(OUT),
        layers=[layer_of(weights, one) for one in numbered("layers", tower.depth)],
        style=style,
        head=lambda x: down.linear(F.relu(up.linear(rms_norm(x, norm, EPSILON))).square()),
    )


def layer_of(weights: Weights, block: str) -> ConformerLayer:
    before, attending, convolved, after, last = (
        weights.affine(f"{block}.{norm}") for norm in NORMS
    )
    own = [weights.tensors[f"{block}.self_attn.bias_{one}"] for one in "uv"]
    relative = weights.affine(f"{block}.self_attn.relative_k_proj").weight
    name = f"{block}.conv.depthwise_conv"
    taps = weights.tensors[f"{name}.weight"].float().flatten(1)
    batch = [weights.tensors[f"{block}.conv.norm.{one}"].float() for one in STATISTICS]
    scale, shift = (weights.tensors[f"{block}.conv.norm.{one}"] for one in ("weight", "bias"))
    factor = scale.float() * (batch[1] + EPSILON).rsqrt()
    bias = (weights.bias(name, taps).float() - batch[0]) * factor + shift.float()
    linears = [
        [weights.affine(f"{block}.feed_forward{n}.linear{m}") for m in (1, 2)] for n in (1, 2)
    ]
    return ConformerLayer(
        before=FeedForward(before, *linears[0]),
        attending=Attending(
            attending,
            weights.affine(*(f"{block}.self_attn.{one}_proj" for one in "qkv")),
            weights.affine(f"{block}.self_attn.o_proj"),
            terms=(*(weights.place(one)[:, None] for one in own), relative),
        ),
        convolution=Convolution(
            norm=convolved,
            up=pointwise(weights, f"{block}.conv.pointwise_conv1"),
            taps=weights.place(taps * factor[:, None]),
            bias=weights.place(bias),
            middle=lambda x: x,  # the batch norm is folded into taps and bias
            down=pointwise(weights, f"{block}.conv.pointwise_conv2"),
        ),
        after=FeedForward(after, *linears[1]),
        norm=last,
    )


class ParakeetTower(ConformerTower):
    """Attention over a whole sound, with Transformer-XL's terms of distance."""

    def near(self, ends: Tensor, own: Tensor) -> Tensor:
        seen = super().near(ends, own)
        return seen & around(own, seen.shape[1], self.style.later)

    def context(self, ends: Tensor, own: Tensor) -> tuple[Tensor, ...]:
        """Which keys a query sees, which queries have scores, and the sinusoids of each distance,
        from that of the last position to the first one to that of the first to the last."""
        seen = together(ends) & (own | ~own[:, None])
        count, device = len(ends), ends.device
        width = len(self.parts.out.weight)
        waves = LONGEST_WAVE ** -(torch.arange(0, width, 2, device=device) / width)
        angles = torch.arange(count - 1, -count, -1, device=device)[:, None] * waves
        distances = torch.stack([angles.sin(), angles.cos()], 2).flatten(1)
        return seen, own[:, None], distances.to(self.dtype)

    def scored(self, qkv: Tensor, terms: tuple[Tensor, ...], context: tuple[Tensor, ...]) -> Tensor:
        (query, key, value), (for_keys, for_distances, relative) = qkv, terms
        seen, scored, distances = context
        heads, count, size = query.shape
        keys = F.linear(distances, relative).view(-1, heads, size).permute(1, 2, 0)
        added = ((query + for_distances) * scored) @ keys * size**-0.5
        # The distances of each query to all keys. Those of the next query start one place earlier.
        strides = (added.stride(0), added.stride(1) - 1, 1)
        added = added.as_strided((heads, count, count), strides, count - 1)
        return F.scaled_dot_product_attention(
            ((query + for_keys) * scored)[None],
            key[None],
            value[None],
            attn_mask=added.masked_fill(~seen, -torch.inf)[None],
        )[0]
