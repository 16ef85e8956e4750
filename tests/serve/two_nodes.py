"""Stand-in encoders on one node, the router on the other. Run by test_several_nodes.py."""

from __future__ import annotations

import asyncio

from ray import serve

from actors.store.shared_memory import here
from actors.types import Embedding, SharedBytes
from router.options import RouterOptions
from tests.serve.nodes import nodes
from tests.serve.stand_in import BIG, encoders, item, right, routed, status


def main() -> None:
    """Fails unless small and large rows come from the other node."""
    front, back = {"resources": {"front": 1}}, {"resources": {"encoders": 1}}
    with nodes(front | {"num_cpus": 4}, back | {"num_cpus": 4}, proxies="Disabled") as (_, other):
        there = encoders(2, resources={"encoders": 0.1})
        app = routed(there, RouterOptions(), resources={"front": 0.1})
        router = serve.run(app, name="apart", route_prefix=None)
        assert {one.metadata["node"] for one in status(router).replicas} == {other.id}
        for kind in (b"item", BIG):
            media = [item(number, 100, kind + b"%d" % number) for number in range(6)]
            answers = router.encode.remote(media, "bfloat16", 30.0).result(timeout_s=30)
            for answer in answers:
                assert isinstance(answer, Embedding)
                assert isinstance(answer.data, SharedBytes) == (kind == BIG)
            assert right(media, [asyncio.run(here(answer)) for answer in answers])
    print("all nodes did their part")


if __name__ == "__main__":
    main()
