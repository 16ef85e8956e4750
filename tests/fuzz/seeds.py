"""Good inputs of every kind, which the fuzzers change, and those that once failed."""

from __future__ import annotations

import base64
import json
from functools import cache
from io import BytesIO
from pathlib import Path

import msgpack
from PIL import Image

from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.encoder_grpc import packed
from encoder_service.wire.formats import JSON, write_safetensors
from tests.checkpoints_audio import FORMATS, sound, tones
from tests.images import animated, encoded, exif_with, jpeg, jpeg_segments, opened, png
from tests.videos import video

CORPUS = Path(__file__).parent / "corpus"
"""Inputs that a fuzzer once failed with, by target. They are tried first, every time."""


def corpus(target: str) -> list[bytes]:
    """Those of one target."""
    return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


@cache
def images() -> list[bytes]:
    """Small files of each format and mode that is taken."""
    small = opened().resize((40, 24))
    made = [
        encoded(small, "JPEG", orientation=6),
        encoded(small, "JPEG", progressive=True),
        encoded(small.convert("CMYK"), "JPEG"),
        encoded(small.convert("L"), "JPEG"),
        encoded(small, "PNG", orientation=8),
        encoded(small.convert("P"), "PNG", transparency=3),
        encoded(small.convert("I;16"), "PNG"),
        encoded(small.convert("RGBA"), "WEBP"),
        *(encoded(small.convert("RGBA"), kind, orientation=6) for kind in ("HEIF", "AVIF")),
        encoded(small.convert("F"), "TIFF"),
        encoded(small, "WEBP", lossless=True),
        encoded(small, "BMP"),
        encoded(small.convert("1"), "BMP"),
        encoded(small, "GIF"),
        *(encoded(small, "TIFF", compression=kind) for kind in ("raw", "tiff_lzw", "tiff_deflate")),
        *(animated(kind, 3) for kind in ("GIF", "WEBP", "PNG")),
        png(40, 24),
        jpeg_segments(jpeg(40, 24), (0xE1, exif_with([(0x0112, 3, 1, 6)]))),
    ]
    return [one for one in made if Image.open(BytesIO(one)).size]


@cache
def videos() -> list[bytes]:
    """Small files of some containers."""
    return [
        video(4),
        video(4, container="matroska"),
        video(4, container="webm", codec="libvpx"),
        video(4, container="avi", codec="mpeg4"),
        *(animated(kind, 3) for kind in ("GIF", "WEBP")),
    ]


@cache
def sounds() -> list[bytes]:
    """Small files of each format."""
    return [sound(tones(0.2), format) for format in FORMATS]


@cache
def requests(content_type: str) -> list[bytes]:
    """Requests in JSON or msgpack."""
    data = jpeg(28, 28)
    options = {"dtype": "float32", "timeout_s": 5.0, "on_error": "return"}
    text = content_type == JSON
    sent = base64.b64encode(data).decode() if text else data
    items = [{"type": "image", "data": sent}, {"type": "image", "url": "https://a.example/b"}]
    document = {"items": items, "options": options}
    pack = msgpack.packb
    return [json.dumps(document).encode()] if text else [pack(document), pack({"items": []})]


@cache
def responses() -> list[bytes]:
    """Answers in safetensors, as a client reads them over HTTP."""
    item = {
        "index": 0,
        "type": "image",
        "grid_thw": [1, 2, 2],
        "tokens": 1,
        "dtype": "bfloat16",
        "shape": [1, 4],
        "data": bytes(8),
        "digest": "ab",
        "source": "graph",
        "deepstack": 0,
    }
    error = {"index": 1, "type": "image", "error": {"type": "too_large", "message": "no"}}
    answer = {"model": "m", "weights": "dummy", "items": [item, error], "timings": {"total_ms": 1}}
    return [b"".join(write_safetensors(answer, ""))]


@cache
def messages() -> list[bytes]:
    """gRPC requests."""
    items = [pb.Item(type="image", data=jpeg(28, 28)), pb.Item(url="https://a.example/b")]
    options = pb.Options(dtype="float32", timeout_s=5, on_error="return")
    return [
        pb.EncodeRequest(items=items, options=options).SerializeToString(),
        pb.EncodeRequest(items=items[:1]).SerializeToString(),
    ]


@cache
def grpc_responses() -> list[bytes]:
    item = pb.Embedding(index=1, dtype="float16", shape=[2, 3], grid_thw=[1, 4, 2])
    failed = pb.Embedding(index=0, error=pb.Error(type="invalid_request", retryable=True))
    outer = pb.EncodeResponse(model="m", timings=pb.Timings(total_ms=1))
    return [packed(outer, [(item, bytes(12)), (failed, b"")])]


@cache
def forms() -> list[bytes]:
    """Bodies of multipart/form-data with the boundary BB."""
    head = b'--BB\r\nContent-Disposition: form-data; name="'
    file = head + b'image"; filename="a.jpg"\r\n\r\n' + jpeg(28, 28) + b"\r\n"
    options = head + b'options"\r\n\r\n{"dtype": "float32"}\r\n'
    return [file + options + b"--BB--\r\n", file + b"--BB--\r\n"]
