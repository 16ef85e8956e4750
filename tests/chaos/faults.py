"""What is done to a running service, one thing at a time. Each returns when the fault is set.

`recovered` is asked afterwards, until it is true: then the service is as it was.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import ray
import simplejpeg
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from encoder_service.bench.cluster import Cluster
from tests.images import jpeg
from tests.processes import process

Recovered = Callable[[], bool]
ENCODERS = 3
FILL_SECONDS = 5.0
RUDE_CLIENTS = 40
LARGE_IMAGES = 24
LARGE_PIXELS = (6400, 6200)
"""Just within `limits.max_pixels`."""


def replicas(deployment: str) -> set[str]:
    """Names of the living actors of a deployment of the application."""
    named = ray.util.list_named_actors(all_namespaces=True)
    prefix = f"SERVE_REPLICA::encoder#{deployment}#"
    return {each["name"] for each in named if each["name"].startswith(prefix)}


def signalled(deployment: str, number: signal.Signals) -> Callable[[Cluster], Recovered]:
    """A signal to one replica; it is over when another has taken its place."""

    def fault(where: Cluster) -> Recovered:
        before = replicas(deployment)
        victim = min(before)
        os.kill(process(victim), number)
        return replaced(where, deployment, before, victim)

    return fault


def replaced(where: Cluster, deployment: str, before: set[str], victim: str) -> Recovered:
    def recovered() -> bool:
        now = replicas(deployment)
        return len(now) == len(before) and victim not in now and ready(where)

    return recovered


def context_lost(where: Cluster) -> Recovered:
    """A kernel of one encoder fails, and with it everything that its process does on the GPU."""
    before = replicas("Encoder")
    victim = min(before)
    actor = ray.get_actor(victim, namespace="serve")
    actor.__ray_call__.remote(out_of_range)
    return replaced(where, "Encoder", before, victim)


def out_of_range(_: object) -> None:
    """Runs in an encoder."""
    import torch

    torch.zeros(4, device="cuda")[torch.tensor([5], device="cuda")]


def proxy_killed(where: Cluster) -> Recovered:
    """The process that listens: connections break, and new ones are refused for a while. On several
    nodes: the one on this node."""
    own = ray.get_runtime_context().get_node_id()
    (name,) = (
        each["name"]
        for each in ray.util.list_named_actors(all_namespaces=True)
        if "SERVE_PROXY_ACTOR" in each["name"] and each["name"].endswith(own)
    )
    os.kill(process(name), signal.SIGKILL)
    return lambda: ready(where)


def store_filled(where: Cluster) -> Recovered:
    """Somebody else takes most of each node's object store for a while."""
    fill: Any = ray.remote(filled)
    ray.get(
        [
            fill.options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            ).remote(int(node["Resources"]["object_store_memory"]))
            for node in ray.nodes()
            if node["Alive"]
        ]
    )
    return lambda: ready(where)


def filled(store_bytes: int) -> None:
    """Runs on each node."""
    held = [ray.put(np.zeros(store_bytes // 10, np.uint8)) for _ in range(8)]
    time.sleep(FILL_SECONDS)
    held.clear()


def clients_leave(where: Cluster) -> Recovered:
    """Clients that promise a body and go, and clients that go before the answer."""
    address = urlsplit(where.http)
    head = b"POST /v1/encode HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    image = jpeg(256, 256)
    for number in range(RUDE_CLIENTS):
        with socket.create_connection((address.hostname, address.port), timeout=10) as one:
            one.sendall(head % len(image) + (image if number % 2 else image[:100]))
    return lambda: ready(where)


def clients_have_no_time(where: Cluster) -> Recovered:
    """Requests that end before they can be done."""
    files = [("image", jpeg(512, 512))] * 8
    for _ in range(RUDE_CLIENTS):
        options = {"options": '{"timeout_s": 0.02}'}
        httpx.post(f"{where.http}/v1/encode", files=files, data=options, timeout=60)
    return lambda: ready(where)


def decoding_stalls(where: Cluster) -> Recovered:
    """More large images than there are threads to decode them."""
    width, height = LARGE_PIXELS
    image = simplejpeg.encode_jpeg(np.full((height, width, 1), 99, np.uint8), colorspace="GRAY")
    # Each like no other, or the router would join them.
    files = [("image", image + bytes([number])) for number in range(LARGE_IMAGES)]
    smallest = {"options": '{"dtype": "float8_e4m3"}'}
    answer = httpx.post(f"{where.http}/v1/encode", files=files, data=smallest, timeout=120)
    if answer.status_code != 504:  # the deadline of 60 s, on a machine that is busy otherwise
        answer.raise_for_status()
    return lambda: ready(where)


def ready(where: Cluster) -> bool:
    """All encoders may be given work, as far as the ingress knows."""
    try:
        answer = httpx.get(f"{where.http}/readyz", timeout=5)
    except httpx.HTTPError:
        return False
    return answer.status_code == 200 and answer.json()["ready_replicas"] == ENCODERS


FAULTS: Mapping[str, Callable[[Cluster], Recovered]] = {
    "nothing": lambda where: lambda: ready(where),
    "an encoder is killed": signalled("Encoder", signal.SIGKILL),
    "an encoder hangs": signalled("Encoder", signal.SIGSTOP),
    "an ingress is killed": signalled("Ingress", signal.SIGKILL),
    "the router is killed": signalled("Router", signal.SIGKILL),
    "the proxy is killed": proxy_killed,
    "decoding stalls": decoding_stalls,
    "the object store is full": store_filled,
    "clients leave": clients_leave,
    "clients have no time": clients_have_no_time,
}
GPU_FAULTS: Mapping[str, Callable[[Cluster], Recovered]] = {"a GPU context is lost": context_lost}
