"""Vectors of CLIP and SigLIP against transformers' get_image_features and get_text_features."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from fastapi import FastAPI
from starlette.testclient import TestClient
from torch import Tensor
from transformers import AutoTokenizer

from actors.engine.budgets import model_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.errors import CheckpointError, InvalidRequest, Overloaded, TooLarge
from actors.families.registry import read
from actors.media.text import Texts
from actors.models.load import load, weights_digest
from actors.models.tower import Tower
from actors.options import GraphOptions, ModelOptions
from actors.pipeline import open_pipeline
from actors.spec.model_spec import ModelSpec
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import open_spans
from actors.types import Answer, Dtype, Item, ItemPlan, Media, Size
from encoder_service import Client, ServiceError, Text, Video
from encoder_service.api import http as front
from encoder_service.api.http import build
from encoder_service.config import ServiceOptions
from encoder_service.llm import embeddings
from encoder_service.llm.embeddings import Vector
from encoder_service.service import Service
from tests.checkpoints_clip import (
    CAPTIONS,
    units_of,
    write_clip_texts,
    write_mlcd,
    write_siglip2_texts,
    write_siglip_texts,
)
from tests.checkpoints_dino import write_dinov2, write_dinov3
from tests.images import PHOTOGRAPHS, photograph
from tests.parity.table import check
from tests.parity.test_naflex import naflex_inputs
from tests.parity.test_tiled import pixels
from tests.unit.front_door import Fleet, zeros
from tests.unit.proxied import in_a_thread

CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "clip": write_clip_texts,
    "clip-first-end": lambda folder: write_clip_texts(folder, end=2),
    "siglip": write_siglip_texts,
    "siglip2": write_siglip2_texts,
}
TOKENIZERS = ("tokenizer.json", "spiece.model")
DUMMY = {"id": "clip-vit-l-336", "load_format": "dummy", "output": "vector"}


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower, in float32."""

    model: Any
    tower: Tower
    folder: Path

    @property
    def spec(self) -> ModelSpec:
        return self.tower.spec

    def images(self, plans: Sequence[ItemPlan], patches: Sequence[Tensor]) -> Tensor:
        if self.spec.family == "siglip2":
            given = naflex_inputs(self.spec, [plan.grid_thw[1:] for plan in plans], patches)
        else:
            given = {"pixel_values": pixels(self.spec, torch.cat(list(patches)))}
        with torch.no_grad():
            found = self.model.get_image_features(**given, return_dict=True)
        return torch.as_tensor(found.pooler_output)

    def texts(self, texts: Sequence[str], **padding: Any) -> Tensor:
        """By the tokenizer as the models' cards call it."""
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        tokens = tokenizer(list(texts), return_tensors="pt", **padding)
        with torch.no_grad():
            return torch.as_tensor(
                self.model.get_text_features(**tokens, return_dict=True).pooler_output
            )


def options(folder: Path) -> ModelOptions:
    return ModelOptions.model_validate({"id": str(folder), "dtype": "float32", "output": "vector"})


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("vectors")
    model = CHECKPOINTS[request.param](folder)
    return Pair(model, load(options(folder), torch.device("cpu")), folder)


def padding_of(spec: ModelSpec) -> dict[str, Any]:
    """As each model's card has it: of CLIP only to the longest text, with a mask."""
    assert spec.text_plan
    fixed = {"padding": "max_length", "max_length": spec.text_plan.patches}
    return {"padding": True} if spec.family == "clip" else fixed


def text(spec: ModelSpec, written: str) -> Media:
    found = embeddings.text_media(written, spec)
    assert isinstance(found, Media)
    return found


@pytest.mark.parametrize("mode", ["budget", "exact", "off"])
def test_images_and_texts_share_packs(pair: Pair, mode: str) -> None:
    tower, spec, metrics = pair.tower, pair.spec, EncoderMetrics()
    room = model_capacity(GraphOptions.model_validate({"mode": mode}), spec)
    graphs = capture(tower, room, Device(), metrics)
    engine = Engine(tower, graphs, room, Device(), metrics)
    plans = [spec.sizing.plan(Size(120, 50 + 40 * place)) for place, _ in enumerate(CAPTIONS)]
    shapes = [(plan.patches, 3 * spec.sizing.patch_size**2) for plan in plans]
    patches = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in shapes]
    texts = Texts(spec)
    for _ in range(3):  # an exact layout is captured when it is seen again
        items = [
            one
            for caption, plan, image in zip(CAPTIONS, plans, patches, strict=True)
            for one in (texts.item(text(spec, caption)), Item(plan, image.numpy()))
        ]
        answers = [one.result(60) for one in engine.submit_together(items)]
    engine.close()
    assert {one.source for one in answers} == {"eager" if mode == "off" else "graph"}
    sample = metrics.registry.get_sample_value
    ran = "eager/eager" if mode == "off" else "graph/graph"
    assert sample("encoder_pack_outcomes_total", {"outcome": ran})
    ours = torch.cat([one.rows for one in answers])
    assert ours.shape == (2 * len(CAPTIONS), spec.width)
    for kind, exact in (
        (ours[::2], pair.texts(CAPTIONS, **padding_of(spec))),
        (ours[1::2], pair.images(plans, patches)),
    ):
        scale = exact.abs().max()
        check(spec.family, kind / scale, exact / scale)


@pytest.mark.parametrize(
    "write", [write_dinov2, partial(write_dinov2, registers=3), write_dinov3, write_mlcd]
)
def test_images_without_texts(write: Callable[[Path], Any], tmp_path: Path) -> None:
    model = write(tmp_path)
    tower, metrics = load(options(tmp_path), torch.device("cpu")), EncoderMetrics()
    room = model_capacity(GraphOptions(), tower.spec)
    engine = Engine(tower, capture(tower, room, Device(), metrics), room, Device(), metrics)
    plan = tower.spec.sizing.plan(Size(120, 90))
    patches = [torch.randint(0, 256, (36, 3 * 14**2), dtype=torch.uint8) for _ in range(3)]
    answers = engine.submit_together([Item(plan, one.numpy()) for one in patches])
    ours = torch.cat([one.result(60).rows for one in answers])
    engine.close()
    with torch.no_grad():
        exact = model(pixels(tower.spec, torch.cat(patches)), return_dict=True).pooler_output
    check(tower.spec.family, ours, exact)


def test_texts_do_not_bound_what_an_image_may_ask_for(tmp_path: Path) -> None:
    write_siglip2_texts(tmp_path)
    chosen = {"id": str(tmp_path), "output": "vector"}
    client = TestClient(app(ServiceOptions.model_validate({"model": chosen}), Fleet()))
    bounds = client.get("/v1/model").json()["processor_kwargs"]["image"]
    assert bounds == {"max_patches": {"default": 60, "largest": 16 * 60}}


def test_a_text_that_is_too_long(pair: Pair) -> None:
    assert pair.spec.text_plan
    most = pair.spec.text_plan.patches
    with pytest.raises(InvalidRequest, match=rf"tokens, over the {most} of .*: shorten it"):
        Texts(pair.spec).item(text(pair.spec, "cat " * most))


@pytest.fixture
def copied(pair: Pair, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair.folder, tmp_path / "copied"))


def tokenizer_file(folder: Path) -> Path:
    (found,) = (one for one in TOKENIZERS if (folder / one).exists())
    return folder / found


def test_the_digest_is_of_the_tokenizer_too(pair: Pair, copied: Path) -> None:
    digest = weights_digest(options(pair.folder))
    assert weights_digest(options(copied)) == digest
    with tokenizer_file(copied).open("ab") as file:
        file.write(b" ")
    assert weights_digest(options(copied)) != digest


def test_a_damaged_tokenizer(copied: Path) -> None:
    tokenizer_file(copied).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"the tokenizer of .* cannot be read"):
        Texts(read(options(copied)))


def test_a_tokenizer_of_more_tokens_than_the_tower(pair: Pair) -> None:
    assert pair.spec.text
    tokens = len(Texts(pair.spec).tokenizer)
    Texts(replace(pair.spec, text={**pair.spec.text, "vocab_size": tokens}))
    few = replace(pair.spec, text={**pair.spec.text, "vocab_size": tokens - 1})
    with pytest.raises(CheckpointError, match=rf"{tokens} tokens, .* needs \d+ to {tokens - 1} "):
        Texts(few)


def test_a_tokenizer_that_lacks_the_end(pair: Pair) -> None:
    assert pair.spec.text
    tokens = len(Texts(pair.spec).tokenizer)
    text = {**pair.spec.text, "vocab_size": 50_000, "eos_token_id": tokens}
    with pytest.raises(CheckpointError, match=rf"{tokens} tokens, .* needs {tokens + 1} to 50000 "):
        Texts(replace(pair.spec, text=text))
    Texts(replace(pair.spec, text=text | {"eos_token_id": 50_000}))  # as of SigLIP


def test_no_tokenizer(copied: Path) -> None:
    tokenizer_file(copied).unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer .* tokenizer\.json, or vocab"):
        Texts(read(options(copied)))


class Numbers(Fleet):
    """Vectors of 1, 2, 3 and so on, or of what `start` makes of it."""

    start = 1.0

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **_: Any
    ) -> list[Answer]:
        self.calls.append((dtype, timeout_seconds))
        made = np.arange(768, dtype=np.float32) + np.float32(self.start)
        return [replace(zeros(one), dtype="float32", data=made.view(np.uint8)) for one in media]


class Encoders(Fleet):
    """One replica's pipeline, in this process."""

    def __init__(self, options: ServiceOptions) -> None:
        super().__init__()
        spans = open_spans(options.tracing, "encoder")
        self.pipeline = open_pipeline(options, EncoderMetrics(), spans, "one")

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **_: Any
    ) -> list[Answer]:
        return list((await self.pipeline.encode(media, dtype, timeout_seconds)).values())


@dataclass(frozen=True)
class Served:
    url: str
    id: str
    model: Any
    """transformers' model of the same folder."""

    def post(self, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/embeddings", content=json.dumps(body), timeout=60)

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0)


def unit(vectors: Vector) -> Vector:
    units: Vector = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return units


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The front door and one replica with a CLIP, over HTTP."""
    folder = tmp_path_factory.mktemp("served")
    model = write_clip_texts(folder)
    args = {"model": options(folder), "encoder": {"device": "cpu", "num_gpus": 0}}
    chosen = ServiceOptions.model_validate(args | {"limits": {"max_items": 16}})
    fleet = Encoders(chosen)
    with in_a_thread(app(chosen, fleet)) as url:
        yield Served(url, str(folder), model)
    fleet.pipeline.close()


def app(options: ServiceOptions, fleet: Fleet) -> FastAPI:
    return routes(Service(options, read(options.model), fleet))


def numbers(fleet: Fleet, **limits: int) -> Service:
    """A front door that takes texts, around a fleet in memory."""
    options = ServiceOptions.model_validate({"model": DUMMY, "limits": limits})
    service = Service(options, read(options.model), fleet)
    service.spec = replace(service.spec, text={"max_position_embeddings": 8})
    return service


def routes(service: Service) -> FastAPI:
    built = build(service)
    embeddings.add(built, service)
    return built


def data_url(file: bytes) -> str:
    return f"data:image/jpeg;base64,{b64encode(file).decode()}"


IMAGES = [data_url(photograph(name)) for name in PHOTOGRAPHS]


def test_retrieval_ranks_as_transformers_does(served: Served) -> None:
    """Through the `openai` package, which asks for base64 unless told otherwise."""
    found = served.openai.embeddings.create(model=served.id, input=[*IMAGES, *CAPTIONS])
    assert [one.index for one in found.data] == list(range(len(IMAGES) + len(CAPTIONS)))
    assert found.usage.prompt_tokens == len(IMAGES) * 37 + len(CAPTIONS) * 32
    ours = np.array([one.embedding for one in found.data])
    assert np.allclose(np.linalg.norm(ours, axis=1), 1)
    images, texts = units_of(served.model, served.id, PHOTOGRAPHS)
    assert np.abs(ours[len(IMAGES) :] - texts).max() < 1e-5
    assert np.abs(ours[: len(IMAGES)] - images).max() < 0.01  # Pillow resizes, torch there
    for ranked, exact in (
        (ours[len(IMAGES) :] @ ours[: len(IMAGES)].T, texts @ images.T),
        (ours[: len(IMAGES)] @ ours[: len(IMAGES)].T, images @ images.T),
    ):
        assert (ranked.argsort(1) == exact.argsort(1)).all()


def test_formats_and_dimensions(served: Served) -> None:
    client = served.openai.embeddings
    given: Any = [IMAGES[0], {"type": "text", "text": "https://a.b/ is a text here"}]
    coded = client.create(model=served.id, input=given)
    plain = client.create(model=served.id, input=given, encoding_format="float")
    few = client.create(model=served.id, input=given, encoding_format="float", dimensions=8)
    whole, floats, cut = (
        np.array([one.embedding for one in each.data], np.float32) for each in (coded, plain, few)
    )
    assert (whole == floats).all()
    assert whole.shape == (2, 48)
    assert np.allclose(cut, unit(whole[:, :8]), atol=1e-6)
    with Client(served.url) as ours:
        image = ours.embed([photograph(PHOTOGRAPHS[0]), Text("https://a.b/ is a text here")])
        assert np.array_equal(image, whole)
        text = ours.embed([Text("https://a.b/ is a text here")], dimensions=8)
        assert np.allclose(text, cut[1:], atol=1e-6)
        assert ours.model()["output"] == "vector"
        assert ours.model()["text_tokens"] == 32
        rows = ours.encode([photograph(PHOTOGRAPHS[0])], dtype="float32")[0]
        assert rows.shape == (1, 48)
        assert np.allclose(unit(rows.numpy()), image[:1], atol=1e-6)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"input": "a", "dimensions": 49}, 400, "dimensions", "49 is over 48"),
        ({"input": "a", "dimensions": 0}, 400, "dimensions", "greater than 0"),
        ({"input": "a", "encoding_format": "int8"}, 400, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "model": "gpt"}, 404, "model", "'gpt' is not served here"),
        ({"input": "a", "task": "retrieval"}, 400, "task", "not supported here; leave it out"),
        ({"input": []}, 400, "input", "at least 1 item"),
        ({"input": [[1]] * 20}, 400, "input", "token ids are not supported: send the text"),
        ({"input": [[1, 2]]}, 400, "input", "token ids are not supported: send the text"),
        ({"input": ["a", "cat " * 40]}, 400, "input[1]", "tokens, over the 32 of .*: shorten it"),
        ({"input": ["a" * 4000]}, 400, "input[0]", "is 4000 characters; .* takes 32 tokens"),
        ({"input": ["a", " \n"]}, 400, "input[1]", "the text is empty: leave it out"),
        ({"input": ""}, 400, "input[0]", "the text is empty: leave it out"),
        ({"input": "\ud800"}, 400, "input[0]", "surrogate"),
        ({"input": "data:image/png,a"}, 400, "input[0]", "a data URL must read data:image"),
        ({"input": ["a", data_url(b"no")]}, 400, "input[1]", "not an image, or it is dam"),
        ({"input": "https://a.b/c.jpg"}, 400, "input[0]", "fetch.allow_hosts"),
        ({"input": ["a"] * 17}, 413, None, "limits.max_items is 16"),
    ],
)
def test_errors(
    served: Served, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    answer = served.post(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert re.search(message, error["message"]), error


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ("Data: three columns", "text"),
        ("data:text/plain,a", "text"),
        ("https://example.com is my site", "text"),
        ("https://example.com/a.jpg\n", "text"),
        ("https://", "text"),
        ("https://example.com/a.jpg", "image_url"),
        ("HTTP://example.com/a.jpg", "image_url"),
        ("DATA:image/png;base64,aa", "image_url"),
    ],
)
def test_strings_that_are_images(given: str, kind: str) -> None:
    assert embeddings.as_part(given)["type"] == kind


def test_a_list_that_is_too_long_is_refused_before_its_parts_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embeddings, "as_part", pytest.fail)
    chosen = ServiceOptions.model_validate({"model": DUMMY})
    body = json.dumps({"input": [""] * 65}).encode()
    with pytest.raises(TooLarge, match=r"65 items in one request; limits\.max_items is 64"):
        embeddings.parse(body, read(chosen.model), chosen.limits)


def test_a_body_that_is_too_long_is_413_while_the_service_is_full() -> None:
    fleet = Numbers()
    fleet.full = Overloaded("full", 1.0)
    http = TestClient(routes(numbers(fleet, max_body_bytes=1000)))
    assert http.post("/v1/embeddings", json={"input": "a" * 1000}).status_code == 413
    assert http.post("/v1/embeddings", json={"input": "a"}).status_code == 429


@pytest.mark.parametrize(("left", "status"), [(0, 429), (768 * 4 - 1, 429), (2**20, 200)])
def test_nothing_is_encoded_that_could_not_be_sent(left: int, status: int) -> None:
    fleet = Numbers()
    service = numbers(fleet)
    service.unsent.held_bytes = service.unsent.most_bytes - left
    answer = TestClient(routes(service)).post("/v1/embeddings", json={"input": "a"})
    assert (answer.status_code, len(fleet.calls)) == (status, int(status == 200))


def test_vectors_over_the_size_of_a_response() -> None:
    http = TestClient(routes(numbers(Numbers(), max_response_bytes=768 * 4)))
    assert http.post("/v1/embeddings", json={"input": ["a"]}).status_code == 200
    answer = http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert answer.status_code == 413
    assert "limits.max_response_bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_many_vectors_are_written_and_packed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    names: list[str] = []

    def noted(work: Callable[..., Any], *args: Any) -> Any:
        names.append(threading.current_thread().name)
        return work(*args)

    monkeypatch.setattr(embeddings, "write_vectors", partial(noted, embeddings.write_vectors))
    monkeypatch.setattr(front, "gzip", SimpleNamespace(compress=partial(noted, gzip.compress)))
    http = TestClient(routes(numbers(Numbers(), max_items=100)))
    body = {"input": ["a"] * 100, "encoding_format": encoding}
    packed, plain = (
        http.post("/v1/embeddings", json=body, headers={"accept-encoding": encoding})
        for encoding in ("gzip", "identity")
    )
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.json() == plain.json()
    assert len(plain.json()["data"]) == 100
    assert [name.startswith("asyncio_") for name in names] == [True] * 3


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_vectors_that_are_not_finite_are_errors(encoding: str, value: float) -> None:
    fleet = Numbers()
    fleet.start = value
    http = TestClient(routes(numbers(fleet)))
    answer = http.post("/v1/embeddings", json={"input": ["a"], "encoding_format": encoding})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (500, "encode_failed")
    assert (error["item"], error["param"]) == (0, "input[0]")
    assert "NaN" in error["message"]


def test_the_client_says_what_it_cannot_embed(served: Served) -> None:
    with Client(served.url) as client:
        with pytest.raises(TypeError, match="embed takes images and texts"):
            client.embed([Video(b"x")])  # type: ignore[list-item]
        with pytest.raises(FileNotFoundError, match=r"no file 'a cat'; a text is a Text\("):
            client.embed(["a cat"])
        with pytest.raises(ServiceError, match=r"limits\.max_items is 16"):
            client.embed([Text("a")] * 17)
    with Client("grpc://127.0.0.1:1") as client, pytest.raises(ServiceError, match="needs HTTP"):
        client.embed([Text("a")])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"id": "qwen3vl-tiny"}, "qwen3vl-tiny gives qwen3_vl rows here.* use POST /v1/encode"),
        ({"id": "clip-vit-l-336"}, "clip-vit-l-336 gives clip rows .* `model.output: vector`"),
        ({"id": "clip-vit-l-336", "output": "vector"}, "has no text tower: send images"),
        ({"id": "dinov2-base"}, "dinov2-base gives dinov2 rows .* `model.output: vector`"),
        ({"id": "dinov2-base", "output": "vector"}, "has no text tower: send images"),
    ],
)
def test_models_without_what_is_asked(model: dict[str, str], message: str) -> None:
    chosen = ServiceOptions.model_validate({"model": model | {"load_format": "dummy"}})
    client = TestClient(app(chosen, Fleet()))
    answer = client.post("/v1/embeddings", json={"input": "a cat"})
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])


def test_a_token_is_asked_for() -> None:
    chosen = {"model": DUMMY, "auth": {"token_sha256": [sha256(b"secret").hexdigest()]}}
    client = TestClient(app(ServiceOptions.model_validate(chosen), Fleet()))
    answer = client.post("/v1/embeddings", json={"input": "a cat"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    headers = {"authorization": "Bearer secret"}
    assert client.post("/v1/embeddings", json={"input": "a"}, headers=headers).status_code == 400


def test_the_openapi_document_describes_vectors() -> None:
    chosen = ServiceOptions.model_validate({"model": DUMMY})
    document = TestClient(app(chosen, Fleet())).get("/openapi.json").json()
    described = document["paths"]["/v1/embeddings"]["post"]
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert {"EmbeddingRequest", "EmbeddingsDocument"} <= named
    assert named <= document["components"]["schemas"].keys()
    assert {"200", "400", "401", "404", "413", "429"} <= described["responses"].keys()
