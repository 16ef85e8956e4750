"""Plans and patches against transformers' image processor, up to embeddings of photographs.

transformers' Pillow backend is the reference: its torchvision backend needs torchvision, which
resizes as torch does, bit for bit. Pillow rounds between its two passes and, for some shapes, takes
the vertical one first: then up to a fifth of the pixels differ, nearly all of them by 1 of 255.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import skimage
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from actors.errors import TooLarge
from actors.families.registry import read
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.options import ModelOptions
from actors.spec.sizing import (
    CanvasSizing,
    EnlargingSizing,
    FittedSizing,
    RoundingSizing,
    ShrinkingSizing,
    smart_resize,
)
from actors.types import Clip, Size
from tests import llama4
from tests.checkpoints import processor
from tests.images import opened
from tests.parity.conftest import Pair
from tests.parity.test_tower import as_published, encode, rows_of
from tests.videos import patchify_video

PHOTOGRAPHS = ["astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg"]


def photograph(name: str) -> bytes:
    """A real photograph as a JPEG of quality 90."""
    buffer = BytesIO()
    with Image.open(Path(skimage.__file__).parent / "data" / name) as image:
        image.convert("RGB").save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@given(
    width=st.integers(1, 20_000),
    height=st.integers(1, 20_000),
    factor=st.sampled_from([28, 32]),
    limits=st.sampled_from([(65536, 16777216), (3136, 12845056), (3136, 451584)]),
    family=st.sampled_from(["qwen2_vl", "minimax_m3_vl"]),
)
def test_sizes_are_as_smart_resize_gives_them(
    width: int, height: int, factor: int, limits: tuple[int, int], family: str
) -> None:
    theirs = llama4.functions(family)["smart_resize"]
    try:
        rows, columns = theirs(height, width, factor, *limits)
    except ValueError:
        with pytest.raises(TooLarge):
            smart_resize(Size(width, height), factor, *limits)
    else:
        assert smart_resize(Size(width, height), factor, *limits) == Size(columns, rows)


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
def test_sizes_are_as_glm_gives_them(width: int, height: int) -> None:
    from transformers.models.glm4v import image_processing_pil_glm4v as theirs

    sizing = EnlargingSizing(14, 2, min_pixels=12544 // 2, max_pixels=9633792 // 2)
    limits = {"min_pixels": 12544, "max_pixels": 9633792}
    try:
        rows, columns = theirs.smart_resize(2, height, width, **limits)
    except ValueError:
        with pytest.raises(TooLarge):
            sizing.resized(Size(width, height))
    else:
        assert sizing.resized(Size(width, height)) == Size(columns, rows)


@given(
    width=st.integers(1, 20_000),
    height=st.integers(1, 20_000),
    limits=st.sampled_from([(16, 8000), (1, 1), (300, 400)]),
)
def test_canvases_are_as_glm5_next_gives_them(
    width: int, height: int, limits: tuple[int, int]
) -> None:
    from transformers.models.glm5_next import image_processing_pil_glm5_next as theirs

    sizing = CanvasSizing(14, 2, limits[0] * 28**2, limits[1] * 28**2)
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(TooLarge):
            sizing.resized(Size(width, height))
        return
    rows, columns = theirs.smart_resize(2, height, width, 2, 28, *limits)
    assert sizing.resized(Size(width, height)) == Size(columns, rows)
    assert max(rows, columns) // 14 <= sizing.longest_side_patches()
    assert sizing.plan(Size(width, height)).tokens <= sizing.token_range()[1]


@pytest.mark.parametrize(
    "size", [(2000, 300), (97, 640), (20, 31), (3, 500), (640, 480), (5000, 4000), (100, 112)]
)
def test_images_on_a_canvas(size: tuple[int, int]) -> None:
    """Where the picture ends, and what it shows. So do frames."""
    from transformers.models.glm5_next import image_processing_pil_glm5_next as theirs

    model, image = read(ModelOptions(id="glm53-flash", load_format="dummy")), opened().resize(size)
    expected = theirs.Glm5NextImageProcessorPil(do_normalize=False)(image, return_tensors="np")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    plan, patches = patchifier_of(model).patchify(pixels)
    assert expected["image_grid_thw"].tolist() == [list(plan.grid_thw)]
    values = expected["pixel_values"].reshape(plan.patches, 3, 2, 14**2)[:, :, 0]
    difference = np.abs((values * 255).round().reshape(patches.shape) - patches.numpy())
    assert difference.mean() < 0.2
    assert difference.max() <= 16
    if plan.tokens < 7000:  # the limit of an image is not that of a video
        item = patchify_video(model, Clip(Size(*size), 2, 1, chosen=True), [pixels] * 2)
        assert item.plan.grid_thw == plan.grid_thw
        assert np.array_equal(item.patches, patches)
        assert item.later is not None
        assert np.array_equal(item.later, patches)


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000))
def test_sizes_are_as_paddleocr_gives_them(width: int, height: int) -> None:
    from transformers.models.paddleocr_vl import image_processing_pil_paddleocr_vl as theirs

    sizing = RoundingSizing(14, 2, min_pixels=147384, max_pixels=2822400)
    try:
        rows, columns = theirs.smart_resize(height, width, 28, 147384, 2822400)
    except ValueError:
        with pytest.raises(TooLarge):
            sizing.resized(Size(width, height))
    else:
        assert sizing.resized(Size(width, height)) == Size(columns, rows)


@given(width=st.integers(1, 40_000), height=st.integers(1, 40_000))
def test_sizes_are_as_kimi_k25_gives_them(width: int, height: int) -> None:
    """By its published rule (navit_resize): transformers' needs torchvision."""
    begun = max(1, width // 14) * max(1, height // 14)
    scale = min(1.0, (16384 / begun) ** 0.5, 512 * 14 / height, 512 * 14 / width)
    resized = [min(max(1, int(side * scale)), 512 * 14) for side in (height, width)]
    padded = [side + -side % 28 for side in resized]
    sizing = ShrinkingSizing(14, 2, max_patches=16384, max_side_patches=512)
    assert sizing.resized(Size(width, height)) == Size(resized[1], resized[0])
    plan = sizing.plan(Size(width, height))
    assert plan.grid_thw == (1, padded[0] // 14, padded[1] // 14)
    assert plan.tokens <= sizing.token_range()[1]
    assert max(plan.grid_thw) <= sizing.longest_side_patches()


@given(
    width=st.integers(1, 20_000),
    height=st.integers(1, 20_000),
    limits=st.sampled_from([(1024, 16, 1), (1540, 14, 2), (1000, 14, 2)]),
)
def test_sizes_are_as_pixtral_gives_them(
    width: int, height: int, limits: tuple[int, int, int]
) -> None:
    from transformers.models.pixtral import image_processing_pil_pixtral as theirs

    longest, patch, merge = limits
    sizing = FittedSizing(patch, merge, longest)
    image = np.empty((1, height, width), np.bool_)
    rows, columns = theirs.get_resize_output_image_size(
        image, longest, patch * merge, input_data_format="channels_first"
    )
    if not min(rows, columns):
        with pytest.raises(TooLarge):
            sizing.resized(Size(width, height))
    else:
        assert sizing.resized(Size(width, height)) == Size(columns, rows)
        assert max(sizing.plan(Size(width, height)).grid_thw) <= sizing.longest_side_patches()


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_patches_of_photographs(pair: Pair, name: str) -> None:
    data = photograph(name)
    plan, patches = patchifier_of(pair.tower.spec).patchify(decode(data))
    theirs = processor(pair.model_type)(Image.open(BytesIO(data)), return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [list(plan.grid_thw)]
    frames = (
        theirs["pixel_values"]
        .flatten(1)
        .unflatten(1, (3, -1, pair.tower.spec.vision["patch_size"] ** 2))
    )
    mean, std = (
        torch.tensor(each)[:, None] for each in (pair.tower.spec.mean, pair.tower.spec.std)
    )
    pixels = ((frames[:, :, 0] * std + mean) * 255).round().flatten(1).numpy().astype(np.int64)
    ours = as_published(pair, [plan], patches).numpy()
    difference = np.abs(pixels - ours.astype(np.int64))
    assert difference.mean() < 0.2
    assert difference.max() <= 16


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_embeddings_of_photographs(pair: Pair, name: str) -> None:
    data = photograph(name)
    plan, patches = patchifier_of(pair.tower.spec).patchify(decode(data))
    ours = encode(pair.tower, [plan], patches, plan.tokens + 40, segments=4)
    inputs = processor(pair.model_type)(Image.open(BytesIO(data)), return_tensors="pt")
    with torch.no_grad():
        features = pair.reference.model.get_image_features(**inputs, return_dict=True)
    similarity = torch.cosine_similarity(ours, rows_of(features), dim=1)
    assert similarity.mean() > 0.9999
    assert similarity.min() > (0.9999 if pair.model_type.startswith("qwen3") else 0.9995)
