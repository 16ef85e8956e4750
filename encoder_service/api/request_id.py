"""The id of a request: the client's own, or a new one. Errors, logs and headers name the same."""

from __future__ import annotations

import re
import uuid


def request_id_of(given: str | None) -> str:
    """The client's own id if it is fit for a log, otherwise a new one."""
    if given and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given):
        return given
    return uuid.uuid4().hex
