"""A replica that hangs or fails costs the metrics page only its own series."""

from __future__ import annotations

import asyncio
import time

import pytest
from ray.serve.handle import DeploymentHandle

from router.replicas.pinned import ASK_SECONDS, ask_all


def test_those_that_answer_are_heard(encoder: DeploymentHandle) -> None:
    replicas = [one for one, _ in encoder.broadcast("log").results(timeout_s=10)]
    for replica, mood in zip(replicas, ("hangs", "fails", "answers"), strict=True):
        encoder.options(session_id=f"pin:{replica}").feel.remote(mood).result(timeout_s=5)
    for _ in range(3):  # a busy machine may delay one of them, but not all
        started = time.monotonic()
        found = asyncio.run(ask_all(encoder, "scrape"))
        assert sorted(found, key=str) == [(replicas[2], "x 1\n"), None, None]
        if time.monotonic() - started < ASK_SECONDS:
            break
    else:
        pytest.fail("a replica that hangs holds the page up")
