"""Rows as entries: in shared memory if they are many, in the dtype that was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from actors.store.cache import Entry
from actors.store.shared_memory import INLINE_BYTES, read, share
from actors.store.tensors import flat_tensor
from actors.types import Bytes, Dtype

Result = TypeVar("Result")


async def all_converted(
    entries: Sequence[Entry | None], dtype: Dtype
) -> list[Entry | Exception | None]:
    """One after the other; None stays."""
    return [entry and await converted(entry, dtype) for entry in entries]


async def converted(entry: Entry, dtype: Dtype) -> Entry | Exception:
    """The same in a dtype, or why it cannot be had."""
    if entry.dtype == dtype:
        return entry
    try:
        rows = flat_tensor(await read(entry.data), entry.dtype).view(entry.shape)
        return await off_the_loop(rows.nbytes, shared_rows, rows, dtype, entry.frame_tokens)
    except Exception as error:
        return error


async def off_the_loop(size_bytes: int, work: Callable[..., Result], *args: object) -> Result:
    """work(...), which copies so many bytes: in a thread if they are many."""
    if size_bytes <= INLINE_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def shared_rows(rows: Tensor, dtype: Dtype, frame_tokens: tuple[int, ...]) -> Entry:
    """Rows [tokens, width] in a dtype; in shared memory if they are many."""
    data = share(as_bytes(rows, dtype))
    return Entry(data, dtype, (rows.shape[0], rows.shape[1]), frame_tokens)


def as_bytes(rows: Tensor, dtype: Dtype) -> Bytes:
    """The bytes of rows in a dtype: a view if it is theirs."""
    data: Bytes = rows.to(getattr(torch, dtype)).view(torch.uint8).numpy().reshape(-1)
    return data
