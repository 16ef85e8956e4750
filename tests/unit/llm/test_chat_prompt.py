"""From messages to tokens, and which language models fit which towers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.errors import CheckpointError, ConfigError, InvalidRequest
from actors.families.registry import read
from actors.options import ModelOptions
from encoder_service.config import LlmOptions
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.calls import Message
from encoder_service.llm.prompt import Placed, expand, load_tokenizer, prompt

TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
CPU = LlmOptions(num_gpus=0, device="cpu")
IMAGE, VIDEO = 258, 259


def rows(count: int) -> Placed:
    return Placed("image", (1, 2, 2 * count), count)


CLIP = Placed("video", (2, 2, 4), 4, (0.25, 1.0), 0.5)


def expanded(ids: list[int], *placed: Placed) -> tuple[list[int], list[int]]:
    return expand(ids, placed, llm_spec.read(CPU, TINY, read(TINY)), load_tokenizer(TINY))


def test_an_image_stands_as_often_as_it_has_rows() -> None:
    ids, kinds = expanded([1, IMAGE, 2, IMAGE], rows(3), rows(1))
    assert ids == [1, IMAGE, IMAGE, IMAGE, 2, IMAGE]
    assert kinds == [0, 1, 1, 1, 0, 1]
    assert expanded([1]) == ([1], [0])


def test_a_video_stands_group_by_group_with_its_times() -> None:
    ids, kinds = expanded([VIDEO, IMAGE], rows(1), CLIP)
    group = "<|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
    assert load_tokenizer(TINY).decode(ids) == (
        f"<0.2 seconds>{group}<1.0 seconds>{group}<|image_pad|>"
    )
    assert [one for one in kinds if one] == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
@pytest.mark.parametrize("placed", [[], [rows(1), CLIP, rows(1), CLIP]])
def test_a_text_cannot_pretend_to_be_an_image(token: int, placed: list[Placed]) -> None:
    with pytest.raises(InvalidRequest, match="own tokens"):
        expanded([1, token], *placed)


def test_the_preset_s_language_is_bytes_and_chatml() -> None:
    tokenizer = load_tokenizer(TINY)
    spec = llm_spec.read(CPU, TINY, read(TINY))
    messages: list[Message] = [
        {"role": "system", "content": "né"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
    ]
    made = prompt(messages, [rows(2)], 10, spec, tokenizer)
    assert tokenizer.decode(made.ids) == (
        "<|im_start|>system\nné<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|image_pad|><|vision_end|>?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert made.ids.count(IMAGE) == 2
    assert made.max_tokens == 10
    room = replace(spec, max_model_len=len(made.ids) + 4)
    assert prompt(messages, [rows(2)], 10, room, tokenizer).max_tokens == 4
    with pytest.raises(InvalidRequest, match="maximum context length"):
        prompt(messages, [rows(2)], 10, replace(spec, max_model_len=len(made.ids)), tokenizer)


def test_a_language_model_must_fit_its_tower() -> None:
    tower = read(TINY)
    with pytest.raises(ConfigError, match="does not take embeddings of kimi_vl"):
        llm_spec.read(CPU, TINY, replace(tower, family="kimi_vl"))
    with pytest.raises(ConfigError, match="rows of 64 values"):
        llm_spec.read(CPU, TINY, replace(tower, width=64))
    with pytest.raises(ConfigError, match="was made for 8192"):
        llm_spec.read(CPU.model_copy(update={"max_model_len": 9000}), TINY, tower)
    huge = ModelOptions(id="qwen3vl-8b", load_format="dummy")
    with pytest.raises(CheckpointError, match="has no language model"):
        llm_spec.read(CPU, huge, read(huge))
