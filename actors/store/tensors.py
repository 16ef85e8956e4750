"""Bytes of an embedding as a tensor, where they lie."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from actors.types import Bytes, Dtype, Embedding, ReceivedBytes, SharedBytes


def tensor(embedding: Embedding) -> Tensor:
    """[tokens, width] where its data is, over the embedding's own memory: not to be written to.

    The data must be here already (shared.here, router.here.encode_here).
    """
    if isinstance(embedding.data, ReceivedBytes):
        there: Tensor = embedding.data.tensor
        return there.view(getattr(torch, embedding.dtype)).view(embedding.shape)
    assert not isinstance(embedding.data, SharedBytes), "read the embedding first: shared.here"
    return flat_tensor(embedding.data, embedding.dtype).view(embedding.shape)


def flat_tensor(data: Bytes, dtype: Dtype) -> Tensor:
    """One dimension, no copy, not to be written to."""
    with warnings.catch_warnings():
        # Shared memory is read-only, which torch cannot express.
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(data, dtype=getattr(torch, dtype))
