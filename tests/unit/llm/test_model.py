"""llm.engine: transformers, with a tiny model on the CPU."""

from __future__ import annotations

from threading import Event

import pytest

from actors.families.registry import read
from actors.options import ModelOptions
from encoder_service.config import LlmOptions
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.calls import SamplingParams
from encoder_service.llm.model import TransformersEngine
from encoder_service.llm.prompt import load_tokenizer, prompt


@pytest.mark.parametrize("temperature", [1e-5, 1e-40])
def test_a_tiny_temperature_gives_a_text(temperature: float) -> None:
    own = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
    options = LlmOptions(num_gpus=0, device="cpu")
    spec, tokenizer = llm_spec.read(options, own, read(own)), load_tokenizer(own)
    engine = TransformersEngine(options, own, spec, tokenizer)
    made = prompt([{"role": "user", "content": "a"}], [], 4, spec, tokenizer)
    sampling = SamplingParams(temperature=temperature)
    finish = engine._generate(made, [], sampling, lambda _: None, Event())
    assert finish.completion_tokens == 4
    engine.close()
