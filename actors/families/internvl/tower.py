"""The vision towers of InternVL 2 to 3.5: 300M with LayerNorm, 6B with RMSNorm.

Computes what transformers.models.internvl computes in InternVLVisionModel and
InternVLMultiModalProjector. There are two schemes of names: `internvl` (repositories whose names
end in -hf) and `internvl_chat` (the first ones, whose code is not in transformers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.layers.block import BlockWeights, Norm, Style
from actors.models.layers.weights import Expected, Weights, affine, stated
from actors.models.tiled import TileParts, TileTower, merge_order, tile_sizing
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec

NORMS: Mapping[str, Norm] = {"layer_norm": "layer", "rms_norm": "rms"}

PROJECTOR_EPSILON = 1e-5
"""torch's default for LayerNorm: the projector's is not configured."""


def family(spec: ModelSpec) -> Family[TileParts]:
    sizes = InternVLSizes.of(spec)
    return Family(sizes.names.prefixes, expected, InternVLSizes.of, parts, TileTower)


@dataclass(frozen=True, slots=True)
class InternVLNames:
    """What one scheme calls the tensors, without the checkpoint's prefix."""

    prefixes: tuple[str, ...]
    class_token: str
    patches: str
    positions: str
    block: str
    qkv: tuple[str, ...]
    qk_norm: tuple[str, str]
    proj: str
    norms: tuple[str, str]
    scales: tuple[str, str]
    projector: tuple[str, str, str]  # norm, up, down


NATIVE = InternVLNames(
    prefixes=(
        *("vision_tower.", "multi_modal_projector."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    ),
    class_token="embeddings.cls_token",
    patches="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    block="encoder.layer",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    qk_norm=("attention.q_norm", "attention.k_norm"),
    proj="attention.projection_layer",
    norms=("layernorm_before", "layernorm_after"),
    scales=("lambda_1", "lambda_2"),
    projector=("layer_norm", "linear_1", "linear_2"),
)

CHAT = InternVLNames(
    prefixes=("vision_model.", "mlp1."),
    class_token="embeddings.class_embedding",
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding",
    block="encoder.layers",
    qkv=("attn.qkv",),
    qk_norm=("attn.q_norm", "attn.k_norm"),
    proj="attn.proj",
    norms=("norm1", "norm2"),
    scales=("ls1", "ls2"),
    projector=("0", "1", "3"),
)


@dataclass(frozen=True, slots=True)
class InternVLSizes:
    names: InternVLNames
    depth: int
    width: int
    mlp_width: int
    heads: int
    norm: Norm
    epsilon: float
    qkv_bias: bool
    qk_norm: bool  # RMSNorm over all of q and all of k (the 6B tower)

    @classmethod
    def of(cls, spec: ModelSpec) -> InternVLSizes:
        vision, native = spec.vision, spec.family == "internvl"
        with stated(spec):
            if vision.get("hidden_act", "gelu") != "gelu":
                raise ValueError(f"hidden_act {vision['hidden_act']!r}: only gelu is supported")
            return cls(
                names=NATIVE if native else CHAT,
                depth=int(vision["num_hidden_layers"]),
                width=int(vision["hidden_size"]),
                mlp_width=int(vision["intermediate_size"]),
                heads=int(vision["num_attention_heads"]),
                norm=NORMS[vision["norm_type"]],
                epsilon=float(vision.get("layer_norm_eps", 1e-6)),
                qkv_bias=bool(vision["attention_bias" if native else "qkv_bias"]),
                qk_norm=bool(vision["use_qk_norm" if native else "qk_normalization"]),
            )

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def expected(spec: ModelSpec) -> Expected:
    sizes, sizing = InternVLSizes.of(spec), tile_sizing(spec)
    names, width = sizes.names, sizes.width
    merged = width * sizing.merge_size**2
    norm, up, down = names.projector
    shapes: Expected = {
        names.class_token: (1, 1, width),
        names.positions: (1, 1 + sizing.side_patches**2, width),
        **affine(names.patches, (width, 3, sizing.patch_size, sizing.patch_size)),
        **affine(norm, (merged,)),
        **affine(up, (spec.width, merged)),
        **affine(down, (spec.width, spec.width)),
    }
    for layer in range(sizes.depth):
        block = f"{names.block}.{layer}"
        for name in names.norms:
            shapes |= affine(f"{block}.{name}", (width,), bias=sizes.norm == "layer")
        for name in names.qkv:
            rows = 3 * width // len(names.qkv)
            shapes |= affine(f"{block}.{name}", (rows, width), bias=sizes.qkv_bias)
        if sizes.qk_norm:
            shapes |= {f"{block}.{name}.weight": (width,) for name in names.qk_norm}
        shapes |= {f"{block}.{name}": (width,) for name in names.scales}
        shapes |= affine(f"{block}.{names.proj}", (width, width))
        shapes |= affine(f"{block}.mlp.fc1", (sizes.mlp_width, width))
        shapes |= affine(f"{block}.mlp.fc2", (width, sizes.mlp_width))
    return shapes


def parts(spec: ModelSpec, weights: Weights) -> TileParts:
    sizes = InternVLSizes.of(spec)
    embedding = weights.embedding(sizes.names.patches, spec.mean, spec.std)
    norm, up, down = (weights.affine(name) for name in sizes.names.projector)

    def head(x: Tensor) -> Tensor:
        x = F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, PROJECTOR_EPSILON)
        return F.linear(F.gelu(F.linear(x, up.weight, up.bias)), down.weight, down.bias)

    return TileParts(
        embedding=embedding.weight,
        start=weights.place(start(spec, weights.tensors, sizes)),
        layers=[layer(weights, sizes, f"{sizes.names.block}.{i}") for i in range(sizes.depth)],
        style=Style(sizes.heads, "gelu", sizes.epsilon, sizes.norm),
        head=head,
    )


def start(spec: ModelSpec, tensors: Mapping[str, Tensor], sizes: InternVLSizes) -> Tensor:
    """See TileParts.start, in float32."""
    names = sizes.names
    positions = tensors[names.positions][0].float()
    precise = Weights(tensors, positions.device, torch.float32)
    bias = precise.embedding(names.patches, spec.mean, spec.std).bias
    patches = merge_order(positions[1:], tile_sizing(spec)) + bias
    return torch.cat([positions[:1] + tensors[names.class_token][0].float(), patches])


def layer(weights: Weights, sizes: InternVLSizes, block: str) -> BlockWeights:
    """One layer; layer scales are folded into the linear layers before them."""
    names = sizes.names
    qk_norm = None
    if sizes.qk_norm:
        scales = [weights.tensors[f"{block}.{name}.weight"] for name in names.qk_norm]
        qk_norm = weights.place(torch.stack(scales))
    return BlockWeights(
        norm1=weights.affine(f"{block}.{names.norms[0]}"),
        qkv=weights.affine(*(f"{block}.{name}" for name in names.qkv)),
        proj=weights.scaled(f"{block}.{names.proj}", f"{block}.{names.scales[0]}"),
        norm2=weights.affine(f"{block}.{names.norms[1]}"),
        up=weights.affine(f"{block}.mlp.fc1"),
        down=weights.scaled(f"{block}.mlp.fc2", f"{block}.{names.scales[1]}"),
        qk_norm=qk_norm,
    )
