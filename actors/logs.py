"""Request ids in the log lines of a Serve replica, whatever its format."""

from __future__ import annotations

import logging

from actors.origin import ORIGIN

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


def name_requests() -> None:
    """Once in each replica, after Serve has set up its handlers."""
    for handler in logging.getLogger(LOG).handlers:
        if not any(isinstance(one, RequestIds) for one in handler.filters):
            handler.addFilter(RequestIds())
