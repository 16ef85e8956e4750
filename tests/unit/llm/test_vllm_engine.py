"""`llm.engine: vllm` without vLLM: its parameters, the schema, and how images become spans."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from actors.errors import ConfigError, EmbeddingLost, InvalidRequest, Overloaded
from actors.families.registry import read
from actors.options import ModelOptions
from encoder_service.config import LlmOptions, ServiceOptions, resources
from encoder_service.llm import spec as llm_spec
from encoder_service.llm import vllm_engine
from encoder_service.llm.calls import ChatCall, Finish, Piece, VllmParams
from encoder_service.llm.prompt import Placed, Prompt, expand, load_tokenizer
from encoder_service.llm.schema import InvalidKey, parse
from encoder_service.llm.spec import LlmSpec
from encoder_service.llm.vllm_engine import (
    AT_ONCE,
    VllmEngine,
    engine_args,
    features,
    identity,
    likelihoods,
    sampling_params,
)
from tests.images import jpeg
from tests.unit.fleet import embedding, item
from tests.unit.llm.test_chat_service import (
    HARMLESS,
    HELLO,
    PATH,
    UNSUPPORTED,
    Replicas,
    client,
    events,
    image,
)

TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
CPU: dict[str, Any] = {"num_gpus": 0, "device": "cpu"}
SCHEMA = {"type": "object"}
COUNTED = {"properties": {"pattern": {"pattern": "a{500}b{1,500}", "maxLength": 10**6}}}
URL = "http://127.0.0.1:1"


def in_json(schema: dict[str, Any]) -> dict[str, Any]:
    wanted = {"name": "a", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wanted}}


@pytest.fixture
def spec() -> LlmSpec:
    return llm_spec.read(LlmOptions(**CPU), TINY, read(TINY))


def params(**given: Any) -> VllmParams:
    sampling = parse(HELLO | given, "vllm").sampling()
    assert isinstance(sampling, VllmParams)
    return sampling


def test_what_is_given_reaches_vllm() -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "frequency_penalty": -1.0,
        "presence_penalty": 2,
        "repetition_penalty": 1.1,
        "seed": 3,
        "min_tokens": 1,
        "ignore_eos": True,
        "stop_token_ids": [7],
    }
    biased = given | {"logit_bias": {"12": -3.5}, "logprobs": True, "top_logprobs": 4, "stop": "x"}
    found = sampling_params(params(**biased), 9, stream=True, defaults={"top_k": 1})
    expected = {"logit_bias": {12: -3.5}, "logprobs": 4, "stop": ["x"], "max_tokens": 9}
    assert found == given | expected


def test_the_checkpoint_s_defaults_hold_for_what_is_left_out() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 5}
    found = sampling_params(params(top_p=1), 9, stream=False, defaults=defaults)
    assert {name: found[name] for name in defaults} == {
        "temperature": 0.7,
        "top_p": 1,
        "top_k": 20,
        "max_tokens": 9,
    }
    assert (found["logprobs"], found["stream_interval"]) == (None, AT_ONCE)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (in_json(SCHEMA)["response_format"], {"json": SCHEMA}),
        (in_json(COUNTED)["response_format"], {"json": COUNTED}),
    ],
)
def test_formats_of_responses(given: dict[str, Any], expected: dict[str, Any] | None) -> None:
    found = sampling_params(params(response_format=given), 9, stream=True, defaults={})
    assert found.get("structured_outputs") == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, "n: wrong value"),
        ({"top_logprobs": 2}, "top_logprobs: only with logprobs: true"),
        ({"top_k": -2}, "top_k: wrong value"),
        ({"top_k": 2**64}, "top_k: wrong value"),
        ({"stop_token_ids": [*range(101)]}, "stop_token_ids: wrong value"),
        ({"n": 2, "seed": 2**63 - 1}, r"seed: at most 2\*\*63 - n"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            r"response_format\.json_schema\.schema: missing",
        ),
        (in_json({"pattern": "a{1,1001}"}), r"json_schema: the counts in its patterns"),
        (in_json({"anyOf": [{"pattern": "a{ 600 }b{ 401 , }"}]}), "add up to more than 1000"),
        (in_json({"patternProperties": {"[a-z]{2000}": True}}), "use minLength and maxLength"),
        (in_json({"pattern": "a{%s}" % ("9" * 5000)}), "use minLength and maxLength"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        *((given, re.escape(words)) for given, words in UNSUPPORTED),
    ],
)
def test_what_it_cannot_do_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidKey, match=words):
        params(**given)


def test_parameters_that_change_nothing_do_not_reach_vllm() -> None:
    given = {name: HARMLESS[name] for name in HARMLESS if name not in VllmParams.model_fields}
    assert params(**HARMLESS)
    assert params(**given) == params()


def test_their_number_may_be_written_with_a_point() -> None:
    assert params(n=2.0) == params(n=2)


def test_seeds_of_all_completions_have_64_bits() -> None:
    assert params(n=2, seed=2**63 - 2).seed == 2**63 - 2
    assert params(seed=2**63 - 1).seed == 2**63 - 1


def test_transformers_takes_none_of_it() -> None:
    for given in ({"n": 2}, {"top_k": 1}, {"logprobs": True}):
        with pytest.raises(InvalidKey):
            parse(HELLO | given)


def test_several_completions_and_their_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_spec, "check_vllm", lambda *_: None)
    tokens = ({"token": "a"}, {"token": "b"}, {"token": "c"})
    script = (
        Piece("a", 0, tokens[:1]),
        Piece("c", 1, tokens[2:]),
        Piece("b", 0, tokens[1:2]),
        Finish(("stop", "length"), 5, 3),
    )
    replicas = Replicas(script, script)
    http = client(replicas, engine="vllm")
    request = HELLO | {"n": 2, "logprobs": True}
    first, second = http.post(PATH, json=request).json()["choices"]
    assert (first["message"]["content"], first["finish_reason"]) == ("ab", "stop")
    assert first["logprobs"]["content"] == list(tokens[:2])
    assert (second["index"], second["message"]["content"]) == (1, "c")
    streamed = events(http.post(PATH, json=request | {"stream": True}).text)
    choices = [event["choices"][0] for event in streamed]
    assert [choice["index"] for choice in choices] == [0, 1, 0, 1, 0, 0, 1]
    assert [choice["finish_reason"] for choice in choices[-2:]] == ["stop", "length"]
    assert [call.stream for call in replicas.calls] == [False, True]
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["VllmRequest"]["properties"].keys() >= {"top_k", "n", "messages"}


def test_events_count_tokens_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_spec, "check_vllm", lambda *_: None)
    script = (Piece("a", usage=(5, 1)), Piece("", usage=(5, 2)), Finish(("stop",), 5, 2))
    replicas = Replicas(script, script)
    http = client(replicas, engine="vllm")
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = HELLO | {"stream": True, "stream_options": options}
    streamed = events(http.post(PATH, json=body).text)
    used = [event["usage"]["completion_tokens"] for event in streamed if "usage" in event]
    assert used == [1, 2, 2]
    body["stream_options"] = options | {"include_usage": False}  # as vLLM, which needs both
    http.post(PATH, json=body)
    assert [call.counted for call in replicas.calls] == [True, False]
    refused = client(Replicas()).post(PATH, json=body)  # transformers
    assert refused.json()["error"]["param"] == "stream_options.continuous_usage_stats"


def test_an_image_is_a_span_and_a_video_has_text_between_its_rows(spec: LlmSpec) -> None:
    picture = Placed("image", (1, 4, 4), 4)
    video = Placed("video", (2, 4, 4), 8, times=(0.5, 1.5))
    ids = [1, spec.image_token_id, 2, spec.video_token_id, 3]
    made = Prompt(*expand(ids, [picture, video], spec, load_tokenizer(TINY)), (picture, video), 9)
    one, other = features(made, spec)
    assert (one.offset, one.rows) == (1, [True] * 4)
    # From the mark before the first group to the last row.
    start = load_tokenizer(TINY).convert_tokens_to_ids("<|vision_start|>")
    assert made.ids[other.offset] == start
    assert (other.rows[:5], other.rows[-4:]) == ([False] + [True] * 4, [True] * 4)
    assert sum(other.rows) == 8
    shown = [token for token, row in zip(made.ids[other.offset :], other.rows, strict=False) if row]
    assert shown == [spec.video_token_id] * 8


def test_images_are_known_by_content_and_size() -> None:
    replicas = Replicas(*[(Finish(("stop",), 1, 1),)] * 3)
    http = client(replicas)
    for photo, detail in ((jpeg(640, 960), "auto"), (jpeg(640, 960), "low"), (jpeg(64, 64), "low")):
        part = image(photo)
        part["image_url"]["detail"] = detail
        messages = [{"role": "user", "content": [part]}]
        assert http.post(PATH, json=HELLO | {"messages": messages}).is_success
    media = [call.media[0] for call in replicas.calls]
    placed = [Placed("image", one.plan.grid_thw, one.plan.tokens) for one in media]
    known = [identity(*each, by_id=True) for each in zip(media, placed, strict=True)]
    assert len({*known, identity(media[0], placed[0], by_id=False)}) == 4
    assert identity(media[0], placed[0], by_id=True) == known[0]


def test_probabilities_have_openai_s_form() -> None:
    def logprob(text: str, value: float, rank: int) -> Any:
        return SimpleNamespace(decoded_token=text, logprob=value, rank=rank)

    choices = {5: logprob("ü", -2.0, 3), 6: logprob("b", -0.5, 1), 7: logprob("c", -1.0, 2)}
    (found,) = likelihoods([5], [choices], 2)
    assert (found["token"], found["logprob"], found["bytes"]) == ("ü", -2.0, [195, 188])
    assert [one["token"] for one in found["top_logprobs"]] == ["b", "c"]
    (lost,) = likelihoods([5], [{5: logprob("a", float("-inf"), 1)}], 0)
    assert json.loads(json.dumps(lost, allow_nan=False))["top_logprobs"] == []


class Vllm:
    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs

    async def generate(self, *_: Any) -> AsyncGenerator[Any]:
        for one in self.outputs:
            if isinstance(one, Exception):
                raise one
            yield one


@pytest.fixture
def engine(spec: LlmSpec, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A VllmEngine without vLLM."""
    exceptions = ("VLLMClientError", "GracefulHTTPError", "EngineDeadError", "EngineGenerateError")
    for name in (
        "vllm",
        "vllm.exceptions",
        "vllm.v1",
        "vllm.v1.engine",
        "vllm.v1.engine.exceptions",
    ):
        fake: Any = ModuleType(name)
        for exception in exceptions:
            setattr(fake, exception, type(exception, (Exception,), {}))
        monkeypatch.setitem(sys.modules, name, fake)
    engine: Any = object.__new__(VllmEngine)
    engine.spec = spec
    monkeypatch.setattr(VllmEngine, "_params", lambda *_: None)
    monkeypatch.setattr(VllmEngine, "_prompt", lambda *_: None)
    return engine


@pytest.mark.parametrize("counted", [False, True])
def test_lost_rows_are_lost_before_any_event(counted: bool, engine: Any) -> None:
    def output(text: str, tokens: list[int], reason: str | None) -> Any:
        one = SimpleNamespace(
            text=text, token_ids=tokens, index=0, logprobs=None, finish_reason=reason
        )
        return SimpleNamespace(outputs=[one])

    media = item(0)
    kept = replace(embedding(media, "a"), reference="a.b.c")
    made = Prompt([1, 2], [0, 0], (), 9)
    call = ChatCall((), (media,), params(), timeout_seconds=60, counted=counted)

    async def events(*outputs: Any) -> list[Any]:
        engine.engine = Vllm(*outputs)
        return [one async for one in engine.generate(call, made, [kept])]

    with pytest.raises(EmbeddingLost):
        asyncio.run(events(output("", [], "error")))
    found = asyncio.run(
        events(output("", [7], None), output("a", [8], None), output("", [], "stop"))
    )
    expected = [Piece("", usage=(2, 1)), Piece("a", usage=(2, 2))] if counted else [Piece("a")]
    assert found == [*expected, Finish(("stop",), 2, 2)]


def test_a_full_queue_of_vllm_is_overload(engine: Any) -> None:
    """With max_num_queued_reqs or max_num_queued_tokens in llm.engine_args."""
    full: Any = sys.modules["vllm.exceptions"]
    engine.engine = Vllm(full.GracefulHTTPError("busy"))
    call = ChatCall((), (), params(), timeout_seconds=60)

    async def events() -> list[Any]:
        return [one async for one in engine.generate(call, Prompt([1], [0], (), 9), [])]

    with pytest.raises(Overloaded, match="busy"):
        asyncio.run(events())
    del full.GracefulHTTPError  # as in other versions of vLLM
    engine.engine = Vllm(full.VLLMClientError("too long"))
    with pytest.raises(InvalidRequest, match="too long"):
        asyncio.run(events())
    engine.engine = Vllm(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        asyncio.run(events())


def test_arguments_of_the_engine(spec: LlmSpec) -> None:
    options = LlmOptions(
        engine="vllm", tensor_parallel_size=2, engine_args={"gpu_memory_utilization": 0.5}
    )
    found = engine_args(options, TINY, spec, URL)
    assert (found["tensor_parallel_size"], found["gpu_memory_utilization"]) == (2, 0.5)
    assert found["ec_transfer_config"]["ec_connector_extra_config"] == {"url": URL}
    assert found["limit_mm_per_prompt"] == {}  # the tower stays: it has the deepstack features
    assert "ec_transfer_config" not in engine_args(options, TINY, spec, "")
    without = engine_args(options, TINY, replace(spec, deepstack=0), URL)
    assert without["limit_mm_per_prompt"] == {"image": 0, "video": 0}
    local = LlmOptions.model_validate({"engine": "vllm", "local_encoder": {"chunk_ms": 3.0}})
    inside = engine_args(local, TINY, replace(spec, deepstack=0), "")
    extra = inside["ec_transfer_config"]["ec_connector_extra_config"]
    assert extra == {"place": "local", "chunk_ms": 3.0}
    assert (inside["limit_mm_per_prompt"], inside["skip_mm_profiling"]) == ({}, False)
    twice = options.model_copy(update={"engine_args": {"model": "other"}})
    with pytest.raises(ConfigError, match=r"llm.engine_args.model: follows from other options"):
        engine_args(twice, TINY, spec, URL)


def test_graphs_inside_vllm_must_suit_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_spec, "check_vllm", lambda *_: None)
    graphs = {"global_token_budgets": [64]}
    options = LlmOptions.model_validate({"engine": "vllm", "local_encoder": {"graphs": graphs}})
    with pytest.raises(ConfigError, match=r"^llm\.local_encoder\.graphs\.global_token_budgets: "):
        llm_spec.read(options, TINY, read(TINY))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("ec_connector_extra_config: decode_step_tokens is 4"),
        ValueError("decode_step_tokens is 4"),
    ],
)
def test_what_the_engine_inside_vllm_refuses_is_said_of_its_key(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(_: Any) -> None:
        raise error

    monkeypatch.setattr(vllm_engine, "local_options", refuse)
    with pytest.raises(ConfigError, match=r"^llm\.local_encoder: decode_step_tokens is 4$"):
        vllm_engine.check_local(object())


def test_vllms_tower_must_normalise_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "local_options", lambda _: None)
    multimodal = SimpleNamespace(mm_device_do_normalize=True)
    config = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=multimodal))
    vllm_engine.check_local(config)
    multimodal.mm_device_do_normalize = False
    with pytest.raises(ConfigError, match=r"^llm\.local_encoder: vLLM's own tower"):
        vllm_engine.check_local(config)


def test_rows_last_as_long_as_a_chat_that_reads_them_by_their_ids() -> None:
    for given, seconds in (
        ({"engine": "vllm"}, 600),
        ({"engine": "vllm", "local_encoder": {}}, 60),
        ({"engine": "transformers"}, 60),
    ):
        llm = LlmOptions.model_validate(given | {"timeout_seconds": 600})
        options = ServiceOptions(model=TINY, llm=llm)
        assert options.lasting_references.ttl_seconds == seconds


def test_tensor_parallelism_reserves_gpus() -> None:
    options = ServiceOptions(
        model=TINY, llm=LlmOptions(engine="vllm", tensor_parallel_size=4, replicas=2)
    )
    assert resources(options)["GPU"] == 1 + 8
    assert LlmOptions(engine="vllm").ongoing_requests == 256
    assert LlmOptions().ongoing_requests == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"engine_args": {"seed": 1}}, "only with engine: vllm"),
        ({"tensor_parallel_size": 2}, "only with engine: vllm"),
        ({"local_encoder": {}}, "local_encoder: only with engine: vllm"),
        ({"engine": "vllm", "local_encoder": {"place": "local"}}, "place"),
        ({"engine": "vllm", "local_encoder": {}, "tensor_parallel_size": 2}, "local_encoder: only"),
        ({"engine": "vllm", "video_pruning_rate": 0.5}, "only with engine: transformers"),
        ({"engine": "vllm", "tensor_parallel_size": 2, "num_gpus": 0.5}, "num_gpus: 1"),
    ],
)
def test_options_belong_to_the_engine(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        LlmOptions(**given)


def test_what_vllm_does_not_serve_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    options, tower = LlmOptions(engine="vllm", **CPU), read(TINY)
    for there, words in (
        (None, r"pip install '.\[vllm\]'"),
        (object(), "is a preset"),
    ):
        monkeypatch.setattr(llm_spec, "find_spec", lambda name, there=there: there)
        with pytest.raises(ConfigError, match=words):
            llm_spec.read(options, TINY, tower)
    with pytest.raises(ConfigError, match="not supported for glm4v"):
        llm_spec.check_vllm(TINY, object(), replace(tower, family="glm4v"))  # type: ignore[arg-type]
