"""Sounds from the client's call to rows, over HTTP and gRPC: equal to transformers'."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient

from actors.families import registry
from actors.models.load import load
from actors.options import GraphOptions, ModelOptions
from encoder_service import Embedding, Plan, ServiceError
from encoder_service.api.http import build
from encoder_service.client.items import Source
from encoder_service.config import ServiceOptions
from encoder_service.service import Service
from tests.checkpoints_audio import sound, tones, write_qwen2_audio
from tests.images import jpeg
from tests.parity.test_audio import Pair
from tests.unit.api.test_plan import Encoding, clients
from tests.unit.front_door import JSON

WAVES = [tones(1.5), tones(0.31, seed=1)]
WAV, FLAC = sound(WAVES[0]), sound(WAVES[1], "flac")
BROKEN = b"RIFF\x10\0\0\0WAVEnothing more"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Encoding, Pair]]:
    folder = tmp_path_factory.mktemp("qwen2_audio")
    reference = write_qwen2_audio(folder)
    model = ModelOptions(id=str(folder), dtype="float32")
    fleet = Encoding(model)
    tower = load(model, torch.device("cpu"))
    options = ServiceOptions(model=model, graphs=GraphOptions(mode="off"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.store.shared_memory.ray.is_initialized", lambda: False)
        pair = Pair("qwen2_audio", reference, tower)
        yield Service(options, registry.read(model), fleet), fleet, pair
    fleet.pipeline.close()


def test_over_http_and_grpc(served: tuple[Service, Encoding, Pair], tmp_path: Path) -> None:
    """By name, by content, and resampled; one broken file costs only itself."""
    service, fleet, pair = served
    items = fleet.pipeline.series.items
    before = items.labels("audio", "eager")._value.get()
    (tmp_path / "speech.wav").write_bytes(WAV)
    stereo = sound(np.stack([WAVES[0]] * 2), "ogg", 48000)
    sources: list[Source] = [tmp_path / "speech.wav", FLAC, BROKEN, stereo, jpeg(64, 64)]

    async def run() -> None:
        async with clients(service) as both:
            for one in both:
                plans = await one.plan(sources, "return")
                answers = await one.encode(sources, "float32", on_error="return")
                assert [type(plan) for plan in plans] == [
                    Plan,
                    Plan,
                    ServiceError,
                    Plan,
                    ServiceError,
                ]
                for place, wave in enumerate(WAVES):
                    plan, answer = plans[place], answers[place]
                    assert isinstance(plan, Plan)
                    assert isinstance(answer, Embedding)
                    exact = pair.rows([wave]).numpy()
                    assert np.abs(answer.numpy() - exact).max() < 1e-4
                    assert (answer.type, answer.tokens) == ("audio", len(exact))
                    assert (plan.tokens, plan.grid_thw) == (answer.tokens, answer.grid_thw)
                    assert plan.seconds == len(wave) / 16000
                    assert plan.digest == answer.digest
                for broken in (plans[2], answers[2]):
                    assert isinstance(broken, ServiceError)
                    assert (broken.type, broken.item) == ("invalid_request", 2)
                    assert "the sound cannot be read" in broken.message
                assert isinstance(answers[4], ServiceError)
                assert "takes sounds only, not an image" in answers[4].message

    asyncio.run(run())
    assert items.labels("audio", "eager")._value.get() == before + 6


@pytest.mark.parametrize(
    "sent",
    [
        {"json": {"items": [{"type": "audio", "data": b64encode(WAV).decode()}]}},
        {"files": {"audio": WAV}},
        {"content": WAV, "headers": {"content-type": "audio/wav"}},
    ],
    ids=["json", "multipart", "bare"],
)
def test_every_body(served: tuple[Service, Encoding, Pair], sent: dict[str, Any]) -> None:
    headers = JSON | sent.pop("headers", {})
    answer = TestClient(build(served[0])).post("/v1/encode", headers=headers, **sent)
    (item,) = answer.json()["items"]
    assert (item["type"], item["tokens"], item["grid_thw"]) == ("audio", 37, [1, 1, 76])
    assert item["digest"] == sha256(WAV).hexdigest()


def test_urls_keep_to_the_policy_of_other_kinds(served: tuple[Service, Encoding, Pair]) -> None:
    body = {"items": [{"type": "audio", "url": "https://example.org/speech.wav"}]}
    answer = TestClient(build(served[0])).post("/v1/encode", json=body)
    assert answer.status_code == 400
    assert "fetch.allow_hosts" in answer.json()["error"]["message"]


def test_the_model_says_that_it_hears(served: tuple[Service, Encoding, Pair]) -> None:
    card = TestClient(build(served[0])).get("/v1/model").json()
    assert (card["kinds"], card["audio_seconds"]) == (["audio"], 2)
    assert json.dumps(card["processor_kwargs"]) == '{"audio": {}}'
