"""Step3's published vision tower (321B) for batches of views, and its patchifier.

After modeling_step3.py and processing_step3.py of stepfun-ai/step3; transformers has neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

Pixels = npt.NDArray[np.uint8]


def features(weights: Mapping[str, Tensor], pixels: Tensor, heads: int, depth: int) -> Tensor:
    """Normalised pixels [views, 3, side, side] to rows [views, tokens, width of the language
    model]."""
    own = {name.removeprefix("vision_model."): value for name, value in weights.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, own[f"{name}.weight"], own[f"{name}.bias"])

    def normed(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], own[f"{name}.weight"], own[f"{name}.bias"], 1e-5)

    embedding = own["embeddings.patch_embedding.weight"]
    x = F.conv2d(pixels, embedding, own["embeddings.patch_embedding.bias"], stride=14)
    side = x.shape[-1]
    x = torch.cat(
        [
            own["embeddings.class_embedding"].expand(len(x), 1, -1),
            x.flatten(2).transpose(1, 2),
        ],
        dim=1,
    )
    x = x + positions(own["embeddings.position_embedding.weight"], side)
    x = torch.cat([x[:, :1].repeat(1, 3, 1), x], dim=1)
    for layer in range(depth):
        block = f"transformer.layers.{layer}"
        qkv = linear(x, f"{block}.self_attn.qkv_proj").chunk(3, -1)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        seen = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
        x = x + normed(linear(seen, f"{block}.self_attn.out_proj"), f"{block}.layer_norm1")
        up = linear(x, f"{block}.mlp.fc1")
        down = linear(up * torch.sigmoid(1.702 * up), f"{block}.mlp.fc2")
        x = x + normed(down, f"{block}.layer_norm2")
    x = x[:, 4:].transpose(1, 2).unflatten(2, (side, side))
    x = F.conv2d(x, own["vit_downsampler.weight"], own["vit_downsampler.bias"], stride=2)
    x = F.conv2d(
        x, own["vit_downsampler2.weight"], own["vit_downsampler2.bias"], stride=2, padding=1
    )
    return linear(x.flatten(2).transpose(1, 2), "vit_large_projector")


def positions(table: Tensor, side: int) -> Tensor:
    """Embeddings of the class token's position, then of side x side patches."""
    trained = math.isqrt(len(table) - 1)
    if trained == side:
        return table
    grid = table[1:].view(1, trained, trained, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(
        grid, size=(side, side), mode="bicubic", antialias=True, align_corners=False
    )
    return torch.cat([table[:1], grid.permute(0, 2, 3, 1).reshape(side * side, -1)])


def views(image: Image.Image, whole: int, crop: int, longest: int) -> tuple[Pixels, list[Pixels]]:
    """The whole view and the crops, [side, side, 3], as ImagePatcher cuts them, but with Pillow."""
    width, height = image.size
    if min(width, height) < 32 and not 1 / 4 <= width / height <= 4:
        square = Image.new(image.mode, (max(width, height),) * 2, 0)
        square.paste(image, (0, 0))
        image, width, height = square, *square.size
    if max(width, height) > longest:
        scale = longest / max(width, height)
        width, height = int(width * scale), int(height * scale)
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    shown = resized(image, whole)
    long, short = max(width, height), min(width, height)
    if long <= whole:
        window = short if long / short > 1.5 else 0
    else:
        window = min(short, crop) if long / short > 4 else crop
    if not window:
        return shown, []
    across, down = (
        side if side < window else window * (int(side / window) + (side / window % 1 > 0.2))
        for side in (width, height)
    )
    canvas = image.resize((across, down), Image.Resampling.BILINEAR)
    return shown, [
        resized(canvas.crop((x, y, x + window, y + window)), crop)
        for y in range(0, down, window)
        for x in range(0, across, window)
    ]


def resized(image: Image.Image, side: int) -> Pixels:
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))
