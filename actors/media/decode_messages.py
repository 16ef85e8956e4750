"""What an actor and the processes that decode for it say to each other: lists of numbers and text.

Bytes of media and patches do not travel: they lie in memory that both have (patch_memory.py). A
process that decoded strangers' bytes is not trusted: of its answers only an error's words count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgpack

from actors.errors import EncodeFailed, InvalidMedia, ServiceError, TooLarge, UnsupportedMedia
from actors.families.registry import read
from actors.media.arena import Place
from actors.options import ModelOptions
from actors.spec.checkpoint import Json, Notes
from actors.spec.model_spec import ModelSpec
from actors.types import Clip, ItemPlan, Media, Size

MOST_BYTES = 2**17
"""Of a message."""

MARK_BYTES, BEGUN = 1, 1
"""The last byte of a place says whether a process has begun the item: only then may it be what
ended the process."""

PLAN = [field.name for field in fields(ItemPlan)]

REFUSALS: dict[str, type[ServiceError]] = {
    error.__name__: error for error in (InvalidMedia, TooLarge, UnsupportedMedia)
}
"""Errors that are the item's own; all others are ours."""

Order = tuple[Any, ...]
"""Where an item's bytes lie, and what is known of it."""

Answer = tuple[float, str, str]
"""When it was begun, of time.monotonic, which all processes of a machine share; the name and the
words of what went wrong: empty where nothing did."""


def model_told(options: ModelOptions, files: Mapping[str, Json | None]) -> bytes:
    """What a process is told at its start: see model_of. `files`: what the spec is read from."""
    return json.dumps({"options": options.model_dump(), "files": files}).encode()


def model_of(told: bytes) -> ModelSpec:
    """The spec, without a look at the model's files: they may have changed, or be out of reach."""
    known = json.loads(told)
    return read(ModelOptions.model_validate(known["options"]), Notes(known["files"]))


def order(place: Place, media: Media) -> Order:
    """See media_of: where its files lie one after the other."""
    plan = [getattr(media.plan, name) for name in PLAN]
    clip, sizes = media.clip, [len(data) for data in files_of(media)]
    about = clip and (clip.size.width, clip.size.height, clip.frames, clip.fps, clip.chosen)
    return place.start, place.end, media.kind, sizes, plan, about


def media_of(order: Order, memory: memoryview) -> tuple[Place, Media]:
    """Where the patches go, and a copy of what lies there now; marks that it is begun."""
    start, end, kind, sizes, plan, about = order
    memory[end - MARK_BYTES] = BEGUN
    files, at = [], start
    for size in sizes:
        files.append(bytes(memory[at : at + size]))
        at += size
    if about is None:
        return Place(start, end), Media(kind, files[0], ItemPlan(*plan), digest="")
    width, height, *rest = about
    clip = Clip(Size(width, height), *rest)
    data, *frames = files
    media = Media(kind, data, ItemPlan(*plan), digest="", clip=clip, frames=tuple(frames))
    return Place(start, end), media


def files_of(media: Media) -> Sequence[bytes]:
    """Its bytes, and those of its frames."""
    return media.data, *media.frames


def answer(began: float, error: Exception | None) -> Answer:
    """See error_of."""
    if error is None:
        return began, "", ""
    text = error.message if isinstance(error, ServiceError) else f"{error!r}"
    return began, type(error).__name__, text[:1000]


def error_of(name: str, text: str) -> ServiceError | None:
    """What went wrong, in an answer's words."""
    if not name:
        return None
    refusal = REFUSALS.get(name)
    return refusal(text) if refusal else EncodeFailed(f"the encoder failed on this item: {text}")


def packed(values: Sequence[Any]) -> bytes:
    """A message. What of a decoder's words is no Unicode becomes question marks."""
    message: bytes = msgpack.packb(values, unicode_errors="replace")
    return message


def unpacked(message: bytes) -> tuple[Any, ...]:
    """Of `packed`; lists come as tuples. Raises ValueError for what is no message."""
    values: tuple[Any, ...] = msgpack.unpackb(message, use_list=False)
    return values
