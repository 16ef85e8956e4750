"""On a GPU, at full width: models that hear in every budget, after other packs, against float32."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from actors.engine.budgets import Segments, model_capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, capture
from actors.families.registry import read
from actors.media.patchify import patchifier_of
from actors.options import GraphOptions, ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item
from tests.checkpoints_audio import RATE, tones
from tests.gpu.towers import cuda, finished, relative_error, towers
from tests.parity.test_audio import PUBLISHED

pytestmark = pytest.mark.gpu

FEWER = {"encoder_layers": 4, "num_hidden_layers": 4, "num_blocks": 4}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_budgets_equal_the_reference(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shallow(kind)))
    options = ModelOptions(id=str(tmp_path), load_format="dummy", dtype="bfloat16", tower="audio")
    assert worst_error(read(options), cuda()) < 2e-2


def shallow(kind: str) -> dict[str, Any]:
    """config.json of a published model with few layers."""
    model_type = kind.removesuffix("-audio")
    config: dict[str, Any] = deepcopy(PUBLISHED[kind][0]) | {"model_type": model_type}
    thinker = config.get("thinker_config", config)
    thinker.get("audio_config", thinker).update(FEWER)
    return config


def worst_error(spec: ModelSpec, device: Device) -> float:
    """Relative, in bfloat16 against float32; the largest budget first, so that smaller ones find
    the patches of longer packs."""
    tower, reference = towers(spec, device)
    room = model_capacity(GraphOptions(steps_per_doubling=1), spec)
    (graphs,) = capture(tower, room, device, EncoderMetrics()).values()
    eager = GraphSet(reference, "default", (), Segments(0), device)
    patchifier, worst = patchifier_of(spec), 0.0
    for budget in reversed(graphs.budgets):
        random, items, left = Random(budget), list[Item](), budget
        while left and len(items) < room.items:
            seconds = random.uniform(0.1, min(30, max(0.2, 0.04 * left)))
            wave = torch.from_numpy(tones(seconds, RATE, len(items)))
            plan, patches = patchifier.patchify(wave.view(1, 1, -1))
            left -= plan.path_tokens[0]
            if left < 0:
                break
            items.append(Item(plan, patches.numpy()))
        plans = [item.plan for item in items]
        outputs, expected = graphs.run(budget, items), eager.run(None, items)
        with device.running():  # postprocess copies, after what computes
            rows = tower.postprocess([outputs], plans)
            exact = reference.postprocess([expected], plans)
        rows, exact = finished(rows), finished(exact)
        assert bool(rows.isfinite().all()), budget
        worst = max(worst, relative_error(rows, exact))
    print(f"{spec.id}: worst relative error {worst:.1e}, budgets {graphs.budgets}")
    return worst
