"""`encoder-service capture-plan`: token budgets (engine/ladder.py) from a histogram of traffic."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.engine.budgets import Capacity, model_capacity
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
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import BlockSizing
from actors.types import ItemPlan, Size
from encoder_service.commands import add_command, at_least_one, positive
from encoder_service.config import load


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands, "capture-plan", run, "find token budgets that suit your traffic"
    )
    parser.add_argument(
        "histogram",
        type=Path,
        help="a file with lines `WIDTHxHEIGHT COUNT` (images) or `TOKENS COUNT` (packs), separated "
        "by spaces or commas, where a missing count is 1; "
        'or JSON: {"336x336": 120, ...}',
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
    parser.add_argument(
        "--memory-bytes",
        type=positive,
        metavar="BYTES",
        help="maximum device memory for graphs; needs --graph-bytes",
    )
    parser.add_argument(
        "--graph-bytes",
        type=positive,
        metavar="BYTES",
        help="device memory per graph, as logged at start-up. All other memory of graphs is "
        "shared; its size depends on the largest budget only",
    )
    parser.add_argument(
        "--waiting-items",
        type=at_least_one,
        default=2.0,
        metavar="N",
        help="images that share a pack, on average; keep it low with "
        "`least_cost` packing, which splits long queues to fit small budgets",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table per path and the lines to paste. Raises StartError, TooLarge."""
    service = load(options.config)
    spec = read(service.model)
    # Whatever graphs.mode is now, the answer is for `budget`.
    room = model_capacity(service.graphs.model_copy(update={"mode": "budget"}), spec)
    loads = pack_loads(histogram(options.histogram), spec, room, options.waiting_items)
    if not any(loads):
        largest = ", ".join(map(str, room.tokens))
        raise ConfigError(f"{options.histogram}: no entry fits the largest budget, {largest}")
    now = [tuple(filter(None, budgets)) for budgets in room.budgets]
    most = within(
        [options.graphs or len(budgets) for budgets in now],
        options.memory_bytes,
        options.graph_bytes,
    )
    # Loads of the other families are already whole tiles or views.
    multiple = MULTIPLE_TOKENS if isinstance(spec.sizing, BlockSizing) else 1
    planned = [
        best_ladder(rounded_up(load, largest, multiple), graphs, largest)
        for load, largest, graphs in zip(loads, room.tokens, most, strict=True)
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


def within(
    graphs: Sequence[int], memory_bytes: int | None, graph_bytes: int | None
) -> Sequence[int]:
    """The number of graphs per path that fits into the memory, at most `graphs`, in proportion.

    Raises ConfigError if less than one per path fits.
    """
    if (memory_bytes is None) != (graph_bytes is None):
        raise ConfigError("--memory-bytes and --graph-bytes go together")
    if memory_bytes is None or graph_bytes is None:
        return graphs
    held = memory_bytes // graph_bytes
    if held < len(graphs):
        raise ConfigError(
            f"--memory-bytes {memory_bytes} holds {held} graphs of {graph_bytes} bytes; at least "
            f"{len(graphs)} are needed, one per path"
        )
    return [min(most, max(1, held * most // sum(graphs))) for most in graphs]


def pack_loads(
    counts: Mapping[str, float], spec: ModelSpec, room: Capacity, waiting_items: float
) -> list[dict[int, float]]:
    """How often a pack has so many tokens, per path: as counted, or simulated from image sizes."""
    if all(key.isdecimal() for key in counts):
        if len(spec.paths) > 1:
            raise ConfigError(
                f"{spec.id} has {len(spec.paths)} paths: give sizes of images, not tokens of packs"
            )
        return [{int(key): n for key, n in counts.items() if int(key) <= room.tokens[0]}]
    items: dict[ItemPlan, float] = {}
    for key, times in counts.items():
        width, height = map(int, key.split("x"))
        plan = spec.sizing.plan(Size(width, height))
        items[plan] = items.get(plan, 0.0) + times
    one_graph = Capacity(
        tuple((largest,) for largest in room.tokens), room.tokens, room.items, room.frames
    )
    return simulated_loads(items, waiting_items, one_graph)


def histogram(path: Path) -> dict[str, float]:
    """Counts by `WIDTHxHEIGHT` or by tokens in decimal. Raises ConfigError, OSError."""
    text = path.read_text()
    pairs: Iterable[tuple[str, Any]]
    if path.suffix == ".json":
        try:
            pairs = json.loads(text).items()
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: not a JSON object of counts: {error}") from None
    else:
        lines = [line.replace(",", " ").split() for line in text.splitlines()]
        pairs = [(line[0], " ".join(line[1:]) or "1") for line in lines if line]
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
        raise ConfigError(f"{path}: all counts are 0")
    if len({"x" in key for key in counts}) > 1:
        raise ConfigError(f"{path}: mixes image sizes with tokens of packs: use two files")
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
