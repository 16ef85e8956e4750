"""On a GPU, at full width: packed families beside Qwen3-VL in several budgets, against float32."""

from __future__ import annotations

import pytest

from tests.gpu.test_tiled_graphs import worst_error
from tests.gpu.towers import cuda, shallow

pytestmark = pytest.mark.gpu

PRESETS = (
    *(
        "qwen35-27b",
        "qwen2vl-7b",
        "qwen25vl-7b",
        "exaone45-33b",
        "glm41v-9b",
        "glm-ocr",
        "glm53-flash",
        "hunyuan-ocr",
        "minimax-m3",
        "ernie45vl-28b",
        "kimivl-a3b",
        "kimik25",
    ),
    *(
        "pixtral-12b",
        "mistral-small31",
        "lighton-ocr",
        "paddleocr-vl",
        "videollama3-7b",
        "gemma4-31b",
        "minicpmv-4.6",
        "phi4-multimodal",
        "nemotron-3-nano-omni",
        "siglip2-base-naflex",
        "lfm25vl-1.6b",
    ),
)


@pytest.mark.parametrize("preset", PRESETS)
def test_budgets_equal_the_reference(preset: str) -> None:
    assert worst_error(shallow(preset), cuda()) < 2.5e-2
