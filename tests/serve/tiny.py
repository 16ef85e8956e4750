"""The tiny service that the modules of this folder run."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from encoder_service.bench.cluster import free_ports
from tests.serve.deployed import FEW, LEAST, deployed

TOKEN = "let me in"
BEARER = f"Bearer {TOKEN}"
MAX_ITEMS = 4
MAX_BODY_BYTES = 300_000
WIDTH = 192
"""Values of a row: hidden size 64 x (1 + 2 deepstack features)."""

(GRPC_PORT,) = free_ports(1)

ARGS: dict[str, Any] = {
    "model": {"id": "qwen3vl-tiny", "load_format": "dummy", "dtype": "float32"},
    "encoder": LEAST["encoder"] | {"replicas": 2, "drain_timeout_seconds": 2},
    "graphs": {"token_budgets": [16, 64]},
    "router": FEW,
    "ingress": FEW | {"grpc_port": GRPC_PORT},
    "limits": {"max_items": MAX_ITEMS, "max_body_bytes": MAX_BODY_BYTES},
    "auth": {"token_sha256": [hashlib.sha256(TOKEN.encode()).hexdigest()]},
}


@contextmanager
def running(name: str, **sections: Any) -> Iterator[None]:
    """Runs the service until the block ends. `sections`: further sections of its configuration."""
    with deployed(name, **ARGS | sections):
        yield
