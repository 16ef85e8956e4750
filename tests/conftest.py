"""Settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# No deadline per example: a busy machine is no failure. Whole tests have one (pyproject.toml).
settings.register_profile("project", deadline=None)
settings.load_profile("project")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that use the one Ray cluster run in one worker of pytest-xdist."""
    for item in items:
        if "serve" in item.path.parts:
            item.add_marker(pytest.mark.xdist_group("ray"))
