"""JPEGs to patches, in threads and in processes: alone, and ahead of an engine that encodes them.

Everything in one process, as in the encoder actor; rows end in host memory and are dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage
from time import perf_counter, process_time

from actors.media.decoder import Decoder
from actors.media.patchify import cutter_of
from actors.options import ActorOptions, PreprocessOptions
from actors.startup import open_engine
from actors.telemetry.metrics import EncoderMetrics
from encoder_service.bench.engine.pipeline import decoding_ahead, dropped, encoding, media, rate

PATCHES_IN_FLIGHT = 2**17
MOST_IN_FLIGHT = 64
"""Images in flight at a time; fewer if they are large."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The result for images of one size, decoded in one way."""

    size: str
    patches: int
    """Of one image."""
    way: str
    images_per_second: float
    """Decoded and dropped."""
    cpu_ms: float
    """CPU time of this process per image, all its threads together."""
    switches: float
    """Voluntary context switches of this process per image."""
    alone_ms: float
    """Latency with one image in flight."""
    encoded_images_per_second: float
    """Decoded and encoded."""
    engine_images_per_second: float
    """Encoded only: the items were decoded before."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Time and resources used by this process."""

    at: float
    cpu_seconds: float
    switches: float

    @classmethod
    def now(cls) -> Spent:
        return cls(perf_counter(), process_time(), getrusage(RUSAGE_SELF).ru_nvcsw)

    def since(self, images_per_second: float) -> Spent:
        """From then to now, per image."""
        now = Spent.now()
        images = images_per_second * (now.at - self.at)
        cpu, switches = now.cpu_seconds - self.cpu_seconds, now.switches - self.switches
        return Spent(now.at, cpu / images, switches / images)


def named(way: PreprocessOptions) -> str:
    return f"{way.processes} processes" if way.processes else f"{way.threads} threads"


def measure(
    options: ActorOptions,
    pictures: Mapping[str, Sequence[bytes]],
    ways: Sequence[PreprocessOptions],
    seconds: float,
    report: Callable[[str], None],
) -> list[Figure]:
    """Measures each way for each size, `seconds` per figure. Raises StartError."""
    series, found = EncoderMetrics(), []
    report(f"starting the engine of {options.model.id} ...")
    engine = open_engine(options, series)
    cutter = cutter_of(engine.tower.spec)
    for size, files in pictures.items():
        sent = [media(cutter, file) for file in files]
        report(f"{size} ...")
        patches = sent[0].plan.patches
        in_flight = max(1, min(MOST_IN_FLIGHT, PATCHES_IN_FLIGHT // patches))
        alone = rate(encoding(engine, sent), in_flight, seconds)
        for way in ways:
            chosen = options.model_copy(update={"preprocess": way})
            decoder = Decoder(chosen, series)
            decoder.wait_until_started()
            before = Spent.now()
            images = rate(decoding_ahead(decoder, sent, dropped), in_flight, seconds)
            spent = before.since(images)
            one_by_one = rate(decoding_ahead(decoder, sent, dropped), 1, seconds)
            encoded = rate(decoding_ahead(decoder, sent, engine.submit), in_flight, seconds)
            decoder.close()
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
