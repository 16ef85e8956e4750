"""Videos beyond a pack: how they are cut, and that one answer comes of many."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.budgets import Capacity
from actors.engine.packing import smallest_first
from actors.engine.video_chunks import cut, fp8_rows_of, joined, rows_of
from actors.errors import EncodeFailed
from actors.kernels.gemm.fp8 import quantised
from actors.types import Bytes, Item, ItemPlan
from tests.toy_tower import POISON, toy_item, toy_rows
from tests.unit.engine.test_engine import Rig

ROOMY = Capacity(((4, 16, 64),), (64,), items=8, frames=64, frame_tokens=1)


def video(groups: int, tokens: int, seed: int = 0) -> Item:
    """A toy video whose groups have so many tokens."""
    item = toy_item(groups * tokens, seed)
    plan = ItemPlan(
        (groups, 2, 2 * tokens),
        item.plan.patches,
        item.plan.tokens,
        item.plan.path_tokens,
        frames=groups,
    )
    return Item(plan, item.patches, on_host(item.patches)[::-1].copy())


def on_host(patches: object) -> Bytes:
    """They are, in these tests."""
    assert isinstance(patches, np.ndarray)
    return patches


@given(
    groups=st.integers(1, 50),
    tokens=st.integers(1, 90),
    frames=st.integers(0, 20),
    budgets=st.sampled_from([(64,), ()]),
)
def test_chunks_are_the_video_and_fit_a_pack(
    groups: int, tokens: int, frames: int, budgets: tuple[int, ...]
) -> None:
    room = Capacity((budgets,), (64,), items=8, frames=frames, frame_tokens=1 if frames else 0)
    item = video(groups, tokens)
    chunks = cut(item, room)
    patches = on_host(item.patches)
    assert np.array_equal(np.concatenate([on_host(chunk.patches) for chunk in chunks]), patches)
    later = [on_host(chunk.later) for chunk in chunks]
    assert np.array_equal(np.concatenate(later), patches[::-1])
    assert sum(chunk.plan.frames for chunk in chunks) == groups
    for chunk in chunks:
        plan = chunk.plan
        assert plan.grid_thw == (plan.frames, 2, 2 * tokens)
        assert plan.path_tokens == (plan.tokens,) == (plan.frames * tokens,)
        assert len(chunk.patches) == plan.patches == 4 * plan.tokens
        assert plan.frames == 1 or (plan.tokens <= 64 and plan.frames <= (frames or groups))
    longest = chunks[0].plan.frames
    assert all(chunk.plan.frames == longest for chunk in chunks[:-1])
    if len(chunks) > 1:  # one more group would be too many
        assert (longest + 1) * tokens > 64 or longest + 1 > frames > 0
    if frames and budgets and tokens <= 64:  # then no chunk is left to run eagerly
        for pack in smallest_first([chunk.plan for chunk in chunks], room):
            assert pack.budgets == (64,)


def test_rows_after_the_last_group_come_with_the_last_chunk() -> None:
    item = video(7, 4)
    plan = replace(item.plan, tokens=7 * 2 + 1, path_tokens=(7 * 20,))
    chunks = cut(Item(plan, item.patches), ROOMY)
    assert [(chunk.plan.frames, chunk.plan.tokens) for chunk in chunks] == [(3, 6), (3, 6), (1, 3)]
    assert [chunk.plan.path_tokens for chunk in chunks] == [(60,), (60,), (20,)]


def test_chunks_of_groups_of_pictures() -> None:
    item = toy_item(9 * 4, 0)
    plan = replace(item.plan, grid_thw=(3, 2, 8), tokens=3 * 4, frames=3, group_pictures=4)
    chunks = cut(Item(plan, item.patches), replace(ROOMY, tokens=(35,)))
    assert [(chunk.plan.frames, chunk.plan.tokens) for chunk in chunks] == [(2, 8), (1, 4)]
    assert (
        [chunk.plan.patches for chunk in chunks]
        == [8 * 16, 1 * 16]
        == [len(one.patches) for one in chunks]
    )
    assert [chunk.plan.path_tokens for chunk in chunks] == [(32,), (4,)]


def test_images_and_what_fits_are_left_alone() -> None:
    for item in (toy_item(500, 1), video(8, 8)):
        assert cut(item, ROOMY) == [item]


@pytest.mark.parametrize(
    ("room", "source"),
    [(ROOMY, "graph"), (Capacity(((),), (64,), items=8, frames=0), "eager")],
    ids=["graphs", "off"],
)
def test_one_answer_of_many_chunks(room: Capacity, source: str) -> None:
    rig = Rig(room)
    items = [video(10, 10, 1), toy_item(5, 2), video(3, 80, 3)]
    answers = [rig.engine.submit(item) for item in items]
    for item, answer in zip(items, answers, strict=True):
        assert torch.equal(rows_of(answer.result(10)), toy_rows(item))
    assert [answer.result() for answer in answers] == items
    assert [len(item.rows) for item in items] == [2, 5, 3], "rows of chunks, or those of the image"
    assert [answer.result().source for answer in answers] == [source, source, "eager"]
    assert rig.sample("video_runs_total") == 5
    rig.engine.close()
    patches = sum(item.plan.patches for item in items)
    assert rig.sample("patches_total") == patches


def test_chunks_in_fp8() -> None:
    rig = Rig(ROOMY)
    item = video(10, 10, 1)
    item.in_fp8 = True
    found = fp8_rows_of(rig.engine.submit(item).result(10))
    expected = quantised(toy_rows(item))
    assert len(item.rows) == 2
    assert torch.equal(found.float(), expected.float())
    assert found.scales.shape == (len(expected),)
    rig.engine.close()


def test_a_cancelled_video_drops_the_chunks_that_wait() -> None:
    rig = Rig(ROOMY)
    blocker = rig.hold()
    answer = rig.engine.submit(video(40, 8))
    assert answer.cancel()
    rig.gate.set()
    blocker.result(10)
    rig.engine.close()
    with pytest.raises(CancelledError):
        answer.result(10)
    assert rig.sample("tokens_total") == 1


def test_a_chunk_that_fails_fails_the_video_and_drops_the_rest() -> None:
    rig = Rig(ROOMY)
    blocker = rig.hold()
    item = video(40, 60)  # a group a pack
    on_host(item.patches)[0, 0] = POISON
    answer, other = rig.engine.submit(item), rig.engine.submit(toy_item(5, 2))
    rig.gate.set()
    with pytest.raises(EncodeFailed, match="poisoned"):
        answer.result(10)
    assert torch.equal(rows_of(other.result(10)), toy_rows(toy_item(5, 2)))
    rig.engine.close()
    wait_for([blocker])
    assert rig.sample("tokens_total") < 40 * 60


def test_times_are_from_the_first_start_to_the_last_end() -> None:
    answers: list[Future[Item]] = [Future() for _ in range(3)]
    item = video(6, 1)
    whole = joined(item, answers)
    chunks = [encoded() for _ in range(3)]
    for index in (2, 0, 1):
        assert not whole.done()
        chunks[index].queue_seconds = 1.0 + index
        chunks[index].rows += index
        answers[index].set_result(chunks[index])
    assert whole.result() is item
    assert (item.source, item.queue_seconds, item.encode_seconds) == ("graph", 1.0, 4.0)
    assert torch.equal(rows_of(item), torch.cat([chunk.rows for chunk in chunks]))


def encoded() -> Item:
    item = video(2, 1)
    item.rows, item.queue_seconds, item.encode_seconds = torch.zeros(2, 4), 1.0, 2.0
    return item


@pytest.mark.parametrize("fails", [False, True])
def test_chunks_that_land_after_the_end_change_nothing_and_say_nothing(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Future[Item]] = [Future() for _ in range(3)]
    whole = joined(video(6, 1), answers)
    for answer in answers[:2]:
        assert answer.set_running_or_notify_cancel()
    if fails:
        answers[0].set_exception(EncodeFailed("poisoned"))
    else:
        assert whole.cancel()
        answers[0].set_result(encoded())
    answers[1].set_result(encoded())
    assert answers[2].cancelled()
    assert not caplog.records
    if fails:
        assert isinstance(whole.exception(), EncodeFailed)
    else:
        assert whole.cancelled()


def test_rows_of_a_video_go_with_the_last_who_holds_them() -> None:
    answers: list[Future[Item]] = [Future() for _ in range(2)]
    whole = joined(video(4, 1), answers)
    found = encoded()
    seen = weakref.ref(found.rows)
    gc.disable()
    try:
        answers[0].set_result(found)
        answers[1].set_result(encoded())
        assert whole.done()
        del whole, answers, found
        assert seen() is None
    finally:
        gc.enable()
