"""Threads in the place of decoding processes: they end, hang and wait when told to."""

from __future__ import annotations

import mmap
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np
import pytest

from actors.media import decoder
from actors.media.decode_worker import (
    MAX_MESSAGE_BYTES,
    Order,
    media_of,
    packed,
    serve,
    spec_of,
    unpacked,
)
from actors.media.decoder import Decoder
from actors.media.image import prepare
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import ActorOptions, EncoderOptions, ModelOptions, PreprocessOptions
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media, Size
from tests.images import jpeg

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
ENDS, HANGS = b"the process ends", b"the process hangs"
"""Files that do it."""


def open_decoder(series: EncoderMetrics | None = None, **preprocess: Any) -> Decoder:
    """Of a small model; its processes have started."""
    options = ActorOptions(
        model=MODEL,
        encoder=EncoderOptions(device="cpu", num_gpus=0),
        preprocess=PreprocessOptions(**preprocess),
    )
    opened = Decoder(options.model, options.preprocess, series or EncoderMetrics())
    opened.wait_until_started()
    return opened


class StandIn:
    """A thread that decodes as a process would, with its own end of the socket."""

    def __init__(self, rig: Rig, patchifier: Patchifier, slab: int, greeting: str) -> None:
        self.ours, self.its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.rig, self.patchifier, self.greeting = rig, patchifier, greeting
        self.pid = id(self)
        self.stopped = False
        self.memory = memoryview(mmap.mmap(slab, 0))
        self.seen: list[int] = []
        """Items of each message."""
        self.killed = threading.Event()
        self.dying = False
        """It ends before it begins what it is sent."""
        self.silent = False
        """It does not send the answers that it has."""
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        with self.its:
            if not self.greeting:
                return
            self.its.send(packed([self.greeting]))
            while message := self.its.recv(MAX_MESSAGE_BYTES):
                if self.dying:
                    return
                orders = unpacked(message)
                self.seen.append(len(orders))
                if not all(map(self.one, orders)):
                    return

    def one(self, order: Order) -> bool:
        """False: it ends."""
        media = media_of(order, self.memory)
        while not self.rig.gate.wait(0.01):
            if self.killed.is_set():
                return False
        if self.rig.stops:
            self.rig.stops -= 1
            self.stopped = True
        if media.data == HANGS or self.stopped:
            assert self.killed.wait(60)
        if media.data == ENDS or self.killed.is_set():
            return False
        if not self.silent:
            serve(self.patchifier, (order,), self.memory, self.its)
        return True

    def kill(self) -> None:
        self.killed.set()
        with suppress(OSError):  # it was, before
            self.ours.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        self.thread.join()


class Rig:
    """Two stand-ins, a gate that holds what they do, and what they are greeted with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.series = EncoderMetrics()
        self.gate = threading.Event()
        self.gate.set()
        self.greeting: str | None = None
        """In the place of the model's fingerprint. Empty: they do not start."""
        self.started: list[StandIn] = []
        self.decoder: Decoder | None = None
        self.stops = 0
        """How many items are still to stop their process, which takes no CPU time then."""
        monkeypatch.setattr(decoder, "launch", self.launch)
        monkeypatch.setattr(decoder, "cpu_seconds", self.cpu_seconds)

    def cpu_seconds(self, pid: int) -> float:
        """Of a process that is always busy, unless it is stopped."""
        return (
            0.0 if any(each.pid == pid and each.stopped for each in self.started) else monotonic()
        )

    def launch(self, model: bytes, slab: int) -> tuple[StandIn, socket.socket]:
        patchifier = patchifier_of(spec_of(model))
        greeting = patchifier.spec.fingerprint if self.greeting is None else self.greeting
        one = StandIn(self, patchifier, slab, greeting)
        self.started.append(one)
        return one, one.ours

    def open(self, **preprocess: Any) -> Decoder:
        self.decoder = open_decoder(self.series, **{"processes": 2} | preprocess)
        return self.decoder

    def media(self, data: bytes | None = None, size: tuple[int, int] = (64, 64)) -> Media:
        assert self.decoder
        plan = self.decoder.patchifier.spec.sizing.plan(Size(*size))
        return Media("image", data or jpeg(*size), plan, digest="")

    def submit(self, data: bytes | None = None, size: tuple[int, int] = (64, 64)) -> Future[Item]:
        assert self.decoder
        return self.decoder.submit(self.media(data, size))

    def count(self, name: str) -> float:
        found = self.series.registry.get_sample_value(f"encoder_{name}_total")
        assert found is not None
        return found

    def good(self, future: Future[Item], size: tuple[int, int] = (64, 64)) -> bool:
        assert self.decoder
        expected = prepare(self.decoder.patchifier, self.media(size=size))
        return np.array_equal(future.result(60).patches, expected.patches)
