"""The request that work is done for. It travels with the work, and every log line names it."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass

LOG = "ray.serve"
"""The logger that Serve gives each replica a file for; ours are its children or itself."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What logs and spans need to know of a request. Can be pickled."""

    request_id: str = ""
    """Safe to log; empty if unknown."""
    traceparent: str = ""
    """W3C Trace Context of the span that caused the work; empty if it is not traced."""


NOBODY = Origin()

ORIGIN: ContextVar[Origin] = ContextVar("origin", default=NOBODY)
"""The request of the running task. Calls to other processes take it along as an argument."""


class RequestIds(logging.Filter):
    """Sets `request_id` on each log record.

    Runs after Serve's own filter, which knows the id of one handle call only: the router's calls
    are not made inside the request that they are made for.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = ORIGIN.get().request_id
        if request_id:
            record.request_id = request_id
        return True


class HandledErrors(logging.Filter):
    """Drops Serve's traceback of an exception that only ends a call: the client has the error."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # Serve wraps what is raised after a status was set.
        return not isinstance(getattr(error, "original_exception", error), self.kind)


def keep_from_log(kind: type[BaseException]) -> None:
    """Drops tracebacks of this exception. Call it once, after Serve has set up its handlers."""
    for handler in logging.getLogger(LOG).handlers:
        handler.addFilter(HandledErrors(kind))


def name_requests() -> None:
    """Adds request ids to this replica's log. Call it after Serve has set up its handlers."""
    for handler in logging.getLogger(LOG).handlers:
        if not any(isinstance(one, RequestIds) for one in handler.filters):
            handler.addFilter(RequestIds())
