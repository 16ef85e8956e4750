"""The EC connector's halves, and the services that they fetch from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from encoder_service.api.http import build
from encoder_service.engines import vllm_patches
from tests.unit.connector_rig import Encoders, Halves, Keeping
from tests.unit.front_door import service
from tests.unit.proxied import in_a_thread
from tests.unit.vllm_half import ECConnectorRole, config, stand_in


@pytest.fixture
def connector_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """encoder_service.engines.vllm_connector as vLLM would load it."""
    stand_in(monkeypatch)
    monkeypatch.setattr(vllm_patches, "engine_is_here", False)
    import encoder_service.engines.vllm_connector as module

    yield module
    for name in ("vllm_connector", "vllm_local"):
        sys.modules.pop(f"encoder_service.engines.{name}", None)


@pytest.fixture
def url() -> Iterator[str]:
    """The service with its references, of which only the front door can be reached."""
    with in_a_thread(build(service(Keeping()))) as address:
        yield address


@pytest.fixture
def encoders(tmp_path: Path) -> Iterator[Encoders]:
    made = Encoders(tmp_path)
    yield made
    made.stack.close()


@pytest.fixture
def halves(connector_module: ModuleType, url: str) -> Iterator[Halves]:
    """Makes a connector of the scheduler and one of a worker."""
    made: list[Any] = []

    def make(address: str = "", **options: Any) -> tuple[Any, Any]:
        connect = connector_module.EncoderServiceConnector
        for role in ECConnectorRole:
            made.append(connect(config(address or url, **options), role))
        return made[-2], made[-1]

    yield make
    for one in made:
        one.shutdown()


@pytest.fixture(autouse=True)
def switch_interval() -> Iterator[None]:
    """Restored, because place local changes it for the whole process."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)
