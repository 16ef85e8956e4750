"""The whole bench of the engine, on the tiny preset and the CPU, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from actors.engine.device import Device
from actors.families.registry import read
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset
from actors.types import ItemPlan, Size
from encoder_service import cli
from encoder_service.bench import report
from encoder_service.bench.engine import WARM_UPS, timed
from encoder_service.bench.reference import relative_error
from encoder_service.bench.report import MIXED
from tests.small_presets import write_small

TINY = ["bench", "engine", "--model", "qwen3vl-tiny", "--device", "cpu"]
BRIEF = ["--repeats", "1"]


def plans(model: str, *sizes: Size) -> list[ItemPlan]:
    sizing = read(ModelOptions(id=model, load_format="dummy")).sizing
    return [sizing.plan(size) for size in sizes]


def test_the_mixed_workload_is_what_it_says() -> None:
    mixed = plans("qwen3vl-8b", *MIXED)
    totals = sum(plan.patches for plan in mixed), sum(plan.tokens for plan in mixed)
    assert (len(mixed), *totals) == (20, 32_252, 8_063)


def test_the_floor_counts_gemms_and_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: two frames per patch, three layers, a deepstack merger and the last one."""
    monkeypatch.setitem(report.PEAK_FLOPS_PER_SECOND, "CPU", 1e12)
    file = tmp_path / "figures.json"
    what = ["--workload", "256x256", "--modes", "eager", "--json", str(file)]
    with sdpa_kernel(SDPBackend.MATH):  # products that torch can count on a CPU
        assert cli.main([*TINY, *BRIEF, *what]) == 0
    (workload,) = json.loads(file.read_text())["models"][0]["workloads"]
    vision = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy")).vision
    width, depth, out = vision["hidden_size"], vision["depth"], vision["out_hidden_size"]
    patches, merged = 256, 64
    block = patches * (4 * width**2 + 2 * width * vision["intermediate_size"])
    mergers = 1 + len(vision["deepstack_visual_indexes"])
    total = patches * 3 * 2 * 16**2 * width
    total += depth * (block + 2 * patches**2 * width)
    total += mergers * merged * ((4 * width) ** 2 + 4 * width * out)
    assert workload["floor_ms"] == pytest.approx(2 * total / 1e12 * 1e3)
    assert report.floor_ms(10**12, "another device") is None


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_run_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    workloads = ["--workload", "1x336", "512x512*4+224x224*2"]
    assert cli.main([*TINY, *BRIEF, *workloads, "--json", str(file)]) == 0
    written: dict[str, Any] = json.loads(file.read_text())
    assert written.keys() >= {"date", "command", "device", "versions", "repeats"}
    assert torch.__version__.startswith(written["versions"]["torch"])  # without its build tag
    one, several = written["models"][0]["workloads"]
    assert (one["items"], one["tokens"], several["items"]) == (1, 100, 6)
    for figure in one["figures"] + several["figures"]:
        assert 0 < figure["error"] < report.TOLERANCE
        assert 0 < figure["median_ms"] <= figure["p99_ms"]
        assert (figure["host_ms"] is None) == (figure["mode"] == "transformers")
    by_mode = {figure["mode"]: figure for figure in one["figures"]}
    assert tuple(by_mode) == report.DEFAULT_MODES
    assert by_mode["exact"]["budgets"] == [100]
    assert by_mode["budget"]["budgets"] == [104]
    assert by_mode["budget"]["padding_ratio"] == pytest.approx(4 / 104)
    # Beyond the largest budget of the tiny preset: packs that follow each other.
    assert len(several["figures"][-1]["budgets"]) > 1
    last = capsys.readouterr().out.splitlines()[-30:]
    assert any(line.split()[:2] == ["1x336", "transformers"] for line in last)


@pytest.mark.extended
def test_only_budgets_that_a_workload_may_need_are_captured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    what = ["--workload", "1x336", "336x336*2", "--modes", "budget"]
    assert cli.main([*TINY, *BRIEF, *what]) == 0
    shown = capsys.readouterr().out
    captured = [int(line.split()[2]) for line in shown.splitlines() if " captured " in line]
    assert captured == list(range(208, 128, -16)) + list(range(128, 56, -8))  # 200 tokens


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, by itself
@pytest.mark.timeout(600)
def test_other_forms_of_the_blocks(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    # One image: two may be split into packs, or not.
    what = ["--workload", "1x336", "--modes", "budget", "compile", "reference"]
    assert cli.main([*TINY, *BRIEF, *what, "--json", str(file)]) == 0
    (workload,) = json.loads(file.read_text())["models"][0]["workloads"]
    found = [(figure["mode"], figure["budgets"]) for figure in workload["figures"]]
    assert found == [("budget", [104]), ("compile", [104]), ("reference", [104])]


def test_pruned_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    what = ["--workload", "1x336@0.41", "64x64+96x64", "--modes", "budget", "--json", str(file)]
    assert cli.main([*TINY, *BRIEF, *what]) == 0
    pruned, whole = json.loads(file.read_text())["models"][0]["workloads"]
    assert (pruned["items"], pruned["tokens"], pruned["patches"]) == (1, 41, 164)
    assert pruned["figures"][0]["budgets"] == [64]
    assert whole["tokens"] == 10
    small = str(write_small(tmp_path, "qwen25vl-7b"))
    windowed = ["bench", "engine", "--model", small, "--device", "cpu"]
    assert cli.main([*windowed, "--workload", "64x64@0.5"]) == 1
    assert "which the family qwen2_5_vl does not have" in capsys.readouterr().err
    for wrong in ("64x64@0.0", "64x64@1.5", "64x64@"):
        with pytest.raises(SystemExit):
            cli.main([*TINY, "--workload", wrong])


def test_sounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files, file = Preset("whisper-tiny").files, tmp_path / "figures.json"
    files["config.json"] |= {"d_model": 64, "encoder_layers": 2, "encoder_ffn_dim": 128}
    files["config.json"]["encoder_attention_heads"] = 2
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    hearing = ["bench", "engine", "--model", str(tmp_path), "--device", "cpu", *BRIEF]
    what = ["--workload", "0.5s*2", "--modes", "eager", "budget", "--json", str(file)]
    assert cli.main([*hearing, *what]) == 0
    (workload,) = json.loads(file.read_text())["models"][0]["workloads"]
    assert (workload["items"], workload["tokens"]) == (2, 2 * 1500), "Whisper hears 30 s"
    eager, budget = workload["figures"]
    # One pack or two, by what was measured.
    assert (eager["budgets"], sum(budget["budgets"])) == ([], 3000)
    assert cli.main([*hearing, "--workload", "64x64"]) == 1
    assert f"--workload 64x64: {tmp_path} takes sounds" in capsys.readouterr().err
    assert cli.main([*hearing, "--workload", "31s"]) == 1
    assert f"--workload 31s: {tmp_path} takes at most 30 s" in capsys.readouterr().err
    assert cli.main([*hearing, "--workload", "0.00001s"]) == 1
    assert "--workload 0.00001s: a sound has no sample" in capsys.readouterr().err
    assert cli.main([*hearing, "--every-budget"]) == 1
    refused = f"--every-budget times an image, and {tmp_path} takes sounds"
    assert refused in capsys.readouterr().err
    assert cli.main([*hearing, "--profile", "1x336"]) == 1
    assert "--profile 1x336: the workloads are 1x5s" in capsys.readouterr().err
    assert cli.main([*TINY, "--workload", "1x30s"]) == 1
    assert "--workload 1x30s: qwen3vl-tiny takes images" in capsys.readouterr().err


def test_sounds_of_several_windows(tmp_path: Path) -> None:
    tower = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower |= {"intermediate_size": 256, "max_source_positions": 100}
    extractor = {"chunk_length": 2, "feature_size": 128}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "voxtral", "audio_config": tower})
    )
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(extractor))
    file = tmp_path / "figures.json"
    hearing = ["bench", "engine", "--model", str(tmp_path), "--device", "cpu", *BRIEF]
    what = ["--workload", "3s*2", "--modes", "eager", "exact", "budget", "--json", str(file)]
    assert cli.main([*hearing, *what]) == 0
    (workload,) = json.loads(file.read_text())["models"][0]["workloads"]
    assert workload["tokens"] == 2 * 2 * 25
    eager, exact, budget = (figure["budgets"] for figure in workload["figures"])
    assert (eager, exact, sum(budget)) == ([], [100], 100)


def test_fp8_of_a_plan(tmp_path: Path) -> None:
    """The plan that the service reads, made by `calibrate`."""
    config, image, plan = tmp_path / "c.yaml", tmp_path / "i.png", tmp_path / "plan.json"
    args = "{model: {id: qwen3vl-tiny, load_format: dummy}, encoder: {device: cpu, num_gpus: 0}}"
    config.write_text(
        f"applications: [{{name: a, import_path: encoder_service.app:build, args: {args}}}]"
    )
    Image.effect_noise((64, 64), 80).convert("RGB").save(image)
    assert cli.main(["calibrate", str(config), str(image), "--out", str(plan)]) == 0
    file = tmp_path / "figures.json"
    what = ["--workload", "64x64", "--modes", "budget", "fp8", "--precision-file", str(plan)]
    assert cli.main([*TINY, *BRIEF, *what, "--json", str(file)]) == 0
    (workload,) = json.loads(file.read_text())["models"][0]["workloads"]
    bf16, fp8 = workload["figures"]
    assert (fp8["mode"], fp8["budgets"]) == ("fp8", bf16["budgets"])
    assert fp8["error"] > bf16["error"]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_every_budget_and_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    modes = ["budget", "eager"]
    what = ["--workload", "2x336", "--modes", *modes, "--every-budget", "--profile", "2x336"]
    assert cli.main([*TINY, *BRIEF, *what, "--json", str(file)]) == 0
    model = json.loads(file.read_text())["models"][0]
    (every,) = model["every_budget"]
    budgets = [figure["budgets"] for figure in every["figures"]]
    assert budgets[:3] == [[104], [112], [120]]
    assert budgets[-2:] == [[960], [1024]]
    shown = capsys.readouterr().out
    assert "budget 1024" in shown
    for mode in modes:
        assert "aten::addmm" in shown.split(f"2x336, {mode}, 5 calls:")[1].split("calls:")[0]


def test_a_wrong_output_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "TOLERANCE", 1e-5)  # less than bf16 can do
    assert cli.main([*TINY, *BRIEF, "--workload", "64x64", "--modes", "eager"]) == 1
    assert "WRONG: qwen3vl-tiny" in capsys.readouterr().out


def test_nan_is_no_small_error() -> None:
    true = torch.ones(2, 3)
    wrong = true.clone()
    wrong[1, 1] = torch.nan
    assert relative_error([true, true * 1.5], [true, true]) == pytest.approx(0.5)
    error = relative_error([wrong, true], [true, true])
    figures = [report.ModeFigures("budget 64", 1, 1, error)]
    every = report.WorkloadReport("1x320", 1, 400, 100, None, figures)
    model = report.ModelReport("m", "transformers", [], [every])
    assert not model.correct()


@pytest.mark.extended
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "figures.png"
    what = ["--workload", "64x64", "--modes", "eager", "budget", "--plot", str(file)]
    assert cli.main([*TINY, *BRIEF, *what]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "9x9"], "--profile 9x9: the workloads are 1x336"),
        (["--model", "qwen3vl-9000b"], "qwen3vl-9000b"),
        (["--workload", "64x64", "--modes", "fast"], "graphs.blocks is fast, which needs"),
        (["--modes", "fp8"], "--modes fp8 and --precision-file need each other"),
        (["--modes", "fp8", "--precision-file", "none.json"], "precision_file cannot be read"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    start = TINY if "--model" not in arguments else ["bench", "engine", "--device", "cpu"]
    assert cli.main([*start, *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--workload", "336"], ["--workload", "64x64,32x32"], ["--repeats", "0"]]
)
def test_wrong_command_lines(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main([*TINY, *arguments])
    assert refused.value.code == 2


@pytest.mark.parametrize(("repeats", "calls"), [(7, 14), (20, 20 + WARM_UPS)])
def test_timed_calls_as_often_as_it_says(repeats: int, calls: int) -> None:
    seen: list[int] = []
    median_ms, p99_ms = timed(lambda: seen.append(1), Device(), repeats)
    assert len(seen) == calls
    assert median_ms <= p99_ms
