"""Threads in the place of processes that decode: they end, hang and wait when told to."""

from __future__ import annotations

import mmap
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from actors.families import registry
from actors.media.decode_messages import MOST_BYTES, Order, media_of, packed, unpacked
from actors.media.decode_process import DecodeProcess
from actors.media.decode_processes import DecodeProcesses
from actors.media.decode_worker import work
from actors.media.image import prepare
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import ModelOptions, PreprocessOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media, Size
from tests.images import jpeg

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
ENDS, HANGS = b"the process ends", b"the process hangs"
"""Files that do it."""


class StandIn:
    """A thread that decodes as a process would, with its own end of the socket."""

    def __init__(
        self, patchifier: Patchifier, memory: int, gate: threading.Event, greeting: str
    ) -> None:
        self.ours, self.its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.patchifier, self.gate, self.greeting = patchifier, gate, greeting
        self.memory = memoryview(mmap.mmap(memory, 0))
        self.seen: list[int] = []
        """Items of each message."""
        self.killed = threading.Event()
        self.dying = False
        """It ends before it begins what it is sent."""
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        with self.its:
            if not self.greeting:
                return
            self.its.send(packed([self.greeting]))
            while message := self.its.recv(MOST_BYTES):
                if self.dying:
                    return
                orders = unpacked(message)
                self.seen.append(len(orders))
                if not all(map(self.one, orders)):
                    return

    def one(self, order: Order) -> bool:
        """False: it ends."""
        _, media = media_of(order, self.memory)
        while not self.gate.wait(0.01):
            if self.killed.is_set():
                return False
        if media.data == HANGS:
            assert self.killed.wait(60)
        if media.data == ENDS or self.killed.is_set():
            return False
        work(self.patchifier, (order,), self.memory, self.its)
        return True

    def kill(self) -> None:
        self.killed.set()
        with suppress(OSError):  # it was, before
            self.ours.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        self.thread.join()


@dataclass
class Waiting:
    media: Media
    given_up: bool = False
    made: Item | Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Rig:
    """Two stand-ins, a gate that holds what they do, and what they are greeted with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patchifier = patchifier_of(registry.read(MODEL))
        self.series = EncoderMetrics()
        self.gate = threading.Event()
        self.gate.set()
        self.greeting = self.patchifier.spec.fingerprint
        self.started: list[StandIn] = []
        self.processes: DecodeProcesses | None = None
        monkeypatch.setattr(DecodeProcess, "start", self.start)

    def start(self, model: int, memory: int) -> DecodeProcess:
        one: Any = StandIn(self.patchifier, memory, self.gate, self.greeting)
        self.started.append(one)
        return DecodeProcess(one, one.ours)

    def open(self, stuck_seconds: float = 60, **options: Any) -> DecodeProcesses:
        chosen = PreprocessOptions(**({"processes": 2} | options))
        self.processes = DecodeProcesses(MODEL, chosen, stuck_seconds, self.series)
        self.processes.wait_until_started()
        return self.processes

    def begin(self, data: bytes | None = None, size: tuple[int, int] = (64, 64)) -> Waiting:
        plan = self.patchifier.spec.sizing.plan(Size(*size))
        one = Waiting(Media("image", data or jpeg(*size), plan, digest=""))
        assert self.processes
        self.processes.begin(one, ended(one))
        return one

    def restarts(self) -> float:
        found = self.series.registry.get_sample_value("encoder_decode_restarts_total")
        assert found is not None
        return found

    def good(self, one: Waiting) -> bool:
        assert one.done.wait(60)
        assert isinstance(one.made, Item), one.made
        made: Any = one.made.patches
        expected: Any = prepare(self.patchifier, one.media).patches
        return np.array_equal(made, expected)


def ended(one: Waiting) -> Callable[[float, Item | Exception], None]:
    def done(began: float, made: Item | Exception) -> None:
        one.made = made
        one.done.set()

    return done
