"""Tiles of photographs against transformers' processors.

InternVL: transformers' Pillow backend, tile by tile. Llama 4's processor has no Pillow backend: its
published steps, written here with Pillow. Pillow rounds between its two passes, hence a tolerance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers.image_utils import SizeDict

from actors.families.registry import read
from actors.media.patchify import cut_tiles, patchifier_of
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset
from actors.spec.tiles import (
    CentredTile,
    CoveringTiles,
    OneTile,
    PaddedTiles,
    PartitionedTiles,
    SplitTiles,
    StretchedTiles,
    TileSizing,
)
from actors.types import Size
from tests import llama4
from tests.images import opened
from tests.patches import patches_of
from tests.unit.spec.test_tile_spec import PROCESSOR, changed

INTERNVL = StretchedTiles(tile_pixels=448, patch_size=14, merge_size=2, max_tiles=12, min_tiles=1)
AYA = StretchedTiles(364, 14, 2, 12, 1)
LLAMA4 = PaddedTiles(tile_pixels=336, patch_size=14, merge_size=2, max_tiles=16)

SIZES = [(600, 400), (1920, 1080), (300, 1100), (90, 70), (448, 448), (2000, 120)]

Pixels = npt.NDArray[np.uint8]


@pytest.mark.parametrize("sizing", [INTERNVL, AYA], ids=["internvl", "aya"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_of_the_processor_of_internvl_and_aya_vision(
    size: tuple[int, int], sizing: StretchedTiles
) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    image = opened().resize(size)
    side = sizing.tile_pixels
    settings: dict[str, Any] = {"size": {"height": side, "width": side}, "do_normalize": False}
    processor = GotOcr2ImageProcessorPil(**settings, crop_to_patches=True)
    theirs = processor(image, return_tensors="np")
    compare(image, sizing, bytes_of(theirs["pixel_values"]), "bicubic")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_ovis2_gives_the_whole_then_tiles(size: tuple[int, int]) -> None:
    from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

    image, model = opened().resize(size), read(ModelOptions(id="ovis2-2b", load_format="dummy"))
    settings = Preset("ovis2-2b").files[PROCESSOR] | {"do_normalize": False}
    theirs = Ovis2ImageProcessorPil(**settings)(image, return_tensors="np")
    assert isinstance(model.sizing, PartitionedTiles)
    compare(image, model.sizing, bytes_of(theirs["pixel_values"]), "bicubic")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_cohere2_vision_gives_tiles_then_the_whole(size: tuple[int, int]) -> None:
    """Its processor needs torchvision: its rule for canvases, and Pillow."""
    image, sizing, side = opened().resize(size), CoveringTiles(512, 16, 2, 12, 1), 512
    rule = llama4.functions("cohere2_vision")["get_optimal_tiled_canvas"]
    columns, rows = rule((size[1], size[0]), (side, side), 1, 12)
    canvas = np.asarray(image.resize((columns * side, rows * side))).transpose(2, 0, 1)
    tiles = [band for row in np.split(canvas, rows, 1) for band in np.split(row, columns, 2)]
    if len(tiles) > 1:
        tiles.append(np.asarray(image.resize((side, side))).transpose(2, 0, 1))
    compare(image, sizing, tiles, "bicubic")


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_canvases_of_cohere2_vision(width: int, height: int) -> None:
    rule = llama4.functions("cohere2_vision")["get_optimal_tiled_canvas"]
    layout = CoveringTiles(512, 16, 2, 12, 1).layout(Size(width, height))
    assert layout == rule((height, width), (512, 512), 1, 12)[::-1]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_gemma3_gives_the_picture_of_the_processor(size: tuple[int, int]) -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    image = opened().resize(size)
    settings: dict[str, Any] = {"size": {"height": 896, "width": 896}, "do_normalize": False}
    theirs = Gemma3ImageProcessorPil(**settings)(image, return_tensors="np")
    sizing = StretchedTiles(896, 14, 4, max_tiles=1, min_tiles=1)
    compare(image, sizing, bytes_of(theirs["pixel_values"]), "bilinear")


@pytest.mark.parametrize(
    ("preset", "resample"), [("siglip-so400m", 3), ("siglip-so400m", 2), ("paligemma2-3b", 3)]
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_siglip_gives_the_picture_of_the_processor(
    size: tuple[int, int], preset: str, resample: int, tmp_path: Path
) -> None:
    """SigLIP 2 resizes bilinearly."""
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    image = opened().resize(size)
    options = changed(tmp_path, preset, PROCESSOR, {"resample": resample})
    settings = json.loads((tmp_path / PROCESSOR).read_text()) | {"do_normalize": False}
    theirs = SiglipImageProcessorPil(**settings)(image, return_tensors="np")
    model = read(options)
    assert isinstance(model.sizing, OneTile)
    side = model.sizing.tile_pixels
    tiles = bytes_of(theirs["pixel_values"][..., :side, :side])
    compare(image, model.sizing, tiles, model.resample)


@pytest.mark.parametrize("size", [*SIZES, (1, 900), (901, 300)], ids=str)
def test_smolvlm_gives_the_tiles_of_the_processor(size: tuple[int, int]) -> None:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    image, model = opened().resize(size), read(ModelOptions(id="smolvlm2-2b", load_format="dummy"))
    settings = Preset("smolvlm2-2b").files["preprocessor_config.json"] | {"do_normalize": False}
    (theirs,) = SmolVLMImageProcessorPil(**settings)(image, return_tensors="np")["pixel_values"]
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    plan, patches = patchifier_of(model).patchify(pixels)
    assert isinstance(model.sizing, SplitTiles)
    side = model.sizing.tile_pixels
    tiles = bytes_of(theirs[..., :side, :side])
    assert plan.patches == len(tiles) * 27**2
    exact = torch.cat([cut_tiles(tensor(tile), model.sizing) for tile in tiles])
    assert patches.equal(exact)


@pytest.mark.parametrize("size", [*SIZES, (1, 900), (901, 300)], ids=str)
def test_janus_gives_the_square_of_the_processor(size: tuple[int, int]) -> None:
    from transformers.models.janus.image_processing_pil_janus import JanusImageProcessorPil

    image, model = opened().resize(size), read(ModelOptions(id="janus-pro-1b", load_format="dummy"))
    settings = Preset("janus-pro-1b").files["preprocessor_config.json"] | {"do_normalize": False}
    theirs = JanusImageProcessorPil(**settings)(image, return_tensors="np")
    assert isinstance(model.sizing, CentredTile)
    (tile,) = bytes_of(theirs["pixel_values"])
    ours = patchifier_of(model).patches(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    difference = (ours.int() - cut_tiles(tensor(tile), model.sizing).int()).abs()
    assert difference.float().mean() < 0.2
    assert difference.max() <= 8  # single pixels that Pillow rounds otherwise


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_clip_gives_the_middle_of_the_picture(size: tuple[int, int]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    image = opened().resize(size)
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, do_normalize=False
    )
    theirs = processor(image, return_tensors="np")
    sizing = OneTile(336, 14, 1, 1, picture_pixels=336, cropped=True, class_tokens=1)
    compare(image, sizing, bytes_of(theirs["pixel_values"]), "bicubic")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dinov2_gives_the_middle_of_the_picture(size: tuple[int, int]) -> None:
    from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

    image, model = opened().resize(size), read(ModelOptions(id="dinov2-base", load_format="dummy"))
    settings = Preset("dinov2-base").files[PROCESSOR] | {"do_normalize": False}
    theirs = BitImageProcessorPil(**settings)(image, return_tensors="np")
    assert isinstance(model.sizing, OneTile)
    compare(image, model.sizing, bytes_of(theirs["pixel_values"]), model.resample)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dinov3_gives_the_picture_of_the_processor(size: tuple[int, int]) -> None:
    """Its processor resizes floats."""
    image, preset = opened().resize(size), "dinov3-vitb16"
    settings = Preset(preset).files[PROCESSOR] | {"size": SizeDict(height=224, width=224)}
    processor = llama4.processor("dinov3_vit", "DINOv3ViTImageProcessor")(**settings)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    theirs = processor(pixels, do_rescale=True, do_resize=True)["pixel_values"]
    model = read(ModelOptions(id=preset, load_format="dummy"))
    assert isinstance(model.sizing, OneTile)
    compare(image, model.sizing, bytes_of(torch.stack(theirs).numpy()), model.resample)


def bytes_of(pixels: npt.NDArray[np.float32]) -> list[Pixels]:
    return [(tile * 255).round().astype(np.uint8) for tile in pixels]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_llama4_gives_tiles_then_the_whole(size: tuple[int, int]) -> None:
    image, side = opened().resize(size), LLAMA4.tile_pixels
    rows, columns = LLAMA4.layout(Size(*size))
    resized = LLAMA4.resized(Size(*size))
    canvas = Image.new("RGB", (columns * side, rows * side))
    canvas.paste(bilinear(image, resized.width, resized.height), (0, 0))
    tiles = [
        canvas.crop((x * side, y * side, (x + 1) * side, (y + 1) * side))
        for y in range(rows)
        for x in range(columns)
    ]
    if len(tiles) > 1:
        tiles.append(bilinear(image, side, side))
    compare(image, LLAMA4, [np.asarray(tile).transpose(2, 0, 1) for tile in tiles], "bilinear")


def bilinear(image: Image.Image, width: int, height: int) -> Image.Image:
    return image.resize((width, height), Image.Resampling.BILINEAR)


def compare(image: Image.Image, sizing: TileSizing, tiles: list[Pixels], mode: Any) -> None:
    """All patches, to single pixels that Pillow rounds otherwise."""
    ours = patches_of(torch.from_numpy(np.array(image)).permute(2, 0, 1), sizing, mode).numpy()
    assert len(ours) == sizing.plan(Size(image.width, image.height)).patches
    theirs = np.concatenate([cut_tiles(tensor(tile), sizing).numpy() for tile in tiles])
    difference = np.abs(ours.astype(np.int64) - theirs.astype(np.int64))
    assert difference.mean() < 0.2
    assert difference.max() <= 3


def tensor(tile: Pixels) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(tile))


def test_patches_lie_tile_after_tile_in_merge_blocks() -> None:
    sizing = StretchedTiles(tile_pixels=8, patch_size=2, merge_size=2, max_tiles=4, min_tiles=1)
    canvas = torch.arange(3 * 8 * 16).view(3, 8, 16)
    patches = cut_tiles(canvas, sizing)
    assert patches.shape == (32, 12)
    for index, (x, y) in enumerate([(0, 0), (2, 0), (0, 2), (2, 2), (4, 0), (6, 0), (4, 2)]):
        assert patches[index].equal(canvas[:, y : y + 2, x : x + 2].flatten())
    assert patches[16].equal(canvas[:, :2, 8:10].flatten())
