"""Decodes media into items, in separate processes or, without any, in threads of the replica.

Decoding threads take the GIL several times per image, and the GPU thread has to wait for it.
Processes get files and return patches through shared memory instead. Each process has a thread
here, which sends it jobs, receives its answers, and replaces it when it exits, hangs, or works on
an item that nobody waits for. This costs 110 to 180 us of the replica's CPU per item; an empty call
of `concurrent.futures` or `pebble` costs 240 to 370 us.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from math import ceil
from pathlib import Path
from threading import Condition, Lock, Thread
from time import monotonic
from typing import Any, Protocol

from prometheus_client import Counter

from actors.errors import EncodeFailed, InvalidMedia, ServiceError, StartError, Unavailable
from actors.families.registry import read
from actors.media import decode_worker
from actors.media.decode_worker import Slab, size_of
from actors.media.image import prepare
from actors.media.patchify import patchifier_of
from actors.media.text import Texts
from actors.options import ModelOptions, PreprocessOptions
from actors.spec.checkpoint import Noted, find
from actors.types import Item, Media

log = logging.getLogger("ray.serve")

CHUNK_ITEMS = 8
CHUNK_PATCHES = 4096
"""A message gets no more jobs once it has reached either limit: some milliseconds of work."""
AHEAD_PATCHES = 4 * CHUNK_PATCHES
"""A process with more than this still to do gets no more jobs: others may be free sooner."""

MAX_FRAMES = 8192  # of a video sent as images; a message has room for no more

START_SECONDS = 120
MAX_FAILED_STARTS = 3

ROOM_SECONDS = 0.01
"""How often a thread checks a full slab for room. It cannot be notified, because blocks are given
back by finalizers, which may take no lock. The slab is full only while the GPU is far behind."""

ABANDONED_SECONDS = 5
"""How long a process may go on with an item that nobody waits for any more. Replacing the process
takes 2 to 3 s of CPU."""
POLL_SECONDS = 1.0  # how often a thread that waits for an answer checks whether it still should

STOPPING = "this encoder is stopping: try again"
FATAL = (
    "the process decoding the file exited twice: the file is damaged, or needs more memory "
    "than is available"
)


class DecoderMetrics(Protocol):
    preprocessed: Counter
    decode_restarts: Counter


class Job(Future[Item]):
    """An item on its way through a decoding process."""

    def __init__(self, media: Media, size_bytes: int) -> None:
        super().__init__()
        self.media = media
        self.size_bytes = size_bytes
        self.submitted = monotonic()
        self.offset = 0  # of its block in the slab, while a process has it
        self.suspected = False  # its process was lost after it was begun: it is retried once, alone
        self.abandoned: float | None = None  # when it was cancelled
        self.patches = media.plan.patches + len(media.frames)
        """An estimate of the work. Frames that came as images count, because each is decoded by
        itself."""

    def cancel(self) -> bool:
        """False: it has begun. Its process is then replaced if it takes much longer."""
        self.abandoned = monotonic()
        return super().cancel()

    def begin(self) -> bool:
        """False: it was cancelled. A job that is retried has begun before."""
        return self.running() or self.set_running_or_notify_cancel()


class DecodeProcess:
    """A decoding process, and the jobs that it has not answered yet, in order."""

    def __init__(self, model: bytes, slab: int, most_seconds: float) -> None:
        """Returns when it has started. `slab`: the descriptor of the file that it maps."""
        self.jobs: deque[Job] = deque()
        self.overdue: Job | None = None
        """The job that takes too long, which is why the process is to be replaced."""
        self.starved = False
        """Whether it got little CPU time meanwhile, so that the machine may be to blame."""
        self.process, self.channel = launch(model, slab)
        self._wait_at_most(START_SECONDS)
        self.fingerprint = ""
        """Fingerprint of the spec that the process read. Empty: it did not start."""
        with suppress(BlockingIOError):
            self.fingerprint = "".join(map(str, self._message()))
        self.most_seconds = most_seconds
        self._wait_at_most(min(most_seconds / 2, POLL_SECONDS))

    @property
    def wants_more(self) -> bool:
        """Whether to send it more jobs now, so that it is never idle."""
        if not self.jobs:
            return True
        if len(self.jobs) > CHUNK_ITEMS or self.jobs[0].suspected:
            return False
        return sum(job.patches for job in self.jobs) < AHEAD_PATCHES

    def send(self, jobs: list[Job], slab: Slab) -> None:
        """Sends jobs that have blocks. Does not block, because messages are small and few."""
        self.jobs += jobs
        for job in jobs:
            slab.write(job.offset, job.size_bytes, job.media)
        orders = [decode_worker.order_of(job.media, job.offset, job.size_bytes) for job in jobs]
        with suppress(OSError):  # it has exited, which `receive` reports
            self.channel.send(decode_worker.packed(orders))

    def receive(self, slab: Slab) -> tuple[Any, ...]:
        """The values of its next message. Empty: it exited, sent an invalid message, or takes too
        long. In the last case, `overdue` is the job that it is working on, if it has begun any."""
        began, polled = monotonic(), None
        while True:
            try:
                return self._message()
            except BlockingIOError:
                job, now, run = self._begun_last(slab), monotonic(), cpu_seconds(self.process.pid)
                polled = polled or (now, run)  # only now, because few messages take that long
                since = max(began, job.abandoned) if job and job.abandoned else now
                if now - since >= ABANDONED_SECONDS or now - began >= self.most_seconds:
                    self.overdue = job
                    self.starved = run - polled[1] < (now - polled[0]) / 2
                    return ()

    def _begun_last(self, slab: Slab) -> Job | None:
        """The job it is working on. Earlier ones are done, even if they are not answered yet."""
        begun = [job for job in self.jobs if slab.begun(job.offset, job.size_bytes)]
        return begun[-1] if begun else None

    def _message(self) -> tuple[Any, ...]:
        """The values of the next message. Empty: it exited, or sent an invalid one. Raises
        BlockingIOError if none arrives in time."""
        try:
            return decode_worker.unpacked(self.channel.recv(decode_worker.MAX_MESSAGE_BYTES))
        except BlockingIOError:
            raise
        except (OSError, ValueError, TypeError):
            return ()

    def end(self) -> None:
        """Kills it. Afterwards it neither reads nor writes the slab."""
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def _wait_at_most(self, seconds: float) -> None:
        # Not settimeout, because it polls before it reads, and so releases the GIL twice.
        whole, part = divmod(seconds, 1)
        timeout = struct.pack("ll", int(whole), int(part * 1e6))
        self.channel.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)


def launch(model: bytes, slab: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts decode_worker. Returns it, and our end of its socket."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its, os.fdopen(os.memfd_create("model"), "w+b") as stdin:
        stdin.write(model)
        stdin.seek(0)
        files = its.fileno(), slab
        # A separate program. Not a fork, because the replica has CUDA, Ray and threads. Not
        # multiprocessing, which would import the replica's main module and with it Ray.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", decode_worker.__name__, *map(str, files)],
            stdin=stdin,
            env=os.environ
            | {
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
            },
            pass_fds=files,
        )
    return process, ours


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process (man 5 proc_pid_stat: utime and stime)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Decoder:
    """Decodes media for one replica. `submit` may be called from any thread."""

    def __init__(
        self, model: ModelOptions, options: PreprocessOptions, series: DecoderMetrics
    ) -> None:
        """Starts processes if any are configured, but does not wait for them. Raises
        CheckpointError, and StartError if the system has no memfd_create."""
        files = Noted(find(model))
        self.patchifier = patchifier_of(read(model, files))
        self.texts = Texts(self.patchifier.spec) if self.patchifier.spec.text else None
        self._model = decode_worker.model_message(model, files.contents)
        self._series = series
        self._file_seconds = options.max_file_seconds
        self._executor = ThreadPoolExecutor(options.threads, "decode")
        self._lock = Lock()  # guards what follows, and the slab's `take`
        self._changed = Condition(self._lock)  # `_started` or `_failure`
        self._waiting: deque[Job] = deque()
        self._idle: list[Condition] = []  # of each thread that waits for jobs
        self._woken = 0  # threads that were notified of a job and have not looked yet
        self._started = 0
        self._closing = False
        self._failure: ServiceError | None = None  # why no process decodes any more
        self._slab: Slab | None = None
        self._threads: list[Thread] = []
        if options.processes:
            if not hasattr(os, "memfd_create"):
                raise StartError("preprocess.processes needs Linux: set it to 0")
            self._slab = slab = Slab(options.shared_bytes)
            # Each thread starts its own process: the kernel kills a process with that thread.
            self._threads = [
                Thread(target=self._run, args=(slab,), name=f"decode-{index}", daemon=True)
                for index in range(options.processes)
            ]
            for thread in self._threads:
                thread.start()

    def wait_until_started(self) -> None:
        """Waits for all processes. Raises StartError, and closes, if one does not start."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or self._started >= len(self._threads), START_SECONDS
            )
            if self._started >= len(self._threads):
                return
        self.close()
        raise StartError(
            "the decoding processes do not start: see their stderr, or set "
            f"preprocess.processes to 0 ({self._failure})"
        )

    def submit(self, media: Media) -> Future[Item]:
        """Queues an item. The future completes with the decoded item, whose decode_queue_seconds
        and preprocess_seconds are filled in, or fails with a ServiceError.

        Cancelling the future drops an item that has not begun. Raises Unavailable once this decoder
        is closed, or cannot start its processes any more.
        """
        size_bytes = size_of(media, self.patchifier.shape(media.plan))
        slab = self._slab
        with self._changed:
            if self._failure or self._closing:
                raise self._failure or Unavailable(STOPPING)
            small = len(media.frames) <= MAX_FRAMES and media.kind != "text"
            if slab is None or not (small and slab.fits(size_bytes)):
                return self._executor.submit(self._decode_here, media, monotonic())
            job = Job(media, size_bytes)
            self._waiting.append(job)
            if self._idle:
                self._wake()
        return job

    def alive(self) -> bool:
        """False: its processes cannot be started any more, or it is closed."""
        return self._failure is None

    def close(self) -> None:
        """Returns when everything that was submitted is done."""
        with self._changed:
            self._closing = True
            self._wake_all()
        for thread in self._threads:
            thread.join()
        self._executor.shutdown()
        self._fail(Unavailable(STOPPING))
        slab, self._slab = self._slab, None
        if slab:
            slab.close()

    def _decode_here(self, media: Media, submitted: float) -> Item:
        began = monotonic()
        try:
            texts = self.texts if media.kind == "text" else None
            item = texts.item(media) if texts else prepare(self.patchifier, media)
        except ServiceError:
            raise
        except Exception as error:
            log.exception("an item of grid %s could not be decoded", media.plan.grid_thw)
            raise EncodeFailed(f"the encoder failed on this item: {error!r}") from error
        return self._timed(item, submitted, began)

    def _timed(self, item: Item, submitted: float, began: float) -> Item:
        item.decode_queue_seconds = began - submitted
        item.preprocess_seconds = monotonic() - began
        self._series.preprocessed.inc()
        return item

    def _run(self, slab: Slab) -> None:
        """Runs in the thread of one process."""
        process = None
        try:
            process = self._start(slab)
            while self._feed(process, slab):
                if not self._hear(process, slab):
                    self._take_back(process, slab)
                    process = self._start(slab)
        except ServiceError as error:
            self._fail(error)
        except Exception as error:  # a bug; fail all jobs, so that nobody waits for ever
            log.critical("a thread of the decoding processes ended", exc_info=error)
            self._fail(Unavailable(f"this encoder cannot decode any more: {error!r}"))
        finally:
            if process:
                process.end()
                for job in process.jobs:
                    job.set_exception(self._failure or Unavailable(STOPPING))

    def _start(self, slab: Slab) -> DecodeProcess:
        """Starts a process. Raises Unavailable if none starts, StartError if its spec differs."""
        expected = self.patchifier.spec.fingerprint
        for _ in range(MAX_FAILED_STARTS):
            process = DecodeProcess(self._model, slab.file, self._file_seconds)
            if process.fingerprint == expected:
                with self._changed:
                    self._started += 1
                    self._changed.notify_all()
                return process
            process.end()
            if process.fingerprint:
                raise StartError(
                    f"a decoding process has the model fingerprint {process.fingerprint}, not "
                    f"{expected}: does it run other code?"
                )
            log.error("a decoding process did not start")
            if self._closing:
                raise Unavailable(STOPPING)
        raise Unavailable(f"decoding processes exited {MAX_FAILED_STARTS} times at start")

    def _feed(self, process: DecodeProcess, slab: Slab) -> bool:
        """Sends jobs to a process. Waits until there are some. False: closed, and all is done."""
        while process.wants_more and (chunk := self._next(process, slab)):
            process.send(chunk, slab)
        return bool(process.jobs)

    def _next(self, process: DecodeProcess, slab: Slab) -> list[Job]:
        """Jobs to send to a process. Empty: it has enough, or it has none and all is done."""
        turn = Condition(self._lock)
        with self._changed:
            while True:
                if process.jobs and (self._idle or self._woken):
                    return []  # leave the jobs to processes that are idle
                chunk = self._take(process, slab)
                done = not self._waiting and (self._closing or self._failure)
                if chunk or process.jobs or done:
                    return chunk
                self._idle.append(turn)
                turn.wait(ROOM_SECONDS if self._waiting else None)
                if turn in self._idle:  # timed out
                    self._idle.remove(turn)
                else:
                    self._woken -= 1

    def _wake(self) -> None:
        self._idle.pop().notify()  # the process that worked last: its caches are warm
        self._woken += 1

    def _wake_all(self) -> None:
        self._changed.notify_all()
        while self._idle:
            self._wake()

    def _take(self, process: DecodeProcess, slab: Slab) -> list[Job]:
        """Jobs for one message, each with a block of the slab. Empty: none waits, or no room."""
        chunk: list[Job] = []
        patches = 0
        share = min(CHUNK_ITEMS, ceil(len(self._waiting) / len(self._threads)))
        while self._waiting and len(chunk) < share and patches < CHUNK_PATCHES:
            job = self._waiting[0]
            if not job.abandoned:
                if job.suspected and (chunk or process.jobs):
                    break  # only a process without jobs may take it
                offset = slab.take(job.size_bytes)
                if offset is None:
                    break
                if job.begin():
                    job.offset = offset
                    chunk.append(job)
                    patches += job.patches
                else:
                    slab.give_back(offset)
            self._waiting.popleft()
            if job.suspected:
                break
        return chunk

    def _hear(self, process: DecodeProcess, slab: Slab) -> bool:
        """Completes the jobs that a process answers. False: it is to be replaced."""
        answers = process.receive(slab)
        now = monotonic()
        for answer in answers:
            match answer:
                case (float() as began, str() as name, str() as text, bytes() as kept) if (
                    process.jobs
                ):
                    if not process.jobs[0].submitted <= began <= now:
                        return False  # impossible, and would spoil the metrics
                    job = process.jobs.popleft()
                    if error := decode_worker.error_of(name, text):
                        slab.give_back(job.offset)
                        job.set_exception(error)
                    else:
                        plan = job.media.plan.pruned(kept)
                        item = slab.item(job.offset, plan, self.patchifier.shape(plan))
                        job.set_result(self._timed(item, job.submitted, began))
                case _:
                    return False
        return bool(answers)

    def _take_back(self, process: DecodeProcess, slab: Slab) -> None:
        """Kills a process and returns its jobs to the front of the queue.

        The overdue job fails instead; if the process was starved, it is suspected and retried once.
        If the process exited, begun jobs are suspected; those that were suspected before fail.
        """
        process.end()
        overdue = process.overdue
        if overdue and overdue.abandoned:
            log.warning("replacing a decoding process: nobody is waiting for its item any more")
        else:
            log.error("replacing a decoding process that exited or hangs")
        self._series.decode_restarts.inc()
        again: list[Job] = []
        while process.jobs:
            job = process.jobs.popleft()
            begun = slab.begun(job.offset, job.size_bytes)
            slab.give_back(job.offset)
            if job is overdue and (job.suspected or job.abandoned or not process.starved):
                job.set_exception(
                    InvalidMedia(
                        f"decoding takes longer than {self._file_seconds:g} s "
                        "(preprocess.max_file_seconds): cut the file, or scale it down"
                    )
                )
            elif begun and job.suspected:
                job.set_exception(InvalidMedia(FATAL))
            else:
                job.suspected |= job is overdue or (begun and not overdue)
                again.append(job)
        with self._changed:
            self._waiting.extendleft(reversed(again))
            self._wake_all()

    def _fail(self, error: ServiceError) -> None:
        """Rejects waiting jobs, and all later ones."""
        with self._changed:
            self._failure = self._failure or error
            refused, self._waiting = self._waiting, deque()
            self._wake_all()
        for job in refused:
            if job.begin():
                job.set_exception(self._failure)
