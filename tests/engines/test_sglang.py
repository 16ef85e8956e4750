"""Our embeddings inside SGLang's own processor and its embedding of prompts: `make sglang`.

Runs in an environment that has SGLang; no engine is started, which needs a GPU.
"""

# ruff: noqa: E402  # SGLang is imported where there is one

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from encoder_service.client.items import Embedding
from encoder_service.engines.sglang import expanded, processor_output
from tests.engines import checkpoint
from tests.unit.llm.test_consumers import embedding

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("sglang", reason="there is no SGLang here")

from sglang.srt.managers import mm_utils
from sglang.srt.managers.schedule_batch import MultimodalInputs
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration
from sglang.srt.multimodal.modality import Modality
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

HIDDEN = 8
LEVELS = 2
"""Of the embeddings of tests.unit.llm.test_consumers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    checkpoint.write(folder, "qwen3_vl")
    return folder


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    args = ServerArgs(model_path=str(folder), device="cpu", mm_process_config={})
    get_context().set_server_args(args)
    own = AutoProcessor.from_pretrained(folder)
    return QwenVLImageProcessor(AutoConfig.from_pretrained(folder), args, own, "default")


def prompt(processor: Any) -> list[int]:
    """With two images."""
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    ids: list[int] = processor._processor.tokenizer(f"See {image} and {image}!").input_ids
    return ids


def processed(processor: Any, input_ids: list[int], images: list[Embedding]) -> Any:
    request = SimpleNamespace(video_data=None, audio_data=None, rid="r")
    data = [processor_output(images)]
    return asyncio.run(processor.process_mm_data_async(data, input_ids, request))


def test_rows_and_positions_are_those_of_the_embeddings(processor: Any, folder: Path) -> None:
    images = [embedding((1, 4, 6)), embedding((1, 2, 2), seed=1)]
    placeholder = processor.mm_tokens.image_token_id
    ids = expanded(prompt(processor), images, placeholder)
    found = processed(processor, ids, images)
    there = torch.tensor(ids) == placeholder
    assert there.sum() == 7
    model = AutoModelForImageTextToText.from_pretrained(folder)
    positions, _ = model.model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=there[None].int(),
        image_grid_thw=torch.tensor([image.grid_thw for image in images]),
    )
    assert torch.equal(found.mrope_positions, positions[:, 0])

    own = SimpleNamespace(
        num_deepstack_embeddings=LEVELS, config=SimpleNamespace(hidden_size=HIDDEN)
    )
    split = Qwen3VLForConditionalGeneration.separate_deepstack_embeds
    tower = SimpleNamespace(
        get_image_feature=lambda items: pytest.fail("the tower is asked"),
        separate_deepstack_embeds=lambda rows: split(own, rows),
        deepstack_visual_indexes=range(LEVELS),
    )
    mm_utils.init_mm_embedding_cache(2**20)
    words = torch.nn.Embedding(2048, HIDDEN).requires_grad_(False)
    embedded, more = mm_utils.embed_mm_inputs(
        [MultimodalInputs.from_processor_output(found)],
        [0],
        [len(ids)],
        torch.tensor(found.padded_input_ids),
        words,
        tower,
        use_deepstack={Modality.IMAGE: True},
    )
    rows = torch.cat([image.torch() for image in images]).float()
    assert torch.equal(embedded[there], rows[:, :HIDDEN])
    assert torch.equal(more["input_deepstack_embeds"][there], rows[:, HIDDEN:])
    assert torch.equal(embedded[~there], words(torch.tensor(ids)[~there]))


def test_sglang_itself_expands_no_prompt(processor: Any) -> None:
    images = [embedding((1, 4, 6)), embedding((1, 2, 2), seed=1)]
    ids = prompt(processor)
    assert processed(processor, ids, images).input_ids == ids, (
        "then encoder_service.engines.sglang need not"
    )
