"""Callers that check every answer against rows that are known to be right."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from encoder_service.client import Client
from tests.chaos.sources import BAD, Failed, Rows, Source
from tests.images import jpeg

TOLERANCE, GPU_TOLERANCE = 1e-3, 5e-2
"""Of the largest value in float32, and in bfloat16 on a GPU: an item may share other packs than it
did when it was alone. Rows of another item are as far off as the values are large."""
SIDES = (48, 64, 96, 120, 160, 200, 256)


IMAGES = [jpeg(side, SIDES[-1 - place]) for place, side in enumerate(SIDES)]


def known_files(client: Client, images: Sequence[bytes] = IMAGES) -> dict[bytes, Rows]:
    """Images and the rows that the service gives for each alone, while nothing is wrong."""
    return {image: client.encode([image], "float32")[0].numpy() for image in images}


@dataclass(slots=True)
class Phase:
    """What came of the requests that ended in a while."""

    latencies_seconds: list[float] = field(default_factory=list)
    """Of those that were answered right."""
    failed: Counter[str] = field(default_factory=Counter)
    """By the type of the error; `connection`: the caller lost it, and cannot know."""
    messages: set[str] = field(default_factory=set)
    """Of these."""
    wrong: list[str] = field(default_factory=list)
    """Answers that are not what was asked for: never allowed."""

    def add(self, other: Phase) -> None:
        self.latencies_seconds += other.latencies_seconds
        self.failed += other.failed
        self.messages |= other.messages
        self.wrong += other.wrong


class Callers:
    """One thread a source; `phase` is where they note their outcomes."""

    def __init__(
        self,
        sources: Sequence[Source],
        known: Mapping[bytes, Rows],
        pause_seconds: float = 0,
        tolerance: float = TOLERANCE,
    ) -> None:
        """`pause_seconds`: between two requests of a caller, on average."""
        self.known = known
        self.pause_seconds = pause_seconds
        self.tolerance = tolerance
        self.phase = Phase()
        self.unanswered: set[int] = set()
        """Callers whose request has not been answered yet."""
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(source, number), daemon=True)
            for number, source in enumerate(sources)
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
        """Waits for the last answers. Raises RuntimeError for one that never comes, also because
        its caller has ended."""
        self._stop.set()
        end = time.monotonic() + 180
        for thread in self._threads:
            thread.join(timeout=max(0, end - time.monotonic()))
        if self.unanswered or any(thread.is_alive() for thread in self._threads):
            raise RuntimeError(f"{len(self.unanswered)} requests were never answered")

    def _call(self, source: Source, number: int) -> None:
        random = Random(number)
        with source() as encode:
            while not self._stop.wait(random.uniform(0, 2 * self.pause_seconds)):
                files = random.choices([*self.known, BAD], k=random.randint(1, 5))
                self.unanswered.add(number)
                started = time.monotonic()
                try:
                    answers = encode(files)
                except Failed as error:
                    self.phase.failed[error.kind] += 1
                    self.phase.messages.add(str(error)[:300])
                    self.unanswered.discard(number)
                    time.sleep(0.2)
                    continue
                if problem := self._problem(files, answers):
                    self.phase.wrong.append(problem)
                else:
                    self.phase.latencies_seconds.append(time.monotonic() - started)
                self.unanswered.discard(number)

    def _problem(self, files: Sequence[bytes], answers: Sequence[Rows | str]) -> str | None:
        """What is wrong with the answers; None: nothing."""
        if len(files) != len(answers):
            return f"{len(answers)} answers to {len(files)} items"
        for file, answer in zip(files, answers, strict=True):
            if isinstance(answer, str):
                if file != BAD:
                    self.phase.failed[f"item: {answer}"] += 1
            elif file == BAD:
                return "an embedding of what is no image"
            elif not self._same(answer, self.known[file]):
                return "rows of another item"
        return None

    def _same(self, rows: Rows, known: Rows) -> bool:
        if rows.shape != known.shape:
            return False
        return bool(np.abs(rows - known).max() <= self.tolerance * np.abs(known).max())
