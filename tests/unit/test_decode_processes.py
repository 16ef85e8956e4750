"""Who decodes what when, and what becomes of it when a process ends or hangs.

Threads stand in for the processes (decode_rig.py), which are real in test_decode_worker.py.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import pytest

from actors.errors import InvalidMedia, StartError, Unavailable
from actors.media import decode_processes
from actors.media.decode_messages import packed
from actors.types import Media, Size
from tests.unit.decode_rig import ENDS, HANGS, Rig


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.gate.set()
    if rig.processes:
        rig.processes.close()
    assert not any(each.thread.is_alive() for each in rig.started)


def until(true: Callable[[], object]) -> None:
    end = monotonic() + 30
    while not true():
        assert monotonic() < end
        sleep(0.002)


def test_a_call_is_spread_over_all_and_long_queues_go_in_chunks(rig: Rig) -> None:
    rig.open()
    rig.gate.clear()
    begun = [rig.begin(size=(32 * (1 + index % 5), 64)) for index in range(60)]
    until(lambda: all(len(each.seen) == 1 for each in rig.started))
    rig.gate.set()
    assert all(map(rig.good, begun))
    seen = [each.seen for each in rig.started]
    assert sum(map(sum, seen)) == 60
    assert max(map(max, seen)) == decode_processes.MOST_ITEMS
    assert min(map(sum, seen)) >= 10, "both had their part"
    assert rig.series.registry.get_sample_value(
        "encoder_preprocessed_items_total", {"device": "cpu"}
    ) == len(begun)


def test_large_items_go_one_by_one(rig: Rig) -> None:
    rig.open()
    rig.gate.clear()
    begun = [rig.begin(size=(1024, 1024)) for _ in range(6)]
    assert begun[0].media.plan.patches >= decode_processes.MOST_PATCHES
    rig.gate.set()
    assert all(map(rig.good, begun))
    assert {items for each in rig.started for items in each.seen} == {1}


def test_what_is_wrong_with_a_file_is_said_and_harms_no_other(rig: Rig) -> None:
    rig.open()
    begun = [rig.begin(), rig.begin(b"no image"), rig.begin()]
    assert begun[1].done.wait(60)
    assert isinstance(begun[1].made, InvalidMedia)
    assert rig.good(begun[0])
    assert rig.good(begun[2])
    assert rig.restarts() == 0


@pytest.mark.parametrize(("file", "stuck_seconds"), [(ENDS, 60), (HANGS, 0.5)])
def test_a_file_that_ends_or_stops_its_process_is_refused_and_nothing_else_is_lost(
    rig: Rig, file: bytes, stuck_seconds: float
) -> None:
    rig.open(stuck_seconds)
    if file == ENDS:
        rig.gate.clear()  # so that others are behind it in the same chunk
    begun = [rig.begin() for _ in range(7)]
    bad = rig.begin(file)
    begun += [rig.begin() for _ in range(20)]
    rig.gate.set()
    assert all(map(rig.good, begun))
    assert bad.done.wait(60)
    assert isinstance(bad.made, InvalidMedia)
    assert "twice" in str(bad.made)
    assert rig.restarts() >= 2
    assert rig.good(rig.begin()), "and it goes on"


def test_a_process_that_ends_by_itself_loses_nothing(rig: Rig) -> None:
    rig.open()
    rig.gate.clear()
    begun = [rig.begin() for _ in range(12)]
    until(lambda: all(each.seen for each in rig.started))
    rig.started[0].kill()
    rig.gate.set()
    assert all(map(rig.good, begun))
    assert rig.restarts() == 1
    assert len(rig.started) == 3


def test_a_process_that_ended_before_it_began_is_not_the_files_fault(
    rig: Rig,
) -> None:
    rig.open()
    for each in rig.started:
        each.dying = True
    assert rig.good(rig.begin())
    assert rig.restarts() == 2


def test_what_is_given_up_is_not_sent(rig: Rig) -> None:
    rig.open()
    rig.gate.clear()
    held = [rig.begin() for _ in range(40)]
    until(lambda: all(len(each.seen) == 1 for each in rig.started))
    late = [rig.begin() for _ in range(10)]
    for each in late[1:]:
        each.given_up = True
    rig.gate.set()
    assert all(map(rig.good, [*held, late[0]]))
    rig.begin().done.wait(60)
    assert sum(sum(each.seen) for each in rig.started) == 42
    assert not any(each.done.is_set() for each in late[1:])


def test_without_room_items_wait_until_others_are_dropped(rig: Rig) -> None:
    processes = rig.open(shared_bytes=2**20)
    begun = [rig.begin(size=(512, 512)) for _ in range(5)]
    assert 2**20 // (begun[0].media.plan.patches * 768) == 1
    for count in range(1, 6):
        until(lambda count=count: sum(each.done.is_set() for each in begun) == count)  # type: ignore[misc]
        sleep(0.02)
        assert sum(each.done.is_set() for each in begun) == count, "no more than there is room for"
        begun[count - 1].made = None
    large = rig.patchifier.spec.sizing.plan(Size(1024, 1024))
    assert processes.takes(begun[0].media)
    assert not processes.takes(Media("image", b"", large, digest=""))


def test_what_is_done_is_let_go(rig: Rig) -> None:
    rig.open()
    waiting = rig.begin()
    assert rig.good(waiting)
    seen = weakref.ref(waiting)
    del waiting
    gc.collect()
    until(lambda: not seen())


def test_closing_does_what_was_begun_and_takes_no_more(rig: Rig) -> None:
    processes = rig.open()
    begun = [rig.begin() for _ in range(30)]
    processes.close()
    assert all(map(rig.good, begun))
    assert not processes.alive()
    late = rig.begin()
    assert isinstance(late.made, Unavailable)


def test_another_model_is_refused_at_start(rig: Rig) -> None:
    rig.greeting = "0123456789abcdef"
    with pytest.raises(StartError, match="is its code another"):
        rig.open()


def test_processes_that_never_start_are_given_up(rig: Rig) -> None:
    rig.greeting = ""
    with pytest.raises(StartError, match=r"preprocess\.processes to 0 .*ended 3 times"):
        rig.open()


@pytest.mark.parametrize("began", [float("nan"), -1.0, 1e300, 2**64 - 1, "now"])
def test_a_time_that_cannot_be_is_no_answer(rig: Rig, began: Any) -> None:
    rig.open(processes=1)
    rig.gate.clear()
    begun = rig.begin()
    until(lambda: rig.started[0].seen)
    rig.started[0].its.send(packed([(began, "", "")]))
    until(lambda: rig.restarts() == 1)
    rig.gate.set()
    assert rig.good(begun), "made by the next one"


def test_when_none_starts_any_more_nobody_waits_for_ever(rig: Rig) -> None:
    processes = rig.open()
    rig.gate.clear()
    begun = [rig.begin() for _ in range(40)]
    until(lambda: all(each.seen for each in rig.started))
    rig.greeting = ""
    for each in list(rig.started):
        each.kill()
    assert all(each.done.wait(60) for each in begun)
    assert {type(each.made) for each in begun} == {Unavailable}
    assert not processes.alive()
    assert isinstance(rig.begin().made, Unavailable)


def test_no_file_is_left_open(rig: Rig) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    processes = rig.open()
    assert rig.good(rig.begin())
    processes.close()
    del processes
    rig.processes = None
    rig.started.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
