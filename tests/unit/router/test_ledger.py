"""Who carries how many patches."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from actors.errors import Overloaded, TooLarge
from actors.types import Cost, Work
from router.policy.balance import ReplicaGroup
from router.policy.ledger import TOLD_REPLICAS, Ledger, Reservation, tells

LIMIT = 1000
REPLICAS = ["a", "b", "c"]


def ledger() -> Ledger:
    return Ledger(LIMIT, exclude_seconds=5)


def works(*patches: int) -> list[Work]:
    """Items without attention."""
    return [Work(one) for one in patches]


def image(patches: int) -> Work:
    return Work(patches, patches * patches)


def test_all_of_a_request_is_admitted_or_nothing() -> None:
    book = ledger()
    book.admit(works(400, 500), now=0)
    with pytest.raises(Overloaded, match="900 of 1000"):
        book.admit(works(50, 51), now=0)
    assert book.outstanding.patches == 900
    book.admit(works(100), now=0)


def test_what_could_never_be_admitted_is_too_large() -> None:
    with pytest.raises(TooLarge, match=r"1001 patches.*max_outstanding_patches"):
        ledger().admit(works(1, 1000), now=0)


def test_retry_after_follows_the_drain_rate() -> None:
    book = ledger()
    for second in range(60):
        [reservation] = book.admit(works(100), now=second)
        book.release(reservation, now=second + 1, done=True)
    book.admit(works(1000), now=60)
    with pytest.raises(Overloaded) as refused:
        book.admit(works(800), now=60)
    assert refused.value.retry_after_seconds == pytest.approx(8, rel=0.25)


def test_retry_after_has_bounds() -> None:
    book = ledger()
    [first, _] = book.admit(works(1, 999), now=0)
    with pytest.raises(Overloaded) as refused:
        book.admit(works(1), now=0)
    assert refused.value.retry_after_seconds == 1
    book.release(first, now=2, done=True)
    with pytest.raises(Overloaded) as refused:
        book.admit(works(900), now=2)
    assert refused.value.retry_after_seconds == 30


def busy(queue_seconds: float) -> Ledger:
    """Replicas a and b, each with work; 100 patches were done in each of 20 seconds."""
    book = Ledger(10**6, exclude_seconds=5, queue_seconds=queue_seconds)
    for replica in "ab":
        [held] = book.admit(works(1), now=0)
        book.assign(held, replica)
    for second in range(20):
        [reservation] = book.admit(works(100), now=second)
        book.release(reservation, now=second + 1, done=True)
    return book


def test_what_would_wait_too_long_is_refused() -> None:
    book = busy(queue_seconds=10)
    book.admit(works(1500), now=20)
    with pytest.raises(Overloaded, match=r"about 15 s.*max_queue_seconds") as refused:
        book.admit(works(1), now=20)
    assert refused.value.retry_after_seconds == pytest.approx(5, rel=0.1)
    assert book.admit(works(), now=20) == [], "all of its items are on their way already"


@pytest.mark.parametrize(("before", "then"), [(400, 15_376), (400, 62_500), (15_376, 400)])
def test_the_queue_is_limited_by_cost_whatever_was_encoded_before(before: int, then: int) -> None:
    """Attention makes a patch of 15,376 three times as expensive as one of 400."""
    cost = Cost(0.001, 1.15e-6, 1.6e-10)
    book = Ledger(10**9, exclude_seconds=5, queue_seconds=20)
    book.report({"a": Work(10**6)}, [cost])
    [oldest] = book.admit([image(0)], now=0)
    book.assign(oldest, "a")
    now = 0.0
    while now < 30:
        [one] = book.admit([image(before)], now)
        now += cost.work_seconds(image(before))
        book.release(one, now, done=True)
    each = cost.work_seconds(image(then))
    for _ in range(int(19 / each)):
        book.admit([image(then)], now)
    book.admit([image(then)] * int(2 / each), now)
    with pytest.raises(Overloaded, match=r"the queue takes about 2[01] s"):
        book.admit([image(then)], now)


def test_room_for_anything_is_the_room_for_the_least() -> None:
    full = ledger()
    full.check_room(now=0)
    full.admit(works(999), now=0)
    full.check_room(now=0)
    full.admit(works(1), now=0)
    with pytest.raises(Overloaded, match="1000 of 1000"):
        full.check_room(now=0)
    slow = busy(queue_seconds=10)
    slow.check_room(now=20)
    slow.admit(works(1500), now=20)
    with pytest.raises(Overloaded, match="about 15 s"):
        slow.check_room(now=20)


def test_the_size_of_a_request_itself_does_not_matter() -> None:
    book = busy(queue_seconds=10)
    book.admit(works(900), now=20)
    book.admit(works(5000), now=20)


def test_nothing_is_refused_while_a_sound_replica_is_idle() -> None:
    book = busy(queue_seconds=10)
    book.admit(works(1500), now=20)
    book.report({"a": Work(0), "b": Work(0), "c": Work(0)})
    book.admit(works(1), now=20)
    book.exclude("c", now=20)
    with pytest.raises(Overloaded):
        book.admit(works(1), now=20)


def test_nothing_is_refused_before_anything_has_waited() -> None:
    book = Ledger(10**6, exclude_seconds=5, queue_seconds=10)
    [first] = book.admit(works(100), now=0)
    book.release(first, now=2, done=True)
    book.admit(works(600), now=10)
    book.admit(works(1), now=12.4)
    with pytest.raises(Overloaded):
        book.admit(works(1), now=12.6)


def test_time_without_work_does_not_slow_the_rate() -> None:
    book = Ledger(10**6, exclude_seconds=5, queue_seconds=10)
    for second in range(0, 600, 60):
        [reservation] = book.admit(works(100), now=second)
        book.release(reservation, now=second + 1, done=True)
    book.admit(works(950), now=900)
    book.admit(works(100), now=900)
    with pytest.raises(Overloaded):
        book.admit(works(1), now=903)


def test_until_a_rate_is_measured_the_limit_alone_holds() -> None:
    book = Ledger(10**6, exclude_seconds=5, queue_seconds=10)
    book.admit(works(999_999), now=0)
    book.admit(works(1), now=0.5)


def test_patches_of_other_routers_count() -> None:
    book = ledger()
    [mine] = book.admit(works(100), now=0)
    book.assign(mine, "a")
    book.report({"a": Work(700), "b": Work(30)})
    assert book.loads(["a", "b", "c"], now=0) == {"a": 700, "b": 30, "c": 0}


FAST, SLOW = Cost(1, 0.5, 0.25), Cost(4, 2, 1)


def test_a_measured_replica_gets_a_quarter_of_a_second_of_work() -> None:
    """Not by the throughput, which is low after requests that came one by one."""
    book, cost = ledger(), {"a": Cost(0, 1e-3, 0)}
    for number in range(40):
        assert book.has_room(cost) is (number < 25)
        [one] = book.admit([Work(10)], now=0)
        book.assign(one, "a")
    assert book.has_room(cost | {"b": cost["a"]})


def test_a_measured_replica_gets_a_few_items_however_large() -> None:
    book, cost = ledger(), {"a": Cost(0, 1, 0)}
    for number in range(20):
        assert book.has_room(cost) is (number < 8)
        [one] = book.admit([Work(10)], now=0)
        book.assign(one, "a")


def test_without_the_cost_of_one_all_are_planned_in_patches() -> None:
    book = ledger()
    book.report({"a": Work(700, 9), "b": Work(30)})
    in_patches = [ReplicaGroup([2, 4], {"a": 700, "b": 30})]
    items = [Work(2, 4), Work(4, 16)]
    for costs in ({"a": FAST, "b": None}, {"a": None, "b": None}):
        assert book.groups(items, costs, now=0) == in_patches


def test_equal_replicas_are_planned_in_seconds() -> None:
    book = ledger()
    book.report({"a": Work(4, 16)})
    costs = {"a": FAST, "b": FAST}
    group = ReplicaGroup([2, 6], {"a": 1 + 2 + 4, "b": 1})
    assert book.groups([Work(2, 4), Work(4, 16)], costs, now=0) == [group]


def test_unequal_replicas_are_planned_in_seconds() -> None:
    book = ledger()
    book.report({"c": Work(10, 100)})
    [mine] = book.admit([Work(8, 64)], now=0)
    book.assign(mine, "a")
    book.hear("b", Work(2, 4), now=0)
    costs = {"a": FAST, "b": SLOW, "c": FAST}
    assert book.groups([Work(2, 4), Work(4, 16)], costs, now=0) == [
        ReplicaGroup([2, 6], {"a": 1 + 4 + 16, "c": 1 + 5 + 25}),
        ReplicaGroup([8, 24], {"b": 4 + 4 + 4}),
    ]


def test_own_patches_in_an_old_report_do_not_count_as_those_of_others() -> None:
    book = ledger()
    [mine] = book.admit(works(100), now=0)
    book.assign(mine, "a")
    assert book.loads(["a"], now=0) == {"a": 100}
    book.release(mine, now=0.5, done=True)
    book.report({"a": Work(100)})
    assert book.loads(["a"], now=0.6) == {"a": 0}
    assert book.loads(["a"], now=1.5) == {"a": 0}
    assert book.loads(["a"], now=3.0) == {"a": 100}, "by now it cannot be ours"


def test_what_comes_with_an_answer_is_believed_before_a_report() -> None:
    book = ledger()
    [mine, later] = book.admit(works(100, 40), now=0)
    book.assign(mine, "a")
    book.assign(later, "a")
    book.release(mine, now=1, done=True)
    book.hear("a", Work(40 + 300), now=1)
    book.report({"a": Work(900)})
    assert book.loads(["a"], now=1.2) == {"a": 40 + 300}
    book.hear("a", Work(10), now=1.3)
    assert book.loads(["a"], now=1.4) == {"a": 40}, "ours is still there, whatever it says"
    assert book.loads(["a"], now=3) == {"a": 900}, "too long ago"


def test_a_failed_replica_is_excluded_for_a_while() -> None:
    book = ledger()
    book.exclude("a", now=10)
    assert book.excluded("a", now=14.9)
    assert not book.excluded("a", now=15)
    assert not book.excluded("b", now=10)


def test_replicas_tell_where_there_is_a_choice_and_the_news_comes_in_time() -> None:
    fast, slow = Cost(0.001, 0, 0), Cost(0.005, 0, 0)
    for costs, expected in {
        (): False,
        (None,): False,
        (slow,): False,
        (None, None): True,
        (slow, slow): True,
        (slow, fast): False,
        (slow,) * TOLD_REPLICAS: True,
        (slow,) * (TOLD_REPLICAS + 1): False,
    }.items():
        assert tells({str(place): cost for place, cost in enumerate(costs)}) == expected, costs


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order, the books balance, and close at zero."""

    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.book = ledger()
        self.now = 0.0
        self.open: set[Reservation] = set()

    @rule(target=live, costs=st.lists(st.integers(1, 400), max_size=4))
    def admit(self, costs: list[int]) -> object:
        before = sum(reservation.work.patches for reservation in self.open)
        try:
            admitted = self.book.admit(works(*costs), self.now)
        except Overloaded:
            assert before + sum(costs) > LIMIT
            return multiple()
        except TooLarge:
            assert sum(costs) > LIMIT
            return multiple()
        self.open |= set(admitted)
        return multiple(*admitted)

    @rule(reservation=live, replica=st.sampled_from([*REPLICAS, None]))
    def assign(self, reservation: Reservation, replica: str | None) -> None:
        self.book.assign(reservation, replica)

    @rule(reservation=live, done=st.booleans(), seconds=st.floats(0, 3))
    def end(self, reservation: Reservation, done: bool, seconds: float) -> None:
        self.now += seconds
        self.book.release(reservation, self.now, done=done)
        self.open.discard(reservation)

    @rule(there=st.sets(st.sampled_from(REPLICAS)), patches=st.integers(0, 2000))
    def report(self, there: set[str], patches: int) -> None:
        self.book.report(dict.fromkeys(there, Work(patches)))

    @rule(replica=st.sampled_from(REPLICAS), patches=st.integers(0, 2000))
    def hear(self, replica: str, patches: int) -> None:
        self.book.hear(replica, Work(patches), self.now)

    @rule(replica=st.sampled_from(REPLICAS))
    def die(self, replica: str) -> None:
        self.book.exclude(replica, self.now)
        for reservation in self.open:
            if reservation.replica == replica:
                self.book.assign(reservation, None)

    @invariant()
    def balances(self) -> None:
        total = sum(r.work.patches for r in self.open)
        assert self.book.outstanding.patches == total <= LIMIT
        for replica in REPLICAS:
            own = sum(r.work.patches for r in self.open if r.replica == replica)
            assert self.book.own(replica) == own
            assert self.book.loads([replica], self.now)[replica] >= own

    def teardown(self) -> None:
        for reservation in self.open:
            self.book.release(reservation, self.now, done=False)
        assert self.book.outstanding == Work(0)
        assert not any(self.book.own(replica) for replica in REPLICAS)


TestAnyOrder = AnyOrder.TestCase
