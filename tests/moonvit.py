"""Kimi-VL's tower and image processor, written after what moonshotai/Kimi-VL-A3B publishes.

Keeps what differs from our tower: tensor names, patches in raster order, interleaved complex rotary
embeddings. transformers has neither, and its Kimi-K2.5 renames and permutes the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.checkpoints_tiles import scatter

LIMIT = 1024
LAYERS, WIDTH, HEADS, INNER, PATCH, SIDE, OUT = 5, 64, 4, 128, 14, 64, 96
CONFIG = {
    "model_type": "kimi_vl",
    "text_config": {"hidden_size": OUT},
    "vision_config": {
        "model_type": "moonvit",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "patch_size": PATCH,
        "init_pos_emb_height": SIDE,
        "init_pos_emb_width": SIDE,
        "merge_kernel_size": [2, 2],
    },
}
PROCESSOR = {
    "in_token_limit": LIMIT,
    "patch_size": PATCH,
    "pad_input": True,
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.3, 0.25],
}


class MoonViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tower = {
            "patch_embed.proj": nn.Conv2d(3, WIDTH, PATCH, PATCH),
            "encoder.final_layernorm": nn.LayerNorm(WIDTH),
        }
        for index in range(LAYERS):
            tower |= {
                f"encoder.blocks.{index}.norm0": nn.LayerNorm(WIDTH),
                f"encoder.blocks.{index}.norm1": nn.LayerNorm(WIDTH),
                f"encoder.blocks.{index}.wqkv": nn.Linear(WIDTH, 3 * WIDTH),
                f"encoder.blocks.{index}.wo": nn.Linear(WIDTH, WIDTH),
                f"encoder.blocks.{index}.mlp.fc0": nn.Linear(WIDTH, INNER),
                f"encoder.blocks.{index}.mlp.fc1": nn.Linear(INNER, WIDTH),
            }
        projector = {
            "pre_norm": nn.LayerNorm(WIDTH),
            "linear_1": nn.Linear(4 * WIDTH, 4 * WIDTH),
            "linear_2": nn.Linear(4 * WIDTH, OUT),
        }
        names = {f"vision_tower.{name}": layer for name, layer in tower.items()}
        names |= {f"multi_modal_projector.{name}": layer for name, layer in projector.items()}
        # Module names must not contain dots.
        self.layers = nn.ModuleDict(
            {name.replace(".", "/"): layer for name, layer in names.items()}
        )
        self.positions = nn.Parameter(torch.zeros(SIDE, SIDE, WIDTH))

    def published(self) -> dict[str, Tensor]:
        weights = {
            name.removeprefix("layers.").replace("/", "."): value.detach().clone()
            for name, value in self.layers.state_dict().items()
        }
        return weights | {
            "vision_tower.patch_embed.pos_emb.weight": self.positions.detach().clone()
        }

    def get_image_features(
        self, pixel_values: Tensor, image_grid_thw: Tensor, **_: Any
    ) -> SimpleNamespace:
        """Maps normalised patches [n, 3 x 14 x 14] in raster order to the rows of each image."""
        sizes = [(rows, columns) for _, rows, columns in image_grid_thw.tolist()]
        parts = pixel_values.split([rows * columns for rows, columns in sizes])
        images = [self.encode(part, *size) for part, size in zip(parts, sizes, strict=True)]
        return SimpleNamespace(pooler_output=images)

    def layer(self, name: str) -> nn.Module:
        return self.layers[f"vision_tower.{name}".replace(".", "/")]

    def encode(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        dtype = self.positions.dtype
        x = self.layer("patch_embed.proj")(pixels.to(dtype).view(-1, 3, PATCH, PATCH)).flatten(1)
        table = self.positions.permute(2, 0, 1)[None]
        resampled = F.interpolate(table, size=(rows, columns), mode="bicubic")
        x = x + resampled[0].permute(1, 2, 0).flatten(0, 1)
        turn = rotation(rows, columns)
        for index in range(LAYERS):
            block = f"encoder.blocks.{index}"
            qkv = self.layer(f"{block}.wqkv")(self.layer(f"{block}.norm0")(x))
            query, key, value = qkv.view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
            query, key, value = (
                part.transpose(0, 1) for part in (turned(query, turn), turned(key, turn), value)
            )
            seen = F.scaled_dot_product_attention(query, key, value)
            x = x + self.layer(f"{block}.wo")(seen.transpose(0, 1).flatten(1))
            inner = self.layer(f"{block}.mlp.fc0")(self.layer(f"{block}.norm1")(x))
            x = x + self.layer(f"{block}.mlp.fc1")(F.gelu(inner, approximate="tanh"))
        x = self.layer("encoder.final_layernorm")(x)
        x = x.view(rows // 2, 2, columns // 2, 2, WIDTH).transpose(1, 2).reshape(-1, 4, WIDTH)
        project = {name: self.layers[f"multi_modal_projector/{name}"] for name in PROJECTOR}
        x = project["pre_norm"](x).flatten(1)
        out: Tensor = project["linear_2"](F.gelu(project["linear_1"](x)))
        return out


PROJECTOR = ("pre_norm", "linear_1", "linear_2")


def rotation(rows: int, columns: int) -> Tensor:
    """complex64 [rows x columns, 1, head size / 2]: columns and rows alternate."""
    size = WIDTH // HEADS
    frequencies = 1 / 10000 ** (torch.arange(0, size, 4).float() / size)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [torch.outer(axis.flatten().float(), frequencies) for axis in (column, row)]
    turns = torch.stack(angles, -1).flatten(1)[:, None]
    return torch.polar(torch.ones_like(turns), turns)


def turned(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates pairs of neighbouring values as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def write(folder: Path) -> Any:
    """Writes a random checkpoint; returns an object with the tower as `model`."""
    torch.manual_seed(0)
    tower = MoonViT().eval()
    scatter(tower)
    save_file(tower.published(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return SimpleNamespace(model=tower)


def processor(image: Image.Image, **_: Any) -> Mapping[str, Tensor]:
    """KimiVLImageProcessor with these settings: shrinks images over the limit, pads with black."""
    image = image.convert("RGB")
    counted = (image.width // PATCH) * (image.height // PATCH)
    if counted > LIMIT:
        scale = math.sqrt(LIMIT / counted)
        size = (int(image.width * scale), int(image.height * scale))
        image = image.resize(size, Image.Resampling.BICUBIC)
    block = 2 * PATCH
    across, down = -(-image.width // block), -(-image.height // block)
    canvas = Image.new("RGB", (across * block, down * block))
    canvas.paste(image, (0, 0))
    pixels = torch.from_numpy(np.array(canvas)) / 255
    mean, std = torch.tensor(PROCESSOR["image_mean"]), torch.tensor(PROCESSOR["image_std"])
    raster = ((pixels - mean) / std).view(2 * down, PATCH, 2 * across, PATCH, 3)
    return {
        "pixel_values": raster.permute(0, 2, 4, 1, 3).reshape(-1, 3 * PATCH**2),
        "image_grid_thw": torch.tensor([[1, 2 * down, 2 * across]]),
    }
