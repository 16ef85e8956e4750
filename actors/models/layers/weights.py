"""A tower's weights: their names in checkpoints, their shapes, and how they reach the device.

Every checkpoint has the same six parts in a block, under its own names (`BlockNames`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import ATTENTION, Affine, BlockWeights
from actors.models.layers.patches import folded_embedding, scaled_to_bytes
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import side

Expected = dict[str, tuple[int, ...]]
"""Name and shape of every tensor of a tower, without the checkpoint's prefix."""

Fp8Layers = Mapping[str, Tensor | None]
"""The layers that run in FP8 (see PrecisionPlan), each with the mean of its inputs. Attention has
none."""

NO_FP8: Fp8Layers = {}

KEYS = {
    "depth": "num_hidden_layers",
    "width": "hidden_size",
    "mlp_width": "intermediate_size",
    "heads": "num_attention_heads",
}
"""The usual key of `vision_config` for each of the Dimensions."""

APPENDED = 8  # kernels take multiples of this
SHOWN = 64.0  # exact in bfloat16 and float16

MOST_LAYERS = 1000
"""No tower has as many. More are rejected, because their names alone could fill the memory."""

QWEN_KEYS = KEYS | {"depth": "depth", "heads": "num_heads"}
"""The same in Qwen-VL and GLM-V."""


@dataclass(frozen=True, slots=True)
class Dimensions:
    depth: int
    width: int
    mlp_width: int
    heads: int
    patch_size: int
    merge_size: int
    heads_key: str = "num_attention_heads"

    @classmethod
    def read(cls, spec: ModelSpec, **keys: str) -> Dimensions:
        """Reads `vision_config`. `keys` replace the usual keys."""
        usual = QWEN_KEYS if "depth" in spec.vision else KEYS
        named = usual | keys
        stated = {field: int(spec.vision[key]) for field, key in named.items()}
        for field, value in stated.items():
            if value < 1:
                raise ValueError(f"{named[field]}: {value}")
        if stated["width"] % stated["heads"]:
            raise ValueError(
                f"{named['heads']}: {stated['heads']} does not divide {named['width']}, "
                f"{stated['width']}"
            )
        sizing, key = spec.sizing, named["heads"]
        return cls(
            **stated, patch_size=sizing.patch_size, merge_size=sizing.merge_size, heads_key=key
        )

    @property
    def head_size(self) -> int:
        return self.width // self.heads

    @property
    def rotary_head_size(self) -> int:
        """`head_size`, for rotary embedding by rows and columns. Raises ValueError if it does not
        fit."""
        if self.head_size % 4:
            raise ValueError(
                f"{self.heads_key}: each of {self.heads} heads has {self.head_size} of "
                f"{self.width} values, and rotary embedding of rows and columns needs a multiple "
                "of 4"
            )
        return self.head_size

    @property
    def merged(self) -> int:
        """The number of values in all patches of a token together."""
        return self.width * self.merge_size**2


def table_side(spec: ModelSpec) -> int:
    """Rows, and columns, of the learned table of positions, which has an entry per patch."""
    return side(spec.vision["image_size"]) // spec.sizing.patch_size


def neighbours_to_halves(head_size: int) -> Tensor:
    """The order of a head's values that turns rotary embedding of neighbouring values into ours,
    which pairs the halves of a head."""
    return torch.arange(head_size).view(-1, 2).t().flatten()


def reordered(layer: BlockWeights, heads: int, order: Tensor) -> BlockWeights:
    """The layer with the values of each head of q and k in this order. Scores stay the same."""

    def sort(values: Tensor) -> Tensor:
        query, key, value = values.unflatten(0, (3, heads, -1))
        return torch.stack([query[:, place], key[:, place], value]).flatten(0, 2)

    place = order.to(layer.qkv.weight.device)
    weight, bias = sort(layer.qkv.weight), sort(layer.qkv.bias)
    return replace(layer, qkv=replace(layer.qkv, weight=weight, bias=bias))


def with_keys_for_each_head(layer: BlockWeights, heads: int, key_heads: int) -> BlockWeights:
    """The layer with its grouped keys and values repeated, so that each query head has its own."""
    if heads == key_heads:
        return layer

    def repeated(values: Tensor) -> Tensor:
        query, *shared = values.unflatten(0, (heads + 2 * key_heads, -1)).split(
            [heads, key_heads, key_heads]
        )
        keys = (one.repeat_interleave(heads // key_heads, 0) for one in shared)
        return torch.cat([query, *keys]).flatten(0, 1)

    qkv = replace(layer.qkv, weight=repeated(layer.qkv.weight), bias=repeated(layer.qkv.bias))
    return replace(layer, qkv=qkv)


def widened(layer: BlockWeights, heads: int) -> BlockWeights:
    """The layer with APPENDED values after each head, with which an attention can hide rows: SHOWN,
    then zeros in queries, zeros in keys and values. Queries are rescaled, because kernels derive
    the scale of scores from the size of a head."""
    weight, bias = (
        each.float().unflatten(0, (3, heads, -1)) for each in (layer.qkv.weight, layer.qkv.bias)
    )
    size = bias.shape[2]
    weight, bias = F.pad(weight, (0, 0, 0, APPENDED)), F.pad(bias, (0, APPENDED))
    for each in (weight, bias):
        each[0] *= ((size + APPENDED) / size) ** 0.5
    bias[0, :, size] = SHOWN
    dtype, proj = layer.qkv.weight.dtype, layer.proj.weight.unflatten(1, (heads, size))
    return replace(
        layer,
        qkv=replace(
            layer.qkv, weight=weight.flatten(0, 2).to(dtype), bias=bias.flatten().to(dtype)
        ),
        proj=replace(layer.proj, weight=F.pad(proj, (0, APPENDED)).flatten(1)),
        attention="",  # what hides rows has no FP8
        attention_fp8=False,
    )


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
    biased: bool = True  # whether the parts have biases
    unbiased: frozenset[str] = frozenset()  # the names above that have none even if `biased`
    scales: tuple[str, str] | None = None  # layer scales of proj and down
    qk_norm: tuple[str, str] | None = None  # RMSNorms of q and k
    after: tuple[str, str] | None = None  # norms that follow attention and MLP


CLIP_NAMES = BlockNames(
    block="transformer.layers",
    norm1="layer_norm1",
    qkv=("self_attn.qkv_proj",),
    proj="self_attn.out_proj",
    norm2="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)
"""The names in DeepSeek's CLIP, and in Step3's own tower."""


class Weights:
    """The tensors of a tower, moved to its device and dtype when they are read."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        fp8: Fp8Layers = NO_FP8,
    ) -> None:
        self.tensors = tensors
        self.device = device
        self.dtype = dtype
        self.fp8 = fp8

    def place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self.device, dtype=self.dtype)

    def affine(self, *names: str) -> Affine:
        """The layers with these names, concatenated."""
        weights = [self.tensors[f"{name}.weight"] for name in names]
        biases = [self.bias(name, weight) for name, weight in zip(names, weights, strict=True)]
        weight, bias = self.place(torch.cat(weights)), self.place(torch.cat(biases))
        mean = self.fp8.get(names[0])
        if mean is not None:
            mean = mean.to(self.device, torch.float32)
        return Affine(weight, bias, name=names[0], fp8=names[0] in self.fp8, input_mean=mean)

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
        weight = self.tensors[f"{linear}.weight"]
        bias = self.bias(linear, weight)
        return replace(
            self.affine(linear),
            weight=self.place(weight * scales[:, None]),
            bias=self.place(bias * scales),
        )

    def embedding(self, name: str, spec: ModelSpec, *, channels_last: bool = False) -> Affine:
        """The patch embedding for `uint8 - 128`; see patches.folded_embedding. `channels_last`: the
        checkpoint has the channels of a pixel adjacent; here, the pixels of a channel are."""
        folded = self.folded(name, spec, channels_last=channels_last)
        return Affine(self.place(folded.weight), self.place(folded.bias))

    def folded(self, name: str, spec: ModelSpec, *, channels_last: bool = False) -> Affine:
        """Like `embedding`, but in float32, on the device of the checkpoint's tensors."""
        weight, patch = self.tensors[f"{name}.weight"], spec.sizing.patch_size
        if channels_last:
            weight = weight.view(len(weight), patch, patch, 3).permute(0, 3, 1, 2)
        frames = weight.reshape(len(weight), 3, -1, patch, patch)
        return folded_embedding(frames, self.bias(name, weight), spec.mean, spec.std)

    def later_embedding(self, name: str, spec: ModelSpec) -> Tensor | None:
        """See PackedParts.later. None if the tower's temporal groups do not have two frames."""
        weight = self.tensors[f"{name}.weight"]
        if weight.dim() < 5 or weight.shape[2] != 2:
            return None
        return self.place(scaled_to_bytes(weight[:, :, 1], spec.std).flatten(1).float())

    def start(
        self, embedding: str, spec: ModelSpec, positions: Tensor, classes: Tensor | None = None
    ) -> Tensor:
        """What is added to the embedded patches of a view: `positions` [patches, width] and the
        bias of their embedding, summed in float32. `classes`, the rows of class tokens, precede
        it."""
        rows = positions + self.folded(embedding, spec).bias
        return self.place(rows if classes is None else torch.cat([classes, rows]))

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
                qk_norm=self.stacked(f"{block}.{name}.weight" for name in names.qk_norm or ()),
                after=(
                    self.affine(f"{block}.{names.after[0]}"),
                    self.affine(f"{block}.{names.after[1]}"),
                )
                if names.after
                else None,
                attention=f"{block}.{names.qkv[0]}{ATTENTION}",
                attention_fp8=f"{block}.{names.qkv[0]}{ATTENTION}" in self.fp8,
            )
            for block in numbered(names.block, depth)
        ]

    def stacked(self, names: Iterable[str]) -> Tensor | None:
        """Stacks tensors of one shape. None if there are none."""
        found = [self.tensors[name] for name in names]
        return self.place(torch.stack(found)) if found else None


def numbered(name: str, layers: int) -> list[str]:
    """The names of layers. Raises ValueError for more than any tower has."""
    if layers > MOST_LAYERS:
        raise ValueError(f"{layers} layers")
    return [f"{name}.{layer}" for layer in range(layers)]


def expected_blocks(
    names: BlockNames, depth: int, width: int, mlp_width: int, qk_size: int | None = None
) -> Expected:
    """Names and shapes of the blocks' tensors. `qk_size`: the size of the norms of q and k, if they
    are per head. Raises ValueError."""
    parts: dict[str, tuple[int, ...]] = {
        names.norm1: (width,),
        **dict.fromkeys(names.qkv, (3 * width // len(names.qkv), width)),
        names.proj: (width, width),
        names.norm2: (width,),
        **dict.fromkeys(names.up, (mlp_width, width)),
        names.down: (width, mlp_width),
    }
    shapes: Expected = {}
    for block in numbered(names.block, depth):
        for part, weight in parts.items():
            shapes |= affine(
                f"{block}.{part}", weight, bias=names.biased and part not in names.unbiased
            )
        shapes |= {f"{block}.{scale}": (width,) for scale in names.scales or ()}
        shapes |= {f"{block}.{norm}.weight": (width,) for norm in names.after or ()}
        shapes |= {f"{block}.{norm}.weight": (qk_size or width,) for norm in names.qk_norm or ()}
    return shapes


def affine(name: str, weight: Sequence[int], *, bias: bool = True) -> Expected:
    """Names and shapes of a weight with this shape, and of its bias."""
    weights = {f"{name}.weight": tuple(weight)}
    return weights | {f"{name}.bias": (weight[0],)} if bias else weights
