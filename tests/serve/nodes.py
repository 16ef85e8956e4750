"""Ray clusters of several nodes on this machine, each with a raylet and an object store of its own.

A process is in one Ray cluster at a time, so tests run these in another one: test_several_nodes.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from encoder_service.bench.cluster import SERVICERS, free_ports
from tests.processes import family

STORE_BYTES = 100_000_000


@dataclass(frozen=True)
class Node:
    id: str
    raylet: int
    """Its process."""
    http: str
    """Where its proxy listens."""
    grpc: str

    def signal(self, number: signal.Signals) -> None:
        """To all processes of the node."""
        for process in family(self.raylet):
            with suppress(ProcessLookupError):
                os.kill(process, number)


@contextmanager
def nodes(*wanted: dict[str, Any], proxies: str = "EveryNode") -> Iterator[Sequence[Node]]:
    """A cluster; this process is on its first node. `wanted`: CPUs and resources of each."""
    cluster, found = Cluster(), []
    for number, options in enumerate(wanted):
        http, grpc = free_ports(2)
        if number:  # all are on one address
            os.environ["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(http)
            os.environ["RAY_SERVE_WORKER_PROXY_GRPC_PORT"] = str(grpc)
        else:
            head = http, grpc
        node = cluster.add_node(object_store_memory=STORE_BYTES, include_dashboard=False, **options)
        (raylet,) = node.all_processes["raylet"]
        urls = f"http://127.0.0.1:{http}", f"grpc://127.0.0.1:{grpc}"
        found.append(Node(node.node_id, raylet.process.pid, *urls))
    ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
    serve.start(
        proxy_location=proxies,
        http_options={"host": "127.0.0.1", "port": head[0]},
        grpc_options={"port": head[1], "grpc_servicer_functions": SERVICERS},
    )
    try:
        yield found
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()


def node_of(actor: str) -> str:
    """Of a replica, by its actor's name."""
    handle = ray.get_actor(actor, namespace="serve")
    found: str = ray.get(
        handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    )
    return found
