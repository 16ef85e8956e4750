"""The whole service over HTTP while encoders die and everything is replaced: nobody notices."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from ray import serve

from actors.families.registry import read
from actors.options import ModelOptions
from encoder_service import Client
from encoder_service.app import build
from encoder_service.client import ServiceError
from tests.images import jpeg
from tests.serve.conftest import Cluster
from tests.serve.deployed import deployed
from tests.serve.tiny import ARGS
from tests.waiting import within

pytestmark = pytest.mark.extended

CALLERS = 3
PAUSE_SECONDS = 0.2
"""Of a caller between two requests, on average."""
SIDES = (48, 64, 96, 120, 160, 200, 256)
TOLERANCE = 1e-3
"""For float32: an item may share other packs than when it was alone."""


def args(cache_bytes: int = 0) -> dict[str, Any]:
    """Two ingress replicas, each with its router, and three encoders that are replaced quickly."""
    made = copy.deepcopy(ARGS)
    del made["auth"], made["limits"]
    made["encoder"] |= {"replicas": 3, "health_check_period_seconds": 1}
    made["cache"] = {"max_bytes": cache_bytes}
    made["ingress"] |= {"replicas": 2}
    return made


@pytest.fixture(scope="module")
def files(cluster: Cluster) -> Iterator[dict[bytes, np.ndarray[Any, Any]]]:
    """Images, and the rows that the service returns for each alone."""
    images = [jpeg(side, SIDES[-1 - i]) for i, side in enumerate(SIDES)]
    with deployed("hardy", **args()), Client(cluster.http) as client:
        yield {image: client.encode([image], dtype="float32")[0].numpy() for image in images}


@contextmanager
def load(url: str, files: dict[bytes, np.ndarray[Any, Any]]) -> Iterator[None]:
    """Callers send before, during and after the block. All answers must be right. They pause
    briefly between requests: without, they would slow down the start of what replaces the dead."""
    stop = threading.Event()
    outcomes: list[str] = []

    def call(random: Random) -> None:
        with Client(url, retries=0) as client:
            while not stop.wait(random.uniform(0, 2 * PAUSE_SECONDS)):
                images = random.choices(list(files), k=random.randint(1, 4))
                try:
                    answers = client.encode(images, dtype="float32")
                    pairs = zip(images, answers, strict=True)
                    right = all(np.abs(a.numpy() - files[i]).max() < TOLERANCE for i, a in pairs)
                    outcomes.append("right" if right else "wrong rows")
                except Exception as error:
                    outcomes.append(repr(error)[:300])

    callers = [threading.Thread(target=call, args=(Random(seed),)) for seed in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        within(60, lambda: len(outcomes) > 2 * CALLERS)
        yield
        after = len(outcomes) + 2 * CALLERS
        within(60, lambda: len(outcomes) > after)
    finally:
        stop.set()
        for caller in callers:
            caller.join(timeout=60)
    assert set(outcomes) == {"right"}, [outcome for outcome in outcomes if outcome != "right"]


def encoders() -> list[str]:
    """Names of the actors of all encoder replicas that Ray knows to be alive."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [a["name"] for a in named if a["name"].startswith("SERVE_REPLICA::hardy#Encoder#")]


def ready_replicas(url: str) -> int:
    """How many encoders the ingress would give work to."""
    count: int = httpx.get(f"{url}/readyz", verify=False).json()["ready_replicas"]
    return count


@pytest.mark.usefixtures("files")
def test_every_encoder_tells_which_model_it_has() -> None:
    encoder = serve.get_deployment_handle("Encoder", "hardy")
    told = list(encoder.broadcast("record_replica_metadata").results(timeout_s=10))
    spec = read(ModelOptions(**ARGS["model"]))
    assert {one["fingerprint"] for one in told} == {spec.fingerprint}
    assert len({one["rpc"]["unix"] for one in told}) == 3, "each listens for itself"


@pytest.mark.parametrize("how", ["sigkill", "ray_kill"])
def test_an_encoder_dies(
    cluster: Cluster, files: dict[bytes, np.ndarray[Any, Any]], how: str
) -> None:
    with load(cluster.http, files):
        before = encoders()
        actor = ray.get_actor(before[0], namespace="serve")
        if how == "sigkill":
            os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        else:
            ray.kill(actor)
        within(60, lambda: len(set(encoders()) - set(before)) == 1)
        within(60, lambda: ready_replicas(cluster.http) == 3)


def test_references_are_found_through_every_ingress_until_their_replica_ends(
    cluster: Cluster, files: dict[bytes, np.ndarray[Any, Any]]
) -> None:
    with Client(cluster.http) as client:
        kept = client.encode(list(files), "float32", reference=True)
        assert len({one.reference for one in kept}) == len(files)
        for _ in range(4):  # connections go to either ingress
            with Client(cluster.http) as another, Client(f"grpc://{cluster.grpc}") as over_grpc:
                for one, rows in zip(kept, files.values(), strict=True):
                    found = another.fetch(one.reference)
                    assert np.abs(found.numpy() - rows).max() < TOLERANCE
                    assert (found.digest, found.grid_thw) == (one.digest, one.grid_thw)
                    assert over_grpc.fetch(one.reference).data == found.data
        victim = kept[0].reference.split(".")[0]
        actor = ray.get_actor(f"SERVE_REPLICA::hardy#Encoder#{victim}", namespace="serve")
        ray.kill(actor)
        within(40, lambda: ready_replicas(cluster.http) == 3 and victim not in str(encoders()))
        for one in kept:
            if one.reference.startswith(victim):
                within(20, lambda one=one: gone(client, one.reference))  # type: ignore[misc]
            else:
                client.release(one.reference)
                assert gone(client, one.reference)


def gone(client: Client, reference: str) -> bool:
    """Whether it is not found. False if its replica merely cannot be reached."""
    with pytest.raises(ServiceError) as raised:
        client.fetch(reference)
    assert raised.value.type in ("not_found", "unavailable")
    return raised.value.status == 404


def test_everything_is_replaced(cluster: Cluster, files: dict[bytes, np.ndarray[Any, Any]]) -> None:
    before = encoders()
    with load(cluster.http, files):
        serve.run(build(args(cache_bytes=10**7)), name="hardy", route_prefix="/")
        assert not set(encoders()) & set(before)
