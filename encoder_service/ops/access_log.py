"""The access log: lines are handed to a thread, which formats and writes them.

The event loop pays for one entry of a queue. What a disk cannot take is dropped, and said.
"""

from __future__ import annotations

import atexit
import logging
from functools import cache
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue

from actors.telemetry.request_context import LOG

MOST_WAITING = 10_000
"""Lines that may wait to be written; more are dropped."""


class Dropping(QueueHandler):
    """Never waits: the service is worth more than its log."""

    dropped = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """The record, if there is room."""
        try:
            self.queue.put_nowait(record)
        except Full:
            self.dropped += 1
            return
        if self.dropped:
            logging.getLogger(LOG).warning("%d lines of the access log dropped", self.dropped)
            self.dropped = 0


@cache
def access_log() -> logging.Logger:
    """The logger of this process, in front of the handlers that Serve gave it."""
    queue: Queue[logging.LogRecord] = Queue(MOST_WAITING)
    log = logging.getLogger(f"{LOG}.access")
    log.propagate = False
    log.handlers = [Dropping(queue)]
    listener = QueueListener(queue, *logging.getLogger(LOG).handlers, respect_handler_level=True)
    listener.start()
    atexit.register(listener.stop)
    return log
