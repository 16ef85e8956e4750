"""The vision towers of Qwen3-VL and, without deepstack, of Qwen3.5; dense and MoE have the same.

Computes what transformers.models.qwen3_vl computes in Qwen3VLVisionModel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from actors.models.layers.block import Activation, Style
from actors.models.layers.patches import Merger, Positions, bilinear_taps
from actors.models.layers.weights import (
    BlockNames,
    Expected,
    Weights,
    affine,
    expected_blocks,
    stated,
)
from actors.models.packed import PackedParts, PackedTower
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

PREFIXES = ("model.visual.", "visual.")
"""As transformers saves the tower's tensors, and as published."""

ACTIVATIONS: Mapping[str, Activation] = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def family(spec: ModelSpec) -> Family[PackedParts]:
    return Family(PREFIXES, expected, Qwen3Sizes.of, parts, PackedTower)


@dataclass(frozen=True, slots=True)
class Qwen3Sizes:
    depth: int
    width: int
    mlp_width: int
    heads: int
    out_width: int
    patch_size: int
    merge_size: int
    frames: int
    positions_side: int  # the learned positions form a square table with this side
    taps: tuple[int, ...]  # layers that feed the deepstack mergers, in the order of the mergers
    activation: Activation
    theta: float

    @classmethod
    def of(cls, spec: ModelSpec) -> Qwen3Sizes:
        vision = spec.vision
        with stated(spec):
            return cls(
                depth=int(vision["depth"]),
                width=int(vision["hidden_size"]),
                mlp_width=int(vision["intermediate_size"]),
                heads=int(vision["num_heads"]),
                out_width=int(vision["out_hidden_size"]),
                patch_size=int(vision["patch_size"]),
                merge_size=int(vision["spatial_merge_size"]),
                frames=int(vision["temporal_patch_size"]),
                positions_side=int(int(vision["num_position_embeddings"]) ** 0.5),
                taps=tuple(int(layer) for layer in vision["deepstack_visual_indexes"]),
                activation=ACTIVATIONS[vision.get("hidden_act", "gelu_pytorch_tanh")],
                theta=float((vision.get("rope_parameters") or {}).get("rope_theta", 10000)),
            )

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def expected(spec: ModelSpec) -> Expected:
    sizes = Qwen3Sizes.of(spec)
    patch = (3, sizes.frames, sizes.patch_size, sizes.patch_size)
    merged = sizes.width * sizes.merge_size**2
    shapes: Expected = {
        "pos_embed.weight": (sizes.positions_side**2, sizes.width),
        **affine("patch_embed.proj", (sizes.width, *patch)),
        **expected_blocks(BlockNames(), sizes.depth, sizes.width, sizes.mlp_width),
    }
    deepstack = {f"deepstack_merger_list.{index}": merged for index in range(len(sizes.taps))}
    for merger, normed in {"merger": sizes.width, **deepstack}.items():
        shapes |= affine(f"{merger}.norm", (normed,))
        shapes |= affine(f"{merger}.linear_fc1", (merged, merged))
        shapes |= affine(f"{merger}.linear_fc2", (sizes.out_width, merged))
    return shapes


def parts(spec: ModelSpec, weights: Weights) -> PackedParts:
    sizes = Qwen3Sizes.of(spec)

    def merger(name: str) -> Merger:
        return Merger(
            norm=weights.affine(f"{name}.norm"),
            up=weights.affine(f"{name}.linear_fc1"),
            down=weights.affine(f"{name}.linear_fc2"),
        )

    # Features are in the order of layers, whatever the order of the mergers.
    deepstack = (sizes.taps.index(layer) for layer in sorted(sizes.taps))
    mergers = [
        merger("merger"),
        *(merger(f"deepstack_merger_list.{index}") for index in deepstack),
    ]

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        rows = x.new_empty(len(x) // sizes.merge_size**2, spec.width)
        columns = rows.chunk(len(mergers), dim=1)  # no concatenation: rows take the most memory
        for hidden, merge, out in zip([x, *tapped], mergers, columns, strict=True):
            merge(hidden, out)
        return rows

    return PackedParts(
        embedding=weights.embedding("patch_embed.proj", spec.mean, spec.std),
        later=weights.later_embedding("patch_embed.proj", spec.std),
        layers=weights.blocks(BlockNames(), sizes.depth),
        style=Style(sizes.heads, sizes.activation),
        head=head,
        taps=sizes.taps,
        positions=Positions(weights.place(weights.tensors["pos_embed.weight"]), bilinear_taps, 4),
        theta=sizes.theta,
    )
