"""`encoder-service bench`: its kinds, and the options of `bench serve`; bench/ measures."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich.console import Console

from actors.errors import ConfigError
from actors.types import Dtype
from encoder_service.bench.load import Load, ProtocolName
from encoder_service.bench.mix import parse_mix
from encoder_service.commands import bench_dataplane, bench_engine, bench_preprocess
from encoder_service.commands.numbers import above_zero, positive
from encoder_service.config import load
from router.options import Policy

Name = TypeVar("Name", bound=str)


def add(subcommands: Any) -> None:
    """The subcommand and its own."""
    bench = subcommands.add_parser("bench", help="measure")
    kinds = bench.add_subparsers(metavar="WHAT", required=True)
    bench_engine.add(kinds)
    bench_dataplane.add(kinds)
    bench_preprocess.add(kinds)
    parser = kinds.add_parser("serve", help="the whole service, on a private cluster of its own")
    parser.add_argument("--config", type=Path, required=True, help="such as configs/tiny.yaml")
    parser.add_argument(
        "--mix",
        type=mix,
        default="336x336*8+1024x1024",
        help="sizes of the images of a request; after a comma, of the next (%(default)s); or "
        "heavy-tailed, as in `simulate`",
    )
    parser.add_argument(
        "--steady",
        type=float,
        metavar="PART",
        help="then requests at random times, at this part of what the first policy answered; "
        "needs --seconds",
    )
    parser.add_argument("--burst", type=positive, help="then so many requests at once")
    parser.add_argument("--concurrency", type=positive, default=4, help="requests in flight")
    parser.add_argument(
        "--protocol",
        type=protocols,
        default="http",
        help="one or several of http, grpc, reference (over HTTP, but embeddings stay in shared "
        "memory and ids come back) and handle (from inside Ray, where they always stay)",
    )
    parser.add_argument("--callers", type=positive, default=1, help="processes that send")
    parser.add_argument(
        "--alone",
        action="store_true",
        help="first the engines without the service, for what it reaches of their throughput",
    )
    parser.add_argument("--requests", type=positive, help="how many (200, unless --seconds)")
    parser.add_argument("--seconds", type=above_zero, help="how long")
    parser.add_argument("--timeout", type=above_zero, default=120, help="seconds for one request")
    parser.add_argument("--dtype", choices=get_args(Dtype), default="bfloat16")
    parser.add_argument(
        "--policy",
        type=policies,
        default=None,
        help="one or several, such as largest_first,round_robin",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table. Raises StartError for a configuration that cannot be served."""
    from encoder_service.bench.serve import Plan, table
    from encoder_service.bench.serve import run as measure

    service = load(options.config)
    unbounded = options.requests is None and options.seconds is None
    bench_load = Load(
        concurrency=options.concurrency,
        requests=options.requests or (200 if unbounded else 2**31),
        seconds=options.seconds or math.inf,
        timeout_seconds=options.timeout,
        dtype=options.dtype,
    )
    chosen = options.policy or [service.router.policy]
    if options.steady is not None:
        if not 0 < options.steady < 1:
            raise ConfigError(f"--steady {options.steady:g} is not a part between 0 and 1")
        if options.seconds is None:
            raise ConfigError("--steady needs --seconds: for how long requests come")
    plan = Plan(
        options.mix,
        bench_load,
        chosen,
        options.protocol,
        options.callers,
        alone=options.alone,
        steady_part=options.steady,
        burst=options.burst,
    )
    report = measure(service, plan, console)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    console.print(table(report))
    return 1 if any(run["errors"] for run in report["runs"]) else 0


def mix(text: str) -> list[list[tuple[int, int]]]:
    """For argparse, which prints the message of this error alone."""
    try:
        return parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def policies(text: str) -> list[Policy]:
    """Names that the router knows."""
    return names(text, get_args(Policy), "policies")


def protocols(text: str) -> list[ProtocolName]:
    """Ways to the service."""
    return names(text, get_args(ProtocolName), "protocols")


def names(text: str, known: Sequence[Name], what: str) -> list[Name]:
    """Of those that are known, separated by commas."""
    wanted = text.split(",")
    if set(wanted) - set(known):
        raise argparse.ArgumentTypeError(f"{text!r}: {what} are {', '.join(known)}")
    return [each for name in wanted for each in known if each == name]
