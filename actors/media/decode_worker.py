"""A decoding process, and the shared memory and messages between it and the replica.

`python -m actors.media.decode_worker SOCKET MEMORY` takes two file descriptors. It reads the model
from stdin, sends the fingerprint of its spec, and decodes the items that it is sent until the
socket closes. Messages are in msgpack, because a process that parses untrusted files must not be
able to send anything that runs code when read.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import signal
import socket
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from math import prod
from time import monotonic
from typing import Any

import msgpack
import numpy as np
import torch

from actors.allocator import Allocator
from actors.errors import EncodeFailed, InvalidMedia, ServiceError, TooLarge, UnsupportedMedia
from actors.families.registry import read
from actors.media.image import prepare
from actors.media.patchify import Patchifier, Shape, patchifier_of
from actors.options import ModelOptions
from actors.rows.shared import sealed_file
from actors.spec.checkpoint import Json, Notes
from actors.spec.model_spec import ModelSpec
from actors.types import Clip, Item, ItemPlan, Media, ProcessorKwargs, Size

MARK_BYTES, BEGUN = 1, 1
"""A process sets the last byte of a block when it begins the item. Only an item that was begun can
have crashed its process."""

MAX_MESSAGE_BYTES = 2**17
MAX_UNSENT_SECONDS = 0.002  # how long answers wait to be sent together

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>: the signal to send when the thread that started this ends

PLAN = [field.name for field in fields(ItemPlan)]

ITEM_ERRORS: dict[str, type[ServiceError]] = {
    error.__name__: error for error in (InvalidMedia, TooLarge, UnsupportedMedia)
}
"""Errors that the client caused. All others become EncodeFailed."""

Order = tuple[Any, ...]
"""One item to decode: offset and size of its block, kind, sizes of its files, plan, clip, alpha,
kwargs, width and height, prune."""

Answer = tuple[float, str, str, bytes]
"""When the item was begun (time.monotonic, which processes of one machine share), the name and
message of its error, both empty if there was none, and `blocks` of its plan."""

log = logging.getLogger(__name__)


class Slab(Allocator):
    """Shared memory between a replica and its decoding processes. Patches replace files in place.

    A block is freed when the last array that refers to it is.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.file = sealed_file("patches", size_bytes)
        self.bytes = memoryview(mmap.mmap(self.file, size_bytes))

    def write(self, offset: int, size_bytes: int, media: Media) -> None:
        """Writes an item's files, one after the other, and clears the mark of a begun item."""
        self.bytes[offset + size_bytes - MARK_BYTES] = not BEGUN
        for data in files_of(media):
            self.bytes[offset : offset + len(data)] = data
            offset += len(data)

    def begun(self, offset: int, size_bytes: int) -> bool:
        return self.bytes[offset + size_bytes - MARK_BYTES] == BEGUN

    def item(self, offset: int, plan: ItemPlan, shape: Shape) -> Item:
        """The item whose patches a process wrote to this block. The block is freed when the item's
        arrays are."""
        # The item's arrays are views, which keep a reference to this array.
        whole = np.frombuffer(self.bytes, np.uint8, prod(shape), offset)
        weakref.finalize(whole, self.give_back, offset).atexit = False
        patches, *later = whole.reshape(shape)
        return Item(plan, patches, later[0] if later else None)

    def close(self) -> None:
        """No more processes can open it. Items that refer to it stay valid."""
        os.close(self.file)


def size_of(media: Media, shape: Shape) -> int:
    """The size of an item's block: its files, which its patches replace, and the mark."""
    return max(sum(map(len, files_of(media))), prod(shape)) + MARK_BYTES


def files_of(media: Media) -> Sequence[bytes]:
    return media.data, *media.frames


def model_message(options: ModelOptions, files: dict[str, Json | None]) -> bytes:
    """The message that a process reads from stdin. `files`: those that the spec is read from."""
    return json.dumps({"options": options.model_dump(), "files": files}).encode()


def spec_of(message: bytes) -> ModelSpec:
    """The replica's spec. Does not read the model's files, which may have changed since."""
    told = json.loads(message)
    return read(ModelOptions.model_validate(told["options"]), Notes(told["files"]))


def order_of(media: Media, offset: int, size_bytes: int) -> Order:
    plan, clip = [getattr(media.plan, name) for name in PLAN], media.clip
    shown = clip and (clip.size.width, clip.size.height, clip.frames, clip.fps, clip.chosen)
    sizes = [len(data) for data in files_of(media)]
    kwargs, size = media.kwargs.given(), media.size and (media.size.width, media.size.height)
    return (
        *(offset, size_bytes, media.kind, sizes, plan, shown, media.alpha, kwargs, size),
        media.prune,
    )


def media_of(order: Order, memory: memoryview) -> Media:
    """Marks an item as begun, and copies its files out of its block."""
    offset, size_bytes, kind, sizes, plan, shown, alpha, kwargs, whole, prune = order
    memory[offset + size_bytes - MARK_BYTES] = BEGUN
    files, clip = [], None
    for size in sizes:
        files.append(bytes(memory[offset : offset + size]))
        offset += size
    if shown is not None:
        width, height, *rest = shown
        clip = Clip(Size(width, height), *rest)
    data, *frames = files
    return Media(
        kind,
        data,
        ItemPlan(*plan),
        digest="",
        clip=clip,
        frames=tuple(frames),
        alpha=alpha,
        kwargs=ProcessorKwargs(**kwargs),
        size=whole and Size(*whole),
        prune=prune,
    )


def answer_of(began: float, error: Exception | None, blocks: bytes = b"") -> Answer:
    if error is None:
        return began, "", "", blocks
    text = error.message if isinstance(error, ServiceError) else repr(error)
    return began, type(error).__name__, text[:1000], b""


def error_of(name: str, text: str) -> ServiceError | None:
    if not name:
        return None
    known = ITEM_ERRORS.get(name)
    return known(text) if known else EncodeFailed(f"the encoder failed on this item: {text}")


def packed(values: Sequence[Any]) -> bytes:
    """Packs a message. Characters of an error that are not valid Unicode become question marks."""
    message: bytes = msgpack.packb(values, unicode_errors="replace")
    return message


def unpacked(message: bytes) -> tuple[Any, ...]:
    """The values of a message, lists as tuples. Raises ValueError if it is not valid msgpack."""
    values: tuple[Any, ...] = msgpack.unpackb(message, use_list=False)
    return values


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the replica
    # A process that hangs in a file does not see its socket close, so the kernel has to kill it.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        memory = memoryview(mmap.mmap(int(sys.argv[2]), 0))
        patchifier = patchifier_of(spec_of(sys.stdin.buffer.read()))
        channel.send(packed([patchifier.spec.fingerprint]))
        while message := channel.recv(MAX_MESSAGE_BYTES):
            serve(patchifier, unpacked(message), memory, channel)


def serve(
    patchifier: Patchifier, orders: Sequence[Order], memory: memoryview, channel: socket.socket
) -> None:
    """Decodes items in order. Answers in as few messages as MAX_UNSENT_SECONDS allows."""
    answers: list[Answer] = []
    sent = monotonic()
    for order in orders:
        answers.append(decode_in_place(patchifier, order, memory))
        if (now := monotonic()) - sent > MAX_UNSENT_SECONDS:
            channel.send(packed(answers))
            answers, sent = [], now
    if answers:
        channel.send(packed(answers))


def decode_in_place(patchifier: Patchifier, order: Order, memory: memoryview) -> Answer:
    """Decodes an item and writes its patches over its files."""
    began = monotonic()
    try:
        media = media_of(order, memory)
        item = prepare(patchifier, media)
        target = np.frombuffer(memory, np.uint8, order[1], order[0])
        frames, *_ = shape = patchifier.shape(media.plan.pruned(item.plan.blocks))
        parts = [item.patches] if item.later is None else [item.patches, item.later]
        assert len(parts) == frames, "not as many frames as were expected. This is a bug."
        np.stack(parts, out=target[: np.prod(shape)].reshape(shape))
    except ServiceError as error:
        return answer_of(began, error)
    except Exception as error:
        log.exception("an item could not be decoded: %s", order)
        return answer_of(began, error)
    return answer_of(began, None, item.plan.blocks)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the replica has ended
        main()
