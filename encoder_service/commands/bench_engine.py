"""`encoder-service bench engine`: reads its options; actors/bench measures."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from actors.errors import ConfigError
from actors.options import BlockChoice
from actors.spec.checkpoint import preset_names
from actors.types import Size
from encoder_service.bench.engine.report import (
    BLOCKS,
    DEFAULT_MODES,
    MODES,
    TOLERANCE,
    Mode,
    Report,
)
from encoder_service.bench.engine.workloads import DEFAULT, SHORT, Workload
from encoder_service.bench.mix import parse_mix

ALL = "all"

WIDTH = 118
"""Characters that the table needs; a pipe says 80."""


def add(kinds: Any) -> None:
    """The subcommand of `bench`."""
    parser = kinds.add_parser(
        "engine", help="one device: presets of full size with random weights, checked"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        action="extend",
        required=True,
        metavar="PRESET",
        help="all: every preset of full size, on the short workloads; presets are "
        f"{', '.join(preset_names())}",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        type=workload,
        action="extend",
        help=f"{', '.join(each.name for each in DEFAULT)} (all of them by default; "
        f"{', '.join(each.name for each in SHORT)} of all models), "
        "or sizes of images encoded together, such as 336x336*8+1024x1024",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=DEFAULT_MODES, help="all of them, unless --blocks is given"
    )
    parser.add_argument(
        "--blocks",
        nargs="+",
        choices=BLOCKS,
        default=[],
        help="the service's graphs with the blocks in these forms: see graphs.blocks",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--repeats", type=count, default=50, help="timed calls (%(default)s)")
    parser.add_argument("--warmup", type=count, default=10, help="calls before (%(default)s)")
    parser.add_argument(
        "--every-budget", action="store_true", help="one image of 400 patches in every budget"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        action="extend",
        default=[],
        metavar="WORKLOAD",
        help="list the kernels of these workloads, in the last mode",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them (needs [bench])")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table last. 1: an output is wrong. Raises ConfigError, CheckpointError."""
    from encoder_service.bench.engine import (
        engine,  # torch takes seconds to import
        machine,  # torch takes seconds to import
    )
    from encoder_service.bench.engine_plot import plot, require_matplotlib
    from encoder_service.bench.engine_table import tables

    console.width = max(console.width, WIDTH)
    if options.plot:
        require_matplotlib()
    every = ALL in options.model
    models = full_size() if every else options.model
    workloads = tuple(options.workload or (SHORT if every else DEFAULT))
    settings = engine.Settings(
        workloads=workloads,
        modes=modes(options.modes, options.blocks),
        repeats=options.repeats,
        warmup=options.warmup,
        every_budget=options.every_budget,
        profiled=profiled(options.profile, workloads),
    )
    device = machine.open_device(options.device)
    report = Report(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["encoder-service", *sys.argv[1:]]),
        device=machine.device_name(device),
        versions=machine.versions(),
        dtype="bfloat16",
        weights="dummy",
        repeats=options.repeats,
        warmup=options.warmup,
        tolerance=TOLERANCE,
        models=[],
    )
    failed = []
    for model in models:
        try:
            report.models.append(engine.run(model, device, settings, console.print))
        except Exception as error:
            if not every:
                raise
            failed.append(model)
            console.print(f"[red]FAILED:[/] {model}: {error!r}")
        machine.release(device)
        # After each model: a later one that fails takes nothing along.
        if options.json:
            options.json.write_text(json.dumps(asdict(report), indent=2) + "\n")
        if options.plot:
            plot(report, options.plot)
    for table in tables(report):
        console.print(table)
    console.print(f"{report.date}, {report.versions}, {report.repeats} calls each")
    wrong = [each.model for each in report.models if not each.correct()]
    if wrong:
        console.print(f"[red]WRONG:[/] {', '.join(wrong)}: an error is over {TOLERANCE}")
    if failed:
        console.print(f"[red]FAILED:[/] {', '.join(failed)}: see above")
    return 1 if wrong or failed else 0


def modes(asked: list[Mode] | None, blocks: list[BlockChoice]) -> tuple[Mode, ...]:
    """What is measured, in the order of the table."""
    chosen = {*(asked or (() if blocks else DEFAULT_MODES)), *(BLOCKS[form] for form in blocks)}
    return tuple(mode for mode in MODES if mode in chosen)


def full_size() -> list[str]:
    """The presets that are models of their published size."""
    return [name for name in preset_names() if not name.endswith("-tiny")]


def workload(text: str) -> Workload:
    """For argparse: one of the default workloads by its name, or sizes."""
    for each in DEFAULT:
        if each.name == text:
            return each
    try:
        kinds = parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(kinds) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: separate workloads with spaces")
    return Workload(text, tuple(Size(width, height) for width, height in kinds[0]))


def profiled(names: list[str], workloads: tuple[Workload, ...]) -> tuple[str, ...]:
    """Raises ConfigError for a name of no workload."""
    known = [each.name for each in workloads]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--profile {unknown[0]}: the workloads are {', '.join(known)}")
    return tuple(names)


def count(text: str) -> int:
    """For argparse: at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value
