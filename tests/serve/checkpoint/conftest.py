"""A service with a checkpoint, for all modules of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from actors.models.load import load
from actors.options import ModelOptions
from tests.checkpoints import write_qwen3vl
from tests.parity.conftest import Pair
from tests.serve.conftest import Cluster
from tests.serve.deployed import deployed
from tests.serve.tiny import GRPC_PORT

APP = "encoder"
"""The name in the documentation's examples."""
BUDGETS = (16, 64, 256)


@pytest.fixture(scope="package", autouse=True)
def served(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two replicas of a small random Qwen3-VL, and transformers' model of the same folder."""
    folder = tmp_path_factory.mktemp("served")
    reference = write_qwen3vl(folder)
    model = {"id": str(folder), "dtype": "float32"}
    sections = {
        "encoder": {"replicas": 2},
        "graphs": {"token_budgets": BUDGETS},
        "ingress": {"grpc_port": GRPC_PORT},
    }
    with deployed(APP, model, **sections):
        yield Pair(reference, load(ModelOptions.model_validate(model), torch.device("cpu")), folder)
