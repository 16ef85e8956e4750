"""The head node is killed and started again, with its state in Redis. Run by test_several_nodes.py.

The head runs Ray's GCS, Serve's controller and a proxy, but no replica.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from encoder_service.bench.cluster import free_ports
from encoder_service.client import Client
from tests.chaos.__main__ import LOST_IDS
from tests.chaos.callers import Callers, known_files
from tests.chaos.faults import replicas
from tests.chaos.sources import from_outside
from tests.processes import process
from tests.serve.nodes import Node, connect, nodes
from tests.serve.test_manifests import deploy
from tests.serve.three_nodes import GRPC, IMAGES, PAUSE_SECONDS, options, outside, ready
from tests.waiting import within

AWAY_SECONDS = 20.0
PAGES = ("/healthz", "/readyz", "/v1/model", "/v1/status", "/metrics")


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[str]:
    """Redis on this machine, which needs the password."""
    password = token_hex(32)
    settings = f"bind 127.0.0.1\nport {port}\nrequirepass {password}\ndir {folder}\n"
    server = subprocess.Popen(
        ["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert server.stdin
        with server.stdin as file:
            file.write(settings)
        yield password
    finally:
        server.kill()
        server.wait()


@contextmanager
def state_in_redis(folder: Path) -> Iterator[dict[str, Any]]:
    """Options of a head node whose address stays the same when it is started again."""
    redis_port, port = free_ports(2)
    with redis_server(folder, redis_port) as password:
        os.environ["RAY_REDIS_ADDRESS"] = f"127.0.0.1:{redis_port}"
        yield {"redis_password": password, "gcs_server_port": port}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            state_in_redis(folder) as state,
            nodes({"num_cpus": 0, **state}, {"num_cpus": 5}, {"num_cpus": 5}) as (head, *workers),
        ):
            counts = {"Encoder": 2, "Ingress": 2}
            deploy(document(folder, counts))
            lose(head, workers)
            counts["Encoder"] = 3
            deploy(document(folder, counts))
            within(120, lambda: all(ready(one) == 3 for one in workers))
    print("all nodes did their part")


def document(folder: Path, counts: dict[str, int]) -> dict[str, Any]:
    """What `serve deploy` would send."""
    application = {
        "name": "encoder",
        "import_path": "encoder_service.app:build",
        "args": options(folder).model_dump(),
        "deployments": [{"name": name, "num_replicas": each} for name, each in counts.items()],
    }
    return {"applications": [application]}


def processes() -> dict[str, int]:
    """Process ids of all replicas."""
    names = (name for each in ("Encoder", "Ingress", "Router") for name in replicas(each))
    return {name: process(name) for name in names}


def lose(head: Node, workers: Sequence[Node]) -> None:
    """The head is down for a while, under load. Then an encoder dies too."""
    within(60, lambda: all(ready(one) == 2 for one in workers))
    with Client(workers[0].http) as client:
        known = known_files(client, IMAGES)
    before, address = processes(), ray.get_runtime_context().gcs_address
    by_id = [partial(from_outside, one.http, reference=True) for one in workers]
    callers = Callers(
        [*outside(*workers), partial(from_outside, GRPC), *by_id], known, PAUSE_SECONDS
    )
    callers.start()

    def phase(name: str, may_fail: Collection[str] = ()) -> None:
        ended = callers.next_phase()
        taken = ended.latencies_seconds
        seconds = time.monotonic() - start
        print(f"{seconds:.0f} s, {name}: {len(taken)} answers, {max(taken):.1f} s at most", end=" ")
        print(dict(ended.failed), flush=True)
        assert not ended.wrong, ended.wrong[:3]
        assert not ended.failed.keys() - set(may_fail), (ended.failed, ended.messages)

    start = time.monotonic()
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    phase("before")
    ray.shutdown()
    start = time.monotonic()
    head.signal(signal.SIGKILL)
    head.end()
    for one in workers:  # the first of these pages since the start
        for page in PAGES:
            assert httpx.get(one.http + page, timeout=10).status_code == 200, page
    time.sleep(max(0, AWAY_SECONDS / 2 - (time.monotonic() - start)))
    phase("without a head")
    victim = min(name for name in before if "#Encoder#" in name)
    os.kill(before.pop(victim), signal.SIGKILL)
    time.sleep(max(0, AWAY_SECONDS - (time.monotonic() - start)))
    phase("without a head and an encoder", LOST_IDS)
    head.again()
    connect(address)
    phase("the head was started", LOST_IDS)
    within(60, lambda: running("encoder"))
    within(120, lambda: all(ready(one) == 2 for one in workers) and len(replicas("Encoder")) == 2)
    phase("the encoder was replaced", LOST_IDS)
    assert before.items() <= processes().items(), "no other replica restarts"
    within(60, lambda: len(callers.phase.latencies_seconds) > 20)
    phase("after")
    callers.stop()


def running(name: str) -> bool:
    application = serve.status().applications.get(name)
    return bool(application) and application.status == ApplicationStatus.RUNNING


if __name__ == "__main__":
    main()
