"""Conformer towers: encoders of packed sounds.

A layer is half a feed-forward, attention, a convolution, half a feed-forward and a norm. Layers
exist in plain torch only, because attention scores have terms that depend on the distance between
two positions, which none of our kernels adds. A pack is one sequence in which sounds do not see
each other; the distance between two positions of a sound is the same in the pack. Shapes are
static: which position belongs to which sound is data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.kernels.break_points import between
from actors.models.layers.block import NORMS, Affine, BlocksForm, Norm
from actors.models.layers.weights import Expected, Weights, affine
from actors.models.packed import segments_of
from actors.models.tower import Tower
from actors.spec.audio import BEYOND, ConformerSizing
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

KERNEL = 3  # frames, and mels, of the convolutions that halve them
CONVOLVED = 256
"""Positions that are convolved at a time. With 1024 channels, each takes 0.6 MB after the first
convolution."""
APART = -1  # the end of a segment for what is no position: no segment ends there

Module = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Halving:
    """A convolution over frames and mels with a stride of 2, and ReLU."""

    kernel: Affine
    groups: int
    after: Module = lambda x: x
    """Applied to [..., channels, frames, mels], before ReLU."""


@dataclass(frozen=True, slots=True)
class FeedForward:
    norm: Affine
    up: Affine
    down: Affine
    after: Affine | None = None
    """The norm of its output, before that is added (Gemma 4)."""


@dataclass(frozen=True, slots=True)
class Attending:
    norm: Affine
    qkv: Affine
    proj: Affine
    terms: tuple[Tensor, ...] = ()
    """What else `scored` needs of this layer."""
    after: Affine | None = None


@dataclass(frozen=True, slots=True)
class Convolution:
    """A depthwise convolution over positions, between two linear layers."""

    norm: Affine
    up: Affine
    """[2 x width, width]."""
    taps: Tensor
    """[width, taps]."""
    bias: Tensor
    middle: Module
    """Applied before the activation."""
    down: Affine


@dataclass(frozen=True, slots=True)
class ConformerLayer:
    before: FeedForward
    attending: Attending
    convolution: Convolution
    after: FeedForward
    norm: Affine


@dataclass(frozen=True, slots=True)
class ConformerStyle:
    heads: int
    norm: Norm
    epsilon: float
    up: Module
    """Applied after the first layer of a feed-forward."""
    glu: Module
    """Applied after the first linear layer of a convolution: [..., 2 x width] to [..., width]."""
    later: int
    """How many taps of a convolution are after the position. The others are at it or before it."""


@dataclass(frozen=True, slots=True)
class ConformerParts:
    """What differs between families, on the tower's device."""

    halvings: Sequence[Halving]
    out: Affine
    """From the output of the convolutions to [positions, width]."""
    layers: Sequence[ConformerLayer]
    style: ConformerStyle
    head: Module
    """[positions, width] to [tokens, width of a row]."""


class ConformerTower(Tower):
    """One path. A family implements attention: `context` and `scored`."""

    def __init__(
        self, spec: ModelSpec, parts: ConformerParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        assert isinstance(spec.sizing, ConformerSizing)
        self.spec = spec
        self.sizing = spec.sizing
        self.parts = parts
        self.style = parts.style
        self.dtype: torch.dtype = getattr(torch, spec.dtype)

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """`ends`: where in the pack the segment of each position ends. What an earlier pack left
        beyond the end of this one ends later, and so belongs to no segment of this one."""
        patch_bytes = self.sizing.patch_values * torch.float32.itemsize
        return {
            "patches": ((tokens, patch_bytes), torch.uint8),
            "ends": ((tokens,), torch.int32),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        lengths = list(chain.from_iterable(map(segments_of, plans)))
        ends = torch.tensor(list(accumulate(lengths)), dtype=torch.int32)
        return {"ends": ends.repeat_interleave(torch.tensor(lengths))}

    def forward(self, path: str, values: Values) -> Tensor:
        x, own = self.embedded(values["patches"])
        ends = values["ends"]
        context, near = self.context(ends, own), self.near(ends, own)
        for layer in between(self.parts.layers):
            x = x + 0.5 * self.fed(x, layer.before)
            x = x + self.attended(x, layer.attending, context)
            x = x + self.convolved(x, layer.convolution, near)
            x = x + 0.5 * self.fed(x, layer.after)
            x = self.norm(x, layer.norm)
        return self.parts.head(x)

    @abstractmethod
    def context(self, ends: Tensor, own: Tensor) -> tuple[Tensor, ...]:
        """What `scored` needs of a pack, the same in all layers. `ends`: see `inputs`. `own`, bool
        [positions]: whether a position has frames of its own."""

    @abstractmethod
    def scored(self, qkv: Tensor, terms: tuple[Tensor, ...], context: tuple[Tensor, ...]) -> Tensor:
        """Attention: qkv [3, heads, positions, head size] to [heads, positions, head size]."""

    def near(self, ends: Tensor, own: Tensor) -> Tensor:
        """bool [positions, taps]: which of the positions around each one its convolution sees."""
        taps, later = self.parts.layers[0].convolution.taps.shape[1], self.style.later
        return around(ends, taps, later, value=APART) == ends[:, None]

    def embedded(self, patches: Tensor) -> tuple[Tensor, Tensor]:
        """[positions, width], and which positions have frames of their own."""
        frames = patches.view(torch.float32).unflatten(1, (self.sizing.seen_frames, -1))
        own = frames[:, self.sizing.stride - 1, 0] != BEYOND
        return torch.cat([self.halved(part) for part in frames.split(CONVOLVED)]), own

    def halved(self, frames: Tensor) -> Tensor:
        """[positions, seen frames, mels] to [positions, width]. Beyond the end of a sound, each
        convolution sees zeros, not the output of the previous one."""
        frames = frames.to(self.dtype)
        seen = frames[:, :, 0] != BEYOND
        x = (self.scaled(frames) * seen[:, :, None])[:, None]
        for each in self.parts.halvings:
            weight, bias, groups = each.kernel.weight, each.kernel.bias, each.groups
            x = F.conv2d(x, weight, bias, stride=2, padding=(0, 1), groups=groups)
            seen = seen[:, 1::2]
            x = F.relu(each.after(x)) * seen[:, None, :, None]
        return self.parts.out.linear(x.flatten(1))

    def scaled(self, frames: Tensor) -> Tensor:
        return frames

    def fed(self, x: Tensor, layer: FeedForward) -> Tensor:
        y = layer.down.linear(self.style.up(layer.up.linear(self.norm(x, layer.norm))))
        return self.norm(y, layer.after) if layer.after else y

    def attended(self, x: Tensor, layer: Attending, context: tuple[Tensor, ...]) -> Tensor:
        qkv = layer.qkv.linear(self.norm(x, layer.norm)).view(len(x), 3, self.style.heads, -1)
        y = self.scored(qkv.permute(1, 2, 0, 3), layer.terms, context)
        y = layer.proj.linear(y.transpose(0, 1).flatten(1).to(self.dtype))
        return self.norm(y, layer.after) if layer.after else y

    def convolved(self, x: Tensor, layer: Convolution, near: Tensor) -> Tensor:
        y = self.style.glu(layer.up.linear(self.norm(x, layer.norm)))
        seen = around(y, near.shape[1], self.style.later)
        y = (seen * (near[:, None] * layer.taps)).sum(-1) + layer.bias
        return layer.down.linear(F.silu(layer.middle(y)))

    def norm(self, x: Tensor, norm: Affine) -> Tensor:
        return NORMS[self.style.norm](x, norm, self.style.epsilon)

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        computed = [plan.path_tokens[0] for plan in plans]
        parts = outputs[0][: sum(computed)].split(computed)
        return torch.cat([part[: plan.tokens] for part, plan in zip(parts, plans, strict=True)])


def around(x: Tensor, taps: int, later: int, value: float = 0) -> Tensor:
    """Windows of x [positions, ...], as [positions, ..., taps]: of each row, the rows before it,
    itself, and `later` rows after it."""
    rows = (*(0, 0) * (x.dim() - 1), taps - 1 - later, later)
    return F.pad(x, rows, value=value).unfold(0, taps, 1)


def together(ends: Tensor) -> Tensor:
    """bool [positions, positions]: which are of the same segment."""
    return ends[:, None] == ends


def pointwise(weights: Weights, name: str) -> Affine:
    """A convolution of one tap as a linear layer."""
    found = weights.affine(name)
    return Affine(found.weight.flatten(1), found.bias)


def expected_halvings(
    names: Sequence[tuple[str, str]], first: str, out: str, channels: int, width: int, mels: int
) -> Expected:
    """The tensors of Phi-4's and Parakeet's convolutions: one over a single channel (`first`),
    depthwise ones that are each followed by a pointwise one (`names`), and a linear layer."""
    shapes = affine(first, (channels, 1, KERNEL, KERNEL))
    for kernel, mix in names:
        shapes |= affine(kernel, (channels, 1, KERNEL, KERNEL))
        shapes |= affine(mix, (channels, channels, 1, 1))
    halved = -(-mels // 2 ** (1 + len(names)))
    return shapes | affine(out, (width, channels * halved))


def separable_halvings(
    weights: Weights, names: Sequence[tuple[str, str]], first: str
) -> list[Halving]:
    """The weights of `expected_halvings`."""

    def mixed(name: str) -> Module:
        found = weights.affine(name)
        return lambda x: F.conv2d(x, found.weight, found.bias)

    others = [(weights.affine(kernel), mixed(mix)) for kernel, mix in names]
    return [
        Halving(weights.affine(first), 1),
        *(Halving(kernel, len(kernel.weight), after) for kernel, after in others),
    ]
