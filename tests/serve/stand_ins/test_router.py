"""Two routers in front of three stand-in encoders, on a real cluster."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.errors import DeadlineExceeded, InvalidMedia, Overloaded, TooLarge
from actors.types import Cost, Embedding
from encoder_service.app import ONE_LOOP
from router.options import RouterOptions
from router.policy.balance import POLICIES
from router.policy.ledger import REPORT_AGE_SECONDS
from router.replicas.fleet import PinnedReplicaUnavailable
from router.router import Router, RouterStatus
from router.simulate import Scenario, Simulation, heavy_tailed
from tests.serve.stand_in import (
    BAD,
    HELD,
    MAX_CALLS,
    SECONDS_PER_PATCH,
    item,
    right,
    routed,
)
from tests.waiting import within

LIMIT = 60_000


@pytest.fixture(scope="module")
def router(encoder: DeploymentHandle) -> Iterator[DeploymentHandle]:
    options = RouterOptions(replicas=2, max_outstanding_patches=LIMIT)
    yield serve.run(routed(encoder, options), name="two-routers", route_prefix=None)
    serve.delete("two-routers")


@pytest.fixture(autouse=True)
def _nothing_is_left(router: DeploymentHandle, encoder: DeploymentHandle) -> Iterator[None]:
    ask(encoder, "hold")
    yield
    ask(encoder, "let_go")
    within(30, lambda: all(empty(status) for status in ask(router, "status")))


def test_answers_keep_the_order_of_their_items(router: DeploymentHandle) -> None:
    requests = [
        [item(100 * request + number, 400 - 40 * number) for number in range(9)]
        for request in range(10)
    ]
    calls = [router.encode.remote(media, "float32", 10.0) for media in requests]
    for media, call in zip(requests, calls, strict=True):
        assert right(media, call.result(timeout_s=10))


def test_patches_are_balanced_not_items(router: DeploymentHandle) -> None:
    forget(router)
    patches = [8000, 2000, 2000, 2000, 2000, 4000, 4000]
    media = [item(2000 + number, size) for number, size in enumerate(patches)]
    answers = router.encode.remote(media, "bfloat16", 10.0).result(timeout_s=10)
    carried: Counter[str] = Counter()
    for size, answer in zip(patches, answers, strict=True):
        carried[answer.replica] += size
    assert sorted(carried.values()) == [8000, 8000, 8000]


def test_the_simulation_places_as_the_service_does(router: DeploymentHandle) -> None:
    random, cost = Random(7), Cost(0, SECONDS_PER_PATCH, 0)
    for request in range(2):
        forget(router)
        patches = [heavy_tailed(random) for _ in range(9)]
        media = [item(2100 + 10 * request + n, size) for n, size in enumerate(patches)]
        started = time.monotonic()
        answers = router.encode.remote(media, "bfloat16", 30.0).result(timeout_s=30)
        taken = time.monotonic() - started
        simulated = Simulation(
            Scenario(3, 1, [(0.0, patches)], cost), POLICIES["largest_first"], 0
        ).run()
        carried: Counter[str] = Counter()
        for size, answer in zip(patches, answers, strict=True):
            carried[answer.replica] += size
        assert sorted(carried.values()) == sorted(simulated.patches)
        assert taken > simulated.makespan_seconds


def test_a_bad_item_fails_only_itself(router: DeploymentHandle) -> None:
    media = [item(3000, 100), item(0, 100, BAD), item(3001, 100)]
    good, bad, also_good = router.encode.remote(media, "bfloat16", 10.0).result(timeout_s=10)
    assert isinstance(bad, InvalidMedia)
    assert right([media[0], media[2]], [good, also_good])


def test_identical_items_in_flight_are_encoded_once_a_router(
    router: DeploymentHandle, encoder: DeploymentHandle
) -> None:
    media = [item(4000, 10_000, HELD), item(4001, 10_000, HELD), item(4000, 10_000, HELD)]
    calls = [router.encode.remote(media, "bfloat16", 30.0) for _ in range(12)]
    first = 2 * 2  # at most two items in each of two routers
    within(30, lambda: total(router, "encoder_router_coalesced_total") >= 12 * 3 - first)
    ask(encoder, "let_go")
    assert all(right(media, call.result(timeout_s=30)) for call in calls)
    times = Counter(digest for _, log in ask(encoder, "log") for digest in log)
    assert times[media[0].digest] <= 2
    assert times[media[1].digest] <= 2


def test_a_caller_that_goes_leaves_the_others_their_answer(
    router: DeploymentHandle, encoder: DeploymentHandle
) -> None:
    media = [item(5000, 20_000, HELD)]
    calls = [router.encode.remote(media, "bfloat16", 30.0) for _ in range(6)]
    within(30, lambda: carried(router) > 0)
    for call in calls[:3]:
        call.cancel()
    ask(encoder, "let_go")
    assert all(right(media, call.result(timeout_s=30)) for call in calls[3:])


def test_overload_is_refused_with_a_time_to_come_back(
    router: DeploymentHandle, encoder: DeploymentHandle
) -> None:
    media = [item(6000 + number, 50_000, HELD) for number in range(4)]
    calls = [router.encode.remote([one], "bfloat16", 30.0) for one in media]
    within(30, lambda: carried(router) + 50_000 * rejections(router) == 4 * 50_000)
    ask(encoder, "let_go")
    refused = []
    for call in calls:
        try:
            assert isinstance(call.result(timeout_s=30)[0], Embedding)
        except Overloaded as error:
            refused.append(error.cause)  # type: ignore[attr-defined]
    assert len(refused) in {2, 3}, "one at a time in each router"
    assert all(1 <= error.retry_after_seconds <= 30 for error in refused)
    assert rejections(router) == len(refused)


def test_what_never_fits_is_too_large(router: DeploymentHandle) -> None:
    with pytest.raises(TooLarge):
        router.encode.remote([item(6100, LIMIT + 4)], "bfloat16", 10.0).result(timeout_s=10)


def test_late_items_are_answered_with_the_deadline(router: DeploymentHandle) -> None:
    media = [item(7000, 100), item(7001, 50_000, HELD)]
    quick, late = router.encode.remote(media, "bfloat16", 3.0).result(timeout_s=30)
    assert isinstance(quick, Embedding)
    assert isinstance(late, DeadlineExceeded)


def test_work_that_nobody_waits_for_is_given_up(
    router: DeploymentHandle, encoder: DeploymentHandle
) -> None:
    media = [item(8000 + number, 15_000, HELD) for number in range(3)]
    call = router.encode.remote(media, "bfloat16", 30.0)
    within(30, lambda: carried(router) == 45_000)
    call.cancel()
    within(30, lambda: carried(router) == 0)
    within(30, lambda: ask(encoder, "record_routing_stats") == [{"outstanding_patches": 0}] * 3)
    ask(encoder, "let_go")
    done = {digest for _, log in ask(encoder, "log") for digest in log}
    assert not done & {one.digest for one in media}


def test_a_stream_gives_items_as_they_come(
    router: DeploymentHandle, encoder: DeploymentHandle
) -> None:
    media = [item(9000, 30_000, HELD), item(9001, 200), item(9002, 2000)]
    stream = router.options(stream=True).encode_stream.remote(media, "bfloat16", 30.0)
    answers = [next(stream), next(stream)]
    assert {position for position, _ in answers} == {1, 2}
    ask(encoder, "let_go")
    answers += stream
    assert [position for position, _ in answers[2:]] == [0]
    assert right([media[position] for position, _ in answers], [answer for _, answer in answers])


def test_a_stream_does_not_wait_for_all_items_of_a_replica(
    router: DeploymentHandle, encoder: DeploymentHandle
) -> None:
    media = [item(9100 + number, 6000) for number in range(8)] + [item(9108, 6000, HELD)]
    stream = router.options(stream=True).encode_stream.remote(media, "bfloat16", 30.0)
    before = [next(stream)[0] for _ in range(8)]
    assert sorted(before) == list(range(8)), "three on each replica, one at a time"
    ask(encoder, "let_go")
    assert [position for position, _ in stream] == [8]


def test_status_names_the_replicas_and_metrics_follow_them(router: DeploymentHandle) -> None:
    router.encode.remote([item(9500, 100)], "bfloat16", 10.0).result(timeout_s=10)
    for status in ask(router, "status"):
        assert [r.replica for r in status.replicas] == [
            r.metadata["replica"] for r in status.replicas
        ]
        assert len(status.replicas) == 3
    assert total(router, "encoder_router_patches_total") >= 100
    assert total(router, "encoder_router_outstanding_patches") == 0


def test_a_pinned_call_reaches_its_replica_or_fails_at_once(encoder: DeploymentHandle) -> None:
    names = [name for name, _ in ask(encoder, "log")] * 5
    calls = [encoder.options(session_id=f"pin:{name}").log.remote() for name in names]
    assert [call.result(timeout_s=20)[0] for call in calls] == names
    with pytest.raises(PinnedReplicaUnavailable, match="nobody is gone"):
        encoder.options(session_id="pin:nobody").log.remote().result(timeout_s=20)


def test_a_full_replica_refuses_a_pinned_call_at_once(
    router: DeploymentHandle, encoder: DeploymentHandle
) -> None:
    [name, *_] = [name for name, _ in ask(encoder, "log")]
    pinned = encoder.options(session_id=f"pin:{name}")
    calls = [
        pinned.encode.remote([item(9600 + number, 4, HELD)], "bfloat16", 60.0)
        for number in range(MAX_CALLS)
    ]
    within(30, lambda: reported(ask(router, "status")[0]) == 4 * MAX_CALLS)
    for number in range(3):
        one_more = pinned.encode.remote([item(9900 + number, 4)], "bfloat16", 60.0)
        with pytest.raises(PinnedReplicaUnavailable, match="does not take"):
            one_more.result(timeout_s=20)
    for call in calls:
        call.cancel()
    within(30, lambda: reported(ask(router, "status")[0]) == 0)
    assert pinned.log.remote().result(timeout_s=20)[0] == name


def ask(handle: DeploymentHandle, method: str) -> list[Any]:
    """The answers of all replicas."""
    return list(handle.broadcast(method).results(timeout_s=10))


def forget(router: DeploymentHandle) -> None:
    """Waits until every router believes its replicas to be idle."""
    time.sleep(REPORT_AGE_SECONDS)  # reports in the last answers no longer count
    within(30, lambda: not any(reported(status) for status in ask(router, "status")))


def empty(status: RouterStatus) -> bool:
    return not status.outstanding_patches and not any(r.own_patches for r in status.replicas)


def carried(router: DeploymentHandle) -> int:
    """Outstanding patches of all routers."""
    return sum(r.own_patches for status in ask(router, "status") for r in status.replicas)


def reported(status: RouterStatus) -> int:
    """Outstanding patches as reported by the replicas."""
    return sum(replica.reported_patches for replica in status.replicas)


def rejections(router: DeploymentHandle) -> float:
    return total(router, "encoder_router_rejections_total")


def total(router: DeploymentHandle, series: str) -> float:
    """The sum of a series over routers and labels."""
    return sum(
        sample.value
        for page in ask(router, "metrics")
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == series
    )


@pytest.mark.extended
def test_one_small_request_beside_50_streams_of_64_items(encoder: DeploymentHandle) -> None:
    alone = {"num_cpus": 0.1, "runtime_env": {"env_vars": ONE_LOOP}}
    deployment = serve.deployment(Crowd, name="Crowd", ray_actor_options=alone)
    crowd = serve.run(deployment.bind(encoder), name="crowd", route_prefix=None)
    waits, per_second = crowd.measure.remote(streams=50, items=64, seconds=8).result(timeout_s=60)
    serve.delete("crowd")
    p99 = sorted(waits)[int(len(waits) * 0.99)]
    print(f"{len(waits)} small requests: p99 {p99:.3f} s, beside {per_second:.0f} items/s")
    assert p99 < 1, "0.4 where it was 3 to 6 when all of a stream was sent at once"


class Crowd:
    """A router under many streams and, one after another, requests with a single item."""

    def __init__(self, encoder: DeploymentHandle) -> None:
        self.router = Router([encoder], RouterOptions(max_queue_seconds=60))
        self.numbers = count(10**6)

    async def measure(self, streams: int, items: int, seconds: float) -> tuple[list[float], float]:
        """Returns the seconds of each small request, and the items of the streams per second."""
        waits, done = list[float](), 0

        async def stream() -> None:
            nonlocal done
            while True:
                media = [item(next(self.numbers), 4) for _ in range(items)]
                async for _ in self.router.encode_stream(media):
                    done += 1

        async def small() -> None:
            while True:
                started = time.monotonic()
                await self.router.encode([item(next(self.numbers), 64)])
                waits.append(time.monotonic() - started)

        tasks = [asyncio.create_task(one) for one in [small(), *(stream() for _ in range(streams))]]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return waits, done / seconds
