"""The vision tower of Pixtral, Mistral 3 and LightOnOCR with its projector: RMS norms, SwiGLU.

Computes what transformers.models.pixtral computes in PixtralVisionModel, and llava, mistral3 or
lighton_ocr in their projectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention
from actors.models.layers.block import BlocksForm, Style, rms_norm
from actors.models.layers.patches import rotary_tables
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("vision_tower.", "multi_modal_projector.", "vision_encoder.", "vision_projection.")
"""The last two are LightOnOCR's."""

NAMES = BlockNames(
    block="transformer.layers",
    norm1="attention_norm",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.o_proj",
    norm2="ffn_norm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    biased=False,
)

EPSILON = 1e-5  # of the tower's norms: the configuration does not say


def family(spec: ModelSpec) -> Family[PackedParts]:
    tower, bias = Dimensions.read(spec), bool(spec.vision["projector_bias"])
    patch = (3, tower.patch_size, tower.patch_size)
    expected = {
        **affine("patch_conv", (tower.width, *patch), bias=False),
        **affine("ln_pre", (tower.width,), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine("linear_1", (spec.width, tower.width), bias=bias),
        **affine("linear_2", (spec.width, spec.width), bias=bias),
    }
    if "projector_epsilon" in spec.vision:
        expected |= affine("norm", (tower.width,), bias=False)
        expected |= affine("patch_merger.merging_layer", (tower.width, tower.merged), bias=False)
    return Family(PREFIXES, expected, tower.rotary_head_size, parts, PixtralTower)


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, before = Dimensions.read(spec), weights.affine("ln_pre")
    first, second = weights.affine("linear_1"), weights.affine("linear_2")
    norm, merging = None, None
    if "projector_epsilon" in spec.vision:
        norm = weights.affine("norm")
        # Published: for each channel the patches of a token. Here the patches are concatenated.
        stored = weights.tensors["patch_merger.merging_layer.weight"]
        channels = stored.unflatten(1, (tower.width, -1))
        merging = weights.place(channels.transpose(1, 2).flatten(1))

    def stem(x: Tensor) -> Tensor:
        return rms_norm(x, before, EPSILON)

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        if norm is not None and merging is not None:
            x = rms_norm(x, norm, float(spec.vision["projector_epsilon"]))
            x = F.linear(x.view(-1, tower.merged), merging)
        return second.linear(F.gelu(first.linear(x)))

    return PackedParts(
        embedding=weights.embedding("patch_conv", spec),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "swiglu", epsilon=EPSILON, norm="rms"),
        head=head,
        stem=stem,
    )


class PixtralTower(PackedTower):
    """A packed tower in which rows take every other rotary frequency, and columns take the rest.

    The tables of the columns, whose frequencies are lower, follow those of the rows.
    """

    def __init__(
        self, spec: ModelSpec, parts: PackedParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts, attention, blocks)
        self.longest = len(self.cos)
        head_size = len(parts.embedding.weight) // parts.style.heads
        slower = self.theta ** (-2 / head_size)
        columns = rotary_tables(self.longest, head_size, self.theta, slower)
        cos, sin = (table.to(self.cos.device) for table in columns)
        self.cos, self.sin = torch.cat([self.cos, cos]), torch.cat([self.sin, sin])

    def rows_of_grid(self, rows: int, columns: int) -> dict[str, Tensor]:
        values = super().rows_of_grid(rows, columns)
        beyond = torch.tensor([0, self.longest], dtype=torch.int32)
        return values | {"places": values["places"] + beyond}
