"""One replica that hangs or fails costs the metrics page its own series only."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from ray import serve

from router.replicas.pinned import ASK_SECONDS, ask_all
from tests.serve.conftest import Cluster


class Moody:
    """The first replica hangs, the second fails, the third answers."""

    def __init__(self, folder: Path) -> None:
        self.mood = next(i for i in range(3) if taken(folder / str(i)))

    async def scrape(self) -> tuple[str, str]:
        if self.mood == 0:
            await asyncio.sleep(60)
        if self.mood == 1:
            raise ValueError("no metrics today")
        return "third", "x 1\n"


def taken(path: Path) -> bool:
    """Whether this process is the first to claim the file."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def test_those_that_answer_are_heard(cluster: Cluster, tmp_path: Path) -> None:
    few = {"num_cpus": 0.1}
    moody = serve.deployment(
        Moody, num_replicas=3, ray_actor_options=few, graceful_shutdown_timeout_s=0.1
    )
    handle = serve.run(moody.bind(tmp_path), name="moody", route_prefix="/moody")
    try:
        for _ in range(3):  # a busy machine may hold one of them up, not all
            started = time.monotonic()
            found = asyncio.run(ask_all(handle, "scrape"))
            assert sorted(found, key=str) == [("third", "x 1\n"), None, None]
            if time.monotonic() - started < ASK_SECONDS:
                break
        else:
            pytest.fail("a replica that hangs holds the page up")
    finally:
        serve.delete("moody")
    # A deployment without replicas is missing too, and does not break the page.
    assert asyncio.run(ask_all(handle, "scrape")) == [None]
