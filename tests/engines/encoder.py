"""The service of a checkpoint, and SGLang's protocol before it, for another environment's tests.

    python -m tests.engines.encoder CHECKPOINT PORT

Writes the service's own URL to CHECKPOINT/url.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvicorn

from encoder_service.bench.cluster import cluster, logical_cpus, service
from encoder_service.client import AsyncClient
from encoder_service.config import LimitOptions, ServiceOptions


def options(checkpoint: Path) -> ServiceOptions:
    """One replica on the CPU, in float32."""
    return ServiceOptions.model_validate(
        {
            "model": {"id": str(checkpoint), "dtype": "float32"},
            "encoder": {"replicas": 1, "num_gpus": 0, "num_cpus": 0.1, "device": "cpu"},
            "router": {"num_cpus": 0.1},
            "ingress": {"num_cpus": 0.1},
        }
    )


def main(checkpoint: Path, port: int) -> None:
    from encoder_service.engines.sglang_encoder import SglangEncoder  # vLLM's tests have no pyzmq

    chosen = options(checkpoint)
    with (
        cluster(logical_cpus(chosen), object_store_bytes=400_000_000) as where,
        service(chosen, where),
    ):
        (checkpoint / "url").write_text(where.http)
        app = SglangEncoder(AsyncClient(where.http), LimitOptions()).app()
        uvicorn.run(app, port=port)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
