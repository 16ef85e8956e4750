"""The audio encoder of Qwen3-Omni and Qwen3-ASR; transformers: Qwen3OmniMoeAudioEncoder.

Convolutions over frames and mels make 13 positions of each window of 100 frames. The convolutions
of transformers and ours differ in the order of their axes: here channels are last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.errors import ConfigError
from actors.families.whisper.tower import (
    EPSILON,
    KERNEL,
    NAMES,
    AudioParts,
    AudioTower,
    audio,
    last_norm,
    sinusoids,
)
from actors.kernels.attention import Shapes, Values
from actors.models.layers.block import Affine, Style
from actors.models.layers.weights import Dimensions, Expected, Weights, affine, expected_blocks
from actors.models.tower import Family
from actors.spec.audio import BEYOND, HALVINGS, halved
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

PREFIXES = ("thinker.audio_tower.", "audio_tower.", "multi_modal_projector.")
BLOCKS = replace(NAMES, unbiased=frozenset())
CONVOLUTIONS = tuple(f"conv2d{number}" for number in range(1, HALVINGS + 1))
CONVOLVED_WINDOWS = 32
"""Windows that are convolved at a time. Each takes 3 MB of memory after the first convolution."""
SINUSOIDS = frozenset({"positional_embedding.positional_embedding"})


@dataclass(frozen=True, slots=True)
class ConvolvedParts(AudioParts):
    out: Affine
    """From the output of the convolutions to [positions, width]."""


def family(spec: ModelSpec) -> Family[ConvolvedParts]:
    head_size = Dimensions.read(spec).head_size
    return Family(PREFIXES, expected(spec), head_size, parts, ChunkTower, unused=SINUSOIDS)


def projector(spec: ModelSpec) -> tuple[str, str]:
    return ("linear_1", "linear_2") if spec.vision["projector"] else ("proj1", "proj2")


def expected(spec: ModelSpec) -> Expected:
    tower, channels = Dimensions.read(spec), int(spec.vision["downsample_hidden_size"])
    (first, *others), (up, down) = CONVOLUTIONS, projector(spec)
    kernel, mels = (KERNEL, KERNEL), halved(audio(spec).mels)
    shapes = affine(first, (channels, 1, *kernel))
    for name in others:
        shapes |= affine(name, (channels, channels, *kernel))
    return {
        **shapes,
        **affine("conv_out", (tower.width, channels * mels), bias=False),
        **expected_blocks(BLOCKS, tower.depth, tower.width, tower.mlp_width),
        **affine("ln_post", (tower.width,)),
        **affine(up, (tower.width, tower.width)),
        **affine(down, (spec.width, tower.width)),
    }


def parts(spec: ModelSpec, weights: Weights) -> ConvolvedParts:
    tower, sizing = Dimensions.read(spec), audio(spec)
    norm = last_norm(weights, "ln_post")
    up, down = (weights.affine(name) for name in projector(spec))
    out = weights.affine("conv_out")
    by_channel = out.weight.unflatten(1, (-1, halved(sizing.mels)))

    def head(x: Tensor) -> Tensor:
        return down.linear(F.gelu(up.linear(norm(x))))

    return ConvolvedParts(
        convolutions=[convolution(weights, name) for name in CONVOLUTIONS],
        positions=weights.place(sinusoids(sizing.window_tokens, tower.width)),
        layers=weights.blocks(BLOCKS, tower.depth),
        style=Style(tower.heads, "gelu", EPSILON),
        head=head,
        out=replace(out, weight=by_channel.transpose(1, 2).flatten(1)),
    )


def convolution(weights: Weights, name: str) -> Affine:
    """A convolution over [frames, mels]. The checkpoint's is over [mels, frames]."""
    found = weights.affine(name)
    turned = found.weight.transpose(2, 3).contiguous(memory_format=torch.channels_last)
    return replace(found, weight=turned)


class ChunkTower(AudioTower):
    """Like AudioTower, but convolutions see the patches of a window together."""

    parts: ConvolvedParts

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        """Raises ConfigError for a budget that is not whole windows."""
        if tokens % self.sizing.window_tokens:
            raise ConfigError(
                f"graphs.token_budgets: {tokens} is not a multiple of {self.sizing.window_tokens}, "
                f"the tokens per window of {self.spec.id}"
            )
        return super().inputs(path, tokens, segments)

    def places(self, positions: int) -> Shapes:
        return {}

    def placed(self, plans: Iterable[ItemPlan]) -> dict[str, Tensor]:
        return {}

    def embedded(self, values: Values) -> Tensor:
        patches = values["patches"].view(torch.float32).to(self.dtype)
        windows = patches.view(-1, self.sizing.window_tokens, patches.shape[1])
        windows = windows.split(CONVOLVED_WINDOWS)
        x = self.parts.out.linear(torch.cat([self.convolved(part) for part in windows]))
        x += self.parts.positions
        return x.flatten(0, 1)

    def convolved(self, patches: Tensor) -> Tensor:
        """[windows, patches, values] to [windows, positions, mels x channels]."""
        frames: Tensor = patches.flatten(1).unflatten(1, (-1, self.sizing.mels))
        frames = frames[:, : self.sizing.window_frames]
        seen = frames[:, :, 0] != BEYOND
        x = (frames * seen[:, :, None])[:, None]
        for layer in self.parts.convolutions:
            x = F.gelu(F.conv2d(x, layer.weight, layer.bias, stride=2, padding=1))
            seen = seen[:, ::2]
            end_(x, seen.sum(1))
        return x.permute(0, 2, 3, 1).flatten(2)


def end_(x: Tensor, lengths: Tensor) -> None:
    """Zeroes the position after the last of each window in x [windows, channels, positions, mels].
    It is the only one beyond the window that positions in the window see in the next
    convolution."""
    rows = torch.arange(len(x), device=x.device)
    ends = lengths.clamp(max=x.shape[2] - 1)
    x[rows, :, ends] *= (lengths == x.shape[2])[:, None, None]
