"""A decoding process: `python -m actors.media.decode_worker SOCKET MEMORY`.

It is told the model by its input, answers with its fingerprint, and makes items until the socket
ends, which is when the actor does, however that came; the kernel ends one that does not listen, as
it hangs in a file. It has no device and no weights.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
from contextlib import suppress
from time import monotonic

import numpy as np
import torch

from actors.errors import ServiceError
from actors.media.decode_messages import (
    MOST_BYTES,
    Answer,
    Order,
    answer,
    media_of,
    model_of,
    packed,
    unpacked,
)
from actors.media.image import prepare
from actors.media.patchify import Patchifier, patchifier_of

MOST_SILENT_SECONDS = 0.002
"""What is made waits no longer than that for what is made after it, and for that."""

PR_SET_PDEATHSIG = 1
"""Of <sys/prctl.h>: which signal comes when the thread ends that started this process."""

log = logging.getLogger(__name__)


def main() -> None:
    """Ends when the socket does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the actor's
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        memory = memoryview(mmap.mmap(int(sys.argv[2]), 0))
        # From the start of the file, wherever another process has read to.
        patchifier = patchifier_of(model_of(os.pread(0, os.fstat(0).st_size, 0)))
        channel.send(packed([patchifier.spec.fingerprint]))
        while message := channel.recv(MOST_BYTES):
            work(patchifier, unpacked(message), memory, channel)


def work(
    patchifier: Patchifier, orders: tuple[Order, ...], memory: memoryview, channel: socket.socket
) -> None:
    """Makes these in turn, and answers in as few messages as latency allows."""
    answers: list[Answer] = []
    told = monotonic()
    for one in orders:
        answers.append(made(patchifier, one, memory))
        if (now := monotonic()) - told > MOST_SILENT_SECONDS:
            channel.send(packed(answers))
            answers, told = [], now
    if answers:
        channel.send(packed(answers))


def made(patchifier: Patchifier, order: Order, memory: memoryview) -> Answer:
    """Writes the patches of an item over its bytes."""
    began = monotonic()
    try:
        place, media = media_of(order, memory)
        item = prepare(patchifier, media)
        shape = frames, *_ = patchifier.shape(media.plan)
        parts = [item.patches] if item.later is None else [item.patches, item.later]
        whole = np.frombuffer(memory[place.start : place.end], np.uint8)
        target = whole[: np.prod(shape)].reshape(shape)
        assert len(parts) == frames, "not as many frames as were expected. This is a bug."
        for part, into in zip(parts, target, strict=True):
            into[:] = torch.as_tensor(part).numpy()
    except ServiceError as error:
        return answer(began, error)
    except Exception as error:
        log.exception("an item of grid %s could not be cut up", order)
        return answer(began, error)
    return answer(began, None)


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):  # the actor is gone
        main()
