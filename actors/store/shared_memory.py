"""Embeddings in shared memory: the actor writes the bytes once, consumers read them where they lie.

Above INLINE_BYTES they travel as an object reference of Ray, below by value. The process that put
them there owns them: they are freed when nobody holds a reference any more, and lost with it.
Calls that give references back must go by Ray, which is Serve's default, and not by gRPC
(`handle.options(_by_reference=True)` makes sure): there a reference would never be released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from actors.errors import EmbeddingLost
from actors.types import Bytes, Embedding, ReceivedBytes, RemoteBytes, SharedBytes

INLINE_BYTES = 2**20
"""By value up to here: the way through shared memory takes as long as copying so much."""
MOST_TOGETHER_BYTES = 64 * 2**20
"""Of an object: it stays as long as one of the embeddings in it."""


def share(data: Bytes) -> Bytes | SharedBytes:
    """The bytes, in shared memory if they are many: then copied, once."""
    return share_together([data])[0]


def share_together(
    arrays: Sequence[Bytes], most_bytes: int = MOST_TOGETHER_BYTES
) -> list[Bytes | SharedBytes]:
    """Each copied once, into objects that several of them share; as they are if they are few bytes.

    `most_bytes`: of an object of several.

    An object costs the writer a third of a millisecond, and every process that its reference comes
    by as much again: for items of a few megabytes more than the copy.
    """
    shared: list[Bytes | SharedBytes] = []
    for group in groups([array.nbytes for array in arrays], most_bytes):
        together = [arrays[place] for place in group]
        size_bytes = sum(array.nbytes for array in together)
        if size_bytes <= INLINE_BYTES or not ray.is_initialized():  # Serve's local testing mode
            shared += together
            continue
        reference = ray.put(together)
        shared += [
            SharedBytes(reference, array.nbytes, place, size_bytes - array.nbytes)
            for place, array in enumerate(together)
        ]
    return shared


def groups(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Places that follow each other, whose sizes are at most `most`; one may be larger alone."""
    found: list[list[int]] = []
    room = 0
    for place, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = most
        found[-1].append(place)
        room -= size
    return found


async def read(data: Bytes | SharedBytes) -> Bytes:
    """A read-only view of the shared memory, which stays as long as the view.

    Nothing is copied, unless the bytes lie on another node. Raises EmbeddingLost.
    """
    if not isinstance(data, SharedBytes):
        return data
    reference: Any = data.object_ref
    try:
        found: list[Bytes | RemoteBytes] = await reference
    except ObjectLostError as error:
        raise EmbeddingLost(
            "the replica that encoded the item ended before its embedding was read; try again"
        ) from error
    one = found[data.place]
    if isinstance(one, RemoteBytes):
        raise TypeError("the item was asked for with `on_device`: read it with received.Receiver")
    return one


async def here(embedding: Embedding) -> Embedding:
    """The same with its data as an array in this process. Raises EmbeddingLost."""
    if isinstance(embedding.data, ReceivedBytes):
        return embedding
    return replace(embedding, data=await read(embedding.data))
