"""Who makes items of media, ahead of the device: threads, processes, or the GPU JPEGs together.

Knows neither calls nor the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import Protocol

from actors.media.image import prepare
from actors.media.nvjpeg import MOST_PIXELS
from actors.media.patchify import Patchifier
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media

log = logging.getLogger("ray.serve")

MOST_TOGETHER = 32
"""Images of a batch: what comes meanwhile waits for all of it."""


class Asked(Protocol):
    """An item that somebody waits for."""

    @property
    def media(self) -> Media:
        """What it is made of."""

    @property
    def given_up(self) -> bool:
        """Nobody waits for it any more."""


Done = Callable[[float, Item | Exception], None]
"""Called with the time, of time.monotonic, when it was begun, and with what came of it."""

Begun = tuple[Asked, Done]


class Together(Protocol):
    """Makes items of several media at a time, for one thread."""

    def pixels(self, media: Media) -> int:
        """Of an image that it takes; 0: it does not. Never raises."""

    def prepare(self, media: Sequence[Media]) -> list[Item]:
        """Of those that it takes, their patches written. Raises whatever is wrong with one."""


class Beside(Protocol):
    """Makes items one by one, outside of this interpreter. See DecodeProcesses."""

    def takes(self, media: Media) -> bool:
        """Whether it can make this one."""

    def begin(self, asked: Asked, done: Done) -> None:
        """Makes an item that it takes, unless it is given up before its turn comes."""

    def alive(self) -> bool:
        """Whether it makes what is begun."""

    def close(self) -> None:
        """When all that was begun is done."""


class Decoding:
    """`begin` may be called from any thread; `Done` is called in another.

    What `beside`, where it is given, and `together` do not take is for the threads here.
    """

    def __init__(
        self,
        patchifier: Patchifier,
        threads: int,
        series: EncoderMetrics,
        together: Together | None = None,
        beside: Beside | None = None,
    ) -> None:
        self.patchifier = patchifier
        self.series = series
        self.together = together
        self.beside = beside
        self._threads = ThreadPoolExecutor(threads, "decode")
        self._waiting: SimpleQueue[Begun | None] = SimpleQueue()
        if together:
            self._gathering = Thread(
                target=self._gather, args=(together,), name="decode-together", daemon=True
            )
            self._gathering.start()

    def begin(self, asked: Asked, done: Done) -> None:
        """Makes its item, unless it is given up before its turn comes."""
        if self.together and asked.media.kind == "image":
            self._waiting.put((asked, done))
        else:
            self._one(asked, done)

    def alive(self) -> bool:
        """Whether what is begun is made."""
        return self.beside is None or self.beside.alive()

    def close(self) -> None:
        """When all that was begun is done."""
        if self.together:
            self._waiting.put(None)
            self._gathering.join()
        if self.beside:
            self.beside.close()
        self._threads.shutdown()

    def _one(self, asked: Asked, done: Done) -> None:
        if self.beside and self.beside.takes(asked.media):
            self.beside.begin(asked, done)
        else:
            self._threads.submit(self._alone, asked, done)

    def _alone(self, asked: Asked, done: Done) -> None:
        if asked.given_up:
            return
        started = monotonic()
        try:
            made: Item | Exception = prepare(self.patchifier, asked.media)
        except Exception as error:
            made = error
        else:
            self.series.preprocessed.labels("cpu").inc()
        done(started, made)

    def _gather(self, together: Together) -> None:
        while self._gathered(together):
            pass

    def _gathered(self, together: Together) -> bool:
        """All that waits, as soon as the batch before is done. False: closed.

        Returns before it waits again, so that nothing keeps what is done.
        """
        begun = [self._waiting.get()]
        with suppress(Empty):
            while begun[-1] and len(begun) < MOST_TOGETHER:
                begun.append(self._waiting.get_nowait())
        for batch in self._batches(together, [each for each in begun if each]):
            self._prepare(together, batch)
        return begun[-1] is not None

    def _batches(self, together: Together, begun: Sequence[Begun]) -> Iterator[list[Begun]]:
        """Those that are taken, MOST_PIXELS at a time; the others first go their own way."""
        taken: list[tuple[int, Begun]] = []
        for asked, done in begun:
            if pixels := together.pixels(asked.media):
                taken.append((pixels, (asked, done)))
            else:
                self._one(asked, done)
        batch: list[Begun] = []
        total = 0
        for pixels, one in taken:
            if total + pixels > MOST_PIXELS and batch:
                yield batch
                batch, total = [], 0
            if not one[0].given_up:  # perhaps while the batch before was decoded
                batch.append(one)
                total += pixels
        if batch:
            yield batch

    def _prepare(self, together: Together, batch: Sequence[Begun]) -> None:
        """In halves where it fails: one that cannot be decoded so costs the others little."""
        started = monotonic()
        made: list[Item] | str
        try:
            made = together.prepare([asked.media for asked, _ in batch])
        except Exception as error:
            made = str(error)  # no more of it: its frames hold what was decoded on the device
        if isinstance(made, str) and len(batch) > 1:
            middle = len(batch) // 2
            self._prepare(together, batch[:middle])
            self._prepare(together, batch[middle:])
        elif isinstance(made, str):
            log.warning("a JPEG is decoded on the CPU instead: %s", made)
            self._one(*batch[0])
        else:
            self.series.preprocessed.labels("cuda").inc(len(made))
            for (_, done), item in zip(batch, made, strict=True):
                done(started, item)
