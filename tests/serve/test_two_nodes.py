"""Encoders on another node: calls go over TCP, large rows from object store to object store."""

from __future__ import annotations

import subprocess
import sys


def test_small_and_large_rows_come_from_another_node() -> None:
    command = [sys.executable, "-m", "tests.serve.two_nodes"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert "both nodes did their part" in found.stdout, found.stderr[-4000:]
    assert found.returncode == 0
