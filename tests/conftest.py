"""Settings for all tests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

# No deadline per example: a busy machine is no failure. Whole tests have one (pyproject.toml).
settings.register_profile("project", deadline=None)
settings.load_profile("project")


RAY = "tests/serve/"
"""The folder of the tests that use the Ray cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those come first, because they are the longest piece that is not divided."""
    items.sort(key=lambda item: not item.nodeid.startswith(RAY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that use the Ray cluster, then it helps the others."""
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadScopeScheduling  # not in the environments of other engines

    class RayTogether(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(RAY) else nodeid.partition("::")[0]

    return RayTogether(config, log)
