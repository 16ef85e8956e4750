"""A tower's weights: what checkpoints call them, their shapes, and how they are placed.

Every checkpoint has the same six parts in a block, under names of its own (`BlockNames`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.errors import CheckpointError
from actors.models.layers.block import Affine, BlockWeights
from actors.models.layers.patches import Rgb, folded_embedding, scaled_to_bytes
from actors.spec.model_spec import ModelSpec

Expected = dict[str, tuple[int, ...]]
"""Name and shape of every tensor of a tower, without the checkpoint's prefix."""

USUAL = {
    "depth": "depth",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_heads",
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
}
"""The usual key of `vision_config` for each of the Dimensions."""

LAYERS = {"depth": "num_hidden_layers", "heads": "num_attention_heads"}
"""The keys of towers that follow transformers' conventions."""


@contextmanager
def stated(spec: ModelSpec) -> Iterator[None]:
    """Around code that reads `vision_config`. Raises CheckpointError for what it lacks."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"model.id {spec.id!r}: vision_config lacks or misstates {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class Dimensions:
    depth: int
    width: int
    mlp_width: int
    heads: int
    patch_size: int
    merge_size: int

    @classmethod
    def read(cls, spec: ModelSpec, **keys: str) -> Dimensions:
        """From `vision_config`, under the USUAL keys unless given. Raises CheckpointError."""
        with stated(spec):
            return cls(
                **{field: integer(spec.vision[key]) for field, key in (USUAL | keys).items()}
            )

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def merged(self) -> int:
        """Values of all patches of a token."""
        return self.width * self.merge_size**2


def halves(linear: Affine, heads: int) -> Affine:
    """Reorders q or k from a rotary embedding of neighbours to one of halves, as ours is."""

    def sort(rows: Tensor) -> Tensor:
        pairs: Tensor = rows.unflatten(0, (heads, -1, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    return Affine(sort(linear.weight), sort(linear.bias))


def integer(value: Any) -> int:
    """An integer, or a list of two equal ones."""
    if isinstance(value, list):
        first, second = value
        if first != second:
            raise ValueError(f"a size of {value}: only squares are supported")
        return int(first)
    return int(value)


@dataclass(frozen=True, slots=True)
class BlockNames:
    """What a checkpoint calls the parts of a block, after the block's own name."""

    block: str = "blocks"
    norm1: str = "norm1"
    qkv: tuple[str, ...] = ("attn.qkv",)  # one fused layer, or three
    proj: str = "attn.proj"
    norm2: str = "norm2"
    up: tuple[str, ...] = ("mlp.linear_fc1",)  # SwiGLU has two: gate, up
    down: str = "mlp.linear_fc2"
    unbiased: frozenset[str] = frozenset()  # those of the names above that have no bias
    scales: tuple[str, str] | None = None  # layer scales of proj and down


CLIP_NAMES = BlockNames(
    block="transformer.layers",
    norm1="layer_norm1",
    qkv=("self_attn.qkv_proj",),
    proj="self_attn.out_proj",
    norm2="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)
"""Of DeepSeek's CLIP, and of Step3's own tower."""


class Weights:
    """The tensors of a tower, moved to its device and dtype when they are read."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self.tensors = tensors
        self.device = device
        self.dtype = dtype

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)

    def affine(self, *names: str) -> Affine:
        """The layers with these names, concatenated."""
        weights = [self.tensors[f"{name}.weight"] for name in names]
        biases = [self.bias(name, weight) for name, weight in zip(names, weights, strict=True)]
        return Affine(self.place(torch.cat(weights)), self.place(torch.cat(biases)))

    def bias(self, name: str, weight: Tensor) -> Tensor:
        """The layer's bias, or zeros on the weight's device."""
        if f"{name}.bias" in self.tensors:
            return self.tensors[f"{name}.bias"]
        return torch.zeros(len(weight), device=weight.device)

    def scaled(self, linear: str, scale: str | None) -> Affine:
        """A linear layer with its layer scale folded in."""
        if scale is None:
            return self.affine(linear)
        scales = self.tensors[scale].float()
        weight, bias = (self.tensors[f"{linear}.{part}"] for part in ("weight", "bias"))
        return Affine(self.place(weight * scales[:, None]), self.place(bias * scales))

    def embedding(self, name: str, mean: Rgb, std: Rgb) -> Affine:
        weight = self.tensors[f"{name}.weight"]
        bias = self.bias(name, weight)
        folded = folded_embedding(
            weight if weight.dim() == 5 else weight[:, :, None], bias, mean, std
        )
        return Affine(self.place(folded.weight), self.place(folded.bias))

    def later_embedding(self, name: str, std: Rgb) -> Tensor | None:
        """See PackedParts.later. None: the tower's groups do not have two frames."""
        weight = self.tensors[f"{name}.weight"]
        if weight.dim() < 5 or weight.shape[2] != 2:
            return None
        return self.place(scaled_to_bytes(weight[:, :, 1], std).flatten(1).float())

    def blocks(self, names: BlockNames, depth: int) -> list[BlockWeights]:
        ends = names.scales or (None, None)
        return [
            BlockWeights(
                norm1=self.affine(f"{block}.{names.norm1}"),
                qkv=self.affine(*(f"{block}.{name}" for name in names.qkv)),
                proj=self.scaled(f"{block}.{names.proj}", ends[0] and f"{block}.{ends[0]}"),
                norm2=self.affine(f"{block}.{names.norm2}"),
                up=self.affine(*(f"{block}.{name}" for name in names.up)),
                down=self.scaled(f"{block}.{names.down}", ends[1] and f"{block}.{ends[1]}"),
            )
            for block in (f"{names.block}.{layer}" for layer in range(depth))
        ]


def expected_blocks(names: BlockNames, depth: int, width: int, mlp_width: int) -> Expected:
    parts: dict[str, tuple[int, ...]] = {
        names.norm1: (width,),
        **dict.fromkeys(names.qkv, (3 * width // len(names.qkv), width)),
        names.proj: (width, width),
        names.norm2: (width,),
        **dict.fromkeys(names.up, (mlp_width, width)),
        names.down: (width, mlp_width),
    }
    shapes: Expected = {}
    for layer in range(depth):
        block = f"{names.block}.{layer}"
        for part, weight in parts.items():
            shapes |= affine(f"{block}.{part}", weight, bias=part not in names.unbiased)
        shapes |= {f"{block}.{scale}": (width,) for scale in names.scales or ()}
    return shapes


def affine(name: str, weight: Sequence[int], *, bias: bool = True) -> Expected:
    """Names and shapes of a weight with this shape, and of its bias."""
    weights = {f"{name}.weight": tuple(weight)}
    return weights | {f"{name}.bias": (weight[0],)} if bias else weights
