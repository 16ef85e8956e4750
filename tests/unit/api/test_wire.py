"""Requests and responses survive every format; what is wrong is refused with its place."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from io import BytesIO
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from actors.errors import InvalidOption, NotAcceptable
from actors.kernels.gemm.fp8 import Fp8Rows, quantised
from encoder_service.api.http import choose
from encoder_service.api.schema import request_options
from encoder_service.wire import documents as wire
from encoder_service.wire import encoder_pb2 as pb
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.encoder_grpc import packed, unpacked
from encoder_service.wire.formats import (
    JSON,
    MSGPACK,
    NPZ,
    SAFETENSORS,
    WRITERS,
    UnsupportedType,
    WireError,
    read_json,
    read_msgpack,
    to_array,
)
from tests.responses import octets, parse_response

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def document(dtype: str = "bfloat16") -> tuple[dict[str, Any], torch.Tensor]:
    """A response with one tensor and one error, and the tensor."""
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    item = {
        "index": 0,
        "type": "image",
        "grid_thw": [1, 4, 6],
        "tokens": 6,
        "dtype": dtype,
        "shape": [6, 4],
        "data": rows.view(torch.uint8).numpy().reshape(-1),
        "digest": "ab",
        "source": "graph",
        "deepstack": 0,
    }
    error = {"index": 1, "type": "image", "error": {"type": "InvalidMedia", "message": "no"}}
    answer = {"model": "m", "weights": "dummy", "items": [item, error], "timings": {"total_ms": 1}}
    return answer, rows


def scaled_document() -> tuple[dict[str, Any], Fp8Rows]:
    """The same in float8_e4m3."""
    answer, rows = document("float32")
    made = quantised(rows)
    scaled = {"data": octets(made.values), "scales": octets(made.scales)}
    answer["items"][0] |= {"dtype": "float8_e4m3"} | scaled
    return answer, made


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    ("accept", "encoding"),
    [(MSGPACK, "base64"), (JSON, "base64"), (JSON, "float"), (SAFETENSORS, ""), (NPZ, "")],
)
def test_responses_survive_every_format(dtype: str, accept: str, encoding: str) -> None:
    answer, rows = document(dtype)
    read = parse_response(b"".join(WRITERS[accept](answer, encoding)), accept)
    item = read["items"][0]
    sent = rows.float() if accept == NPZ and dtype == "bfloat16" else rows
    assert item.pop("data") == sent.view(torch.uint8).numpy().tobytes()
    assert item == {key: value for key, value in answer["items"][0].items() if key != "data"}
    assert read["items"][1] == answer["items"][1]
    assert {**read, "items": 0} == {**answer, "items": 0}


@pytest.mark.parametrize("accept", [MSGPACK, JSON, SAFETENSORS])
def test_scales_survive(accept: str) -> None:
    answer, rows = scaled_document()
    read = parse_response(b"".join(WRITERS[accept](answer, "base64")), accept)
    assert read["items"][0] == answer["items"][0] | {"data": octets(rows.values)}


def test_scales_in_a_safetensors_file_and_in_npz() -> None:
    answer, rows = scaled_document()
    tensors = load(b"".join(WRITERS[SAFETENSORS](answer, "")))
    assert torch.equal(tensors["0"].float() * tensors["0.scales"][:, None], rows.float())
    file = np.load(BytesIO(b"".join(WRITERS[NPZ](answer, ""))))
    assert np.array_equal(file["0"], rows.float().numpy())
    assert "scales" not in json.loads(file["answer.json"])["items"][0]


def test_every_value_of_float8_is_that_of_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    found = to_array(codes, "float8_e4m3", (2, 128), np.array([1, 0.5], np.float32).view(np.uint8))
    expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy().reshape(2, 128)
    np.testing.assert_array_equal(found, expected * [[1], [0.5]])


@pytest.mark.parametrize("scales", [b"", b"12", b"1" * 8])
def test_scales_that_are_not_one_for_each_row(scales: bytes) -> None:
    with pytest.raises(ValueError, match=r"size|shape"):
        to_array(bytes(12), "float8_e4m3", (3, 4), scales)


def test_safetensors_responses_are_files_for_everybody() -> None:
    answer, rows = document()
    tensors = load(b"".join(WRITERS[SAFETENSORS](answer, "")))
    assert list(tensors) == ["0"]
    assert torch.equal(tensors["0"], rows)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_npz_responses_are_files_for_numpy(dtype: str) -> None:
    answer, rows = document(dtype)
    file = np.load(BytesIO(b"".join(WRITERS[NPZ](answer, ""))))
    assert file.files == ["0", "answer.json"]
    assert file["0"].dtype == (np.float16 if dtype == "float16" else np.float32)
    assert np.array_equal(file["0"], rows.float().numpy())


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_bfloat16_widens_as_torch_does(values: list[float]) -> None:
    rows = torch.tensor([values]).to(torch.bfloat16)
    data = rows.view(torch.uint8).numpy().tobytes()
    assert np.array_equal(to_array(data, "bfloat16", rows.shape), rows.float().numpy())


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", MSGPACK),
        ("*/*", MSGPACK),
        ("application/json, */*", JSON),
        ("*/*;q=0.1, application/vnd.safetensors;q=0.9", SAFETENSORS),
        ("text/html, application/*;q=0.5", MSGPACK),
        ("application/msgpack;q=0, application/json", JSON),
    ],
)
def test_accept(accept: str, chosen: str) -> None:
    assert choose(accept) == chosen


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", JSON),
        ("*/*", JSON),
        ("text/html, application/*;q=0.5", JSON),
        ("application/json;q=0.5, application/msgpack", MSGPACK),
        ("*/*, application/vnd.safetensors", SAFETENSORS),
    ],
)
def test_wildcards_prefer_the_default(accept: str, chosen: str) -> None:
    assert choose(accept, JSON) == chosen


@pytest.mark.parametrize("accept", ["text/html", "application/json;q=0"])
def test_formats_that_nobody_offers(accept: str) -> None:
    with pytest.raises(NotAcceptable, match="is not available; available are"):
        choose(accept)


def test_requests() -> None:
    expected = [RequestItem("image", b"\xff\xd8", None), RequestItem("video", None, "https://a/b")]
    items: list[dict[str, Any]] = [
        {"type": "image", "data": b"\xff\xd8"},
        {"type": "video", "url": "https://a/b"},
    ]
    body: dict[str, Any] = {"items": items, "options": {"dtype": "float32"}}
    assert wire.parse_request(msgpack.packb(body), MSGPACK) == (expected, body["options"])
    items[0]["data"] = base64.b64encode(b"\xff\xd8").decode()
    parsed = wire.parse_request(json.dumps(body).encode(), "application/json; charset=utf-8")
    assert parsed == (expected, body["options"])
    assert wire.parse_request(b"\xff\xd8", "image/jpeg") == (expected[:1], {})
    assert wire.parse_request(b"\0", "video/mp4") == ([RequestItem("video", b"\0")], {})


@pytest.mark.parametrize("head", ["data:video/mp4;base64", "DATA:;x=y;BASE64", "data:;base64"])
def test_data_urls(head: str) -> None:
    item = {"type": "video", "url": f"{head},/9g=", "fps": 2}
    expected = [RequestItem("video", b"\xff\xd8", fps=2)]
    assert wire.parse_request(msgpack.packb({"items": [item]}), MSGPACK) == (expected, {})
    assert wire.parse_request(json.dumps({"items": [item]}).encode(), JSON) == (expected, {})


def test_frames_come_back_as_they_were_sent() -> None:
    item = RequestItem("video", frames=(b"\xff\xd8", b"\x89P"), fps=1.5)
    body = msgpack.packb({"items": [item.document()]})
    assert wire.parse_request(body, MSGPACK) == ([item], {})
    document = item.document() | {
        "frames": [base64.b64encode(one).decode() for one in item.frames or ()]
    }
    assert wire.parse_request(json.dumps({"items": [document]}).encode(), JSON) == ([item], {})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xd8\xff" + b"," * 10_000, r"the body is a file \(JPEG\): send it with its own"),
        (b"[" * 5_000, "not JSON"),
        (b"[]", "must be a map"),
        (b"{}", 'needs "items"'),
        (b'{"items": [], "option": {}}', "unknown key 'option'"),
        (b'{"items": [], "options": 1}', '"options" must be a map'),
        (b'{"items": [1]}', r"items\[0\] must be a map"),
        (b'{"items": [{"type": "smell", "data": ""}]}', "'smell'"),
        (b'{"items": [{"data": "", "uri": ""}]}', r"items\[0\] has an unknown key 'uri'"),
        (b'{"items": [{"type": "image"}]}', 'needs one of "data"'),
        (b'{"items": [{"frames": []}]}', 'the type must be "video"'),
        (b'{"items": [{"type": "video", "frames": [], "url": ""}]}', 'one of "data", "url"'),
        (b'{"items": [{"type": "video", "frames": ""}]}', r"items\[0\].frames must be a list"),
        (b'{"items": [{"type": "video", "frames": [1]}]}', r"items\[0\].frames\[0\] must be"),
        (b'{"items": [{"data": "", "url": ""}]}', 'needs one of "data"'),
        (
            b'{"items": [{"data": "data:image/png;base64,YWI="}]}',
            r"items\[0\].data is a data URL, which only .url. takes: here send what follows its",
        ),
        (b'{"items": [{"data": "a"}]}', r"items\[0\].data is not base64"),
        (b'{"items": [{"data": "YWI\\n="}]}', "not base64"),
        (b'{"items": [{"data": [1]}]}', "must be bytes"),
        (b'{"items": [{"url": 1}]}', "url must be a string"),
        (b'{"items": [{"url": "data:"}]}', r"url: a data URL must read data:image/...;base64,..."),
        (b'{"items": [{"url": "data:;base64x,YQ=="}]}', "must read data:image/"),
        (b'{"items": [{"type": "video", "url": "data:video/mp4,a"}]}', "must read data:video/"),
        (b'{"items": [{"url": "data:;base64,a"}]}', r"items\[0\].url is not base64"),
        (
            b'{"items": [{"type": "video", "url": "data:video/jpeg;base64,YQ==,YQ=="}]}',
            r'items\[0\].url is a data URL of frames: send "frames"',
        ),
    ],
)
def test_broken_requests(body: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.parse_request(body, JSON)


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("value", [b"\xff" * 10**6, nested(2000)], ids=["large", "deep"])
def test_wrong_values_are_shown_in_short(value: Any) -> None:
    with pytest.raises(WireError, match="type must be") as kind:
        wire.parse_item({"type": value}, "items[0]")
    with pytest.raises(WireError, match="fps must be") as fps:
        wire.check_option("fps", value)
    with pytest.raises(InvalidOption, match="dtype cannot be") as dtype:
        request_options({"dtype": value})
    assert max(len(str(one.value)) for one in (kind, fps, dtype)) < 300


@pytest.mark.parametrize("fps", [True, 0, [], float("nan"), 2**31])
def test_options_of_an_item_are_checked_one_by_one(fps: Any) -> None:
    sources: list[dict[str, Any]] = [{"data": ""}, {"frames": []}]
    for source in sources:
        body = json.dumps({"items": [{"type": "video", "fps": fps} | source]}).encode()
        ((item,), _) = wire.parse_request(body, JSON)
        with pytest.raises(WireError, match="fps must be a number above zero"):
            item.kwargs()


@pytest.mark.parametrize(
    "body",
    [
        b"\x81",
        b"\xc1",
        b"\x91" * 100_000,
        b"\x81\xa5items" + b"\xdd\xff\xff\xff\xff",
        msgpack.packb({"items": [msgpack.ExtType(1, b"x")]}),
        msgpack.packb({1: 2}),
        msgpack.packb({"items": []}) + b"\x00",
    ],
)
def test_broken_msgpack(body: bytes) -> None:
    with pytest.raises(WireError):
        wire.parse_request(body, MSGPACK)


def test_unknown_content_types() -> None:
    with pytest.raises(UnsupportedType, match="text/plain"):
        wire.parse_request(b"", "text/plain")


@given(st.binary(max_size=64), st.sampled_from([read_msgpack, read_json]))
def test_any_bytes_give_a_document_or_an_error(
    body: bytes, read: Callable[[bytes], dict[str, Any]]
) -> None:
    try:
        read(body)
    except WireError:
        return


@pytest.mark.parametrize("extra", [0, 1, 2, 3])
def test_base64_longer_than_a_chunk(extra: int) -> None:
    data = bytes(range(256)) * (3 * 2**12) + b"x" * extra
    answer, _ = document()
    answer["items"][0]["data"] = data
    body = b"".join(WRITERS[JSON](answer, "base64"))
    text = json.loads(body)["items"][0]["data"]
    assert text == base64.b64encode(data).decode()
    # Padding where one chunk ends and the next begins.
    inner = text[: 2**22 - 4] + "YQ==" + text[2**22 :] + "YWJj"
    with pytest.raises(WireError, match="not base64"):
        wire.parse_request(json.dumps({"items": [{"data": inner}]}).encode(), JSON)


EMBEDDINGS = st.lists(
    st.tuples(
        st.builds(
            pb.Embedding,
            index=st.integers(0, 2**31 - 1),
            digest=st.text(max_size=9),
            kept_rows=st.lists(st.integers(0, 2**31 - 1), max_size=9),
            error=st.none() | st.builds(pb.Error, message=st.text(max_size=200)),
        ),
        st.binary(max_size=300),
    ),
    max_size=3,
)


@given(EMBEDDINGS, st.text(max_size=9), st.floats(allow_nan=False))
def test_rows_written_around_protobuf_are_what_protobuf_reads_and_writes(
    items: list[tuple[pb.Embedding, bytes]], model: str, total_ms: float
) -> None:
    outer = pb.EncodeResponse(model=model, timings=pb.Timings(total_ms=total_ms))
    written = packed(outer, ((item, memoryview(data)) for item, data in items))
    whole = pb.EncodeResponse.FromString(written)
    assert [one.data for one in whole.items] == [data for _, data in items]
    for message in (written, whole.SerializeToString()):
        answer, found = unpacked(pb.EncodeResponse, message)
        assert answer == outer
        assert [(item, bytes(data)) for item, data in found] == items
