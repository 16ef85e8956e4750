"""`encoder-service capture-plan`: plans token budgets (engine/ladder.py) for measured traffic."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.engine.budgets import model_capacity
from actors.engine.ladder import computed, pack_loads, padding_ratio, planned_ladders
from actors.engine.traffic import counts_of
from actors.errors import ConfigError
from actors.families.registry import read
from actors.types import Size
from encoder_service.client.items import ServiceError
from encoder_service.client.transports import HttpTransport
from encoder_service.commands import add_command, positive
from encoder_service.config import load
from encoder_service.wire.formats import JSON, Document

STATUS_TIMEOUT_SECONDS = 30


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands, "capture-plan", run, "find token budgets that suit your traffic"
    )
    traffic = parser.add_mutually_exclusive_group(required=True)
    traffic.add_argument(
        "histogram",
        nargs="?",
        type=Path,
        help="file with one image size per line: `WIDTHxHEIGHT COUNT`, separated by spaces or a "
        "comma; a missing count is 1",
    )
    traffic.add_argument(
        "--from",
        dest="url",
        metavar="URL",
        help="URL of a running service, such as http://127.0.0.1:8000: plan for what it has "
        "encoded",
    )
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="configuration, such as configs/qwen3vl.yaml",
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
    # The budgets are planned for mode `budget`, whatever graphs.mode is now.
    room = model_capacity(service.graphs.model_copy(update={"mode": "budget"}), spec)
    try:
        if options.url:
            counts = Counter(counts_of(asyncio.run(status(options.url)), spec))
        else:
            counts = Counter()
            for size, times in histogram(options.histogram).items():
                counts[spec.sizing.plan(size).path_tokens] += times
        loads = pack_loads(counts, room)
    except ConfigError as error:
        raise ConfigError(f"{options.url or options.histogram}: {error}") from None
    now = [tuple(filter(None, budgets)) for budgets in room.budgets]
    planned = planned_ladders(loads, room, spec.sizing, options.graphs)
    for path, old, new, seen in zip(spec.paths, now, planned, loads, strict=True):
        console.print(table(path, old, new, seen))
    before, after = (sum(map(computed, loads, ladders)) for ladders in (now, planned))
    change = f"{abs(1 - after / before):.1%} {'fewer' if after <= before else 'more'}"
    console.print(
        f"{change} tokens than the configured budgets. Put under `graphs` of `args` in", end=" "
    )
    console.print(f"{options.config}:")
    for path, ladder in zip(spec.paths, planned, strict=True):
        key = "token_budgets" if path == "default" else f"{path}_token_budgets"
        if path != "text":  # those of texts cannot be configured
            console.print(f"{key}: {list(ladder)}", soft_wrap=True, highlight=False)
    console.print(f"max_vision_items_per_batch: {room.items}", highlight=False)
    return 0


async def status(url: str) -> Document:
    """GET /v1/status, with the API token of ENCODER_SERVICE_TOKEN. Raises ConfigError."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError("the status is read over HTTP: give http://HOST:PORT")
    try:
        token = os.environ.get("ENCODER_SERVICE_TOKEN")
        transport = HttpTransport(url, token, STATUS_TIMEOUT_SECONDS)
        try:
            return await transport.document("GET", "/v1/status", accept=JSON)
        finally:
            await transport.close()
    except (ServiceError, ValueError) as error:
        raise ConfigError(str(error)) from None


def histogram(path: Path) -> Counter[Size]:
    """How many images of each size there are. Raises ConfigError, OSError."""
    counts: Counter[Size] = Counter()
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        found = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)(?:[\s,]+(\d+))?\s*", line)
        if not found:
            raise ConfigError(f"line {number}: {line[:60]!r} is not `WIDTHxHEIGHT COUNT`")
        width, height, count = found.groups(default="1")
        counts[Size(int(width), int(height))] += int(count)
    if not counts.total():
        raise ConfigError("all counts are 0")
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
