"""Ray clusters of several nodes on this machine, each with its own raylet and object store.

A process can be in only one Ray cluster at a time, so test_several_nodes.py runs these tests in
processes of their own.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from encoder_service.bench.cluster import free_ports, ha_proxy
from tests.processes import family

STORE_BYTES = 100_000_000


@dataclass(frozen=True)
class Node:
    id: str
    raylet: int
    """Its process id."""
    http: str
    """Where its proxy listens."""
    again: Callable[[], Node]
    """Starts another node with the same options and port, once this one is lost."""
    end: Callable[[], None]
    """Kills its raylet and, on the head, Ray's other servers too."""

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to all processes of the node."""
        for process in family(self.raylet):
            with suppress(ProcessLookupError):
                os.kill(process, number)


@contextmanager
def nodes(
    *wanted: dict[str, Any], proxies: str = "EveryNode", drains: bool = False
) -> Iterator[Sequence[Node]]:
    """A cluster, with this process on its first node. `wanted`: CPUs and resources of each node,
    and its `object_store_memory` if that is not STORE_BYTES. `drains`: Serve ends by itself, which
    takes about ten seconds; otherwise all children of this process are killed."""
    cluster = Cluster()
    ports = free_ports(len(wanted))
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def add(port: int, options: dict[str, Any]) -> Node:
        # All nodes share one address. The first node's proxy takes the port of `http_options`.
        os.environ["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(port)
        os.environ.update(ha_proxy(f"{os.environ['RAY_TMPDIR']}/{port}", most_files))
        options = {"object_store_memory": STORE_BYTES} | options
        node = cluster.add_node(include_dashboard=False, include_log_monitor=False, **options)
        (raylet,) = node.all_processes["raylet"]
        again = partial(add, port, options)
        end = partial(cluster.remove_node, node, allow_graceful=False)
        return Node(node.node_id, raylet.process.pid, f"http://127.0.0.1:{port}", again, end)

    try:
        found = [add(port, options) for port, options in zip(ports, wanted, strict=True)]
        connect(cluster.address)
        serve.start(
            proxy_location=proxies,
            http_options={"host": "127.0.0.1", "port": ports[0]},
        )
        yield found
        if drains:
            serve.shutdown()
    finally:
        ray.shutdown()
        for process in [] if drains else family(os.getpid())[1:]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        cluster.shutdown()


def connect(address: str) -> None:
    ray.init(address=address, namespace="serve", log_to_driver=False)


def node_of(actor: str) -> str:
    """The node of a replica, by its actor's name."""
    handle = ray.get_actor(actor, namespace="serve")
    found: str = ray.get(
        handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    )
    return found
