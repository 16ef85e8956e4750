"""The status page at `/`: one file, no build step, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files


@cache
def page() -> bytes:
    """The document. It says nothing itself: it asks /v1/status, with a token if need be."""
    return files("encoder_service.ops").joinpath("status.html").read_bytes()


@cache
def policy() -> str:
    """Its Content-Security-Policy: no script but its own, no host but ours.

    What the page shows quotes clients, who may try to smuggle scripts.
    """
    (script,) = re.findall(rb"<script>(.*?)</script>", page(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
