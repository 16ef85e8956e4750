"""`encoder-service encode PATH...`: sends files to a running service, writes embeddings."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.errors import ConfigError
from encoder_service.client import Client, DatasetOptions, Embedding, ServiceError
from encoder_service.commands import above_zero, add_command, fail, positive

RETRIES = 100
"""Of retryable errors; --timeout ends them earlier."""
DUMMY = "[bold yellow]dummy weights: these embeddings are random numbers[/]"


def add(subcommands: Any) -> None:
    parser = add_command(subcommands, "encode", run, "send files to a running service")
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="a file or an https URL; with --out also a folder"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="of the service, http[s]:// or grpc[s]://"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write shards and a manifest to DIR; the same command again resumes and retries items "
        "that timed out or failed in the service",
    )
    parser.add_argument(
        "--format", default="safetensors", choices=("safetensors", "parquet"), help="of the shards"
    )
    parser.add_argument(
        "--concurrency", type=positive, default=16, metavar="N", help="items in flight"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float16", "float32"),
        help="of the embeddings",
    )
    parser.add_argument(
        "--timeout", type=above_zero, default=60, metavar="SECONDS", help="per request"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """1 if any item failed. Reads the API token from ENCODER_SERVICE_TOKEN."""
    token = os.environ.get("ENCODER_SERVICE_TOKEN")
    try:
        client = Client(options.url, token, options.timeout, RETRIES)
    except ValueError as wrong:
        raise ConfigError(f"--url: {wrong}") from None
    with client:
        check_paths(options.paths, folders=bool(options.out))
        try:
            return (write if options.out else show)(client, options, console)
        except ServiceError as error:
            return fail(error)


def check_paths(paths: list[str], *, folders: bool) -> None:
    """Raises ConfigError, before anything is sent."""
    for path in paths:
        if path.startswith("https://"):
            continue
        if not Path(path).exists():
            raise ConfigError(f"{path}: there is no such file")
        if Path(path).is_dir() and not folders:
            raise ConfigError(f"{path} is a folder: --out DIR is needed")


def write(client: Client, options: argparse.Namespace, console: Console) -> int:
    """Writes shards and a manifest to --out. 1 if an item failed, in this run or an earlier one."""
    chosen = DatasetOptions(options.dtype, options.format, concurrency=options.concurrency)
    try:
        written = client.encode_dataset(options.paths, options.out, chosen, console)
    except ValueError as wrong:
        raise ConfigError(f"--out: {wrong}") from None
    if not written.encoded and not written.failed:
        raise ConfigError("there is no image and no video among the files, judging by their names")
    for failure in written.failures:
        console.print(f"[red]failed:[/] {escape(failure)}", soft_wrap=True)
    if written.retryable:
        console.print(
            f"Run the same command again to retry {written.retryable} of the failed items."
        )
    earlier = ""
    if written.resumed == written.encoded + written.failed:
        earlier = f" (nothing new: {written.resumed} were done by earlier runs)"
    elif written.resumed:
        earlier = f" ({written.resumed} of them by earlier runs)"
    console.print(
        f"{written.encoded} encoded, {written.failed} failed{earlier}: "
        f"{escape(str(options.out / 'manifest.jsonl'))}",
        soft_wrap=True,
    )
    if written.weights == "dummy":
        console.print(DUMMY)
    return 1 if written.failed else 0


def show(client: Client, options: argparse.Namespace, console: Console) -> int:
    started = time.perf_counter()
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
    if shown.row_count:
        console.print(shown)
    for path, error in failed:
        message = escape(f"{path}: {error.type}: {error.message}")
        console.print(f"[red]failed:[/] {message}", soft_wrap=True)
    if dummy:
        console.print(DUMMY)
    console.print(f"{len(answers) - len(failed)} of {len(answers)} in {taken * 1e3:.0f} ms")
    return 1 if failed else 0


def row(answer: Embedding) -> list[str]:
    grid, shape = (" x ".join(map(str, numbers)) for numbers in (answer.grid_thw, answer.shape))
    return [grid, str(answer.tokens), shape, answer.dtype, answer.source, answer.notice]
