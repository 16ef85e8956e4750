"""A whole dataset through a service: streamed, in bounded memory, resumed where it ended.

The order of the items and their sizes alone decide what is in a shard, so that runs that were
killed and run again leave the same files as one that was not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from encoder_service.client.embedding import Embedding, ServiceError
from encoder_service.client.samples import Sample, Samples, Source, count, samples
from encoder_service.client.shards import Entry, Manifest, alone, write_shard
from encoder_service.wire.formats import Document

FAULTS_OF_THE_ITEM = ("invalid_request", "unsupported_media", "too_large")
TRIED_AGAIN = ("deadline_exceeded", "encode_failed", "unreadable")
"""Both are recorded for an item, and these tried again by the next run; anything else (429, 503)
ends the run, which can go on later."""
SHOWN_FAILURES = 5
MOST_ITEMS = 10_000
"""In a shard."""


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """How a dataset is written."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    format: Literal["safetensors", "parquet"] = "safetensors"
    """parquet needs pyarrow."""
    shard_bytes: int = 2**28
    """A shard ends with the item that reaches this."""
    concurrency: int = 16
    """Items in flight: these, and one shard, are held in memory."""
    column: str = "image"
    """Of rows: where the image is."""


@dataclass(frozen=True, slots=True)
class Written:
    """What came of a dataset, over all runs into its folder."""

    encoded: int
    failed: int
    """Items that the service refused: the manifest says why."""
    resumed: int
    """Items that earlier runs had done."""
    weights: str
    """"checkpoint", or "dummy": random numbers."""
    retryable: int = 0
    """Of those that failed: the same call tries them again."""
    failures: tuple[str, ...] = ()
    """The first of them, with their reasons."""


class Caller(Protocol):
    """What of AsyncClient is needed here."""

    async def model(self) -> Document: ...
    async def encode(self, sources: Sequence[Source], dtype: str = ...) -> list[Embedding]: ...


async def encode_dataset(
    caller: Caller, given: Samples, out: Path, options: DatasetOptions, console: Console | None
) -> Written:
    """See AsyncClient.encode_dataset."""
    if options.format == "parquet" and find_spec("pyarrow") is None:
        raise ValueError("parquet needs pyarrow (pip install pyarrow); safetensors does without")
    if options.concurrency < 1:
        raise ValueError(f"concurrency is {options.concurrency}: at least 1 item is in flight")
    with alone(out):
        return await write(caller, given, out, options, console)


async def write(
    caller: Caller, given: Samples, out: Path, options: DatasetOptions, console: Console | None
) -> Written:
    """What is not done yet."""
    card = await caller.model()
    served = {key: card.get(key) for key in ("model", "revision", "weights")}
    chosen = {key: value for key, value in asdict(options).items() if key != "concurrency"}
    manifest = await asyncio.to_thread(Manifest, out, served | chosen)
    found = manifest.items
    done = [item["name"] for item in found if not tried_again(item)]
    with shown(console, await asyncio.to_thread(count, given, options.column)) as advance:
        advance(len(done))
        left = remaining(samples(given, options.column), found)
        waiting: list[Entry] = []
        held_bytes = 0
        async with aclosing(answers(caller, left, options)) as entries:
            async for entry in entries:
                waiting.append(entry)
                held_bytes += len(entry[1].data) if isinstance(entry[1], Embedding) else 0
                if held_bytes >= options.shard_bytes or len(waiting) == MOST_ITEMS:
                    await asyncio.to_thread(write_shard, manifest, waiting, options.format)
                    waiting, held_bytes = [], 0
                advance(1)
        if waiting:
            await asyncio.to_thread(write_shard, manifest, waiting, options.format)
    return summary(manifest.items, len(done), str(card["weights"]))


def summary(items: list[Document], resumed: int, weights: str) -> Written:
    """What the manifest says in the end."""
    failed = [item for item in items if "error" in item]
    return Written(
        encoded=len(items) - len(failed),
        failed=len(failed),
        resumed=resumed,
        weights=weights,
        retryable=sum(map(tried_again, failed)),
        failures=tuple(
            f"{item['name']}: {item['error']['type']}: {item['error']['message']}"
            for item in failed[:SHOWN_FAILURES]
        ),
    )


def tried_again(item: Document) -> bool:
    """Whether an item of the manifest is not done: it failed, and may not the next time."""
    return "error" in item and item["error"]["type"] in TRIED_AGAIN


def remaining(found: Iterator[Sample], before: list[Document]) -> Iterator[Sample]:
    """What is not done of the items before, then all behind. Raises ValueError for others."""
    for position, item in enumerate(before):
        name, sample = item["name"], next(found, None)
        if sample is None or sample.name != name:
            now = "there is none" if sample is None else f"it is {sample.name!r}"
            raise ValueError(
                f"item {position} was {name!r} in the run before, now {now}: take another folder"
            )
        if tried_again(item):
            yield sample
    yield from found


async def answers(
    caller: Caller, left: Iterator[Sample], options: DatasetOptions
) -> AsyncGenerator[Entry]:
    """Each item's name and what became of it, in order, several on their way at once."""
    under_way: deque[tuple[str, asyncio.Task[Embedding | ServiceError]]] = deque()

    async def first() -> Entry:
        name, task = under_way[0]
        answer = await task
        under_way.popleft()
        return name, answer

    try:
        while (sample := await asyncio.to_thread(next, left, None)) is not None:
            call = asyncio.create_task(attempt(caller, sample.source, options.dtype))
            under_way.append((sample.name, call))
            if len(under_way) == options.concurrency:
                yield await first()
        while under_way:
            yield await first()
    finally:
        for _, task in under_way:
            task.cancel()
        await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)


async def attempt(caller: Caller, source: Source, dtype: str) -> Embedding | ServiceError:
    """One item. Raises ServiceError for what is not the item's fault."""
    try:
        (embedding,) = await caller.encode([source], dtype)
    except ServiceError as error:
        if error.type not in FAULTS_OF_THE_ITEM + TRIED_AGAIN:
            raise
        return error
    except OSError as error:
        return ServiceError("unreadable", str(error))
    return embedding


@contextmanager
def shown(console: Console | None, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar, if there is somewhere to show it: call what it gives with each advance."""
    if console is None:
        yield lambda items: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("items", total=total)
        yield lambda items: progress.advance(task, items)
