"""The language model on our towers' rows against the whole model of transformers on the pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.errors import CheckpointError
from actors.options import ModelOptions
from actors.types import ItemPlan, Size
from encoder_service.llm import model as language_model
from encoder_service.llm.generate import Generator
from encoder_service.llm.options import LlmOptions
from encoder_service.llm.spec import FAMILIES, LlmSpec, read
from encoder_service.llm.tokenizer import byte_tokenizer
from encoder_service.llm.types import Finish, Sampling
from tests.checkpoints import write
from tests.parity.conftest import Pair, made
from tests.parity.test_tower import encode, pixel_values, random_patches

TOLERANCE = 1e-4
"""float32; logits are about 1."""
IMAGES = {
    "text only": [],
    "one image": [Size(224, 160)],
    "many": [Size(96, 64), Size(320, 64), Size(64, 64), Size(200, 300)],
}


@dataclass(frozen=True)
class Chat:
    """The same weights twice: whole in transformers, and without a tower."""

    pair: Pair
    spec: LlmSpec
    model: Any


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    pair = made(request.param, tmp_path_factory)
    options = ModelOptions(id=str(pair.folder), dtype="float32")
    spec = read(LlmOptions(num_gpus=0, device="cpu"), options, pair.tower.spec)
    return Chat(pair, spec, language_model.load(options, "cpu"))


@pytest.mark.parametrize("images", sorted(IMAGES))
def test_logits_equal_those_of_the_whole_model(chat: Chat, images: str) -> None:
    ours, theirs = both(chat, IMAGES[images])
    with torch.inference_mode():
        expected = chat.pair.reference(**theirs).logits
        found = chat.model(**ours).logits
    assert found.shape == expected.shape
    assert expected.std() > 0.05
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("images", sorted(IMAGES))
def test_greedy_tokens_equal_those_of_the_whole_model(chat: Chat, images: str) -> None:
    ours, theirs = both(chat, IMAGES[images])
    expected = chat.pair.reference.generate(**theirs, max_new_tokens=12, do_sample=False)
    length = ours["input_ids"].shape[1]
    tokenizer = byte_tokenizer()
    text: list[str] = []
    finish = Generator(chat.model, tokenizer).generate(
        ours, Sampling(temperature=0), 12, text.append, Event()
    )
    tokens = expected[0, length:].tolist()
    assert finish == Finish("stop" if tokens[-1] == 2 else "length", length, len(tokens))
    assert "".join(text) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_no_tower_is_loaded(chat: Chat) -> None:
    names = [name for name, _ in chat.model.named_parameters()]
    assert names
    assert not [name for name in names if "visual" in name]
    whole = sum(value.numel() for value in chat.pair.reference.parameters())
    tower = sum(value.numel() for value in chat.pair.reference.model.visual.parameters())
    assert sum(value.numel() for value in chat.model.parameters()) == whole - tower
    assert {value.device.type for value in chat.model.parameters()} == {"cpu"}


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_vl", max_shard_size="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.gate_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="gate_proj"):
        language_model.load(ModelOptions(id=str(tmp_path), dtype="float32"), "cpu")


def test_dummy_weights_are_the_same_in_every_process() -> None:
    options = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
    one, other = (language_model.load(options, "cpu") for _ in range(2))
    ids = torch.tensor([[1, 2, 3]])
    assert one.model.visual is None
    assert torch.equal(one(ids).logits, other(ids).logits)
    assert one(ids).logits.isfinite().all()


def both(chat: Chat, sizes: Sequence[Size]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours from the tower's rows, theirs from the same pixels."""
    plans = [chat.pair.tower.spec.sizing.plan(size) for size in sizes]
    token = chat.spec.image_token_id
    ids = list(range(10, 20))
    for number, plan in enumerate(plans):
        ids += [2002, *[token] * plan.tokens, 2003, 30 + number]
    ids += [5, 6, 7]
    patches = random_patches(chat.pair.tower, plans) if plans else torch.empty(0)
    grids = [plan.grid_thw for plan in plans]
    ours = language_model.inputs(ids, token, rows(chat, plans, patches), grids, chat.spec.deepstack)
    theirs = {name: ours[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    if plans:
        theirs["pixel_values"] = pixel_values(chat.pair, plans, patches)
        theirs["image_grid_thw"] = torch.tensor(grids)
    return ours, theirs


def rows(chat: Chat, plans: Sequence[ItemPlan], patches: Tensor) -> list[Tensor]:
    """The tower's rows of each image."""
    if not plans:
        return []
    tokens = [plan.tokens for plan in plans]
    found = encode(chat.pair.tower, plans, patches, sum(tokens) + 3, segments=8)
    return list(found.split(tokens))
