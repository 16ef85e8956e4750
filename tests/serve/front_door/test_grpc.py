"""The API contract over gRPC: the same calls and the same messages, on a real service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.encoder_grpc import EncoderStub
from tests.images import jpeg
from tests.responses import parse_response
from tests.serve.conftest import Cluster
from tests.serve.front_door.conftest import APP
from tests.serve.tiny import BEARER, MAX_BODY_BYTES, MAX_ITEMS, WIDTH

METADATA = (("authorization", BEARER),)


@pytest.fixture(scope="module")
def channel(cluster: Cluster) -> Iterator[grpc.Channel]:
    options = [("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(cluster.grpc, options=options) as one:
        yield one


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> EncoderStub:
    return EncoderStub(channel)


def request(*images: bytes, **options: Any) -> pb.EncodeRequest:
    return pb.EncodeRequest(
        items=[pb.Item(type="image", data=image) for image in images],
        options=pb.Options(**options),
    )


def refusal(call: Any) -> tuple[grpc.StatusCode, dict[str, Any], dict[str, str]]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    details = caught.value.details()
    assert "Traceback" not in details
    return caught.value.code(), json.loads(details), dict(caught.value.trailing_metadata())


def test_rows_are_those_of_http(stub: EncoderStub, cluster: Cluster) -> None:
    images = [jpeg(96, 64), jpeg(64, 64)]
    answer = stub.Encode(request(*images, dtype="float32"), metadata=METADATA)
    assert (answer.model, answer.weights) == ("qwen3vl-tiny", "dummy")
    assert answer.timings.total_ms >= answer.timings.encode_ms > 0
    http = httpx.post(
        f"{cluster.http}/v1/encode",
        files=[("image", ("a", one)) for one in images],
        data={"options": '{"dtype": "float32"}'},
        headers={"authorization": BEARER},
    )
    same = parse_response(http.content, http.headers["content-type"])["items"]
    for mine, theirs in zip(answer.items, same, strict=True):
        for field in ("index", "type", "tokens", "dtype", "digest", "deepstack"):
            assert getattr(mine, field) == theirs[field]
        assert list(mine.grid_thw) == theirs["grid_thw"]
        assert list(mine.shape) == theirs["shape"]
        rows, expected = (np.frombuffer(d, np.float32) for d in (mine.data, theirs["data"]))
        np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_a_stream_gives_items_in_chunks(stub: EncoderStub) -> None:
    large = jpeg(1024, 1024)  # 1024 tokens x 192 x 4 bytes: 0.8 MB
    sent = request(large, jpeg(64, 64), b"nothing", on_error="return", dtype="float32")
    chunks = list(stub.EncodeStream(sent, metadata=METADATA))
    data = {0: b"", 1: b"", 2: b""}
    finished = []
    for chunk in chunks:
        index = chunk.embedding.index
        assert index not in finished
        data[index] += chunk.embedding.data
        if chunk.last:
            finished.append(index)
    assert sorted(finished) == [0, 1, 2]
    assert [len(data[i]) for i in range(3)] == [1024 * WIDTH * 4, 4 * WIDTH * 4, 0]
    (failed,) = [c.embedding for c in chunks if c.embedding.index == 2]
    assert (failed.error.type, failed.error.item) == ("invalid_request", 2)


def test_scales_are_beside_the_rows(stub: EncoderStub) -> None:
    sent = request(jpeg(96, 64), dtype="float8_e4m3")
    (whole,) = stub.Encode(sent, metadata=METADATA).items
    (chunk,) = stub.EncodeStream(sent, metadata=METADATA)
    assert (whole.dtype, len(whole.data), len(whole.scales)) == ("float8_e4m3", 6 * WIDTH, 6 * 4)
    assert (chunk.embedding.data, chunk.embedding.scales) == (whole.data, whole.scales)


def test_a_plan_says_what_encoding_gives(stub: EncoderStub, cluster: Cluster) -> None:
    sent = request(jpeg(96, 64), b"nothing", on_error="return")
    plans, items = (call(sent, metadata=METADATA).items for call in (stub.Plan, stub.Encode))
    assert (plans[0].width, plans[0].height, plans[0].patches) == (96, 64, 24)
    for plan, item in zip(plans, items, strict=True):
        for field in ("index", "type", "grid_thw", "tokens", "digest", "error"):
            assert getattr(plan, field) == getattr(item, field)
    headers = {"authorization": BEARER, "content-type": "image/jpeg"}
    answer = httpx.post(f"{cluster.http}/v1/plan", content=jpeg(96, 64), headers=headers)
    (http,) = answer.json()["items"]
    assert {name: getattr(plans[0], name) for name in http} == http
    assert refusal(lambda: stub.Plan(sent))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("sent", "code", "name", "says"),
    [
        (request(), "INVALID_ARGUMENT", "invalid_request", "no items"),
        (request(b"nothing"), "INVALID_ARGUMENT", "invalid_request", ""),
        (request(jpeg(96, 64), dtype="int8"), "INVALID_ARGUMENT", "invalid_option", "dtype"),
        (request(*[jpeg(96, 64)] * (MAX_ITEMS + 1)), "INVALID_ARGUMENT", "too_large", "max_items"),
        (request(b"x" * (MAX_BODY_BYTES + 1)), "INVALID_ARGUMENT", "too_large", "max_body"),
        (
            pb.EncodeRequest(items=[pb.Item(type="smell", data=b"x")]),
            "INVALID_ARGUMENT",
            "invalid_request",
            "smell",
        ),
        (
            pb.EncodeRequest(items=[pb.Item(url="https://example.com/a.jpg")]),
            "INVALID_ARGUMENT",
            "invalid_request",
            "example.com",
        ),
        (pb.EncodeRequest(items=[pb.Item()]), "INVALID_ARGUMENT", "invalid_request", "items[0]"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_errors_are_statuses(
    stub: EncoderStub, sent: pb.EncodeRequest, code: str, name: str, says: str, streamed: bool
) -> None:
    call = (
        (lambda: list(stub.EncodeStream(sent, metadata=METADATA)))
        if streamed
        else (lambda: stub.Encode(sent, metadata=METADATA))
    )
    found, details, _ = refusal(call)
    assert (found.name, details["type"], details["retryable"]) == (code, name, False)
    assert says in details["message"]


def test_an_error_names_its_item(stub: EncoderStub) -> None:
    _, details, _ = refusal(lambda: stub.Encode(request(jpeg(96, 64), b"no"), metadata=METADATA))
    assert details["item"] == 1


def test_tokens(stub: EncoderStub) -> None:
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        for call in (
            lambda m=metadata: stub.Encode(request(jpeg(96, 64)), metadata=m),
            lambda m=metadata: list(stub.EncodeStream(request(jpeg(96, 64)), metadata=m)),
            lambda m=metadata: stub.GetModel(pb.GetModelRequest(), metadata=m),
            lambda m=metadata: stub.GetPlace(pb.GetPlaceRequest(reference="a.b"), metadata=m),
        ):
            assert refusal(call)[0] is grpc.StatusCode.UNAUTHENTICATED


def test_a_refused_stream_leaves_no_traceback(stub: EncoderStub, cluster: Cluster) -> None:
    metadata = (("x-request-id", "refused"), *METADATA)
    refusal(lambda: list(stub.EncodeStream(request(b"no"), metadata=metadata)))
    logs = [path.read_text() for path in cluster.logs.glob(f"*{APP}_Ingress*")]
    assert any("grpc_stream INVALID_ARGUMENT" in log for log in logs)
    assert not any("Traceback" in log for log in logs)


def test_the_model_is_that_of_http(stub: EncoderStub, cluster: Cluster) -> None:
    card = json.loads(stub.GetModel(pb.GetModelRequest(), metadata=METADATA).json)
    http = httpx.get(f"{cluster.http}/v1/model", headers={"authorization": BEARER})
    assert card == http.json()


def test_standard_health(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", "encoder.v1.Encoder"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watching = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
    assert next(watching).status == serving
    watching.cancel()
    assert set(health.List(health_pb2.HealthListRequest()).statuses) == {"", "encoder.v1.Encoder"}


def test_reflection(channel: grpc.Channel) -> None:
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {"encoder.v1.Encoder", "grpc.health.v1.Health"} <= set(services)


def test_calls_are_counted(stub: EncoderStub, cluster: Cluster) -> None:
    stub.Encode(request(jpeg(96, 64)), metadata=METADATA)
    page = httpx.get(f"{cluster.http}/metrics").text
    assert 'encoder_requests_total{api="grpc",code="OK",deployment="Ingress"' in page
