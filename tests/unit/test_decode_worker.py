"""Real processes that decode: what they make, and that none outlives its actor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from time import monotonic, sleep

import numpy as np
import pytest

from actors.errors import ServiceError
from actors.media.decode_processes import DecodeProcesses
from actors.media.image import prepare
from actors.media.patchify import Patchifier
from actors.options import ModelOptions, PreprocessOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media
from encoder_service.bench.engine.pipeline import Wanted, media
from tests.images import PHOTOGRAPHS, encoded, jpeg, opened, photograph

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy")


def opened_processes(count: int) -> DecodeProcesses:
    options = PreprocessOptions(processes=count)
    processes = DecodeProcesses(MODEL, options, 60, EncoderMetrics())
    processes.wait_until_started()
    return processes


def decoded(processes: DecodeProcesses, sent: Sequence[Media]) -> list[Item | Exception]:
    found: dict[int, Item | Exception] = {}
    ended = threading.Semaphore(0)

    def keep(index: int, made: Item | Exception) -> None:
        found[index] = made
        ended.release()

    for index, one in enumerate(sent):
        processes.begin(Wanted(one), lambda began, made, index=index: keep(index, made))  # type: ignore[misc]
    assert all(ended.acquire(timeout=60) for _ in sent)
    return [found[index] for index in range(len(sent))]


def files(patchifier: Patchifier) -> list[Media]:
    """Photographs, a PNG with transparency, a file that is turned, one that is cut short."""
    images = [*map(photograph, PHOTOGRAPHS), jpeg(64, 64)]
    images.append(encoded(opened().convert("RGBA"), "PNG"))
    images.append(encoded(opened().resize((90, 60)), "JPEG", orientation=6))
    return [media(patchifier, image) for image in images]


def check(processes: DecodeProcesses) -> None:
    sent = files(processes.patchifier)
    bad = Media("image", sent[0].data[:-500], sent[0].plan, digest="")
    *made, refused = decoded(processes, [*sent, bad])
    for one, item in zip(sent, made, strict=True):
        assert isinstance(item, Item)
        assert np.array_equal(item.patches, prepare(processes.patchifier, one).patches)  # type: ignore[arg-type]
    with pytest.raises(ServiceError) as expected:
        prepare(processes.patchifier, bad)
    assert (type(refused), str(refused)) == (expected.type, str(expected.value))


def test_a_process_makes_what_threads_make_and_ends_with_its_owner() -> None:
    processes = opened_processes(1)
    check(processes)
    (one,) = processes._processes
    processes.close()
    assert one.process.returncode == -signal.SIGKILL


@pytest.mark.extended
def test_killed_processes_come_again() -> None:
    processes = opened_processes(2)
    for each in list(processes._processes):
        os.kill(each.process.pid, signal.SIGKILL)
    check(processes)
    restarts = processes.series.registry.get_sample_value("encoder_decode_restarts_total")
    assert restarts == 2
    processes.close()


OWNER = """
from tests.unit.test_decode_worker import opened_processes
processes = opened_processes(2)
print(*(each.process.pid for each in processes._processes), flush=True)
input()
"""


@pytest.mark.extended
def test_no_process_outlives_an_owner_that_is_killed() -> None:
    command = [sys.executable, "-c", OWNER]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as owner:
        assert owner.stdout
        running = [int(word) for word in owner.stdout.readline().split()]
        assert len(running) == 2
        assert all(map(alive, running))
        os.kill(running[0], signal.SIGSTOP)  # it hears as little as one that hangs in a file
        owner.kill()
    end = monotonic() + 30
    while any(map(alive, running)):
        assert monotonic() < end
        sleep(0.05)


def alive(process: int) -> bool:
    """Whether it runs: one that ended may wait for whoever has become its parent."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
