"""Real processes that decode: what they make, and that none outlives its actor."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from actors.errors import ServiceError
from actors.media.decoder import Decoder
from actors.media.image import prepare
from actors.media.patchify import Patchifier
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Media
from encoder_service.bench.decoding import media
from tests.images import PHOTOGRAPHS, encoded, jpeg, opened, photograph
from tests.unit.decode_rig import open_decoder
from tests.waiting import until


def children() -> list[int]:
    """Of this process: those that decode."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rsplit(") ", 1)[1].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        if parent == os.getpid() and b"actors.media.decode_worker" in words:
            found.append(int(folder.name))
    return found


def files(patchifier: Patchifier) -> list[Media]:
    """Photographs, a PNG with transparency, a file that is turned, one that is cut short."""
    images = [*map(photograph, PHOTOGRAPHS), jpeg(64, 64)]
    images.append(encoded(opened().convert("RGBA"), "PNG"))
    images.append(encoded(opened().resize((90, 60)), "JPEG", orientation=6))
    return [media(patchifier, image) for image in images]


def check(decoder: Decoder) -> None:
    sent = files(decoder.patchifier)
    bad = Media("image", sent[0].data[:-500], sent[0].plan, digest="")
    *made, refused = [decoder.submit(one) for one in [*sent, bad]]
    for one, item in zip(sent, made, strict=True):
        assert np.array_equal(item.result(60).patches, prepare(decoder.patchifier, one).patches)
    with pytest.raises(ServiceError) as expected:
        prepare(decoder.patchifier, bad)
    error = refused.exception(60)
    assert (type(error), str(error)) == (expected.type, str(expected.value))


def test_a_process_makes_what_threads_make_has_its_own_files_and_ends_with_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        decoder = open_decoder(processes=1)
    (one,) = children()
    names = [os.readlink(file) for file in Path(f"/proc/{one}/fd").iterdir()]
    sockets = [name for name in names if name.startswith("socket:")]
    assert len(sockets) == 1, names
    check(decoder)
    assert children() == [one]
    decoder.close()
    assert not alive(one)


@pytest.mark.extended
def test_killed_processes_come_again() -> None:
    series = EncoderMetrics()
    decoder = open_decoder(series=series, processes=2)
    for each in children():
        os.kill(each, signal.SIGKILL)
    check(decoder)
    end = monotonic() + 30
    while series.registry.get_sample_value("encoder_decode_restarts_total") != 2:
        decoder.submit(files(decoder.patchifier)[0]).result(60)
        assert monotonic() < end
    decoder.close()


OWNER = """
from tests.unit.decode_rig import open_decoder
from tests.unit.media.test_decode_worker import children
decoder = open_decoder(processes=2)
print(*children(), flush=True)
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
    until(lambda: not any(map(alive, running)), 30)


def alive(process: int) -> bool:
    """Whether a process runs. One that has exited may still be a zombie of its new parent."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
