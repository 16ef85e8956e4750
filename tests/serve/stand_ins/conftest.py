"""Three stand-in encoders behind one router, for all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from router.options import RouterOptions
from tests.serve.conftest import Cluster
from tests.serve.stand_in import encoders, routed

APP = "stand-ins"
OPTIONS = RouterOptions(exclude_seconds=2, stall_seconds=2)


@pytest.fixture(scope="package")
def encoder(cluster: Cluster) -> Iterator[DeploymentHandle]:
    yield serve.run(encoders(3), name=APP, route_prefix=None)
    serve.delete(APP)


@pytest.fixture(scope="package")
def router(encoder: DeploymentHandle) -> Iterator[DeploymentHandle]:
    yield serve.run(routed(encoder, OPTIONS), name="routing", route_prefix=None)
    serve.delete("routing")
