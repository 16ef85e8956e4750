"""Callers that never pause and check every answer against rows that are known to be right."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from encoder_service.bench.cluster import Cluster
from encoder_service.client import Client, Embedding, ServiceError

Rows = np.ndarray[Any, Any]

TOLERANCE = 1e-3
"""float32; an item may share other packs than it did when it was alone."""
BAD = b"not an image"


@dataclass(slots=True)
class Phase:
    """What came of the requests that ended while one fault was there."""

    latencies_seconds: list[float] = field(default_factory=list)
    """Of those that were answered right."""
    failed: Counter[str] = field(default_factory=Counter)
    """By the type of the error; `connection`: the client lost it, and cannot know."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are not what was asked for: never allowed."""


class Callers:
    """HTTP and gRPC callers over known files; `phase` is where they note their outcomes."""

    def __init__(self, where: Cluster, known: Mapping[bytes, Rows]) -> None:
        self.known = known
        self.phase = Phase()
        self._stop = threading.Event()
        urls = [where.http, where.http, where.grpc]
        self._threads = [
            threading.Thread(target=self._call, args=(url, Random(seed)), daemon=True)
            for seed, url in enumerate(urls)
        ]

    def start(self) -> None:
        """Begins to call."""
        for thread in self._threads:
            thread.start()

    def next_phase(self) -> Phase:
        """Outcomes go to a new one from here on."""
        ended, self.phase = self.phase, Phase()
        return ended

    def stop(self) -> None:
        """Waits for the last answers. Raises RuntimeError for one that never comes."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=180)
            if thread.is_alive():
                raise RuntimeError("a request was never answered")

    def _call(self, url: str, random: Random) -> None:
        with Client(url, retries=0, timeout_seconds=120) as client:
            while not self._stop.is_set():
                files = random.choices([*self.known, BAD], k=random.randint(1, 5))
                started = time.monotonic()
                try:
                    answers = client.encode(files, "float32", on_error="return")
                except ServiceError as error:
                    lost = error.status is None or "UNAVAILABLE" in str(error.status)
                    self.phase.failed["connection" if lost else error.type] += 1
                    time.sleep(0.2)
                    continue
                if problem := self._problem(files, answers):
                    self.phase.wrong.append(problem)
                else:
                    self.phase.latencies_seconds.append(time.monotonic() - started)

    def _problem(
        self, files: Sequence[bytes], answers: Sequence[Embedding | ServiceError]
    ) -> str | None:
        """What is wrong with the answers; None: nothing."""
        if len(files) != len(answers):
            return f"{len(answers)} answers to {len(files)} items"
        for file, answer in zip(files, answers, strict=True):
            if isinstance(answer, ServiceError):
                if file != BAD:
                    self.phase.failed[f"item: {answer.type}"] += 1
            elif file == BAD:
                return "an embedding of what is no image"
            elif np.abs(answer.numpy() - self.known[file]).max() > TOLERANCE:
                return "rows of another item"
        return None
