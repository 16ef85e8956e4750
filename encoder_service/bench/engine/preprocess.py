"""JPEGs to patches, on the CPU and on the GPU: by itself, and ahead of an engine that encodes them.

Everything in one process, as in the encoder actor; rows end in host memory and are dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, process_time

from actors.media.patchify import patchifier_of
from actors.options import ActorOptions, PreprocessOptions
from actors.startup import open_beside, open_decoding, open_engine
from actors.telemetry.metrics import EncoderMetrics
from encoder_service.bench.engine.pipeline import decoding_ahead, dropped, encoding, media, rate

PATCHES_IN_FLIGHT = 2**17
MOST_IN_FLIGHT = 64
"""Images under way at a time, fewer of large ones."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Of images of one size, preprocessed in one way."""

    size: str
    patches: int
    """Of one image."""
    way: str
    images_per_second: float
    """Preprocessed, and dropped."""
    cpu_ms: float
    """Of the processor, all threads of this process, for one of these."""
    switches: float
    """How often these gave the processor away to wait, for one of these."""
    alone_ms: float
    """From bytes to patches, one image at a time."""
    encoded_images_per_second: float
    """Preprocessed and encoded."""
    engine_images_per_second: float
    """Of the engine alone, its items preprocessed before."""


@dataclass(frozen=True, slots=True)
class Spent:
    """By this process."""

    at: float
    cpu_seconds: float
    switches: float

    @classmethod
    def now(cls) -> Spent:
        """Since it began."""
        return cls(perf_counter(), process_time(), getrusage(RUSAGE_SELF).ru_nvcsw)

    def since(self, images_per_second: float) -> Spent:
        """From then to now, on each of so many images."""
        now = Spent.now()
        images = images_per_second * (now.at - self.at)
        cpu, switches = now.cpu_seconds - self.cpu_seconds, now.switches - self.switches
        return Spent(now.at, cpu / images, switches / images)


def named(way: PreprocessOptions) -> str:
    """As the table says it."""
    if way.device == "cuda":
        return "GPU"
    if way.processes:
        return f"CPU, {way.processes} processes"
    return f"CPU, {way.threads} threads"


def measure(
    options: ActorOptions,
    pictures: Mapping[str, Sequence[bytes]],
    ways: Sequence[PreprocessOptions],
    seconds: float,
    report: Callable[[str], None],
) -> list[Figure]:
    """Each way for each size; each figure takes so many seconds. Raises StartError."""
    series, found = EncoderMetrics(), []
    report(f"starting the engine of {options.model.id} ...")
    engine = open_engine(options, series)
    patchifier = patchifier_of(engine.tower.spec)
    for size, files in pictures.items():
        sent = [media(patchifier, file) for file in files]
        report(f"{size} ...")
        patches = sent[0].plan.patches
        in_flight = max(1, min(MOST_IN_FLIGHT, PATCHES_IN_FLIGHT // patches))
        alone = rate(encoding(engine, sent), in_flight, seconds)
        for way in ways:
            chosen = options.model_copy(update={"preprocess": way})
            decoding = open_decoding(chosen, engine, series, open_beside(chosen, series))
            before = Spent.now()
            images = rate(decoding_ahead(decoding, sent, dropped), in_flight, seconds)
            spent = before.since(images)
            one_by_one = rate(decoding_ahead(decoding, sent, dropped), 1, seconds)
            encoded = rate(decoding_ahead(decoding, sent, engine.submit), in_flight, seconds)
            decoding.close()
            found.append(
                Figure(
                    size=size,
                    patches=patches,
                    way=named(way),
                    images_per_second=images,
                    cpu_ms=spent.cpu_seconds * 1e3,
                    switches=spent.switches,
                    alone_ms=1e3 / one_by_one,
                    encoded_images_per_second=encoded,
                    engine_images_per_second=alone,
                )
            )
    engine.close()
    return found
