"""`encoder-service bench`: the options of its four benchmarks; encoder_service/bench measures."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from rich.console import Console
from rich.table import Table

from actors.errors import ConfigError
from actors.options import (
    ActorOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from actors.spec.checkpoint import preset_names
from actors.types import Size
from encoder_service.bench.engine.report import (
    DEFAULT,
    DEFAULT_MODES,
    MODE_HELP,
    MODES,
    SHORT,
    TOLERANCE,
    EngineReport,
    Workload,
)
from encoder_service.bench.mix import VARIANTS, Load, Protocol, Shape, parse_mix, picture
from encoder_service.commands import above_zero, add_command, add_json, positive, write_json
from router.options import Policy

if TYPE_CHECKING:
    from encoder_service.bench.engine.pipeline import DecodeFigures

# Torch and Ray are imported by the benchmark that needs them, when it runs.

Name = TypeVar("Name", bound=str)

ALL = "all"
ENGINE_WIDTH, PREPROCESS_WIDTH = 118, 112
LABEL_WIDTH, RUN_WIDTH = 50, 28
"""Characters that the tables need; a pipe has 80."""
DATAPLANE_CPUS = 8
"""Declared to Ray, of which the replicas ask for a tenth."""
MOST_EMBEDDINGS = 16
"""In flight at a time: the object store has room for as many."""
COLUMNS = (
    "patches: per image. decoded: images/s, not encoded. CPU ms: CPU time of the actor's process "
    "per image; switches: its voluntary context switches per image. alone ms: from bytes to "
    "patches, one image at a time. encoded: images/s decoded and encoded; patches/s: of these. "
    "engine: images/s encoded, decoded beforehand."
)


def add(subcommands: Any) -> None:
    bench = subcommands.add_parser("bench", help="measure throughput and latency")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    for add_kind in (add_serve, add_engine, add_preprocess, add_dataplane):
        add_kind(kinds)


def add_serve(kinds: Any) -> None:
    parser = add_command(
        kinds, "serve", run_serve, "a whole service, started on a private Ray cluster"
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="such as configs/tiny.yaml"
    )
    parser.add_argument(
        "--mix",
        type=mix,
        default="336x336*8+1024x1024",
        help="image sizes of a request; after a comma, those of the next "
        "request; or heavy-tailed, as in `simulate`",
    )
    parser.add_argument(
        "--protocol",
        type=one_or_several(get_args(Protocol), "protocols"),
        default="http",
        help="one or several of http, grpc, reference (over HTTP, but embeddings stay in shared "
        "memory and ids come back) and handle (from inside Ray), separated by commas",
    )
    parser.add_argument(
        "--policy",
        type=one_or_several(get_args(Policy), "policies"),
        help=f"one or several of {', '.join(get_args(Policy))}, separated by commas "
        "(default: as configured)",
    )
    parser.add_argument(
        "--concurrency", type=positive, default=4, metavar="N", help="requests in flight"
    )
    parser.add_argument("--callers", type=positive, default=1, metavar="N", help="client processes")
    parser.add_argument(
        "--requests", type=positive, metavar="N", help="default: 200, unless --seconds is given"
    )
    parser.add_argument(
        "--seconds", type=above_zero, metavar="SECONDS", help="how long to send requests"
    )
    parser.add_argument(
        "--alone", action="store_true", help="also measure the engines without the service"
    )
    parser.add_argument(
        "--steady",
        type=float,
        metavar="PART",
        help="then send requests at random times, at this part of the first policy's rate; needs "
        "--seconds",
    )
    parser.add_argument("--burst", type=positive, metavar="N", help="then send N requests at once")
    add_json(parser)


def run_serve(options: argparse.Namespace, console: Console) -> int:
    """1 if any request failed. Raises StartError for a configuration that cannot be served."""
    from encoder_service.bench.serve import ServePlan, run, table
    from encoder_service.config import load

    service = load(options.config)
    if options.steady is not None:
        if not 0 < options.steady < 1:
            raise ConfigError(f"--steady {options.steady:g} is not between 0 and 1")
        if options.seconds is None:
            raise ConfigError("--steady needs --seconds: how long to send")
    unbounded = options.requests is None and options.seconds is None
    plan = ServePlan(
        kinds=options.mix,
        load=Load(
            concurrency=options.concurrency,
            requests=options.requests or (200 if unbounded else 2**31),
            seconds=options.seconds or math.inf,
        ),
        policies=options.policy or [service.router.policy],
        protocols=options.protocol,
        callers=options.callers,
        alone=options.alone,
        steady_part=options.steady,
        burst=options.burst,
    )
    report = run(service, plan, console)
    write_json(options.json, report)
    console.width = max(console.width, LABEL_WIDTH + RUN_WIDTH * len(report["runs"]))
    console.print(table(report))
    return 1 if any(one["errors"] for one in report["runs"]) else 0


def add_engine(kinds: Any) -> None:
    parser = add_command(
        kinds,
        "engine",
        run_engine,
        "one device without Ray: towers of full size, random weights, rows checked",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        action="extend",
        required=True,
        metavar="PRESET",
        help=f"{', '.join(preset_names())}; or all: every preset of full size",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        type=workload,
        action="extend",
        help=f"{', '.join(each.name for each in DEFAULT)}, or sizes of images encoded together, "
        "such as 336x336*8+1024x1024 (default: all of these; with --model all "
        f"{', '.join(each.name for each in SHORT)})",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=DEFAULT_MODES, metavar="MODE", help=MODE_HELP
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="to measure")
    parser.add_argument("--repeats", type=positive, default=50, metavar="N", help="timed calls")
    parser.add_argument(
        "--warmup", type=positive, default=10, metavar="N", help="untimed calls before them"
    )
    parser.add_argument(
        "--every-budget", action="store_true", help="also time one small image in every budget"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        action="extend",
        default=[],
        metavar="WORKLOAD",
        help="list the kernels of these workloads in the last mode",
    )
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="plot them (needs [bench])")


def run_engine(options: argparse.Namespace, console: Console) -> int:
    """1 if rows are wrong or a model of `all` failed. Raises ConfigError, CheckpointError."""
    from encoder_service.bench.engine import engine, timing
    from encoder_service.bench.engine.tables import plot, require_matplotlib, tables

    console.width = max(console.width, ENGINE_WIDTH)
    if options.plot:
        require_matplotlib()
    every = ALL in options.model
    workloads = tuple(options.workload or (SHORT if every else DEFAULT))
    known = [each.name for each in workloads]
    if unknown := [name for name in options.profile if name not in known]:
        raise ConfigError(f"--profile {unknown[0]}: the workloads are {', '.join(known)}")
    settings = engine.Settings(
        workloads=workloads,
        modes=tuple(mode for mode in MODES if mode in options.modes),
        repeats=options.repeats,
        warmup=options.warmup,
        every_budget=options.every_budget,
        profiled=tuple(options.profile),
    )
    device = timing.open_device(options.device)
    report = EngineReport(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["encoder-service", *sys.argv[1:]]),
        device=timing.device_name(device),
        versions=timing.versions(),
        dtype="bfloat16",
        weights="dummy",
        repeats=options.repeats,
        warmup=options.warmup,
        tolerance=TOLERANCE,
        models=[],
    )
    failed = []
    for model in full_size() if every else options.model:
        try:
            report.models.append(engine.run(model, device, settings, console.print))
        except Exception as error:
            if not every:
                raise
            failed.append(model)
            console.print(f"[red]FAILED:[/] {model}: {error!r}")
        timing.release(device)
        # Written after each model, so that a crash in a later one loses nothing.
        write_json(options.json, asdict(report))
        if options.plot:
            plot(report, options.plot)
    for table in tables(report):
        console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.print(f"{report.date}, {versions}, {report.repeats} calls each")
    wrong = [each.model for each in report.models if not each.correct()]
    if wrong:
        console.print(f"[red]WRONG:[/] {', '.join(wrong)}: an error is over {TOLERANCE}")
    if failed:
        console.print(f"[red]FAILED:[/] {', '.join(failed)}: see above")
    return 1 if wrong or failed else 0


def full_size() -> list[str]:
    return [name for name in preset_names() if not name.endswith("-tiny")]


def add_preprocess(kinds: Any) -> None:
    parser = add_command(
        kinds,
        "preprocess",
        run_preprocess,
        "JPEGs to patches in threads and in processes, alone and ahead of an engine",
        COLUMNS,
    )
    parser.add_argument("--model", default="qwen3vl-2b", metavar="PRESET", help="of the engine")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the engine")
    parser.add_argument(
        "--size",
        nargs="+",
        type=size,
        default=["336x336", "1920x1080"],
        metavar="WxH",
        help="of the images",
    )
    parser.add_argument(
        "--threads", type=positive, default=os.cpu_count(), metavar="N", help="decoding threads"
    )
    parser.add_argument(
        "--processes",
        type=positive,
        nargs="*",
        default=(),
        metavar="N",
        help="also decode in N processes, for each N given",
    )
    parser.add_argument(
        "--seconds", type=above_zero, default=0.5, metavar="SECONDS", help="per figure"
    )
    add_json(parser)


def run_preprocess(options: argparse.Namespace, console: Console) -> int:
    """Raises StartError if there is no such device."""
    from encoder_service.bench.engine.pipeline import preprocess
    from encoder_service.bench.engine.timing import open_device

    open_device(options.device)  # its error names --device, the engine's a configuration
    console.width = max(console.width, PREPROCESS_WIDTH)
    actor = ActorOptions(
        model=ModelOptions(id=options.model, load_format="dummy"),
        encoder=EncoderOptions(device=options.device, num_gpus=int(options.device == "cuda")),
        # Few graphs, for images only: the engine is not what is measured.
        graphs=GraphOptions(steps_per_doubling=1, max_frames_per_batch=0),
    )
    ways = [PreprocessOptions(threads=options.threads)]
    ways += [PreprocessOptions(processes=count) for count in options.processes]
    pictures = {
        name: [picture(*parse_mix(name)[0][0], seed) for seed in range(VARIANTS)]
        for name in options.size
    }
    figures = preprocess(actor, pictures, ways, options.seconds, console.print)
    write_json(options.json, [asdict(each) for each in figures])
    console.print(preprocess_table(figures, options.model))
    return 0


def preprocess_table(figures: Sequence[DecodeFigures], model: str) -> Table:
    shown = Table(title=f"JPEGs to patches, {model}", caption=COLUMNS, caption_justify="left")
    names = (
        "patches",
        "decoded",
        "CPU ms",
        "switches",
        "alone ms",
        "encoded",
        "patches/s",
        "engine",
    )
    for name in ("size", "way", *names):
        shown.add_column(name, justify="right" if name in names else "left", no_wrap=True)
    for each in figures:
        shown.add_row(
            *(each.size, each.way, str(each.patches), f"{each.images_per_second:.0f}"),
            *(f"{each.cpu_ms:.2f}", f"{each.switches:.1f}", f"{each.alone_ms:.2f}"),
            f"{each.encoded_images_per_second:.0f}",
            f"{each.encoded_images_per_second * each.patches:,.0f}",
            f"{each.engine_images_per_second:.0f}",
        )
    return shown


def add_dataplane(kinds: Any) -> None:
    parser = add_command(
        kinds,
        "dataplane",
        run_dataplane,
        "embeddings from an encoder's memory to a consumer's, without a model",
    )
    parser.add_argument(
        "--megabytes",
        type=above_zero,
        default=67,
        metavar="MB",
        help="per embedding; the default is one 1080p image of Qwen3-VL-8B",
    )
    parser.add_argument("--repeats", type=positive, default=20, metavar="N", help="timed transfers")
    add_json(parser)


def run_dataplane(options: argparse.Namespace, console: Console) -> int:
    from encoder_service.bench.cluster import cluster
    from encoder_service.bench.dataplane import measure, table

    size_bytes = round(options.megabytes * 1e6)
    room = max(MOST_EMBEDDINGS * size_bytes, 200 * 10**6)
    with cluster(DATAPLANE_CPUS, servicers=(), object_store_bytes=room):
        report = measure(size_bytes, options.repeats)
    write_json(options.json, report)
    console.print(table(report))
    return 0


def mix(text: str) -> list[list[Shape]]:
    try:
        return parse_mix(text)
    except ValueError as error:  # argparse prints the message of its own error only
        raise argparse.ArgumentTypeError(str(error)) from None


def workload(text: str) -> Workload:
    for each in DEFAULT:
        if each.name == text:
            return each
    kinds = mix(text)
    if len(kinds) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: separate workloads with spaces")
    return Workload(text, tuple(Size(width, height) for width, height in kinds[0]))


def size(text: str) -> str:
    kinds = mix(text)
    if len(kinds) != 1 or len(kinds[0]) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one WIDTHxHEIGHT")
    return text


def one_or_several(known: Sequence[Name], what: str) -> Callable[[str], list[Name]]:
    """The type of an option that takes names separated by commas."""

    def parse(text: str) -> list[Name]:
        wanted = text.split(",")
        if set(wanted) - set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: {what} are {', '.join(known)}")
        return [each for name in wanted for each in known if each == name]

    return parse
