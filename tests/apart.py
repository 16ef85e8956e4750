"""Whether tests/loopback can give a command a network and processes of its own here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

LOOPBACK = Path(__file__).with_name("loopback")


def apart() -> bool:
    """False: not root, or in a container that may not make namespaces."""
    inside = subprocess.run([LOOPBACK, "readlink", "/proc/self/ns/pid"], capture_output=True)
    return inside.stdout.decode().strip() != os.readlink("/proc/self/ns/pid")
