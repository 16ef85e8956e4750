"""One tiny service for all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.conftest import Cluster
from tests.serve.tiny import running

APP = "front-door"


@pytest.fixture(scope="package", autouse=True)
def service(cluster: Cluster) -> Iterator[None]:
    with running(APP):
        yield
