"""The vision tower of Hunyuan-VL with its projector, which adds rows of its own.

Computes what transformers.models.hunyuan_vl computes in get_image_features. The graph ends with the
rows of tokens. The rows that begin an image, end it and end its lines are constants, which are
added after the graph, as in DeepSeek-OCR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.kernels.attention import Attention
from actors.models.layers.block import Affine, BlocksForm, Style, rms_norm
from actors.models.layers.patches import Positions, centred_bilinear_taps
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
    table_side,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family, chosen
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

PREFIXES = ("vit.",)
UNUSED = frozenset({"perceive.image_sep"})

NAMES = BlockNames(
    block="layers",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.o_proj",
    norm2="post_attention_layernorm",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)

PATCHES = "embeddings.patch_embedding"
POSITIONS = "embeddings.position_embedding"


@dataclass(frozen=True, slots=True)
class HunyuanParts:
    """The parts of the tower, on its device."""

    packed: PackedParts
    added: Tensor
    """[3, width of a row]: what ends a line, begins an image and ends it."""


def family(spec: ModelSpec) -> Family[HunyuanParts]:
    tower = Dimensions.read(spec)
    width, merge = tower.width, tower.merge_size
    expected = {
        **affine(PATCHES, (width, 3, tower.patch_size, tower.patch_size)),
        # The first is for a class token, which the tower does not have.
        **affine(POSITIONS, (table_side(spec) ** 2 + 1, width), bias=False),
        **expected_blocks(NAMES, tower.depth, width, tower.mlp_width),
        **affine("perceive.before_rms", (width,), bias=False),
        **affine("perceive.proj.0", (2 * width, width, merge, merge)),
        **affine("perceive.proj.2", (4 * width, 2 * width, 1, 1)),
        **affine("perceive.mlp", (spec.width, 4 * width)),
        **affine("perceive.after_rms", (spec.width,), bias=False),
        "perceive.image_newline": (4 * width,),
        "perceive.image_begin": (spec.width,),
        "perceive.image_end": (spec.width,),
    }
    return Family(PREFIXES, expected, tower.head_size, parts, HunyuanTower, UNUSED)


def parts(spec: ModelSpec, weights: Weights) -> HunyuanParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["rms_norm_eps"])
    before, after = (weights.affine(f"perceive.{name}_rms") for name in ("before", "after"))
    # The patches of a token are adjacent, each with all its channels.
    filters = weights.tensors["perceive.proj.0.weight"].permute(0, 2, 3, 1).flatten(1)
    merge = Affine(weights.place(filters), weights.place(weights.tensors["perceive.proj.0.bias"]))
    widen, last = weights.affine("perceive.proj.2"), weights.affine("perceive.mlp")
    table = weights.place(weights.tensors[f"{POSITIONS}.weight"][1:])

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        x = F.gelu(merge.linear(rms_norm(x, before, epsilon).view(-1, tower.merged)))
        x = F.linear(x, widen.weight.flatten(1), widen.bias)
        return rms_norm(last.linear(x), after, epsilon)

    newline, begin, end = (
        weights.place(weights.tensors[f"perceive.image_{name}"])
        for name in ("newline", "begin", "end")
    )
    packed = PackedParts(
        embedding=weights.embedding(PATCHES, spec),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu", epsilon),
        head=head,
        positions=Positions(table, centred_bilinear_taps, taps=4),
        rotary=False,
    )
    added = torch.stack([last.linear(newline), begin, end])
    return HunyuanParts(packed, rms_norm(added, after, epsilon))


class HunyuanTower(PackedTower):
    """A packed tower, with more rows in an image than it computes."""

    def __init__(
        self, spec: ModelSpec, parts: HunyuanParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.packed, attention, blocks)
        self.added = parts.added

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        (rows,) = outputs
        return chosen([rows, self.added], order(plans, self.sizing.merge_size, len(rows)))


def order(plans: Sequence[ItemPlan], merge: int, computed: int) -> Tensor:
    """Where to find each row of the items: int64 [rows of all items].

    Indices into the `computed` rows of tokens, then the three that are added.
    """
    newline, begin, end = range(computed, computed + 3)
    found, before = [], 0
    for plan in plans:
        _, rows, columns = plan.grid_thw
        tokens = torch.arange(before, before + plan.path_tokens[0])
        lines = F.pad(tokens.view(rows // merge, columns // merge), (0, 1), value=newline)
        found.append(F.pad(F.pad(lines.flatten(), (1, 0), value=begin), (0, 1), value=end))
        before += plan.path_tokens[0]
    return torch.cat(found)
