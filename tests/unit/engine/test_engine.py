import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from random import Random
from time import monotonic, sleep

import pytest
import torch

from actors.engine.budgets import Capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.errors import EncodeFailed, StartError, Unavailable
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item
from tests.toy_tower import ToyTower, toy_item, toy_rows

CAPACITY = Capacity(((4, 16, 64),), (64,), items=8, frames=0)


class Rig:
    """An engine over the toy tower, and a gate that holds its thread."""

    def __init__(self, capacity: Capacity = CAPACITY, slice_seconds: float = 0) -> None:
        self.metrics = EncoderMetrics()
        self.tower = ToyTower()
        device = Device(slice_seconds)
        graphs = capture(self.tower, capacity, device, self.metrics)
        self.gate = threading.Event()
        self.gate.set()
        forward = self.tower.forward
        self.tower.forward = lambda path, values: (  # type: ignore[method-assign]
            self.gate.wait(10),
            forward(path, values),
        )[1]
        self.engine = Engine(self.tower, graphs, capacity, device, self.metrics)

    def sample(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"encoder_{name}", labels) or 0.0

    def hold(self) -> Future[Item]:
        """Closes the gate behind one item, so that what comes next has to wait."""
        self.gate.clear()
        blocker = self.engine.submit(toy_item(1, 999))
        while blocker.running() is False:
            pass
        return blocker


@pytest.fixture(params=[0, 1e-9], ids=["whole", "paced"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(slice_seconds=request.param)
    yield rig
    rig.gate.set()
    rig.engine.close()


def test_every_item_gets_its_own_rows(rig: Rig) -> None:
    random = Random(0)
    items = [toy_item(random.randint(1, 80), seed) for seed in range(200)]
    for place, item in enumerate(items):
        item.on_device = place % 3 > 0
    answers = [rig.engine.submit(item) for item in items]
    for item, answer in zip(items, answers, strict=True):
        encoded = answer.result(10)
        assert encoded is item
        assert encoded.queue_seconds >= 0
        assert encoded.encode_seconds > 0
        assert torch.equal(encoded.rows, toy_rows(item))
        assert encoded.source == ("graph" if item.plan.tokens <= 64 else "eager")
    eager = sum(item.plan.tokens > 64 for item in items)
    assert rig.sample("graph_misses_total", path="default", reason="beyond_budgets") == eager


def test_packs_form_across_requests_without_waiting_when_idle(rig: Rig) -> None:
    rig.engine.submit(toy_item(3, 1)).result(10)  # nothing else comes: it must not wait
    rig.hold()
    before = rig.sample("pack_items_count")
    answers = [rig.engine.submit(toy_item(4, seed)) for seed in range(8)]
    rig.gate.set()
    wait(answers, 10)
    assert rig.sample("pack_items_count") - before == 2  # the blocker, then all eight together
    assert rig.sample("graph_hits_total", path="default", budget="64", backend="cpu") == 8
    assert rig.sample("padded_tokens_total", path="default") == 1 + 3 + (64 - 32)


def test_busy_is_the_time_with_a_pack_under_way(rig: Rig) -> None:
    start = monotonic()
    for _ in range(2):
        packs = [rig.hold(), *(rig.engine.submit(toy_item(64, seed)) for seed in range(2))]
        sleep(0.1)
        rig.gate.set()
        wait(packs, timeout=10)
        sleep(0.1)
    busy = rig.sample("busy_seconds_total")
    assert 0.2 <= busy <= monotonic() - start - 0.2
    twice = rig.sample("encode_seconds_sum") - busy  # where packs overlap
    assert twice == 0 if rig.engine.device.pace else twice > 0


def test_rows_do_not_change_when_other_items_replay(rig: Rig) -> None:
    item = toy_item(4, 1)
    rows = rig.engine.submit(item).result(10).rows
    for seed in range(5):
        rig.engine.submit(toy_item(4, 100 + seed)).result(10)
    assert torch.equal(rows, toy_rows(item))


def test_one_bad_item_fails_only_itself(rig: Rig) -> None:
    rig.hold()
    good = [toy_item(3, seed) for seed in range(5)]
    answers = [rig.engine.submit(item) for item in good]
    bad = rig.engine.submit(toy_item(2, 50, poisoned=True))
    rig.gate.set()
    with pytest.raises(EncodeFailed, match=r"grid \(1, 2, 4\): poisoned"):
        bad.result(10)
    for item, answer in zip(good, answers, strict=True):
        assert torch.equal(answer.result(10).rows, toy_rows(item))
    # The blocker's pack, then each of them by itself; the pack that failed does not count.
    assert rig.sample("pack_items_count") == 1 + 5
    assert rig.sample("graph_misses_total", path="default", reason="beyond_budgets") == 0


def test_too_little_memory_for_the_graphs_names_what_to_change() -> None:
    class Full(Device):
        def capture(self, *args: object, **kwargs: object) -> Callable[[], torch.Tensor]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(StartError, match=r"0 of 3 graphs.*graphs\.token_budgets"):
        capture(ToyTower(), CAPACITY, Full(), EncoderMetrics())


def test_a_cancelled_item_is_not_encoded(rig: Rig) -> None:
    rig.hold()
    cancelled, kept = rig.engine.submit(toy_item(2, 1)), rig.engine.submit(toy_item(3, 2))
    assert cancelled.cancel()
    rig.gate.set()
    kept.result(10)
    with pytest.raises(CancelledError):
        cancelled.result(10)
    assert rig.sample("tokens_total") == 1 + 3


def test_a_device_that_hangs_shows_in_the_age(rig: Rig) -> None:
    assert rig.engine.stalled_seconds() == 0
    blocker = rig.hold()
    rig.engine.submit(toy_item(1, 1))
    assert rig.engine.stalled_seconds() > 0
    rig.gate.set()
    blocker.result(10)


def test_a_queue_that_moves_is_no_stall(rig: Rig) -> None:
    for seed in range(3):
        rig.gate.clear()
        before = monotonic()
        answers = [rig.engine.submit(toy_item(60, seed)) for _ in range(9)]
        rig.gate.set()
        answers[0].result(10)
        assert rig.engine.stalled_seconds() <= monotonic() - before
    rig.gate.set()


def test_a_failure_while_closing_is_answered_too(rig: Rig) -> None:
    rig.hold()
    good, bad = rig.engine.submit(toy_item(2, 1)), rig.engine.submit(toy_item(2, 2, poisoned=True))
    closer = threading.Thread(target=rig.engine.close)
    closer.start()
    rig.gate.set()
    closer.join(10)
    assert torch.equal(good.result(1).rows, toy_rows(toy_item(2, 1)))
    with pytest.raises(EncodeFailed, match="poisoned"):
        bad.result(1)


def test_closing_answers_what_waits_and_takes_no_more(rig: Rig) -> None:
    rig.hold()
    answers = [rig.engine.submit(toy_item(2, seed)) for seed in range(20)]
    closer = threading.Thread(target=rig.engine.close)
    closer.start()
    rig.gate.set()
    closer.join(10)
    assert all(answer.done() and not answer.exception() for answer in answers)
    assert not rig.engine.alive()
    with pytest.raises(Unavailable, match="stopping"):
        rig.engine.submit(toy_item(1, 1))


def test_a_bug_in_the_engine_leaves_nobody_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [rig.hold(), *(rig.engine.submit(toy_item(2, seed)) for seed in range(3))]
    monkeypatch.setattr(rig.engine, "_count", lambda *_: 1 / 0)
    rig.gate.set()
    for answer in answers:
        with pytest.raises(Unavailable, match="failed and cannot continue"):
            answer.result(10)
    assert not rig.engine.alive()
    closing = threading.Thread(target=rig.engine.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_without_graphs_everything_runs_eagerly() -> None:
    rig = Rig(Capacity(((),), (64,), items=8, frames=0))
    item = toy_item(10, 3)
    encoded = rig.engine.submit(item).result(10)
    rig.engine.close()
    assert encoded.source == "eager"
    assert torch.equal(encoded.rows, toy_rows(item))
    assert rig.sample("graph_misses_total", path="default", reason="off") == 1
