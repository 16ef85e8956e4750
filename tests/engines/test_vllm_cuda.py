"""Our engine inside vLLM on a GPU, where slices, steps and copies run at the same time.

In an environment of vLLM: see CONTRIBUTING.md.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from random import Random

import httpx
import pytest
import torch

from encoder_service.bench.mix import picture
from encoder_service.engines.vllm import CONNECTOR
from tests.engines import checkpoint
from tests.engines.servers import vllm

pytestmark = [pytest.mark.engine, pytest.mark.gpu, pytest.mark.timeout(600)]
PYTHON = os.environ.get("VLLM_PYTHON", "")
if not (PYTHON and torch.cuda.is_available()):
    pytest.skip("needs a GPU, and VLLM_PYTHON", allow_module_level=True)

VISION = {
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "depth": 9,
    "deepstack_visual_indexes": [2, 4, 6],
}
TEXT = {
    "hidden_size": 512,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]},
}
SIZES = ((320, 224), (640, 480), (500, 700), (1024, 1024), (1280, 720), (336, 336))
IN_FLIGHT, TIMES = 24, 20
"""Requests at a time, and how often each image is sent."""
TOLERANCE = 0.25
"""Of the logarithm of a probability, in bfloat16."""
OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": "8192",
    "max_num_seqs": "32",
    "max_num_batched_tokens": "1024",
    "gpu_memory_utilization": "0.1",
    "kv_cache_memory_bytes": "2G",  # not what other processes leave
    "mm_processor_cache_gb": "0",
    "limit_mm_per_prompt": {"image": 1, "video": 0},
}
LOCAL = {"place": "local", "chunk_ms": 0.5, "graphs": {"token_budgets": [256, 1024, 4096]}}
Likely = dict[str, float]
"""Logarithms of the probabilities of the likeliest first tokens."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of vLLM alone, and of vLLM with our engine inside."""
    folder = tmp_path_factory.mktemp("qwen3_vl")
    checkpoint.write(folder / "model", "qwen3_vl", VISION, TEXT)
    connector = CONNECTOR | {"ec_connector_extra_config": LOCAL}
    with (
        vllm(PYTHON, folder, "alone", **OPTIONS) as alone,
        vllm(PYTHON, folder, "local", ec_transfer_config=connector, **OPTIONS) as local,
    ):
        yield alone, local
    assert "vLLM's own tower encodes an item" not in (folder / "local.log").read_text()


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    return [picture(*size, seed) for seed, size in enumerate(SIZES)]


def likely(url: str, image: bytes, tokens: int = 1) -> Likely:
    shown = {"url": f"data:image/jpeg;base64,{b64encode(image).decode()}"}
    content = [{"type": "image_url", "image_url": shown}, {"type": "text", "text": "What?"}]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "return_tokens_as_token_ids": True,  # different tokens may have the same text
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=200, trust_env=False)
    assert response.is_success, response.text
    first = response.json()["choices"][0]["logprobs"]["content"][0]
    return {one["token"]: one["logprob"] for one in first["top_logprobs"]}


def apart(one: Likely, other: Likely) -> float:
    both = one.keys() & other.keys()
    return max(abs(one[token] - other[token]) for token in both) if len(both) > 9 else 99.0


def test_rows_are_complete_when_a_step_reads_them(
    servers: tuple[str, str], images: list[bytes]
) -> None:
    alone, local = servers
    expected = [likely(alone, image) for image in images]
    different = min(apart(*pair) for pair in combinations(expected, 2))
    found = [likely(local, image) for image in images]
    idle = max(map(apart, found, expected))
    sent = [*range(len(images))] * TIMES
    Random(0).shuffle(sent)
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        answers = threads.map(lambda place: likely(local, images[place], tokens=24), sent)
        loaded = max(map(apart, answers, (expected[place] for place in sent)))
    print(f"idle {idle:.3f}, under load {loaded:.3f}, different images {different:.3f}")
    assert max(idle, loaded) < TOLERANCE < different / 2
