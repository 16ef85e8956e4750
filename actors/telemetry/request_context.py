"""Whose work is being done: logs and traces name it. Travels with the work, not in it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """A request, as far as those need to know who work for it. Pickles."""

    request_id: str = ""
    """Fit for a log; empty: nobody said."""
    traceparent: str = ""
    """W3C Trace Context: the span that caused the work; empty: it is not traced."""


NOBODY = Origin()

ORIGIN: ContextVar[Origin] = ContextVar("origin", default=NOBODY)
"""Of the task that runs. A call to another process takes it along as an argument."""
