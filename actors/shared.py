"""Embeddings in shared memory: the actor writes the bytes once, consumers read them where they lie.

Above INLINE_BYTES they travel as an object reference of Ray, below by value. The process that put
them there owns them: they are freed when nobody holds a reference any more, and lost with it.
Calls that give references back must go by Ray, which is Serve's default, and not by gRPC
(`handle.options(_by_reference=True)` makes sure): there a reference would never be released.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from actors.errors import EmbeddingLost
from actors.types import Bytes, Embedding, SharedBytes

INLINE_BYTES = 2**20
"""By value up to here: the way through shared memory takes as long as copying so much."""


def share(data: Bytes) -> Bytes | SharedBytes:
    """The bytes, in shared memory if they are many: then copied, once."""
    if data.nbytes <= INLINE_BYTES or not ray.is_initialized():  # Serve's local testing mode
        return data
    return SharedBytes(ray.put(data), data.nbytes)


async def read(data: Bytes | SharedBytes) -> Bytes:
    """A read-only view of the shared memory, which stays as long as the view.

    Nothing is copied, unless the bytes lie on another node. Raises EmbeddingLost.
    """
    if not isinstance(data, SharedBytes):
        return data
    reference: Any = data.object_ref
    try:
        found: Bytes = await reference
    except ObjectLostError as error:
        raise EmbeddingLost(
            "the replica that encoded the item ended before its embedding was read; try again"
        ) from error
    return found


async def here(embedding: Embedding) -> Embedding:
    """The same with its data as an array in this process. Raises EmbeddingLost."""
    return replace(embedding, data=await read(embedding.data))
