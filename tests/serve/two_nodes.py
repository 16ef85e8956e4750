"""A cluster of two nodes on this machine: encoders on one, the router on the other.

Run by test_two_nodes.py in a process of its own: a process is in one Ray cluster at a time.
"""

from __future__ import annotations

import asyncio

import ray
from ray import serve
from ray.cluster_utils import Cluster

from actors.store.shared_memory import here
from actors.types import Embedding, SharedBytes
from router.options import RouterOptions
from tests.serve.stand_in import BIG, encoders, item, right, routed, status

STORE_BYTES = 100_000_000


def main() -> None:
    """Fails unless small and large rows come from the other node."""
    cluster = Cluster()
    cluster.add_node(
        num_cpus=4,
        resources={"front": 1},
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
    )
    cluster.add_node(num_cpus=4, resources={"encoders": 1}, object_store_memory=STORE_BYTES)
    ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
    serve.start(proxy_location="Disabled")
    there = encoders(2, resources={"encoders": 0.1})
    app = routed(there, RouterOptions(), resources={"front": 0.1})
    router = serve.run(app, name="apart", route_prefix=None)
    nodes = {one.metadata["node"] for one in status(router).replicas}
    assert len(nodes) == 1
    assert ray.get_runtime_context().get_node_id() not in nodes, "the router is on our node"
    for kind in (b"item", BIG):
        media = [item(number, 100, kind + b"%d" % number) for number in range(6)]
        answers = router.encode.remote(media, "bfloat16", 30.0).result(timeout_s=30)
        for answer in answers:
            assert isinstance(answer, Embedding)
            assert isinstance(answer.data, SharedBytes) == (kind == BIG)
        assert right(media, [asyncio.run(here(answer)) for answer in answers])
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
    print("both nodes did their part")


if __name__ == "__main__":
    main()
