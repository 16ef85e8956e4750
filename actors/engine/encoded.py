"""What the engine answers with, and how the answers of a video's runs become one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from actors.types import Source


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the engine made of one item."""

    parts: tuple[Tensor, ...]
    """[tokens, width] each, in the tower's dtype, in host memory or where they were to stay: of
    each run of a video that was cut into runs, else one. Views of their packs' rows."""
    source: Source
    queue_seconds: float
    encode_seconds: float

    @property
    def rows(self) -> Tensor:
        """[tokens, width]. Of several parts a copy: much to do, and not for the engine's thread."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)


def joined(answers: Sequence[Future[Encoded]]) -> Future[Encoded]:
    """One answer for the runs of one video, when the last of them is there or the first fails.

    What has not begun then is cancelled, as it is when the answer itself is cancelled.
    """
    whole: Future[Encoded] = Future()
    # Let go of when `whole` is done: futures that hold each other would keep their packs' rows
    # until the garbage collector comes.
    runs = list(answers)

    def landed(answer: Future[Encoded]) -> None:
        left = runs.copy()
        if not left or answer.cancelled():  # ended before
            return
        with suppress(InvalidStateError):  # cancelled just now
            if error := answer.exception():
                whole.set_exception(error)
            elif all(one.done() and not one.cancelled() for one in left):
                whole.set_result(together([one.result() for one in left]))

    def ended(_: Future[Encoded]) -> None:
        left = runs.copy()
        runs.clear()
        for answer in left:
            answer.cancel()

    whole.add_done_callback(ended)
    for answer in answers:
        answer.add_done_callback(landed)
    return whole


def together(runs: Sequence[Encoded]) -> Encoded:
    """Runs that were submitted at the same time, in order: from the first start to the last end."""
    queue = min(run.queue_seconds for run in runs)
    end = max(run.queue_seconds + run.encode_seconds for run in runs)
    source: Source = "eager" if any(run.source == "eager" for run in runs) else "graph"
    return Encoded(
        tuple(chain.from_iterable(run.parts for run in runs)), source, queue, end - queue
    )
