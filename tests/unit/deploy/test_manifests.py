"""k8s/: Kubernetes and KubeRay take what is sent to a cluster, and it serves what configs/ say."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml

from encoder_service.commands.check import check_serve, check_timeouts
from encoder_service.commands.rayservice import patch
from encoder_service.config import counted, parse
from tests.manifests import OVERLAYS, ROOT, Json, built, only, quantity_bytes, validate

NAMES = ("dev", "gpu", "ha")
SOURCES = {"dev": "tiny", "gpu": "qwen3vl-fleet", "ha": "qwen3vl-fleet"}
REFUSED = (jsonschema.ValidationError, kubernetes_validate.ValidationError)


def groups(cluster: Json) -> list[Json]:
    """Head and workers."""
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("name", NAMES)
def test_every_manifest_is_valid_and_named_once(name: str) -> None:
    documents = built(OVERLAYS / name)
    for document in documents:
        validate(document)
    names = [(one["kind"], one["metadata"]["name"]) for one in documents]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("RayService", ("spec", "serveConfigV3"), ""),
        ("RayService", ("spec", "rayClusterConfig", "authOptions", "mode"), "tokens"),
        ("RayService", ("spec", "rayClusterConfig", "rayVersion"), 2.6),
        ("RayService", ("spec", "rayClusterConfig", "headGroupSpec"), {}),
        ("NetworkPolicy", ("spec", "podSelector"), "all"),
        ("ConfigMap", ("datum",), {}),
    ],
)
def test_the_validation_finds_mistakes(kind: str, path: tuple[str, ...], value: Any) -> None:
    found = next(one for one in built(OVERLAYS / "gpu") if one["kind"] == kind)
    broken = place = copy.deepcopy(found)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(REFUSED):
        validate(broken)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_served_is_the_configuration(name: str) -> None:
    source = ROOT / "configs" / f"{SOURCES[name]}.yaml"
    spec = only("RayService", built(OVERLAYS / name))["spec"]
    served = yaml.safe_load(spec["serveConfigV2"])
    applications = yaml.safe_load(source.read_text())["applications"]
    applications[0]["args"]["ingress"]["grpc_host"] = "0.0.0.0"
    assert served["applications"] == applications
    assert served["http_options"]["host"] == "0.0.0.0"
    check_serve(served, name)
    options = parse(served["applications"][0]["args"])
    check_timeouts(served, options.limits.timeout_seconds, name)
    if name != "ha":
        written = (OVERLAYS / name / "serve-config.yaml").read_text()
        assert written == patch(source), "run `make manifests`"


@pytest.mark.parametrize("name", NAMES)
def test_replicas_find_room(name: str) -> None:
    spec = only("RayService", built(OVERLAYS / name))["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    options = counted(parse(application["args"]), application)
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    requests = workers["template"]["spec"]["containers"][0]["resources"]["requests"]
    encoder = options.encoder
    if encoder.num_gpus:
        per_worker = int(requests["nvidia.com/gpu"] / encoder.num_gpus)
        assert workers["minReplicas"] * per_worker == encoder.least_replicas
        assert workers["maxReplicas"] * per_worker == encoder.most_replicas
    router, ingress = options.router, options.ingress
    cpus = encoder.least_replicas * encoder.num_cpus
    cpus += router.replicas * router.num_cpus + ingress.replicas * ingress.num_cpus
    assert cpus <= workers["minReplicas"] * float(requests["cpu"])
    # The head does no work, and is not where clients go.
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert spec["excludeHeadPodFromServeSvc"]
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", NAMES)
def test_pods_are_confined_and_have_room_for_the_object_store(name: str) -> None:
    for group in groups(only("RayService", built(OVERLAYS / name))["spec"]["rayClusterConfig"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        volumes = {one["name"]: one for one in pod["volumes"]}
        shared = quantity_bytes(volumes["shared-memory"]["emptyDir"]["sizeLimit"])
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
        # Ray falls back to a disk where the object store does not fit into nine tenths of it.
        assert int(group["rayStartParams"]["object-store-memory"]) <= 0.95 * shared
        assert shared <= quantity_bytes(limits["memory"]) / 2
        assert limits["memory"] == requests["memory"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {one["name"] for one in container["volumeMounts"]} == volumes.keys()
        assert "namespace" in only("RayService", built(OVERLAYS / name))["metadata"]


@pytest.mark.parametrize("name", NAMES)
def test_workers_are_ready_when_the_service_is_and_drain_before_they_end(name: str) -> None:
    service = only("RayService", built(OVERLAYS / name))["spec"]
    (workers,) = service["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    options = parse(yaml.safe_load(service["serveConfigV2"])["applications"][0]["args"])
    # Only a pod with an ingress listens there, and only such pods get traffic.
    assert container["readinessProbe"]["grpc"] == {"port": options.ingress.grpc_port}
    command, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    assert f"/usr/local/bin/{command}" in (ROOT / "k8s" / "Dockerfile").read_text()
    assert int(seconds) < pod["terminationGracePeriodSeconds"]
    assert options.encoder.shutdown_seconds < int(seconds)
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    served = yaml.safe_load(service["serveConfigV2"])
    assert ports["serve"] == served["http_options"]["port"]
    assert ports["serve-grpc"] == options.ingress.grpc_port


def test_the_fleet_asks_for_api_keys_and_has_no_secret_of_its_own() -> None:
    documents = built(OVERLAYS / "ha")
    assert not [one for one in documents if one["kind"] == "Secret"]
    spec = only("RayService", documents)["spec"]
    options = parse(yaml.safe_load(spec["serveConfigV2"])["applications"][0]["args"])
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if "secret" in one]
    (mount,) = [one for one in pod["containers"][0]["volumeMounts"] if one["name"] == "tokens"]
    assert volume["secret"] == {"secretName": "encoder-tokens", "optional": False}
    assert options.auth.token_sha256_file == f"{mount['mountPath']}/token_sha256"
    assert spec["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]


@pytest.mark.parametrize("name", NAMES)
def test_policies_and_budgets_name_the_pods(name: str) -> None:
    documents = built(OVERLAYS / name)
    cluster = only("RayService", documents)["spec"]["rayClusterConfig"]
    templates = [group["template"] for group in groups(cluster)]
    templates += [one["spec"]["template"] for one in documents if one["kind"] == "StatefulSet"]
    labels = [template["metadata"]["labels"] for template in templates]
    for document in documents:
        selector = {"PodDisruptionBudget": "selector", "NetworkPolicy": "podSelector"}.get(
            document["kind"]
        )
        if selector:
            wanted = document["spec"][selector]["matchLabels"].items()
            assert any(wanted <= label.items() for label in labels), document["metadata"]


def test_the_drain_ends_at_once_where_ray_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ray").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = [str(ROOT / "k8s" / "drain.sh"), "600"]
    subprocess.run(script, env=environment, check=True, timeout=60)
