"""Log lines of a Serve replica, whatever its format: request ids, and what is left out."""

from __future__ import annotations

import logging

from actors.telemetry.request_context import ORIGIN

LOG = "ray.serve"
"""The logger that Serve gives each replica a file for; ours are its children or itself."""


class RequestIds(logging.Filter):
    """Names the request that a line is of.

    Behind Serve's own filter, which knows the id of one handle call: the router's calls are not
    made inside the request that they are made for.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets everything pass."""
        request_id = ORIGIN.get().request_id
        if request_id:
            record.request_id = request_id
        return True


class Told(logging.Filter):
    """Drops Serve's traceback of an exception that only ends a call: its client was told."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is of anything else."""
        error = record.exc_info[1] if record.exc_info else None
        # Serve wraps what was raised after a status was set.
        return not isinstance(getattr(error, "original_exception", error), self.kind)


def keep_from_log(kind: type[BaseException]) -> None:
    """Once in a replica that raises it, after Serve has set up its handlers."""
    for handler in logging.getLogger(LOG).handlers:
        handler.addFilter(Told(kind))


def name_requests() -> None:
    """Once in each replica, after Serve has set up its handlers."""
    for handler in logging.getLogger(LOG).handlers:
        if not any(isinstance(one, RequestIds) for one in handler.filters):
            handler.addFilter(RequestIds())
