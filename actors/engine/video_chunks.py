"""Cuts videos that do not fit a pack into chunks, and joins the rows of the chunks.

A temporal group is one attention segment (VideoSizing), so the rows of a video are those of its
chunks, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from actors.engine.budgets import Capacity
from actors.kernels.gemm.fp8 import Fp8Rows
from actors.types import Item, ItemPlan


def cut(item: Item, capacity: Capacity, *, sound: bool = False) -> list[Item]:
    """Cuts an item into chunks, each as long as a pack can hold. An image, or whatever fits a pack,
    is one chunk. A group that does not fit a pack is a chunk by itself."""
    groups = item.plan.frames
    if not groups:
        return [item]
    most = capacity.tokens[0] // item.plan.least_tokens[0]
    most = max(1, min(most, capacity.frames or most))
    if groups <= most:
        return [item]
    starts = range(0, groups, most)
    return [chunk(item, start, min(start + most, groups), sound=sound) for start in starts]


def chunk(item: Item, start: int, end: int, *, sound: bool) -> Item:
    """The temporal groups from `start` to before `end` of a video, as views of its patches."""
    plan, groups = item.plan, end - start
    rows = slice(start * plan.group_patches, min(end * plan.group_patches, plan.patches))
    patches = rows.stop - rows.start
    if sound:  # every computed token is a row, up to the end of the sound
        before, computed = (computed_tokens(plan, row) for row in (rows.start, rows.stop))
        tokens = min(computed, plan.tokens) - before
    else:
        after = plan.tokens - plan.frames * plan.group_tokens if end == plan.frames else 0
        tokens = groups * plan.group_tokens + after
    part = replace(
        plan,
        grid_thw=(groups, *plan.grid_thw[1:]),
        patches=patches,
        tokens=tokens,
        path_tokens=(computed_tokens(plan, patches),),
        frames=groups,
    )
    later = None if item.later is None else item.later[rows]
    return Item(part, item.patches[rows], later, on_device=item.on_device, in_fp8=item.in_fp8)


def computed_tokens(plan: ItemPlan, patches: int) -> int:
    """Tokens that the tower computes from this many of the item's patches."""
    return plan.path_tokens[0] * patches // plan.patches


def joined(item: Item, answers: Sequence[Future[Item]]) -> Future[Item]:
    """A future that completes with the item once all chunks are encoded, or fails once one fails.
    If it fails or is cancelled, chunks that have not started are cancelled."""
    whole: Future[Item] = Future()
    # Emptied when `whole` is done, because futures that refer to each other would keep the rows of
    # their packs alive until the garbage collector runs.
    chunks = list(answers)

    def encoded(answer: Future[Item]) -> None:
        left = chunks.copy()
        if not left or answer.cancelled():  # `whole` is done
            return
        with suppress(InvalidStateError):  # cancelled just now
            if error := answer.exception():
                whole.set_exception(error)
            elif all(one.done() and not one.cancelled() for one in left):
                fill(item, [one.result() for one in left])
                whole.set_result(item)

    def ended(_: Future[Item]) -> None:
        left = chunks.copy()
        chunks.clear()
        for answer in left:
            answer.cancel()

    whole.add_done_callback(ended)
    for answer in answers:
        answer.add_done_callback(encoded)
    return whole


def fill(item: Item, chunks: Sequence[Item]) -> None:
    """Fills in a video's rows and timings, from the first start to the last end of its chunks,
    which were queued together."""
    queue = min(one.queue_seconds for one in chunks)
    end = max(one.queue_seconds + one.encode_seconds for one in chunks)
    item.rows = tuple(one.rows for one in chunks)
    item.source = "eager" if any(one.source == "eager" for one in chunks) else "graph"
    item.queue_seconds, item.encode_seconds = queue, end - queue


def rows_of(item: Item) -> Tensor:
    """The rows [tokens, width] of an encoded item. Concatenates the chunks of a video, which on the
    host would take too long in the engine's thread."""
    rows: Tensor = torch.cat(item.rows) if isinstance(item.rows, tuple) else item.rows
    return rows


def fp8_rows_of(item: Item) -> Fp8Rows:
    """The same for an item with `in_fp8`."""
    rows: Fp8Rows = Fp8Rows.cat(item.rows) if isinstance(item.rows, tuple) else item.rows
    return rows
