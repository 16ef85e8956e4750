"""JPEGs to patches, on the CPU and on the GPU: by itself, and ahead of an engine that encodes them.

Everything in one process, as in the encoder actor; rows end in host memory and are dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from actors.bench.pipeline import decoding_ahead, dropped, encoding, media, rate
from actors.metrics import EncoderMetrics
from actors.options import ActorOptions, PreprocessOptions
from actors.startup import open_decoding, open_engine

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
    """Of the processor, all threads, for one of these."""
    alone_ms: float
    """From bytes to patches, one image at a time."""
    encoded_images_per_second: float
    """Preprocessed and encoded."""
    engine_images_per_second: float
    """Of the engine alone, its items preprocessed before."""


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
    for size, files in pictures.items():
        sent = [media(engine.tower, file) for file in files]
        report(f"{size} ...")
        patches = sent[0].plan.patches
        in_flight = max(1, min(MOST_IN_FLIGHT, PATCHES_IN_FLIGHT // patches))
        alone = rate(encoding(engine, sent), in_flight, seconds)
        for way in ways:
            chosen = options.model_copy(update={"preprocess": way})
            decoding = open_decoding(chosen, engine, series)
            began, spent = perf_counter(), process_time()
            images = rate(decoding_ahead(decoding, sent, dropped), in_flight, seconds)
            busy = (process_time() - spent) / (perf_counter() - began)
            one_by_one = rate(decoding_ahead(decoding, sent, dropped), 1, seconds)
            encoded = rate(decoding_ahead(decoding, sent, engine.submit), in_flight, seconds)
            decoding.close()
            name = "GPU" if way.device == "cuda" else f"CPU, {way.threads} threads"
            found.append(
                Figure(
                    size=size,
                    patches=patches,
                    way=name,
                    images_per_second=images,
                    cpu_ms=busy / images * 1e3,
                    alone_ms=1e3 / one_by_one,
                    encoded_images_per_second=encoded,
                    engine_images_per_second=alone,
                )
            )
    engine.close()
    return found
