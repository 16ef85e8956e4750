"""Replicas that decode in processes give the same rows, and lose none if a process is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from encoder_service import Client
from tests.images import jpeg
from tests.processes import ours
from tests.serve.conftest import Cluster
from tests.serve.tiny import ARGS, TOKEN, running

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]  # starts two services


def processes() -> list[int]:
    """Ids of this cluster's decoder processes: another worker's tests may have their own."""
    found = []
    for process in ours():
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # it has exited meanwhile
        if b"actors.media.decode_worker" in words:
            found.append(process)
    return found


def test_rows_are_those_of_threads_and_a_killed_process_costs_nothing(cluster: Cluster) -> None:
    files = [jpeg(84, 60), jpeg(300, 200), jpeg(128, 256)]
    rows = []
    for options in ({"threads": 2}, {"processes": 2}):
        sections = {"encoder": ARGS["encoder"] | {"replicas": 1}, "preprocess": options}
        with running("processes", **sections), Client(cluster.http, token=TOKEN) as client:
            found = [*client.encode(files), *client.encode([jpeg(100, 50)])]
            assert bool(processes()) == ("processes" in options)
            for each in processes():
                os.kill(each, signal.SIGKILL)
            found += client.encode(files)
            rows.append([each.torch() for each in found])
    assert all(torch.equal(*pair) for pair in zip(*rows, strict=True))
