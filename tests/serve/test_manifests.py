"""The configurations in the overlays of k8s/ can be deployed, in the way that KubeRay does it."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from time import monotonic, sleep
from typing import Any

import httpx
import pytest
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from encoder_service import Client
from tests.images import photograph
from tests.manifests import OVERLAYS
from tests.processes import actors
from tests.serve.conftest import Cluster
from tests.waiting import within

pytestmark = pytest.mark.extended

SMALL: dict[str, Any] = {
    "num_gpus": 0,
    "num_cpus": 0.1,
    "device": "cpu",
    "drain_timeout_seconds": 2,
}
"""Encoder options for a machine without a GPU."""


def served(overlay: str) -> dict[str, Any]:
    """serveConfigV2 as written in the overlay."""
    written = yaml.safe_load((OVERLAYS / overlay / "serve-config.yaml").read_text())
    document: dict[str, Any] = yaml.safe_load(written["spec"]["serveConfigV2"])
    return document


def deploy(document: dict[str, Any]) -> None:
    """Sends the document to the controller, and waits until it runs."""
    _get_global_client().deploy_apps(ServeDeploySchema(**document))
    (application,) = document["applications"]
    deadline = monotonic() + 240
    while True:
        status = serve.status().applications.get(application["name"])
        if status and status.status == ApplicationStatus.RUNNING:
            return
        assert status is None or status.status != ApplicationStatus.DEPLOY_FAILED, status.message
        assert monotonic() < deadline, status
        sleep(0.5)  # each look takes time from the controller


def changed_while_it_runs(cluster: Cluster, document: dict[str, Any]) -> None:
    """Changes limits and a policy under load: nothing restarts and no request fails. Nor does a
    wrong `user_config` change anything."""
    (application,) = document["applications"]
    before, seen, ended = actors(), list[int](), Event()

    def load() -> None:
        with Client(cluster.http) as client:
            while not ended.is_set():
                client.encode([photograph("coffee.png")])
                seen.append(1)

    def most_items() -> int:
        model = httpx.get(f"{cluster.http}/v1/model", timeout=60).json()
        found: int = model["limits"]["max_items"]
        return found

    with ThreadPoolExecutor() as pool:
        loads = [pool.submit(load) for _ in range(2)]
        try:
            live = {"limits": {"max_items": 7}, "router": {"policy": "random"}}
            for user_config in (live, {"limits": {"max_items": 0}}):
                application["deployments"][1]["user_config"] = user_config
                deploy(document)
                within(60, lambda: most_items() == 7)
            done = len(seen)
            within(60, lambda: len(seen) > done + 3)
        finally:
            ended.set()
        for one in loads:
            one.result()
    assert actors() == before, "nothing restarts"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("overlay", ["dev", pytest.param("gpu", marks=pytest.mark.slow)])
def test_what_an_overlay_serves_deploys(cluster: Cluster, tmp_path: Path, overlay: str) -> None:
    document = served(overlay)
    (application,) = document["applications"]
    args, token = application["args"], None
    args["encoder"].update(SMALL)
    if overlay == "dev":
        application["deployments"][0]["num_replicas"] = 1
    else:
        args["model"] = served("dev")["applications"][0]["args"]["model"]
        file = tmp_path / "token_sha256"
        token = "let me in"
        file.write_text(hashlib.sha256(token.encode()).hexdigest())
        args["auth"]["token_sha256_file"] = str(file)
    try:
        deploy(document)
        assert httpx.get(f"{cluster.http}/readyz", timeout=60).status_code == 200
        with Client(cluster.http, token=token) as client:
            (embedding,) = client.encode([photograph("coffee.png")])
            assert embedding.shape[0] > 0
        if overlay == "dev":
            before = set(actors())
            logs = {"log_level": "DEBUG", "enable_access_log": False}
            application["deployments"] = [
                {"name": "Encoder", "num_replicas": 2, "health_check_period_s": 2},
                {"name": "Ingress", "max_ongoing_requests": 900, "logging_config": logs},
            ]
            deploy(document)
            within(60, lambda: httpx.get(f"{cluster.http}/readyz").json() == {"ready_replicas": 2})
            assert before < set(actors()), "nothing restarts"
            changed_while_it_runs(cluster, document)
        if token:
            assert httpx.get(f"{cluster.http}/v1/model", timeout=60).status_code == 401
    finally:
        serve.delete(application["name"])
