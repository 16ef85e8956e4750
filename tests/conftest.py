"""Settings for all tests."""

from __future__ import annotations

import gc
import os
from secrets import token_hex
from typing import Any

# Ray reads these when it is imported, which some unit tests do before those of tests/serve.
os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=token_hex(32),
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DEDUP_LOGS="0",
    RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="0.5",
    RAY_worker_niceness="0",  # the default, 15, starves replicas beside the other pytest worker
    RAY_raylet_start_wait_time_s="100",
)

import pytest
from hypothesis import settings

# No deadline per example, because a busy machine is no failure. pyproject.toml limits whole tests.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


RAY = "tests/serve/"
"""The folder of the tests that use the Ray cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests of RAY first, because they are the longest part that cannot be divided."""
    items.sort(key=lambda item: not item.nodeid.startswith(RAY))


def pytest_collection_finish() -> None:
    """Keeps later garbage collections from scanning modules and tests, which takes a second each
    time."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that use the Ray cluster, then helps the others."""
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadScopeScheduling  # not in the environments of other engines

    class RayTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(RAY) else nodeid.partition("::")[0]

    return RayTogether(config, log)
