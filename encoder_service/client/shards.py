"""A dataset's embeddings on disk: shards in the order of the items, and a manifest of them.

    DIR/manifest.jsonl       the settings, then a line a shard: its file and its items, in order
    DIR/00000.safetensors    a tensor [tokens, width] an item, by the item's name

A shard is there as a whole or not at all, and counts once the manifest names it: a run that was
killed goes on behind the last line. Knows nothing of the service.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from encoder_service.client.embedding import Embedding, ServiceError
from encoder_service.wire.tensors import to_safetensors

Entry = tuple[str, Embedding | ServiceError]
"""An item's name and what became of it."""

MANIFEST = "manifest.jsonl"
FACTS = ("type", "grid_thw", "tokens", "dtype", "shape", "digest", "deepstack")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other run writes there meanwhile. Raises ValueError if one does.

    The lock is the manifest's, and ends with the process however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":  # has no such locks
        yield
        return
    import fcntl

    with (folder / MANIFEST).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: another run is writing into it: let it end, or take another folder"
            ) from None
        yield


class Manifest:
    """What is done. Raises ValueError for other settings, or a file that is none of ours."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder / MANIFEST
        self.shards: list[dict[str, Any]] = []
        lines = self.read()
        if not lines:
            self.append({"settings": dict(settings)})
            return
        for key, value in lines[0]["settings"].items():
            if settings.get(key) != value:
                raise ValueError(
                    f"{self.path}: was begun with {key} {value!r}, now it is "
                    f"{settings.get(key)!r}: take another folder"
                )
        self.shards = lines[1:]

    def read(self) -> list[dict[str, Any]]:
        """The lines that are whole; one that was being written when the run ended is cut off."""
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
    def items(self) -> list[dict[str, Any]]:
        """What became of every item at last, in the order of the items."""
        latest = {item["name"]: item for shard in self.shards for item in shard["items"]}
        return list(latest.values())

    def add(self, file: str | None, items: list[dict[str, Any]]) -> None:
        """A shard that is on disk, or None where all of its items failed."""
        shard = {"file": file, "items": items}
        self.append(shard)
        self.shards.append(shard)

    def append(self, line: Mapping[str, Any]) -> None:
        """Survives the machine's end once it returns."""
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
        WRITERS[suffix](unfinished, encoded)
        unfinished.replace(path)
    manifest.add(file, [described(name, one) for name, one in entries])


def described(name: str, one: Embedding | ServiceError) -> dict[str, Any]:
    """An item's line in the manifest."""
    if isinstance(one, ServiceError):
        return {"name": name, "error": {"type": one.type, "message": one.message}}
    return {"name": name} | {fact: getattr(one, fact) for fact in FACTS}


def write_safetensors(path: Path, entries: Sequence[tuple[str, Embedding]]) -> None:
    """Tensors by name; "items" in the metadata is JSON of what the manifest says of each."""
    tensors = {
        name: {"dtype": one.dtype, "shape": one.shape, "data": one.data} for name, one in entries
    }
    first = entries[0][1]
    items = [described(name, one) for name, one in entries]
    metadata = {"model": first.model, "weights": first.weights, "items": json.dumps(items)}
    flushed(path, to_safetensors(tensors, metadata))


def write_parquet(path: Path, entries: Sequence[tuple[str, Embedding]]) -> None:
    """A row an item: what the manifest says of it, and its memory in the column "data"."""
    import pyarrow
    from pyarrow import parquet

    rows = [
        described(name, one) | {"model": one.model, "weights": one.weights, "data": one.data}
        for name, one in entries
    ]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    flushed(path, sink.getvalue())


def flushed(path: Path, data: bytes) -> None:
    """On the disk before it is named."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


WRITERS: dict[str, Callable[[Path, Sequence[tuple[str, Embedding]]], None]] = {
    "safetensors": write_safetensors,
    "parquet": write_parquet,
}
