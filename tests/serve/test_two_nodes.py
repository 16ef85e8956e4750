"""Encoders on another node: calls go over TCP, large rows from object store to object store."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


@pytest.mark.extended
def test_small_and_large_rows_come_from_another_node() -> None:
    command = [sys.executable, "-m", "tests.serve.two_nodes"]
    # A short path: those of sockets have a limit.
    with tempfile.TemporaryDirectory(prefix="es", ignore_cleanup_errors=True) as home:
        os.mkdir(f"{home}/ray")
        found = subprocess.run(
            command,
            env={**os.environ, **RAY, "RAY_TMPDIR": home},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert "both nodes did their part" in found.stdout, found.stderr[-4000:]
    assert found.returncode == 0
