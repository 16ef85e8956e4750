"""The encoder actor's own process: hits, what is kept, and what is given up with its call."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray import serve
from torch import Tensor

from actors import encoder, pipeline
from actors.autoscaling import OUTSTANDING_PATCHES, OUTSTANDING_SECONDS
from actors.errors import InvalidMedia, TooLarge, Unavailable
from actors.options import (
    ActorOptions,
    CacheOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    ReferenceOptions,
    SharedCacheOptions,
)
from actors.rpc.codec import EncodeCall, ReceivedRows, message_fields, reply_of
from actors.rpc.server import Endpoint
from actors.spec.checkpoint import find
from actors.store.kept import References
from actors.telemetry.tracing import NOBODY
from actors.types import Cost, Dtype, Embedding, Media, Size
from router.replicas.fleet import ReplicaUnreachable
from router.replicas.rpc import ReplicaChannel
from tests.images import jpeg

OPTIONS = ActorOptions(
    model=ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32"),
    encoder=EncoderOptions(device="cpu", num_gpus=0),
    graphs=GraphOptions(token_budgets=(64, 256), max_frames_per_batch=0),
    cache=CacheOptions(max_bytes=10_000_000),
)


@pytest.fixture
def in_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    node = SimpleNamespace(get_node_id=lambda: "node", get_actor_name=lambda: "actor")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: node)


@pytest.fixture
def actor(in_serve: None) -> encoder.Encoder:
    return encoder.Encoder(OPTIONS)


def media(actor: encoder.Encoder, width: int) -> Media:
    plan = actor.pipeline.engine.tower.spec.sizing.plan(Size(width, 64))
    return Media("image", jpeg(width, 64), plan, str(width))


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3"])
async def test_a_hit_in_another_dtype_is_that_of_the_cache(
    actor: encoder.Encoder, dtype: Dtype
) -> None:
    first = await actor.encode([media(actor, 64)], "float32", 30)
    again = await actor.encode([media(actor, 96), media(actor, 64)], dtype, 30)
    (whole,), (other, hit) = first.answers, again.answers
    assert isinstance(whole, Embedding)
    assert isinstance(other, Embedding)
    assert isinstance(hit, Embedding)
    assert (whole.source, other.source, hit.source) == ("graph", "graph", "cache")
    assert (hit.dtype, hit.shape) == (dtype, whole.shape)
    assert len(hit.scales) == (4 * hit.shape[0] if dtype == "float8_e4m3" else 0)
    actor.pipeline.close()


async def test_what_is_to_be_kept_is_kept_by_the_same_call(actor: encoder.Encoder) -> None:
    rubbish = replace(media(actor, 64), data=b"", digest="rubbish")
    reply = await actor.encode([media(actor, 96), rubbish], "float16", 30, keep=True)
    good, bad = reply.answers
    assert isinstance(good, Embedding)
    assert isinstance(bad, InvalidMedia)
    replica, _, name = good.reference.partition(".")
    kept = await actor.fetch(name)
    assert replica == "one"
    assert kept
    assert (kept.media.data, kept.media.digest) == (b"", "96")
    assert kept.embedding.shape == good.shape
    actor.pipeline.references = References(ReferenceOptions(max_bytes=1), actor.series)
    (large,) = (await actor.encode([media(actor, 64)], "float16", 30, keep=True)).answers
    assert isinstance(large, TooLarge)
    actor.pipeline.close()


async def test_a_call_that_ends_while_a_hit_is_converted_gives_up_the_rest(
    actor: encoder.Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await actor.encode([media(actor, 64)], "float32", 30)
    gate, reached, forwards = threading.Event(), threading.Event(), []
    forward = actor.pipeline.engine.tower.forward

    def held(path: str, values: Any) -> Tensor:
        forwards.append(path)
        reached.set()
        gate.wait(60)
        return forward(path, values)

    monkeypatch.setattr(actor.pipeline.engine.tower, "forward", held)
    converting = asyncio.Event()

    async def for_ever(embedding: Embedding, dtype: Dtype) -> Embedding:
        converting.set()
        await asyncio.Event().wait()
        return embedding

    monkeypatch.setattr(pipeline, "converted", for_ever)
    before = asyncio.create_task(actor.encode([media(actor, 96)], "float32", 30))
    await asyncio.to_thread(reached.wait, 10)
    behind = asyncio.create_task(actor.encode([media(actor, 64), media(actor, 128)], "float16", 30))
    await asyncio.wait_for(converting.wait(), 10)
    while not actor.pipeline.engine._waiting:  # decoded, and behind what the engine holds
        await asyncio.sleep(0.01)
    behind.cancel()
    with pytest.raises(asyncio.CancelledError):
        await behind
    gate.set()
    await before
    actor.pipeline.close()
    assert len(forwards) == 1


async def test_the_autoscaler_hears_of_what_waits_in_routers(actor: encoder.Encoder) -> None:
    one = media(actor, 64)
    patches = one.plan.patches
    actor.pipeline.engine.cost = cost = Cost(1.0, 0.5, 0.25)
    seconds = cost.work_seconds(one.plan.work)
    call = asyncio.create_task(actor.encode([one], "float32", 30, waiting_per_sent=2.5))
    await asyncio.sleep(0)
    stats = await actor.record_autoscaling_stats()
    assert stats[OUTSTANDING_PATCHES] == 3.5 * patches
    assert stats[OUTSTANDING_SECONDS] == 3.5 * seconds > 0
    assert (await actor.record_routing_stats())[OUTSTANDING_PATCHES] == patches
    await call
    assert (await actor.record_autoscaling_stats())[OUTSTANDING_PATCHES] == 0
    actor.pipeline.close()


async def test_serve_awaits_its_end_and_that_of_calls_over_grpc(actor: encoder.Encoder) -> None:
    said = await actor.record_replica_metadata()
    assert said == await actor.record_replica_metadata()
    endpoint = Endpoint.of(said)
    assert endpoint
    channel = ReplicaChannel(endpoint, "node")
    call = EncodeCall([media(actor, 64)], "float16", 30, NOBODY, keep=False)
    reply, _ = await channel.call("encode", message_fields(call))
    (answer,) = reply_of(reply, ReceivedRows()).answers
    assert isinstance(answer, Embedding)
    stopping = actor.__del__()
    assert stopping
    await stopping
    with pytest.raises(ReplicaUnreachable):
        await channel.call("check", {})
    assert actor.__del__() is None, "Python's own, later"
    with pytest.raises(Unavailable):
        await actor.encode([media(actor, 64)], "float32", 30)
    channel.retire()
    await asyncio.sleep(0)


def test_a_second_replica_finds_what_the_first_encoded(in_serve: None, tmp_path: Path) -> None:
    """Also in another dtype, and from a copy of the checkpoint."""
    shared = SharedCacheOptions(url=f"file://{tmp_path}/cache")
    options = OPTIONS.model_copy(update={"cache": CacheOptions(shared=shared)})
    files = find(options.model)
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(json.dumps(files.read_json(name)))
    copy = options.model.model_copy(update={"id": str(tmp_path)})

    async def run() -> None:
        first = encoder.Encoder(options)
        second = encoder.Encoder(options.model_copy(update={"model": copy}))
        (made,) = (await first.encode([media(first, 64)], "float32", 30)).answers
        assert isinstance(made, Embedding)
        assert made.source == "graph"
        first.pipeline.writer.shared._writers.shutdown()  # type: ignore[union-attr]
        (hit,) = (await second.encode([media(first, 64)], "float32", 30)).answers
        assert isinstance(hit, Embedding)
        assert hit.source == "cache"
        assert bytes(hit.data) == bytes(made.data)  # type: ignore[arg-type]
        (half,) = (await second.encode([media(first, 64)], "float16", 30)).answers
        assert isinstance(half, Embedding)
        assert (half.source, half.dtype, half.size_bytes) == (
            "cache",
            "float16",
            made.size_bytes // 2,
        )
        for replica in (first, second):
            replica.pipeline.close()

    asyncio.run(run())
