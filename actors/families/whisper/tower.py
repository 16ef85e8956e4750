"""Whisper's encoder, on which many audio models build; transformers: WhisperEncoder.

Two convolutions turn the frames of a patch into a position. Positions are packed, and each window
of a sound is a segment, so that the silence after a short sound costs nothing unless the model
hears it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import (
    Affine,
    BlocksForm,
    BlockWeights,
    Style,
    layer_norm,
)
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.packed import segments_of
from actors.models.tower import Family, Tower
from actors.spec.audio import BEYOND, SEEN_FRAMES, AudioSizing
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

PREFIXES = ("encoder.",)
NAMES = BlockNames(
    block="layers",
    norm1="self_attn_layer_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.out_proj",
    norm2="final_layer_norm",
    up=("fc1",),
    down="fc2",
    unbiased=frozenset({"self_attn.k_proj"}),
)
KERNEL = 3  # frames of each convolution
EPSILON = 1e-5
LONGEST_WAVE = 10_000  # of sinusoids, in positions over 2 pi

Head = Callable[[Tensor], Tensor]
"""[positions, width] to [tokens, width of a row]."""


@dataclass(frozen=True, slots=True)
class AudioParts:
    """The parts of the tower, on its device."""

    convolutions: Sequence[Affine]
    """[width, KERNEL x values of a frame], frame after frame."""
    positions: Tensor
    """[positions of a window, width]."""
    layers: Sequence[BlockWeights]
    style: Style
    head: Head


def family(spec: ModelSpec) -> Family[AudioParts]:
    tower = Dimensions.read(spec)
    return Family(PREFIXES, expected(spec), tower.head_size, parts, AudioTower)


def expected(spec: ModelSpec) -> Expected:
    tower, positions = Dimensions.read(spec), int(spec.vision["max_source_positions"])
    return {
        **expected_layers(spec),
        **affine("embed_positions", (positions, tower.width), bias=False),
        **affine("layer_norm", (tower.width,)),
    }


def expected_layers(spec: ModelSpec) -> Expected:
    tower = Dimensions.read(spec)
    return {
        **affine("conv1", (tower.width, audio(spec).mels, KERNEL)),
        **affine("conv2", (tower.width, tower.width, KERNEL)),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
    }


def parts(spec: ModelSpec, weights: Weights) -> AudioParts:
    return parts_with(spec, weights, last_norm(weights))


def parts_with(
    spec: ModelSpec, weights: Weights, head: Head, positions: Tensor | None = None
) -> AudioParts:
    """`positions`: used in place of the checkpoint's."""
    tower = Dimensions.read(spec)
    if positions is None:
        positions = weights.tensors["embed_positions.weight"]
    return AudioParts(
        convolutions=(convolution(weights, "conv1"), convolution(weights, "conv2")),
        positions=weights.place(positions),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu", EPSILON),
        head=head,
    )


def last_norm(weights: Weights, name: str = "layer_norm") -> Head:
    last = weights.affine(name)
    return lambda x: layer_norm(x, last, EPSILON)


def sinusoids(length: int, width: int) -> Tensor:
    """float32 [length, width]: the positions of encoders whose checkpoints have none."""
    scales = torch.exp(-math.log(LONGEST_WAVE) / (width // 2 - 1) * torch.arange(width // 2))
    angles = torch.arange(length)[:, None] * scales
    return torch.cat([angles.sin(), angles.cos()], 1)


def convolution(weights: Weights, name: str) -> Affine:
    found = weights.affine(name)
    return replace(found, weight=found.weight.transpose(1, 2).flatten(1))


class AudioTower(Tower):
    """One path; one attention segment per `segment_tokens` of a sound."""

    def __init__(
        self, spec: ModelSpec, parts: AudioParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        self.spec = spec
        self.sizing = audio(spec)
        self.parts = replace(parts, layers=())  # the blocks hold them, perhaps in another form
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.blocks = blocks(parts.layers, parts.style, attention, ())

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        positions = tokens * self.sizing.stack
        patch_bytes = self.sizing.patch_values * torch.float32.itemsize
        return {
            "patches": ((positions, patch_bytes), torch.uint8),
            **self.places(positions),
            **self.attention.inputs(positions, self.segments(tokens, segments)),
        }

    def places(self, positions: int) -> Shapes:
        """The inputs that say which position of its window each one is."""
        return {"positions": ((positions,), torch.int32)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        lengths = list(chain.from_iterable(map(self.lengths, plans)))
        positions, room = tokens * self.sizing.stack, self.segments(tokens, segments)
        return {**self.placed(plans), **self.attention.metadata(lengths, positions, room)}

    def placed(self, plans: Iterable[ItemPlan]) -> dict[str, Tensor]:
        """The values of `places`."""
        lengths = chain.from_iterable(map(segments_of, plans))
        return {"positions": torch.cat([torch.arange(length) for length in lengths]).int()}

    def lengths(self, plan: ItemPlan) -> list[int]:
        """Positions of each attention segment."""
        *whole, last = segments_of(plan)
        # The positions of tokens that give no row, because some of them are beyond the sound.
        beyond = plan.path_tokens[0] - plan.tokens
        return [*whole, last - beyond, *[beyond] * bool(beyond)]

    def segments(self, tokens: int, items: int) -> int:
        """The most attention segments. The last one of an item is split in two if some of its
        tokens give no row."""
        return 2 * items + tokens // self.sizing.segment_tokens

    def forward(self, path: str, values: Values) -> Tensor:
        x, _ = self.blocks(self.embedded(values), None, None, values)
        return self.parts.head(x)

    def embedded(self, values: Values) -> Tensor:
        """[positions, width]."""
        x = self.convolved(values["patches"])
        x += F.embedding(values["positions"], self.parts.positions)
        return x

    def convolved(self, patches: Tensor) -> Tensor:
        """uint8 [positions, bytes of a patch] to [positions, width]."""
        first, second = self.parts.convolutions
        frames = patches.view(torch.float32).to(self.dtype).unflatten(1, (SEEN_FRAMES, -1))
        seen = frames[:, :, :1] != BEYOND
        x = (frames * seen).unfold(1, KERNEL, 1).transpose(2, 3).flatten(2)
        # Beyond a window the second convolution sees zeros, not the first one's bias.
        x = F.gelu(first.linear(x)) * seen[:, 1:-1]
        return F.gelu(second.linear(x.flatten(1)))

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        tokens = [plan.path_tokens[0] for plan in plans]
        computed = outputs[0][: sum(tokens)].split(tokens)
        rows = [part[: plan.tokens] for part, plan in zip(computed, plans, strict=True)]
        return torch.cat(rows)


def audio(spec: ModelSpec) -> AudioSizing:
    assert isinstance(spec.sizing, AudioSizing)
    return spec.sizing
