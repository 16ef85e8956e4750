"""Processes that make items of media beside the encoder actor, whose interpreter hands them out.

Threads of one interpreter take turns: a dozen calls of torch an item, and each gives the turn away
and waits for it. Here one thread hands out files and takes patches back, several at a time. A
process that ends or hangs is replaced, and loses nothing but, in the end, the file that did it.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from contextlib import suppress
from math import ceil, prod
from selectors import EVENT_READ, DefaultSelector
from threading import Event, Thread
from time import monotonic

from actors.errors import InvalidMedia, ServiceError, StartError, Unavailable
from actors.families.registry import read
from actors.media.decode_messages import MARK_BYTES, error_of, files_of, model_told, order
from actors.media.decode_process import DecodeProcess, Job
from actors.media.decoding import Asked, Done
from actors.media.patch_memory import PatchMemory
from actors.media.patchify import patchifier_of
from actors.options import ModelOptions, PreprocessOptions
from actors.spec.checkpoint import Noted, find
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, Media

log = logging.getLogger("ray.serve")

MOST_ITEMS = 8
MOST_PATCHES = 4096
"""Of a chunk, unless one item has more: some milliseconds of work."""

MOST_FRAMES = 8192
"""Files of a video: their sizes are part of a message."""

START_SECONDS = 120
FAILED_STARTS = 3
"""In a row, after which there is no more hope."""

FATAL = (
    "the file ended, or held up, the process that decodes it, twice: it is damaged, or takes more "
    "memory or time than there is"
)

LOOK_SECONDS = 1.0
"""How often processes that have work are looked at."""


class DecodeProcesses:
    """`begin` may be called from any thread; `Done` is called in the one here."""

    def __init__(
        self,
        model: ModelOptions,
        options: PreprocessOptions,
        stuck_seconds: float,
        series: EncoderMetrics,
    ) -> None:
        """Does not wait for them to start. Raises CheckpointError.

        `stuck_seconds`: how long an item may take before its process is replaced.
        """
        files = Noted(find(model))
        self.patchifier = patchifier_of(read(model, files))
        self._told = os.memfd_create("model")
        os.write(self._told, model_told(model, files.contents))
        self.processes = options.processes
        self.stuck_seconds = stuck_seconds
        self.series = series
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._memory = PatchMemory(options.shared_bytes, self._ring)
        self._waiting: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._asleep = self._closing = False
        self._ended: ServiceError | None = None
        self._failed_starts = 0
        self._selector = DefaultSelector()
        self._selector.register(self._bell, EVENT_READ)
        self._processes: list[DecodeProcess] = []
        self._started = Event()
        self._thread = Thread(target=self._run, name="decode-processes", daemon=True)
        self._thread.start()

    def wait_until_started(self) -> None:
        """All of them. Raises StartError, and closes, if one does not."""
        if not self._started.wait(START_SECONDS) or self._ended:
            self.close()
            raise StartError(
                "the processes that decode do not start: see what they wrote to stderr, or set "
                f"preprocess.processes to 0 ({self._ended})"
            )

    def takes(self, media: Media) -> bool:
        """Whether there is ever room for it."""
        return len(media.frames) <= MOST_FRAMES and self._memory.holds(self._size(media))

    def begin(self, asked: Asked, done: Done) -> None:
        """Makes an item that is taken, unless it is given up before its turn comes."""
        self._waiting.append(Job(asked, done))
        if self._ended:
            self._refuse(self._ended)
        elif self._asleep:
            self._ring()

    def alive(self) -> bool:
        """Whether what is begun is made."""
        return not self._ended

    def close(self) -> None:
        """When all that was begun is done."""
        self._closing = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        self._asleep = False
        with suppress(OSError):  # it has rung already, or the thread has ended
            self._rope.send(b"!")

    def _run(self) -> None:
        ended: ServiceError = Unavailable("this encoder is stopping: try again")
        try:
            for _ in range(self.processes):  # here: they end with the thread that started them
                self._processes.append(self._start())
            while self._step():
                pass
        except Exception as error:  # nobody may wait for ever because of it
            log.critical("the thread of the decoding processes ended", exc_info=error)
            ended = Unavailable(f"this encoder cannot decode any more: {error}")
        finally:
            self._ended = ended
            self._waiting += self._suspects
            for process in self._processes:
                for chunk in process.chunks:
                    self._waiting += chunk
            self._refuse(ended)
            self._started.set()
            for process in self._processes:
                process.end()
            for thing in (self._selector, self._bell, self._rope, self._memory):
                thing.close()
            os.close(self._told)

    def _refuse(self, error: ServiceError) -> None:
        with suppress(IndexError):
            while True:
                done(self._waiting.popleft(), monotonic(), error)

    def _step(self) -> bool:
        """Hands out what can be, then hears what comes. False: closed, and all is done."""
        self._asleep = True  # before the last look: who begins something afterwards rings
        self._hand_out()
        busy = any(process.chunks for process in self._processes)
        if self._closing and not (busy or self._suspects or self._waiting):
            return False
        if not any(process.room for process in self._processes):
            self._asleep = False  # until one of them is heard, nothing can be handed out
        starting = not all(process.fingerprint for process in self._processes)
        for key, _ in self._selector.select(LOOK_SECONDS if busy or starting else None):
            if key.data:
                self._hear(key.data)
            else:
                self._bell.recv(64)
        for process in list(self._processes):
            if process.stuck(self.stuck_seconds if process.fingerprint else START_SECONDS):
                log.error("a process that decodes does nothing any more: it is replaced")
                self._replace(process)
        return True

    def _hand_out(self) -> None:
        """To those that have least. What is suspected goes first, to one that has nothing."""
        while queue := self._suspects or self._waiting:
            alone = queue is self._suspects
            free = [each for each in self._processes if each.room and not (alone and each.chunks)]
            if not free:
                return
            share = 1 if alone else min(MOST_ITEMS, ceil(len(queue) / len(self._processes)))
            if jobs := self._take(queue, share):
                orders = [order(job.place, job.asked.media) for job in jobs]
                min(free, key=lambda process: process.load).give(jobs, orders)
            elif queue:
                return  # the memory has no room: it rings when some comes back

    def _take(self, queue: deque[Job], most: int) -> list[Job]:
        """The first ones that are still waited for, their bytes where a process finds them."""
        jobs: list[Job] = []
        patches = 0
        while queue and len(jobs) < most and patches < MOST_PATCHES:
            job = queue[0]
            media = job.asked.media
            if not job.asked.given_up:
                place = self._memory.take(self._size(media))
                if not place:
                    break
                self._memory.write(place, media)
                job.place = place
                jobs.append(job)
                patches += media.plan.patches + len(media.frames)
            queue.popleft()
        return jobs

    def _hear(self, process: DecodeProcess) -> None:
        greeted = process.fingerprint
        answers = process.receive()
        if process.fingerprint != greeted:
            self._greeted(process)
        for began, name, text in answers or ():
            job = process.answered()
            if not job:
                answers = None
                break
            self._finish(job, began, error_of(name, text))
        if answers is None:
            log.error("a process that decodes has ended: it is replaced")
            self._replace(process)

    def _greeted(self, process: DecodeProcess) -> None:
        expected = self.patchifier.spec.fingerprint
        if process.fingerprint != expected:
            raise StartError(
                f"a process that decodes knows the model as {process.fingerprint}, not as "
                f"{expected}: is its code another?"
            )
        self._failed_starts = 0
        if all(each.fingerprint for each in self._processes):
            self._started.set()

    def _finish(self, job: Job, began: float, error: ServiceError | None) -> None:
        if error:
            self._memory.give_back(job.place)
            done(job, began, error)
            return
        plan = job.asked.media.plan
        self.series.preprocessed.labels("cpu").inc()
        done(job, began, self._memory.item(job.place, plan, self.patchifier.shape(plan)))

    def _replace(self, process: DecodeProcess) -> None:
        """What it had begun is tried once more, one by one; what it had not, as if it were new."""
        self._selector.unregister(process.channel)
        process.end()
        self.series.decode_restarts.inc()
        if not process.fingerprint:
            self._failed_starts += 1
            if self._failed_starts == FAILED_STARTS:
                raise Unavailable(f"processes that decode ended {FAILED_STARTS} times at start")
        for job in reversed([job for chunk in process.chunks for job in chunk]):
            begun = self._memory.begun(job.place)
            self._memory.give_back(job.place)
            if begun and job.alone:
                done(job, process.heard, InvalidMedia(FATAL))
            elif begun or job.alone:
                job.alone = True
                self._suspects.appendleft(job)
            else:
                self._waiting.appendleft(job)
        self._processes[self._processes.index(process)] = self._start()

    def _start(self) -> DecodeProcess:
        process = DecodeProcess.start(self._told, self._memory.file)
        self._selector.register(process.channel, EVENT_READ, process)
        return process

    def _size(self, media: Media) -> int:
        """What it takes: its bytes, and then its patches in the same place."""
        size = max(sum(map(len, files_of(media))), prod(self.patchifier.shape(media.plan)))
        return size + MARK_BYTES


def done(job: Job, began: float, made: Item | Exception) -> None:
    """Tells who waits."""
    try:
        job.done(began, made)
    except Exception:  # theirs, and no reason to leave others waiting
        log.exception("what follows decoding failed")
