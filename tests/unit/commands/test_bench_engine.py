"""The whole bench of the engine, on the tiny preset and the CPU, and its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from actors.engine.device import Device
from actors.families.registry import read
from actors.models.load import tensors
from actors.options import ModelOptions
from actors.types import ItemPlan, Size
from encoder_service import cli
from encoder_service.bench.engine import report
from encoder_service.bench.engine.operations import operations
from encoder_service.bench.engine.reference import Reference, relative_error
from encoder_service.bench.engine.report import DEFAULT, MIXED, Times, floor_seconds, published
from encoder_service.bench.engine.timing import shortened, timed

TINY = ["bench", "engine", "--model", "qwen3vl-tiny", "--device", "cpu"]
BRIEF = ["--repeats", "1", "--warmup", "1"]


def plans(model: str, *sizes: Size) -> list[ItemPlan]:
    sizing = read(ModelOptions(id=model, load_format="dummy")).sizing
    return [sizing.plan(size) for size in sizes]


def test_the_mixed_workload_is_what_it_says() -> None:
    mixed = plans("qwen3vl-8b", *MIXED)
    totals = sum(plan.patches for plan in mixed), sum(plan.tokens for plan in mixed)
    assert (len(mixed), *totals) == (20, 32_252, 8_063)


@pytest.mark.parametrize(
    ("model", "floors_ms"),
    [
        ("qwen3vl-8b", (0.48, 3.87, 9.68, 7.34, 19.8, 56)),
        ("qwen3vl-2b", (0.35, 2.82, 7.06, 5.50, 15.1, None)),
    ],
)
def test_floors_of_the_default_workloads(model: str, floors_ms: tuple[float | None, ...]) -> None:
    spec = read(ModelOptions(id=model, load_format="dummy"))
    for workload, expected_ms in zip(DEFAULT, floors_ms, strict=True):
        seconds = floor_seconds(operations(spec, plans(model, *workload.sizes)), "NVIDIA H200")
        assert seconds
        assert expected_ms is None or seconds * 1e3 == pytest.approx(expected_ms, rel=0.02)
    assert floor_seconds(10**12, "CPU") is None


def test_operations_are_those_that_torch_counts() -> None:
    options = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
    spec = read(options)
    cpu = torch.device("cpu")
    reference = Reference(spec, tensors(options, spec, cpu), torch.float32, cpu)
    reference.model.set_attn_implementation("eager")  # products that torch can count on a CPU
    items = plans("qwen3vl-tiny", Size(320, 256), Size(64, 64))
    patches = [torch.zeros(plan.patches, 768, dtype=torch.uint8) for plan in items]
    with FlopCounterMode(display=False) as counter:
        reference.rows(patches, items)
    assert operations(spec, items) == counter.get_total_flops()


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_run_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    workloads = ["--workload", "1x336", "512x512*4+224x224*2"]
    assert cli.main([*TINY, *BRIEF, *workloads, "--json", str(file)]) == 0
    written: dict[str, Any] = json.loads(file.read_text())
    assert written.keys() >= {"date", "command", "device", "versions", "repeats", "warmup"}
    assert written["versions"]["torch"] == torch.__version__
    one, several = written["models"][0]["workloads"]
    assert (one["images"], one["tokens"], several["images"]) == (1, 100, 6)
    for figure in one["figures"] + several["figures"]:
        assert 0 < figure["error"] < report.TOLERANCE
        assert 0 < figure["times"]["median_ms"] <= figure["times"]["p99_ms"]
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


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_every_budget_and_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    what = ["--workload", "8x336", "--modes", "budget", "--every-budget", "--profile", "8x336"]
    assert cli.main([*TINY, *BRIEF, *what, "--json", str(file)]) == 0
    model = json.loads(file.read_text())["models"][0]
    budgets = [each["budget"] for each in model["budget_times"]]
    assert budgets[:3] == [104, 112, 120]
    assert budgets[-2:] == [960, 1024]
    (profile,) = model["profiles"]
    assert sum(kernel["share"] for kernel in profile["kernels"]) == pytest.approx(1)
    assert any("addmm" in kernel["name"] for kernel in profile["kernels"])
    assert "one image of 400 patches in every budget" in capsys.readouterr().out


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
    model = report.ModelReport(
        "m", "transformers", [], [report.BudgetTime(64, Times(1, 1), error)], []
    )
    assert not model.correct()


@pytest.mark.extended
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "figures.png"
    what = ["--workload", "64x64", "--modes", "eager", "budget", "--plot", str(file)]
    assert cli.main([*TINY, *BRIEF, *what]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def test_published_figures_are_for_one_kind_of_machine() -> None:
    assert published("qwen3vl-8b", "20xmixed", "NVIDIA H200") == (96, 78)
    assert published("qwen3vl-8b", "20xmixed", "CPU") is None
    assert published("qwen3vl-8b", "640x480", "NVIDIA H200") is None
    assert published("qwen3vl-tiny", "1x336", "NVIDIA H200") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "9x9"], "--profile 9x9: the workloads are 1x336"),
        (["--model", "qwen3vl-9000b"], "qwen3vl-9000b"),
        (["--workload", "64x64", "--modes", "fast"], "graphs.blocks is fast, which needs"),
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


def test_timed_calls_as_often_as_it_says() -> None:
    calls: list[int] = []
    times = timed(lambda: calls.append(1), Device(), warmup=3, repeats=7)
    assert len(calls) == 10
    assert times.median_ms <= times.p99_ms


def test_kernel_names_fit_a_line() -> None:
    name = "void at::native::vectorized_elementwise_kernel<4, float>(int, float)"
    assert shortened(name) == "vectorized_elementwise_kernel<4, float>"
    assert len(shortened("k" * 300)) < 80
