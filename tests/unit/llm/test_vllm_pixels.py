"""Our decoder and patchifier over stand-ins for vLLM's modules and transformers' image processor.
Within vLLM itself: tests/engines/test_vllm_pixels.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from encoder_service.engines.vllm import CONNECTOR
from tests.images import encoded, jpeg, jpeg_segments, opened, photograph
from tests.without_torchvision import processor

PHOTOGRAPH = opened("astronaut.png").resize((241, 173))
GREY = PHOTOGRAPH.convert("L")
PROCESSORS = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
STOCK = ("vllm.renderers.hf", "HfRenderer")


@dataclass
class MediaWithBytes:
    media: Any
    original_bytes: bytes


class ImageMediaIO:
    """Decodes as vLLM's."""

    def __init__(self, image_mode: str = "RGB", decoded_budget: Any = None, **kwargs: Any) -> None:
        self.image_mode = image_mode
        self.decoded_budget = decoded_budget
        self.kwargs = kwargs

    def load_bytes(self, data: bytes) -> MediaWithBytes:
        image = Image.open(BytesIO(data))
        if self.decoded_budget is not None:
            self.decoded_budget.charge(image.width * image.height * 4)
        ImageOps.exif_transpose(image, in_place=True)
        image.load()
        return MediaWithBytes(image.convert(self.image_mode), data)


class MediaConnector:
    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        return media_io.load_bytes(FILES[url])

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        return self.load_from_url(url, media_io, fetch_timeout=fetch_timeout)


class Registry:
    def __init__(self) -> None:
        self.name2class: dict[str, type] = {"http": MediaConnector}

    def register(self, name: str) -> Any:
        return lambda kind: self.name2class.update({name: kind})


class Qwen2VLImageProcessor:
    """transformers' patches, without resizing."""

    patchify = type(processor("qwen2_vl", "Qwen2VLImageProcessor")).patchify
    patch_size, merge_size = 14, 2

    def process_image(self, image: Any, device: Any = None) -> Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    def __call__(self, images: list[Any], do_rescale: bool = True, **options: Any) -> Any:
        (pixels,) = map(self.process_image, images)
        block = self.patch_size * self.merge_size
        batch = pixels[
            None, :, : pixels.shape[1] // block * block, : pixels.shape[2] // block * block
        ]
        patches, *grid = self.patchify(batch / 255 if do_rescale else batch, self.patch_size, 2, 2)
        return {"pixel_values": patches[0], "image_grid_thw": torch.tensor([[1, *grid]])}


class HfRenderer:
    def __init__(self, config: Any, tokenizer: Any) -> None:
        self.processor = SimpleNamespace(image_processor=config.image_processor)

    def get_mm_processor(self) -> Any:
        info = SimpleNamespace(get_hf_processor=lambda: self.processor)
        return SimpleNamespace(info=info)


@pytest.fixture
def pixels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """encoder_service.engines.vllm_pixels as vLLM would load it, and the stand-ins."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": SimpleNamespace(VLLM_MAX_IMAGE_PIXELS=10**6)},
        "vllm.multimodal": {},
        "vllm.multimodal.media": {
            "MEDIA_CONNECTOR_REGISTRY": Registry(),
            "MediaConnector": MediaConnector,
            "MediaWithBytes": MediaWithBytes,
        },
        "vllm.multimodal.media.image": {"ImageMediaIO": ImageMediaIO},
        "vllm.renderers": {},
        "vllm.renderers.hf": {"HfRenderer": HfRenderer},
        "vllm.renderers.registry": {"RENDERER_REGISTRY": SimpleNamespace(renderers={"hf": STOCK})},
        PROCESSORS: {"Qwen2VLImageProcessor": Qwen2VLImageProcessor},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    name = "encoder_service.engines.vllm_pixels"
    sys.modules.pop(name, None)
    yield import_module(name)
    sys.modules.pop(name, None)


def config(place: str | None = "local", connector: str = CONNECTOR["ec_connector"]) -> Any:
    """vllm.config.VllmConfig, as far as the plugin reads it."""
    extra = {} if place is None else {"place": place}
    transfer = SimpleNamespace(ec_connector=connector, get_from_extra_config=extra.get)
    return SimpleNamespace(ec_transfer_config=transfer, image_processor=Qwen2VLImageProcessor())


def connectors(pixels: Any) -> dict[str, type]:
    found: dict[str, type] = pixels.MEDIA_CONNECTOR_REGISTRY.name2class
    return found


FILES = {
    **{f"{w}x{h}": jpeg(w, h) for w, h in ((1, 1), (7, 300), (160, 128), (33, 47), (640, 359))},
    **{f"4:{s}": encoded(PHOTOGRAPH, "JPEG", subsampling=f"4:{s}") for s in ("4:4", "2:2", "2:0")},
    "progressive": encoded(PHOTOGRAPH, "JPEG", progressive=True),
    "stored as RGB": encoded(PHOTOGRAPH, "JPEG", keep_rgb=True),
    "upright": encoded(PHOTOGRAPH, "JPEG", orientation=1),
    "unknown orientation": encoded(PHOTOGRAPH, "JPEG", orientation=9),
    "unreadable EXIF": jpeg_segments(jpeg(64, 48), (0xE1, b"Exif\0\0" + bytes(20))),
    "a photograph": photograph("rocket.jpg"),
}
NOT_OURS = {
    "grey": encoded(GREY, "JPEG"),
    "CMYK": encoded(PHOTOGRAPH.convert("CMYK"), "JPEG"),
    **{f"orientation {o}": encoded(PHOTOGRAPH, "JPEG", orientation=o) for o in range(2, 9)},
    "PNG": encoded(PHOTOGRAPH, "PNG"),
    "truncated": jpeg(160, 128)[:-400],
    "only a header": jpeg(160, 128)[:300],
    "too large": jpeg(1001, 1000),
    "not an image": b"\xff\xd8\xff" + bytes(100),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_equal_pillows(pixels: Any, name: str) -> None:
    data = FILES[name]
    found, expected = pixels.JpegIO().load_bytes(data), ImageMediaIO().load_bytes(data)
    assert np.array_equal(found.media.rgb, np.array(expected.media))
    assert found.media.size == expected.media.size
    assert found.media.mode == expected.media.mode
    assert found.original_bytes is data
    assert np.array_equal(np.array(found.media), found.media.rgb), "Pillow can still decode it"


@pytest.mark.parametrize("name", NOT_OURS)
def test_vllm_decodes_all_else(pixels: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageMediaIO, "load_bytes", lambda self, data: (self.image_mode, data))
    data = NOT_OURS[name]
    assert pixels.JpegIO().load_bytes(data) == ("RGB", data)


def test_only_images_for_rgb_are_ours(pixels: Any) -> None:
    connector = pixels.JpegConnector()
    found = connector.load_from_url("160x128", ImageMediaIO(key="value"), fetch_timeout=5)
    assert hasattr(found.media, "rgb")
    found = asyncio.run(connector.load_from_url_async("160x128", ImageMediaIO()))
    assert hasattr(found.media, "rgb")
    found = connector.load_from_url("160x128", ImageMediaIO("L"))
    assert not hasattr(found.media, "rgb")
    video_io = SimpleNamespace(load_bytes=lambda data: data)
    assert connector.load_from_url("160x128", video_io) is FILES["160x128"]
    assert pixels.jpeg_io(ImageMediaIO(key="value")).kwargs == {"key": "value"}
    unknown: Any = ImageMediaIO()
    unknown.sharpen = True
    assert pixels.jpeg_io(unknown) is unknown


@pytest.mark.parametrize("name", ["160x128", "orientation 6"])
def test_an_image_is_charged_once(pixels: Any, name: str) -> None:
    charged: list[int] = []
    theirs = ImageMediaIO(decoded_budget=SimpleNamespace(charge=charged.append))
    pixels.jpeg_io(theirs).load_bytes((FILES | NOT_OURS)[name])
    assert charged == [160 * 128 * 4 if name == "160x128" else 241 * 173 * 4]


@pytest.mark.parametrize(("patch", "merge", "temporal"), [(14, 2, 2), (16, 2, 2), (8, 1, 1)])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (68, 60)])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_patches_equal_those_of_transformers(
    pixels: Any, patch: int, merge: int, temporal: int, shape: tuple[int, int], last: bool
) -> None:
    ours = type("Ours", (pixels.OwnPatches, Qwen2VLImageProcessor), {})()
    height, width = (side * patch * merge for side in shape)
    images = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    given = images if last else images.contiguous()
    names = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal}
    found, *grid = ours.patchify(given, **names)
    expected, *expected_grid = Qwen2VLImageProcessor().patchify(images, **names)
    assert grid == expected_grid
    assert found.dtype == expected.dtype
    assert found.equal(expected)


def test_transformers_cuts_what_are_not_bytes_of_one_image(
    pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = type("Ours", (pixels.OwnPatches, Qwen2VLImageProcessor), {})()
    monkeypatch.setattr(pixels, "cut_blocks", None)
    monkeypatch.setattr(Qwen2VLImageProcessor, "patchify", lambda self, x, **sizes: (x, sizes))
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    for images in (
        torch.zeros(1, 3, 28, 28),
        torch.zeros(2, 3, 28, 28, dtype=torch.uint8),
        torch.zeros(1, 4, 28, 28, dtype=torch.uint8),
        torch.zeros(1, 3, 28, 29, dtype=torch.uint8),
    ):
        assert ours.patchify(images, **sizes) == (images, sizes)


def test_place_local_uses_both(pixels: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm, plain = config(), Qwen2VLImageProcessor()
    with caplog.at_level("INFO", "vllm.encoder_service"):
        made = pixels.renderer(vllm, None)
    assert type(made) is HfRenderer
    ours = made.processor.image_processor
    assert isinstance(ours, pixels.OwnPatches)
    assert connectors(pixels) == {"http": pixels.JpegConnector}
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    image = pixels.JpegConnector().load_from_url("a photograph", ImageMediaIO()).media
    for options in ({}, {"do_rescale": False}):
        found, expected = ours([image], **options), plain([image.copy()], **options)
        assert found["pixel_values"].equal(expected["pixel_values"])

    pixels.use_patchifier(made)  # again, for another renderer of the process
    pixels.use_decoder(made)
    assert made.processor.image_processor is ours


@pytest.mark.parametrize(
    "off",
    [
        config("remote"),
        config(None),
        config(connector="ECExampleConnector"),
        SimpleNamespace(ec_transfer_config=None, image_processor=None),
        SimpleNamespace(image_processor=None),
    ],
)
def test_any_other_configuration_changes_nothing(
    pixels: Any, off: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = pixels.renderer(off, None)
    assert type(made) is HfRenderer
    assert made.processor.image_processor is off.image_processor
    assert connectors(pixels) == {"http": MediaConnector}
    assert not caplog.records


class OtherProcessor(Qwen2VLImageProcessor):
    pass


@pytest.mark.parametrize("what", ["another class", "another layout", "no method", "none"])
def test_vllm_keeps_a_processor_that_differs(
    pixels: Any, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm = config()
    if what == "another class":
        vllm.image_processor = OtherProcessor()
    elif what == "another layout":
        theirs: Any = Qwen2VLImageProcessor.__call__
        monkeypatch.setattr(
            Qwen2VLImageProcessor,
            "__call__",
            lambda self, *args, **options: {
                key: value.flip(1) if type(self) is Qwen2VLImageProcessor else value
                for key, value in theirs(self, *args, **options).items()
            },
        )
    elif what == "no method":
        monkeypatch.delattr(Qwen2VLImageProcessor, "patchify")
    else:
        vllm.image_processor = None
    made = pixels.renderer(vllm, None)
    assert made.processor.image_processor is vllm.image_processor
    assert connectors(pixels) == {"http": MediaConnector}, "or Pillow would decode images again"
    (record,) = caplog.records
    assert record.getMessage().startswith("vLLM itself cuts images into patches: ")


@pytest.mark.parametrize("why", ["it is not installed", "its pixels differ"])
def test_vllm_decodes_if_simplejpeg_cannot(
    pixels: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "it is not installed":
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    else:
        load = ImageMediaIO.load_bytes
        monkeypatch.setattr(
            ImageMediaIO,
            "load_bytes",
            lambda self, data: MediaWithBytes(ImageOps.invert(load(self, data).media), data),
        )
    made = pixels.renderer(config(), None)
    assert isinstance(made.processor.image_processor, pixels.OwnPatches)
    assert connectors(pixels) == {"http": MediaConnector}
    (record,) = caplog.records
    assert record.getMessage().startswith("vLLM itself decodes JPEGs: ")
    assert "simplejpeg" in record.getMessage()


def test_the_plugin_replaces_only_vllms_own_renderer(
    pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderers = sys.modules["vllm.renderers.registry"].RENDERER_REGISTRY.renderers
    pixels.register()
    pixels.register()
    module, name = renderers["hf"]
    assert getattr(import_module(module), name) is pixels.renderer
    renderers["hf"] = ("another.plugin", "Renderer")
    pixels.register()
    assert renderers["hf"] == ("another.plugin", "Renderer")
    monkeypatch.setitem(sys.modules, "vllm.renderers.registry", None)
    pixels.register()
