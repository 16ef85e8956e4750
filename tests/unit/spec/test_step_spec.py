"""What the JSON files of the Step3 families say, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.errors import CheckpointError
from actors.families import registry
from actors.options import ModelOptions
from actors.spec.sizing import PATHS
from actors.spec.views import PaddedWindows, WindowSizing
from encoder_service import cli
from tests.unit.spec.test_tile_spec import CONFIGS, PROCESSOR, changed

CUT = (728, 504, 3024, 14, 4)


@pytest.mark.parametrize(
    ("preset", "family", "width"),
    [("step3vl-10b", "step3p7", 4096), ("step3-321b", "step3_vl", 7168)],
)
def test_presets(preset: str, family: str, width: int) -> None:
    model = registry.read(ModelOptions(id=preset, load_format="dummy"))
    assert (model.family, model.width, model.paths) == (family, width, PATHS)
    assert model.sizing == PaddedWindows(*CUT)
    assert model.mean == (0.48145466, 0.4578275, 0.40821073)


def test_step_3_7_is_cut_as_transformers_does_and_its_processor_says(tmp_path: Path) -> None:
    options = changed(tmp_path, "step3vl-10b", "config.json", {"model_type": "step3p7"})
    assert registry.read(options).sizing == WindowSizing(*CUT)
    (tmp_path / PROCESSOR).write_text(
        '{"size": {"height": 448, "width": 448}, "patch_size": 336, "max_image_size": 2016}'
    )
    assert registry.read(options).sizing == WindowSizing(448, 336, 2016, 14, 4)
    (tmp_path / PROCESSOR).write_text('{"patch_size": 14}')
    with pytest.raises(CheckpointError, match="a view of 14 pixels: only whole tokens"):
        registry.read(options)


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("step3-321b", {"understand_projector_stride": 1}, "understand_projector_stride"),
        ("step3-321b", {"text_config": {}}, "lacks or misstates 'hidden_size'"),
        ("step3vl-10b", {"vision_config": {"ues_cls_token": True}}, "ues_cls_token"),
        ("step3vl-10b", {"vision_config": {"use_rope2d": False}}, "use_rope2d"),
        ("step3vl-10b", {"vision_config": {"hidden_act": "gelu"}}, "hidden_act"),
    ],
)
def test_what_the_tower_does_not_do_is_refused(
    tmp_path: Path, preset: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        registry.read(changed(tmp_path, preset, "config.json", change))


@pytest.mark.parametrize(
    ("config", "preset"), [("step3vl.yaml", "step3vl-10b"), ("step3.yaml", "step3-321b")]
)
def test_the_configs_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, preset: str
) -> None:
    text = (CONFIGS / config).read_text()
    (model,) = [line for line in text.splitlines() if "model: {id:" in line]
    dummy = f"      model: {{id: {preset}, load_format: dummy}}"
    (tmp_path / config).write_text(text.replace(model, dummy))
    assert cli.main(["check", str(tmp_path / config)]) == 0
    budgets = capsys.readouterr().out
    assert "169 338 676 1352 2704 5408 " in budgets
    assert "0 81 162 324 648 1296 2592 5184 " in budgets
