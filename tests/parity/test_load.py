"""Loading from what transformers saves: only the tower is read, only what holds it is needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from actors.errors import CheckpointError
from actors.models.load import load
from actors.options import ModelOptions
from actors.weights import INDEX
from tests.checkpoints import write
from tests.parity.conftest import Pair
from tests.parity.test_tower import encode, random_patches, theirs


def same_rows(pair: Pair, folder: Path) -> bool:
    """Whether the tower in a folder computes what the pair's reference does."""
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    plan = pair.tower.patchify(torch.zeros(3, 96, 64, dtype=torch.uint8))[0]
    patches = random_patches(pair.tower, [plan])
    ours = encode(tower, [plan], patches, plan.tokens, segments=1)
    return bool((ours - theirs(pair, [plan], patches)).abs().max() < 1e-4)


def test_shards_of_the_language_model_are_not_needed(qwen3vl: Pair, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen3vl.folder, tmp_path / "copy"))
    shards: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    visual = {shard for name, shard in shards.items() if name.startswith("model.visual.")}
    others = set(shards.values()) - visual
    assert others
    for shard in others:
        (folder / shard).unlink()
    assert same_rows(qwen3vl, folder)


def test_a_checkpoint_of_one_file(qwen3vl: Pair, tmp_path: Path) -> None:
    write(tmp_path, qwen3vl.model_type, max_shard_size="1GB")
    assert not (tmp_path / INDEX).exists()
    assert same_rows(qwen3vl, tmp_path)


def test_a_config_that_does_not_fit_the_weights(qwen3vl: Pair, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(qwen3vl.folder, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["depth"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"12 tensors are missing \(blocks.5.attn.proj.bias"):
        load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
