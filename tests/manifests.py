"""Builds the Kubernetes manifests and validates them with the schemas of Kubernetes and KubeRay."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[1]
OVERLAYS = ROOT / "k8s" / "overlays"
KUBERNETES = "1.33"

Json = dict[str, Any]


@cache
def built(folder: Path) -> tuple[Json, ...]:
    """What `kubectl apply -k` would send. Skips the test without a kubectl that has Kustomize 5."""
    version = ask("version", "--client", "--output=json")
    if "kustomizeVersion" not in version or yaml.safe_load(version)["kustomizeVersion"] < "v5":
        pytest.skip("needs kubectl 1.27 or later, which has Kustomize 5")
    return tuple(yaml.safe_load_all(ask("kustomize", str(folder))))


def ask(*arguments: str) -> str:
    if shutil.which("kubectl") is None:
        return ""
    done = subprocess.run(["kubectl", *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def only(kind: str, documents: tuple[Json, ...]) -> Json:
    (found,) = [one for one in documents if one["kind"] == kind]
    return found


@cache
def rayservice_schema() -> jsonschema.Draft202012Validator:
    with gzip.open(ROOT / "tests" / "data" / "ray.io_rayservices.yaml.gz") as file:
        definition = yaml.load(file, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    return jsonschema.Draft202012Validator(closed(version["schema"]["openAPIV3Schema"]))


def closed(schema: Any) -> Any:
    """The schema, changed to reject unknown fields, which Kubernetes would drop."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made.setdefault("additionalProperties", False)
    return made


def validate(document: Json) -> None:
    """Raises the ValidationError of jsonschema or of kubernetes_validate."""
    if document["kind"] == "RayService":
        rayservice_schema().validate(document)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def quantity_bytes(text: str) -> int:
    units = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}
    for unit, size in units.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * size
    return int(text)
