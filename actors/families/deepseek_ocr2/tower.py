"""DeepSeek-OCR 2's towers: SAM, then a small language model whose learned queries give the rows.

Computes what transformers.models.deepseek_ocr2 computes in get_image_features. Tensor names are the
published checkpoint's. SAM's features of a view see each other. There are as many queries, which
see the features and the queries before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.deepseek_ocr.tower import OcrTower, SamSizes, expected_sam
from actors.families.deepseek_ocr2.spec import ENCODER
from actors.kernels.attention import Attention, Values
from actors.models.layers.block import BlocksForm, Style, rms_norm
from actors.models.layers.patches import rotary_tables
from actors.models.layers.weights import (
    BlockNames,
    Expected,
    Weights,
    affine,
    expected_blocks,
    with_keys_for_each_head,
)
from actors.models.tower import Family, chosen
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PATHS, ViewSizing
from actors.types import ItemPlan

PREFIXES = ("sam_model.", "qwen2_model.", "projector.", "view_")

NAMES = BlockNames(
    block="model.model.layers",
    norm1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.o_proj",
    norm2="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    biased=False,
)
LAST_NORM = "model.model.norm"
QUERIES = dict(zip(PATHS, ("query_1024.weight", "query_768.weight"), strict=True))


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    layers: int
    width: int
    heads: int
    key_heads: int
    """Heads of keys, and of values. Each serves several heads of queries."""
    mlp_width: int
    epsilon: float
    theta: float

    @property
    def head_size(self) -> int:
        return self.width // self.heads


def sizes_of(spec: ModelSpec) -> EncoderSizes:
    sizes, (_, channels) = EncoderSizes(**spec.vision["width"][ENCODER]), SamSizes.of(spec).halving
    if channels != sizes.width:
        raise ValueError(f"downsample_channels {channels}: the encoder's width is {sizes.width}")
    return sizes


def family(spec: ModelSpec) -> Family[Weights]:
    return Family(
        PREFIXES,
        expected(spec),
        sizes_of(spec).head_size,
        lambda spec, weights: weights,
        DeepseekOcr2Tower,
    )


def expected(spec: ModelSpec) -> Expected:
    sizes = sizes_of(spec)
    width, keys = sizes.width, sizes.key_heads * sizes.head_size
    shapes = expected_sam(spec) | expected_blocks(NAMES, sizes.layers, width, sizes.mlp_width)
    for layer in range(sizes.layers):
        for name, rows in zip(NAMES.qkv, (width, keys, keys), strict=True):
            shapes |= affine(f"{NAMES.block}.{layer}.{name}", (rows, width))
    assert isinstance(spec.sizing, ViewSizing)
    for path, tokens in zip(PATHS, spec.sizing.view_tokens, strict=True):
        shapes[QUERIES[path]] = (tokens, width)
    return shapes | {
        **affine(LAST_NORM, (width,), bias=False),
        **affine("layers", (spec.width, width)),
        "seperator": (spec.width,),
    }


@dataclass(frozen=True, slots=True)
class PrefixAttention:
    """Attention of views whose features come first, followed by as many queries."""

    mask: Tensor
    """[rows of a view, rows of a view]: minus infinity where a row does not see another."""

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        """[views x rows, 3, heads, head size] to [views x rows, heads x head size]."""
        query, key, value = qkv.unflatten(0, (-1, len(self.mask))).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, self.mask)
        return out.transpose(1, 2).reshape(len(qkv), -1)


def prefix_attention(features: int, weights: Weights) -> PrefixAttention:
    mask = torch.full((2 * features, 2 * features), -torch.inf).triu(1)
    mask[:features, :features] = 0
    return PrefixAttention(weights.place(mask))


class DeepseekOcr2Tower(OcrTower):
    """SAM and the encoder, one after the other."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, weights, attention, blocks)
        self.encoder_sizes = sizes = sizes_of(spec)
        stored = weights.blocks(NAMES, sizes.layers)
        layers = [with_keys_for_each_head(one, sizes.heads, sizes.key_heads) for one in stored]
        style = Style(sizes.heads, "swiglu", sizes.epsilon, norm="rms")
        self.queries = {path: weights.place(weights.tensors[QUERIES[path]]) for path in PATHS}
        self.encoder = {
            path: blocks(layers, style, prefix_attention(tokens, weights), ())
            for path, tokens in zip(PATHS, self.sizing.view_tokens, strict=True)
        }
        self.last = weights.affine(LAST_NORM)
        longest = max(map(self.view_rows, PATHS))
        cos, sin = rotary_tables(longest, 2 * sizes.head_size, sizes.theta)  # a head is one axis
        self.cos, self.sin = cos.to(weights.device), sin.to(weights.device)

    def view_rows(self, path: str) -> int:
        return 2 * len(self.queries[path])

    def forward(self, path: str, values: Values) -> Tensor:
        features, queries = self.features(path, values), self.queries[path]
        views, (tokens, width) = len(features), queries.shape
        x = torch.cat([features, queries.expand(views, -1, -1)], 1)
        cos, sin = (table[: 2 * tokens].repeat(views, 1) for table in (self.cos, self.sin))
        x, _ = self.encoder[path](x.flatten(0, 1), cos, sin, values)
        x = x.view(views, 2 * tokens, width)[:, tokens:].reshape(-1, width)
        return self.projector.linear(rms_norm(x, self.last, self.encoder_sizes.epsilon))

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        """Per item, its crops one after the other, then the whole image, then the separator."""
        whole, crops = outputs
        places, before = [], [0, len(whole)]
        for plan in plans:
            for path in (1, 0):
                places.append(torch.arange(before[path], before[path] + plan.path_tokens[path]))
                before[path] += plan.path_tokens[path]
            places.append(torch.tensor([len(whole) + len(crops)]))
        return chosen([whole, crops, self.separator], torch.cat(places))
