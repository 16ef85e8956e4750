"""The bench of the engine on small towers of every family, and the arithmetic that it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from actors.engine import budgets
from actors.families.registry import read
from actors.models.load import tensors
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.types import Size
from encoder_service import cli
from encoder_service.bench.engine import engine
from encoder_service.bench.engine.operations import operations
from encoder_service.bench.engine.reference import PlainTower
from encoder_service.bench.engine.report import ModelReport
from encoder_service.commands import bench
from tests.small_presets import SMALL, write_small

pytestmark = pytest.mark.extended

BRIEF = ["--device", "cpu", "--repeats", "1", "--warmup", "1"]
CPU = torch.device("cpu")


def counted(spec: ModelSpec, options: ModelOptions, sizes: list[Size]) -> int:
    """What torch counts while our own tower runs, in plain products."""
    plain = PlainTower(spec, tensors(options, spec, CPU), CPU)
    plans = [spec.sizing.plan(size) for size in sizes]
    values = plain.tower.inputs(spec.paths[0], spec.sizing.token_range()[1], 1)["patches"][0][1]
    patches = [torch.zeros(plan.patches, values, dtype=torch.uint8) for plan in plans]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        plain.rows(patches, plans)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("preset", SMALL)
def test_operations_are_those_that_torch_counts(preset: str, tmp_path: Path) -> None:
    options = ModelOptions(id=str(write_small(tmp_path, preset)), load_format="dummy")
    spec = read(options)
    sizes = [Size(300, 200), Size(100, 90)]
    patches = sum(spec.sizing.plan(size).patches for size in sizes)
    frames = int(spec.vision.get("temporal_patch_size", 1))
    # Our embedding has the frames of a patch, which are equal, folded into one.
    patch = 16 if spec.family == "qwen3_5" else 14
    folded = 2 * patches * (frames - 1) * 3 * patch**2 * 64
    plans = [spec.sizing.plan(size) for size in sizes]
    assert operations(spec, plans) - folded == counted(spec, options, sizes)


def test_operations_by_hand() -> None:
    """Gemma 3: one tile of 64 x 64 patches whatever the image."""
    spec = read(ModelOptions(id="gemma3-4b", load_format="dummy"))
    width, patches, tokens = 1152, 4096, 256
    block = patches * (4 * width**2 + 2 * width * 4304) + 2 * patches**2 * width
    expected = patches * 3 * 14**2 * width + 27 * block + tokens * width * 2560
    assert operations(spec, [spec.sizing.plan(Size(336, 336))]) == 2 * expected


def test_operations_of_deepseek_ocr_by_hand() -> None:
    """The tiny preset, whole view alone: 16 x 16 patches; two layers of SAM in windows of 14."""
    spec = read(ModelOptions(id="deepseek-ocr-tiny", load_format="dummy"))
    patches, padded, tokens = 256, 28**2, 16
    mlp, attention = 8 * 48**2, 4 * 48**2
    sam = 3 * patches * mlp + (2 * padded + patches) * attention
    sam += 48 * (2 * 4 * (2 * 14**4 + 2 * 14**3) + 2 * 16**4 + 2 * 16**3)
    neck = patches * (48 * 256 + 9 * 256**2) + 64 * 9 * 256 * 48 + tokens * 9 * 48 * 64
    clip = 2 * (17 * 12 * 64**2 + 2 * 17**2 * 64)
    total = patches * 3 * 16**2 * 48 + sam + neck + clip + tokens * 128 * 80
    assert operations(spec, [spec.sizing.plan(Size(64, 64))]) == 2 * total


@pytest.mark.timeout(600)  # the CPU computes large budgets: minutes on a slow machine
@pytest.mark.parametrize("preset", [*SMALL, "deepseek-ocr-tiny"])
def test_every_family_in_every_mode(
    preset: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "MOST_TOKENS", 200)  # a CPU computes the padding too
    file = tmp_path / "figures.json"
    model = str(write_small(tmp_path, preset)) if preset in SMALL else preset
    what = ["--model", model, "--workload", "300x200*2", "--json", str(file)]
    assert cli.main(["bench", "engine", *BRIEF, *what]) == 0
    report = json.loads(file.read_text())["models"][0]
    assert report["reference"] == "our own plain torch"
    for workload in report["workloads"]:
        assert [figure["mode"] for figure in workload["figures"]] == ["eager", "exact", "budget"]
        eager, exact, budget = workload["figures"]
        assert eager["budgets"] == []
        assert exact["budgets"]
        assert exact["padding_ratio"] == 0
        assert budget["budgets"]
        assert 0 <= budget["padding_ratio"] < 1
    assert "our own plain torch" in capsys.readouterr().out


def test_all_goes_on_after_a_model_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []

    def run(model: str, *_: object) -> ModelReport:
        if model == "gemma3-4b":
            raise torch.OutOfMemoryError("no room")
        measured.append(model)
        return ModelReport(model, "transformers", [], [], [])

    monkeypatch.setattr(engine, "run", run)
    assert cli.main(["bench", "engine", *BRIEF, "--model", "all"]) == 1
    assert measured == [name for name in bench.full_size() if name != "gemma3-4b"]
    assert "step3-321b" in measured
    assert "qwen3vl-tiny" not in measured
    assert "FAILED: gemma3-4b" in capsys.readouterr().out


def test_two_paths_have_no_table_of_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    what = ["--model", "deepseek-ocr-tiny", "--workload", "64x64", "--every-budget"]
    assert cli.main(["bench", "engine", *BRIEF, *what]) == 1
    assert "two paths" in capsys.readouterr().err
