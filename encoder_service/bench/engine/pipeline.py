"""What one engine does for JPEGs, alone in its process: what the service around it is held against.

Twice: items that were decoded before, which is the engine's own throughput, and what decodes ahead
of it in the encoder actor. Rows end in host memory and are dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from threading import Lock, Semaphore
from time import perf_counter
from typing import Any

from actors.engine.engine import Engine
from actors.media.decoding import Decoding
from actors.media.image import decode, prepare
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import ActorOptions
from actors.startup import open_beside, open_decoding, open_engine
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media

WARM_UP_PART = 0.25
"""Of the time that is measured, before it."""

Done = Callable[[Future[Any]], None]
Begin = Callable[[Done], None]
"""Starts one, which calls what it is given at its end."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Images a second."""

    engine: float
    """Of items decoded before."""
    pipeline: float
    """With decoding, as `preprocess` says."""


def measure(
    options: ActorOptions, pictures: Sequence[bytes], in_flight: int, seconds: float
) -> Throughput:
    """Each for so many seconds, with so many items under way at a time."""
    series = EncoderMetrics()
    beside = open_beside(options, series)
    engine = open_engine(options, series)
    decoding = open_decoding(options, engine, series, beside)
    patchifier = patchifier_of(engine.tower.spec)
    files = [media(patchifier, picture) for picture in pictures]
    begins = encoding(engine, files), decoding_ahead(decoding, files, engine.submit)
    found = [rate(begin, in_flight, seconds) for begin in begins]
    decoding.close()
    engine.close()
    return Throughput(*found)


@dataclass(frozen=True, slots=True)
class Wanted:
    """See Asked."""

    media: Media
    given_up: bool = False


def media(patchifier: Patchifier, picture: bytes) -> Media:
    """What ingress would make of a file."""
    return Media("image", picture, patchifier.patchify(decode(picture))[0], digest="")


def encoding(engine: Engine, files: Sequence[Media]) -> Begin:
    """Items that were decoded before, in turn."""
    patchifier = patchifier_of(engine.tower.spec)
    items = cycle([prepare(patchifier, one) for one in files])

    def begin(done: Done) -> None:
        engine.submit(next(items)).add_done_callback(done)

    return begin


def decoding_ahead(
    decoding: Decoding, files: Sequence[Media], submit: Callable[[Item], Future[Any]]
) -> Begin:
    """Files that are decoded, in turn, and what becomes of their items."""
    wanted = cycle(map(Wanted, files))

    def begin(done: Done) -> None:
        decoding.begin(next(wanted), partial(decoded, done))

    def decoded(done: Done, started: float, made: Item | Exception) -> None:
        answer = failed(made) if isinstance(made, Exception) else submit(made)
        answer.add_done_callback(done)

    return begin


def failed(error: Exception) -> Future[Any]:
    """Of what could not be decoded."""
    answer: Future[Any] = Future()
    answer.set_exception(error)
    return answer


def dropped(item: Item) -> Future[Any]:
    """Of an item that nobody encodes."""
    answer: Future[Any] = Future()
    answer.set_result(None)
    return answer


def rate(begin: Begin, in_flight: int, seconds: float) -> float:
    """How many end in a second. Raises what one failed with."""
    room, lock = Semaphore(in_flight), Lock()
    ended = 0
    failures: list[BaseException] = []

    def done(answer: Future[Any]) -> None:
        nonlocal ended
        with lock:
            ended += 1
        if error := answer.exception():
            failures.append(error)
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
        if failures:
            raise failures[0]
        return (ended - before) / (perf_counter() - started)

    for_a_while(WARM_UP_PART * seconds)
    return for_a_while(seconds)
