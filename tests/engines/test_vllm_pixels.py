"""Our decoder and patchifier in vLLM's own renderer, against vLLM's own code: `make vllm`.

Runs in an environment that has vLLM. Starts no server.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="there is no vLLM here")

from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers import renderer_from_config
from vllm.renderers.params import ChatParams
from vllm.renderers.registry import RENDERER_REGISTRY

from actors.media.jpeg import plain_jpeg
from encoder_service.engines import vllm_pixels, vllm_plugin
from encoder_service.engines.vllm import CONNECTOR
from encoder_service.engines.vllm_local import RAW_PIXELS
from encoder_service.engines.vllm_patches import as_vllm_cuts
from tests.engines import checkpoint
from tests.engines.servers import ENVIRONMENT
from tests.images import encoded, jpeg, opened, photograph
from tests.videos import video

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]

SIZES = ((503, 301), (96, 96), (33, 47), (300, 20), (1, 64), (640, 1000), (160, 128))
COLOURS = opened("astronaut.png").resize((241, 173))
GREY, CMYK = COLOURS.convert("L"), COLOURS.convert("CMYK")
OURS = {  # decoded by us
    **{f"{width}x{height}": jpeg(width, height) for width, height in SIZES},
    **{f"4:{s}": encoded(COLOURS, "JPEG", subsampling=f"4:{s}") for s in ("4:4", "2:2", "2:0")},
    "progressive": encoded(COLOURS, "JPEG", progressive=True, quality=30),
    "stored as RGB": encoded(COLOURS, "JPEG", keep_rgb=True),
    "restart markers": encoded(COLOURS, "JPEG", restart_marker_rows=1),
    "upright by EXIF": encoded(COLOURS, "JPEG", orientation=1),
    "unknown orientation": encoded(COLOURS, "JPEG", orientation=9),
    "MPO": encoded(COLOURS, "MPO", save_all=True, append_images=[COLOURS]),
    "a photograph": photograph("rocket.jpg"),
}
THEIRS = {  # decoded by vLLM
    "grey": encoded(GREY, "JPEG"),
    "CMYK": encoded(CMYK, "JPEG"),
    **{f"orientation {o}": encoded(COLOURS, "JPEG", orientation=o) for o in range(2, 9)},
    "PNG": encoded(COLOURS, "PNG"),
    "transparent": encoded(COLOURS.convert("RGBA"), "PNG"),
    "WebP": encoded(COLOURS, "WEBP"),
    "trailing bytes": jpeg(64, 48)[:-2] + bytes(9) + b"\xff\xd9",
}
BROKEN = {
    "truncated": jpeg(160, 128)[:-400],
    "only a header": jpeg(160, 128)[:300],
    "not an image": b"\xff\xd8\xff" + bytes(100),
    "thin": jpeg(1, 300),
}


@dataclass(frozen=True)
class Renderers:
    folder: Path
    stock: Any
    local: Any


@pytest.fixture(scope="module", params=sorted(checkpoint.PROCESSORS))
def renderers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Renderers]:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint.write(folder, request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"VLLM_PLUGINS": ""}).items():
            patch.setenv(name, value)
        patch.setattr(RENDERER_REGISTRY, "renderers", dict(RENDERER_REGISTRY.renderers))
        patch.setattr(MEDIA_CONNECTOR_REGISTRY, "name2class", {"http": MediaConnector})
        use_stock_code(patch)  # restored after this family
        stock = renderer_from_config(config(folder, None))
        vllm_plugin.register()
        vllm_plugin.register()
        yield Renderers(folder, stock, renderer_from_config(config(folder, "local")))


def config(folder: Path, place: str | None, **options: Any) -> Any:
    """vLLM's configuration, as a server's."""
    if place is not None:
        extra = {"place": place} | ({} if place == "local" else {"url": "http://127.0.0.1:1"})
        options["ec_transfer_config"] = CONNECTOR | {"ec_connector_extra_config": extra}
    return EngineArgs(
        model=str(folder),
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        limit_mm_per_prompt={"image": 3, "video": 1},
        **{"mm_processor_cache_gb": 0} | options,
    ).create_engine_config()


def rendered(renderer: Any, *files: bytes, **extras: Any) -> Any:
    """What vLLM's server makes of a chat."""
    parts: list[Any] = [{"type": "text", "text": "What?"}]
    for file in files:
        kind = "video" if file[4:8] == b"ftyp" else "image"
        url = f"data:{kind}/x;base64,{b64encode(file).decode()}"
        parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": url}})
    chat = [{"role": "user", "content": parts}]
    params = ChatParams(media_io_kwargs=extras.pop("media_io_kwargs", None))
    rendering = renderer.render_chat_async([chat], params, prompt_extras=extras)
    return asyncio.run(rendering)[1][0]


def use_stock_code(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(MEDIA_CONNECTOR_REGISTRY.name2class, "http", MediaConnector)
    for name, function in vllm_pixels.THEIRS.items():
        patch.setattr(vllm_pixels.OWNERS[name], name, function)


def by_vllm(renderer: Any, *files: bytes, **extras: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        use_stock_code(patch)
        return rendered(renderer, *files, **extras)


def assert_equal(found: Any, expected: Any) -> None:
    assert found["prompt_token_ids"] == expected["prompt_token_ids"]
    assert found["mm_hashes"] == expected["mm_hashes"]
    assert found["mm_placeholders"] == expected["mm_placeholders"]
    assert found["mm_kwargs"].keys() == expected["mm_kwargs"].keys()
    for kind, items in found["mm_kwargs"].items():
        for ours, theirs in zip(items, expected["mm_kwargs"][kind], strict=True):
            assert ours.keys() == theirs.keys()
            for key in ours:
                data, other = ours[key].data, theirs[key].data
                if key == "pixel_values" and data.shape != other.shape:
                    data = vllms(data, ours["image_grid_thw"].data)
                if isinstance(data, torch.Tensor):
                    assert data.dtype == other.dtype
                    assert data.equal(other)
                else:
                    assert data == other


def vllms(pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Cuts an image that was kept whole into vLLM's patches, with the code of vLLM's process."""
    sizing: Any = SimpleNamespace(patch_size=isqrt(pixels.shape[1] // 3), merge_size=2)
    return as_vllm_cuts(pixels, grid.tolist(), sizing)


@pytest.fixture
def work() -> Callable[[], tuple[int, ...]]:
    """How many images our code decoded, took from its decoder, and kept whole, since the last
    call. Images that transformers groups count as one that is kept."""

    def counts() -> tuple[int, ...]:
        used = vllm_pixels.used
        found = tuple(used[name] for name in ("load_bytes", "process_image", "patchify"))
        used.clear()
        return found

    counts()
    return counts


@pytest.mark.parametrize("name", OURS)
def test_our_bytes_equal_vllms(renderers: Renderers, name: str, work: Any) -> None:
    found = rendered(renderers.local, OURS[name])
    assert work() == (1, 1, 1)
    assert found["mm_kwargs"]["image"][0]["pixel_values"].data.dtype == torch.uint8
    assert_equal(found, by_vllm(renderers.stock, OURS[name]))


@pytest.mark.parametrize("name", THEIRS)
def test_vllm_decodes_what_our_decoder_does_not(renderers: Renderers, name: str, work: Any) -> None:
    found = rendered(renderers.local, THEIRS[name])
    assert work() == (0, 0, 1)
    assert_equal(found, by_vllm(renderers.stock, THEIRS[name]))


@pytest.mark.parametrize("name", BROKEN)
def test_errors_are_vllms(renderers: Renderers, name: str) -> None:
    with pytest.raises(Exception) as expected:  # noqa: PT011
        by_vllm(renderers.stock, BROKEN[name])
    with pytest.raises(expected.type) as found:
        rendered(renderers.local, BROKEN[name])
    if "<" not in str(expected.value):  # it names no object
        assert str(found.value) == str(expected.value)


def test_images_larger_than_vllms_limit_are_rejected(
    renderers: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", str(160 * 128 - 1))
    with pytest.raises(ValueError, match="exceed the maximum"):
        rendered(renderers.local, jpeg(160, 128))
    assert rendered(renderers.local, jpeg(96, 96))


@pytest.mark.parametrize(
    "extras",
    [
        {"mm_processor_kwargs": {"max_pixels": 64 * 64}},
        {"mm_processor_kwargs": {"size": {"shortest_edge": 4096, "longest_edge": 90000}}},
        {"mm_processor_kwargs": {"do_resize": False}},
        {"mm_processor_kwargs": {"disable_grouping": False}},
        {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}},
    ],
)
def test_several_images_and_options_of_a_request(
    renderers: Renderers, extras: Any, work: Any
) -> None:
    files = jpeg(224, 448), jpeg(448, 224), jpeg(224, 448, "chelsea.png")
    grouped = "disable_grouping" in extras.get("mm_processor_kwargs", {})
    found = rendered(renderers.local, *files, **extras)
    assert work() == (3, 3, 2 if grouped else 3)
    assert_equal(found, by_vllm(renderers.stock, *files, **extras))


def test_placeholders_of_images_are_not_tokenized(renderers: Renderers) -> None:
    ours, theirs = (one.get_mm_processor() for one in (renderers.local, renderers.stock))
    if not hasattr(theirs, "_get_hf_mm_text"):
        pytest.skip("this vLLM tokenizes them itself")
    assert ours._get_hf_mm_text({"image": 2}) is None
    assert theirs._get_hf_mm_text({"image": 2}) or "qwen3" not in str(type(theirs)).lower()
    video = {"image": 1, "video": 1}
    assert ours._get_hf_mm_text(video) == theirs._get_hf_mm_text(video)


def test_videos_are_vllms(renderers: Renderers, work: Any) -> None:
    file = video(8, size=(96, 64), fps=4)
    found = rendered(renderers.local, file)
    assert work() == (0, 0, 0)
    assert_equal(found, by_vllm(renderers.stock, file))


@pytest.mark.parametrize("place", [None, "remote"])
def test_it_is_off_unless_place_is_local(renderers: Renderers, place: str | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        use_stock_code(patch)
        renderer_from_config(config(renderers.folder, place))
        assert MEDIA_CONNECTOR_REGISTRY.name2class == {"http": MediaConnector}
        for name, function in vllm_pixels.THEIRS.items():
            assert getattr(vllm_pixels.OWNERS[name], name) is function


def test_another_media_connector_keeps_vllms_code(
    renderers: Renderers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_stock_code(monkeypatch)
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "mine")
    monkeypatch.setitem(MEDIA_CONNECTOR_REGISTRY.name2class, "mine", MediaConnector)
    monkeypatch.setattr(vllm_plugin.log, "warning", lambda *line: warnings.append(str(line)))
    warnings: list[str] = []
    renderer_from_config(config(renderers.folder, "local"))
    (warning,) = warnings
    assert "does not call load_bytes, process_image" in warning
    assert MEDIA_CONNECTOR_REGISTRY.name2class["http"] is MediaConnector


def test_our_code_outlives_the_processors_that_vllm_caches(renderers: Renderers, work: Any) -> None:
    for pixels in range(130):  # vLLM caches 128
        extras = {"mm_processor_kwargs": {"max_pixels": 4096 + 1024 * pixels}}
        rendered(renderers.local, jpeg(64, 64), **extras)
    work()
    rendered(renderers.local, jpeg(160, 128))
    assert work() == (1, 1, 1)


@pytest.mark.parametrize("raw", [False, True])
def test_without_normalisation_on_the_device(renderers: Renderers, raw: bool, work: Any) -> None:
    """As in vLLM 0.26: `raw` with RAW_PIXELS, otherwise vLLM cuts normalised floats."""
    options: dict[str, Any] = {"mm_device_do_normalize": False}
    if raw:
        options["mm_processor_kwargs"] = RAW_PIXELS
    local = renderer_from_config(config(renderers.folder, "local", **options))
    work()
    stock = renderer_from_config(config(renderers.folder, None, **options))
    found = rendered(local, jpeg(300, 200))
    assert work() == (1, 1, int(raw))
    data = found["mm_kwargs"]["image"][0]["pixel_values"].data
    assert data.dtype == (torch.uint8 if raw else torch.float32)
    assert_equal(found, by_vllm(stock, jpeg(300, 200)))


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The files that our code decodes. Of no file it knows that it has decoded it before."""
    files: list[bytes] = []

    def decode(data: bytes, image: Any) -> Any:
        files.append(data)
        return plain_jpeg(data, image)

    monkeypatch.setattr(vllm_pixels, "plain_jpeg", decode)
    monkeypatch.setattr(vllm_pixels, "decoded", vllm_pixels.Digests())
    return files


def test_a_cached_image_is_neither_decoded_nor_preprocessed_again(
    renderers: Renderers, work: Any, decoding: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM parses images that its cache lacks once more, which may not decode them with Pillow."""
    use_stock_code(monkeypatch)
    made = renderer_from_config(config(renderers.folder, "local", mm_processor_cache_gb=1))
    assert vllm_pixels.decoded.most > 0
    decoding.clear()
    work()
    image, other = jpeg(300, 200), jpeg(200, 300)
    first = rendered(made, image)
    assert work() == (1, 1, 1)
    again = rendered(made, other, image)
    assert work() == (2, 1, 1)
    assert decoding == [image, other]
    assert again["mm_hashes"]["image"][1] == first["mm_hashes"]["image"][0]
    assert again["mm_hashes"] == by_vllm(renderers.stock, other, image)["mm_hashes"]

    # decoded before, but no longer in the cache
    found = rendered(renderers.local, image, other, image)
    assert decoding == [image, other, image, other, image]
    assert_equal(found, by_vllm(renderers.stock, image, other, image))


def test_a_file_is_decoded_where_it_is_loaded_unless_it_was_before(decoding: list[bytes]) -> None:
    loader, file, broken = vllm_pixels.jpeg_io(ImageMediaIO()), jpeg(64, 48), BROKEN["truncated"]
    vllm_pixels.decoded.most = 10
    assert loader.load_bytes(file).media.rgb.shape == (48, 64, 3)
    assert loader.load_bytes(file).media.rgb is None
    for _ in range(2):
        with pytest.raises(ValueError, match="load"):
            loader.load_bytes(broken)
    assert decoding == [file, broken, broken]


def test_without_vllms_cache_all_files_are_decoded_where_they_are_loaded(
    renderers: Renderers, decoding: list[bytes]
) -> None:
    """Because vLLM loads files in several threads, and processes images in one."""
    for _ in range(2):
        assert rendered(renderers.local, jpeg(64, 48))
        assert vllm_pixels.jpeg_io(ImageMediaIO()).load_bytes(jpeg(64, 48)).media.rgb is not None
    assert decoding == [jpeg(64, 48)] * 4


def test_digests_of_decoded_files_are_bounded() -> None:
    recent = vllm_pixels.Digests()
    recent.most = 2
    for digest in (b"a", b"b", b"b", b"c"):
        recent.add(digest)
    assert [digest in recent for digest in (b"a", b"b", b"c")] == [False, True, True]
