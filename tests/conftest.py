"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# No deadline per example: a busy machine is no failure. Whole tests have one (pyproject.toml).
settings.register_profile("project", deadline=None)
settings.load_profile("project")
