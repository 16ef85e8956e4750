"""Embeddings in Ray's shared memory: written once by the encoder, read in place by consumers.

Rows up to INLINE_BYTES travel by value, and larger ones as a reference if they cannot be lent
(rows/lending.py). The process that wrote an object owns it: it is freed when nobody holds a
reference any more, and lost with that process. References may travel only in Ray's own calls
(router.replicas.pinned.by_reference ensures this), because over gRPC they would never be released.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from actors.allocator import groups
from actors.errors import EmbeddingLost
from actors.types import Bytes, Embedding, ReceivedBytes, RemoteBytes, SharedBytes

INLINE_BYTES = 2**20  # rows up to this size travel by value: shared memory takes as long
MOST_TOGETHER_BYTES = 64 * 2**20  # of one object, which stays as long as one embedding is held
READ_SECONDS, SLOW_BYTES_PER_SECOND = 10.0, 20e6
"""Time limit of a read: READ_SECONDS, plus the time that a slow network takes for the object and
for all others that this process waits for, because Ray transfers them in any order. Ray itself
waits a minute for the node of a stopped process."""


@dataclass(eq=False)
class _Read:
    size_bytes: int
    most_bytes: int = 0
    """Sum of the reads in progress, at its highest during this one."""


_reading: set[_Read] = set()


def share(data: Bytes) -> Bytes | SharedBytes:
    """The bytes, copied to shared memory if they are more than INLINE_BYTES."""
    return share_together([data])[0]


def share_together(
    arrays: Sequence[Bytes], most_bytes: int = MOST_TOGETHER_BYTES
) -> list[Bytes | SharedBytes]:
    """Copies arrays into objects of at most `most_bytes` each; small ones stay as they are.

    An object costs its writer a third of a millisecond, and each process that gets its reference as
    much again. For items of a few megabytes, that is more than the copy.
    """
    shared: list[Bytes | SharedBytes] = []
    for group in groups([array.nbytes for array in arrays], most_bytes):
        together = [arrays[place] for place in group]
        size_bytes = sum(array.nbytes for array in together)
        if size_bytes <= INLINE_BYTES or not ray.is_initialized():  # without Ray, as in a test
            shared += together
            continue
        reference = ray.put(together)
        shared += [
            SharedBytes(reference, array.nbytes, place, size_bytes - array.nbytes)
            for place, array in enumerate(together)
        ]
    return shared


async def read(data: Bytes | SharedBytes) -> Bytes:
    """A read-only view of the shared memory, which stays as long as the view does; a copy only if
    the bytes are on another node. Raises EmbeddingLost."""
    if not isinstance(data, SharedBytes):
        return data
    return (await arrays(data))[data.place]


async def arrays(data: SharedBytes) -> list[Bytes]:
    """All arrays of an object, as `read`. Ray takes a millisecond to open one."""
    # Not object_bytes, because the object's other arrays have reads of their own.
    this, others_bytes = _Read(data.size_bytes), data.object_bytes - data.size_bytes
    _reading.add(this)
    reading = tuple(_reading)
    now_bytes = sum(one.size_bytes for one in reading)
    for one in reading:
        one.most_bytes = max(one.most_bytes, now_bytes)
    reference: Any = data.object_ref
    arriving: asyncio.Future[list[Bytes | RemoteBytes]] = asyncio.ensure_future(reference)
    waited_seconds = limit_seconds = 0.0
    try:
        while not arriving.done():
            limit_seconds = READ_SECONDS + (this.most_bytes + others_bytes) / SLOW_BYTES_PER_SECOND
            if waited_seconds >= limit_seconds:
                raise EmbeddingLost(
                    "the embedding could not be read from its node within "
                    f"{limit_seconds:.0f} s; try again"
                )
            await asyncio.wait([arriving], timeout=limit_seconds - waited_seconds)
            waited_seconds = limit_seconds
        found = arriving.result()
    except ObjectLostError as error:
        raise EmbeddingLost(
            "the replica that encoded the item ended before its embedding was read; try again"
        ) from error
    finally:
        arriving.cancel()
        _reading.remove(this)
    there = [one for one in found if not isinstance(one, RemoteBytes)]
    if len(there) < len(found):
        raise TypeError("the item was asked for with `on_device`: read it with nixl.Receiver")
    return there


async def here(embedding: Embedding) -> Embedding:
    """The embedding with its data in this process. Raises EmbeddingLost."""
    if isinstance(embedding.data, ReceivedBytes):
        return embedding
    return replace(embedding, data=await read(embedding.data))
