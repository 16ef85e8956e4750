"""Checkpoints that the tests of this folder share: written once, never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.models.load import load
from actors.models.tower import Tower
from actors.options import ModelOptions
from tests.checkpoints import MODEL_TYPES, write
from tests.parity.table import SEEN, rows


@dataclass(frozen=True, eq=False)  # each is itself: some references cannot be hashed
class Pair:
    """The same weights in transformers' model and in our tower."""

    reference: Any
    tower: Tower
    folder: Path
    model_type: str = "qwen3_vl"


def made(model_type: str, factory: pytest.TempPathFactory) -> Pair:
    """A checkpoint of this type, float32 on the CPU."""
    folder = factory.mktemp(model_type)
    reference = write(folder, model_type)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    return Pair(reference, tower, folder, model_type)


@pytest.fixture(scope="session", params=MODEL_TYPES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Each type of checkpoint."""
    return made(request.param, tmp_path_factory)


@pytest.fixture(scope="session", params=["qwen3_vl", "qwen3_vl_moe"])
def qwen3vl(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Qwen3-VL, dense and MoE."""
    return made(request.param, tmp_path_factory)


@pytest.fixture(autouse=True)
def largest_errors(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Reports the errors that a test saw: with pytest-xdist it ran in another process."""
    SEEN.clear()
    yield
    for family, error in SEEN.items():
        record_property(family, error)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The largest errors that this run saw, beside what the README says."""
    largest: dict[str, float] = {}
    for report in terminalreporter.getreports(""):  # of fixtures' ends
        for family, error in getattr(report, "user_properties", ()):
            if family in rows():
                largest[family] = max(error, largest.get(family, 0.0))
    for family, error in largest.items():
        terminalreporter.write_line(f"{family}: {error:.1e} (README: {rows()[family].error:.0e})")
