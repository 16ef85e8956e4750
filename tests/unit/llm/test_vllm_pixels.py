"""Our decoder over stand-ins for vLLM's modules and transformers' image processor.
Within vLLM itself: tests/engines/test_vllm_pixels.py.
"""

from __future__ import annotations

import asyncio
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import BytesIO
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from actors.errors import ConfigError
from encoder_service.engines import vllm_patches, vllm_plugin
from encoder_service.engines.vllm import CONNECTOR
from tests.images import encoded, jpeg, jpeg_segments, opened, photograph
from tests.unit.vllm_half import Scheduler, stand_in
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
        data = FILES[url] if url in FILES else b64decode(url.partition(",")[2])
        return media_io.load_bytes(data)

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        return self.load_from_url(url, media_io, fetch_timeout=fetch_timeout)

    def fetch_image(self, url: str) -> Any:
        return self.load_from_url(url, ImageMediaIO(), fetch_timeout=5)


class Registry:
    def __init__(self) -> None:
        self.name2class: dict[str, type] = {"http": MediaConnector}

    def load(self, name: str) -> Any:
        return self.name2class[name]()


PATCHIFY = type(processor("qwen2_vl", "Qwen2VLImageProcessor")).patchify


class Qwen2VLImageProcessor:
    """transformers' patches, without resizing."""

    patchify = PATCHIFY
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
        self.mm_processor_cache = None

    def get_mm_processor(self) -> Any:
        info = SimpleNamespace(get_hf_processor=lambda: self.processor)
        return SimpleNamespace(info=info)


@pytest.fixture
def pixels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """encoder_service.engines.vllm_pixels as vLLM would load it, and the stand-ins."""
    for method in ("process_image", "patchify"):  # restored after each test
        monkeypatch.setattr(Qwen2VLImageProcessor, method, getattr(Qwen2VLImageProcessor, method))
    monkeypatch.setattr(vllm_patches, "engine_is_here", False)
    options = SimpleNamespace(VLLM_MAX_IMAGE_PIXELS=10**6, VLLM_MEDIA_CONNECTOR="http")
    stand_in(monkeypatch)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": options},
        "vllm.multimodal": {"parse": SimpleNamespace(normalize_image=ImageOps.exif_transpose)},
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


def config(
    place: str | None = "local",
    connector: str = CONNECTOR["ec_connector"],
    cards: int = 1,
    cache: str = "lru",
    **options: Any,
) -> Any:
    """vllm.config.VllmConfig, as far as the plugin reads it."""
    extra = ({} if place is None else {"place": place}) | options
    transfer = SimpleNamespace(
        ec_connector=connector,
        ec_connector_extra_config=extra,
        get_from_extra_config=extra.get,
    )
    return SimpleNamespace(
        ec_transfer_config=transfer,
        image_processor=Qwen2VLImageProcessor(),
        parallel_config=SimpleNamespace(world_size_across_dp=cards),
        scheduler_config=SimpleNamespace(
            max_num_seqs=8, max_num_batched_tokens=2048, get_scheduler_cls=lambda: Scheduler
        ),
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(
                mm_processor_cache_type=cache, get_limit_per_prompt=lambda kind: 1
            ),
            hf_config=SimpleNamespace(),
        ),
    )


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


def test_what_vllm_parses_again_is_not_decoded_with_pillow(pixels: Any) -> None:
    ours = pixels.JpegIO().load_bytes(FILES["160x128"]).media
    theirs = pixels.JpegIO().load_bytes(NOT_OURS["PNG"]).media
    assert pixels.normalize_image(ours) is ours
    turned = pixels.normalize_image(theirs)
    assert turned is not theirs
    assert turned.tobytes() == theirs.tobytes()


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


@pytest.mark.parametrize("name", ["160x128", "orientation 6", "truncated"])
def test_each_image_of_a_request_is_charged_once(pixels: Any, name: str) -> None:
    charged: list[int] = []
    theirs = ImageMediaIO(decoded_budget=SimpleNamespace(charge=charged.append))
    for _ in range(2):
        with suppress(OSError):  # Pillow's, of the truncated one
            pixels.jpeg_io(theirs).load_bytes((FILES | NOT_OURS)[name])
    assert charged == [241 * 173 * 4 if name == "orientation 6" else 160 * 128 * 4] * 2
    assert theirs.decoded_budget is not None


def test_an_image_beyond_the_budget_is_not_decoded(
    pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def charge(size_bytes: int) -> None:
        raise ValueError("too much")

    monkeypatch.setattr(pixels, "plain_jpeg", None)
    theirs = ImageMediaIO(decoded_budget=SimpleNamespace(charge=charge))
    with pytest.raises(ValueError, match="too much"):
        pixels.jpeg_io(theirs).load_bytes(FILES["160x128"])


@pytest.mark.parametrize(("patch", "merge"), [(14, 2), (16, 2), (8, 1)])
@pytest.mark.parametrize(("count", "shape"), [(1, (1, 1)), (3, (3, 5)), (1, (68, 60))])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_images_are_kept_whole(
    pixels: Any, patch: int, merge: int, count: int, shape: tuple[int, int], last: bool
) -> None:
    height, width = (side * patch * merge for side in shape)
    random = torch.randint(0, 256, (count, height, width, 3), dtype=torch.uint8)
    images = random.permute(0, 3, 1, 2)
    given = images if last else images.contiguous()
    names = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2}
    found, *grid = pixels.patchify(None, given, **names)
    assert pixels.used == {"patchify": 1}
    expected, *expected_grid = PATCHIFY(Qwen2VLImageProcessor(), images, **names)
    assert grid == expected_grid
    assert found.shape == (count, expected.shape[1], 3 * patch**2)
    assert found.view(random.shape).equal(random)
    assert (found.data_ptr() == images.data_ptr()) == last, "a copy only where it is needed"


def test_transformers_cuts_what_are_not_bytes_of_images(
    pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pixels.THEIRS, "patchify", lambda self, x, **sizes: (x, sizes))
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
    for images in (
        torch.zeros(1, 3, 28, 28),
        torch.zeros(1, 4, 28, 28, dtype=torch.uint8),
        torch.zeros(1, 3, 28, 29, dtype=torch.uint8),
        torch.zeros(1, 3, 28, 28, dtype=torch.uint8, device="meta"),
    ):
        assert pixels.patchify(None, images, **sizes) == (images, sizes)
    image = torch.zeros(1, 3, 28, 28, dtype=torch.uint8)
    sizes["temporal_patch_size"] = 1  # as many columns as our pixels have
    assert pixels.patchify(None, image, **sizes) == (image, sizes)
    sizes["temporal_patch_size"] = 2
    assert pixels.patchify(None, image, **sizes)[1:] == (2, 2)
    monkeypatch.setattr(vllm_patches, "engine_is_here", True)
    assert pixels.patchify(None, image, **sizes) == (image, sizes)


def test_an_image_that_was_changed_or_is_for_a_device_is_read_by_transformers(pixels: Any) -> None:
    image = pixels.JpegIO().load_bytes(FILES["160x128"]).media
    rows = pixels.process_image(Qwen2VLImageProcessor(), image, device="cpu")
    assert pixels.used == {"load_bytes": 1}
    assert rows.equal(pixels.process_image(Qwen2VLImageProcessor(), image))
    assert pixels.used == {"load_bytes": 1, "process_image": 1}
    image.thumbnail((32, 32))
    assert pixels.process_image(Qwen2VLImageProcessor(), image).shape[1:] == (26, 32)


def test_a_file_that_was_decoded_before_and_now_is_not_is_read_by_transformers(
    pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels.decoded.most = 1
    rows = [
        pixels.process_image(Qwen2VLImageProcessor(), loader.load_bytes(FILES["160x128"]).media)
        for loader in (pixels.JpegIO(), pixels.JpegIO())
    ]
    image = pixels.JpegIO().load_bytes(FILES["160x128"]).media
    assert image.rgb is None
    monkeypatch.setattr(pixels, "plain_jpeg", lambda data, image: None)
    rows.append(pixels.process_image(Qwen2VLImageProcessor(), image))
    assert pixels.used["process_image"] == 2
    assert rows[0].equal(rows[1])
    assert rows[0].equal(rows[2])


def stock(pixels: Any) -> bool:
    """Whether vLLM's and transformers' own code is in use."""
    methods = all(
        getattr(owner, name) is pixels.THEIRS[name] for name, owner in pixels.OWNERS.items()
    )
    connectors = pixels.MEDIA_CONNECTOR_REGISTRY.name2class
    return methods and connectors == {"http": MediaConnector}


def test_place_local_uses_our_code(pixels: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm, image = config(), opened("astronaut.png")
    before = [Qwen2VLImageProcessor()([image], **given) for given in ({}, {"do_rescale": False})]
    with caplog.at_level("INFO", "vllm.encoder_service"):
        made = vllm_plugin.renderer(vllm, None)
        assert type(made) is HfRenderer
        vllm_plugin.renderer(config(), None)  # another one of the process
    assert not stock(pixels)
    assert sys.getswitchinterval() == vllm_plugin.SWITCH_SECONDS
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    after = [vllm.image_processor([image], **given) for given in ({}, {"do_rescale": False})]
    assert after[0]["pixel_values"].equal(before[0]["pixel_values"]), "floats"
    assert after[1]["pixel_values"].numel() == before[1]["pixel_values"].numel() // 2
    assert after[1]["image_grid_thw"].equal(before[1]["image_grid_thw"])
    connector = pixels.MEDIA_CONNECTOR_REGISTRY.load("http")
    assert hasattr(connector.fetch_image("a photograph").media, "rgb")


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
    assert type(vllm_plugin.renderer(off, None)) is HfRenderer
    assert stock(pixels)
    assert sys.getswitchinterval() > vllm_plugin.SWITCH_SECONDS
    assert not caplog.records


class OtherProcessor(Qwen2VLImageProcessor):
    pass


WRONG = {
    "another class": "OtherProcessor is not the image processor",
    "no processor": "NoneType is not the image processor",
    "no method": "vLLM or transformers has no patchify",
    "another method": "does not call patchify",
    "another layout": "vLLM's pixels or patches differ",
    "another dtype": "vLLM's pixels or patches differ",
    "other pixels": "vLLM's pixels or patches differ",
    "another connector": "does not call load_bytes, process_image",
    "another method of the connector": "does not call load_bytes, process_image",
}


@pytest.mark.parametrize("what", WRONG)
def test_vllm_keeps_its_code_if_ours_would_differ_or_not_be_called(
    pixels: Any, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm, theirs = config(), pixels.THEIRS
    if what == "another class":
        vllm.image_processor = OtherProcessor()
    elif what == "no processor":
        vllm.image_processor = None
    elif what == "no method":
        monkeypatch.setitem(theirs, "patchify", None)
    elif what == "another method":
        monkeypatch.setattr(Qwen2VLImageProcessor, "cut", PATCHIFY, raising=False)
        call: Any = Qwen2VLImageProcessor.__call__
        monkeypatch.setattr(
            Qwen2VLImageProcessor,
            "__call__",
            lambda self, *args, **options: call(Renamed(self), *args, **options),
        )
    elif what in ("another layout", "another dtype"):
        ours = pixels.OURS["patchify"]

        def patchify(*args: Any, **options: Any) -> Any:
            patches, *grid = ours(*args, **options)
            return (patches.flip(1) if what == "another layout" else patches.short()), *grid

        monkeypatch.setitem(pixels.OURS, "patchify", patchify)
    elif what == "other pixels":
        monkeypatch.setattr(pixels, "plain_jpeg", lambda data, image: 255 - np.array(image))
    elif what == "another connector":
        monkeypatch.setattr(pixels.envs, "VLLM_MEDIA_CONNECTOR", "mine")
        pixels.MEDIA_CONNECTOR_REGISTRY.name2class["mine"] = MediaConnector
    else:
        monkeypatch.setattr(
            MediaConnector, "fetch_image", lambda self, url: ImageMediaIO().load_bytes(noise(url))
        )
    vllm_plugin.renderer(vllm, None)
    pixels.MEDIA_CONNECTOR_REGISTRY.name2class.pop("mine", None)
    assert what == "no method" or stock(pixels)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert WRONG[what] in record.getMessage()


class Renamed:
    """A processor whose own code calls `cut` in place of `patchify`."""

    def __init__(self, of: Qwen2VLImageProcessor) -> None:
        self.process_image = of.process_image
        self.patch_size, self.merge_size = of.patch_size, of.merge_size
        self.patchify = partial(PATCHIFY, of)


def noise(url: str) -> bytes:
    return b64decode(url.partition(",")[2])


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"chunk_m": 5}, ConfigError, r"config: chunk_m: no such key; .* Did you mean chunk_ms\?"),
        ({"decode_step_tokens": 7}, ConfigError, r"config: decode_step_tokens is 7, .* from 8 "),
        ({"place": "locale"}, ValueError, r"config: place is 'locale': use \"local\""),
        ({"cards": 2}, ValueError, r"for one GPU, not 2: leave out the options --\*-parallel-size"),
        ({"cache": "shm"}, ValueError, "--mm-processor-cache-type is shm"),
    ],
)
def test_wrong_options_end_the_api_process(
    pixels: Any, given: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        vllm_plugin.renderer(config(**given), None)
    assert stock(pixels)


def test_vllm_keeps_its_code_if_ours_cannot_be_imported(
    pixels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "encoder_service.engines.vllm_pixels")
    monkeypatch.delattr(sys.modules["encoder_service.engines"], "vllm_pixels", raising=False)
    monkeypatch.delitem(sys.modules, "actors.media.jpeg", raising=False)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert type(vllm_plugin.renderer(config(), None)) is HfRenderer
    (record,) = caplog.records
    assert "simplejpeg" in record.getMessage()
    assert stock(pixels)


def test_the_plugin_replaces_only_vllms_own_renderer(
    pixels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderers = sys.modules["vllm.renderers.registry"].RENDERER_REGISTRY.renderers
    vllm_plugin.register()
    vllm_plugin.register()
    module, name = renderers["hf"]
    assert getattr(import_module(module), name) is vllm_plugin.renderer
    renderers["hf"] = ("another.plugin", "Renderer")
    vllm_plugin.register()
    assert renderers["hf"] == ("another.plugin", "Renderer")
    monkeypatch.setitem(sys.modules, "vllm.renderers.registry", ModuleType("without a registry"))
    vllm_plugin.register()
    monkeypatch.setitem(sys.modules, "vllm.renderers.registry", None)
    vllm_plugin.register()
