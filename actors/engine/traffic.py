"""Counts items by their tokens, and keeps the counts in a file for planning budgets at start."""

from __future__ import annotations

import json
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from actors.engine.budgets import Capacity
from actors.engine.ladder import pack_loads, planned_ladders
from actors.errors import ConfigError
from actors.spec.model_spec import ModelSpec

log = logging.getLogger("ray.serve")

PathTokens = tuple[int, ...]
"""Tokens of an item, or of a video's chunk, on each path."""

MOST_KINDS = 2048
"""Different sizes that are counted. After that, a new size counts as the next larger of these."""
SAVE_SECONDS = 60.0
CLOSE_SECONDS = 5.0  # how long a stopping replica waits for a folder that hangs
LEAST_ITEMS = 1000  # for writing the file: fewer say little, and would replace a larger count
MOST_BYTES = 2**20  # of the file
UNSEEN = 0.05
"""Learned budgets expect this share of packs at the default budgets, in equal parts, so that sizes
that were never seen get little padding too."""


class ItemTokens:
    """Counts items by their tokens. Only one thread may add."""

    def __init__(self) -> None:
        self._counts: dict[PathTokens, int] = {}
        self._kept: list[PathTokens] = []  # all sizes, sorted, once there is no room for more

    def add(self, tokens: PathTokens, count: int = 1) -> None:
        if tokens not in self._counts and len(self._counts) >= MOST_KINDS:
            self._kept = self._kept or sorted(self._counts)
            tokens = self._kept[min(bisect_left(self._kept, tokens), MOST_KINDS - 1)]
        self._counts[tokens] = self._counts.get(tokens, 0) + count

    @classmethod
    def sum(cls, documents: Iterable[Mapping[str, int]]) -> Self:
        total = cls()
        for document in documents:
            for tokens, count in document.items():
                total.add(path_tokens(tokens), count)
        return total

    def document(self) -> dict[str, int]:
        """Counts by the tokens of each path, joined by spaces. May be called from any thread."""
        counts = dict(self._counts)
        return {" ".join(map(str, tokens)): counts[tokens] for tokens in sorted(counts)}


def path_tokens(key: str) -> PathTokens:
    return tuple(map(int, key.split()))


def counts_of(document: Any, spec: ModelSpec) -> dict[PathTokens, int]:
    """Reads `item_tokens` of GET /v1/status, or of the file. Raises ConfigError."""
    found = document.get("item_tokens") if isinstance(document, Mapping) else None
    if not isinstance(found, Mapping):
        raise ConfigError("it has no item_tokens")
    if document.get("model") != spec.id:
        raise ConfigError(f"it counts items of {document.get('model')!r}, not of {spec.id}")
    if not found:
        raise ConfigError("it counts no items yet")
    counts = {}
    for key, count in found.items():
        try:
            tokens = path_tokens(key)
        except ValueError:
            tokens = ()
        if len(tokens) != len(spec.paths) or min(tokens) < 0 or type(count) is not int or count < 1:
            raise ConfigError(f"item_tokens: {key!r}: {count!r} is not tokens and a count")
        counts[tokens] = count
    return counts


class SizesFile:
    """Writes the counts every minute and when closed, in its own thread."""

    def __init__(self, path: str, model: str, counted: ItemTokens) -> None:
        self.path = Path(path)
        self.model = model
        self.counted = counted
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sizes", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(SAVE_SECONDS):
            self.save()
        self.save()

    def save(self) -> None:
        """Replaces the file atomically, because other replicas on this node may write it too."""
        counts = self.counted.document()
        if sum(counts.values()) < LEAST_ITEMS:
            return
        part = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"model": self.model, "item_tokens": counts}))
            part.replace(self.path)
        except OSError as error:
            log.warning("graphs.sizes_file was not written: %s", error)

    def close(self) -> None:
        self._closed.set()
        self._thread.join(CLOSE_SECONDS)


def learned(path: str, room: Capacity, spec: ModelSpec) -> Capacity:
    """`room` with as many budgets, planned for the items that the file counted.

    If the file cannot be used, logs a warning and returns `room` unchanged: the replica always
    starts.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            counts = counts_of(json.loads(file.read(MOST_BYTES)), spec)
        loads = pack_loads(counts, room)
        ladders = planned_ladders(loads, room, spec.sizing, unseen=UNSEEN)
    except Exception as error:
        log.warning(
            "graphs.sizes_file: no sizes to learn from; capturing the default budgets: %s: %s",
            type(error).__name__,
            error,
        )
        return room
    log.info("budgets learned from %d items in %s: %s", sum(counts.values()), path, ladders)
    # Budget 0, for packs without tokens on the path, is kept.
    zeros = (budgets[:1] if budgets[0] == 0 else () for budgets in room.budgets)
    return replace(room, budgets=tuple(map(tuple.__add__, zeros, ladders)))
