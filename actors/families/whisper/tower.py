"""Whisper's encoder, on which models that hear build; transformers: WhisperEncoder.

Two convolutions turn the frames of a patch into a position. Positions are packed; each window of a
sound is a segment, so that a short sound costs no silence unless the model hears it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
from actors.models.tower import Family, Tower
from actors.spec.audio import SEEN_FRAMES, AudioSizing
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

Head = Callable[[Tensor], Tensor]
"""[positions, width] to [tokens, width of a row]."""


@dataclass(frozen=True, slots=True)
class AudioParts:
    """On the tower's device."""

    convolutions: tuple[Affine, Affine]
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
    tower, sizing = Dimensions.read(spec), audio(spec)
    positions = int(spec.vision["max_source_positions"])
    return {
        **affine("conv1", (tower.width, sizing.mels, KERNEL)),
        **affine("conv2", (tower.width, tower.width, KERNEL)),
        **affine("embed_positions", (positions, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("layer_norm", (tower.width,)),
    }


def parts(spec: ModelSpec, weights: Weights) -> AudioParts:
    return parts_with(spec, weights, last_norm(weights))


def parts_with(spec: ModelSpec, weights: Weights, head: Head) -> AudioParts:
    tower = Dimensions.read(spec)
    return AudioParts(
        convolutions=(convolution(weights, "conv1"), convolution(weights, "conv2")),
        positions=weights.place(weights.tensors["embed_positions.weight"]),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu", EPSILON),
        head=head,
    )


def last_norm(weights: Weights) -> Head:
    last = weights.affine("layer_norm")
    return lambda x: layer_norm(x, last, EPSILON)


def convolution(weights: Weights, name: str) -> Affine:
    found = weights.affine(name)
    return replace(found, weight=found.weight.transpose(1, 2).flatten(1))


class AudioTower(Tower):
    """One path; one attention segment per window of a sound."""

    def __init__(
        self, spec: ModelSpec, parts: AudioParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        self.spec = spec
        self.sizing = audio(spec)
        self.parts = replace(parts, layers=())  # the blocks have them, perhaps in another form
        self.attention = attention
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        self.blocks = blocks(parts.layers, parts.style, attention, ())

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        positions = tokens * self.sizing.stack
        patch_bytes = self.sizing.patch_values * torch.float32.itemsize
        return {
            "patches": ((positions, patch_bytes), torch.uint8),
            "positions": ((positions,), torch.int32),
            **self.attention.inputs(positions, self.segments(tokens, segments)),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        lengths: list[int] = []
        for plan in plans:
            windows, _, length = plan.grid_thw
            # The positions of a last token that gives no row: one of them is beyond the sound.
            beyond = plan.path_tokens[0] - plan.tokens
            lengths += [length] * (windows - 1) + [length - beyond] + [beyond] * bool(beyond)
        places = [torch.arange(plan.grid_thw[2]).repeat(plan.grid_thw[0]) for plan in plans]
        positions, room = tokens * self.sizing.stack, self.segments(tokens, segments)
        return {
            "positions": torch.cat(places).int(),
            **self.attention.metadata(lengths, positions, room),
        }

    def segments(self, tokens: int, items: int) -> int:
        """The most attention segments: an item's last window is two, where one is incomplete."""
        return 2 * items + tokens // self.sizing.window_tokens

    def forward(self, path: str, values: Values) -> Tensor:
        x = self.convolved(values["patches"], values["positions"])
        x += F.embedding(values["positions"], self.parts.positions)
        x, _ = self.blocks(x, None, None, values)
        return self.parts.head(x)

    def convolved(self, patches: Tensor, positions: Tensor) -> Tensor:
        """uint8 [positions, bytes of a patch] to [positions, width]."""
        first, second = self.parts.convolutions
        frames = patches.view(torch.float32).to(self.dtype).unflatten(1, (SEEN_FRAMES, -1))
        x = frames.unfold(1, KERNEL, 1).transpose(2, 3).flatten(2)
        x = F.gelu(first.linear(x))
        # Before a window the second convolution sees zeros, not the first one's bias.
        x = torch.cat([x[:, :1] * (positions > 0)[:, None, None], x[:, 1:]], 1)
        return F.gelu(second.linear(x.flatten(1)))

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        tokens = [plan.path_tokens[0] for plan in plans]
        computed = outputs[0][: sum(tokens)].split(tokens)
        rows = [part[: plan.tokens] for part, plan in zip(computed, plans, strict=True)]
        return torch.cat(rows)


def audio(spec: ModelSpec) -> AudioSizing:
    assert isinstance(spec.sizing, AudioSizing)
    return spec.sizing
