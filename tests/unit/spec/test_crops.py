"""What an image costs that is seen as a whole and in crops, and what config.json must say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.budgets import model_capacity
from actors.errors import CheckpointError
from actors.families import registry
from actors.families.deepseek_ocr.tower import order
from actors.options import GraphOptions, ModelOptions
from actors.spec.checkpoint import Notes, Preset
from actors.spec.tiles import StretchedTiles
from actors.spec.views import CropSizing, PlainCrops
from actors.types import Size
from encoder_service import cli
from tests.unit.spec.test_tile_spec import CONFIGS, changed

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
OCR = CropSizing(1024, StretchedTiles(640, 16, 4, max_tiles=9, min_tiles=2))


@pytest.mark.parametrize(
    ("size", "grid", "crops", "tokens"),
    [
        (Size(336, 336), (64, 64), 0, 273),
        (Size(640, 640), (64, 64), 0, 273),
        (Size(641, 640), (80, 80), 4, 273 + 20 * 21),
        (Size(1920, 1080), (80, 160), 8, 273 + 20 * 41),
        (Size(1654, 2339), (120, 80), 6, 273 + 30 * 21),
        (Size(100, 4000), (360, 40), 9, 273 + 90 * 11),
    ],
)
def test_published_token_counts(size: Size, grid: tuple[int, int], crops: int, tokens: int) -> None:
    """deepseek-ai/DeepSeek-OCR: a row of tokens and a newline for each row, then a separator."""
    plan = OCR.plan(size)
    assert (plan.grid_thw, plan.tokens) == ((1, *grid), tokens)
    assert plan.path_tokens == (272, 100 * crops)
    assert plan.path_patches == (4096, 1600 * crops)
    assert plan.patches == sum(plan.path_patches)
    assert [plan.rows(path).stop for path in (0, 1)] == [4096, plan.patches]


@given(st.integers(1, 6000), st.integers(1, 6000))
def test_no_image_is_beyond_the_range(width: int, height: int) -> None:
    size = Size(width, height)
    least, most = OCR.token_range()
    assert least <= OCR.plan(size).tokens <= most == 273 + 90 * 11
    whole = OCR.whole(size)
    assert max(whole.width, whole.height) == 1024
    assert min(whole.width, whole.height) >= 1


def test_rows_are_crops_in_one_grid_then_the_whole_then_the_separator() -> None:
    tiny = CropSizing(32, StretchedTiles(32, 16, 1, max_tiles=2, min_tiles=2))
    plans = [tiny.plan(size) for size in (Size(20, 20), Size(64, 32), Size(30, 60))]
    whole, crops = 3 * 6, 2 * 8
    newline, separator = whole + crops, whole + crops + 1
    assert order(plans, tiny, whole, crops).tolist() == [
        *[*range(6), separator],
        *[18, 19, 22, 23, newline, 20, 21, 24, 25, newline],
        *[*range(6, 12), separator],
        *[26, 27, newline, 28, 29, newline, 30, 31, newline, 32, 33, newline],
        *[*range(12, 18), separator],
    ]


def test_the_preset_is_the_published_model() -> None:
    model = registry.read(ModelOptions(id="deepseek-ocr", load_format="dummy"))
    assert (model.family, model.sizing, model.width) == ("deepseek_ocr", OCR, 1280)
    assert (model.kinds, model.paths, model.deepstack) == (("image",), ("global", "local"), 0)
    assert model_capacity(GraphOptions(token_budgets=(13824,)), model).budgets == (
        (272, 544, 1088, 2176, 4352, 8704, 13824),
        (0, 100, 200, 400, 800, 1600, 3200, 6400, 12800),
    )


def test_the_second_version_under_both_of_its_names() -> None:
    """The published files: tests/data/published."""
    model = registry.read(ModelOptions(id="deepseek-ocr2", load_format="dummy"))
    facts = json.loads((PUBLISHED / "deepseek-ai--DeepSeek-OCR-2.json").read_text())
    same = registry.read(ModelOptions(id=model.id), Notes(facts["files"]))
    assert (model.family, model.width, model.paths) == ("deepseek_ocr2", 1280, ("global", "local"))
    assert model.sizing == PlainCrops(1024, StretchedTiles(768, 16, 4, max_tiles=6, min_tiles=2))
    assert replace(same, dummy=True) == model
    assert model_capacity(GraphOptions(token_budgets=(1024,)), model).budgets == (
        (256, 512, 1024),
        (0, 144, 288, 576),
    )


def two(tower: str, **change: Any) -> dict[str, Any]:
    """A change of the second version's config.json."""
    vision = Preset("deepseek-ocr2").files["config.json"]["vision_config"]
    return {"vision_config": vision | {tower: vision[tower] | change}}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", two("sam_config", window_size=7), "window_size of sam_config"),
        ("config.json", two("sam_config", mlp_dim=5), "mlp_dim of sam_config"),
        ("config.json", two("sam_config", image_size=512), "size of the image processor"),
        ("config.json", two("encoder_config", hidden_act="relu"), "hidden_act of encoder_config"),
        ("preprocessor_config.json", {"tile_size": 640}, "tile_size of the image processor"),
        ("preprocessor_config.json", {"crop_to_patches": False}, "crop_to_patches of the image"),
        ("preprocessor_config.json", {"size": 640}, "size of the image processor: only 1024"),
    ],
)
def test_what_the_second_version_does_not_do_is_refused(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        registry.read(changed(tmp_path, "deepseek-ocr2", file, change))


def test_the_processor_may_limit_crops(tmp_path: Path) -> None:
    limits = {"max_patches": 6, "image_mean": [0.4, 0.5, 0.6]}
    model = registry.read(changed(tmp_path, "deepseek-ocr", "processor_config.json", limits))
    assert model.sizing == CropSizing(1024, StretchedTiles(640, 16, 4, max_tiles=6, min_tiles=2))
    assert (model.mean, model.std) == ((0.4, 0.5, 0.6), (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"vision_config": {"model_name": "siglip_large"}}, "only deeplip_b_l"),
        ("config.json", {"projector_config": {"projector_type": "mlp"}}, "only linear"),
        ("config.json", {"vision_config": {}}, "lacks or misstates 'image_size'"),
        ("processor_config.json", {"downsample_ratio": 2}, "downsample_ratio of the processor"),
    ],
)
def test_other_models_of_the_same_type_are_refused(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        registry.read(changed(tmp_path, "deepseek-ocr", file, change))


def test_the_config_can_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (CONFIGS / "deepseek_ocr.yaml").read_text()
    (model,) = [line for line in text.splitlines() if "model: {id:" in line]
    dummy = "      model: {id: deepseek-ocr, load_format: dummy}"
    (tmp_path / "ocr.yaml").write_text(text.replace(model, dummy))
    assert cli.main(["check", str(tmp_path / "ocr.yaml")]) == 0
    said = capsys.readouterr().out
    assert "272 544 1088" in said
    assert "0 100 200 400" in said
