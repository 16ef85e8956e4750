"""Encoders die, fail or are replaced under load: no request fails or gets another's answer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.types import Media
from tests.serve.stand_in import encoders, item, right, status
from tests.serve.stand_ins.conftest import APP
from tests.waiting import within

CALLERS = 4


@pytest.fixture(autouse=True)
def _three_encoders(router: DeploymentHandle) -> None:
    within(60, lambda: len(status(router).replicas) == 3)


def test_sigkill(router: DeploymentHandle) -> None:
    with load(router):
        victim = status(router).replicas[0]
        os.kill(victim.metadata["process"], signal.SIGKILL)
        within(60, lambda: replaced(router, victim.replica))


def test_ray_kill(router: DeploymentHandle) -> None:
    with load(router):
        victim = status(router).replicas[0].replica
        ray.kill(ray.get_actor(f"SERVE_REPLICA::{APP}#Encoder#{victim}", namespace="serve"))
        within(60, lambda: replaced(router, victim))


def test_failing_health_check(router: DeploymentHandle, encoder: DeploymentHandle) -> None:
    with load(router):
        victim = status(router).replicas[0].replica
        encoder.options(session_id=f"pin:{victim}").sicken.remote().result(timeout_s=5)
        within(60, lambda: replaced(router, victim))


def test_a_process_that_hangs(router: DeploymentHandle) -> None:
    with load(router) as outcomes:
        victim = status(router).replicas[0].metadata["process"]
        os.kill(victim, signal.SIGSTOP)
        try:  # each caller reaches it once or twice at most, before it is known to be silent
            after = len(outcomes) + 10 * CALLERS
            within(60, lambda: len(outcomes) > after)
        finally:
            os.kill(victim, signal.SIGCONT)


def test_rolling_update(router: DeploymentHandle) -> None:
    with load(router):
        serve.run(encoders(3, version=2), name=APP, route_prefix=None)
        versions = [replica.metadata["version"] for replica in status(router).replicas]
    assert versions == [2, 2, 2]


@contextmanager
def load(router: DeploymentHandle) -> Iterator[list[str]]:
    """Callers send without pause before, during and after the block. All must succeed.

    Yields the outcomes of the requests so far.
    """
    stop = threading.Event()
    outcomes: list[str] = []
    callers = [
        threading.Thread(target=call, args=(router, Random(seed), stop, outcomes))
        for seed in range(CALLERS)
    ]
    for caller in callers:
        caller.start()
    try:
        within(30, lambda: len(outcomes) > 2 * CALLERS)
        yield outcomes
        after = len(outcomes) + 2 * CALLERS
        within(30, lambda: len(outcomes) > after)
    finally:
        stop.set()
        for caller in callers:
            caller.join(timeout=30)
    assert set(outcomes) == {"right"}
    within(30, lambda: status(router).outstanding_patches == 0)


def call(
    router: DeploymentHandle, random: Random, stop: threading.Event, outcomes: list[str]
) -> None:
    """One caller, which records the outcome of each of its requests."""
    while not stop.is_set():
        media: list[Media] = [
            item(random.randrange(10**9), random.choice([100, 400, 1000, 4000]))
            for _ in range(random.randint(1, 8))
        ]
        try:
            answers = router.encode.remote(media, "bfloat16", 30.0).result(timeout_s=30)
            outcomes.append("right" if right(media, answers) else repr(answers)[:500])
        except Exception as error:
            outcomes.append(repr(error)[:500])


def replaced(router: DeploymentHandle, victim: str) -> bool:
    names = [replica.replica for replica in status(router).replicas]
    return len(names) == 3 and victim not in names
