"""`encoder-service bench dataplane`: reads its options; bench/dataplane.py measures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from encoder_service.commands.numbers import above_zero, positive

CPUS = 8
"""As Ray counts them: replicas ask for a tenth."""
MOST_AT_ONCE = 16
"""Embeddings that the object store has room for."""


def add(kinds: Any) -> None:
    """The subcommand of `bench`."""
    parser = kinds.add_parser(
        "dataplane", help="embeddings from an encoder's memory to a consumer's, without a model"
    )
    parser.add_argument(
        "--megabytes", type=above_zero, default=67, help="of one embedding (%(default)s: 1080p, 8B)"
    )
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table."""
    from encoder_service.bench.cluster import cluster
    from encoder_service.bench.dataplane import measure, table

    size_bytes = round(options.megabytes * 1e6)
    room = max(MOST_AT_ONCE * size_bytes, 200 * 10**6)
    with cluster(CPUS, servicers=(), object_store_bytes=room):
        report = measure(size_bytes, options.repeats)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    console.print(table(report))
    return 0
