"""A tower holds its layers' weights once: in the form that the blocks have them in."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from actors.families import registry
from actors.models.layers.block import Attend, Blocks, BlockWeights, ReferenceBlocks, Style
from actors.models.load import build, tensors
from actors.options import ModelOptions
from tests.small_presets import write_small


@pytest.mark.parametrize("preset", ["qwen25vl-7b", "clip-vit-l-336"])
def test_the_weights_as_they_were_read_are_let_go(preset: str, tmp_path: Path) -> None:
    read: list[weakref.ref[torch.Tensor]] = []

    def of_another_form(
        weights: Sequence[BlockWeights],
        style: Style,
        attention: Attend | Sequence[Attend],
        taps: Sequence[int],
    ) -> Blocks:
        read.extend(weakref.ref(layer.up.weight) for layer in weights)
        return ReferenceBlocks(deepcopy(weights), style, attention, taps)

    options = ModelOptions(id=str(write_small(tmp_path, preset)), load_format="dummy")
    model, cpu = registry.read(options), torch.device("cpu")
    tower = build(model, tensors(options, model, cpu), cpu, of_another_form)
    assert len(read) == 3
    assert not any(weight() is not None for weight in read), tower
