"""The vision towers of Qwen3-VL, of Qwen3-Omni and, without deepstack, of Qwen3.5. Dense and MoE
models have the same.

Computes what transformers.models.qwen3_vl computes in Qwen3VLVisionModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from actors.models.layers.block import Style
from actors.models.layers.patches import Merger, Positions, bilinear_taps
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("visual.", "thinker.visual.")


@dataclass(frozen=True, slots=True)
class MergerNames:
    """A checkpoint's names for its mergers and their layers."""

    deepstack: str = "deepstack_merger_list"
    norm: str = "norm"
    up: str = "linear_fc1"
    down: str = "linear_fc2"


OMNI_NAMES = MergerNames("merger_list", "ln_q", "mlp.0", "mlp.2")


def family(spec: ModelSpec) -> Family[PackedParts]:
    head_size = Dimensions.read(spec).rotary_head_size
    return Family(PREFIXES, expected(spec), head_size, parts, PackedTower)


def expected(spec: ModelSpec) -> Expected:
    tower, vision = Dimensions.read(spec), spec.vision
    patch = (3, int(vision["temporal_patch_size"]), tower.patch_size, tower.patch_size)
    shapes: Expected = {
        "pos_embed.weight": (int(vision["num_position_embeddings"]), tower.width),
        **affine("patch_embed.proj", (tower.width, *patch)),
        **expected_blocks(BlockNames(), tower.depth, tower.width, tower.mlp_width),
    }
    names = merger_names(spec)
    deepstack = {f"{names.deepstack}.{i}": tower.merged for i in range(spec.deepstack)}
    for merger, normed in {"merger": tower.width, **deepstack}.items():
        shapes |= affine(f"{merger}.{names.norm}", (normed,))
        shapes |= affine(f"{merger}.{names.up}", (tower.merged, tower.merged))
        shapes |= affine(f"{merger}.{names.down}", (int(vision["out_hidden_size"]), tower.merged))
    return shapes


def merger_names(spec: ModelSpec) -> MergerNames:
    return OMNI_NAMES if spec.family == "qwen3_omni" else MergerNames()


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    tower, names = Dimensions.read(spec), merger_names(spec)
    # Layers that feed the deepstack mergers, in the order of the mergers. Features are in the order
    # of layers.
    taps: list[int] = spec.vision["deepstack_visual_indexes"]
    deepstack = [f"{names.deepstack}.{taps.index(layer)}" for layer in sorted(taps)]
    mergers = [
        Merger(
            norm=weights.affine(f"{name}.{names.norm}"),
            up=weights.affine(f"{name}.{names.up}"),
            down=weights.affine(f"{name}.{names.down}"),
        )
        for name in ("merger", *deepstack)
    ]

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        rows = x.new_empty(len(x) // tower.merge_size**2, spec.width)
        columns = rows.chunk(len(mergers), dim=1)  # no concatenation: rows take the most memory
        for hidden, merge, out in zip([x, *tapped], mergers, columns, strict=True):
            merge(hidden, out)
        return rows

    return PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec),
        later=weights.later_embedding("patch_embed.proj", spec),
        layers=weights.blocks(BlockNames(), tower.depth),
        style=Style(tower.heads, "gelu_tanh"),
        head=head,
        taps=taps,
        positions=Positions(weights.place(weights.tensors["pos_embed.weight"]), bilinear_taps, 4),
    )
