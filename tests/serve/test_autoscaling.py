"""Encoders are added for outstanding patches and removed after them; no request fails meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from ray import serve

from encoder_service import Client
from tests.images import PHOTOGRAPHS, jpeg
from tests.serve.conftest import Cluster
from tests.serve.tiny import ARGS, running
from tests.waiting import within

pytestmark = pytest.mark.slow

SCALING = {
    "max_replicas": 3,
    "target_patches": 1000,
    "look_back_seconds": 2,
    "upscale_delay_seconds": 1,
    "downscale_delay_seconds": 1,
}


def encoders() -> int:
    """How many replicas are running."""
    states = serve.status().applications["scaled"].deployments["Encoder"].replica_states
    return int(states.get("RUNNING", 0))


@pytest.mark.timeout(600)
def test_replicas_follow_the_load(cluster: Cluster) -> None:
    encoder = {key: value for key, value in ARGS["encoder"].items() if key != "replicas"}
    images = [jpeg(512, 512, name) for name in PHOTOGRAPHS[:4]]  # 1024 patches each
    stop = Event()

    def load() -> int:
        """Sends requests; returns how many were answered. Raises if one failed."""
        answered = 0
        with Client(cluster.http) as client:
            while not stop.is_set():
                assert len(client.encode(images)) == len(images)
                answered += 1
        return answered

    with running("scaled", encoder=encoder | {"autoscaling": SCALING}, auth={}):
        assert encoders() == 1
        with ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(load) for _ in range(4)]
            try:
                within(200, lambda: encoders() == 3 or any(one.done() for one in loads))
            finally:
                stop.set()
            assert all(one.result() for one in loads)
        within(200, lambda: encoders() == 1)
