"""Clusters of several nodes, each test in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from secrets import token_hex
from shutil import which

import pytest

from tests.apart import LOOPBACK, apart

RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "100",
}
PROGRAMS = [
    "two_nodes",
    "between_nodes",
    "three_nodes",
    "cut_off",
    "head_restart",
    "pools",
    "cache_between_nodes",
]


@pytest.mark.extended
@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", PROGRAMS)
def test_all_nodes_do_their_part(program: str) -> None:
    if program == "cut_off" and not apart():
        pytest.skip("it makes networks, which this user or this container may not")
    if program == "head_restart" and not which("redis-server"):
        pytest.skip("it needs redis-server, as in Debian's package redis-server")
    # In a network of its own, if it may make one: another worker runs Ray, too.
    command: list[str | Path] = [LOOPBACK, sys.executable, "-m", f"tests.serve.{program}"]
    # A short path, because socket paths have a limit.
    with tempfile.TemporaryDirectory(prefix="es", ignore_cleanup_errors=True) as home:
        os.mkdir(f"{home}/ray")
        found = subprocess.run(
            command,
            env={**os.environ, **RAY, "RAY_TMPDIR": home},
            capture_output=True,
            text=True,
            timeout=890,
            check=False,
        )
    print(found.stdout)
    assert "all nodes did their part" in found.stdout, found.stdout + found.stderr[-4000:]
    assert found.returncode == 0
