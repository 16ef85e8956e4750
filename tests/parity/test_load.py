"""Loading from what transformers saves: only the tower is read, only what holds it is needed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.errors import CheckpointError
from actors.media.patchify import patchifier_of
from actors.models.load import family_of, load
from actors.models.tensors import INDEX, SINGLE
from actors.options import ModelOptions
from tests.checkpoints import write
from tests.parity.conftest import Pair
from tests.parity.test_tower import encode, random_packed, theirs


def same_rows(pair: Pair, folder: Path) -> bool:
    """Whether the tower in a folder computes what the pair's reference does."""
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    plan = patchifier_of(pair.tower.spec).patchify(torch.zeros(3, 96, 64, dtype=torch.uint8))[0]
    patches = random_packed(pair.tower, [plan])
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


@pytest.mark.parametrize("fault", ["missing", "left over", "misshapen", "quantised"])
def test_a_fault_of_any_family_is_named(pair: Pair, tmp_path: Path, fault: str) -> None:
    folder = Path(shutil.copytree(pair.folder, tmp_path / "copy"))
    prefix = family_of(pair.tower.spec).prefixes[0]
    (folder / INDEX).unlink(missing_ok=True)
    weights: dict[str, Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        weights |= load_file(shard)
        shard.unlink()
    stored = next(
        name for name in sorted(weights) if name.removeprefix("model.").startswith(prefix)
    )
    name = stored.removeprefix("model.").removeprefix(prefix)
    if fault == "missing":
        del weights[stored]
    elif fault == "left over":
        whole, name = stored.removesuffix(name), "surplus.weight"
        weights[whole + name] = torch.zeros(2)
    elif fault == "misshapen":
        weights[stored] = torch.zeros(3, 1, 4)
    else:
        weights[stored] = weights[stored].to(torch.float8_e4m3fn)
    save_file(weights, folder / SINGLE)
    with pytest.raises(CheckpointError, match=re.escape(name)) as told:
        load(ModelOptions(id=str(folder)), torch.device("cpu"))
    assert {"misshapen": "[3, 1, 4] instead of"}.get(fault, fault) in str(told.value)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("depth", 6, r"12 tensors are missing \(blocks.5.attn.proj.bias,.*blocks.5.attn.proj.bias"),
        ("depth", 4, r"0 tensors are missing \(none\) and 12 are left over.*Whether blocks.4.attn"),
        (
            "deepstack_visual_indexes",
            [1],
            r"are left over.*Whether deepstack_merger_list.1.linear_fc1",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_weights(
    qwen3vl: Pair, tmp_path: Path, key: str, value: object, told: str
) -> None:
    folder = Path(shutil.copytree(qwen3vl.folder, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    depends = re.escape(f" depends on vision_config.{key}, which is {value}")
    with pytest.raises(CheckpointError, match=told + ".*" + depends):
        load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
