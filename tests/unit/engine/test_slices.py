"""Chunked encoding: what is launched before a step, and where a replay may be cut."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import cast

import pytest
import torch

from actors.engine import slices
from actors.engine.budgets import Capacity, Segments
from actors.engine.cuda import CudaPace
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import GraphSet, capture
from actors.engine.slices import (
    BEHIND,
    LAST_SLICES,
    PASSES,
    RECENT,
    SLICES,
    STRETCH,
    STRETCH_BEHIND,
    Pace,
    Slice,
    Step,
    StepTimes,
    took_together,
)
from actors.kernels.break_points import at_break_points, between
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.options import ModelOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item
from tests.small_presets import SMALL, write_small
from tests.toy_tower import ToyTower, toy_item, toy_rows
from tests.waiting import until


class Recorded(Pace):
    """On a device that is as busy as the test says. Writes down what was launched."""

    def __init__(self, slice_seconds: float) -> None:
        super().__init__(slice_seconds)
        self.free = False
        self.seen: list[str] = []

    def idle(self) -> bool:
        return self.free

    def after_steps(self) -> None:
        self.seen.append("after")

    def before_step(self, step: Step) -> None:
        self.seen.append("step")

    @contextmanager
    def replay(self, *seconds: float) -> Iterator[Future[None]]:
        """The engine's thread, with slices that take this long."""
        slices = [Slice(partial(self.seen.append, "slice"), each) for each in seconds]
        with ThreadPoolExecutor(1) as threads:
            launched = threads.submit(self.launch, slices)
            self.waits()
            try:
                yield launched
            finally:
                self.free = True  # launches what is left, so that a test that fails ends

    def waits(self) -> None:
        """For the engine's thread to bring slices."""
        until(lambda: self._slices, 10)


DECODING, READING, LAST = Step(8, 2000), Step(512, 0), Step(512, 9000)
ALONE = {DECODING: 19.0, READING: 35.0, LAST: 40.5}
"""Seconds of steps without slices. With 1.2 times 35, there is room for 23, 7 and 1.5."""


def timed(slice_seconds: float) -> Recorded:
    pace = Recorded(slice_seconds)
    for step, seconds in ALONE.items():
        pace.times.add(step, seconds)
    return pace


@pytest.mark.parametrize(
    ("step", "slices"),
    [
        (DECODING, 9),
        (Step(60, 2040), 9),  # like DECODING
        (READING, 2),
        (LAST, 0),
        (Step(449, 100), 2),  # like READING
        (Step(300, 4000), 2),  # not measured: as long as a full one
    ],
)
def test_a_step_with_its_slices_takes_a_limited_multiple_of_a_full_one(
    step: Step, slices: int
) -> None:
    assert STRETCH == 1.2
    pace = timed(5)
    with pace.replay(*[2.5] * 20):
        pace.step(step)
        assert pace.seen == [*["after"] * bool(slices), *["slice"] * slices, "step"]


@pytest.mark.parametrize(
    ("waiting", "step", "slices"),
    [(BEHIND - 1, READING, 2), (BEHIND, READING, 5), (BEHIND, DECODING, 12), (BEHIND, LAST, 3)],
)
def test_steps_wait_for_more_slices_while_items_wait(waiting: int, step: Step, slices: int) -> None:
    """With 1.4 times 35, there is room for 14, 30 and 8.5."""
    assert STRETCH_BEHIND == 1.4
    pace = timed(5)
    pace.waiting = waiting
    with pace.replay(*[2.5] * 20):
        pace.step(step)
        assert pace.seen.count("slice") == slices


def test_where_full_steps_are_long_the_number_of_slices_is_limited() -> None:
    pace = Recorded(5)
    pace.times.add(Step(8192, 0), 400)
    pace.times.add(DECODING, 6)
    for step in (DECODING, Step(8192, 0)):
        with pace.replay(*[5] * 20):
            pace.step(step)
            assert pace.seen.count("slice") == SLICES
        pace.free = False
        pace.seen.clear()


def test_the_last_slices_are_launched_before_a_step_is_scheduled() -> None:
    """They count as slices of this step."""
    pace = timed(5)  # full steps have room for 7
    with pace.replay(2.5, 2.5, 2.5):
        assert not pace.finish()
        assert pace.seen == []
    pace = timed(5)
    with pace.replay(2.5, 2.5) as launched:
        assert pace.finish()
        launched.result(10)
        assert pace.seen == ["after", "slice", "slice"]
    pace.free = False
    with pace.replay(5, 5, 5, 5):  # of the next item
        pace.step(DECODING)  # with room for 23
        assert pace.seen[3:] == ["after", *["slice"] * 3, "step"]
        pace.step(READING)
    assert pace.seen[8:11] == ["after", "slice", "step"]


@pytest.mark.parametrize(("slices", "finishes"), [(LAST_SLICES, True), (LAST_SLICES + 1, False)])
def test_few_slices_are_last_ones_where_full_steps_are_long(slices: int, finishes: bool) -> None:
    pace = Recorded(5)
    pace.times.add(Step(8192, 0), 200)
    with pace.replay(*[5] * slices):
        assert pace.finish() == finishes


def test_before_a_step_has_been_measured_none_is_launched_early() -> None:
    pace = Recorded(5)
    with pace.replay(0.0, 0.1):
        assert not pace.finish()


def test_without_steps_few_slices_are_launched_early() -> None:
    """vLLM schedules again and again while requests only wait."""
    pace = timed(5)
    for number in range(3):
        with pace.replay(5):
            assert pace.finish() == (number == 0)
        pace.free = False
    with pace.replay(5):
        pace.step(READING)
        assert pace.seen[-1] == "step"
        assert pace.finish()


def test_a_step_after_the_last_slices_waits_for_no_other_if_it_has_no_room() -> None:
    pace = timed(5)
    with pace.replay(5):
        assert pace.finish()
    pace.free = False
    with pace.replay(5, 5):
        for _ in range(2):
            pace.step(READING)
        assert pace.seen == ["after", "slice", "step", "after", "slice", "step"]


def test_long_steps_after_the_last_slices_wait_for_none_for_a_while() -> None:
    pace = timed(5)
    with pace.replay(5, 5) as _:
        for _ in range(PASSES):
            pace.step(LAST)
    pace.free = False
    pace.seen.clear()
    with pace.replay(5):
        assert pace.finish()
    pace.free = False
    with pace.replay(5):
        for _ in range(PASSES):
            pace.step(LAST)
        assert pace.seen == ["after", "slice", *["step"] * PASSES]


def test_the_engine_learns_at_once_that_the_last_slice_was_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slices, "POLL_SECONDS", 30)
    for launch in (Pace.finish, partial(Pace.step, step=DECODING)):
        pace = timed(5)
        with pace.replay(5) as launched:
            sleep(0.01)  # it waits
            launch(pace)
            launched.result(10)


def test_before_a_step_has_been_measured_all_wait_for_one_slice() -> None:
    pace = Recorded(5)
    with pace.replay(*[5] * 20):
        pace.step(READING)
        assert pace.seen == ["after", "slice", "step"]


def test_steps_that_only_decode_are_never_long() -> None:
    """Even if no longer ones have been seen."""
    pace = Recorded(5)
    for step, seconds in ((Step(50, 0), 5), (Step(30, 6000), 9)):
        pace.times.add(step, seconds)
    with pace.replay(*[5] * 20):
        pace.step(Step(30, 6000))
        assert pace.seen == ["after", "slice", "step"]


def test_a_slice_that_never_fits_is_launched_alone() -> None:
    for pace, step in ((Recorded(1), DECODING), (timed(1), DECODING), (timed(1), READING)):
        with pace.replay(40, 40):
            pace.step(step)
            pace.step(step)
        assert pace.seen == ["after", "slice", "step"] * 2


def test_long_steps_wait_for_a_slice_now_and_then() -> None:
    pace = timed(5)
    with pace.replay(5, 5):
        for _ in range(2 * PASSES + 2):
            pace.step(LAST)
    assert pace.seen == [*["step"] * PASSES, "after", "slice", "step"] * 2


def test_the_median_of_recent_full_steps_counts() -> None:
    times = StepTimes()

    def full() -> float:
        return times.room_of_any(STRETCH) / (STRETCH - 1)

    times.add(Step(640, 600), 40)  # more context
    for seconds, expected in ((30, 30), (12, 12), (20, 20), (90, 20)):
        times.add(Step(640, 0), seconds)
        assert full() == pytest.approx(expected)
    for _ in range(RECENT):
        times.add(Step(640, 0), 14)
        times.add(Step(640, 600), 40)
        times.add(Step(576, 0), 3)  # fewer tokens
    assert full() == pytest.approx(14)
    assert times.room(Step(576, 0), STRETCH)[0] == pytest.approx(STRETCH * 14 - 3)
    times.add(Step(1024, 0), 25)  # more
    assert full() == pytest.approx(25)


def test_steps_with_a_larger_graph_are_timed_apart() -> None:
    times = StepTimes()
    for tokens, seconds in ((320, 12), (321, 14), (384, 14), (385, 16)):
        times.add(Step(tokens, 0), seconds)
    assert times.room(Step(300, 0), STRETCH)[0] == pytest.approx(STRETCH * 16 - 12)
    assert times.room(Step(350, 0), STRETCH)[0] == pytest.approx(STRETCH * 16 - 14)


def test_beside_a_long_context_a_step_reads_fewer_tokens() -> None:
    """So that it takes at most so many times as long as a full one."""
    times = StepTimes(768)
    assert times.tokens_beside(100_000, STRETCH) == 768  # nothing was measured

    def seconds(step: Step) -> float:
        return step.tokens * (1 + step.context / 16_000) / 1000

    for step in (Step(768, 0), Step(768, 1500), Step(768, 3000), Step(512, 8000)):
        for _ in range(5):
            times.add(step, seconds(step))
    for context in (0, 2000, 8000, 16_000, 32_000, 10**6):
        tokens = times.tokens_beside(context, STRETCH)
        assert tokens == pytest.approx(min(768, 768 * STRETCH / (1 + context / 16_000)), rel=0.01)
        assert seconds(Step(int(tokens), context)) < 1.01 * STRETCH * seconds(Step(768, 0))


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [((64, 512, 640, 768), 512), ((1024,), 614.4), ((64, 512), 614.4), ((), 614.4)],
)
def test_a_step_with_fewer_tokens_has_as_many_as_a_graph(
    sizes: tuple[int, ...], tokens: float
) -> None:
    """Because with more it would take as long as with the next larger graph."""
    times = StepTimes(768, sizes)
    times.add(Step(768, 0), 20)
    times.add(Step(768, 8000), 30)
    assert times.tokens_beside(8000, STRETCH) == pytest.approx(tokens)
    assert times.tokens_beside(2000, STRETCH) == 768


def test_what_makes_steps_longer_is_measured_with_full_steps_and_long_contexts_alone() -> None:
    times = StepTimes(768)
    for step, seconds in (
        (Step(768, 0), 20),
        (Step(768, 600), 40),  # little context
        (Step(646, 1500), 20),  # with the graph of a full one
        (Step(64, 8000), 40),
        (Step(2048, 8000), 90),  # nobody decodes
        (Step(768, 8000), 19),  # not shorter
    ):
        times.add(step, seconds)
        assert times.tokens_beside(10**6, STRETCH) == 768


def test_steps_in_which_nobody_decodes_are_not_full_ones() -> None:
    times = StepTimes(768)
    times.add(Step(2048, 0), 50)
    assert times.room_of_any(STRETCH) == 0
    times.add(Step(768, 0), 20)
    assert times.room_of_any(STRETCH) == pytest.approx(4)
    room, long = times.room(Step(2048, 0), STRETCH)
    assert room == pytest.approx(24 - 50)
    assert long


class SimulatedStream:
    """A CUDA stream of which the test says when it has ended."""

    now = 0.0

    def __init__(self) -> None:
        self.end = 0.0

    def run(self, seconds: float) -> None:
        self.end = max(self.end, self.now) + seconds

    def query(self) -> bool:
        return self.now >= self.end

    def wait_stream(self, other: SimulatedStream) -> None:
        self.end = max(self.end, other.end)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent()
        event.end = max(self.end, self.now)
        return event


class SimulatedEvent(SimulatedStream):
    def record(self, stream: SimulatedStream) -> None:
        stream.record_event(self)

    def elapsed_time(self, other: SimulatedEvent) -> float:
        return 1000 * (other.end - self.end)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[SimulatedStream, SimulatedStream]:
    """Of the language model's steps, and of the engine."""
    steps, compute = SimulatedStream(), SimulatedStream()
    monkeypatch.setattr(SimulatedStream, "now", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: steps)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimulatedEvent())
    return steps, compute


def test_a_step_is_timed_without_slices_and_idle_time(
    streams: tuple[SimulatedStream, SimulatedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, compute = streams
    pace = CudaPace(5, cast(torch.cuda.Stream, compute))

    def step(tokens: int) -> None:
        pace.step_launched()
        steps.run(2)  # copies the step's inputs
        pace.step(Step(tokens, 0))
        steps.run(10)

    step(640)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(pace.launch, [Slice(partial(compute.run, 50), 5)])
        while not pace._slices:
            sleep(0.001)
        step(320)
    assert steps.end == 12 + 2 + 50 + 10
    step(128)
    for now in (100.0, 200.0):  # the device is idle
        monkeypatch.setattr(SimulatedStream, "now", now)
        pace.step_launched()
        steps.run(1)
        pace.step_launched()
    assert pace.times._seconds == {Step(9, 0): deque([10]), Step(4, 0): deque([10])}


def test_what_slices_take_is_measured(
    streams: tuple[SimulatedStream, SimulatedStream], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took twice as long when the engine started."""
    steps, compute = streams
    pace = CudaPace(4, cast(torch.cuda.Stream, compute))
    pace.times.add(READING, 35)  # room for 7
    slices = [Slice(partial(compute.run, 2), 4.0) for _ in range(4)]

    def step(*, behind: bool = False) -> float:
        """Returns how long its slices took. `behind`: the step before had already ended."""
        pace.step_launched()
        if behind:
            monkeypatch.setattr(SimulatedStream, "now", steps.end)
        before = steps.end
        pace.step(READING)
        taken = max(0, compute.end - before)
        steps.run(35)
        monkeypatch.setattr(SimulatedStream, "now", steps.end - 1)  # it runs
        return taken

    def seconds() -> list[float]:
        pace.step_launched()
        return [each.seconds for each in slices]

    @contextmanager
    def replay() -> Iterator[None]:
        monkeypatch.setattr(pace, "idle", lambda: False)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(pace.launch, slices)
            until(lambda: pace._slices, 10)
            try:
                yield
            finally:
                monkeypatch.setattr(pace, "idle", lambda: True)  # so that a test that fails ends

    assert step() == 0
    with replay():
        # If the device may have waited for the launch, it is not timed.
        assert (step(behind=True), seconds()) == (2, [4, 4, 4, 4])
        assert (step(), seconds()) == (2, [4, 2, 4, 4])
        assert (step(), seconds()) == (2, [4, 2, 2, 4])
        assert pace.finish()
        assert (step(), seconds()) == (2, [4, 2, 2, 2])
    with replay():
        assert [step(), step()] == [4, 4]
        assert seconds() == [pytest.approx(8 / 3), 2, 2, 2]


def test_a_slice_that_fails_is_not_timed(
    streams: tuple[SimulatedStream, SimulatedStream],
) -> None:
    steps, compute = streams
    pace = CudaPace(5, cast(torch.cuda.Stream, compute))
    pace.step(READING)
    steps.run(20)
    with ThreadPoolExecutor(1) as threads:
        failing = threads.submit(pace.launch, [Slice(partial(divmod, 1, 0), 5.0)])
        until(lambda: pace._slices, 10)
        pace.step(READING)
        assert isinstance(failing.exception(10), ZeroDivisionError)
    assert not pace._timed


def test_what_slices_took_together_is_divided_and_the_median_counts() -> None:
    short, long = Slice(lambda: None, 2.0), Slice(lambda: None, 4.0)
    took_together([short, long], 3.0)
    assert (short.seconds, long.seconds) == (1.0, 2.0)
    for seconds in (60.0, 3.0):
        took_together([short, long], seconds)
    assert (short.seconds, long.seconds) == (1.0, 2.0)
    for _ in range(RECENT):
        took_together([short, long], 12.0)
    assert (short.seconds, long.seconds) == (4.0, 8.0)
    unknown = Slice(lambda: None, 0.0)
    for _ in range(RECENT):
        took_together([unknown, unknown], 6.0)
    assert unknown.seconds == 3.0


def test_while_no_step_runs_two_slices_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = SimulatedStream()
    monkeypatch.setattr(SimulatedStream, "now", 0.0)
    pace = CudaPace(5, cast(torch.cuda.Stream, compute))
    pace.times.add(READING, 100)
    assert not pace.finish()
    with ThreadPoolExecutor(1) as threads:
        launched = threads.submit(pace.launch, [Slice(partial(compute.run, 9), 9.0)] * 3)
        for now, ends in ((5.0, 18.0), (10.0, 27.0)):  # the second begins at 9
            monkeypatch.setattr(SimulatedStream, "now", now)
            limit = monotonic() + 10
            while compute.end < ends and monotonic() < limit:
                sleep(0.001)
            sleep(0.02)
            assert compute.end == ends
        launched.result(10)
        monkeypatch.setattr(SimulatedStream, "now", 99.0)  # so that a test that fails ends


def test_a_step_launches_nothing_when_no_slice_is_ready() -> None:
    pace = Recorded(5)
    pace.step(DECODING)
    assert pace.seen == ["step"]


def test_without_steps_slices_need_none() -> None:
    pace = Recorded(1)
    with pace.replay(*[4] * 3):
        assert pace.seen == []
        pace.free = True
    assert pace.seen == ["slice"] * 3


def test_a_slice_that_fails_fails_its_replay_not_the_step() -> None:
    def fail() -> None:
        raise ZeroDivisionError

    pace = Recorded(5)
    with ThreadPoolExecutor(1) as threads:
        for early in (False, True):
            launched = threads.submit(pace.launch, [Slice(fail, 1.0), Slice(fail, 1.0)])
            pace.waits()
            if early:
                pace.times.add(READING, 16)
                assert not pace.finish(), "nothing was encoded"
            else:
                pace.step(DECODING)
            with pytest.raises(ZeroDivisionError):
                launched.result(10)
    with pace.replay(1) as launched:
        pace.step(DECODING)
        launched.result(10)
    assert pace.seen == ["after", "step", "after", "after", "slice", "step"]


def test_a_replay_has_ended_when_its_last_slice_has_been_launched() -> None:
    pace, go = Recorded(5), Event()
    with ThreadPoolExecutor(2) as threads:
        launched = threads.submit(pace.launch, [Slice(partial(go.wait, 10), 1.0)])
        pace.waits()
        step = threads.submit(pace.step, DECODING)
        until(lambda: not pace._slices, 10)
        sleep(0.02)
        assert not launched.done()
        go.set()
        step.result(10)
        launched.result(10)


def test_packs_are_completed_when_their_slices_are_launched() -> None:
    capacity = Capacity(((64,),), (64,), items=1, frames=0)
    tower, device, metrics = ToyTower(), Device(), EncoderMetrics()
    pace = device.pace = Recorded(0.004)
    engine = Engine(tower, capture(tower, capacity, device, metrics), capacity, device, metrics)
    answers = [engine.submit(toy_item(4, seed)) for seed in range(3)]
    for seed, answer in enumerate(answers):
        pace.waits()
        pace.step(DECODING)
        assert torch.equal(answer.result(10).rows, toy_rows(toy_item(4, seed)))
    last = engine.submit(toy_item(4, 3))
    pace.waits()
    assert not last.done()
    pace.free = True
    assert last.result(10)
    engine.close()


def test_break_points_are_between_pieces_and_within_the_context_only() -> None:
    seen: list[int | str] = []
    with at_break_points(partial(seen.append, "outer")):
        with at_break_points(partial(seen.append, "cut")):
            seen.extend(between(range(3)))
            seen.extend(between(range(1)))
        seen.extend(between(range(2)))
    seen.extend(between(range(2)))
    assert seen == [0, "cut", 1, "cut", 2, 0, 0, "outer", 1, 0, 1]


EVERY_RUN = ("clip-vit-l-336", "qwen25vl-7b", "step3vl-10b")
"""One of each kind of tower."""


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(preset, marks=() if preset in EVERY_RUN else pytest.mark.extended)
        for preset in sorted(SMALL)
    ],
)
def test_every_family_says_where_its_layers_end(preset: str, tmp_path: Path) -> None:
    folder = write_small(tmp_path, preset)
    options = ModelOptions(id=str(folder), load_format="dummy", dtype="float32")
    tower = load(options, torch.device("cpu"))
    picture = torch.arange(3 * 120 * 90).mul_(7).remainder_(251).byte().view(3, 120, 90)
    plan, patches = patchifier_of(tower.spec).patchify(picture)
    item, device = Item(plan, patches.numpy()), Device()
    for path, tokens in zip(tower.spec.paths, plan.path_tokens, strict=True):
        graphs = GraphSet(tower, path, (tokens,) if tokens else (), Segments(4), device)
        graphs.capture(lambda budget, seconds: None)
        if tokens:
            reached: list[None] = []
            with at_break_points(partial(reached.append, None)):
                graphs.run(tokens, [item])
            assert reached
