"""Who decodes what: one by one on the host, or JPEGs together, here on the host as well."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from actors.errors import InvalidMedia
from actors.families import registry
from actors.media.decoding import MOST_TOGETHER, Decoding, Done
from actors.media.image import decode, prepare
from actors.media.nvjpeg import MOST_PIXELS, Nvjpeg, plain
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import (
    ActorOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media, Size
from encoder_service.bench.engine.preprocess import measure
from tests.images import encoded, jpeg, opened

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")


class HostTogether:
    """Takes plain JPEGs, as nvJPEG; a gate holds its batches."""

    def __init__(self, patchifier: Patchifier) -> None:
        self.patchifier = patchifier
        self.gate = threading.Event()
        self.batches: list[int] = []
        self.refused: bytes | None = None
        self.each = 0
        """Pixels that every image is said to have; 0: its own."""

    def pixels(self, media: Media) -> int:
        size = plain(media.data)
        return (self.each or size.width * size.height) if size else 0

    def prepare(self, media: Sequence[Media]) -> list[Item]:
        assert self.gate.wait(60)
        self.batches.append(len(media))
        if any(one.data == self.refused for one in media):
            raise RuntimeError("nvJPEG: bad file")
        return [Item(*self.patchifier.patchify(decode(one.data))) for one in media]


@dataclass
class Waiting:
    media: Media
    given_up: bool = False
    made: Item | Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


@dataclass
class Rig:
    decoding: Decoding
    together: HostTogether
    series: EncoderMetrics

    def waiting(self, data: bytes, size: tuple[int, int]) -> tuple[Waiting, Done]:
        plan = self.decoding.patchifier.spec.sizing.plan(Size(*size))
        waiting = Waiting(Media("image", data, plan, digest=""))

        def done(started: float, made: Item | Exception) -> None:
            waiting.made = made
            waiting.done.set()

        return waiting, done

    def begin(self, data: bytes, size: tuple[int, int]) -> Waiting:
        waiting, done = self.waiting(data, size)
        self.decoding.begin(waiting, done)
        return waiting

    def finish(self, begun: Sequence[Waiting]) -> None:
        self.together.gate.set()
        assert all(each.done.wait(60) for each in begun)

    def ways(self) -> dict[str, float]:
        count = self.series.registry.get_sample_value
        name = "encoder_preprocessed_items_total"
        return {way: count(name, {"device": way}) or 0 for way in ("cpu", "cuda")}


@pytest.fixture(scope="module")
def patchifier() -> Patchifier:
    return patchifier_of(registry.read(MODEL))


@pytest.fixture
def rig(patchifier: Patchifier) -> Iterator[Rig]:
    together, series = HostTogether(patchifier), EncoderMetrics()
    rig = Rig(Decoding(patchifier, 2, series, together), together, series)
    yield rig
    together.gate.set()
    rig.decoding.close()


def same(one: Any, other: Any) -> bool:
    return isinstance(one, Item) and torch.equal(
        torch.as_tensor(one.patches), torch.as_tensor(other.patches)
    )


def test_what_waits_is_decoded_together(rig: Rig) -> None:
    count = 2 * MOST_TOGETHER
    begun = [rig.begin(jpeg(64, 32), (64, 32)) for _ in range(count)]
    rig.finish(begun)
    assert sum(rig.together.batches) == count
    assert max(rig.together.batches) == MOST_TOGETHER
    assert len(rig.together.batches) <= 4
    assert rig.ways() == {"cpu": 0, "cuda": count}


def test_a_batch_is_bounded_by_its_pixels(rig: Rig) -> None:
    rig.together.each = MOST_PIXELS // 3
    rig.finish([rig.begin(jpeg(64, 32), (64, 32)) for _ in range(10)])
    assert max(rig.together.batches) == 3


def test_other_files_go_one_by_one(rig: Rig, patchifier: Patchifier) -> None:
    image = opened().resize((96, 64))
    files = {
        "plain": jpeg(96, 64),
        "PNG": encoded(image, "PNG"),
        "turned": encoded(image.resize((64, 96)), "JPEG", orientation=6),
        "CMYK": encoded(image.convert("CMYK"), "JPEG"),
        "cut short": jpeg(96, 64)[:-100],
    }
    begun = {name: rig.begin(data, (96, 64)) for name, data in files.items()}
    rig.finish(list(begun.values()))
    for name, waiting in begun.items():
        if name == "cut short":
            assert isinstance(waiting.made, InvalidMedia)
        else:
            assert same(waiting.made, prepare(patchifier, waiting.media)), name
    assert rig.ways() == {"cpu": 3, "cuda": 1}


@pytest.mark.parametrize("place", [0, 4, 6])
def test_what_fails_takes_no_other_of_its_batch_along(
    rig: Rig, patchifier: Patchifier, place: int
) -> None:
    rig.together.refused = refused = jpeg(64, 64)
    blocker = rig.begin(jpeg(32, 64), (32, 64))
    while rig.decoding._waiting.qsize():
        pass  # until the gate holds it
    sizes = [(32 * (1 + index % 3), 32) for index in range(6)]
    sizes.insert(place, (64, 64))
    begun = [rig.begin(refused if size == (64, 64) else jpeg(*size), size) for size in sizes]
    rig.finish([blocker, *begun])
    assert all(same(each.made, prepare(patchifier, each.media)) for each in begun)
    assert rig.ways() == {"cpu": 1, "cuda": 7}
    assert len(rig.together.batches) <= 2 + 2 * 3, "halved three times at most"


def test_what_is_given_up_is_not_decoded(rig: Rig) -> None:
    blocker = rig.begin(jpeg(32, 32), (32, 32))
    while rig.decoding._waiting.qsize():
        pass  # until the gate holds it
    begun = [rig.begin(jpeg(64, 64), (64, 64)) for _ in range(3)]
    begun[1].given_up = True
    rig.finish([blocker, begun[0], begun[2]])
    assert rig.together.batches == [1, 2]
    assert begun[1].made is None


def test_what_is_done_is_let_go(rig: Rig) -> None:
    waiting = rig.begin(jpeg(64, 32), (64, 32))
    rig.finish([waiting])
    seen = weakref.ref(waiting)
    del waiting
    until = monotonic() + 10
    while seen() and monotonic() < until:
        sleep(0.001)  # until the thread that decoded it waits again
    assert not seen()


def test_other_files_wait_for_no_batch_and_what_is_given_up_for_none(rig: Rig) -> None:
    rig.together.each = MOST_PIXELS  # each JPEG is a batch
    files = [jpeg(32, 32), jpeg(64, 32), encoded(opened(), "PNG"), jpeg(96, 32)]
    sizes = [(32, 32), (64, 32), (600, 400), (96, 32)]
    begun = [rig.waiting(*each) for each in zip(files, sizes, strict=True)]
    batches = rig.decoding._batches(rig.together, begun)
    assert next(batches) == begun[:1]
    assert begun[2][0].done.wait(10), "the PNG is decoded beside the first batch"
    begun[1][0].given_up = True
    assert list(batches) == [begun[3:]]


def test_a_header_of_another_size_is_not_taken(patchifier: Patchifier) -> None:
    nvjpeg = object.__new__(Nvjpeg)  # without a stream of the device
    nvjpeg.patchifier = patchifier
    plan = patchifier.spec.sizing.plan(Size(64, 32))
    sizes = {(64, 32): 64 * 32, (128, 128): 0, (3000, 8): 0}  # the last has no plan at all
    for size, pixels in sizes.items():
        assert nvjpeg.pixels(Media("image", jpeg(*size), plan, digest="")) == pixels


def test_closing_does_what_was_begun(patchifier: Patchifier) -> None:
    together, series = HostTogether(patchifier), EncoderMetrics()
    rig = Rig(Decoding(patchifier, 2, series, together), together, series)
    begun = [rig.begin(jpeg(64, 32), (64, 32)), rig.begin(encoded(opened(), "PNG"), (600, 400))]
    together.gate.set()
    rig.decoding.close()
    assert all(isinstance(each.made, Item) for each in begun)


def test_the_bench_measures() -> None:
    cpu = EncoderOptions(device="cpu", num_gpus=0)
    graphs = GraphOptions(token_budgets=(64, 256), max_frames_per_batch=0)
    options = ActorOptions(model=MODEL, encoder=cpu, graphs=graphs)
    (figure,) = measure(
        options, {"64x64": [jpeg(64, 64)]}, [PreprocessOptions(threads=1)], 0.05, print
    )
    assert (figure.size, figure.patches, figure.way) == ("64x64", 16, "CPU, 1 threads")
    rates = figure.images_per_second, figure.encoded_images_per_second
    assert min(*rates, figure.cpu_ms, figure.alone_ms, figure.switches) > 0
