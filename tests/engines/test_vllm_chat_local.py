"""Our service with `llm.local_encoder`: images and videos are encoded inside vLLM's process. `make
vllm`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="there is no vLLM here")

from tests.engines.servers import vllm
from tests.engines.test_vllm import FILES, PYTHON, TOWER, answer, ask, assert_same, shown
from tests.engines.test_vllm_chat import Ours, begun, serving
from tests.images import jpeg
from tests.serve.chats import count
from tests.waiting import within

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

LARGEST = 256
"""Budget of the engine inside vLLM, in tokens."""


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def ours(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ours]:
    folder = tmp_path_factory.mktemp(request.param)
    local = {"decode_step_tokens": 64, "graphs": {"token_budgets": [64, LARGEST]}}
    with serving(request.param, folder, processes=1, local_encoder=local) as found:
        yield found


@pytest.fixture(scope="module")
def whole(ours: Ours) -> Iterator[str]:
    """URL of a vLLM with the same model that encodes images itself."""
    with vllm(PYTHON, ours.folder, "whole", limit_mm_per_prompt=TOWER) as url:
        yield url


def loaded(ours: Ours) -> float:
    """How many items the engine inside vLLM has encoded for it."""
    return count(ours.http, "vllm:encoder_service_loaded_total")


def encoded(ours: Ours) -> float:
    """How many items the encoders have encoded."""
    return count(ours.http, "encoder_items_total")


@pytest.mark.parametrize("files", sorted(FILES))
def test_the_same_tokens_and_probabilities(ours: Ours, whole: str, files: str) -> None:
    parts = [shown(file) for file in FILES[files]]
    before = loaded(ours), encoded(ours)
    assert_same(answer(ours.url, parts, model=ours.model), answer(whole, parts))
    assert loaded(ours) > before[0]
    assert encoded(ours) == before[1]


def test_an_image_and_a_video_of_one_chat(ours: Ours, whole: str) -> None:
    parts = [shown(file) for file in (jpeg(128, 224), *FILES["a video"], jpeg(96, 96))]
    assert_same(answer(ours.url, parts, model=ours.model), answer(whole, parts))


def test_equal_images_are_encoded_once(ours: Ours, whole: str) -> None:
    parts, before = [shown(jpeg(160, 224, "coffee.png"))] * 2, loaded(ours)
    for _ in range(2):
        assert_same(answer(ours.url, parts, model=ours.model), answer(whole, parts))
    assert loaded(ours) == before + 1


def test_vllm_s_tower_encodes_an_image_that_is_too_large_for_our_engine(
    ours: Ours, whole: str
) -> None:
    before = loaded(ours)
    parts = [shown(jpeg(672, 640))]
    assert_same(answer(ours.url, parts, model=ours.model), answer(whole, parts))
    assert count(ours.http, "vllm:encoder_service_left_total") == 1
    assert loaded(ours) == before


def test_a_bad_image_is_named(ours: Ours) -> None:
    parts = [shown(jpeg(96, 96)), shown(jpeg(320, 240)[:2000])]
    response = ask(ours.url, parts, model=ours.model)
    assert (response.status_code, response.json()["error"]["item"]) == (400, 1)
    assert ask(ours.url, parts[:1], model=ours.model).is_success


def test_who_hangs_up_frees_its_slot(ours: Ours) -> None:
    with begun(ours):
        assert count(ours.http, "vllm:num_requests_running") == 1
    within(20, lambda: count(ours.http, "vllm:num_requests_running") == 0)
