"""What one engine does for JPEGs, alone in its process: what the service around it is held against.

Twice: items that were decoded before, which is the engine's own throughput, and decoding threads
ahead of it as in the encoder actor. Rows end in host memory and are dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from threading import Semaphore
from time import perf_counter
from typing import Any

from actors.engine import Engine
from actors.metrics import EncoderMetrics
from actors.models.tower import Tower
from actors.options import ActorOptions
from actors.preprocess import decode
from actors.startup import open_engine
from actors.types import Item

WARM_UP_PART = 0.25
"""Of the time that is measured, before it."""

Done = Callable[[Future[Any]], None]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Images a second."""

    engine: float
    """Of items decoded before."""
    pipeline: float
    """With decoding, `preprocess.threads` at a time."""


def measure(
    options: ActorOptions, pictures: Sequence[bytes], in_flight: int, seconds: float
) -> Throughput:
    """Each for so many seconds, with so many items under way at a time."""
    engine = open_engine(options, EncoderMetrics())
    items = cycle([prepared(engine.tower, picture) for picture in pictures])
    files = cycle(pictures)
    with ThreadPoolExecutor(options.preprocess.threads, "decode") as threads:

        def encode(done: Done) -> None:
            engine.submit(next(items)).add_done_callback(done)

        def decode_and_encode(done: Done) -> None:
            threads.submit(through, engine, next(files), done)

        found = [rate(begin, in_flight, seconds) for begin in (encode, decode_and_encode)]
    engine.close()
    return Throughput(*found)


def through(engine: Engine, picture: bytes, done: Done) -> None:
    """One image all the way."""
    engine.submit(prepared(engine.tower, picture)).add_done_callback(done)


def prepared(tower: Tower, picture: bytes) -> Item:
    """As the encoder actor prepares it."""
    return Item(*tower.patchify(decode(picture)))


def rate(begin: Callable[[Done], None], in_flight: int, seconds: float) -> float:
    """How many end in a second. `begin` starts one, which calls what it is given at its end."""
    room = Semaphore(in_flight)
    ended = 0

    def done(answer: Future[Any]) -> None:
        nonlocal ended
        answer.result()  # a failure is no throughput
        ended += 1
        room.release()

    def for_a_while(seconds: float) -> float:
        """Until so many seconds are over, then until all have ended."""
        before, started = ended, perf_counter()
        while perf_counter() < started + seconds:
            room.acquire()
            begin(done)
        for _ in range(in_flight):
            room.acquire()
        room.release(in_flight)
        return (ended - before) / (perf_counter() - started)

    for_a_while(WARM_UP_PART * seconds)
    return for_a_while(seconds)
