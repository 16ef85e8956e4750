"""The vision tower of Kimi-VL (MoonViT) with its projector, and that of Kimi-K2.5.

Its rotary embedding rotates neighbouring values of a head, columns before rows; ours rotates
halves, rows before columns: q and k are permuted once, at load, which leaves the scores unchanged.

Kimi-K2.5 takes videos, too, in groups of frames that attend to each other: a group is one attention
segment. A sinusoid tells its frames apart, and they are pooled before the projector: a group has
the rows of one picture. Computes what transformers.models.kimi_k25 computes in Kimi_K25VisionModel
and get_video_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Affine, BlocksForm, Style, layer_norm
from actors.models.layers.patches import Merger, Positions, bicubic_taps, weighted
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    reordered,
)
from actors.models.packed import PackedParts, PackedTower, segments_of
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

PREFIXES = ("vision_tower.", "multi_modal_projector.", "mm_projector.")

NAMES = BlockNames(
    block="encoder.blocks",
    norm1="norm0",
    qkv=("wqkv",),
    proj="wo",
    norm2="norm1",
    up=("mlp.fc0",),
    down="mlp.fc1",
)

LAST_NORM = "encoder.final_layernorm"

EPSILON = 1e-5  # torch's default for LayerNorm: the configuration does not say


@dataclass(frozen=True, slots=True)
class KimiParts:
    """The parts of the tower, on its device."""

    packed: PackedParts
    """Its head is the projector alone."""
    final: Affine
    """The last norm."""
    times: Tensor | None
    """[1 + frames of a group, width]: added according to the place in time. The first row, zeros,
    is for a single picture. None: Kimi-VL."""


def family(spec: ModelSpec) -> Family[KimiParts]:
    tower = Dimensions.read(spec)
    side = int(spec.vision["init_pos_emb_height"])
    up, down = projector(spec)
    expected = {
        **affine("patch_embed.proj", (tower.width, 3, tower.patch_size, tower.patch_size)),
        **affine("patch_embed.pos_emb", (side, side, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(LAST_NORM, (tower.width,)),
        **affine("pre_norm", (tower.width,)),
        **affine(up, (tower.merged, tower.merged)),
        **affine(down, (spec.width, tower.merged)),
    }
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, KimiTower)


def projector(spec: ModelSpec) -> tuple[str, str]:
    return ("proj.0", "proj.2") if spec.family == "kimi_k25" else ("linear_1", "linear_2")


def parts(spec: ModelSpec, weights: Weights) -> KimiParts:
    tower = Dimensions.read(spec)
    norm, up, down = (weights.affine(name) for name in ("pre_norm", *projector(spec)))
    merger = Merger(norm, up, down, epsilon=EPSILON)
    pairs = torch.arange(tower.head_size).view(-1, 2)
    order = torch.cat([pairs[1::2], pairs[0::2]]).t().flatten()
    table = weights.place(weights.tensors["patch_embed.pos_emb.weight"].flatten(0, 1))
    packed = PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec),
        layers=[
            reordered(layer, tower.heads, order) for layer in weights.blocks(NAMES, tower.depth)
        ],
        style=Style(tower.heads, "gelu_tanh", epsilon=EPSILON),
        head=lambda x, tapped: merger(x),
        positions=Positions(table, bicubic_taps, taps=16),
    )
    times = None
    if spec.family == "kimi_k25":
        times = weights.place(time_table(int(spec.vision["pos_emb_time"]), tower.width))
    return KimiParts(packed, weights.affine(LAST_NORM), times)


def time_table(frames: int, width: int) -> Tensor:
    """float32 [1 + frames, width]: zeros, then transformers' compute_pos_embed."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(frames, dtype=torch.float32)[:, None] * frequencies
    return F.pad(torch.cat([angles.sin(), angles.cos()], 1), (0, 0, 1, 0))


class KimiTower(PackedTower):
    """A packed tower; that of Kimi-K2.5 has inputs of its own for packs with videos."""

    def __init__(
        self, spec: ModelSpec, parts: KimiParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.packed, attention, blocks)
        self.final, self.times = parts.final, parts.times

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        if self.times is None:
            return {}
        patches, group = tokens * self.sizing.merge_size**2, len(self.times) - 1
        return {
            "times": ((patches,), torch.int32),
            "pooled": ((patches, group), torch.int32),
            "pooled_weights": ((patches, group), torch.float32),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        values = super().metadata(path, plans, tokens, segments)
        if self.times is None or not any(plan.frames for plan in plans):
            return values
        times, pooled, weights, start = [], [], [], 0
        for plan in plans:
            picture = min(plan.patches, plan.grid_thw[1] * plan.grid_thw[2])
            for length in segments_of(plan):
                count = length // picture
                times.append(torch.arange(count).repeat_interleave(picture) + (count > 1))
                places = torch.arange(start, start + length).view(count, picture).T
                spare = (0, len(self.times) - 1 - count)
                pooled.append(F.pad(places, spare))
                weights.append(F.pad(torch.full((picture, count), 1 / count), spare))
                start += length
        return values | {
            "times": torch.cat(times).int(),
            "pooled": torch.cat(pooled).int(),
            "pooled_weights": torch.cat(weights),
        }

    def begin(self, values: Values) -> Tensor:
        x = super().begin(values)
        if self.times is None or "times" not in values:
            return x
        return x + F.embedding(values["times"], self.times)

    def end(self, x: Tensor, tapped: Sequence[Tensor], values: Values) -> Tensor:
        """With videos, the pooled rows of all groups become contiguous."""
        x = layer_norm(x, self.final, EPSILON)
        if "pooled" in values:
            x = weighted(x, values["pooled"], values["pooled_weights"]).to(x.dtype)
        return self.parts.head(x, tapped)
