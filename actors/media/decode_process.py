"""One process that decodes: started, given work, heard, ended. Which work: decode_processes.py.

A program of its own, not a fork: the actor has CUDA and threads, of which it must have neither.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from actors.media.arena import Place
from actors.media.decode_messages import MOST_BYTES, Answer, Order, packed, unpacked
from actors.media.decoding import Asked, Done

MOST_CHUNKS = 2
"""That a process has at a time: one to work on, one to go on with."""


NOWHERE = Place(0, 0)


@dataclass(slots=True, eq=False)
class Job:
    """An item on its way to a process, and through it."""

    asked: Asked
    done: Done
    place: Place = NOWHERE
    """While a process has it."""
    alone: bool = False
    """A process ended that had it: it is tried once more, with nothing beside it."""


@dataclass(slots=True)
class DecodeProcess:
    """A process and the work that it has not answered yet."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    fingerprint: str = ""
    """Of the model, as it knows it. Empty: it has not started yet."""
    chunks: deque[deque[Job]] = field(default_factory=deque)
    """What was sent together, oldest first."""
    heard: float = field(default_factory=monotonic)
    """When it was last known to go on."""

    @classmethod
    def start(cls, model: int, memory: int) -> DecodeProcess:
        """Takes seconds to greet; does not wait for it.

        `model`: a file with decode_messages.model_told. `memory`: the file that it shares.
        """
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        files = its.fileno(), memory
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.media.decode_worker", *map(str, files)],
            stdin=model,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
            pass_fds=files,
        )
        its.close()
        return cls(process, ours)

    @property
    def room(self) -> bool:
        """Whether it may be given more."""
        alone = self.chunks and self.chunks[0][0].alone
        return bool(self.fingerprint) and len(self.chunks) < MOST_CHUNKS and not alone

    @property
    def load(self) -> tuple[int, int]:
        """What it has: chunks, then patches."""
        patches = sum(job.asked.media.plan.patches for chunk in self.chunks for job in chunk)
        return len(self.chunks), patches

    def stuck(self, seconds: float) -> bool:
        """Whether nothing was heard for so long of what it has to do."""
        busy = self.chunks or not self.fingerprint
        return bool(busy) and monotonic() - self.heard > seconds

    def give(self, jobs: Sequence[Job], orders: Sequence[Order]) -> None:
        """Sends these. They are small, and few at a time: it does not block."""
        if not self.chunks:
            self.heard = monotonic()
        self.chunks.append(deque(jobs))
        with suppress(OSError):  # it has ended: receive says so
            self.channel.send(packed(orders))

    def receive(self) -> Sequence[Answer] | None:
        """What it has just answered, or, in the place of the first answers, its greeting.

        None: it has ended, or says what no process of ours would say.
        """
        try:
            message = self.channel.recv(MOST_BYTES)
            self.heard = monotonic()
            if self.fingerprint:
                return [heard(*each, now=self.heard) for each in unpacked(message)]
            (self.fingerprint,) = map(str, unpacked(message))
        except BlockingIOError:
            return []
        except (OSError, ValueError, TypeError, OverflowError):
            return None
        return []

    def answered(self) -> Job | None:
        """The job that the next answer is about. None: there is none."""
        if not self.chunks:
            return None
        job = self.chunks[0].popleft()
        if not self.chunks[0]:
            self.chunks.popleft()
        return job

    def end(self) -> None:
        """At once; afterwards it neither reads nor writes the memory."""
        self.process.kill()
        self.process.wait()
        self.channel.close()


def heard(began: float, name: str, text: str, *, now: float) -> Answer:
    """An answer as it came. Raises ValueError for a time that would spoil the metrics for good."""
    if not 0 <= float(began) <= now:
        raise ValueError(f"begun at {began}, heard at {now}")
    return float(began), str(name), str(text)
