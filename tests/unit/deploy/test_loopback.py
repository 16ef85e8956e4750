"""tests/loopback: whoever ends it ends all that it started."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.apart import LOOPBACK, apart

BOTH = ["sh", "-c", "sleep 600 & echo begun; wait"]


def test_the_status_and_the_input_are_the_command_s() -> None:
    ended = subprocess.run([LOOPBACK, "sh", "-c", "cat; exit 7"], input=b"x", capture_output=True)
    assert (ended.returncode, ended.stdout) == (7, b"x")


@pytest.mark.skipif(not apart(), reason="not root, or in a container that is not allowed to")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_it(number: signal.Signals) -> None:
    begun = subprocess.Popen([LOOPBACK, *BOTH], stdout=subprocess.PIPE)
    assert begun.stdout is not None
    assert begun.stdout.readline() == b"begun\n"
    begun.send_signal(number)
    left, _ = begun.communicate(timeout=30)  # its output ends with the last that may write to it
    assert left == b""
    # Of the place, of the shell, or of its wait, which the signal ends as well.
    assert begun.returncode in (-number, 128 + signal.SIGKILL, 128 + number)
