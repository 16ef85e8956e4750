"""Encodes a whole dataset into shards, in bounded memory. Resumes after an interruption.

    DIR/manifest.jsonl       the settings, then one line per shard: its file and its items, in order
    DIR/00000.safetensors    one tensor [tokens, width] per item, by the item's name
    DIR/skipped.txt          the files that were skipped, if any: a path, a tab and the reason

A shard counts once the manifest names it. It ends when it is large enough, after FLUSH_SECONDS, or
with the run. A run that is cancelled or fails also writes what it has finished.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, Unpack, get_args

from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from encoder_service.client.items import (
    Embedding,
    ProcessorOptions,
    ServiceError,
    Source,
    kind_of,
    printable,
)
from encoder_service.wire.formats import Document, to_safetensors

FAULTS_OF_THE_ITEM = ("invalid_request", "unsupported_media", "too_large")
"""Recorded for the item, which is not retried."""
RETRIED = ("deadline_exceeded", "encode_failed", "unreadable")
"""Recorded for the item, which the next run retries. Any other error (429, 503) ends the run."""
SEEN, HEARD = ("image", "video"), ("audio",)
"""Kinds of files that are taken from folders, for vision models and for audio models."""
SHOWN_FAILURES = 20
FLUSH_SECONDS = 60.0
"""Finished items are written to a shard after at most this time."""
ITEMS_PER_SHARD = 10_000  # at most
MANIFEST = "manifest.jsonl"
SKIPPED = "skipped.txt"
WRITTEN = re.compile(r"manifest\.jsonl|skipped\.txt|\d{5,}\.(safetensors|parquet)(\.tmp)?")
"""Names of the files in an output folder."""
FACTS = ("type", "grid_thw", "tokens", "dtype", "shape", "digest", "deepstack")
"""Fields of every embedding in the manifest."""
REMARKS = ("notice", "timestamps", "second_per_grid_ts", "kept_rows")
"""Further fields, for embeddings that have them."""

Sample = tuple[str, Source]
"""A source and its name: its path as it was found (see `printable`), or the number of its row."""
Entry = tuple[str, Embedding | ServiceError]
Samples = str | Path | Iterable[str | Path] | Iterable[Mapping[str, Any]]
"""A folder or a file, several of them, or rows with an image in a column (as of `datasets`)."""


DatasetDtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    dtype: DatasetDtype = "bfloat16"
    format: Literal["safetensors", "parquet"] = "safetensors"
    """parquet needs pyarrow."""
    shard_bytes: int = 2**28
    """A shard ends with the item that reaches this size."""
    concurrency: int = 16
    """Items in flight. These and one shard are held in memory."""
    column: str = "image"
    """The column of the image, in a dataset of rows."""
    processor: ProcessorOptions | None = None
    """How items are sized and sampled. Options apply to items whose kind takes them."""


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a dataset, over all runs into its folder."""

    encoded: int
    failed: int
    """Items without an embedding; the manifest has each one's error."""
    resumed: int
    """Items that earlier runs had finished."""
    weights: str
    """"checkpoint", or "dummy": random numbers."""
    retryable: int = 0
    """Failed items that the same call would retry."""
    failures: tuple[str, ...] = ()
    """The first few, with their errors."""
    skipped: tuple[str, ...] = ()
    """Paths below the given folders that are not items by their names, are not regular files, are
    links to nothing or to a folder, or may not be read. skipped.txt has each one's reason."""


class EncodeCalls(Protocol):
    """The part of AsyncClient that is used here."""

    async def model(self) -> Document: ...
    async def encode(
        self, sources: Sequence[Source], dtype: str = ..., **options: Unpack[ProcessorOptions]
    ) -> list[Embedding]: ...


async def encode_dataset(
    caller: EncodeCalls, given: Samples, out: Path, options: DatasetOptions, console: Console | None
) -> Written:
    if options.format == "parquet" and find_spec("pyarrow") is None:
        raise ValueError("parquet needs pyarrow: pip install pyarrow, or use safetensors")
    if options.dtype not in (known := get_args(DatasetDtype)):
        raise ValueError(f"dtype is {options.dtype!r}: datasets have {', '.join(known)}")
    if options.concurrency < 1:
        raise ValueError(f"concurrency is {options.concurrency}: it must be at least 1")
    with locked(out):
        card = await caller.model()
        served = {key: card.get(key) for key in ("model", "revision", "weights")}
        precision = card.get("graphs", {}).get("precision", "auto")
        if precision != "auto":  # then no encoder has said which one it has
            served["precision"] = precision
        chosen = {key: value for key, value in asdict(options).items() if key != "concurrency"}
        manifest = await asyncio.to_thread(Manifest, out, served | chosen)
        skipped: dict[Path, str] = {}
        kinds = HEARD if "audio" in card.get("kinds", ()) else SEEN
        found = samples(given, options.column, skipped, kinds)
        resumed = sum(not is_retried(item) for item in manifest.items)
        total = await asyncio.to_thread(count, given, options.column, kinds)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress("items", *columns, console=console, disable=console is None) as progress:
            task = progress.add_task("items", total=total, completed=resumed)
            await write(caller, found, manifest, options, partial(progress.advance, task))
        names = await asyncio.to_thread(write_skipped, skipped, out)
    return result(manifest, resumed, names)


def write_skipped(skipped: Mapping[Path, str], out: Path) -> list[str]:
    """Writes skipped.txt, without what an earlier run wrote to `out`. Returns the paths."""
    folder = out.resolve()
    reasons = {
        printable(str(path)): reason
        for path, reason in skipped.items()
        if not (WRITTEN.fullmatch(path.name) and path.parent.resolve() == folder)
    }
    if reasons:
        lines = [f"{name}\t{reason}\n" for name, reason in reasons.items()]
        (out / SKIPPED).write_text("".join(lines), encoding="utf-8")
    else:
        (out / SKIPPED).unlink(missing_ok=True)
    return list(reasons)


def result(manifest: Manifest, resumed: int = 0, skipped: Sequence[str] = ()) -> Written:
    items = manifest.items
    failed = [item for item in items if "error" in item]
    return Written(
        encoded=len(items) - len(failed),
        failed=len(failed),
        resumed=resumed,
        weights=str(manifest.settings.get("weights")),
        retryable=sum(map(is_retried, failed)),
        failures=tuple(
            f"{item['name']}: {item['error']['type']}: {item['error']['message']}"
            for item in failed[:SHOWN_FAILURES]
        ),
        skipped=tuple(skipped),
    )


async def write(
    caller: EncodeCalls,
    found: Iterator[Sample],
    manifest: Manifest,
    options: DatasetOptions,
    advance: Callable[[], None],
) -> None:
    left = remaining(found, manifest.items)
    waiting: list[Entry] = []
    held_bytes, flushed = 0, time.monotonic()

    async def flush() -> None:
        nonlocal waiting, held_bytes, flushed
        entries, waiting, held_bytes, flushed = waiting, [], 0, time.monotonic()
        if entries:
            writing = asyncio.to_thread(write_shard, manifest, entries, options.format)
            await completed(asyncio.create_task(writing))

    try:
        async with aclosing(encode_in_order(caller, left, options)) as entries:
            async for entry in entries:
                if entry:
                    waiting.append(entry)
                    held_bytes += len(entry[1].data) if isinstance(entry[1], Embedding) else 0
                    advance()
                full = held_bytes >= options.shard_bytes or len(waiting) == ITEMS_PER_SHARD
                if full or time.monotonic() - flushed >= FLUSH_SECONDS:
                    await flush()
    finally:
        await flush()


async def completed(task: asyncio.Task[None]) -> None:
    """Waits for the task to end, even if the waiting task is cancelled."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def is_retried(item: Document) -> bool:
    return "error" in item and item["error"]["type"] in RETRIED


def remaining(found: Iterator[Sample], before: list[Document]) -> Iterator[Sample]:
    """Items of earlier runs to retry, then all new ones. Raises ValueError for another dataset."""
    for position, item in enumerate(before):
        name, sample = item["name"], next(found, None)
        if sample is None or sample[0] != name:
            now = "there is none" if sample is None else f"it is {sample[0]!r}"
            raise ValueError(
                f"item {position} was {name!r} in the previous run, now {now}: write to another "
                "folder"
            )
        if is_retried(item):
            yield sample
    yield from found


def samples(
    given: Samples, column: str, skipped: dict[Path, str], kinds: Sequence[str] = SEEN
) -> Iterator[Sample]:
    """The items, in the same order every time. Raises ValueError if two have the same name.

    Adds paths that are not items to `skipped`, with the reason. `kinds`: the kinds of files that
    are taken from folders.
    """
    seen: set[str] = set()
    entries: Iterable[Any] = [given] if isinstance(given, str | Path) else given
    for position, entry in enumerate(entries):
        for name, source in expanded_entry(entry, position, column, skipped, kinds):
            if name in seen:
                raise ValueError(f"{name} is given twice")
            seen.add(name)
            yield name, source


def expanded_entry(
    entry: Any, position: int, column: str, skipped: dict[Path, str], kinds: Sequence[str]
) -> Iterator[Sample]:
    """A row or a file is one item. A folder is all files of these kinds below it, by name."""
    if isinstance(entry, Mapping):
        yield f"{position:09}", row_image(entry, position, column)
        return
    if str(entry).startswith(("https://", "http://")):
        yield str(entry), entry
        return
    given = Path(entry)
    if not given.is_dir():
        yield printable(str(given)), given
        return
    os.scandir(given).close()  # rglob is silent about a folder that may not be read
    for path in sorted(given.rglob("*")):
        if kind_of(path.name) in kinds and os.path.isfile(path):
            yield printable(str(path)), path
        elif reason := skip_reason(path, kinds):
            skipped[path] = reason


def skip_reason(path: Path, kinds: Sequence[str]) -> str | None:
    """Why a path is not an item. None for a folder, which is searched."""
    if not os.access(path.parent, os.X_OK):
        return "in a folder that may not be entered"
    if path.is_dir():
        if path.is_symlink():
            return "a link to a folder"
        return None if os.access(path, os.R_OK) else "a folder that may not be read"
    if not path.exists():
        return "a broken link"
    if kind_of(path.name) in kinds:
        return "not a regular file"
    return f"no {' and no '.join(kinds)} by its name"


def row_image(row: Mapping[str, Any], position: int, column: str) -> Source:
    """A row's image: decoded, a file's bytes, a path, or the map that `datasets` makes of these."""
    found = row.get(column)
    if isinstance(found, Mapping):
        found = found.get("bytes") or found.get("path")
    if not isinstance(found, str | Path | bytes | Image.Image):
        raise ValueError(
            f"row {position}: column {column!r} holds no image but {type(found).__name__}; "
            f"columns are {sorted(row)}"
        )
    return found


def count(given: Samples, column: str, kinds: Sequence[str] = SEEN) -> int | None:
    """How many items there are, if that is known without reading them."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        rows = given and isinstance(given[0], Mapping)
        return len(given) if rows else sum(1 for _ in samples(given, column, {}, kinds))
    if isinstance(given, str | Path):
        return sum(1 for _ in samples(given, column, {}, kinds))
    return len(given) if isinstance(given, Sized) else None


async def encode_in_order(
    caller: EncodeCalls, left: Iterator[Sample], options: DatasetOptions
) -> AsyncGenerator[Entry | None]:
    """Each item's name and result, in order, with `options.concurrency` items in flight.

    Yields None about every second while an item takes longer.
    """
    under_way: deque[tuple[str, asyncio.Task[Embedding | ServiceError]]] = deque()
    try:
        while True:
            sample = await asyncio.to_thread(next, left, None)
            if sample is not None:
                call = asyncio.create_task(encode_one(caller, sample[1], options))
                under_way.append((sample[0], call))
            elif not under_way:
                return
            if sample is None or len(under_way) == options.concurrency:
                name, task = under_way[0]
                while not (await asyncio.wait([task], timeout=1.0))[0]:
                    yield None
                answer = task.result()
                under_way.popleft()
                yield name, answer
    finally:
        for _, task in under_way:
            task.cancel()
        await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)


async def encode_one(
    caller: EncodeCalls, source: Source, options: DatasetOptions
) -> Embedding | ServiceError:
    try:
        (embedding,) = await caller.encode([source], options.dtype, **(options.processor or {}))
    except ServiceError as error:
        if error.type not in FAULTS_OF_THE_ITEM + RETRIED:
            raise
        return error
    except (OSError, ValueError) as error:  # ValueError: a broken URL, a NUL in a path
        return ServiceError("unreadable", str(error))
    return embedding


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Makes the folder and keeps other runs from writing to it. Raises ValueError if one is writing
    there, or if it cannot be a folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{folder} is a file or is below one: use another folder") from None
    if sys.platform == "win32":  # has no fcntl
        yield
        return
    import fcntl

    with (folder / MANIFEST).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: another run is writing into it: wait for it, or use another folder"
            ) from None
        yield


class Manifest:
    """The finished shards. Raises ValueError for other settings or another kind of file."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        """`settings`: those of a run that begins. None: only read what earlier runs wrote."""
        self.path = folder / MANIFEST
        self.shards: list[Document] = []
        lines = self.read()
        if len(lines) == 1 and settings is not None:  # no item was finished under these settings
            os.truncate(self.path, 0)
            lines = []
        self.settings: Mapping[str, Any] = lines[0]["settings"] if lines else settings or {}
        if settings is None or not lines:
            self.shards = lines[1:]
            return
        for key in {**self.settings, **settings}:
            before, now = self.settings.get(key), settings.get(key)
            unknown = key == "precision" and None in (before, now)
            if before != now and not unknown:
                raise ValueError(
                    f"{self.path}: was started with {key} {before!r}, now it is {now!r}: use "
                    "another folder"
                )
        self.shards = lines[1:]

    def read(self) -> list[Document]:
        """The complete lines. Truncates a last line that was cut off when a run was killed."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        try:
            lines = [json.loads(line) for line in data[:whole].splitlines()]
            if lines and "settings" not in lines[0]:
                raise ValueError("its first line has no settings")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path} is no manifest: {error}") from None
        return lines

    @property
    def items(self) -> list[Document]:
        """The latest entry of every item, in the order of the items."""
        latest = {item["name"]: item for shard in self.shards for item in shard["items"]}
        return list(latest.values())

    def add(self, file: str | None, items: list[Document]) -> None:
        """Records a shard that is on disk; `file` is None if all of its items failed."""
        if not self.shards:
            self.append({"settings": dict(self.settings)})
        self.shards.append({"file": file, "items": items})
        self.append(self.shards[-1])

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes a line, which is on the disk when this returns."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def write_shard(manifest: Manifest, entries: Sequence[Entry], suffix: str) -> None:
    """Writes a shard, then names it in the manifest. Raises OSError."""
    encoded = [(name, one) for name, one in entries if isinstance(one, Embedding)]
    file = f"{len(manifest.shards):05}.{suffix}" if encoded else None
    if file:
        path = manifest.path.parent / file
        unfinished = path.with_name(f"{file}.tmp")
        with unfinished.open("wb") as shard:
            shard.write(parquet_file(encoded) if suffix == "parquet" else tensor_file(encoded))
            shard.flush()
            os.fsync(shard.fileno())  # so that a named file is never half written
        unfinished.replace(path)
    manifest.add(file, [manifest_entry(name, one) for name, one in entries])


def manifest_entry(name: str, one: Embedding | ServiceError) -> Document:
    if isinstance(one, ServiceError):
        return {"name": name, "error": {"type": one.type, "message": one.message}}
    remarks = {name: value for name in REMARKS if (value := getattr(one, name))}
    return {"name": name} | {fact: getattr(one, fact) for fact in FACTS} | remarks


def tensor_file(entries: Sequence[tuple[str, Embedding]]) -> bytes:
    """Tensors by name; "items" in the metadata is JSON of their manifest entries."""
    tensors = {
        name: {"dtype": one.dtype, "shape": one.shape, "data": one.data} for name, one in entries
    }
    first = entries[0][1]
    items = [manifest_entry(name, one) for name, one in entries]
    metadata = {"model": first.model, "family": first.family, "weights": first.weights}
    metadata["items"] = json.dumps(items)
    return b"".join(to_safetensors(tensors, metadata))


def parquet_file(entries: Sequence[tuple[str, Embedding]]) -> memoryview:
    """One row per item: its manifest entry, with nulls, and its bytes in the column "data"."""
    import pyarrow
    from pyarrow import parquet

    rows = [
        {"name": name}
        | {fact: getattr(one, fact) for fact in (*FACTS, "model", "family", "weights", "data")}
        for name, one in entries
    ]
    table = pyarrow.Table.from_pylist(rows)
    seconds = pyarrow.float64()
    kinds = (pyarrow.string(), pyarrow.list_(seconds), seconds, pyarrow.list_(pyarrow.int64()))
    for name, kind in zip(REMARKS, kinds, strict=True):  # one type even if all are null
        values = [getattr(one, name) or None for _, one in entries]
        table = table.append_column(name, pyarrow.array(values, kind))
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(table, sink)
    return memoryview(sink.getvalue())
