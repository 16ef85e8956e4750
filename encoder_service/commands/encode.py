"""`encoder-service encode PATH...`: files to a running service, embeddings to files."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.errors import ConfigError
from encoder_service.client import Client, Embedding, ServiceError
from encoder_service.tensors import to_safetensors


def add(subcommands: Any) -> None:
    """The subcommand."""
    parser = subcommands.add_parser("encode", help="send files to a running service")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, or an https URL")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="http[s]:// or grpc[s]:// (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/NAME.safetensors")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="SECONDS", help="(%(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table; 1 if any item failed. The token is read from ENCODER_SERVICE_TOKEN."""
    names = Counter(Path(path).stem for path in options.paths)
    if options.out and max(names.values()) > 1:
        raise FileExistsError(f"--out: several files are named {max(names, key=names.__getitem__)}")
    token = os.environ.get("ENCODER_SERVICE_TOKEN")
    started = time.perf_counter()
    try:
        client = Client(options.url, token, options.timeout)
    except (ValueError, httpx.InvalidURL) as wrong:
        raise ConfigError(f"--url: {wrong}") from None
    with client:
        answers = client.encode(options.paths, dtype=options.dtype, on_error="return")
    taken = time.perf_counter() - started
    shown = Table("file", "grid", "tokens", "shape", "dtype", "source", "notice")
    failed: list[tuple[str, ServiceError]] = []
    dummy = False
    for path, answer in zip(options.paths, answers, strict=True):
        if isinstance(answer, ServiceError):
            failed.append((path, answer))
            continue
        dummy = answer.weights == "dummy"
        shown.add_row(escape(Path(path).name), *row(answer))
        if options.out:
            write(answer, options.out / f"{Path(path).stem}.safetensors")
    console.print(shown)
    for path, error in failed:
        message = escape(f"{path}: {error.type}: {error.message}")
        console.print(f"[red]failed:[/] {message}", soft_wrap=True)
    if dummy:
        console.print("[bold yellow]dummy weights: these embeddings are random numbers[/]")
    console.print(f"{len(answers) - len(failed)} of {len(answers)} in {taken * 1e3:.0f} ms")
    return 1 if failed else 0


def row(answer: Embedding) -> list[str]:
    """One item for people."""
    grid, shape = (" x ".join(map(str, numbers)) for numbers in (answer.grid_thw, answer.shape))
    return [grid, str(answer.tokens), shape, answer.dtype, answer.source, answer.notice]


def write(answer: Embedding, path: Path) -> None:
    """One tensor named "embedding", and where it comes from in the metadata."""
    tensor = {"dtype": answer.dtype, "shape": answer.shape, "data": answer.data}
    metadata = {
        "model": answer.model,
        "weights": answer.weights,
        "digest": answer.digest,
        "deepstack": str(answer.deepstack),
        "grid_thw": json.dumps(answer.grid_thw),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_safetensors({"embedding": tensor}, metadata))
