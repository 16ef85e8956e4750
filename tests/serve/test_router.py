"""Two routers before three stand-in encoders, on a real cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.errors import DeadlineExceeded, InvalidMedia, Overloaded, TooLarge
from actors.types import Embedding
from router.options import RouterOptions
from router.registry import PinnedReplicaFull, PinnedReplicaUnavailable
from router.router import RouterStatus
from tests.serve.conftest import Cluster
from tests.serve.stand_in import (
    BAD,
    MAX_CALLS,
    SECONDS_PER_PATCH,
    application,
    item,
    right,
)

LIMIT = 60_000


@pytest.fixture(scope="module")
def router(cluster: Cluster) -> Iterator[DeploymentHandle]:
    options = RouterOptions(replicas=2, max_outstanding_patches=LIMIT)
    yield serve.run(application(options), name="routing", route_prefix=None)
    serve.delete("routing")


@pytest.fixture(autouse=True)
def _leaves_nothing(router: DeploymentHandle) -> Iterator[None]:
    yield
    within(5, lambda: all(empty(status) for status in ask(router, "status")))


def test_answers_keep_the_order_of_their_items(router: DeploymentHandle) -> None:
    requests = [
        [item(100 * request + number, 400 - 40 * number) for number in range(9)]
        for request in range(10)
    ]
    calls = [router.encode.remote(media, "float32", 10.0) for media in requests]
    for media, call in zip(requests, calls, strict=True):
        assert right(media, call.result(timeout_s=10))


def test_patches_are_balanced_not_items(router: DeploymentHandle) -> None:
    patches = [8000, 2000, 2000, 2000, 2000, 4000, 4000]
    media = [item(2000 + number, size) for number, size in enumerate(patches)]
    answers = router.encode.remote(media, "bfloat16", 10.0).result(timeout_s=10)
    carried: Counter[str] = Counter()
    for size, answer in zip(patches, answers, strict=True):
        carried[answer.replica] += size
    assert sorted(carried.values()) == [8000, 8000, 8000]


def test_a_bad_item_fails_only_itself(router: DeploymentHandle) -> None:
    media = [item(3000, 100), item(0, 100, BAD), item(3001, 100)]
    good, bad, also_good = router.encode.remote(media, "bfloat16", 10.0).result(timeout_s=10)
    assert isinstance(bad, InvalidMedia)
    assert right([media[0], media[2]], [good, also_good])


def test_identical_items_in_flight_are_encoded_once_a_router(router: DeploymentHandle) -> None:
    media = [item(4000, 10_000), item(4001, 10_000), item(4000, 10_000)]
    calls = [router.encode.remote(media, "bfloat16", 10.0) for _ in range(12)]
    assert all(right(media, call.result(timeout_s=10)) for call in calls)
    encoder = serve.get_deployment_handle("Encoder", "routing")
    times = Counter(digest for _, log in ask(encoder, "log") for digest in log)
    assert times[media[0].digest] <= 2
    assert times[media[1].digest] <= 2
    assert total(router, "encoder_router_coalesced_total") >= 12 * 3 - 2 * 2


def test_a_caller_that_goes_leaves_the_others_their_answer(router: DeploymentHandle) -> None:
    media = [item(5000, 20_000)]
    calls = [router.encode.remote(media, "bfloat16", 10.0) for _ in range(6)]
    within(5, lambda: carried(router) > 0)
    for call in calls[:3]:
        call.cancel()
    assert all(right(media, call.result(timeout_s=10)) for call in calls[3:])


def test_overload_is_refused_with_a_time_to_come_back(router: DeploymentHandle) -> None:
    calls = [router.encode.remote([item(6000 + n, 50_000)], "bfloat16", 10.0) for n in range(4)]
    refused = []
    for call in calls:
        try:
            assert isinstance(call.result(timeout_s=10)[0], Embedding)
        except Overloaded as error:
            refused.append(error.cause)  # type: ignore[attr-defined]
    assert len(refused) in {2, 3}, "one at a time in each router"
    assert all(1 <= error.retry_after_seconds <= 30 for error in refused)
    assert total(router, "encoder_router_rejections_total") == len(refused)


def test_what_never_fits_is_too_large(router: DeploymentHandle) -> None:
    with pytest.raises(TooLarge):
        router.encode.remote([item(6100, LIMIT + 4)], "bfloat16", 10.0).result(timeout_s=10)


def test_late_items_are_answered_with_the_deadline(router: DeploymentHandle) -> None:
    media = [item(7000, 100), item(7001, 50_000)]
    started = time.monotonic()
    quick, late = router.encode.remote(media, "bfloat16", 0.2).result(timeout_s=10)
    assert time.monotonic() - started < 50_000 * SECONDS_PER_PATCH
    assert isinstance(quick, Embedding)
    assert isinstance(late, DeadlineExceeded)


def test_work_that_nobody_waits_for_is_given_up(router: DeploymentHandle) -> None:
    media = [item(8000 + number, 15_000) for number in range(3)]
    call = router.encode.remote(media, "bfloat16", 30.0)
    within(5, lambda: carried(router) == 45_000)
    call.cancel()
    within(2, lambda: carried(router) == 0)
    encoder = serve.get_deployment_handle("Encoder", "routing")
    within(2, lambda: ask(encoder, "record_routing_stats") == [{"outstanding_patches": 0}] * 3)
    done = {digest for _, log in ask(encoder, "log") for digest in log}
    assert not done & {one.digest for one in media}


def test_a_stream_gives_items_as_they_come(router: DeploymentHandle) -> None:
    media = [item(9000, 30_000), item(9001, 200), item(9002, 2000)]
    stream = router.options(stream=True).encode_stream.remote(media, "bfloat16", 10.0)
    answers = list(stream)
    assert [position for position, _ in answers] == [1, 2, 0]
    assert right([media[position] for position, _ in answers], [answer for _, answer in answers])


def test_a_stream_does_not_wait_for_all_items_of_a_replica(router: DeploymentHandle) -> None:
    media = [item(9100 + number, 6000) for number in range(9)]
    stream = router.options(stream=True).encode_stream.remote(media, "bfloat16", 10.0)
    came = [time.monotonic() for _ in stream]
    assert len(came) == 9
    assert came[-1] - came[0] > 6000 * SECONDS_PER_PATCH, "three on each replica, one at a time"


def test_status_names_the_replicas_and_metrics_follow_them(router: DeploymentHandle) -> None:
    router.encode.remote([item(9500, 100)], "bfloat16", 10.0).result(timeout_s=10)
    for status in ask(router, "status"):
        assert status.ready
        assert [r.replica for r in status.replicas] == [
            r.metadata["replica"] for r in status.replicas
        ]
        assert len(status.replicas) == 3
    assert total(router, "encoder_router_patches_total") >= 100
    assert total(router, "encoder_router_outstanding_patches") == 0


def test_a_pinned_call_reaches_its_replica_or_fails_at_once(router: DeploymentHandle) -> None:
    encoder = serve.get_deployment_handle("Encoder", "routing")
    names = [name for name, _ in ask(encoder, "log")] * 5
    calls = [encoder.options(session_id=f"pin:{name}").log.remote() for name in names]
    assert [call.result(timeout_s=5)[0] for call in calls] == names
    with pytest.raises(PinnedReplicaUnavailable, match="nobody is gone"):
        encoder.options(session_id="pin:nobody").log.remote().result(timeout_s=5)


def test_a_full_replica_is_not_taken_for_a_lost_one(router: DeploymentHandle) -> None:
    encoder = serve.get_deployment_handle("Encoder", "routing")
    [name, *_] = [name for name, _ in ask(encoder, "log")]
    pinned = encoder.options(session_id=f"pin:{name}")
    patches = [400_000] + [4] * (MAX_CALLS + 3)  # the first holds all others for 4 s
    calls = [
        pinned.encode.remote([item(9600 + number, size)], "bfloat16", 10.0)
        for number, size in enumerate(patches)
    ]
    refused = 0
    for call in calls:
        try:
            call.result(timeout_s=10)
        except PinnedReplicaFull:
            refused += 1
    assert refused == len(calls) - MAX_CALLS
    assert pinned.log.remote().result(timeout_s=5)[0] == name


def ask(handle: DeploymentHandle, method: str) -> list[Any]:
    """The answer of every replica."""
    return list(handle.broadcast(method).results(timeout_s=10))


def empty(status: RouterStatus) -> bool:
    return not status.outstanding_patches and not any(r.own_patches for r in status.replicas)


def carried(router: DeploymentHandle) -> int:
    """Patches that all routers have on replicas."""
    return sum(r.own_patches for status in ask(router, "status") for r in status.replicas)


def total(router: DeploymentHandle, series: str) -> float:
    """The sum of a series over routers and labels."""
    return sum(
        sample.value
        for page in ask(router, "metrics")
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == series
    )


def within(seconds: float, true: Callable[[], bool]) -> None:
    """Fails unless it becomes true in time."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)
