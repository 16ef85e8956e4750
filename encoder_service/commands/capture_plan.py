"""`encoder-service capture-plan`: budgets that suit the traffic, from a histogram of it.

Reads the histogram and prints; which budgets are best is actors/ladder.py's to say.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.budgets import Capacity
from actors.errors import ConfigError
from actors.ladder import best_ladder, padding_ratio, rounded_up, simulated_loads
from actors.sizing import Sizing
from actors.spec import read
from actors.two_paths import model_capacity
from actors.types import Size
from encoder_service.config import load


def add(subcommands: Any) -> None:
    """The subcommand."""
    parser = subcommands.add_parser("capture-plan", help="token budgets that suit your traffic")
    parser.add_argument(
        "histogram",
        type=Path,
        help="lines `WIDTHxHEIGHT COUNT` (images) or `TOKENS COUNT` (packs), commas will do; "
        'or JSON: {"336x336": 120, ...}',
    )
    parser.add_argument("--config", type=Path, required=True, help="such as configs/qwen3vl.yaml")
    parser.add_argument("--graphs", type=positive, help="most budgets (as many as configured)")
    parser.add_argument(
        "--memory-bytes", type=positive, help="most device memory that graphs may take"
    )
    parser.add_argument(
        "--graph-bytes",
        type=positive,
        help="what CUDA keeps of one graph, from the log of a start; with --memory-bytes. All else "
        "is shared, and the largest budget decides it",
    )
    parser.add_argument(
        "--waiting-items",
        type=at_least_one,
        default=2.0,
        help="images that share a pack, on average (%(default)s); keep it low with `least_cost` "
        "packing, which cuts deep queues to fit small budgets",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table and the line to paste. Raises StartError, TooLarge."""
    service = load(options.config)
    spec = read(service.model)
    if len(spec.paths) > 1:
        raise ConfigError(f"{options.config}: capture-plan plans one path, {spec.id} has several")
    # Budgets are asked for, whatever mode is on now.
    room = model_capacity(service.graphs.model_copy(update={"mode": "budget"}), spec)
    largest = room.tokens[0]
    counts = histogram(options.histogram)
    loads = pack_loads(counts, spec.sizing, room, options.waiting_items)
    if not loads:
        raise ConfigError(f"{options.histogram}: nothing in it fits the largest budget, {largest}")
    now = room.budgets[0]
    most = within(options.graphs or len(now), options.memory_bytes, options.graph_bytes)
    planned = best_ladder(rounded_up(loads, largest), most, largest)
    console.print(table({"configured": now, "planned": planned}, loads))
    saved = 1 - (1 + padding_ratio(loads, planned)) / (1 + padding_ratio(loads, now))
    compared = f"{abs(saved):.1%} {'fewer' if saved >= 0 else 'more'} tokens computed"
    console.print(f"{compared} than as configured. Under `graphs:` in {options.config}:")
    console.print(f"token_budgets: {list(planned)}", soft_wrap=True, highlight=False)
    console.print(f"max_vision_items_per_batch: {room.items}", highlight=False)
    return 0


def within(graphs: int, memory_bytes: int | None, graph_bytes: int | None) -> int:
    """Graphs that the memory holds, at most so many. Raises ConfigError: it holds none."""
    if (memory_bytes is None) != (graph_bytes is None):
        raise ConfigError("--memory-bytes and --graph-bytes go together")
    if memory_bytes is None or graph_bytes is None:
        return graphs
    if memory_bytes < graph_bytes:
        raise ConfigError(f"--memory-bytes {memory_bytes} holds no graph of {graph_bytes}")
    return min(graphs, memory_bytes // graph_bytes)


def pack_loads(
    counts: Mapping[str, float], sizing: Sizing, room: Capacity, waiting_items: float
) -> dict[int, float]:
    """How often a pack holds so many tokens: as counted, or from images as they would wait."""
    largest = room.tokens[0]
    if all(key.isdecimal() for key in counts):
        return {int(key): times for key, times in counts.items() if int(key) <= largest}
    item_tokens: dict[int, float] = {}
    for key, times in counts.items():
        width, height = map(int, key.split("x"))
        tokens = sizing.plan(Size(width, height)).tokens
        item_tokens[tokens] = item_tokens.get(tokens, 0.0) + times
    one_graph = Capacity(((largest,),), (largest,), room.items, room.frames)
    return simulated_loads(item_tokens, waiting_items, one_graph)


def histogram(path: Path) -> dict[str, float]:
    """`WIDTHxHEIGHT` or tokens, in decimal, to how often. Raises ConfigError, OSError."""
    text = path.read_text()
    pairs: Iterable[tuple[str, Any]]
    if path.suffix == ".json":
        try:
            pairs = json.loads(text).items()
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: not a JSON object of counts: {error}") from None
    else:
        lines = [line.replace(",", " ").split() for line in text.splitlines()]
        pairs = [(line[0], " ".join(line[1:])) for line in lines if line]
    counts: dict[str, float] = {}
    for key, count in pairs:
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?", key) or not re.fullmatch(
            r"\d+(\.\d+)?", str(count)
        ):
            raise ConfigError(
                f"{path}: {key!r} {count!r} is not WIDTHxHEIGHT or TOKENS, and a count"
            )
        counts[key] = counts.get(key, 0.0) + float(count)
    if not sum(counts.values()):
        raise ConfigError(f"{path}: it counts nothing")
    if len({"x" in key for key in counts}) > 1:
        raise ConfigError(f"{path}: image sizes and tokens of packs do not mix: use two files")
    return counts


def table(ladders: Mapping[str, tuple[int, ...]], loads: Mapping[int, float]) -> Table:
    """What each ladder costs."""
    shown = Table("", "graphs", "budgets", "padded tokens a token")
    for name, budgets in ladders.items():
        ratio = f"{padding_ratio(loads, budgets):.3f}"
        shown.add_row(name, str(len(budgets)), " ".join(map(str, budgets)), ratio)
    return shown


def positive(text: str) -> int:
    """For argparse: a whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def at_least_one(text: str) -> float:
    """For argparse: a finite number from 1 up."""
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return float(text)
