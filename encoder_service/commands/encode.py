"""`encoder-service encode PATH...`: sends files to a running service and writes the embeddings."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.markup import escape

from actors.errors import ConfigError
from encoder_service.client import AsyncClient, DatasetOptions, ServiceError
from encoder_service.client.dataset import (
    MANIFEST,
    SKIPPED,
    DatasetDtype,
    Manifest,
    Written,
    result,
)
from encoder_service.client.items import ProcessorOptions, printable
from encoder_service.commands import above_zero, add_command, fail, positive

PROCESSOR = {
    "min_pixels": "enlarge smaller images and video frames to this many pixels",
    "max_pixels": "shrink larger images and video frames to this many pixels",
    "max_patches": "maximum tiles per image (Kimi, SigLIP 2: patches per image or frame)",
    "fps": "frames to sample per second of video",
    "num_frames": "frames to sample from a video, instead of --fps",
}
"""Apply to items whose kind takes them. The service rejects those that its model does not take."""
RETRIES = 100
"""Maximum retries after retryable errors; --timeout may end them earlier."""


def add(subcommands: Any) -> None:
    parser = add_command(subcommands, "encode", run, "send files to a running service")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a file, a folder or an https URL")
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="URL of the service, http[s]:// or grpc[s]://",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="write shards and a manifest to DIR; running the same command again resumes, and "
        "retries items that timed out or failed in the service",
    )
    parser.add_argument(
        "--format", default="safetensors", choices=("safetensors", "parquet"), help="shard format"
    )
    parser.add_argument(
        "--concurrency", type=positive, default=16, metavar="N", help="items in flight"
    )
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=get_args(DatasetDtype),
        help="dtype of the embeddings",
    )
    one_of = parser.add_mutually_exclusive_group()
    for name, meaning in PROCESSOR.items():
        (one_of if name in ("fps", "num_frames") else parser).add_argument(
            f"--{name.replace('_', '-')}",
            type=above_zero if name == "fps" else positive,
            metavar="N",
            help=meaning,
        )
    parser.add_argument(
        "--timeout", type=above_zero, default=60, metavar="SECONDS", help="timeout of a request"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Returns 1 if any item failed. Reads the API token from ENCODER_SERVICE_TOKEN."""
    for path in options.paths:  # before anything is sent
        if not path.startswith("https://") and not (path and Path(path).exists()):
            url = "://" in path
            reason = "there is no such file"
            if url:
                reason = "only https URLs are accepted (the service's own goes into --url)"
            raise ConfigError(f"{path or repr(path)}: {reason}")
    try:
        return asyncio.run(write(options, console))
    except ValueError as wrong:  # also from a manifest that is read because the service failed
        raise ConfigError(str(wrong)) from None


async def write(options: argparse.Namespace, console: Console) -> int:
    """Writes shards and a manifest to --out.

    Returns 0 if done, 1 if an item failed in this run or an earlier one, 128 + signal if
    interrupted.
    """
    token = os.environ.get("ENCODER_SERVICE_TOKEN")
    try:
        client = AsyncClient(options.url, token, options.timeout, RETRIES)
    except ValueError as wrong:
        raise ConfigError(f"--url: {wrong}") from None
    asked = {name: value for name in PROCESSOR if (value := getattr(options, name))}
    chosen = DatasetOptions(
        options.dtype,
        options.format,
        concurrency=options.concurrency,
        processor=cast(ProcessorOptions, asked) if asked else None,
    )
    work = asyncio.ensure_future(client.encode_dataset(options.paths, options.out, chosen, console))
    signals: list[signal.Signals] = []

    def interrupted(number: signal.Signals) -> None:
        if not signals:  # a second one would interrupt writing what is finished
            work.cancel()
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted, number)
    try:
        written = await work
    except asyncio.CancelledError:
        console.print(f"interrupted; {so_far(options.out)}", soft_wrap=True)
        return 128 + signals[0]
    except ServiceError as error:
        if Manifest(options.out).shards:
            console.print(so_far(options.out), soft_wrap=True)
        return fail(error)
    finally:
        await client.close()
    return show(written, options.out, console)


def so_far(out: Path) -> str:
    written = result(Manifest(out))
    return (
        f"{written.encoded} encoded, {written.failed} failed so far: "
        f"{escape(printable(str(out / MANIFEST)))}. Run the same command again to resume."
    )


def show(written: Written, out: Path, console: Console) -> int:
    if not written.encoded and not written.failed:
        raise ConfigError("no file has a name that the model takes" + left_out(written, out))
    for failure in written.failures:
        console.print(f"[red]failed:[/] {escape(failure)}", soft_wrap=True)
    if more := written.failed - len(written.failures):
        console.print(f"[red]failed:[/] {more} more, listed in the manifest")
    if written.retryable:
        console.print(
            f"Run the same command again to retry {written.retryable} of the failed items."
        )
    earlier = ""
    if written.resumed == written.encoded + written.failed:
        earlier = f" (nothing new: {written.resumed} from earlier runs)"
    elif written.resumed:
        earlier = f" ({written.resumed} of them from earlier runs)"
    console.print(
        f"{written.encoded} encoded, {written.failed} failed{earlier}"
        f"{escape(left_out(written, out))}: {escape(printable(str(out / MANIFEST)))}",
        soft_wrap=True,
    )
    if written.weights == "dummy":
        console.print("[bold yellow]dummy weights: these embeddings are random numbers[/]")
    return 1 if written.failed else 0


def left_out(written: Written, out: Path) -> str:
    """How many files were skipped, and where they are listed."""
    listed = printable(str(out / SKIPPED))
    return f"; {len(written.skipped)} skipped ({listed})" if written.skipped else ""
