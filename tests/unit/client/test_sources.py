"""What the client makes of an image before it is sent."""

from __future__ import annotations

from io import BytesIO

import pytest
from PIL import Image

import encoder_service
from encoder_service.client.items import Frames, Input, given, kind_of, request_item


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK", "YCbCr", "HSV", "PA", "RGBa"])
def test_images_of_any_colours_are_sent(mode: str) -> None:
    opaque = "RGBA" if mode in ("RGBA", "RGBa") else "P" if mode == "PA" else "RGB"
    photo = Image.new("RGB", (8, 8), (255, 0, 0)).convert(opaque).convert(mode)
    sent = Image.open(BytesIO(request_item(photo).data or b""))
    assert sent.size == (8, 8)
    assert sent.convert("RGB").tobytes() == photo.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["LAB", "RGBX", "La"])
def test_colours_that_pillow_does_not_make_of_others(mode: str) -> None:
    sent = Image.open(BytesIO(request_item(Image.new(mode, (8, 8))).data or b""))
    assert sent.size == (8, 8)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_values_that_are_no_colours_are_refused(mode: str) -> None:
    with pytest.raises(OSError, match=f"mode {mode}.*convert it to L or RGB"):
        request_item(Image.new(mode, (8, 8)))


def test_every_name_of_the_package_is_there() -> None:
    assert {Frames, Input} <= {getattr(encoder_service, name) for name in encoder_service.__all__}


def test_a_source_may_have_options_of_its_own() -> None:
    item = request_item(Input(b"file", max_pixels=65536, fps=None))
    assert item.document() == {"type": "image", "data": b"file", "max_pixels": 65536}
    with pytest.raises(TypeError, match="there is no option 'pixels'; options are min_pixels"):
        Input(b"file", pixels=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="all Frames are encoded"):
        Input(Frames([b"file"]), fps=2)
    with pytest.raises(TypeError, match=r"'evs'; options are min_pixels, .*, evs_rate$"):
        given({"evs": 0.5}, "evs_rate")  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match=r"'timeout_s'; .*; .* see Client\(timeout_seconds"):
        given({"timeout_s": 3})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        ("a.jpg a.JPEG a.png a.WebP a.heic a.HEIF a.avif a.tif a.tiff a.gif a.bmp a.jfif", "image"),
        ("a.mp4 a.MOV a.webm a.mkv a.avi a.m2ts a.mts https://a.example/b.mp4?c=d.jpg", "video"),
        ("a.txt a.svg a.json a.pdf a a.jpg.part .jpg", None),
    ],
)
def test_names_say_what_a_file_is(names: str, kind: str | None) -> None:
    assert {name: kind_of(name) for name in names.split()} == dict.fromkeys(names.split(), kind)
