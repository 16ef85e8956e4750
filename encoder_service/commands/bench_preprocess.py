"""`encoder-service bench preprocess`: reads its options; bench/engine/preprocess.py measures."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from actors.options import (
    ActorOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from encoder_service.bench.mix import VARIANTS, parse_mix, picture
from encoder_service.commands.numbers import above_zero, positive

if TYPE_CHECKING:
    from encoder_service.bench.engine.preprocess import Figure

SIZES = ("336x336", "1920x1080")

COLUMNS = (
    "patches: per image. decoded: images per second, decoded and dropped. CPU ms, switches: CPU "
    "time and voluntary context switches of the replica's process per image, decoding processes "
    "not included. alone ms: latency with one image in flight. encoded: images per second, decoded "
    "and encoded; patches/s: of these. engine: images per second, decoded before."
)
"""Of the table."""

WIDTH = 104
"""Characters that the table needs; a pipe says 80."""


def add(kinds: Any) -> None:
    """The subcommand of `bench`."""
    parser = kinds.add_parser(
        "preprocess",
        help="JPEGs to patches, in threads and in processes, ahead of an engine",
        epilog=COLUMNS,
    )
    parser.add_argument("--model", default="qwen3vl-2b", metavar="PRESET", help="(%(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="of the engine")
    parser.add_argument("--size", nargs="+", type=size, default=SIZES, help="such as 336x336")
    parser.add_argument(
        "--threads",
        type=positive,
        default=os.cpu_count(),
        help="threads that decode (%(default)s)",
    )
    parser.add_argument(
        "--processes",
        type=positive,
        nargs="*",
        default=(),
        metavar="N",
        help="also measure decoding in so many processes",
    )
    parser.add_argument("--seconds", type=above_zero, default=0.5, help="a figure (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table. Raises StartError where the device is missing."""
    from encoder_service.bench.engine.machine import open_device  # torch takes seconds to import
    from encoder_service.bench.engine.preprocess import measure

    open_device(options.device)  # whose error names --device, the engine's a configuration
    console.width = max(console.width, WIDTH)
    on_gpu = options.device == "cuda"
    actor = ActorOptions(
        model=ModelOptions(id=options.model, load_format="dummy"),
        encoder=EncoderOptions(device=options.device, num_gpus=int(on_gpu)),
        # Few graphs, for images alone: the engine is not what is measured.
        graphs=GraphOptions(steps_per_doubling=1, max_frames_per_batch=0),
    )
    ways = [PreprocessOptions(threads=options.threads)]
    ways += [PreprocessOptions(processes=count) for count in options.processes]
    pictures = {
        name: [picture(*parse_mix(name)[0][0], seed) for seed in range(VARIANTS)]
        for name in options.size
    }
    figures = measure(actor, pictures, ways, options.seconds, console.print)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in figures], indent=2) + "\n")
    console.print(table(figures, options.model))
    return 0


def table(figures: list[Figure], model: str) -> Table:
    """A row a size and way."""
    shown = Table(title=f"JPEGs to patches, {model}", caption=COLUMNS, caption_justify="left")
    for name in ("size", "way"):
        shown.add_column(name)
    for name in (
        "patches",
        "decoded",
        "CPU ms",
        "switches",
        "alone ms",
        "encoded",
        "patches/s",
        "engine",
    ):
        shown.add_column(name, justify="right")
    for each in figures:
        shown.add_row(
            each.size,
            each.way,
            str(each.patches),
            f"{each.images_per_second:.0f}",
            f"{each.cpu_ms:.2f}",
            f"{each.switches:.1f}",
            f"{each.alone_ms:.2f}",
            f"{each.encoded_images_per_second:.0f}",
            f"{each.encoded_images_per_second * each.patches:,.0f}",
            f"{each.engine_images_per_second:.0f}",
        )
    return shown


def size(text: str) -> str:
    """For argparse: one WIDTHxHEIGHT."""
    try:
        kinds = parse_mix(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if len(kinds) != 1 or len(kinds[0]) != 1:
        raise argparse.ArgumentTypeError(f"{text!r}: one WIDTHxHEIGHT")
    return text
