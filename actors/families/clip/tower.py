"""The vision towers of CLIP and SigLIP, on which many families build, and their text towers.

Computes what transformers.models.siglip and clip compute in SiglipVisionModel (without its pooling
head) and CLIPVisionModel; with `model.output: vector`, in get_image_features and get_text_features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.clip.spec import CLIP_TOWER
from actors.kernels.attention import Attention, SegmentAttention, Shapes, Values
from actors.models.layers.block import ACTIVATIONS as FUNCTIONS
from actors.models.layers.block import (
    Activation,
    Affine,
    BlocksForm,
    ReferenceBlocks,
    Style,
    layer_norm,
)
from actors.models.layers.weights import (
    KEYS,
    BlockNames,
    Dimensions,
    Expected,
    Weights,
    affine,
    expected_blocks,
    table_side,
)
from actors.models.tiled import TileParts, TileTower, merge_order
from actors.models.tower import Family, Tower
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan

PREFIXES = ("vision_model.",)

NAMES = BlockNames(
    block="encoder.layers",
    norm1="layer_norm1",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    proj="self_attn.out_proj",
    norm2="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
)

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
}
"""Activations by `hidden_act`."""

PATCHES = "embeddings.patch_embedding"
POSITIONS = "embeddings.position_embedding"
CLASS = "embeddings.class_embedding"
LAST_NORM = "post_layernorm"

PROJECTION = "visual_projection"


def pooling_shapes(width: int, mlp_width: int) -> Expected:
    """SigLIP's pooling head."""
    return {
        "head.probe": (1, 1, width),
        "head.attention.in_proj_weight": (3 * width, width),
        "head.attention.in_proj_bias": (3 * width,),
        **affine("head.attention.out_proj", (width, width)),
        **affine("head.layernorm", (width,)),
        **affine("head.mlp.fc1", (mlp_width, width)),
        **affine("head.mlp.fc2", (width, mlp_width)),
    }


POOLING = frozenset(pooling_shapes(1, 1))
"""The names of the pooling head's tensors, which rows do not need."""

TEXT = "text_model"
TEXT_NAMES = replace(NAMES, block=f"{TEXT}.{NAMES.block}")
FIRST_EOS = 2
"""`eos_token_id` of CLIP's first checkpoints, which is not that of their tokenizer. transformers
then takes the largest token of a text as its end."""


def family(spec: ModelSpec) -> Family[Any]:
    tower = dimensions(spec)
    expected = layer_shapes(spec)
    if not is_clip(spec) or spec.vector:
        expected |= affine(LAST_NORM, (tower.width,))
    if not spec.vector:
        return Family(PREFIXES, expected, tower.head_size, parts, TileTower, unused(spec))
    if is_clip(spec):
        expected |= affine(PROJECTION, (spec.width, tower.width), bias=False)
    else:
        expected |= pooling_shapes(tower.width, tower.mlp_width)
    vectors = Family(PREFIXES, expected, tower.head_size, vector_parts, TileTower, unused(spec))
    return with_texts(vectors, spec)


def dimensions(spec: ModelSpec) -> Dimensions:
    """`depth` counts only the layers that are used."""
    if (found := spec.vision["hidden_act"]) not in ACTIVATIONS:
        raise ValueError(f"hidden_act {found!r}: supported are {', '.join(ACTIVATIONS)}")
    return Dimensions.read(spec, depth="used_layers")


def layer_shapes(spec: ModelSpec) -> Expected:
    """Everything up to the end of the last layer that is used."""
    return tower_shapes(spec, dimensions(spec), clip=is_clip(spec))


def tower_shapes(spec: ModelSpec, tower: Dimensions, *, clip: bool = False) -> Expected:
    patch = (3, tower.patch_size, tower.patch_size)
    shapes = {
        **affine(PATCHES, (tower.width, *patch), bias=not clip),
        **affine(POSITIONS, (table_side(spec) ** 2 + clip, tower.width), bias=False),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
    }
    if clip:
        shapes |= {CLASS: (tower.width,), **affine("pre_layrnorm", (tower.width,))}
    return shapes


def unused(spec: ModelSpec) -> frozenset[str]:
    """SigLIP's pooling, layers after the last that is used, and what follows them."""
    tower, layers = dimensions(spec), int(spec.vision["num_hidden_layers"])
    later = expected_blocks(NAMES, layers, tower.width, tower.mlp_width).keys()
    return POOLING | {*later, *affine(LAST_NORM, (1,)), "embeddings.position_ids"}


def text_shapes(spec: ModelSpec, text: Mapping[str, Any]) -> Expected:
    width, depth, mlp = (int(text[KEYS[key]]) for key in ("width", "depth", "mlp_width"))
    rows = {"token": int(text["vocab_size"]), "position": int(text["max_position_embeddings"])}
    shapes = expected_blocks(TEXT_NAMES, depth, width, mlp)
    for table, count in rows.items():
        shapes |= affine(f"{TEXT}.embeddings.{table}_embedding", (count, width), bias=False)
    last = affine(f"{TEXT}.final_layer_norm", (width,))
    name, bias = text_projection(spec)
    return shapes | last | affine(name, (spec.width, width), bias=bias)


def text_projection(spec: ModelSpec) -> tuple[str, bool]:
    """The name of the layer, and whether it has a bias."""
    return ("text_projection", False) if is_clip(spec) else (f"{TEXT}.head", True)


def parts(
    spec: ModelSpec, weights: Weights, head: Callable[[Tensor], Tensor] | None = None
) -> TileParts:
    """`head`: what follows the last layer. Default: a norm for SigLIP, nothing for CLIP."""
    tower = dimensions(spec)
    epsilon = float(spec.vision["layer_norm_eps"])
    clip = is_clip(spec)
    stem = None
    if clip:
        before = weights.affine("pre_layrnorm")

        def stem(x: Tensor) -> Tensor:
            return layer_norm(x, before, epsilon)

    if head is None and not clip:
        last = weights.affine(LAST_NORM)

        def head(x: Tensor) -> Tensor:
            return layer_norm(x, last, epsilon)

    positions, classes = weights.tensors[f"{POSITIONS}.weight"].float(), None
    if clip:
        classes, positions = positions[:1] + weights.tensors[CLASS].float(), positions[1:]
    return TileParts(
        embedding=weights.embedding(PATCHES, spec).weight,
        start=weights.start(PATCHES, spec, merge_order(positions, tower.merge_size), classes),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, ACTIVATIONS[spec.vision["hidden_act"]], epsilon),
        head=head or (lambda x: x),
        stem=stem,
    )


def vector_parts(spec: ModelSpec, weights: Weights) -> TileParts:
    """Like `parts`, with a head that gives one vector per tile."""
    tower, rows = dimensions(spec), spec.sizing.token_range()[0]
    last, epsilon = weights.affine(LAST_NORM), float(spec.vision["layer_norm_eps"])
    if is_clip(spec):
        projection = weights.affine(PROJECTION)

        def head(x: Tensor) -> Tensor:
            classes = x.view(-1, rows, tower.width)[:, 0]
            return projection.linear(layer_norm(classes, last, epsilon))
    else:
        pool = pooling(spec, weights)

        def head(x: Tensor) -> Tensor:
            return pool(layer_norm(x, last, epsilon).view(-1, rows, tower.width))

    return parts(spec, weights, head)


def pooling(spec: ModelSpec, weights: Weights) -> Pooling:
    """SigLIP's pooling head."""
    tower, epsilon = dimensions(spec), float(spec.vision["layer_norm_eps"])
    probe, weight, bias = (
        weights.place(weights.tensors[f"head.{name}"])
        for name in ("probe", "attention.in_proj_weight", "attention.in_proj_bias")
    )
    width = tower.width
    query = F.linear(probe, weight[:width], bias[:width]).view(1, tower.heads, 1, -1)
    inner = Affine(weight[width:], bias[width:])
    outer, norm, up, down = (
        weights.affine(f"head.{name}")
        for name in ("attention.out_proj", "layernorm", "mlp.fc1", "mlp.fc2")
    )
    activation = FUNCTIONS[ACTIVATIONS[spec.vision["hidden_act"]]]

    def pool(x: Tensor, mask: Tensor | None = None) -> Tensor:
        key, value = inner.linear(x).unflatten(-1, (2, tower.heads, -1)).permute(2, 0, 3, 1, 4)
        asked = query.expand(len(x), -1, 1 if mask is None else len(mask), -1)
        seen = F.scaled_dot_product_attention(asked, key, value, attn_mask=mask)
        x = outer.linear(seen.transpose(1, 2).flatten(2).flatten(0, 1))
        return x + down.linear(activation(up.linear(layer_norm(x, norm, epsilon))))

    return pool


class Pooling(Protocol):
    """Pools many rows to one vector by attention."""

    def __call__(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[tiles, rows, width] to [tiles, width].

        With `mask`, bool [images, rows], there is a single tile, the mask says which of its rows
        are each image's, and the result is [images, width].
        """


class TextAttention(SegmentAttention):
    """Attention among the tokens of each text. All texts have the same length, so nothing is copied
    to the host."""

    name = "texts"

    def __init__(self, length: int, *, causal: bool) -> None:
        self.length = length
        self.causal = causal

    def __call__(self, qkv: Tensor, values: Values) -> Tensor:
        query, key, value = qkv.unflatten(0, (-1, self.length)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)


class TextTower:
    """Encodes token ids, each text padded to the maximum length, to vectors."""

    def __init__(self, spec: ModelSpec, text: Mapping[str, Any], weights: Weights) -> None:
        """Raises ValueError for settings of `text_config` that are not supported."""
        if (found := text["hidden_act"]) not in ACTIVATIONS:
            raise ValueError(f"hidden_act {found!r} of text_config: not supported")
        self.clip, self.length = is_clip(spec), int(text["max_position_embeddings"])
        self.end: Any = text.get("eos_token_id")
        self.tokens, self.positions = (
            weights.place(weights.tensors[f"{TEXT}.embeddings.{name}_embedding.weight"])
            for name in ("token", "position")
        )
        self.epsilon = float(text["layer_norm_eps"])
        self.blocks = ReferenceBlocks(
            weights.blocks(TEXT_NAMES, int(text[KEYS["depth"]])),
            Style(int(text[KEYS["heads"]]), ACTIVATIONS[found], self.epsilon),
            TextAttention(self.length, causal=self.clip),
        )
        self.last = weights.affine(f"{TEXT}.final_layer_norm")
        self.projection = weights.affine(text_projection(spec)[0])

    def forward(self, tokens: Tensor) -> Tensor:
        """`tokens`: uint8 [texts x length, 4], little-endian. Padding may have any value."""
        ids = tokens.view(torch.int32).view(-1, self.length).clamp(0, len(self.tokens) - 1)
        x = F.embedding(ids, self.tokens) + self.positions
        x, _ = self.blocks(x.flatten(0, 1), None, None, {})
        x = x.view(-1, self.length, x.shape[-1])
        if self.clip:  # the row of the first end token, which sees all before
            ends = ids if self.end == FIRST_EOS else ids.eq(self.end).int()
            x = x[torch.arange(len(x), device=x.device), ends.argmax(-1)]
        else:
            x = x[:, -1]
        return self.projection.linear(layer_norm(x, self.last, self.epsilon))


class ImageTextTower(Tower):
    """Encodes images on the first path and texts on the second, to vectors of one space."""

    def __init__(self, images: Tower, texts: TextTower) -> None:
        self.spec = images.spec
        self.images = images
        self.texts = texts

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        if path == "default":
            return self.images.inputs(path, tokens, segments)
        return {"patches": ((tokens // self.texts.length * self.texts.length, 4), torch.uint8)}

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        if path == "default":
            return self.images.metadata(path, plans, tokens, segments)
        return {}

    def forward(self, path: str, values: Values) -> Tensor:
        if path == "default":
            return self.images.forward(path, values)
        return self.texts.forward(values["patches"])

    def postprocess(self, outputs: Sequence[Tensor], plans: Sequence[ItemPlan]) -> Tensor:
        images, texts = map(iter, outputs)
        return torch.stack([next(texts if plan.path_tokens[1] else images) for plan in plans])


def with_texts(images: Family[Any], spec: ModelSpec) -> Family[Any]:
    """The family of a tower that gives vectors, with its text tower if there is one."""
    prefixes = (*images.prefixes, "")  # text towers and projections are expected by whole names
    left = {"logit_scale", "logit_bias", f"{TEXT}.embeddings.position_ids"}
    vectors = replace(
        images, prefixes=prefixes, unused=(images.unused - images.expected.keys()) | left
    )
    if (text := spec.text) is None:
        return vectors

    def parts(spec: ModelSpec, weights: Weights) -> tuple[Any, TextTower]:
        return images.parts(spec, weights), TextTower(spec, text, weights)

    def tower(
        spec: ModelSpec, parts: tuple[Any, TextTower], attention: Attention, blocks: BlocksForm
    ) -> ImageTextTower:
        return ImageTextTower(images.tower(spec, parts[0], attention, blocks), parts[1])

    expected = images.expected | text_shapes(spec, text)
    return replace(vectors, expected=expected, parts=parts, tower=tower)


def is_clip(spec: ModelSpec) -> bool:
    """CLIP has a class token and a norm before the layers; otherwise it is SigLIP."""
    return bool(spec.vision["model_type"] == CLIP_TOWER)
