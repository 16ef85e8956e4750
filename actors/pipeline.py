"""An item's way through the actor: decode -> engine -> shared memory, a set of threads each.

The event loop hears of a call once, when all of its items are through: thousands of items a second
leave it nothing for several tasks and timers an item. Rows of one call that leave the engine
together are shared together. Knows neither Serve nor requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import monotonic

from torch import Tensor

from actors.engine.encoded import Encoded
from actors.engine.engine import Engine
from actors.errors import Unavailable
from actors.media.decoder import Decoder
from actors.store.cache import Entry
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media, Source

SHARERS = 4
"""Calls whose rows are copied at the same time."""

Share = Callable[[Sequence[tuple[Media, Tensor]]], Sequence[Entry]]
"""Puts the rows of some items where their answers refer to them. In a thread of its own."""


@dataclass(frozen=True, slots=True)
class Made:
    """What became of an item."""

    entry: Entry
    source: Source
    queue_seconds: float
    """Between the last stage and the pack; what was before decoding is the work's."""
    encode_seconds: float


@dataclass(slots=True, eq=False)
class Work:
    """One item, from `begin` to its outcome."""

    media: Media
    since: float
    answer: Future[Item] | Future[Encoded] | None = None
    """The decoder's or the engine's, while it has the item and no longer: a future and what it
    calls would hold each other, and a pack's rows wait for the garbage collector."""
    given_up: bool = False
    """Nobody waits for it any more."""
    queue_seconds: float = 0.0
    """Before it was decoded."""
    preprocess_seconds: float = 0.0
    decoded: float = 0.0
    """When it was, and when its rows were there: of the clock of time.monotonic."""
    landed: float = 0.0
    outcome: Made | Exception | None = None


class Call:
    """Items that are waited for together. Made in the event loop that waits."""

    def __init__(self, media: Sequence[Media], share: Share) -> None:
        now = monotonic()
        self.share = share
        self.works = [Work(one, now) for one in media]
        self._left = len(self.works)
        self._landed: list[tuple[Work, Future[Encoded]]] = []
        self._lock = Lock()
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        if not self.works:
            self._done.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Until all have their outcome, or the time is over: the rest is given up."""
        try:
            await asyncio.wait([self._done], timeout=seconds)
        finally:
            for work in self.works:
                work.given_up = True  # first: a thread that submits it now looks afterwards
                if answer := work.answer:
                    answer.cancel()

    def land(self, work: Work, answer: Future[Encoded]) -> bool:
        """One more has left the engine. True: those that have are to be shared, by the caller."""
        with self._lock:
            self._landed.append((work, answer))
            return len(self._landed) == 1

    def landed(self) -> list[tuple[Work, Future[Encoded]]]:
        """Those that are to be shared now; they are yours."""
        with self._lock:
            taken, self._landed = self._landed, []
        return taken

    def settle(self, works: Sequence[Work]) -> None:
        """They have their outcome."""
        with self._lock:
            self._left -= len(works)
            if self._left:
                return
        with suppress(RuntimeError):  # the loop was closed: nobody waits
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class Stages:
    """The threads of one actor."""

    def __init__(self, engine: Engine, decoder: Decoder, series: EncoderMetrics) -> None:
        self.engine = engine
        self.series = series
        self._decoder = decoder
        self._sharers = ThreadPoolExecutor(SHARERS, "share")
        self._closed = False

    def begin(self, media: Sequence[Media], share: Share) -> Call:
        """Starts these; to be waited for in the event loop that this is called from.

        Raises Unavailable once closed: a router that heard late still calls a replica that drained.
        """
        if self._closed:
            raise Unavailable("this encoder is stopping: try again")
        call = Call(media, share)
        for work in call.works:
            try:
                work.answer = answer = self._decoder.submit(work.media)
            except Unavailable as error:
                work.outcome = error
                call.settle([work])
            else:
                answer.add_done_callback(partial(self._decoded, call, work))
        return call

    def alive(self) -> bool:
        """Whether items are decoded."""
        return self._decoder.alive()

    def close(self) -> None:
        """What is in the engine is answered; what is not yet decoded is refused by it."""
        self._closed = True
        self.engine.close()
        self._decoder.close()
        self._sharers.shutdown()

    def _decoded(self, call: Call, work: Work, decoded: Future[Item]) -> None:
        work.answer = None
        if decoded.cancelled():
            return
        try:
            item = decoded.result()
            work.decoded = monotonic()
            work.queue_seconds = item.decode_queue_seconds
            work.preprocess_seconds = item.preprocess_seconds
            self.series.decode_queue_seconds.observe(work.queue_seconds)
            self.series.preprocess_seconds.observe(work.preprocess_seconds)
            on_device = work.media.on_device
            work.answer = answer = self.engine.submit(item, on_device=on_device)
        except Exception as error:
            work.outcome = error
            call.settle([work])
        else:
            if work.given_up:
                answer.cancel()
            answer.add_done_callback(partial(self._landed, call, work))

    def _landed(self, call: Call, work: Work, answer: Future[Encoded]) -> None:
        """In the engine's thread, which has more to do: the first of a pack wakes a sharer."""
        work.answer = None
        work.landed = monotonic()
        if not answer.cancelled() and call.land(work, answer):
            self._sharers.submit(self._finish, call)

    def _finish(self, call: Call) -> None:
        """Those of one pack, and what else has landed meanwhile."""
        landed, good = call.landed(), []
        for work, answer in landed:
            error = answer.exception()
            if isinstance(error, Exception):
                work.outcome = error
            else:
                good.append((work, answer.result()))
        try:
            entries = call.share([(work.media, encoded.rows) for work, encoded in good])
        except Exception as error:
            for work, _ in good:
                work.outcome = error
        else:
            for (work, encoded), entry in zip(good, entries, strict=True):
                work.outcome = Made(
                    entry, encoded.source, encoded.queue_seconds, encoded.encode_seconds
                )
        call.settle([work for work, _ in landed])
