"""Services that tests deploy on the cluster of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve

from encoder_service.app import build

FEW = {"num_cpus": 0.1}
LEAST: dict[str, dict[str, Any]] = {
    "encoder": {"num_gpus": 0, "device": "cpu", **FEW},
    "router": FEW,
    "ingress": FEW,
}


@contextmanager
def deployed(name: str, model: dict[str, Any], **sections: Any) -> Iterator[None]:
    """Runs a service on the CPU until the block ends. `sections`: of its configuration; those in
    LEAST need only what differs."""
    least = {section: values | sections.get(section, {}) for section, values in LEAST.items()}
    try:
        serve.run(build({"model": model} | sections | least), name=name, route_prefix="/")
        yield
    finally:
        serve.delete(name)
