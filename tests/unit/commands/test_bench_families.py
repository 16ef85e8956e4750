"""The bench of the engine on small towers of every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from actors.engine import budgets
from actors.options import ActorOptions, EncoderOptions, ModelOptions, PackingOptions
from actors.startup import open_engine
from actors.telemetry.metrics import EncoderMetrics
from encoder_service import cli
from encoder_service.bench import engine
from encoder_service.bench.report import ModelReport
from encoder_service.commands import bench
from tests.small_presets import SMALL, write_small

pytestmark = pytest.mark.extended

BRIEF = ["--device", "cpu", "--repeats", "1"]
PRESETS = [*SMALL, "deepseek-ocr-tiny"]


@pytest.mark.timeout(600)  # the CPU computes large budgets: minutes on a slow machine
@pytest.mark.parametrize("preset", PRESETS)
def test_every_family_in_every_mode(
    preset: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budgets, "MOST_TOKENS", 256)  # a CPU computes the padding too
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


@pytest.mark.parametrize("preset", PRESETS)
def test_what_images_of_every_family_take_is_measured_at_start(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "MOST_TOKENS", 256)
    model = str(write_small(tmp_path, preset)) if preset in SMALL else preset
    options = ActorOptions(
        model=ModelOptions(id=model, load_format="dummy", dtype="float32"),
        encoder=EncoderOptions(device="cpu", num_gpus=0),
        packing=PackingOptions(policy="smallest_first"),
    )
    series = EncoderMetrics()
    opened = open_engine(options, series)
    opened.close()
    assert opened.cost
    assert 0 < opened.cost.seconds([256]) <= opened.cost.seconds([4096]) < 100
    assert 'encoder_measured_seconds{of="launch"}' in series.text()


def test_all_goes_on_after_a_model_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    released: list[object] = []

    def run(model: str, *_: object) -> ModelReport:
        if model == "gemma3-4b":
            raise torch.OutOfMemoryError("no room")
        measured.append(model)
        return ModelReport(model, "transformers", [], [])

    monkeypatch.setattr(engine, "run", run)
    monkeypatch.setattr(engine, "release", released.append)
    assert cli.main(["bench", "engine", *BRIEF, "--model", "all"]) == 1
    assert measured == [name for name in bench.full_size() if name != "gemma3-4b"]
    assert len(released) == len(bench.full_size())
    assert "step3-321b" in measured
    assert "qwen3vl-tiny" not in measured
    assert "FAILED: gemma3-4b" in capsys.readouterr().out


def test_two_paths_have_no_table_of_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    what = ["--model", "deepseek-ocr-tiny", "--workload", "64x64", "--every-budget"]
    assert cli.main(["bench", "engine", *BRIEF, *what]) == 1
    assert "two paths" in capsys.readouterr().err
