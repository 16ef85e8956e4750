"""Request and response documents: their fields, and their bytes in each content type.

Knows neither HTTP, gRPC, models nor limits on items. A response document:

    {"model", "family", "weights", "items": [item, ...], "timings": {name: milliseconds}}

An item has "index", "type" and either "error" or all of "grid_thw", "tokens", "dtype", "shape",
"digest", "source", "deepstack", perhaps "notice", and either "data" or "reference", an id to fetch
it by. "data" is any contiguous buffer when written, and bytes when read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from encoder_service.wire import tensors
from encoder_service.wire.formats import (
    JSON,
    MSGPACK,
    READERS,
    WRITERS,
    Document,
    Piece,
    WireError,
    check_json,
    check_msgpack,
    from_base64,
    read_json,
    read_msgpack,
)

__all__ = ["Document", "RequestItem", "WireError", "parse_request", "parse_response", "render"]


@dataclass(frozen=True, slots=True)
class RequestItem:
    """One item of a request, with one of `data`, `url` and `frames`."""

    type: Literal["image", "video"]
    data: bytes | None = None
    """The file, still compressed."""
    url: str | None = None
    frames: tuple[bytes, ...] | None = None
    """A video as image files."""
    fps: float | None = None

    def document(self) -> Document:
        """The entry of "items" in a msgpack request."""
        if self.frames is not None:
            rate = {} if self.fps is None else {"fps": self.fps}
            return {"type": self.type, "frames": list(self.frames), **rate}
        source = {"url": self.url} if self.data is None else {"data": self.data}
        return {"type": self.type, **source}


def parse_request(body: bytes, content_type: str) -> tuple[list[RequestItem], dict[str, Any]]:
    """The items of a request, and its options, which are not checked. Raises WireError."""
    media_type = without_parameters(content_type)
    if media_type.startswith("image/"):
        return [RequestItem("image", body, None)], {}
    if media_type.startswith("video/"):
        return [RequestItem("video", body, None)], {}
    if media_type == MSGPACK:
        check_msgpack(body)
        document = read_msgpack(body)
    elif media_type == JSON:
        check_json(body)
        document = read_json(body)
    else:
        raise WireError(
            f"content type {content_type!r} is not supported: send {JSON}, {MSGPACK}, "
            "multipart/form-data, one image as image/* or one video as video/*",
            "unsupported",
        )
    check_keys(document, {"items", "options"}, "the request")
    items, options = document.get("items"), document.get("options")
    options = {} if options is None else options
    if not isinstance(items, list):
        raise WireError('the request needs "items", a list')
    if not isinstance(options, dict):
        raise WireError('"options" must be a map')
    return [parse_item(item, f"items[{i}]") for i, item in enumerate(items)], options


def parse_item(item: Any, where: str) -> RequestItem:
    """One entry of "items". Data is bytes in msgpack, base64 in JSON."""
    if not isinstance(item, dict):
        raise WireError(f"{where} must be a map")
    check_keys(item, {"type", "data", "url", "frames", "fps"}, where)
    if item.get("frames") is not None:
        return parse_frames(item, where)
    kind, data, url = item.get("type", "image"), item.get("data"), item.get("url")
    if kind not in ("image", "video"):
        raise WireError(f'{where}.type must be "image" or "video", not {kind!r}')
    if (data is None) == (url is None):
        raise WireError(f'{where} needs either "data" or "url"')
    if item.get("fps") is not None:
        raise WireError(f'{where}.fps goes with "frames": a video file has its own')
    if url is not None and not isinstance(url, str):
        raise WireError(f"{where}.url must be a string")
    return RequestItem(kind, None if data is None else content(data, f"{where}.data"), url)


def parse_frames(item: Document, where: str) -> RequestItem:
    frames, fps = item["frames"], item.get("fps")
    if item.get("type") != "video":
        raise WireError(f'{where}.frames: the type must be "video"')
    if item.get("data") is not None or item.get("url") is not None:
        raise WireError(f'{where} needs one of "data", "url" and "frames"')
    if not isinstance(frames, list):
        raise WireError(f"{where}.frames must be a list")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float)):
        raise WireError(f"{where}.fps must be a number")
    if fps is not None and not 0 < fps < math.inf:
        raise WireError(f"{where}.fps must be above zero")
    files = tuple(content(one, f"{where}.frames[{i}]") for i, one in enumerate(frames))
    return RequestItem("video", frames=files, fps=fps)


def content(data: Any, where: str) -> bytes:
    """The bytes of a file, which are base64 in JSON."""
    if isinstance(data, str):
        data = from_base64(data, where)
    if not isinstance(data, bytes):
        raise WireError(f"{where} must be bytes (msgpack) or base64 (JSON)")
    return data


def render(answer: Document, accept: str, encoding: str = "base64") -> tuple[list[Piece], str]:
    """The body in pieces and its content type, as an Accept header asks; msgpack if it is empty.

    `encoding`, for JSON: "base64", or "float" for rows of numbers. Raises WireError.
    """
    media_type = choose(accept)
    return WRITERS[media_type](answer, encoding), media_type


def parse_response(body: bytes | bytearray, content_type: str) -> Document:
    """The document of a response, with every item's "data" as bytes. Raises WireError."""
    reader = READERS.get(without_parameters(content_type))
    if reader is None:
        raise WireError(f"a response of content type {content_type!r} is not supported")
    document = reader(body)
    try:
        for item in document["items"]:
            data = item.get("data")
            if isinstance(data, str):
                item["data"] = from_base64(data, f"items[{item['index']}].data")
            elif isinstance(data, list):
                item["data"] = tensors.from_rows(data, item["dtype"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WireError(f"not a response of this service: {error!r}") from error
    return document


def choose(accept: str) -> str:
    """The content type that an Accept header prefers: by q, then exactness, then order."""
    best, chosen = (0.0, 0, 0), None
    for position, entry in enumerate((accept.strip() or "*/*").split(",")):
        wanted, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            raise WireError(f"Accept: q={quality!r} is not a number") from None
        exactness = 2 - wanted.count("*")
        for media_type in WRITERS:
            if wanted in ("*/*", "application/*", media_type):
                rank = (weight, exactness, -position)
                if weight > 0 and (chosen is None or rank > best):
                    best, chosen = rank, media_type
                break
    if chosen is None:
        raise WireError(
            f"Accept: {accept!r} is not available; available are {', '.join(WRITERS)}",
            "unsupported",
        )
    return chosen


def check_keys(given: Document, known: set[str], where: str) -> None:
    """Raises WireError for an unknown key, which is most often a typo."""
    for key in given:
        if key not in known:
            raise WireError(f"{where} has an unknown key {key!r}; known are {sorted(known)}")


def without_parameters(content_type: str) -> str:
    return content_type.split(";")[0].strip().lower()
