"""On a GPU: resizing and cutting equal to the CPU's, nvJPEG's pixels near libjpeg's, and who errs.

Needs torchvision for what decodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from torch import Tensor

from actors.engine.engine import Engine
from actors.errors import InvalidMedia
from actors.media.image import decode
from actors.media.nvjpeg import Nvjpeg, open_nvjpeg
from actors.media.patchify import patchifier_of, resize
from actors.media.resample import Resample
from actors.models.load import build, tensors
from actors.options import (
    ActorOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from actors.pipeline import Made, Stages
from actors.startup import open_decoding, open_engine
from actors.store.cache import Entry
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Media, Size
from encoder_service.bench.mix import picture
from tests.gpu.towers import cuda, relative_error, shallow

pytestmark = pytest.mark.gpu

SIZES = [(336, 336), (1920, 1080), (641, 479), (3000, 200), (57, 31)]

MEAN_DIFFERENCE = 0.15
"""Of a byte of a pixel from libjpeg's. 0 but for rounding in progressive files, and for samples of
chroma all of whose pixels are cut off at 0 or 255."""

ROWS_DIFFERENCE = 0.02
"""Of the rows of an image, relative; in bfloat16 another pack alone gives half of it."""

PRESETS = ("qwen3vl-2b", "qwen25vl-7b", "kimivl-a3b", "internvl3-8b", "llava-onevision-7b")
PRESETS_OF_VIEWS = ("deepseek-ocr", "step3vl-10b")


def noise(width: int, height: int) -> Tensor:
    """uint8 [3, height, width]."""
    generator = torch.Generator().manual_seed(width * height)
    return torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [Size(320, 320), Size(1904, 1064), Size(28, 700)])
def test_resizing_is_equal(size: tuple[int, int], target: Size, mode: Resample) -> None:
    device = cuda().device
    image = noise(*size)
    exact = resize(image, target, mode)
    assert torch.equal(resize(image.to(device), target, mode).cpu(), exact)
    turned = image.transpose(1, 2)  # other strides
    assert torch.equal(resize(turned.to(device), target, mode).cpu(), resize(turned, target, mode))


@pytest.mark.parametrize("preset", PRESETS + PRESETS_OF_VIEWS)
def test_patches_are_equal(preset: str) -> None:
    device = cuda()
    model = shallow(preset)
    weights = tensors(ModelOptions(id=preset, load_format="dummy"), model, device.device)
    tower = build(model, weights, device.device)
    for size in SIZES[:3]:
        image = noise(*size)
        plan, exact = patchifier_of(tower.spec).patchify(image)
        found_plan, found = patchifier_of(tower.spec).patchify(image.to(device.device))
        assert found.is_cuda
        assert found_plan == plan
        assert torch.equal(found.cpu(), exact)


def jpeg(width: int, height: int, seed: int = 0, **options: Any) -> bytes:
    """Something like a photograph."""
    file = BytesIO()
    Image.open(BytesIO(picture(width, height, seed))).save(
        file, "JPEG", **{"quality": 90, **options}
    )
    return file.getvalue()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    cuda()
    pytest.importorskip("torchvision")
    engine = open_engine(options("cpu"), EncoderMetrics())
    yield engine
    engine.close()


def options(device: Any) -> ActorOptions:
    return ActorOptions(
        model=ModelOptions(id="qwen3vl-2b", load_format="dummy"),
        encoder=EncoderOptions(),
        graphs=GraphOptions(token_budgets=(256, 2048), max_frames_per_batch=0),
        preprocess=PreprocessOptions(device=device),
    )


@pytest.fixture(scope="module")
def nvjpeg(engine: Engine) -> Nvjpeg:
    return open_nvjpeg(patchifier_of(engine.tower.spec), engine.device.device)


def media(engine: Engine, data: bytes, size: tuple[int, int]) -> Media:
    return Media("image", data, engine.tower.spec.sizing.plan(Size(*size)), digest="")


@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", [0, 1, 2])
def test_pixels_are_near_libjpegs(nvjpeg: Nvjpeg, subsampling: int, progressive: bool) -> None:
    files = [
        jpeg(*size, seed, subsampling=subsampling, progressive=progressive)
        for seed, size in enumerate(SIZES)
    ]
    for size, file, found in zip(SIZES, files, nvjpeg.decode(files), strict=True):
        difference = (found.cpu().int() - decode(file).int()).abs().float()
        mean, most = float(difference.mean()), int(difference.max())
        print(f"{size} subsampling {subsampling}: mean {mean:.3f}, largest {most}")
        assert mean < MEAN_DIFFERENCE


def test_a_batch_is_cut_up_on_the_device(engine: Engine, nvjpeg: Nvjpeg) -> None:
    wanted = [media(engine, jpeg(*size), size) for size in SIZES for _ in range(3)]
    assert all(nvjpeg.pixels(one) for one in wanted)
    for one, item in zip(wanted, nvjpeg.prepare(wanted), strict=True):
        assert item.plan == one.plan
        found = torch.as_tensor(item.patches)
        assert found.is_cuda
        exact = patchifier_of(engine.tower.spec).patchify(decode(one.data))[1]
        assert float((found.cpu().int() - exact.int()).abs().float().mean()) < MEAN_DIFFERENCE


def test_no_size_compiles_anew(
    engine: Engine, nvjpeg: Nvjpeg, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton = pytest.importorskip("triton")
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda **said: compiled.append(said["repr"])
    )
    for size in [(100, 100), (98, 50), (61, 83), (1234, 777)]:
        for subsampling in (0, 1, 2):
            nvjpeg.prepare([media(engine, jpeg(*size, subsampling=subsampling), size)])
    assert not compiled


def files() -> dict[str, tuple[bytes, tuple[int, int]]]:
    """One of each way, by name."""
    plain = jpeg(640, 480)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image = Image.open(BytesIO(plain))
    png, cmyk, grey = BytesIO(), BytesIO(), BytesIO()
    image.save(png, "PNG")
    image.convert("CMYK").save(cmyk, "JPEG")
    image.convert("L").save(grey, "JPEG")
    scribbled = bytearray(jpeg(640, 480, 1))
    scribbled[3000:3100] = np.random.default_rng(0).integers(0, 255, 100, np.uint8).tobytes()
    return {
        "plain": (plain, (640, 480)),
        "large": (jpeg(1920, 1080), (1920, 1080)),
        "progressive": (jpeg(640, 480, progressive=True), (640, 480)),
        "turned": (jpeg(640, 480, exif=exif), (480, 640)),
        "PNG": (png.getvalue(), (640, 480)),
        "CMYK": (cmyk.getvalue(), (640, 480)),
        "grey": (grey.getvalue(), (640, 480)),
        "cut short": (plain[:-2000], (640, 480)),
        "no image": (b"\xff\xd8\xff no", (640, 480)),
        "of another size": (jpeg(64, 64), (640, 480)),
        "scribbled": (bytes(scribbled), (640, 480)),
        "small": (jpeg(57, 31), (57, 31)),
    }


Outcomes = dict[str, Tensor | Exception | None]


def through(
    engine: Engine, device: str, series: EncoderMetrics, sent: dict[str, Media]
) -> Outcomes:
    """Rows or error of each, sent together."""
    shared: dict[int, Tensor] = {}
    stages = Stages(engine, open_decoding(options(device), engine, series, None), series)

    def share(done: Sequence[tuple[Media, Tensor]]) -> list[Entry]:
        shared.update((id(one), rows.clone()) for one, rows in done)
        return [Entry(np.empty(0, np.uint8), "bfloat16", (0, 0)) for _ in done]

    async def run() -> Outcomes:
        call = stages.begin(list(sent.values()), share)
        await call.wait(60)
        return {
            name: shared[id(work.media)] if isinstance(work.outcome, Made) else work.outcome
            for name, work in zip(sent, call.works, strict=True)
        }

    return asyncio.run(run())


@pytest.mark.parametrize("scribbled", [False, True])
def test_files_of_all_kinds_come_to_the_same(engine: Engine, scribbled: bool) -> None:
    sent = {name: media(engine, *file) for name, file in files().items()}
    if not scribbled:
        del sent["scribbled"]
    series = EncoderMetrics()
    expected = through(engine, "cpu", EncoderMetrics(), sent)
    found = through(engine, "cuda", series, sent)
    for name, exact in expected.items():
        rows = found[name]
        if not isinstance(exact, Tensor):
            assert isinstance(exact, InvalidMedia), name
            assert type(rows) is type(exact)
        elif name != "scribbled":
            assert isinstance(rows, Tensor), name
            error = relative_error(rows, exact)
            print(f"{name}: {error:.1e}")
            assert error < ROWS_DIFFERENCE
    ways = {
        sample.labels["device"]: sample.value
        for metric in series.preprocessed.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    print(ways)
    if not scribbled:  # what nvJPEG makes of such a file is its own affair
        assert ways == {"cuda": 4, "cpu": 4}


def test_one_that_nvjpeg_refuses_takes_no_other_along(engine: Engine, nvjpeg: Nvjpeg) -> None:
    good = media(engine, jpeg(640, 480), (640, 480))
    broken = media(engine, jpeg(640, 480)[:400] + b"\xff\xd9", (640, 480))
    with pytest.raises((RuntimeError, InvalidMedia)):
        nvjpeg.prepare([good, broken])
    (item,) = nvjpeg.prepare([good])
    assert item.plan == good.plan
