"""One real Ray cluster for all modules that a worker runs; each module runs one application."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.serve._private import client

from encoder_service.bench.cluster import free_ports
from tests.serve.tiny import GRPC_PORT


@dataclass(frozen=True)
class Cluster:
    """Where the cluster listens and writes its logs."""

    http: str
    grpc: str
    logs: Path
    """Where Serve's replicas write their logs."""
    ray_metrics: str
    """URL of Ray's own metrics."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Ray and Serve, stopped after the last test of this folder: other tests run without Ray."""
    home = tempfile.mkdtemp(prefix="es")  # short: socket paths have a limit
    http_port, metrics_port = free_ports(2)
    ray.init(
        address="local",
        num_cpus=32,  # logical ones: replicas ask for a tenth
        include_dashboard=False,
        object_store_memory=400_000_000,
        _temp_dir=f"{home}/ray",
        log_to_driver=bool(os.environ.get("TEST_LOG")),
        namespace="serve",
        _metrics_export_port=metrics_port,
        _system_config={"metrics_report_interval_ms": 2000},
    )
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": http_port},
    )
    # `serve.run` and `serve.delete` would look once a second whether they are done.
    client.CLIENT_POLLING_INTERVAL_S = 0.25
    metrics = f"http://127.0.0.1:{metrics_port}/metrics"
    logs = Path(home, "ray", "session_latest", "logs", "serve")
    yield Cluster(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{GRPC_PORT}", logs, metrics)
    serve.shutdown()
    ray.shutdown()
    shutil.rmtree(home, ignore_errors=True)
