"""Settings for all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

# Ray and torch read these when they are imported, which some unit tests do before those of
# tests/serve.
os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN=token_hex(32),
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DEDUP_LOGS="0",
    RAY_worker_niceness="0",  # the default, 15, starves replicas beside the other pytest workers
    RAY_raylet_start_wait_time_s="100",
    TORCHINDUCTOR_VEC_ISA_OK="1",  # else torch.compile first builds a program per instruction set
)

import pytest
from hypothesis import settings

from tests.apart import apart

# No deadline per example, because a busy machine is no failure. pyproject.toml limits whole tests.
settings.register_profile("project", deadline=None)
settings.load_profile("project")


RAY = "tests/serve/"
"""The folder of the tests that use the Ray cluster."""
NODES = "tests/serve/test_several_nodes.py"
"""It starts clusters of its own."""
LONGEST = "tests/unit/models/test_chips.py"
"""The other module that takes minutes. Begun last, it would leave the other workers idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs first what takes longest and cannot be divided: the tests of RAY, then LONGEST."""
    first = (RAY, LONGEST)
    items.sort(key=lambda item: [not item.nodeid.startswith(one) for one in first])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs tests that are coroutines, each in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module", autouse=True)
def freeze_heap() -> Iterator[None]:
    """Keeps garbage collections from scanning what was imported, collected and left over before
    this module, which takes a second each time."""
    gc.freeze()
    yield
    gc.collect()  # here, so that what this module leaves open fails this module


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that use the Ray cluster, and another runs NODES if its clusters
    have networks of their own. When they are done, both help with the rest."""
    config.option.loadscopereorder = False
    alone = [NODES] if apart() else []
    from xdist.scheduler import LoadScopeScheduling  # not in the environments of other engines

    class RayTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "ray" if module.startswith(RAY) and module not in alone else module

    return RayTogether(config, log)
