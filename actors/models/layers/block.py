"""The transformer block that the families share, in plain torch and with torch.compile.

Norm, qkv, rotary, attention, projection, norm, MLP over one packed sequence. What differs between
families is data (`Style`). The fast form of the block is in fast.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels import attention_fp8
from actors.kernels.attention import Attention, Values
from actors.kernels.attention_fp8 import FEWEST_KEYS
from actors.kernels.break_points import between
from actors.kernels.gemm import fp8
from actors.options import BlockForm

Activation = Literal["gelu_tanh", "gelu", "quick_gelu", "swiglu", "swiglu_10", "geglu_tanh"]
Norm = Literal["layer", "rms"]

WINDOW = "window_"
"""Prefix of the attention inputs that describe windows instead of whole segments."""

ATTENTION = " attention"
"""The name of a block's attention is that of its qkv layer, followed by this."""


class Quantisable(Protocol):
    """An operation that can run in FP8: a linear layer, or the attention of a block."""

    @property
    def name(self) -> str: ...

    def plain(self, x: Tensor) -> Tensor: ...

    def in_fp8(self, x: Tensor) -> Tensor: ...

    def operations(self, x: Tensor) -> int:
        """How many multiplications FP8 makes faster."""


Computed = Callable[[Quantisable, Tensor], Tensor]

_computed: list[Computed] = []
"""The calls of `computed_by`. Not a ContextVar, because torch.compile does not read those."""


@dataclass(frozen=True, slots=True)
class Style:
    """What differs between the families' blocks."""

    heads: int
    activation: Activation
    epsilon: float = 1e-6
    norm: Norm = "layer"
    post_norm: bool = False
    """Norms follow attention and MLP instead of preceding them (Step3)."""
    both_norms: bool = False
    """Norms precede attention and MLP, and other norms follow them (Gemma 4)."""
    windowed: frozenset[int] = frozenset()
    """Layers whose patches attend within windows. They read the inputs whose names start with
    WINDOW."""

    @property
    def fast(self) -> bool:
        """Whether there is a fast form of such blocks."""
        return not (self.post_norm or self.both_norms)


@dataclass(frozen=True, slots=True)
class Affine:
    """A linear layer, or the scale and shift of a norm. A missing bias is zeros."""

    weight: Tensor
    bias: Tensor
    clips: Tensor | None = None
    """[parts, 4]: for each of the linear layers that are fused here, the bounds to which its inputs
    and its outputs are clamped (Gemma 4)."""
    name: str = ""
    """The checkpoint's name of the layer, or of the first of those that are fused here."""
    fp8: bool = False
    """Whether the layer runs in FP8: the weight and x, but not the bias."""
    input_bound: Tensor | None = None
    """The bound of the absolute values of x: a scalar, or one number per column. Only FP8 needs it;
    see `bounded`."""
    input_mean: Tensor | None = None
    """The mean of x over the images that `calibrate` saw, float32 [columns]. With it, FP8 is more
    accurate; see `centred_inputs` and fp8.linear."""

    def gemm(self, x: Tensor) -> Tensor:
        """Like `linear`, or in FP8. For layers that the fast form may run in FP8."""
        if _computed:
            return _computed[-1](self, x)
        return self.in_fp8(x) if self.fp8 else self.linear(x)

    def plain(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def in_fp8(self, x: Tensor) -> Tensor:
        assert self.input_bound is not None, "This is a bug."
        return fp8.linear(x, self.weight, self.bias, self.input_bound, self.input_mean)

    def operations(self, x: Tensor) -> int:
        return len(x) * self.weight.numel()

    def linear(self, x: Tensor) -> Tensor:
        if self.clips is None:
            return F.linear(x, self.weight, self.bias)
        parts = zip(
            *(each.chunk(len(self.clips)) for each in (self.weight, self.bias)),
            *self.clips.unbind(1),
            strict=True,
        )
        return torch.cat(
            [
                F.linear(x.clamp(low, high), weight, bias).clamp(least, most)
                for weight, bias, low, high, least, most in parts
            ],
            -1,
        )


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """The weights of one layer.

    `qkv` is fused: [3 x heads x head size, width]. In a gated MLP, `up` is gate, then up.
    """

    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    up: Affine
    down: Affine
    qk_norm: Tensor | None = None
    """Weights of the RMSNorms of q and k, which precede rotation: [2, width] over all heads
    together, or [2, head size] over each. [3, head size]: of v, too."""
    after: tuple[Affine, Affine] | None = None
    """With `both_norms`: the norms that follow attention and the MLP."""
    attention: str = ""
    """The name of its attention; see ATTENTION."""
    attention_fp8: bool = False
    """Whether long segments attend in FP8; see Attention.fp8."""


def centred_inputs(norm: Affine, linear: Affine) -> tuple[Affine, Affine]:
    """Moves the mean of the layer's inputs from the norm's shift to the layer's bias, so that FP8
    rounds smaller numbers. If the norm is over a part of the inputs, all parts have one shift, and
    what remains of the mean is the layer's new `input_mean`."""
    if linear.input_mean is None:
        return norm, linear
    parts = linear.input_mean.view(-1, len(norm.bias))
    shift = (norm.bias.float() - parts.mean(0)).to(norm.bias.dtype)
    moved = (norm.bias.float() - shift.float()).repeat(len(parts))
    bias = (linear.bias.float() + linear.weight.float() @ moved).to(linear.bias.dtype)
    mean = linear.input_mean - moved if len(parts) > 1 else None
    return replace(norm, bias=shift), replace(linear, bias=bias, input_mean=mean)


def bounded(norm: Affine, up: Affine, down: Affine) -> tuple[Affine, Affine]:
    """`up` and `down` with bounds of their inputs. `up` follows the norm, and `down` the activation
    of `up`. No activation makes a value larger.

    A gated one multiplies two outputs of `up`. Then bounds of the inputs of `down` may differ much,
    so each input has its own. Otherwise the largest bound is that of all.
    """
    gain = norm.weight, norm.bias
    largest = fp8.largest_outputs(*gain, up.weight, up.bias)
    largest = (
        largest.amax() if len(largest) == down.weight.shape[1] else largest.view(2, -1).prod(0)
    )
    return replace(up, input_bound=fp8.largest_normed(*gain)), replace(down, input_bound=largest)


def bounded_block(layer: BlockWeights) -> BlockWeights:
    """The layer with its linear layers that can run in FP8 prepared for it; see `centred_inputs`
    and `bounded`. For styles with a fast form."""
    norm1, qkv = centred_inputs(layer.norm1, layer.qkv)
    norm2, up = centred_inputs(layer.norm2, layer.up)
    qkv = replace(qkv, input_bound=fp8.largest_normed(norm1.weight, norm1.bias))
    up, down = bounded(norm2, up, layer.down)
    return replace(layer, norm1=norm1, qkv=qkv, norm2=norm2, up=up, down=down)


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """The attention of a block, as a Quantisable. For x, see Attention."""

    name: str
    attention: Attention
    values: Values
    """Includes `segment_ends`; see SegmentAttention."""

    def plain(self, x: Tensor) -> Tensor:
        return self.attention(x, self.values)

    def in_fp8(self, x: Tensor) -> Tensor:
        return self.attention.fp8(x, self.values, None, None)

    def operations(self, x: Tensor) -> int:
        """0 if the device has no FP8 attention, or no segment is long enough."""
        if not attention_fp8.has(x):
            return 0
        ends: list[int] = list(dict.fromkeys(self.values["segment_ends"].tolist()))
        lengths, fewest = (b - a for a, b in pairwise([0, *ends])), FEWEST_KEYS[x.shape[3]]
        long = sum(length**2 for length in lengths if length >= fewest)
        return 2 * long * x[0, 0].numel()


@contextmanager
def computed_by(call: Computed) -> Iterator[None]:
    """Within the context, `call` computes everything that could run in FP8. For `calibrate`."""
    _computed.append(call)
    try:
        yield
    finally:
        _computed.pop()


class Blocks(Protocol):
    """All the blocks of a tower, in one of their forms."""

    def __call__(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, values: Values
    ) -> tuple[Tensor, list[Tensor]]:
        """x [patches, width]; cos, sin float32 [patches, head size / 2], None without rotary.

        May overwrite x. Returns the last hidden state and those after each tapped layer (for
        deepstack).
        """


Attend = Callable[[Tensor, Values], Tensor]
"""The part of an Attention that blocks need: its `__call__`."""

BlocksForm = Callable[
    [Sequence[BlockWeights], Style, Attend | Sequence[Attend], Sequence[int]], Blocks
]
"""Builds the blocks from weights, style, attention (one for all layers, or one per layer) and the
layers that are tapped."""


def of_each(attention: Attend | Sequence[Attend], layers: int) -> Sequence[Attend]:
    return [attention] * layers if callable(attention) else attention


class ReferenceBlocks:
    """Plain torch: the form that every other form is compared with."""

    def __init__(
        self,
        weights: Sequence[BlockWeights],
        style: Style,
        attention: Attend | Sequence[Attend],
        taps: Sequence[int] = (),
    ) -> None:
        self.weights = [bounded_block(each) for each in weights] if style.fast else weights
        self.style = style
        self.attention = of_each(attention, len(weights))
        self.taps = taps

    def __call__(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, values: Values
    ) -> tuple[Tensor, list[Tensor]]:
        tapped = []
        windows = windows_of(values)
        for index, layer in enumerate(between(self.weights)):
            seen = windows if index in self.style.windowed else values
            qkv = self.before(x, cos, sin, layer)
            x = self.after(x, self.attend(index, qkv, seen, layer), layer)
            if index in self.taps:
                tapped.append(x)
        return x, tapped

    def before(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, layer: BlockWeights
    ) -> Tensor:
        """The part of a layer before attention. Returns packed q, k, v, rotated."""
        y = x if self.style.post_norm else self.norm(x, layer.norm1)
        qkv = layer.qkv.gemm(y).view(len(x), 3, self.style.heads, -1)
        if layer.qk_norm is not None:
            count = len(layer.qk_norm)
            normed = qk_normed(qkv[:, :count], layer.qk_norm, self.style.epsilon)
            qkv = torch.cat([normed, qkv[:, count:]], dim=1)
        if cos is not None and sin is not None:
            qkv = torch.cat([rotate(qkv[:, :2], cos, sin), qkv[:, 2:]], dim=1)
        return qkv

    def attend(self, index: int, qkv: Tensor, seen: Values, layer: BlockWeights) -> Tensor:
        attention = self.attention[index]
        if _computed and layer.attention and index not in self.style.windowed:
            attending = BlockAttention(layer.attention, cast("Attention", attention), seen)
            if attending.operations(qkv):
                return _computed[-1](attending, qkv)
        if layer.attention_fp8:
            return cast("Attention", attention).fp8(qkv, seen, None, None)
        return attention(qkv, seen)

    def after(self, x: Tensor, attended: Tensor, layer: BlockWeights) -> Tensor:
        y = layer.proj.linear(attended)
        if self.style.post_norm:
            x = x + self.norm(y, layer.norm1)
            return x + self.norm(self.mlp(x, layer), layer.norm2)
        if layer.after is None:
            x = x + y
            return x + self.mlp(self.norm(x, layer.norm2), layer)
        x = x + self.norm(y, layer.after[0])
        return x + self.norm(self.mlp(self.norm(x, layer.norm2), layer), layer.after[1])

    def norm(self, x: Tensor, norm: Affine) -> Tensor:
        return NORMS[self.style.norm](x, norm, self.style.epsilon)

    def mlp(self, x: Tensor, layer: BlockWeights) -> Tensor:
        up = ACTIVATIONS[self.style.activation](layer.up.gemm(x))
        return layer.down.gemm(up)


class CompiledBlocks(ReferenceBlocks):
    """ReferenceBlocks with torch.compile for what precedes attention and for what follows it.

    The number of rows is dynamic, so that all layers and budgets share one compilation. The first
    call compiles, which takes seconds and must not happen during a capture, so every capture warms
    up first.
    """

    def __init__(
        self,
        weights: Sequence[BlockWeights],
        style: Style,
        attention: Attend | Sequence[Attend],
        taps: Sequence[int] = (),
    ) -> None:
        super().__init__(weights, style, attention, taps)
        self.compiled_before = torch.compile(super().before, fullgraph=True)
        self.compiled_after = torch.compile(super().after, fullgraph=True)

    def before(
        self, x: Tensor, cos: Tensor | None, sin: Tensor | None, layer: BlockWeights
    ) -> Tensor:
        for rows in (x, cos, sin):
            if rows is not None:
                torch._dynamo.mark_dynamic(rows, 0)
        made: Tensor = self.compiled_before(x, cos, sin, layer)
        return made

    def after(self, x: Tensor, attended: Tensor, layer: BlockWeights) -> Tensor:
        for rows in (x, attended):
            torch._dynamo.mark_dynamic(rows, 0)
        made: Tensor = self.compiled_after(x, attended, layer)
        return made


def blocks_of(form: BlockForm) -> BlocksForm:
    if form == "reference":
        return ReferenceBlocks
    if form == "compile":
        return CompiledBlocks
    from actors.models.layers.fast import FastBlocks  # needs Triton, which comes with CUDA

    return FastBlocks


def windows_of(values: Values) -> dict[str, Tensor]:
    return {
        name.removeprefix(WINDOW): value
        for name, value in values.items()
        if name.startswith(WINDOW)
    }


def layer_norm(x: Tensor, norm: Affine, epsilon: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, epsilon)


def rms_norm(x: Tensor, norm: Affine, epsilon: float) -> Tensor:
    """Over the last dimension. Checkpoints have no shift for it, but see `centred_inputs`."""
    return F.rms_norm(x, x.shape[-1:], norm.weight, epsilon) + norm.bias


def qk_normed(qk: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of qk [patches, 2 or 3, heads, head size], over all heads together or over each,
    depending on the size of the weight."""
    normed = qk.reshape(*qk.shape[:2], -1, weight.shape[1])
    return (F.rms_norm(normed, normed.shape[-1:], eps=epsilon) * weight[:, None]).view(qk.shape)


def quick_gelu(x: Tensor) -> Tensor:
    """transformers.activations.QuickGELUActivation."""
    return x * torch.sigmoid(1.702 * x)


def swiglu(x: Tensor) -> Tensor:
    """[..., 2 x width], gate before up, to [..., width]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_10(x: Tensor) -> Tensor:
    """Like swiglu, with gate clamped to at most 10 and up to [-10, 10] (GLM-5-next)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate.clamp(max=10)) * up.clamp(-10, 10)


def geglu_tanh(x: Tensor) -> Tensor:
    """Like swiglu, with GELU (tanh)."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "swiglu": swiglu,
    "swiglu_10": swiglu_10,
    "geglu_tanh": geglu_tanh,
}

NORMS: dict[Norm, Callable[[Tensor, Affine, float], Tensor]] = {
    "layer": layer_norm,
    "rms": rms_norm,
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [patches, ..., head size], which pairs the halves of a head, in
    float32."""
    first, second = x.float().chunk(2, -1)
    shape = (len(x),) + (1,) * (x.dim() - 2) + (-1,)
    cos, sin = cos.view(shape), sin.view(shape)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
