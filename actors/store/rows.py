"""Rows between tensors and bytes: views where that can be, conversions between dtypes."""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import replace

import torch
from torch import Tensor

from actors.store.shared_memory import INLINE_BYTES, here, share
from actors.types import Bytes, Dtype, Embedding, ReceivedBytes, SharedBytes


def tensor(embedding: Embedding) -> Tensor:
    """[tokens, width], a view of the embedding's own memory: not to be written to.

    The data must be in this process already (shared_memory.here, router.here.encode_here).
    """
    if isinstance(embedding.data, ReceivedBytes):
        there: Tensor = embedding.data.tensor
        return there.view(getattr(torch, embedding.dtype)).view(embedding.shape)
    assert not isinstance(embedding.data, SharedBytes), "read it first: shared_memory.here"
    return flat_tensor(embedding.data, embedding.dtype).view(embedding.shape)


def flat_tensor(data: Bytes, dtype: Dtype) -> Tensor:
    """One dimension, no copy, not to be written to."""
    with warnings.catch_warnings():
        # Shared memory is read-only, which torch cannot express.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=getattr(torch, dtype))


def as_bytes(rows: Tensor, dtype: Dtype) -> Bytes:
    """The bytes of rows in a dtype: a view if the rows have it already."""
    data: Bytes = rows.to(getattr(torch, dtype)).view(torch.uint8).numpy().reshape(-1)
    return data


async def converted(embedding: Embedding, dtype: Dtype) -> Embedding:
    """The embedding in another dtype, in shared memory if it is large. Raises EmbeddingLost."""
    if embedding.dtype == dtype:
        return embedding
    rows = tensor(await here(embedding))
    if rows.nbytes <= INLINE_BYTES:
        data = share(as_bytes(rows, dtype))
    else:
        data = await asyncio.to_thread(lambda: share(as_bytes(rows, dtype)))
    return replace(embedding, data=data, dtype=dtype)
