"""`encoder-service bench`: options of the five benchmarks in encoder_service/bench."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from actors.errors import ConfigError
from actors.options import (
    ActorOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from actors.spec.checkpoint import preset_names
from actors.types import Dtype, Size
from encoder_service.bench.mix import HEAVY_TAILED, VARIANTS, Protocol, Shape, parse_mix, picture
from encoder_service.bench.report import (
    DEFAULT,
    DEFAULT_MODES,
    MODE_HELP,
    MODES,
    SHORT,
    SOUNDS,
    TOLERANCE,
    EngineReport,
    Workload,
    plot,
    table,
)
from encoder_service.commands import (
    above_zero,
    add_command,
    add_json,
    add_plot,
    positive,
    write_json,
)
from router.options import Policy

# Torch and Ray are imported by the benchmarks that need them, when they run.

ALL = "all"
ALONE = "alone"
PLACES = (ALONE, "local")
INSIDE = "inside"
MOST_STREAMS = 256
ENGINE_WIDTH, PREPROCESS_WIDTH, ANSWERS_WIDTH = 118, 112, 112
LABEL_WIDTH, RUN_WIDTH = 50, 28
"""Widths that the tables need, in characters; a pipe has 80."""


def add(subcommands: Any) -> None:
    bench = subcommands.add_parser("bench", help="measure throughput and latency")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    add_serve(kinds)
    add_engine(kinds)
    add_preprocess(kinds)
    add_answers(kinds)
    dataplane = add_command(
        kinds,
        "dataplane",
        run_dataplane,
        "transfer of 67 MB embeddings from an encoder's memory to a consumer's, without a model",
    )
    add_json(dataplane)


def add_serve(kinds: Any) -> None:
    parser = add_command(kinds, "serve", run_serve, "the whole service, on a private Ray cluster")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="configuration, such as configs/tiny.yaml",
    )
    parser.add_argument(
        "--mix",
        type=parse_mix,
        default="336x336*8+1024x1024",
        help="image sizes of a request; a comma starts the next request; or heavy-tailed, as in "
        "`simulate`",
    )
    parser.add_argument(
        "--protocol",
        type=one_or_several(get_args(Protocol), "protocols"),
        default="http",
        help="comma-separated list of http, grpc (one message per response), grpc_stream, direct "
        "and grpc_direct (rows come from the encoders' own ports), reference and grpc_reference "
        "(embeddings stay with the encoders, and ids are returned) and handle (from inside Ray)",
    )
    parser.add_argument(
        "--dtype", default="bfloat16", choices=get_args(Dtype), help="dtype of the embeddings"
    )
    parser.add_argument(
        "--policy",
        type=one_or_several(get_args(Policy), "policies"),
        help=f"comma-separated list of {', '.join(get_args(Policy))} (default: as configured)",
    )
    parser.add_argument(
        "--concurrency", type=positive, default=4, metavar="N", help="requests in flight"
    )
    parser.add_argument("--callers", type=positive, default=1, metavar="N", help="client processes")
    parser.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help="number of requests (default: 200, unless --seconds is given)",
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
        metavar="FRACTION",
        help="then send requests at random times, at this fraction of the first policy's rate; "
        "needs --seconds",
    )
    parser.add_argument("--burst", type=positive, metavar="N", help="then send N requests at once")
    add_json(parser)


def run_serve(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if any request failed. Raises StartError if the service cannot start."""
    from encoder_service.bench import serve
    from encoder_service.bench.load import Load
    from encoder_service.config import load

    service = load(options.config)
    if options.steady is not None:
        if not 0 < options.steady < 1:
            raise ConfigError(f"--steady {options.steady:g} is not between 0 and 1")
        if options.seconds is None:
            raise ConfigError("--steady needs --seconds: how long to send")
    if service.encoder.pools and (options.alone or options.steady or options.burst):
        raise ConfigError(
            "--alone, --steady and --burst need identical encoders: leave them out, or use a "
            "configuration without encoder.pools"
        )
    unbounded = options.requests is None and options.seconds is None
    plan = serve.ServePlan(
        kinds=options.mix,
        load=Load(
            concurrency=options.concurrency,
            requests=options.requests or (200 if unbounded else 2**31),
            seconds=options.seconds or math.inf,
            dtype=options.dtype,
        ),
        policies=options.policy or [service.router.policy],
        protocols=options.protocol,
        callers=options.callers,
        alone=options.alone,
        steady_part=options.steady,
        burst=options.burst,
    )
    report = serve.run(service, plan, console)
    write_json(options.json, report)
    console.width = max(console.width, LABEL_WIDTH + RUN_WIDTH * len(report["runs"]))
    console.print(serve.table(report))
    return 1 if any(one["errors"] for one in report["runs"]) else 0


def add_engine(kinds: Any) -> None:
    parser = add_command(
        kinds,
        "engine",
        run_engine,
        "one device without Ray: full-size towers with random weights, rows checked",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        action="extend",
        required=True,
        metavar="PRESET",
        help=f"{', '.join(preset_names())}; or all: every full-size preset",
    )
    parser.add_argument(
        "--tower", choices=("vision", "audio"), help="tower to measure, if the model has both"
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        type=workload,
        action="extend",
        help=f"{', '.join(each.name for each in DEFAULT)}, or sizes of images encoded together, "
        "such as 336x336*8+1024x1024, with @0.4 appended if preprocess.prune keeps 40 %% of them "
        "(default: all of these; with --model all "
        f"{', '.join(each.name for each in SHORT)}); for audio: "
        f"{', '.join(each.name for each in SOUNDS)}, or seconds, such as 7.5s*4",
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=DEFAULT_MODES, metavar="MODE", help=MODE_HELP
    )
    parser.add_argument(
        "--precision-file", default="", metavar="FILE", help="output of `calibrate`, for mode fp8"
    )
    add_device(parser)
    parser.add_argument("--repeats", type=positive, default=50, metavar="N", help="timed calls")
    parser.add_argument(
        "--every-budget", action="store_true", help="also time one small image in every budget"
    )
    parser.add_argument(
        "--profile",
        nargs="+",
        action="extend",
        default=[],
        metavar="WORKLOAD",
        help="list the kernels of these workloads in each mode",
    )
    add_json(parser)
    add_plot(parser)


def run_engine(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 for wrong rows or a failed model of `all`. Raises ConfigError, CheckpointError."""
    from actors.engine.device import open_device
    from encoder_service.bench import engine

    console.width = max(console.width, ENGINE_WIDTH)
    every = ALL in options.model
    if ("fp8" in options.modes) != bool(options.precision_file):
        raise ConfigError("--modes fp8 and --precision-file need each other")
    settings = engine.Settings(
        workloads=tuple(options.workload or ()),
        tower=options.tower,
        short=every,
        modes=tuple(mode for mode in MODES if mode in options.modes),
        repeats=options.repeats,
        every_budget=options.every_budget,
        profiled=tuple(options.profile),
        precision_file=options.precision_file,
    )
    device = open_device(options.device)
    report = EngineReport(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["encoder-service", *sys.argv[1:]]),
        device=engine.device_name(device),
        versions=engine.versions(),
        repeats=options.repeats,
        models=[],
    )
    failed = []
    for model in full_size() if every else options.model:
        try:
            report.models.append(engine.run(model, device, settings, console))
        except Exception as error:
            if not every:
                raise
            failed.append(model)
            console.print(f"[red]FAILED:[/] {model}: {error!r}")
        engine.release(device)
        # Written after each model, so that a crash in a later one loses nothing.
        write_json(options.json, asdict(report))
        if options.plot:
            plot(report, options.plot)
    for each in report.models:
        console.print(table(each, report.device))
    console.print(report.made())
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
        "JPEGs to patches in threads and in processes, alone and feeding an engine",
    )
    parser.add_argument(
        "--model", default="qwen3vl-2b", metavar="PRESET", help="model that the engine runs"
    )
    add_device(parser)
    parser.add_argument(
        "--size",
        nargs="+",
        type=size,
        default=["336x336", "1920x1080"],
        metavar="WxH",
        help="image sizes",
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
        help="also measure with N decoding processes, for each N given",
    )
    parser.add_argument(
        "--seconds", type=above_zero, default=0.5, metavar="SECONDS", help="time per measurement"
    )
    add_json(parser)


def run_preprocess(options: argparse.Namespace, console: Console) -> int:
    """Raises StartError if there is no such device."""
    from encoder_service.bench import decoding

    console.width = max(console.width, PREPROCESS_WIDTH)
    actor = ActorOptions(
        model=ModelOptions(id=options.model, load_format="dummy"),
        encoder=EncoderOptions(device=options.device, num_gpus=int(options.device == "cuda")),
        # Few graphs, and only for images, because the engine is not what is measured.
        graphs=GraphOptions(steps_per_doubling=1, max_frames_per_batch=0),
    )
    ways = [PreprocessOptions(threads=options.threads)]
    ways += [PreprocessOptions(processes=count) for count in options.processes]
    pictures = {
        name: [picture(*parse_mix(name)[0][0], seed) for seed in range(VARIANTS)]
        for name in options.size
    }
    rows = decoding.preprocess(actor, pictures, ways, options.seconds, console)
    write_json(options.json, rows)
    console.print(decoding.table(rows, options.model))
    return 0


def add_answers(kinds: Any) -> None:
    parser = add_command(
        kinds,
        "answers",
        run_answers,
        "time to first token and between tokens of vLLM servers, with and without our encoder",
        epilog="Needs vLLM in the same Python environment, unless only --url is given; with "
        "--config, install this package's extra `vllm`.",
    )
    parser.add_argument(
        "--model",
        metavar="CHECKPOINT",
        help="start vLLM servers with this model, one after another",
    )
    parser.add_argument(
        "--place",
        type=one_or_several(PLACES, "places"),
        default="alone,local",
        help="comma-separated list of where these servers encode: alone (vLLM itself), local (our "
        "engine in vLLM's process)",
    )
    parser.add_argument(
        "--vllm",
        type=shlex.split,
        default="",
        metavar="OPTIONS",
        help="more vLLM options for all of these servers, quoted as one argument",
    )
    parser.add_argument(
        "--local",
        type=settings,
        default="{}",
        metavar="JSON",
        help='connector settings for place local, such as {"chunk_ms": 5}: see docs/engines.md',
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="then start the service of this configuration with vLLM inside, such as "
        "configs/qwen3vl-vllm.yaml, and measure it as the server inside",
    )
    parser.add_argument(
        "--url",
        type=named_url,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=URL[,URL]",
        help="also measure running OpenAI-compatible servers; several URLs share one server's load",
    )
    parser.add_argument(
        "--encoder",
        type=named_url,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=URL",
        help="encoder service for the server NAME of --url: it encodes the images, and the server "
        "gets their ids. The token is read from ENCODER_SERVICE_TOKEN",
    )
    parser.add_argument(
        "--mix",
        type=answer_loads,
        default="text,336x336*8,1920x1080,1024x1024*4,1654x2339,1984x1984,3840x2160,"
        "text/336x336*8/1920x1080/1654x2339",
        help="image sizes of a request; text: no image; a comma starts the next load; a slash: "
        "each request has one or the other, at random",
    )
    parser.add_argument(
        "--rate",
        type=above_zero,
        nargs="+",
        default=[2.0, 4.0, 8.0],
        metavar="N",
        help="requests per second, at random times; one phase per rate",
    )
    parser.add_argument(
        "--in-flight",
        type=positive,
        default=32,
        metavar="N",
        help="requests in flight in the phase after the rates",
    )
    parser.add_argument(
        "--streams",
        type=streams,
        default=8,
        metavar="N",
        help="text streams that run beside images at the first rate, in the last phase; 0: none",
    )
    parser.add_argument(
        "--seconds", type=above_zero, default=30.0, metavar="SECONDS", help="length of each phase"
    )
    parser.add_argument(
        "--tokens", type=positive, default=64, metavar="N", help="tokens per answer"
    )
    parser.add_argument(
        "--repeated",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of requests that repeat the images of an earlier request",
    )
    add_json(parser)
    add_plot(parser)


def run_answers(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if any request failed. Raises ConfigError, or StartError if vLLM does not start."""
    from encoder_service.bench import answers
    from encoder_service.bench.cluster import cluster, logical_cpus, service
    from encoder_service.config import load

    if not 0 <= options.repeated < 1:
        raise ConfigError(f"--repeated {options.repeated:g} must be at least 0 and below 1")
    if not options.model and not options.url and not options.config:
        raise ConfigError("nothing to measure: give --model, --url or --config")
    inside = load(options.config) if options.config else None
    if inside and (not inside.llm or inside.llm.engine != "vllm"):
        raise ConfigError(f"{options.config} has no llm section with `engine: vllm` to measure")
    if inside and (inside.auth.token_sha256 or inside.auth.token_sha256_file):
        raise ConfigError(f"{options.config}: leave auth out, because no token is sent")
    if inside and INSIDE in dict(options.url):
        raise ConfigError(f"--url {INSIDE}=...: the service of --config has this name")
    plan = answers.AnswersPlan(
        kinds=[answers.Kind(*load) for load in options.mix],
        per_second=options.rate,
        in_flight=options.in_flight,
        streams=options.streams,
        seconds=options.seconds,
        tokens=options.tokens,
        repeated=options.repeated,
    )
    encoders = {name: urls[0] for name, urls in options.encoder}
    if unknown := encoders.keys() - dict(options.url):
        raise ConfigError(f"--encoder names {', '.join(unknown)}, but no --url does")
    found: list[answers.PhaseReport] = []

    async def measured(name: str, urls: list[str]) -> None:
        async with answers.connected(name, urls, encoders.get(name, "")) as server:
            found.extend(await answers.measure(server, plan, console))
        # Written after each server, so that a crash of a later one loses nothing.
        write_json(options.json, answers.documents(found))

    for name, urls in options.url:
        asyncio.run(measured(name, urls))
    for name in options.place if options.model else ():
        place = options.local | {"place": name} if name != ALONE else None
        with answers.vllm(options.model, place, options.vllm, console) as url:
            asyncio.run(measured(name, [url]))
    if inside:
        with cluster(logical_cpus(inside)) as where, service(inside, where):
            asyncio.run(measured(INSIDE, [where.http]))
    if options.plot:
        answers.plot(found, options.plot)
    console.width = max(console.width, ANSWERS_WIDTH)
    console.print(answers.table(found))
    return 1 if any(one.errors for one in found) else 0


def answer_loads(text: str) -> list[tuple[str, tuple[tuple[Shape, ...], ...]]]:
    """The name of each load, and the requests that it consists of."""

    def sizes(request: str) -> tuple[Shape, ...]:
        if request == HEAVY_TAILED:
            raise argparse.ArgumentTypeError(f"{HEAVY_TAILED} is not one size or a sum of sizes")
        return () if request == "text" else tuple(parse_mix(request)[0])

    return [(load, tuple(map(sizes, load.split("/")))) for load in text.split(",")]


def streams(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_STREAMS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {MOST_STREAMS}")
    return int(text)


def settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def named_url(text: str) -> tuple[str, list[str]]:
    name, _, rest = text.partition("=")
    urls = rest.split(",")
    if not name or not all(url.startswith(("http://", "https://")) for url in urls):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=http://HOST:PORT")
    return name, [url.rstrip("/") for url in urls]


def run_dataplane(options: argparse.Namespace, console: Console) -> int:
    from encoder_service.bench import dataplane

    report = dataplane.run()
    write_json(options.json, report)
    console.print(dataplane.table(report))
    return 0


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device of the engine"
    )


def workload(text: str) -> Workload:
    found = re.fullmatch(r"([^@]+)@(0?\.\d+)", text)
    shown, kept = (found[1], float(found[2])) if found else (text, 1.0)
    if not kept:
        raise argparse.ArgumentTypeError(f"{text!r} keeps no patches")
    for each in (*DEFAULT, *SOUNDS):
        if each.name == shown:
            return replace(each, name=text, kept=kept)
    if sounds := re.fullmatch(r"(\d+(?:\.\d+)?)s(?:\*(\d+))?", text):
        seconds, count = float(sounds[1]), int(sounds[2] or 1)
        if seconds and count:
            return Workload(text, seconds=(seconds,) * count)
    try:
        kinds = parse_mix(shown)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor SECONDSs*COUNT for sounds") from None
    if len(kinds) > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: separate workloads with spaces")
    return Workload(text, tuple(Size(width, height) for width, height in kinds[0]), kept=kept)


def size(text: str) -> str:
    kinds = parse_mix(text)
    if len(kinds) != 1 or len(kinds[0]) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one WIDTHxHEIGHT")
    return text


def one_or_several(known: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """The type of an option that takes names separated by commas."""

    def parse(text: str) -> list[str]:
        wanted = text.split(",")
        if set(wanted) - set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: known {what} are {', '.join(known)}")
        return wanted

    return parse
