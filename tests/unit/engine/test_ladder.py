"""Ladders of budgets: the best there are, and what they save on heavy-tailed traffic."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine import ladder
from actors.engine.budgets import UNIT_TOKENS, Capacity, graduated, powers_of_two
from actors.engine.ladder import (
    best_ladder,
    pack_loads,
    padding_ratio,
    planned_ladders,
    rounded_up,
    simulated_loads,
)
from actors.engine.traffic import UNSEEN
from actors.options import GraphOptions
from actors.spec.sizing import PackedSizing
from actors.types import Size
from encoder_service import cli

CONFIGS = Path(__file__).parents[3] / "configs"
LARGEST = 16384
SIZING = PackedSizing(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
"""Qwen3-VL's."""

small_loads = st.dictionaries(st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=7)


@given(small_loads, st.integers(1, 5))
def test_no_other_ladder_pads_less(loads: dict[int, int], graphs: int) -> None:
    ladder = best_ladder(loads, graphs, 40)
    assert list(ladder) == sorted(set(ladder))
    assert ladder[-1] == 40
    assert len(ladder) <= graphs
    others = (
        padding_ratio(loads, (*rungs, 40))
        for count in range(graphs)
        for rungs in combinations(range(1, 40) if count < 2 else sorted(loads.keys() - {40}), count)
    )
    assert padding_ratio(loads, ladder) == pytest.approx(min(others), abs=1e-9)


@given(small_loads)
def test_a_budget_for_each_load_pads_nothing(loads: dict[int, int]) -> None:
    ladder = best_ladder(loads, len(loads) + 1, 40)
    assert set(ladder) == {*loads, 40}
    assert padding_ratio(loads, ladder) == 0


@given(small_loads)
def test_rounding_keeps_packs_and_never_shrinks_them(loads: dict[int, int]) -> None:
    rounded = rounded_up(loads, 40)
    assert sum(rounded.values()) == sum(loads.values())
    assert all(load % 16 == 0 or load == 40 for load in rounded)
    assert max(rounded) >= max(loads)


def heavy_tailed(seed: int) -> list[tuple[int, int]]:
    """Sizes of photographs: most small, some very large."""
    random = Random(seed)
    sizes = []
    for _ in range(2000):
        side = min(6000.0, random.lognormvariate(6.3, 0.7))
        aspect = random.lognormvariate(0, 0.3)
        sizes.append((max(16, round(side * aspect)), max(16, round(side / aspect))))
    return sizes


def heavy_tailed_loads(seed: int, waiting_items: float) -> dict[int, float]:
    items = Counter(SIZING.plan(Size(*size)) for size in heavy_tailed(seed))
    capacity = Capacity(((LARGEST,),), (LARGEST,), 256, 0)
    (loads,) = simulated_loads(items, waiting_items, capacity)
    return loads


@pytest.mark.parametrize("waiting_items", [1, 2, 16])
def test_a_planned_ladder_saves_padding_on_traffic_it_has_not_seen(waiting_items: float) -> None:
    doubled = powers_of_two(64, LARGEST)
    ladder = best_ladder(
        rounded_up(heavy_tailed_loads(0, waiting_items), LARGEST), len(doubled), LARGEST
    )
    unseen = heavy_tailed_loads(1, waiting_items)
    planned, before = padding_ratio(unseen, ladder), padding_ratio(unseen, doubled)
    print(f"{waiting_items} waiting: {before:.3f} -> {planned:.3f} with {ladder}")
    assert planned < 0.85 * before


@pytest.mark.parametrize("waiting_items", [1, 2, 16])
def test_the_default_ladder_pads_half_as_much_as_powers_of_two(waiting_items: float) -> None:
    loads = heavy_tailed_loads(1, waiting_items)
    ratios = [
        padding_ratio(loads, graduated(64, LARGEST, steps, UNIT_TOKENS)) for steps in (1, 2, 4, 8)
    ]
    print(f"{waiting_items} waiting, padding with 1, 2, 4, 8 steps: {ratios}")
    default = (1, 2, 4, 8).index(GraphOptions().steps_per_doubling)
    assert ratios[default] < 0.5 * ratios[0]


def few_sizes(seed: int) -> list[tuple[int, int]]:
    """Thumbnails, frames and scanned pages."""
    return Random(seed).choices([(336, 336), (1920, 1080), (1654, 2339)], (6, 3, 1), k=2000)


@pytest.mark.parametrize("waiting_items", [1, 2, 16])
@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize("sizes", [heavy_tailed, few_sizes])
def test_learned_budgets_pad_less_than_as_many_generated_ones(
    sizes: Callable[[int], list[tuple[int, int]]],
    steps: int,
    waiting_items: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generated = graduated(64, LARGEST, steps, UNIT_TOKENS)
    room = Capacity((generated,), (LARGEST,), 256, 0)
    seen, unseen = (
        Counter(SIZING.plan(Size(*size)).path_tokens for size in sizes(seed)) for seed in (0, 1)
    )
    (learned,) = planned_ladders(pack_loads(seen, room), room, SIZING, unseen=UNSEEN)
    monkeypatch.setattr(ladder, "WAITING_ITEMS", waiting_items)
    (loads,) = pack_loads(unseen, room)
    before, after = padding_ratio(loads, generated), padding_ratio(loads, learned)
    print(
        f"{sizes.__name__}, {waiting_items} waiting, {len(generated)} generated budgets: "
        f"{before:.1%}, {len(learned)} learned: {after:.1%}"
    )
    assert len(learned) <= len(generated)
    if sizes is heavy_tailed or waiting_items > 1:  # alone, these three fit generated budgets
        assert after < before


def test_the_same_traffic_gives_the_same_plan() -> None:
    assert heavy_tailed_loads(3, 4) == heavy_tailed_loads(3, 4)


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["capture-plan", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("separator", [",", "  "])
def test_the_command_prints_a_line_to_paste(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], separator: str
) -> None:
    counts = {"320x320": 50, "640x480": 30, "1024x768": 5, "4000x3000": 1}
    path = tmp_path / "sizes"
    path.write_text("".join(f"{size}{separator}{count}\n" for size, count in counts.items()))
    shown = plan(capsys, str(path), "--config", str(CONFIGS / "tiny.yaml"), "--graphs", "4")
    (line,) = (line for line in shown.splitlines() if line.startswith("token_budgets: ["))
    budgets = json.loads(line.removeprefix("token_budgets: "))
    assert len(budgets) == 4
    assert budgets[-1] == 1024


def test_a_line_without_a_count_is_one_image(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed, counted = tmp_path / "listed", tmp_path / "counted"
    listed.write_text("320x320\n640x480\n320x320\n")
    counted.write_text("320x320 2\n640x480 1\n")
    shown = [
        plan(capsys, str(path), "--config", str(CONFIGS / "tiny.yaml"), "--graphs", "3")
        for path in (listed, counted)
    ]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("336by336 3", "line 1: '336by336 3' is not `WIDTHxHEIGHT COUNT`"),
        ("336x336 3 4", "'336x336 3 4' is not"),
        ("336x336 many", "many"),
        ("0x336 3", "'0x336 3' is not"),
        ("", "all counts are 0"),
        ("336x336 0", "all counts are 0"),
        ("1x1000 3", "aspect ratio"),
        ("\udcff\udcd8", "is not"),  # a photo
    ],
)
def test_what_is_wrong_with_a_histogram(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "h"
    path.write_text(text, errors="surrogateescape")
    assert cli.main(["capture-plan", str(path), "--config", str(CONFIGS / "tiny.yaml")]) == 1
    assert message in capsys.readouterr().err


def test_images_beyond_the_largest_budget_have_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = tmp_path / "small.yaml", tmp_path / "sizes"
    text = (CONFIGS / "tiny.yaml").read_text()
    config.write_text(text.replace("router: {", "graphs: {token_budgets: [64]}\n      router: {"))
    path.write_text("336x336 3")
    assert cli.main(["capture-plan", str(path), "--config", str(config)]) == 1
    assert "no entry fits the largest budget, 64" in capsys.readouterr().err


@pytest.fixture
def of_two_paths(tmp_path: Path) -> str:
    """A configuration that serves DeepSeek-OCR."""
    text = (CONFIGS / "deepseek_ocr.yaml").read_text()
    path = tmp_path / "ocr.yaml"
    preset = "{id: deepseek-ocr, load_format: dummy}"
    path.write_text(text.replace("{id: deepseek-ai/DeepSeek-OCR}", preset))
    return str(path)


def test_two_paths_are_planned_each_by_what_it_computes(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    of_two_paths: str,
) -> None:
    monkeypatch.setattr(ladder, "WAITING_ITEMS", 1.0)
    path = tmp_path / "sizes"
    path.write_text("600x600 50\n1280x1280 30\n640x1280 20\n")
    shown = plan(capsys, str(path), "--config", of_two_paths, "--graphs", "4")
    # 272 tokens of each image, and of some 2 or 4 crops of 100: nothing is padded.
    assert "global_token_budgets: [272, 13824]\n" in shown
    assert "local_token_budgets: [200, 400, 12800]\n" in shown
    assert shown.count("0.000") >= 2
    assert "fewer tokens than the configured budgets" in shown


def test_a_path_that_nothing_takes_keeps_its_largest_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of_two_paths: str
) -> None:
    path = tmp_path / "sizes"
    path.write_text("600x600 50\n")
    shown = plan(capsys, str(path), "--config", of_two_paths)
    assert "local_token_budgets: [12800]\n" in shown


def test_budgets_of_tiles_are_whole_tiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (CONFIGS / "clip.yaml").read_text()
    config, path = tmp_path / "clip.yaml", tmp_path / "sizes"
    preset = "{id: clip-vit-l-336, load_format: dummy}"
    config.write_text(text.replace("{id: openai/clip-vit-large-patch14}", preset))
    path.write_text("600x600 50\n")
    shown = plan(capsys, str(path), "--config", str(config), "--graphs", "4")
    (line,) = (line for line in shown.splitlines() if line.startswith("token_budgets: ["))
    assert all(budget % 577 == 0 for budget in json.loads(line.removeprefix("token_budgets: ")))


def test_no_graphs_are_no_plan() -> None:
    with pytest.raises(SystemExit):
        cli.main(["capture-plan", "h", "--config", "c", "--graphs=0"])


def test_a_range_below_the_smallest_budget_has_one() -> None:
    assert powers_of_two(64, 20) == (20,)
    assert powers_of_two(64, 300) == (64, 128, 256, 300)
