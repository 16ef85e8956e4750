"""`encoder-service check CONFIG`: what a configuration would serve, without a cluster.

`serve run` keeps trying a configuration that cannot work; this says so at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.engine.budgets import Capacity
from actors.families.registry import read
from actors.options import EncoderOptions
from actors.spec.model_spec import ModelSpec
from actors.types import Size
from encoder_service.config import ServiceOptions, fit, load_all, read_document
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.options import LlmOptions
from encoder_service.llm.spec import LlmSpec

SIDES = range(1, 5)
"""Of the shapes that are looked at for the image of most tokens, in proportion."""


def add(subcommands: Any) -> None:
    """The subcommand."""
    parser = subcommands.add_parser("check", help="what a configuration would serve")
    parser.add_argument("config", type=Path, help="such as configs/tiny.yaml")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table for each application of ours. Raises StartError, with the offending key."""
    # Ray takes seconds to import: not for every subcommand.
    from encoder_service.serve_file import check_serve, check_timeouts

    document = read_document(options.config)
    check_serve(document, str(options.config))
    for service in load_all(options.config):
        check_timeouts(document, service.limits.timeout_seconds, str(options.config))
        spec = read(service.model)
        room = fit(service, spec)
        console.print(table(service, spec, room))
        for warning in (*missing(service), *eager(service, spec, room)):
            console.print(f"[bold yellow]{escape(warning)}[/]", soft_wrap=True)
        if service.llm:
            check_timeouts(document, service.llm.timeout_seconds, str(options.config), "llm")
            console.print(llm_table(service.llm, llm_spec.read(service.llm, service.model, spec)))
        if spec.dummy:
            console.print("[bold yellow]dummy weights: the embeddings will be random numbers[/]")
    return 0


def missing(service: ServiceOptions) -> Iterator[str]:
    """What is not installed here. That need not be wrong: here may be no node of the cluster."""
    needed = (
        ("encoder.transport is nixl", service.encoder.transport == "nixl", "nixl", "nixl"),
        ("preprocess.device is cuda", service.preprocess.device == "cuda", "torchvision", "gpu"),
    )
    for key, asked, package, extra in needed:
        if asked and find_spec(package) is None:
            yield (
                f"{key}: {package} is not installed here; every node of an encoder needs it: "
                f"pip install 'encoder-service[{extra}]'"
            )


def eager(service: ServiceOptions, spec: ModelSpec, room: Capacity) -> Iterator[str]:
    """Paths with graphs, but none that holds the largest images."""
    pixels = service.limits.max_pixels
    sizes = (
        Size(*(max(1, math.isqrt(pixels * a // b)) for a, b in ((across, down), (down, across))))
        for across, down in product(SIDES, SIDES)
    )
    most = map(max, zip(*(spec.sizing.plan(size).path_tokens for size in sizes), strict=True))
    for tokens, path, budgets in zip(most, spec.paths, room.budgets, strict=True):
        if budgets and tokens > budgets[-1]:
            named = "" if len(spec.paths) == 1 else f"{path}_"
            yield (
                f"images of up to {tokens} tokens are beyond every budget of "
                f"graphs.{named}token_budgets and run eagerly: raise it"
            )


def table(service: ServiceOptions, spec: ModelSpec, room: Capacity) -> Table:
    """What would be served."""
    shown = Table(show_header=False)
    shown.add_row("model", spec.id + (f" at {spec.revision}" if spec.revision else ""))
    shown.add_row("family", f"{spec.family}, {spec.dtype}, {spec.weights} weights")
    shown.add_row("takes", " and ".join(f"{kind}s" for kind in spec.kinds))
    shown.add_row("gives", f"rows of {spec.width} values")
    for path, budgets in zip(spec.paths, room.budgets, strict=True):
        shown.add_row(f"budgets, {path}", " ".join(map(str, budgets)) or "none: all eagerly")
    shown.add_row("a pack", f"up to {room.items} items, {room.frames} frames of videos")
    encoder = service.encoder
    each = f"{encoder.num_gpus:g} GPU, {encoder.num_cpus:g} CPU each, on {encoder.device}"
    shown.add_row("encoders", f"{count(encoder)}: {each}")
    shown.add_row("routers", f"{service.router.replicas}: {service.router.policy}")
    shown.add_row("ingresses", f"{service.ingress.replicas}")
    return shown


def count(encoder: EncoderOptions) -> str:
    """Replicas."""
    if scaling := encoder.autoscaling:
        least, most = scaling.min_replicas, scaling.max_replicas
        return f"{least} to {most}, by {scaling.target_patches} outstanding patches"
    return f"{encoder.replicas}"


def llm_table(llm: LlmOptions, spec: LlmSpec) -> Table:
    """What the language model would be."""
    shown = Table(show_header=False)
    weights = "dummy: it will write nonsense" if spec.dummy else "checkpoint"
    shown.add_row("chat with", spec.id + (f" at {spec.revision}" if spec.revision else ""))
    shown.add_row("weights", f"{weights}, {spec.dtype}")
    shown.add_row("tokens", f"{spec.max_model_len} of prompt and answer together")
    each = f"{llm.num_gpus:g} GPU, {llm.num_cpus:g} CPU each, on {llm.device}"
    shown.add_row("language models", f"{llm.replicas}: {each}")
    return shown
