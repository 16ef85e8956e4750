"""Who decodes what when, and what becomes of it when a process ends or hangs.

Threads stand in for the processes (decode_rig.py), which are real in test_decode_worker.py.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, wait
from time import monotonic, sleep
from typing import Any

import pytest

from actors.errors import EncodeFailed, InvalidMedia, StartError, Unavailable
from actors.media import decoder
from actors.media.decode_worker import packed
from actors.media.image import prepare
from actors.types import Item, Media, Size
from tests.unit.decode_rig import ENDS, HANGS, Rig
from tests.waiting import until


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.gate.set()
    if rig.decoder:
        rig.decoder.close()
    assert not any(each.thread.is_alive() for each in rig.started)


def sent(rig: Rig) -> int:
    return sum(sum(each.seen) for each in rig.started)


def test_a_call_is_spread_over_all_and_long_queues_go_in_chunks(rig: Rig) -> None:
    rig.open()
    rig.gate.clear()
    sizes = [(32 * (1 + index % 5), 64) for index in range(60)]
    begun = [rig.submit(size=size) for size in sizes]
    until(lambda: all(each.seen for each in rig.started))
    rig.gate.set()
    assert all(map(rig.good, begun, sizes))
    assert sent(rig) == 60
    assert max(max(each.seen) for each in rig.started) == decoder.CHUNK_ITEMS
    assert min(sum(each.seen) for each in rig.started) >= 10, "both had their part"
    assert rig.count("preprocessed_items") == len(begun)


def test_items_one_after_another_go_to_the_process_that_worked_last(rig: Rig) -> None:
    opened = rig.open()
    for _ in range(6):
        until(lambda: len(opened._idle) == len(rig.started))
        assert rig.good(rig.submit(size=(64, 64)), (64, 64))
    assert sorted(sum(each.seen) for each in rig.started) == [0, 6]


@pytest.mark.parametrize("processes", [0, 2])
def test_times_are_filled_in(rig: Rig, processes: int) -> None:
    opened = rig.open(processes=processes, threads=1)
    media = rig.media(size=(640, 480))
    before = monotonic()
    first, *_, last = [opened.submit(media) for _ in range(16)]
    items = first.result(60), last.result(60)
    past = monotonic() - before
    assert all(0 < item.preprocess_seconds < past for item in items)
    assert 0 <= items[0].decode_queue_seconds < items[1].decode_queue_seconds < past
    assert items[1].decode_queue_seconds + items[1].preprocess_seconds <= past


def test_large_items_go_one_by_one(rig: Rig) -> None:
    rig.open()
    assert rig.media(size=(1024, 1024)).plan.patches >= decoder.CHUNK_PATCHES
    rig.gate.clear()
    begun = [rig.submit(size=(1024, 1024)) for _ in range(6)]
    rig.gate.set()
    assert all(rig.good(each, (1024, 1024)) for each in begun)
    assert {items for each in rig.started for items in each.seen} == {1}


def test_nothing_waits_behind_what_takes_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "AHEAD_PATCHES", 1000)
    rig.open()
    rig.gate.clear()
    begun = [rig.submit(size=(1024, 1024)) for _ in range(6)]
    until(lambda: sent(rig) == 2)
    sleep(0.05)
    assert [sum(each.seen) for each in rig.started] == [1, 1]
    rig.gate.set()
    assert all(rig.good(each, (1024, 1024)) for each in begun)


@pytest.mark.parametrize("processes", [0, 2])
def test_what_is_wrong_with_a_file_is_said_and_harms_no_other(rig: Rig, processes: int) -> None:
    rig.open(processes=processes)
    good, bad, last = rig.submit(), rig.submit(b"no image"), rig.submit()
    with pytest.raises(InvalidMedia):
        bad.result(60)
    assert rig.good(good)
    assert rig.good(last)
    assert rig.count("decode_restarts") == 0


@pytest.mark.parametrize("processes", [0, 2])
def test_our_own_faults_are_errors_of_the_service(
    rig: Rig, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Item:
        raise MemoryError("no more")

    rig.open(processes=processes)
    good = rig.submit()
    assert rig.good(good)
    for module in ("decoder", "decode_worker"):
        monkeypatch.setattr(f"actors.media.{module}.prepare", broken)
    with pytest.raises(EncodeFailed, match="no more"):
        rig.submit().result(60)


@pytest.mark.parametrize(
    ("file", "file_seconds", "message", "replaced"),
    [(ENDS, 60, "exited twice", 2), (HANGS, 0.5, r"0\.5 s \(preprocess\.max_file_seconds\)", 1)],
)
def test_a_file_that_ends_or_stops_its_process_is_refused_and_nothing_else_is_lost(
    rig: Rig, file: bytes, file_seconds: float, message: str, replaced: int
) -> None:
    rig.open(max_file_seconds=file_seconds)
    if file == ENDS:
        rig.gate.clear()  # so that others are behind it in the same chunk
    begun = [rig.submit() for _ in range(7)]
    bad = rig.submit(file)
    begun += [rig.submit() for _ in range(20)]
    rig.gate.set()
    assert all(map(rig.good, begun))
    with pytest.raises(InvalidMedia, match=message):
        bad.result(60)
    assert rig.count("decode_restarts") == replaced
    assert rig.good(rig.submit()), "and it goes on"


def test_what_was_decoded_before_a_file_that_hangs_is_not_refused(rig: Rig) -> None:
    """Its answer may wait to be sent with the next one."""
    rig.open(max_file_seconds=0.5, processes=1)
    rig.started[0].silent = True
    done, bad, behind = rig.submit(), rig.submit(HANGS), rig.submit()
    with pytest.raises(InvalidMedia, match="max_file_seconds"):
        bad.result(60)
    assert all(map(rig.good, [done, behind]))
    assert rig.count("decode_restarts") == 1


@pytest.mark.parametrize("stops", [1, 2])
def test_a_file_is_tried_again_alone_if_its_process_hardly_ran(rig: Rig, stops: int) -> None:
    rig.open(max_file_seconds=0.5, processes=1)
    rig.gate.clear()
    first = rig.submit()
    until(lambda: rig.started[0].seen)
    others = [rig.submit() for _ in range(3)]
    rig.stops = stops
    rig.gate.set()
    if stops == 1:
        assert rig.good(first)
    else:
        with pytest.raises(InvalidMedia, match="max_file_seconds"):
            first.result(60)
    assert all(map(rig.good, others))
    assert rig.count("decode_restarts") == stops
    assert rig.started[1].seen[0] == 1, "alone"


def test_the_time_with_nobody_waiting_counts_from_when_the_caller_left(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(decoder, "ABANDONED_SECONDS", 0.6)
    rig.open(processes=1)
    rig.gate.clear()
    slow = rig.submit()
    until(lambda: rig.started[0].seen)
    sleep(0.7)
    assert not slow.cancel()
    sleep(0.2)
    rig.gate.set()
    assert rig.good(slow), "it had 0.6 s more"
    assert rig.count("decode_restarts") == 0


def test_a_process_that_works_for_nobody_is_replaced(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(decoder, "ABANDONED_SECONDS", 0.5)
    rig.open(processes=1)
    slow = rig.submit(HANGS)
    until(lambda: rig.started[0].seen)
    behind = rig.submit()
    sleep(0.7)
    assert rig.count("decode_restarts") == 0, "somebody waits for it"
    assert not slow.cancel()
    assert rig.good(behind)
    assert rig.count("decode_restarts") == 1
    assert sent(rig) == 2, "what nobody waits for is not tried again"


def test_a_process_that_ends_by_itself_loses_nothing(rig: Rig) -> None:
    rig.open()
    rig.gate.clear()
    begun = [rig.submit() for _ in range(12)]
    until(lambda: all(each.seen for each in rig.started))
    rig.started[0].kill()
    rig.gate.set()
    assert all(map(rig.good, begun))
    assert rig.count("decode_restarts") == 1
    until(lambda: len(rig.started) == 3)  # its successor


def test_a_process_that_ended_before_it_began_is_not_the_files_fault(rig: Rig) -> None:
    rig.open()
    dying = list(rig.started)
    for each in dying:
        each.dying = True
    begun = []
    while any(each.thread.is_alive() for each in dying):
        begun.append(rig.submit())
        sleep(0.01)
    assert all(map(rig.good, begun))
    assert rig.count("decode_restarts") == 2


def test_what_is_cancelled_is_not_sent(rig: Rig) -> None:
    rig.open()
    rig.gate.clear()
    held = [rig.submit() for _ in range(2)]
    until(lambda: sent(rig) == 2)
    assert not held[0].cancel(), "it is begun"
    late = [rig.submit() for _ in range(10)]
    assert all(each.cancel() for each in late[1:])
    rig.gate.set()
    assert all(map(rig.good, [*held, late[0], rig.submit()]))
    assert sent(rig) == 4
    with pytest.raises(CancelledError):
        late[1].result(0)


def test_what_is_cancelled_is_not_decoded_in_a_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, reached = [], threading.Event()

    def held(patchifier: Any, media: Media) -> Item:
        seen.append(media)
        reached.set()
        assert rig.gate.wait(60)
        return prepare(patchifier, media)

    monkeypatch.setattr(decoder, "prepare", held)
    rig.open(processes=0, threads=1)
    rig.gate.clear()
    first = rig.submit()
    assert reached.wait(60)
    assert not first.cancel()
    assert rig.submit().cancel()
    rig.gate.set()
    assert rig.good(first)
    assert rig.good(rig.submit())
    assert len(seen) == 2


def test_without_room_items_wait_until_others_are_dropped(rig: Rig) -> None:
    rig.open(shared_bytes=2**20)
    begun = [rig.submit(size=(512, 512)) for _ in range(5)]
    assert 2**20 // (rig.media(size=(512, 512)).plan.patches * 768) == 1
    while begun:
        assert wait(begun, 30, FIRST_COMPLETED).done
        sleep(0.05)
        assert sum(each.done() for each in begun) == 1, "no more than there is room for"
        begun = [each for each in begun if not each.done()]
    large = rig.submit(size=(1024, 1024))
    assert rig.good(large, (1024, 1024)), "what never fits is for the threads"
    assert sent(rig) == 5


@pytest.mark.parametrize("processes", [0, 2])
def test_what_is_done_is_let_go(rig: Rig, processes: int) -> None:
    rig.open(processes=processes)
    future = rig.submit()
    assert rig.good(future)
    seen = weakref.ref(future.result().patches)
    del future
    gc.disable()
    try:
        until(lambda: not seen())
    finally:
        gc.enable()


@pytest.mark.parametrize("processes", [0, 2])
def test_closing_does_what_was_begun_and_takes_no_more(rig: Rig, processes: int) -> None:
    opened = rig.open(processes=processes)
    begun = [rig.submit() for _ in range(30)]
    assert opened.alive()
    opened.close()
    assert all(map(rig.good, begun))
    assert not opened.alive()
    with pytest.raises(Unavailable, match="stopping"):
        rig.submit()


def test_another_model_is_refused_at_start(rig: Rig) -> None:
    rig.greeting = "0123456789abcdef"
    with pytest.raises(StartError, match="run other code"):
        rig.open()


def test_processes_that_never_start_are_given_up(rig: Rig) -> None:
    rig.greeting = ""
    with pytest.raises(StartError, match=r"preprocess\.processes to 0 .*exited 3 times"):
        rig.open()


@pytest.mark.parametrize("began", [float("nan"), -1.0, 1e300, 2**64 - 1, "now"])
def test_a_time_that_cannot_be_is_no_answer(rig: Rig, began: Any) -> None:
    rig.open(processes=1)
    rig.gate.clear()
    begun = rig.submit()
    until(lambda: rig.started[0].seen)
    rig.started[0].its.send(packed([(began, "", "", b"")]))
    until(lambda: rig.count("decode_restarts") == 1)
    rig.gate.set()
    assert rig.good(begun), "made by the next one"


def test_when_none_starts_any_more_nobody_waits_for_ever(rig: Rig) -> None:
    opened = rig.open()
    rig.gate.clear()
    begun = [rig.submit() for _ in range(40)]
    until(lambda: all(each.seen for each in rig.started))
    rig.greeting = ""
    for each in list(rig.started):
        each.kill()
    assert not wait(begun, 60).not_done
    assert {type(each.exception()) for each in begun} == {Unavailable}
    assert not opened.alive()
    with pytest.raises(Unavailable):
        rig.submit()


def test_no_file_is_left_open(rig: Rig) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    opened = rig.open()
    assert rig.good(rig.submit())
    opened.close()
    del opened
    rig.decoder = None
    rig.started.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_size_that_is_not_the_headers_is_refused(rig: Rig) -> None:
    opened = rig.open()
    plan = opened.patchifier.spec.sizing.plan(Size(96, 96))
    wrong = opened.submit(Media("image", rig.media().data, plan, digest=""))
    with pytest.raises(InvalidMedia, match="differs in size from its header"):
        wrong.result(60)
