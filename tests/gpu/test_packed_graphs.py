"""On a GPU, at full size: packed families beside Qwen3-VL in every budget, against float32."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_tiled_graphs import worst_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "preset", ["qwen35-27b", "qwen2vl-7b", "qwen25vl-7b", "glm41v-9b", "kimivl-a3b"]
)
def test_every_budget_equals_the_reference(preset: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from actors.cuda import CudaDevice

    assert worst_error(preset, CudaDevice()) < 5e-2
    torch.cuda.empty_cache()
