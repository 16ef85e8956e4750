"""Our embeddings inside vLLM itself: `make vllm`. On the CPU, with small random models.

VLLM_PYTHON is the Python of an environment that has vLLM, and msgpack.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import gettempdir
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.rpc.server import DIRECTORY_PREFIX
from encoder_service import Client, Embedding
from encoder_service.bench.cluster import cluster, free_ports, logical_cpus, service
from encoder_service.bench.mix import picture
from encoder_service.config import ServiceOptions
from encoder_service.engines.openai_proxy import UPSTREAM_TIMEOUT_SECONDS
from encoder_service.engines.vllm import CONNECTOR
from tests.engines import checkpoint
from tests.engines.servers import running, vllm
from tests.images import jpeg
from tests.processes import actors, process
from tests.videos import video

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PYTHON = os.environ.get("VLLM_PYTHON", "")
if not PYTHON:
    pytest.skip("VLLM_PYTHON names no environment with vLLM", allow_module_level=True)

TOLERANCE = 2e-3
"""Of the logarithm of a probability, in float32, where images are resized by two libraries."""
NONE = {"image": 0, "video": 0}
TOWER = {"image": 3, "video": 1}
LIMITS = {"qwen3_vl": TOWER}
"""vLLM 0.32 and 0.33 drop Qwen3-VL's deepstack features together with its tower."""
DEVICE_BYTES = 100_000
"""Of the encoder's memory that vLLM's worker opens: for one image, but not for a resized one."""
Part = dict[str, Any]
FILES = {
    "one image": [jpeg(160, 256)],
    "two images": [jpeg(160, 256), jpeg(96, 96, "chelsea.png")],
    "a resized image": [jpeg(301, 503)],
    "a video": [video(8, size=(96, 64), fps=4)],
}


@dataclass(frozen=True)
class Engines:
    """The same model five times."""

    family: str
    client: Client
    encoder: str
    """URL of the encoder service, which `client` talks to."""
    whole: str
    """Of a vLLM that encodes images itself."""
    language: str
    """Of a vLLM that gets embeddings, in requests and through the EC connector."""
    local: str
    """Of a vLLM with our engine in its process, whose log is `folder`/local.log."""
    folder: Path

    @property
    def local_log(self) -> str:
        return (self.folder / "local.log").read_text()


def on_cpu(model: Path, **sections: Any) -> ServiceOptions:
    """One encoder of a checkpoint."""
    return ServiceOptions.model_validate(
        {
            "model": {"id": str(model), "dtype": "float32"},
            "encoder": {"replicas": 1, "num_gpus": 0, "num_cpus": 0.1, "device": "cpu"},
            "router": {"num_cpus": 0.1},
            "ingress": {"num_cpus": 0.1},
            **sections,
        }
    )


@pytest.fixture(scope="module", params=sorted(checkpoint.PROCESSORS))
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint.write(folder / "model", family)
    references = {"device_bytes": DEVICE_BYTES, "ttl_seconds": UPSTREAM_TIMEOUT_SECONDS}
    options = on_cpu(folder / "model", references=references)  # the time is for `proxy --by-id`
    with ExitStack() as stack:
        where = stack.enter_context(cluster(logical_cpus(options), object_store_bytes=400_000_000))
        stack.enter_context(service(options, where))
        connector = CONNECTOR | {"ec_connector_extra_config": {"url": where.http}}
        whole = vllm(PYTHON, folder, "whole", limit_mm_per_prompt=TOWER)
        language = vllm(
            PYTHON,
            folder,
            "language",
            limit_mm_per_prompt=LIMITS.get(family, NONE),
            ec_transfer_config=connector,
        )
        extra = {"place": "local", "graphs": {"token_budgets": [64, 256]}}
        local = vllm(
            PYTHON,
            folder,
            "local",
            limit_mm_per_prompt=TOWER,
            ec_transfer_config=connector | {"ec_connector_extra_config": extra},
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")  # says which images our code decodes
            inside = stack.enter_context(local)
        yield Engines(
            family,
            stack.enter_context(Client(where.http)),
            where.http,
            stack.enter_context(whole),
            stack.enter_context(language),
            inside,
            folder,
        )


@dataclass(frozen=True)
class Answer:
    """Of a chat, greedy."""

    prompt_tokens: int
    text: str
    likely: list[dict[str, float]]
    """Logarithms of the probabilities of the likeliest tokens, at each place."""


def ask(url: str, parts: list[Part], **more: Any) -> httpx.Response:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}],
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 10,
    } | more
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=200, trust_env=False)


def answer(url: str, parts: list[Part], **more: Any) -> Answer:
    response = ask(url, parts, **more)
    assert response.is_success, response.text
    document = response.json()
    choice = document["choices"][0]
    likely = [
        {one["token"]: one["logprob"] for one in place["top_logprobs"]}
        for place in choice["logprobs"]["content"]
    ]
    return Answer(document["usage"]["prompt_tokens"], choice["message"]["content"], likely)


def shown(file: bytes) -> Part:
    """A file as OpenAI's API takes it."""
    kind, mime = (
        ("image_url", "image/jpeg") if file[:2] == b"\xff\xd8" else ("video_url", "video/mp4")
    )
    return {"type": kind, kind: {"url": f"data:{mime};base64,{b64encode(file).decode()}"}}


def assert_same(found: Answer, expected: Answer) -> None:
    assert (found.prompt_tokens, found.text) == (expected.prompt_tokens, expected.text)
    for ours, theirs in zip(found.likely, expected.likely, strict=True):
        both = ours.keys() & theirs.keys()
        assert len(both) >= len(theirs) - 1, "the last may be another one, as likely"
        assert max(abs(ours[token] - theirs[token]) for token in both) < TOLERANCE


@pytest.mark.parametrize("files", sorted(FILES))
def test_embeddings_are_answered_as_the_images_are(engines: Engines, files: str) -> None:
    expected = answer(engines.whole, [shown(file) for file in FILES[files]])
    embeddings = engines.client.encode(FILES[files], dtype="float32")
    assert_same(answer(engines.language, parts(embeddings)), expected)
    kept = engines.client.encode(FILES[files], dtype="float32", reference=True)
    assert_same(answer(engines.language, parts(kept)), expected)


@pytest.mark.parametrize("files", sorted(FILES))
def test_with_our_engine_inside_images_are_answered_as_by_vllm_alone(
    engines: Engines, files: str
) -> None:
    images = [shown(file) for file in FILES[files]]
    before = engines.local_log
    assert_same(answer(engines.local, images), answer(engines.whole, images))
    log = engines.local_log
    assert "the engine encoded its first item" in log
    accepted, kept = (
        log.count(line) - before.count(line) for line in ("accepted a JPEG", "kept 1 images")
    )
    assert accepted == (0 if files == "a video" else len(images))
    assert files == "a video" or 1 <= kept <= accepted  # vLLM caches them
    assert "the encoder service's code" not in (engines.folder / "whole.log").read_text()
    assert "vLLM's own tower encodes an item" not in log
    assert "the plugin encoder_service is not loaded" not in log


def test_an_image_that_is_too_large_for_our_engine_is_answered_too(engines: Engines) -> None:
    image = [shown(jpeg(672, 640))]
    assert_same(answer(engines.local, image), answer(engines.whole, image))
    assert "and the largest budget has 256: add a larger one" in engines.local_log
    assert metrics(engines.local)["left_total"] == 1


def test_images_that_vllm_evicts_and_needs_again_are_answered(engines: Engines) -> None:
    """Its encoder cache has room for few of these. Some are evicted in the very step that schedules
    a request for them, so that its tower must encode them at once."""
    if engines.family != "qwen3_vl":
        pytest.skip("for one family")
    extra = {"place": "local", "graphs": {"token_budgets": [64, 256]}, "decode_step_tokens": 128}
    options = {
        "limit_mm_per_prompt": TOWER,
        "max_num_batched_tokens": "256",
        "ec_transfer_config": CONNECTOR | {"ec_connector_extra_config": extra},
    }
    images = [[shown(picture(288, 352, seed))] for seed in range(30)]  # 99 tokens each
    expected = [answer(engines.whole, image, max_tokens=2) for image in images]
    random = Random(1)
    with (
        vllm(PYTHON, engines.folder, "small", **options) as url,
        ThreadPoolExecutor(8) as threads,
    ):
        for _ in range(20):
            some = random.sample(range(30), 14)
            asked = [random.choice(some) for _ in range(60)]
            found = threads.map(lambda one: answer(url, images[one], max_tokens=2), asked)
            for one, place in zip(found, asked, strict=True):
                assert_same(one, expected[place])


def test_vllms_metrics_count_what_was_loaded(engines: Engines) -> None:
    files = [*FILES["one image"], jpeg(160, 96)]
    (kept, gone) = engines.client.encode(files, dtype="float32", reference=True)
    assert ask(engines.language, parts([kept])).is_success
    engines.client.release(gone.reference)
    assert ask(engines.language, parts([gone])).status_code == 500
    found = metrics(engines.language)
    assert found["loaded_total"] == found["seconds_count"] >= 1
    assert found["bytes_total"] >= kept.shape[0] * kept.shape[1] * 4
    assert found["failed_total"] >= 1
    image = [shown(jpeg(64, 128))]
    before = metrics(engines.local)
    assert answer(engines.local, image).text
    after = metrics(engines.local)
    assert after["loaded_total"] == before["loaded_total"] + 1
    assert after["left_total"] == before["left_total"]


def test_rows_are_copied_from_the_encoders_memory_or_received(engines: Engines) -> None:
    for size, path in (((128, 192), "ipc"), ((301, 509), "unix")):
        before = metrics(engines.language)
        for name in ("astronaut.png", "coffee.png"):
            # The first may be received, before the worker has opened the memory.
            file = jpeg(*size, name)
            kept = engines.client.encode([file], dtype="float32", reference=True)
            assert_same(answer(engines.language, parts(kept)), answer(engines.whole, [shown(file)]))
        after = metrics(engines.language)
        assert after[f"{path}_total"] > before.get(f"{path}_total", 0)
        assert after["http_total"] == 0


def test_rows_are_received_over_tcp_where_the_encoders_sockets_are_not(engines: Engines) -> None:
    allowed = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    if engines.family != "qwen2_vl" or not allowed:
        pytest.skip("for one family, where a mount namespace may be made")
    expected = {name: answer(engines.whole, [shown(one) for one in FILES[name]]) for name in FILES}
    with elsewhere(engines) as url:
        for name in FILES:
            kept = engines.client.encode(FILES[name], dtype="float32", reference=True)
            assert_same(answer(url, parts(kept)), expected[name])
        found = metrics(url)
    different = {file for files in FILES.values() for file in files}
    assert found["tcp_total"] == found["loaded_total"] == len(different)


@pytest.mark.parametrize("prefixes", ["without", "with"])
def test_an_image_that_comes_again_is_fetched_once(engines: Engines, prefixes: str) -> None:
    """With and without vLLM's prefix cache, whose blocks here have 128 tokens."""
    if engines.family != "qwen2_vl" and prefixes == "with":
        pytest.skip("for one family")
    image = jpeg(224, 224, "chelsea.png" if prefixes == "with" else "coffee.png")
    kept, again = (
        engines.client.encode([image], dtype="float32", reference=True)[0] for _ in range(2)
    )
    assert kept.reference != again.reference
    text = {"type": "text", "text": 40 * "Words. "}
    with ExitStack() as stack:
        url = engines.language
        if prefixes == "with":
            url = stack.enter_context(cached(engines))
        before = metrics(url)
        for number, content in enumerate(
            (["i", "t"], ["i", "t", "i"], ["t", "i", "i"], ["i", "t", "i", "t", "i"])
        ):
            found, expected = (
                [{"i": picture, "t": text}[each] for each in content]
                for picture in ((kept, again)[number % 2].to_vllm(), shown(image))
            )
            assert_same(answer(url, found), answer(engines.whole, expected))
            if not number:
                for one in (kept, again):
                    engines.client.release(one.reference)
        after = metrics(url)
        hits = metrics(url, "vllm:prefix_cache_")["hits_total"]
    for name in ("loaded_total", "seconds_count"):
        assert after[name] == before.get(name, 0) + 1
    assert after["failed_total"] == before.get("failed_total", 0)
    assert (hits > 0) == (prefixes == "with")


def test_with_our_engine_inside_an_image_that_comes_again_is_encoded_once(
    engines: Engines,
) -> None:
    image, text = shown(jpeg(224, 224, "chelsea.png")), {"type": "text", "text": 40 * "Words. "}
    before = metrics(engines.local)
    for content in ([image, text], [image, text, image], [text, image, image]):
        assert_same(answer(engines.local, content), answer(engines.whole, content))
    after = metrics(engines.local)
    assert after["loaded_total"] == before.get("loaded_total", 0) + 1
    assert after["left_total"] == before.get("left_total", 0)


@contextmanager
def cached(engines: Engines) -> Iterator[str]:
    """URL of a vLLM like that of `language`, with a prefix cache."""
    extra = {"ec_connector_extra_config": {"url": engines.encoder}}
    options = {
        "limit_mm_per_prompt": LIMITS.get(engines.family, NONE),
        "ec_transfer_config": CONNECTOR | extra,
        "enable_prefix_caching": None,
    }
    with vllm(PYTHON, engines.folder, "cached", **options) as url:
        yield url


@contextmanager
def elsewhere(engines: Engines) -> Iterator[str]:
    """URL of a vLLM like that of `language`, but as in another container: empty directories hide
    the encoders' unix sockets."""
    hide = f"for each in {gettempdir()}/{DIRECTORY_PREFIX}*; do mount -t tmpfs none $each; done"
    python = engines.folder / "elsewhere.sh"
    python.write_text(
        f"""#!/bin/sh\nexec unshare --mount sh -c '{hide}; exec {PYTHON} "$@"' sh "$@"\n"""
    )
    python.chmod(0o700)
    options = {
        "limit_mm_per_prompt": NONE,
        "ec_transfer_config": CONNECTOR | {"ec_connector_extra_config": {"url": engines.encoder}},
    }
    with vllm(str(python), engines.folder, "elsewhere", **options) as url:
        yield url


def test_every_worker_of_tensor_parallelism_gets_the_rows(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if engines.family != "qwen2_vl" or len(cores) < 2:
        pytest.skip("for one family, on two cores")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[1]}")
    options = {
        "limit_mm_per_prompt": NONE,
        "ec_transfer_config": CONNECTOR | {"ec_connector_extra_config": {"url": engines.encoder}},
        "tensor_parallel_size": 2,
    }
    expected = {name: answer(engines.whole, [shown(one) for one in FILES[name]]) for name in FILES}
    with vllm(PYTHON, engines.folder, "parallel", **options) as url:
        for name in ("one image", "a resized image", "two images", "one image", "a resized image"):
            kept = engines.client.encode(FILES[name], dtype="float32", reference=True)
            assert_same(answer(url, parts(kept)), expected[name])
        found = metrics(url)
    assert found["ipc_total"] >= 1
    assert found["unix_total"] >= 1


def metrics(url: str, prefix: str = "vllm:encoder_service_") -> dict[str, float]:
    """By name, without the prefix: of our connector, or others."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return {
        one.name.removeprefix(prefix): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name.startswith(prefix)
    }


def parts(embeddings: list[Embedding]) -> list[Part]:
    return [one.to_vllm() for one in embeddings]


def test_the_images_matter(engines: Engines) -> None:
    files = jpeg(96, 96), jpeg(96, 96, "chelsea.png")
    one, other = (answer(engines.whole, [shown(file)]) for file in files)
    assert one.prompt_tokens == other.prompt_tokens
    assert abs(max(one.likely[0].values()) - max(other.likely[0].values())) > 10 * TOLERANCE


@contextmanager
def proxy(engines: Engines, upstream: str, *options: str) -> Iterator[str]:
    """URL of a proxy."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "encoder_service.cli", "proxy", "--port", str(port),
        "--upstream", upstream, "--encoder", engines.encoder, *options,
    ]  # fmt: skip
    with running(command, f"{url}/health", Path(os.devnull)):
        yield url


def test_the_proxy_gives_embeddings_for_images(engines: Engines) -> None:
    files = FILES["two images"]
    images = [shown(file) for file in files]
    with proxy(engines, engines.language) as url:
        found = answer(url, images)
    assert found == answer(engines.language, parts(engines.client.encode(files)))
    before = metrics(engines.language).get("loaded_total", 0)
    with proxy(engines, engines.language, "--by-id") as url:
        assert answer(url, images) == found
    assert metrics(engines.language)["loaded_total"] == before + len(images)


def test_vllm_refuses_the_proxys_ids_without_the_connector(engines: Engines) -> None:
    with proxy(engines, engines.whole, "--by-id") as url:
        response = ask(url, [shown(file) for file in FILES["one image"]])
        assert response.status_code == 400
        assert "should contain the fields" in response.text
        assert ask(url, []).is_success


def test_a_reference_that_cannot_be_had_fails_its_request_alone(engines: Engines) -> None:
    (kept,) = engines.client.encode([jpeg(128, 64)], dtype="float32", reference=True)
    engines.client.release(kept.reference)
    response = ask(engines.language, parts([kept]))
    assert response.status_code == 500
    (kept,) = engines.client.encode([jpeg(192, 96)], dtype="float32", reference=True)
    wrong = replace(kept, grid_thw=(1, 2, 2), tokens=1, shape=(1, kept.shape[1]))
    assert ask(engines.language, parts([wrong])).status_code == 500
    assert answer(engines.language, parts([kept])).text


def test_with_our_engine_inside_an_id_fails_its_request_alone(engines: Engines) -> None:
    """The engine fetches nothing, and vLLM's process would end."""
    image = FILES["one image"]
    kept = engines.client.encode(image, dtype="float32", reference=True)
    assert ask(engines.local, parts(kept)).status_code == 500
    assert answer(engines.local, [shown(image[0])]).text


def test_an_id_that_vllm_replaces_fails_its_request_alone(engines: Engines) -> None:
    (kept,) = engines.client.encode(FILES["one image"], dtype="float32", reference=True)
    options = {"max_pixels": 1_000_000}
    refused = ask(engines.language, parts([kept]), mm_processor_kwargs=options)
    # Newer ones refuse the option itself.
    assert refused.status_code == 500 or "--trust-request-mm-kwargs" in refused.text
    nameless = [
        {key: value for key, value in part.items() if key != "uuid"} for part in parts([kept])
    ]
    assert not ask(engines.language, nameless).is_success
    assert answer(engines.language, parts([kept])).text


def test_a_name_with_a_dot_is_no_reference_where_rows_are_there(engines: Engines) -> None:
    (part,) = parts(engines.client.encode(FILES["one image"], dtype="float32"))
    assert answer(engines.language, [part | {"uuid": "photo.jpg"}]) == answer(
        engines.language, [part]
    )


def test_a_replica_that_is_killed_fails_the_requests_that_need_it(engines: Engines) -> None:
    files = [*FILES["one image"], jpeg(96, 160)]
    (kept, lost) = engines.client.encode(files, dtype="float32", reference=True)
    assert ask(engines.language, parts([kept])).is_success
    replica = kept.reference.partition(".")[0]
    (name,) = (actor for actor in actors() if actor.endswith(replica))
    os.kill(process(name), signal.SIGKILL)
    assert ask(engines.language, parts([lost])).status_code == 500
    assert ask(engines.language, parts([kept])).is_success, "vLLM has it"
    (kept,) = engines.client.encode(FILES["one image"], dtype="float32", reference=True)
    assert kept.reference.partition(".")[0] != replica
    expected = answer(engines.whole, [shown(file) for file in FILES["one image"]])
    for _ in range(2):
        assert_same(answer(engines.language, parts([kept])), expected)
