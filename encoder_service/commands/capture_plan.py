"""`encoder-service capture-plan`: token budgets (engine/ladder.py) from a histogram of traffic."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.engine.budgets import model_capacity
from actors.engine.ladder import (
    MULTIPLE_TOKENS,
    best_ladder,
    computed,
    padding_ratio,
    rounded_up,
    simulated_loads,
)
from actors.errors import ConfigError
from actors.families.registry import read
from actors.spec.sizing import BlockSizing
from actors.types import ItemPlan, Size
from encoder_service.commands import add_command, positive
from encoder_service.config import load

WAITING_ITEMS = 2.0
"""Images that share a pack on average. Few, because `least_cost` packing splits long queues to fit
small budgets."""


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands, "capture-plan", run, "find token budgets that suit your traffic"
    )
    parser.add_argument(
        "histogram",
        type=Path,
        help="a file with lines `WIDTHxHEIGHT COUNT`, separated by spaces or a comma; "
        "a missing count is 1",
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="such as configs/qwen3vl.yaml"
    )
    parser.add_argument(
        "--graphs",
        type=positive,
        metavar="N",
        help="maximum number of budgets per path (default: as many as configured)",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table per path and the lines to paste. Raises StartError, TooLarge."""
    service = load(options.config)
    spec = read(service.model)
    # Whatever graphs.mode is now, the answer is for `budget`.
    room = model_capacity(service.graphs.model_copy(update={"mode": "budget"}), spec)
    items: Counter[ItemPlan] = Counter()
    for size, times in histogram(options.histogram).items():
        items[spec.sizing.plan(size)] += times
    one_graph = replace(room, budgets=tuple((largest,) for largest in room.tokens))
    loads = simulated_loads(items, WAITING_ITEMS, one_graph)
    if not any(loads):
        largest = ", ".join(map(str, room.tokens))
        raise ConfigError(f"{options.histogram}: no entry fits the largest budget, {largest}")
    now = [tuple(filter(None, budgets)) for budgets in room.budgets]
    # Loads of the other families are already whole tiles or views.
    multiple = MULTIPLE_TOKENS if isinstance(spec.sizing, BlockSizing) else 1
    planned = [
        best_ladder(rounded_up(load, largest, multiple), options.graphs or len(budgets), largest)
        for load, largest, budgets in zip(loads, room.tokens, now, strict=True)
    ]
    for path, old, new, seen in zip(spec.paths, now, planned, loads, strict=True):
        console.print(table(path, old, new, seen))
    before, after = (sum(map(computed, loads, ladders)) for ladders in (now, planned))
    change = f"{abs(1 - after / before):.1%} {'fewer' if after <= before else 'more'}"
    console.print(f"{change} tokens computed than as configured. Under `graphs:` in", end=" ")
    console.print(f"{options.config}:")
    for path, ladder in zip(spec.paths, planned, strict=True):
        key = "token_budgets" if len(spec.paths) == 1 else f"{path}_token_budgets"
        console.print(f"{key}: {list(ladder)}", soft_wrap=True, highlight=False)
    console.print(f"max_vision_items_per_batch: {room.items}", highlight=False)
    return 0


def histogram(path: Path) -> Counter[Size]:
    """How often each size of image comes. Raises ConfigError, OSError."""
    counts: Counter[Size] = Counter()
    for line in filter(str.strip, path.read_text().splitlines()):
        found = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)(?:[\s,]+(\d+))?\s*", line)
        if not found:
            raise ConfigError(f"{path}: {line!r} is not WIDTHxHEIGHT and a count")
        width, height, count = found.groups(default="1")
        counts[Size(int(width), int(height))] += int(count)
    if not counts.total():
        raise ConfigError(f"{path}: all counts are 0")
    return counts


def table(
    path: str, now: Sequence[int], planned: Sequence[int], loads: Mapping[int, float]
) -> Table:
    """The padding of the configured and of the planned budgets of a path."""
    shown = Table(path, "graphs", "budgets", "padding per token")
    for name, budgets in (("configured", now), ("planned", planned)):
        ratio = f"{padding_ratio(loads, budgets):.3f}"
        shown.add_row(name, str(len(budgets)), " ".join(map(str, budgets)), ratio)
    return shown
