"""What headers tell is what decoding gives, and what is made to hurt is refused cheaply."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from itertools import product
from typing import Any

import numpy as np
import pillow_heif
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from actors.errors import InvalidMedia, InvalidOption, ServiceError, TooLarge, UnsupportedMedia
from actors.families import registry
from actors.media.image import decode
from actors.options import ModelOptions
from actors.spec.sampling import Middles, Paced, Sampling, Thinning, Timed
from actors.types import Alpha, Clip, Media, ProcessorKwargs, Size
from encoder_service.config import LimitOptions
from encoder_service.intake.header import MOST_READS, is_simple, read_header
from encoder_service.intake.media import probe, probe_frames, video_media
from tests import images
from tests.videos import video

MODEL = registry.read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "HEIF", "AVIF"]


def look(data: bytes) -> Media:
    """An image under the default limits."""
    return probe(data, "image", MODEL, LimitOptions())


@pytest.mark.parametrize("name", images.PHOTOGRAPHS)
def test_photographs(name: str) -> None:
    data = images.photograph(name)
    media = look(data)
    size = Image.open(BytesIO(data)).size
    grid = MODEL.sizing.plan(read_header(data).size).grid_thw
    assert (read_header(data).size.width, read_header(data).size.height) == size
    assert media.plan.grid_thw == grid
    assert media.digest == hashlib.sha256(data).hexdigest()
    assert (media.kind, media.data, media.notice) == ("image", data, "")


@pytest.mark.parametrize(
    ("format", "orientation"),
    [("GIF", 0), ("BMP", 0), *product(["JPEG", "PNG", "WEBP", "TIFF", "HEIF", "AVIF"], range(9))],
)
def test_size_is_that_of_the_upright_image(format: str, orientation: int) -> None:
    data = images.encoded(images.opened().resize((60, 40)), format, orientation)
    upright = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    size = read_header(data).size
    assert (size.width, size.height) == upright.size
    assert read_header(data).format.upper() == {"HEIF": "HEIC"}.get(format, format)
    assert tuple(decode(data).shape[1:]) == (size.height, size.width)


def test_orientation_after_the_pixels_of_a_png_counts() -> None:
    exif = images.exif_with([(0x0112, 3, 1, 6)]).removeprefix(b"Exif\0\0")
    data = images.png(60, 40, images.chunk(b"eXIf", exif))
    size = read_header(data).size
    assert (size.width, size.height) == (40, 60)


def test_a_heic_without_the_rotation_box_is_not_turned_by_its_exif() -> None:
    """As phones' own viewers read it; pillow-heif does the same."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = images.encoded(images.opened().resize((60, 40)), "HEIF", exif=exif)
    assert b"irot" not in data
    size = read_header(data).size
    assert (size.width, size.height) == (60, 40)
    assert tuple(decode(data).shape[1:]) == (40, 60)


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_a_general_brand_is_told_by_the_others(kind: str) -> None:
    data = images.encoded(images.opened().resize((60, 40)), kind).replace(b"mif1", b"miaf", 1)
    data = data[:8] + b"mif1" + data[12:]
    if kind == "AVIF":
        assert data[16:20] == b"avif"
    assert read_header(data).format == {"HEIF": "HEIC"}.get(kind, kind)
    assert tuple(decode(data).shape[1:]) == (40, 60)


@pytest.mark.parametrize(
    ("mode", "format", "notice"),
    [
        ("RGBA", "PNG", "transparency is composited on white (preprocess.alpha)"),
        ("LA", "PNG", "transparency is composited on white (preprocess.alpha)"),
        ("RGBA", "WEBP", "transparency is composited on white (preprocess.alpha)"),
        ("RGBA", "HEIF", "transparency is composited on white (preprocess.alpha)"),
        ("RGBA", "AVIF", "transparency is composited on white (preprocess.alpha)"),
        ("I;16", "PNG", "16-bit grey is scaled to 8 bits: 0 to 65535 becomes 0 to 255"),
        ("I;16", "TIFF", "16-bit grey is scaled to 8 bits: 0 to 65535 becomes 0 to 255"),
        ("I", "TIFF", "32-bit grey is scaled to 8 bits: 0 to 255, or 0 to 65535 if a value is over "
         "255, becomes 0 to 255; others are refused when it is decoded"),
        ("F", "TIFF", "floating-point grey is scaled to 8 bits: 0 to 1, or 0 to 255 if a value is "
         "over 1, becomes 0 to 255; others are refused when it is decoded"),
        ("RGB", "HEIF", ""),
        ("RGB", "AVIF", ""),
        ("L", "PNG", ""),
        ("P", "PNG", ""),
    ],
)  # fmt: skip
def test_notices_of_modes(mode: str, format: str, notice: str) -> None:
    image = images.opened().resize((60, 40)).convert(mode)
    if mode == "RGBA":
        image.putalpha(99)  # an alpha channel of nothing but 255 is left out
    assert look(images.encoded(image, format)).notice == notice


def tiff(samples: int, dtype: type, **options: Any) -> bytes:
    file = BytesIO()
    shape = (40, 60) if samples == 1 else (40, 60, samples)
    tifffile.imwrite(file, np.ones(shape, dtype), **options)
    return file.getvalue()


DEEP = "16-bit colours are scaled to 8 bits: 0 to 65535 becomes 0 to 255"


@pytest.mark.parametrize(
    "data",
    [
        tiff(3, np.uint16, photometric="rgb"),
        tiff(3, np.uint16, photometric="rgb", compression="zlib"),
        images.deep_png(2),
    ],
)
def test_colours_of_16_bits_have_a_notice(data: bytes) -> None:
    assert look(data).notice == DEEP


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            tiff(5, np.uint8, photometric="minisblack", planarconfig="contig"),
            "5 values per pixel, 8-bit integers,",
        ),
        (tiff(1, np.float64), "1 value per pixel, 64-bit floats,"),
        (tiff(3, np.float32, photometric="rgb", bigtiff=True), "3 values per pixel, 32-bit floats"),
    ],
)
def test_a_tiff_that_is_not_supported_says_what_it_holds(data: bytes, says: str) -> None:
    with pytest.raises(UnsupportedMedia, match=f"{says}.* is not supported: save it as grey, RGB"):
        look(data)


CMYK = "CMYK is converted to RGB without its colour profile"
WHITE = "transparency is composited on white (preprocess.alpha)"
COFFEE = images.opened()


def display_p3() -> bytes:
    """The profile of phones' photographs: sRGB's with other primaries."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    for tag, *primary in (
        (b"rXYZ", 0.51512, 0.2412, -0.00105),
        (b"gXYZ", 0.29198, 0.69225, 0.04189),
        (b"bXYZ", 0.1571, 0.06657, 0.78407),
    ):
        (start,) = struct.unpack_from(">I", profile, profile.index(tag) + 4)
        struct.pack_into(">3i", profile, start + 8, *(round(one * 2**16) for one in primary))
    return bytes(profile)


def heic_of_10_bits() -> bytes:
    grey = np.linspace(0, 65535, 60 * 40).astype(np.uint16).repeat(3)
    file = BytesIO()
    pillow_heif.from_bytes("RGB;16", (60, 40), grey.tobytes()).save(file)
    return file.getvalue()


LARGE = "progressive, 12 megapixels"
PHONE: dict[str, tuple[Callable[[], bytes], str]] = {
    "JPEG, turned, Display P3": (
        lambda: images.encoded(COFFEE, "JPEG", 6, icc_profile=display_p3()),
        "",
    ),
    "MPO": (
        lambda: images.encoded(
            COFFEE, "MPO", 6, save_all=True, append_images=[COFFEE.resize((60, 40))]
        ),
        "",
    ),
    "CMYK": (lambda: images.encoded(COFFEE.convert("CMYK"), "JPEG", 6), CMYK),
    "CMYK TIFF": (lambda: tiff(4, np.uint16, photometric="separated"), DEEP + "; " + CMYK),
    LARGE: (
        lambda: images.encoded(COFFEE.resize((4000, 3000)), "JPEG", progressive=True),
        "",
    ),
    "palette with transparency": (
        lambda: images.encoded(COFFEE.quantize(16), "PNG", transparency=bytes([0, 128])),
        WHITE,
    ),
    "HEIC, turned": (lambda: images.encoded(COFFEE, "HEIF", 6), ""),
    "HEIC of 10 bits": (heic_of_10_bits, DEEP.replace("16", "10").replace("65535", "1023")),
    "AVIF, turned": (lambda: images.encoded(COFFEE, "AVIF", 6), ""),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize(
    "name", [*sorted(PHONE.keys() - {LARGE}), pytest.param(LARGE, marks=pytest.mark.extended)]
)
def test_pictures_of_a_phone_are_upright_and_say_what_was_converted(name: str) -> None:
    made, notice = PHONE[name]
    data = made()
    image = ImageOps.exif_transpose(Image.open(BytesIO(data)))
    media = look(data)
    assert (media.notice, media.size) == (notice, Size(*image.size))
    if image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(canvas, image.convert("RGBA"))
    shown = decode(data, media.alpha).permute(1, 2, 0).numpy()
    assert np.abs(shown - np.asarray(image.convert("RGB"), np.int16)).max() <= 1


def test_options_are_part_of_the_identity_where_they_make_a_difference() -> None:
    data = images.png(640, 480)

    def asked(**kwargs: int) -> Media:
        return probe(data, "image", MODEL, LimitOptions(), kwargs=ProcessorKwargs(**kwargs))

    every = [asked(), asked(max_pixels=65536), asked(max_pixels=32768), asked(min_pixels=800_000)]
    assert len({one.identity for one in every}) == len({one.digest for one in every}) + 3
    assert asked(min_pixels=4096, max_pixels=1048576).identity == every[0].identity
    assert asked(max_pixels=32768).identity == every[2].identity


def test_transparency_is_part_of_the_identity_only_where_there_is_any() -> None:
    picture = images.opened().resize((60, 40))
    opaque, palette = images.encoded(picture, "PNG"), picture.quantize(8)
    transparent = images.encoded(palette, "PNG", transparency=3)
    every: list[Alpha] = ["white", "black", "drop"]
    found = [probe(transparent, "image", MODEL, LimitOptions(), alpha) for alpha in every]
    assert len({media.identity for media in found}) == 3
    assert [media.notice.split(" (")[0] for media in found] == [
        "transparency is composited on white",
        "transparency is composited on black",
        "transparency is dropped",
    ]
    found = [probe(opaque, "image", MODEL, LimitOptions(), alpha) for alpha in every]
    assert len({media.identity for media in found}) == 1
    video = probe_frames([opaque, transparent], 2.0, MODEL, LimitOptions(), "black")
    assert (video.alpha, video.notice) == (
        "black",
        "transparency is composited on black (preprocess.alpha)",
    )
    assert probe_frames([opaque] * 2, 2.0, MODEL, LimitOptions()).alpha == "drop"


def test_an_animated_avif_says_that_one_frame_is_taken() -> None:
    assert (
        look(images.animated("AVIF", 3)).notice == "animated AVIF: only the first frame is encoded"
    )


@pytest.mark.parametrize(("format", "name"), [("GIF", "GIF"), ("WEBP", "WebP"), ("PNG", "PNG")])
def test_animations_say_that_one_frame_is_taken(format: str, name: str) -> None:
    assert look(images.animated(format, 5)).notice.startswith(f"animated {name}")
    assert look(images.animated(format, 1)).notice == ""


@pytest.mark.parametrize("torn", [b"\x21\xf9\0", b"\x21\xff", b"\x2c", b"\x2c" + bytes(6)])
def test_a_gif_that_is_cut_off_after_its_first_frame_is_an_image(torn: bytes) -> None:
    assert look(images.animated("GIF", 1).rstrip(b";") + torn).notice == ""


def test_a_jpeg_that_is_cut_off_says_so() -> None:
    data = images.jpeg(64, 64)
    for end in range(3, 100):
        with pytest.raises(InvalidMedia, match=r"no readable header|is not an image") as raised:
            look(data[:end])
        assert "unpack" not in str(raised.value)
        if "header" in str(raised.value):
            assert "send the whole file, or save it again (" in str(raised.value)


def test_long_gifs_take_no_time() -> None:
    head, begun = b"GIF89a\x01\0\x01\0\0\0\0", b"\x2c" + bytes(8) + b"\0\x02"
    started = time.process_time()
    assert look(head + (begun + b"\x01\x00\x00") * 500_000).notice.startswith("animated GIF")
    assert look(head + begun + b"\x01\x00" * 500_000).notice == ""
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
    "data",
    [
        images.png(30_000, 30_000),
        images.png(2**31 - 1, 2**31 - 1),
        images.png(60_000, 100),
        images.png(201, 1),
        b"BM" + bytes(12) + b"\x28\0\0\0" + b"\x30\x75\0\0" * 2 + b"\1\0\x18\0" + bytes(24),
        b"GIF89a\xff\xff\xff\xff\0\0\0" + b",\0\0\0\0\xff\xff\xff\xff\0\x02\x01\0\0;",
        b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xfe\x3f\0\xfe\x3f\0",
    ],
)
def test_declared_sizes_beyond_the_limits(data: bytes) -> None:
    with pytest.raises(TooLarge):
        look(data)


def test_the_limit_of_pixels_is_the_configured_one() -> None:
    data = images.jpeg(100, 100)
    probe(data, "image", MODEL, LimitOptions(max_pixels=10_000))
    with pytest.raises(TooLarge, match="100 x 100 pixels, over the limit of 9999"):
        probe(data, "image", MODEL, LimitOptions(max_pixels=9_999))
    # Over the size that makes Pillow warn, but under our limit.
    probe(images.png(13_000, 13_000), "image", MODEL, LimitOptions(max_pixels=170_000_000))


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 100, b"hello", b"\xff\xd8\xff", b"GIF89a", b"BM", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_invalid(data: bytes) -> None:
    with pytest.raises(InvalidMedia):
        look(data)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"%PDF-1.7\n", "PDF"),
        (b"\x1f\x8b\x08\0", "gzip"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b'<?xml version="1.0"?>\n<svg xmlns="">', "SVG"),
        (b"\0\0\1\0\1\0", "ICO"),
    ],
)
def test_other_formats_are_named(data: bytes, name: str) -> None:
    with pytest.raises(UnsupportedMedia, match=f"{name}.*send JPEG"):
        look(data)


def test_a_video_sent_as_an_image_is_told_how_to_be_sent() -> None:
    with pytest.raises(UnsupportedMedia, match=r"MP4.*send it as video/\*.*named video"):
        look(b"\0\0\0\x20ftypisom")


def test_models_without_video_refuse_it() -> None:
    kimi = registry.read(ModelOptions(id="kimivl-a3b", load_format="dummy"))
    with pytest.raises(UnsupportedMedia, match=r"\(kimi_vl\) takes images only"):
        probe(video(4), "video", kimi, LimitOptions())
    with pytest.raises(UnsupportedMedia, match="takes images only"):
        probe_frames([images.jpeg(64, 64)] * 4, 2, kimi, LimitOptions())


def test_a_video_is_known_from_its_header() -> None:
    media = probe(video(20, size=(64, 48), fps=10), "video", MODEL, LimitOptions())
    assert media.clip == Clip(Size(64, 48), 20, 10.0)
    assert MODEL.video
    assert media.plan == MODEL.video.plan(media.clip)
    assert (media.plan.grid_thw[0], media.plan.frames) == (2, 2)  # two seconds, two frames each


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_pixels": 3000}, "64 x 48 pixels, over the limit of 3000"),
        ({"max_video_frames": 19}, "20 frames or more, over the limit of 19"),
        ({"max_video_seconds": 1.5}, "lasts 2 s, over the limit of 1.5 s"),
        ({"max_video_tokens": 3}, "tokens in 2 groups of frames, over 3"),
        ({"max_video_pixels": 61_439}, "61440 pixels together, over the limit of 61439"),
    ],
)
def test_videos_beyond_the_limits(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(TooLarge, match=message):
        probe(video(20, size=(64, 48), fps=10), "video", MODEL, LimitOptions(**limits))


def test_what_decoding_a_video_costs_is_bounded_by_default() -> None:
    """20,000 frames that repeat the one before are 8 KB in gzip, and minutes of decoding."""
    limits = LimitOptions()

    def admitted(clip: Clip) -> Media:
        return video_media(MODEL, limits, clip, b"", (), ProcessorKwargs())

    assert admitted(Clip(Size(1920, 1080), limits.max_video_frames, 60.0))
    with pytest.raises(TooLarge, match=r"20000 frames of 7600 x 5200 .*limits.max_video_pixels"):
        admitted(Clip(Size(7600, 5200), 20_000, 24.0))


def test_frames_as_images() -> None:
    files = [images.jpeg(64, 48), *[images.encoded(images.opened().resize((64, 48)), "PNG")] * 4]
    media = probe_frames(files, None, MODEL, LimitOptions())
    assert media.clip == Clip(Size(64, 48), 5, 2.0, chosen=True)
    assert media.plan.grid_thw[0] == 3
    assert media.identity != probe_frames(files[::-1], 4.0, MODEL, LimitOptions()).identity
    with pytest.raises(InvalidMedia, match=r"frames\[1\] has 60 x 48"):
        probe_frames([files[0], images.jpeg(60, 48)], None, MODEL, LimitOptions())
    with pytest.raises(InvalidMedia, match=r"frames\[1\]: the file is not an image.*: send JPEG"):
        probe_frames([files[0], bytes(9)], None, MODEL, LimitOptions())
    with pytest.raises(InvalidMedia, match=r"a video of 1 frame: this model needs at least 2"):
        probe_frames(files[:1], None, MODEL, LimitOptions())
    with pytest.raises(InvalidMedia, match="no frames: send at least 2"):
        probe_frames([], None, MODEL, LimitOptions())
    with pytest.raises(TooLarge, match="769 frames"):
        probe_frames(files[:1] * 769, None, MODEL, LimitOptions())


def test_a_sampling_that_takes_nothing_of_a_video_says_so() -> None:
    """As transformers' processor of GLM-4.6V does of less than a sixth of a second."""
    assert MODEL.video is not None
    sizing = replace(MODEL.video, sampling=Thinning(2))
    clip = Clip(Size(64, 48), 100, 1000.0)
    with pytest.raises(InvalidMedia, match=r"100 frames at 1000 a second.*takes 0 .* needs 2"):
        sizing.plan(clip)
    assert sizing.plan(replace(clip, fps=30.0)).frames > 1
    few = MODEL.asked("video", ProcessorKwargs(num_frames=1)).video
    assert few is not None
    with pytest.raises(InvalidOption, match=r"num_frames: 1 gives 1 .* needs 2: raise it"):
        few.plan(clip)


@pytest.mark.parametrize("rule", [Timed(0.001, 300), Paced(0.001, 10), Middles(10, 0.001, True)])
@pytest.mark.parametrize("frames", [10, 10_000])
def test_a_very_low_rate_takes_a_frame(rule: Sampling, frames: int) -> None:
    assert rule.indices(frames, 30.0)


def test_truncated_files_pass_when_their_header_is_whole() -> None:
    data = images.photograph("rocket.jpg")
    assert look(data[: len(data) // 2]).plan == look(data).plan
    with pytest.raises(InvalidMedia):
        look(data[:100])


def scanned(scans: int, after: bytes = b"") -> bytes:
    """A progressive JPEG with its last scan again and again, and something behind it."""
    data = images.encoded(images.opened().resize((64, 48)), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * scans + data[-2:] + after


def test_jpegs_of_hundreds_of_scans_are_refused() -> None:
    with pytest.raises(InvalidMedia, match="more than 50 scans: save it again"):
        look(scanned(300))
    look(scanned(30))


def test_what_only_looks_like_scans_is_not_counted() -> None:
    profile = images.jpeg_segments(scanned(1), (0xE2, b"\xff\xda" * 200))
    look(profile)
    look(scanned(1, after=b"\xff\xda" * 200))


def test_a_search_for_scans_does_not_stop_the_event_loop() -> None:
    pixels = b"\xff" * 2**26 + b"\xff\xda\0\2" * 51

    def refuse() -> float:
        started = time.perf_counter()
        with pytest.raises(InvalidMedia, match="scans"):
            read_header(images.jpeg(8, 8)[:-2] + pixels)
        return time.perf_counter() - started

    async def test() -> None:
        work, longest = asyncio.create_task(asyncio.to_thread(refuse)), 0.0
        while not work.done():
            last = time.perf_counter()
            await asyncio.sleep(0.001)
            longest = max(longest, time.perf_counter() - last)
        assert longest < await work / 2

    asyncio.run(test())


def test_thousands_of_blocks_of_photoshop_are_not_read_on_the_event_loop() -> None:
    blocks = (b"Photoshop 3.0\0" + b"8BIM\4\4" + bytes(6)) + b"8BIM\4\4\0\0\0\0\0\0" * 5000
    data = images.jpeg(64, 64)
    hostile = data[:2] + b"\xff\xed" + struct.pack(">H", 2 + len(blocks)) + blocks + data[2:]
    assert read_header(hostile).size == Size(64, 64)
    assert is_simple(data)
    assert not is_simple(hostile)


def test_frames_of_another_size_than_their_avif_are_refused() -> None:
    data = bytearray(images.animated("AVIF", 3))
    at = data.index(b"tkhd") - 4
    end = at + struct.unpack_from(">I", data, at)[0]
    assert struct.unpack_from(">II", data, end - 8) == (60 << 16, 40 << 16)
    struct.pack_into(">II", data, end - 8, 16_000 << 16, 16_000 << 16)
    with pytest.raises(InvalidMedia, match="frames differ from it in size"):
        look(bytes(data))


def heic_with_metadata(blocks: int, extra: int, *, size_bytes: int = 32) -> bytes:
    """A HEIC whose Exif items all refer to the same `size_bytes` at its end, of `extra` bytes."""
    note = {"type": "Exif", "content_type": "", "data": bytes(4) + b"MM\0*" + bytes(24)}
    data = bytearray(images.encoded(images.opened(), "HEIF", metadata=[note] * blocks))
    end, at = len(data), data.index(b"iloc") + 12
    for item in range(blocks + 1):  # id, data reference, base, parts, offset, length
        entry = struct.unpack_from(">HHIHII", data, at + 18 * item)
        if item:
            struct.pack_into(">HHIHII", data, at + 18 * item, *entry[:2], end, 1, 0, size_bytes)
    return bytes(data) + bytes(extra)


def test_metadata_of_a_heic_may_be_long() -> None:
    assert look(heic_with_metadata(2, 2**20, size_bytes=2**20)).notice == ""


OVERLAPPING = [(0x9286, 7, 60_000, 0)] * 5_000
FLOODS: dict[str, Callable[[], bytes]] = {
    "segments between scans": lambda: images.jpeg_segments(
        scanned(0), *[(0xFE, b"")] * 500_000, (0xFE, b"\xff\xda" * 200)
    ),
    "fill bytes": lambda: b"\xff\xd8" + b"\xff" * 2**22 + b"\0" + b"\xff\xda" * 200,
    "segments": lambda: images.jpeg_segments(images.jpeg(60, 40), *[(0xE1, b"")] * 500_000),
    "chunks": lambda: images.png(60, 40, *[images.chunk(b"tEXt", b"a\0")] * 500_000),
    "exif": lambda: images.jpeg_segments(
        images.jpeg(60, 40), (0xE1, images.exif_with(OVERLAPPING))
    ),
    "metadata of a HEIC": lambda: heic_with_metadata(200, 2**20, size_bytes=2**20),
    "EXIF of a HEIC": lambda: images.encoded(
        images.opened(), "HEIF", exif=images.exif_with(OVERLAPPING)
    ),
    "boxes": lambda: heic()[:28] + b"\0\0\0\x08free" * 500_000 + heic()[28:],
    "two descriptions": lambda: heic() + heic()[28:],
    "tags": lambda: (
        b"II*\0\x08\0\0\0\xff\xff" + b"\x86\x92\x07\0\0\0\x10\0\0\0\0\0" * 65_535 + bytes(2**20)
    ),
}
"""Headers that take very long or very much, if one lets them."""


def heic() -> bytes:
    return images.encoded(images.opened(), "HEIF")


@pytest.mark.parametrize("name", FLOODS)
def test_floods_are_refused_soon(name: str) -> None:
    data = FLOODS[name]()
    started = time.process_time()
    with pytest.raises(InvalidMedia):
        look(data)
    assert time.process_time() - started < 1, f"{MOST_READS} reads should take far less"


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMATS), st.data())
def test_damaged_headers_give_media_or_an_error(format: str, draw: st.DataObject) -> None:
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    data = bytearray(images.encoded(image, format))
    for at in draw.draw(st.lists(st.integers(0, len(data) - 1), max_size=4)):
        data[at] = draw.draw(st.integers(0, 255))
    del data[draw.draw(st.integers(0, len(data))) :]
    with suppress(ServiceError):
        look(bytes(data))
