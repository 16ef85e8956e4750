"""The language model on the GPU: what it says there of the same rows as on the CPU."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from actors.families.registry import read as read_tower
from actors.options import ModelOptions
from encoder_service.config import LlmOptions
from encoder_service.llm import model as language_model
from encoder_service.llm.calls import Finish, SamplingParams
from encoder_service.llm.model import Generator
from encoder_service.llm.prompt import Placed, Prompt, byte_tokenizer
from encoder_service.llm.spec import read
from tests.checkpoints import TOKENS, write

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-3
"""float32, whose matrix products a GPU rounds otherwise; logits are about 1."""
TOKEN = TOKENS["image_token_id"]
GRID = (1, 8, 6)
ROWS = 12


def test_logits_and_answers_are_those_of_the_cpu(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    write(tmp_path, "qwen3_vl")
    options = ModelOptions(id=str(tmp_path), dtype="float32")
    rows = torch.randn(ROWS, 96 * 4, generator=torch.Generator().manual_seed(0))
    spec = read(LlmOptions(), options, read_tower(options))
    ids = [5, 6, 2002, *[TOKEN] * ROWS, 2003, 7, 8]
    kinds = [1 if one == TOKEN else 0 for one in ids]
    prompt = Prompt(ids, kinds, (Placed("image", GRID, ROWS),), 8)
    logits, answers = [], []
    for device in ("cpu", "cuda"):
        model = language_model.load(options, device)
        assert {value.device.type for value in model.parameters()} == {device}
        inputs: dict[str, Any] = language_model.inputs(prompt, [rows.to(device)], spec)
        with torch.inference_mode():
            logits.append(model(**inputs).logits.cpu())
        generator = Generator(model, byte_tokenizer())
        answers.append(generator.generate(inputs, SamplingParams(temperature=0), 8, print, Event()))
    assert (logits[0] - logits[1]).abs().max() < TOLERANCE
    assert answers[0] == answers[1]
    assert isinstance(answers[0], Finish)
