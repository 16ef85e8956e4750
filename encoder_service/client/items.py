"""What a caller sends, gets and catches: sources, embeddings, errors.

Only `Embedding.torch`, and the methods that pass embeddings to engines, need torch.
"""

from __future__ import annotations

import math
import os
import re
import stat
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from io import BytesIO
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from PIL import Image

from encoder_service.wire.documents import (
    KWARGS,
    SOUNDS,
    VIDEOS,
    RequestItem,
    check_option,
    name_format,
)
from encoder_service.wire.formats import WIDTHS, Document, WireError, to_array

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result", "Embedding", "Plan")

File = str | Path | bytes | Image.Image

IMAGES = re.compile(
    r"\.(jpe|jpe?g|jfif|a?png|webp|gif|bmp|dib|tiff?|hei[cf]|hif|avif|mpo|jp2|j2k|jxl|ico|psd)",
    re.I,
)
FILMS = re.compile(r"\.(mp4|m4v|mov|qt|webm|mkv|avi|m2?ts|mpe?g|3gp|3g2|ogv|wmv|flv)", re.I)
AUDIO = re.compile(r"\.(wav|flac|mp3|og[ga]|opus|m4a|aac|aiff?|wma|amr)", re.I)
"""Suffixes of each kind, including formats that the service does not read. It names the format when
it rejects the file."""
SENT_AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B")
"""Pillow's modes that PNG holds as they are."""
CONVERTED = {
    **dict.fromkeys(("CMYK", "YCbCr", "HSV", "LAB", "RGBX"), "RGB"),
    **{"RGBa": "RGBA", "PA": "RGBA", "La": "LA"},
}
"""Pillow's modes that are converted first; JPEGs made for print are CMYK."""


@dataclass(frozen=True, slots=True)
class Frames:
    """A video as a list of images of one size, all of which are encoded."""

    images: Sequence[File]
    """Paths, bytes of files or images; no URLs."""
    fps: float | None = None
    """Frames per second; None: the model's own sampling rate."""


@dataclass(frozen=True, slots=True)
class Video:
    """A file that is a video whatever its name, such as an animated GIF or WebP, of which otherwise
    only the first frame is encoded."""

    file: str | Path | bytes


@dataclass(frozen=True, slots=True)
class Text:
    """A text, for `Client.embed`."""

    text: str


class ProcessorOptions(TypedDict, total=False):
    """How items are sized and sampled, with options named as in transformers' processors.

    `Client.model()` shows under "processor_kwargs" which of these a model takes, their defaults and
    their largest values.
    """

    min_pixels: int | None
    """Smaller images and video frames are enlarged to this size."""
    max_pixels: int | None
    """Larger images and video frames are shrunk to this size."""
    max_patches: int | None
    """For models that cut tiles: maximum tiles of an image. For Kimi and SigLIP 2: maximum patches
    of an image or a frame."""
    fps: float | None
    """Frames to take per second of a video file."""
    num_frames: int | None
    """Frames to take of a video file, instead of `fps`."""


class Input:
    """A source with options of its own: Input("scan.png", max_pixels=4_000_000)."""

    def __init__(self, source: File | Video | Frames, **options: Unpack[ProcessorOptions]) -> None:
        """Raises TypeError for an unknown option."""
        self.source = source
        self.options = given(options)
        if isinstance(source, Frames) and {"fps", "num_frames"} & self.options.keys():
            raise TypeError("all Frames are encoded: Frames(images, fps=...) has their rate")


Source = File | Video | Frames | Input
"""A path, an https URL, the bytes of a file, an image (sent as PNG), a video, or frames; or one of
these with options of its own."""


def given(options: ProcessorOptions, *others: str) -> dict[str, Any]:
    """The options that are not None. Raises TypeError for an unknown option; its message also lists
    `others`, the options of the call itself."""
    for name in options:
        if name not in KWARGS:
            known = ", ".join([*KWARGS, *others])
            hint = "; for a timeout, see Client(timeout_seconds=...)" if "timeout" in name else ""
            raise TypeError(f"there is no option {name!r}; options are {known}{hint}")
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Embedding:
    """One item's rows, in the order of the model's own processor."""

    index: int
    """Position in the list that was sent."""
    type: str
    grid_thw: tuple[int, int, int]
    """Temporal groups, rows and columns, in patches."""
    tokens: int
    dtype: str
    shape: tuple[int, ...]
    """Tokens, width."""
    data: bytes | bytearray = field(repr=False, hash=False)
    """Row-major, little-endian. Values of float8_e4m3 have to be multiplied by `scales`."""
    digest: str
    """Hexadecimal SHA-256 of the item's bytes."""
    source: str
    """"graph", "eager" or "cache"."""
    deepstack: int
    """How many deepstack features follow the main one in each row."""
    model: str
    weights: str
    """"checkpoint", or "dummy": random numbers."""
    family: str = ""
    """The model's family, such as "qwen3_vl". Empty if the service does not say."""
    notice: str = ""
    """A warning from the service about this item."""
    timestamps: tuple[float, ...] = ()
    """For a video: the time of each temporal group, in seconds."""
    second_per_grid_ts: float = 0.0
    """For a video: seconds from one temporal group to the next."""
    frame_tokens: tuple[int, ...] = ()
    """For a video sent with `evs_rate`: how many rows each temporal group has left."""
    kept_rows: tuple[int, ...] = ()
    """For a video sent with `evs_rate`, or an image that the service's `preprocess.prune` has
    pruned: the indices of these rows among all rows of the grid. Empty if no rows were dropped."""
    reference: str = ""
    """The id under which the service keeps it, for `Client.fetch`. `data` is then empty."""
    scales: bytes | bytearray = field(default=b"", repr=False, hash=False)
    """For float8_e4m3: float32 [tokens], little-endian."""
    timings: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Milliseconds of the whole request: "total_ms", and the maximum of each stage."""

    def numpy(self) -> npt.NDArray[Any]:
        """Returns an array [tokens, width]. bfloat16 and float8_e4m3, which numpy lacks, become
        float32. Arrays of other dtypes are read-only."""
        data = memoryview(self.rows()).toreadonly()
        return to_array(data, self.dtype, self.shape, self.scales)

    def torch(self) -> torch.Tensor:
        """Returns a tensor [tokens, width] on the CPU in its own dtype, but float8_e4m3 becomes
        bfloat16. Needs torch.

        The quantised values are `torch.frombuffer(data, dtype=torch.float8_e4m3fn)`.
        """
        import torch

        memory = torch.frombuffer(bytearray(self.rows()), dtype=torch.uint8)
        if self.dtype == "float8_e4m3":
            values = memory.view(torch.float8_e4m3fn).view(self.shape)
            scales = torch.frombuffer(bytearray(self.scales), dtype=torch.float32)
            return values.float().mul_(scales[:, None]).bfloat16()
        return memory.view(getattr(torch, self.dtype)).view(self.shape)

    def to_vllm(self) -> dict[str, Any]:
        """Returns a part of a chat message for vLLM: see engines.vllm.content_part. Needs torch.

        For a reference, the part has its id, for a vLLM server with EncoderServiceConnector.
        """
        from encoder_service.engines.vllm import content_part  # which imports this file

        return content_part(self)

    def to_sglang(self) -> dict[str, Any]:
        """Returns `image_data` or `video_data` for SGLang. For several embeddings, use
        engines.sglang.processor_output."""
        from encoder_service.engines.sglang import processor_output  # which imports this file

        return processor_output([self])

    def rows(self) -> bytes | bytearray:
        if self.reference:
            raise ValueError(f"a reference has no rows: Client.fetch({self.reference!r}) gets them")
        return self.data


@dataclass(frozen=True, slots=True)
class Plan:
    """What one item would cost, from its header alone."""

    index: int
    """Position in the list that was sent."""
    type: str
    width: int
    """Pixels of the upright image, or of each frame of a video; 0: a sound."""
    height: int
    grid_thw: tuple[int, int, int]
    """The same as its embedding's."""
    tokens: int
    """Rows of its embedding: the placeholder tokens of the prompt."""
    patches: int
    """What encoding it costs."""
    digest: str
    """Hexadecimal SHA-256 of the item's bytes, the same as its embedding's."""
    notice: str = ""
    timestamps: tuple[float, ...] = ()
    """For a video: the time of each temporal group, in seconds."""
    second_per_grid_ts: float = 0.0
    """For a video: seconds from one temporal group to the next."""
    seconds: float = 0.0
    """Length of a sound."""


class ServiceError(Exception):
    """The service rejected or failed a request, or its item at position `item`."""

    def __init__(
        self,
        type: str,
        message: str,
        status: int | str | None = None,
        item: int | None = None,
        retryable: bool = False,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(type, message, status, item, retryable, retry_after_seconds)
        self.type = type
        """Such as "too_large": the same words over HTTP and gRPC."""
        self.message = message
        self.status = status
        """HTTP status or name of the gRPC code; None without an answer, or for an item's error."""
        self.item = item
        self.retryable = retryable
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        where = "" if self.item is None else f" (item {self.item})"
        return f"{self.type}{where}: {self.message}"


TOKEN = "Client(url, token=...), or ENCODER_SERVICE_TOKEN for the command line"
"""Where to give a token, for error messages."""


def service_error(
    document: Mapping[str, Any],
    status: int | str | None = None,
    retry_after_seconds: float | None = None,
) -> ServiceError:
    """The exception for the service's {"type", "message", "item", "retryable"}."""
    kind, message = document.get("type", "internal_error"), document.get("message", "no message")
    return ServiceError(
        str(kind),
        f"{message}; {TOKEN}" if kind == "unauthorized" else str(message),
        status,
        document.get("item"),
        bool(document.get("retryable", False)),
        retry_after_seconds,
    )


def embedding_input(source: File | Text) -> dict[str, Any]:
    """An entry of `input` of POST /v1/embeddings. Reads files. Raises OSError, TypeError."""
    if isinstance(source, Text):
        return {"type": "text", "text": source.text}
    try:
        item = request_item(source)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no file {source!r:.100}; a text is a Text(...)"
        ) from None
    if item.type != "image" or item.own():
        raise TypeError("embed takes images and texts, without options of their own")
    url = item.url or f"data:image/*;base64,{b64encode(item.data or b'').decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def read_vectors(document: Mapping[str, Any]) -> npt.NDArray[np.float32]:
    """float32 [inputs, dimensions] of a response with base64. Raises ServiceError."""
    with reading():
        rows = [b64decode(one["embedding"], validate=True) for one in document["data"]]
        return np.stack([np.frombuffer(row, "<f4") for row in rows])


LISTS = ("grid_thw", "shape", "timestamps", "frame_tokens", "kept_rows")
"""An item's fields that are lists in a document and tuples in an Embedding or Plan."""


def read_items(document: Mapping[str, Any], count: int) -> list[Embedding | ServiceError]:
    """The items of a response document. Raises ServiceError if it is not one of `count` items."""
    with reading():
        check_count(document, count)
        shared = {name: document[name] for name in ("model", "weights", "timings")}
        shared |= {"family": document.get("family", ""), "data": b""}
        found = [read_item(Embedding, shared, item) for item in document["items"]]
        for one in found:
            if isinstance(one, Embedding) and not one.reference:
                check_size(one)
        return found


def read_plans(document: Mapping[str, Any], count: int) -> list[Plan | ServiceError]:
    """The items of a plan's document. Raises ServiceError if it is not one of `count` items."""
    with reading():
        check_count(document, count)
        return [read_item(Plan, {}, item) for item in document["items"]]


def check_size(one: Embedding) -> None:
    expected = math.prod(one.shape) * WIDTHS[one.dtype]
    if len(one.data) != expected:
        raise ValueError(f"item {one.index} has {len(one.data)} bytes, not {expected}")


def check_count(document: Mapping[str, Any], count: int) -> None:
    if (found := len(document["items"])) != count:
        raise ValueError(f"{found} items, not {count}")


@contextmanager
def reading() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        message = f"not a response of this service: {error!r}"
        raise ServiceError("invalid_response", message) from error


def read_item(
    kind: type[Result], shared: Mapping[str, Any], item: Mapping[str, Any]
) -> Result | ServiceError:
    """Ignores fields that this version does not know: a newer service may send more."""
    if "error" in item:
        return service_error(item["error"])
    lists = {name: tuple(item[name]) for name in LISTS if name in item}
    known = {one.name for one in fields(kind)}
    values = {**shared, **item, **lists}
    return kind(**{name: value for name, value in values.items() if name in known})


def request_item(source: Source) -> RequestItem:
    """What is sent for a source. Reads files. Raises OSError, TypeError."""
    if isinstance(source, Input):
        return replace(request_item(source.source), **source.options)
    if isinstance(source, Frames):
        images = [request_item(image) for image in source.images]
        if url := next((one.url for one in images if one.url), None):
            raise TypeError(f"Frames are paths, bytes of files or images, not URLs such as {url}")
        files = tuple(one.data or b"" for one in images)
        return RequestItem("video", frames=files, fps=source.fps)
    if isinstance(source, Video):
        return replace(request_item(source.file), type="video")
    if isinstance(source, bytes):
        format = name_format(source)
        if format in SOUNDS:
            return RequestItem("audio", source)
        return RequestItem("video" if format in VIDEOS else "image", source)
    if isinstance(source, Image.Image):
        return RequestItem("image", png(source))
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            "a source is a path, an https URL, the bytes of a file, a PIL image, Video, Frames or "
            f"Input, not {type(source).__name__}: PIL.Image.fromarray makes an image of an array"
        )
    name = str(source)
    kind = kind_of(name) or "image"
    if name.startswith("http://"):
        raise OSError(f"{name}: only https URLs are accepted")
    if name.startswith("https://"):
        return RequestItem(kind, url=name)
    if not stat.S_ISREG(Path(name).stat().st_mode):  # reading a named pipe may never end
        raise OSError(f"{printable(name)}: not a regular file")
    return RequestItem(kind, Path(name).read_bytes())


def check_each(values: Document, where: str, encode: Callable[[str, Any], object]) -> None:
    """Raises ServiceError for the first value that `encode(name, value)` rejects, with
    OverflowError, TypeError or ValueError."""
    for name, value in values.items():
        try:
            if name in KWARGS:
                check_option(name, value)
            encode(name, value)
        except WireError as error:
            raise ServiceError("invalid_option", f"not sent: {where}.{error}") from None
        except (OverflowError, TypeError, ValueError):
            shown = f"not sent: {where}.{name} cannot be {value!r:.40}"
            raise ServiceError("invalid_option", shown) from None


def printable(path: str) -> str:
    """A path as UTF-8 text: bytes that are not UTF-8 become \\x and two hexadecimal digits."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def kind_of(name: str) -> Literal["image", "video", "audio"] | None:
    """The kind of a file by its name, the same on every machine. None: none of these."""
    suffix = PurePath(urlsplit(name).path if name.startswith("https://") else name).suffix
    if AUDIO.fullmatch(suffix):
        return "audio"
    return "image" if IMAGES.fullmatch(suffix) else "video" if FILMS.fullmatch(suffix) else None


def png(image: Image.Image) -> bytes:
    """A PNG file. Raises OSError for modes such as I and F, whose values have no known range."""
    if image.mode not in SENT_AS_PNG:
        if image.mode not in CONVERTED:
            raise OSError(
                f"an image of mode {image.mode}: the range of its values is unknown; scale them to "
                "0 to 255 and convert it to L or RGB"
            )
        image = image.convert(CONVERTED[image.mode])
    file = BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()
