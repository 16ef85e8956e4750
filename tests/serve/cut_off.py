"""The network between two nodes drops all packets. Run by test_several_nodes.py, as root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.cluster_utils import Cluster

from encoder_service.app import build
from encoder_service.bench.cluster import free_ports
from encoder_service.client import Client
from encoder_service.config import ServiceOptions, parse
from router.replicas.liveness import REACH_SECONDS
from tests.images import jpeg
from tests.processes import actors, family
from tests.serve.nodes import STORE_BYTES, node_of
from tests.serve.wide import wide
from tests.waiting import within

HERE, THERE = "10.77.0.1", "10.77.0.2"
IMAGES = [jpeg(side, 96 + place) for side in (64, 256) for place in range(8)]
"""Rows of 0.2 and of 1.2 MB."""
MOST_SECONDS = 4.0
"""Maximum time of requests on the lost node: half a second, 1.5 s for a probe, and a load."""


def options(folder: Path) -> ServiceOptions:
    """Each node has room for one encoder; the first one also for the ingress."""
    return parse(
        {
            "model": wide(folder).model_dump(),
            "encoder": {"replicas": 2, "num_gpus": 0, "num_cpus": 2, "device": "cpu"},
            "graphs": {"token_budgets": [16, 64]},
            "router": {"num_cpus": 0.1, "stall_seconds": 60},
            "ingress": {"num_cpus": 0.5, "grpc_port": None},
        }
    )


def shell(command: str) -> None:
    subprocess.run(command, shell=True, check=True)


@contextmanager
def second_network() -> Iterator[str]:
    """A network namespace with a cable to this one. Yields the prefix of commands inside."""
    with subprocess.Popen(["unshare", "--net", "sleep", "infinity"]) as owner:
        try:
            inside = f"nsenter --net=/proc/{owner.pid}/ns/net"
            time.sleep(0.5)
            shell(
                f"ip link add es0 type veth peer name es1 && ip link set es1 netns {owner.pid} && "
                f"ip addr add {HERE}/24 dev es0 && ip link set es0 up && "
                f"{inside} ip link set lo up && "
                f"{inside} ip addr add {THERE}/24 dev es1 && {inside} ip link set es1 up"
            )
            yield inside
        finally:
            owner.kill()


@contextmanager
def two_nodes(inside: str) -> Iterator[None]:
    cluster = Cluster()
    cluster.add_node(
        node_ip_address=HERE,
        num_cpus=3,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
    )
    ray_command = Path(sys.executable).with_name("ray")
    start = f"{inside} {ray_command} start --block --address {cluster.address}"
    room = f"--node-ip-address {THERE} --num-cpus 2 --object-store-memory {STORE_BYTES}"
    with subprocess.Popen(f"{start} {room}".split(), stdout=subprocess.DEVNULL) as other:
        try:
            ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
            within(60, lambda: len(ray.nodes()) == 2)
            yield
        finally:
            other.kill()


def main() -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        inside = stack.enter_context(second_network())
        stack.enter_context(two_nodes(inside))
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build(options(Path(folder)).model_dump()), name="encoder", route_prefix="/")
        with Client(url) as client:
            kept = client.encode(IMAGES, "float32", reference=True)
        far = next(one["NodeID"] for one in ray.nodes() if one["NodeManagerAddress"] == THERE)
        (lost,) = (one for one in actors() if "#Encoder#" in one and node_of(one) == far)
        ids = [one.reference for one in kept if one.reference.split(".")[0] in lost]
        assert {len(httpx.get(f"{url}/v1/embeddings/{one}").content) > 2**20 for one in ids} == {
            True,
            False,
        }
        taken = under_load(url, inside)
        print(f"the longest request took {max(taken):.1f} s")
        assert max(taken) < MOST_SECONDS
        answers, taken = [], []
        for one in ids:
            started = time.monotonic()
            answers.append(httpx.get(f"{url}/v1/embeddings/{one}", timeout=60))
            taken.append(time.monotonic() - started)
        print("ids of the lost node were answered in", *(f"{each:.1f}" for each in taken), "s")
        assert {one.status_code for one in answers} == {503}
        assert "encode the item again" in answers[0].json()["error"]["message"]
        assert max(taken[1:]) < REACH_SECONDS, "they wait for no probe"
        assert sum(taken) < MOST_SECONDS
        print("all nodes did their part", flush=True)


def end(status: int) -> None:
    """Ends this process and its children at once, because Ray would wait for the lost node."""
    for process in family(os.getpid())[1:]:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os._exit(status)


def under_load(url: str, inside: str) -> list[float]:
    """Returns the seconds of each request. The network is lost after two seconds; none may fail."""
    taken: list[float] = []
    end = time.monotonic() + 8

    def call() -> None:
        with Client(url, retries=0) as client:
            while (started := time.monotonic()) < end:
                client.encode(IMAGES[:4], "float32", reference=True)
                taken.append(time.monotonic() - started)

    callers = [threading.Thread(target=call) for _ in range(3)]
    for one in callers:
        one.start()
    time.sleep(2)
    before = len(taken)
    # Packets go to an address that nobody has, so that there is neither an error nor an answer.
    nobody = "lladdr 02:00:00:00:00:01 nud permanent"
    shell(f"ip neigh replace {THERE} dev es0 {nobody}")
    shell(f"{inside} ip neigh replace {HERE} dev es1 {nobody}")
    for one in callers:
        one.join()
    assert 0 < before < len(taken) - len(callers)
    return taken


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)
