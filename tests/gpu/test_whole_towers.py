"""On a GPU, whole: every family with all its layers, poisoned, against float32. Takes a minute.

pytest -s -m 'gpu and slow' tests/gpu/test_whole_towers.py
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from math import prod
from time import perf_counter

import pytest
import torch

from actors.engine.device import Device
from actors.models import load
from actors.spec.model_spec import ModelSpec
from tests.gpu import (
    test_packed_graphs,
    test_step_graphs,
    test_tiled_graphs,
    test_two_path_graphs,
)
from tests.gpu.towers import cuda, published

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PRESETS = (
    *("qwen3vl-2b", "qwen3vl-8b", *test_packed_graphs.PRESETS),
    *test_tiled_graphs.PRESETS,
    *(*test_two_path_graphs.PRESETS, *test_step_graphs.PRESETS),
)
BOUND, BOUND_OF = 3e-2, {"glm41v-9b": 4e-2}
"""Relative. Seen of 23 to 36 layers: 0.9e-2 to 2.0e-2, of 45 and 47 1.6e-2 and 1.7e-2, of GLM's 24
2.7e-2: it has more of it with four layers, too."""


@pytest.fixture(autouse=True)
def _emptied() -> Iterator[None]:
    """What one tower took is there for the next."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_whole_tower_equals_the_reference(preset: str) -> None:
    device, model, started = cuda(), published(preset), perf_counter()
    count, numbers = layers(model), sum(map(prod, expected(model).values()))
    torch.cuda.reset_peak_memory_stats()
    error = worst_error(model, device)
    print(
        f"{preset}: {count} layers, {numbers / 1e9:.2f}e9 weights, {error:.1e}, "
        f"{perf_counter() - started:.1f} s, {torch.cuda.max_memory_reserved() / 1e9:.0f} GB",
        flush=True,
    )
    assert error < BOUND_OF.get(preset, BOUND)


def worst_error(model: ModelSpec, device: Device) -> float:
    """Relative, over two or three budgets of each path, in bfloat16 against float32."""
    if model.id in test_two_path_graphs.PRESETS:
        pair = test_two_path_graphs.ocr(model, device)
        return test_two_path_graphs.worst_error(pair, device, 4)
    if len(model.paths) > 1:
        return test_step_graphs.worst_error(model, device, most=4)
    return test_tiled_graphs.worst_error(model, device, packs=1)


def expected(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights of the tower, by their names."""
    return dict(load.family_of(model).expected)


def layers(model: ModelSpec) -> int:
    """Of the tower, or of both its towers."""
    found = (
        re.match(r"(.*\b(?:blocks|resblocks|layers?)\.\d+)\.", name) for name in expected(model)
    )
    return len({one[1] for one in found if one})
