"""Measures the engine and the decoding ahead of it, in one process without a service.

`measure` gives the throughput that `bench serve --alone` compares the service with; `preprocess`
compares ways to decode. Rows end in host memory and are dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import cycle
from resource import RUSAGE_SELF, getrusage
from threading import Lock, Semaphore
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.engine.engine import Engine
from actors.media.decoder import Decoder
from actors.media.image import decode, prepare
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import ActorOptions, PreprocessOptions
from actors.startup import open_engine
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media

WARM_UP_PART = 0.25
"""Length of the warm-up, as a part of the measured time."""
PATCHES_IN_FLIGHT = 2**17
MOST_IN_FLIGHT = 64
"""Maximum images in flight; fewer if they are large."""

Done = Callable[[Future[Any]], None]
Begin = Callable[[Done], None]
"""Starts one item; the callback gets its future when it is done."""

COLUMNS = (
    ("size", "size", "{}"),
    ("way", "way", "{}"),
    ("patches", "patches", "{:d}"),
    ("images_per_second", "decoded", "{:.0f}"),
    ("cpu_ms", "CPU ms", "{:.2f}"),
    ("switches", "switches", "{:.1f}"),
    ("alone_ms", "alone ms", "{:.2f}"),
    ("encoded_images_per_second", "encoded", "{:.0f}"),
    ("encoded_patches_per_second", "patches/s", "{:,.0f}"),
    ("engine_images_per_second", "engine", "{:.0f}"),
)
CAPTION = (
    "patches: per image. decoded: images/s, without encoding. CPU ms: CPU time of the actor's "
    "process per image; switches: its voluntary context switches per image. alone ms: bytes to "
    "patches, one image at a time. encoded: images/s decoded and encoded; patches/s: the same in "
    "patches. engine: images/s encoded, if decoded beforehand."
)


def measure(
    options: ActorOptions, pictures: Sequence[bytes], in_flight: int, seconds: float
) -> tuple[float, float]:
    """Images per second of the engine alone, on images decoded beforehand, and with decoding.

    Each is measured for `seconds` with `in_flight` items in flight. Raises StartError.
    """
    series = EncoderMetrics()
    decoder = Decoder(options.model, options.preprocess, series)
    engine = open_engine(options, series)
    decoder.wait_until_started()
    patchifier = patchifier_of(engine.tower.spec)
    files = [media(patchifier, picture) for picture in pictures]
    alone = rate(encoding(engine, files), in_flight, seconds)
    pipeline = rate(decoding(decoder, files, engine), in_flight, seconds)
    decoder.close()
    engine.close()
    return alone, pipeline


def preprocess(
    options: ActorOptions,
    pictures: Mapping[str, Sequence[bytes]],
    ways: Sequence[PreprocessOptions],
    seconds: float,
    console: Console,
) -> list[dict[str, Any]]:
    """Measures each way for each size, and each figure for `seconds`. Raises StartError."""
    series, found = EncoderMetrics(), []
    console.print(f"starting the engine of {options.model.id} ...")
    engine = open_engine(options, series)
    patchifier = patchifier_of(engine.tower.spec)
    for size, files in pictures.items():
        sent = [media(patchifier, file) for file in files]
        console.print(f"{size} ...")
        patches = sent[0].plan.patches
        in_flight = max(1, min(MOST_IN_FLIGHT, PATCHES_IN_FLIGHT // patches))
        alone = rate(encoding(engine, sent), in_flight, seconds)
        for way in ways:
            chosen = options.model_copy(update={"preprocess": way})
            decoder = Decoder(chosen.model, chosen.preprocess, series)
            decoder.wait_until_started()
            started, before = perf_counter(), spent()
            images = rate(decoding(decoder, sent), in_flight, seconds)
            decoded = images * (perf_counter() - started)
            cpu_seconds, switches = (now - then for now, then in zip(spent(), before, strict=True))
            one_by_one = rate(decoding(decoder, sent), 1, seconds)
            encoded = rate(decoding(decoder, sent, engine), in_flight, seconds)
            decoder.close()
            found.append(
                {
                    "size": size,
                    "way": (
                        f"{way.processes} processes" if way.processes else f"{way.threads} threads"
                    ),
                    "patches": patches,
                    "images_per_second": images,
                    "cpu_ms": cpu_seconds / decoded * 1e3,
                    "switches": switches / decoded,
                    "alone_ms": 1e3 / one_by_one,
                    "encoded_images_per_second": encoded,
                    "encoded_patches_per_second": encoded * patches,
                    "engine_images_per_second": alone,
                }
            )
    engine.close()
    return found


def table(rows: Sequence[dict[str, Any]], model: str) -> Table:
    shown = Table(title=f"JPEGs to patches, {model}", caption=CAPTION, caption_justify="left")
    for key, name, _ in COLUMNS:
        shown.add_column(name, justify="left" if key in ("size", "way") else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*(pattern.format(row[key]) for key, _, pattern in COLUMNS))
    return shown


def spent() -> tuple[float, int]:
    """CPU seconds and voluntary context switches of this process so far."""
    return process_time(), getrusage(RUSAGE_SELF).ru_nvcsw


def media(patchifier: Patchifier, picture: bytes) -> Media:
    """A file as the ingress would send it."""
    return Media("image", picture, patchifier.patchify(decode(picture))[0], digest="")


def encoding(engine: Engine, files: Sequence[Media]) -> Begin:
    """Encodes the files in turn, decoded beforehand."""
    patchifier = patchifier_of(engine.tower.spec)
    items = cycle([prepare(patchifier, one) for one in files])

    def begin(done: Done) -> None:
        engine.submit(next(items)).add_done_callback(done)

    return begin


def decoding(decoder: Decoder, files: Sequence[Media], engine: Engine | None = None) -> Begin:
    """Decodes files, in turn, and encodes them if there is an engine."""
    media = cycle(files)

    def begin(done: Done) -> None:
        decoder.submit(next(media)).add_done_callback(partial(decoded, done))

    def decoded(done: Done, item: Future[Item]) -> None:
        if engine is None or item.exception():
            done(item)
        else:
            engine.submit(item.result()).add_done_callback(done)

    return begin


def rate(begin: Begin, in_flight: int, seconds: float) -> float:
    """Items done per second, with `in_flight` in flight. Raises the error of the first failure."""
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
        """Begins items until the time is over, then waits for those in flight."""
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
