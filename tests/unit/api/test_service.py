"""The front door around a fleet in memory: what a real one cannot be made to do on demand."""

from __future__ import annotations

import asyncio
import threading
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from actors.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidMedia,
    InvalidOption,
    Overloaded,
    Unavailable,
)
from actors.families.registry import read
from actors.options import GraphOptions, PreprocessOptions, ReferenceOptions
from actors.store.kept import Kept
from actors.types import Answer, Dtype, Media
from encoder_service.api.errors import AtItem
from encoder_service.api.http import build
from encoder_service.api.schema import RequestOptions, request_options
from encoder_service.config import ServiceOptions
from encoder_service.ingress import Ingress
from encoder_service.intake.media import probe
from encoder_service.service import Service
from encoder_service.wire.documents import RequestItem
from router.options import RouterOptions
from tests.images import encoded, jpeg, jpeg_segments, opened, png
from tests.unit.front_door import (
    JSON,
    MODEL,
    Fleet,
    client,
    exchange,
    freely,
    post,
    service,
    zeros,
)


@pytest.mark.parametrize(
    ("precisions", "shown"),
    [
        ({}, "auto"),  # none is ready
        ({"a": "fp8", "b": "fp8"}, "fp8"),
        ({"a": "bf16"}, "bf16"),
        ({"a": "fp8", "b": "bf16", "c": ""}, "mixed"),
    ],
)
def test_the_model_card_shows_the_precision_that_replicas_run_in(
    precisions: dict[str, str], shown: str
) -> None:
    fleet = Fleet()
    fleet.precision = precisions
    graphs = GraphOptions(precision="auto", precision_file="plan.json")
    options = ServiceOptions(model=MODEL, graphs=graphs)
    http = TestClient(build(Service(options, read(MODEL), fleet)))
    assert http.get("/v1/model").json()["graphs"]["precision"] == shown


@pytest.mark.parametrize(
    ("error", "status", "name"),
    [
        (Overloaded("full", 1.2), 429, "overloaded"),
        (Unavailable("no replica"), 503, "unavailable"),
        (KeyError("secret"), 500, "internal_error"),
        (TypeError("secret"), 500, "internal_error"),
    ],
)
def test_errors_of_the_fleet(error: Exception, status: int, name: str) -> None:
    http = client(Fleet(error))
    response = post(http)
    assert (response.status_code, response.json()["error"]["type"]) == (status, name)
    assert response.headers.get("retry-after") == ("2" if status == 429 else None)
    assert "secret" not in response.text


def test_without_room_a_request_is_refused_before_it_is_read() -> None:
    fleet, read_bytes = Fleet(), 0

    def body() -> Iterator[bytes]:
        nonlocal read_bytes
        for _ in range(3):
            read_bytes += 1
            yield b"x"

    fleet.full = Overloaded("full", 1.2)
    http = client(fleet)
    response = http.post("/v1/encode", content=body(), headers={"content-type": "image/jpeg"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.json()["error"]["message"] == "full"
    assert read_bytes == 0
    assert http.get("/v1/model").status_code == 200
    fleet.full = None
    http.post("/v1/encode", content=body(), headers={"content-type": "image/jpeg"})
    assert read_bytes == 3


def test_requests_below_a_route_prefix_are_counted() -> None:
    one = service(Fleet())
    with TestClient(build(one), root_path="/prefix") as http:
        http.post("/prefix/v1/encode", content=b"", headers={"content-type": "text/plain"})
        lost = http.post("/prefix/v1/chat/completions")
    assert 'encoder_requests_total{api="http",code="415"} 1.0' in one.metrics.text()
    assert "no language model" in lost.json()["error"]["message"]


def test_requests_are_counted_by_status() -> None:
    one = service(Fleet())
    with TestClient(build(one)) as http:
        post(http)
        http.post("/v1/encode", content=b"", headers={"content-type": "text/plain"})
        http.get("/v1/model")
    for code in ("200", "415"):
        assert f'encoder_requests_total{{api="http",code="{code}"}} 1.0' in one.metrics.text()


def test_readiness_is_the_fleets() -> None:
    assert client(Fleet()).get("/readyz").json() == {"ready_replicas": 1}
    assert client(Fleet(Unavailable("capturing"))).get("/readyz").status_code == 503
    assert client(Fleet(Unavailable("capturing"))).get("/healthz").status_code == 200


def test_a_fleet_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.intake.limits.GRACE_SECONDS", 0.0)
    fleet = Fleet(seconds=60)
    response = post(client(fleet, timeout_seconds=0.1))
    assert response.status_code == 504
    assert response.json()["error"]["retryable"] is True
    assert fleet.cancelled


def test_the_fleet_is_told_what_is_left_of_the_time() -> None:
    fleet = Fleet()
    http = client(fleet, timeout_seconds=9)
    post(http)
    http.post("/v1/encode", files={"image": jpeg(64, 64)}, data={"options": '{"timeout_s": 3}'})
    (_, first), (_, second) = fleet.calls
    assert 8 < first <= 9
    assert 2 < second <= 3


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("r-1.a:b_c", True),
        ("a b", False),
        ("x" * 200, False),
        ("../../etc", False),
        ("$(id)", False),
    ],
)
def test_a_request_id_that_is_fit_for_a_log_is_told(given: str, kept: bool) -> None:
    response = post(client(Fleet(KeyError())), **{"x-request-id": given})
    assert (given in response.json()["error"]["message"]) == kept


@pytest.mark.parametrize(("given", "told"), [(None, True), ("r-1", False), ("$(id)", True)])
def test_a_request_id_that_is_ours_is_in_the_header(given: str | None, told: bool) -> None:
    """One that is the client's own is added by Serve's proxy."""
    response = post(client(Fleet(KeyError())), **({"x-request-id": given} if given else {}))
    if not told:
        assert "x-request-id" not in response.headers
        return
    (new,) = response.headers.get_list("x-request-id")
    assert f"request {new} " in response.json()["error"]["message"]


def test_transparency_is_as_configured_and_told() -> None:
    logo = opened().resize((64, 64))
    logo.putalpha(99)
    for alpha, done in [("white", "composited on white"), ("drop", "dropped")]:
        preprocess = PreprocessOptions.model_validate({"alpha": alpha})
        options = ServiceOptions(model=MODEL, preprocess=preprocess)
        with TestClient(build(Service(options, read(MODEL), Fleet()))) as http:
            answer = http.post("/v1/encode", files={"image": encoded(logo, "PNG")}, headers=JSON)
        (item,) = answer.json()["items"]
        assert item["notice"] == f"transparency is {done} (preprocess.alpha)"


@pytest.mark.parametrize("value", [True, "5", float("nan"), 0, -1])
def test_times_are_numbers(value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"options\.timeout_s"):
        request_options({"timeout_s": value})
    assert request_options({"timeout_s": 5}).timeout_s == 5.0


def test_the_name_of_an_option_is_text() -> None:
    body = b'{"items": [{"data": ""}], "options": {"\\ud800": 1}}'
    sent = JSON | {"content-type": "application/json"}
    answer = client(Fleet()).post("/v1/encode", content=body, headers=sent)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith(r"options.<name> cannot be '\ud800': ")


@pytest.mark.parametrize("encoding", ["base64", "float"])
def test_answers_that_would_be_too_big_are_refused(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder_service.api.answer.MOST_FLOAT_BYTES", 10_000)
    fleet = Fleet()  # 64 x 64: 4 rows of 192 values of 2 bytes
    http = client(fleet, max_response_bytes=10_000 if encoding == "base64" else 20_000)

    def send(items: int) -> Any:
        document = {"items": [{"data": b64encode(jpeg(64, 64)).decode()}] * items}
        sent = document | {"options": {"encoding": encoding, "dtype": "bfloat16"}}
        return http.post("/v1/encode", json=sent, headers=JSON)

    assert send(6).status_code == 200
    refused = send(7)
    assert refused.status_code == 413
    assert "the answer would be 10752 bytes, over 10000" in refused.json()["error"]["message"]
    assert len(fleet.calls) == 1


class NotFinite(Fleet):
    """The second item has an infinity in its last row, and the third NaN."""

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        answers = [zeros(one) for one in media]
        for answer, bits in zip(answers[1:], (0xFF80, 0x7FC0), strict=True):
            assert isinstance(answer.data, np.ndarray)
            answer.data.view("<u2")[-1] = bits
        return [*answers]


def test_rows_that_json_has_no_numbers_for_are_an_error_of_their_item() -> None:
    http = client(NotFinite())

    def send(**options: str) -> Any:
        document = {"items": [{"data": b64encode(jpeg(64, 64)).decode()}] * 3, "options": options}
        return http.post("/v1/encode", json=document, headers=JSON)

    refused = send(encoding="float")
    assert refused.status_code == 422
    assert refused.json()["error"] == {
        "type": "invalid_option",
        "message": "options.encoding: float has no NaN and no infinity, which the rows of this "
        "item contain: leave options.encoding out",
        "item": 1,
        "retryable": False,
    }
    first, *others = send(encoding="float", on_error="return").json()["items"]
    assert first["data"] == [[0.0] * 192] * 4
    assert [one["error"]["item"] for one in others] == [1, 2]
    assert all("data" in one for one in send().json()["items"])


def test_one_item_that_is_too_large_is_not_told_to_be_fewer() -> None:
    image = {"items": [{"data": b64encode(jpeg(64, 64)).decode()}]}
    refused = client(Fleet(), max_response_bytes=1000).post("/v1/encode", json=image, headers=JSON)
    assert refused.status_code == 413
    assert (
        "(limits.max_response_bytes): raise it, send a smaller item, or ask for ids"
        in (refused.json()["error"]["message"])
    )
    kept = image | {"options": {"reference": True}}
    options = ServiceOptions(model=MODEL, references=ReferenceOptions(max_bytes=1000))
    http = TestClient(build(Service(options, read(MODEL), Fleet())))
    refused = http.post("/v1/encode", json=kept, headers=JSON)
    assert "(references.max_bytes): raise it, or send a smaller item" in refused.text
    jpeg_body = {"content-type": "image/jpeg"}
    refused = client(Fleet(), max_body_bytes=100).post(
        "/v1/encode", content=jpeg(64, 64), headers=jpeg_body
    )
    assert refused.status_code == 413
    assert "send fewer or smaller items, or raise the limit" in refused.text


PLAIN = jpeg(64, 64)


@pytest.mark.parametrize(
    ("data", "aside"),
    [
        (PLAIN, False),
        (png(64, 64), True),
        (encoded(opened(), "JPEG", orientation=6), True),
        (jpeg_segments(PLAIN, *[(0xE5, b"")] * 100), True),
        (PLAIN[:2] + b"\xff\xe5\0\2" + bytes(99) + PLAIN[2:], True),
        (PLAIN[:2] + b"\xff\xd0" + PLAIN[2:], True),
        (PLAIN + bytes(2**18), True),
    ],
    ids=["plain", "PNG", "EXIF", "segments", "junk between", "no length", "large"],
)
def test_headers_that_may_take_long_are_read_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, data: bytes, aside: bool
) -> None:
    threads: list[str] = []

    def seen(*args: Any) -> Media:
        threads.append(threading.current_thread().name)
        return probe(*args)

    monkeypatch.setattr("encoder_service.intake.media.probe", seen)
    files = {"image": data}
    assert client(Fleet()).post("/v1/encode", files=files, headers=JSON).status_code == 200
    assert [name.startswith("asyncio_") for name in threads] == [aside]


def test_a_slow_reader_of_a_stream_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.intake.limits.GRACE_SECONDS", 0.0)

    async def collect() -> list[int]:
        items, found = [RequestItem("image", jpeg(64, 64), None)] * 3, []
        async for entry in service(Fleet()).stream(
            items, RequestOptions(timeout_s=1), exchange(), freely
        ):
            await asyncio.sleep(0.4)
            found.append(entry["index"])
        return found

    assert asyncio.run(collect()) == [2, 1, 0]


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_id_whose_keeper_is_cut_off_is_not_waited_for(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CutOff(Fleet):
        async def fetch(self, reference: str) -> Kept:
            await asyncio.Event().wait()
            raise AssertionError

        async def release(self, reference: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("encoder_service.service.FETCH_SECONDS", 0.05)
    monkeypatch.setattr("encoder_service.intake.limits.GRACE_SECONDS", 0.05)
    response = client(CutOff()).request(method, "/v1/embeddings/r.a")
    assert response.status_code == 504
    assert "not answered within 0.05 s: try again" in response.json()["error"]["message"]


def test_ids_that_nobody_gets_do_not_delay_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class CutOff(Fleet):
        async def encode(self, media: list[Media], *_: Any, **__: Any) -> list[Answer]:
            return [replace(zeros(media[0]), reference="r.a"), InvalidMedia("torn")]

        async def release(self, reference: str) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("encoder_service.service.FETCH_SECONDS", 0.05)
    monkeypatch.setattr("encoder_service.intake.limits.GRACE_SECONDS", 0.05)
    items = [RequestItem("image", jpeg(64, 64), None)] * 2
    options = RequestOptions(reference=True)

    async def refused() -> None:
        async with asyncio.timeout(5):
            await service(CutOff()).encode(items, options, exchange(), freely)

    with pytest.raises(AtItem):
        asyncio.run(refused())


def test_a_stream_that_stops_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.intake.limits.GRACE_SECONDS", 0.0)

    async def first() -> None:
        item = RequestItem("image", jpeg(64, 64), None)
        await anext(
            service(Fleet(seconds=60)).stream(
                [item], RequestOptions(timeout_s=0.1), exchange(), freely
            )
        )

    with pytest.raises(DeadlineExceeded, match=r"not answered within 0\.1 s"):
        asyncio.run(first())


def test_a_cancelled_request_cancels_the_work() -> None:
    async def hang_up() -> bool:
        fleet = Fleet(seconds=60)
        item = RequestItem("image", jpeg(64, 64), None)
        work = asyncio.create_task(
            service(fleet).encode([item], RequestOptions(), exchange(), freely)
        )
        while not fleet.calls:
            await asyncio.sleep(0.01)
        work.cancel()
        await asyncio.wait([work])
        return fleet.cancelled

    assert asyncio.run(hang_up())


def test_a_stream_keeps_positions_over_items_that_were_refused() -> None:
    async def collect(files: Sequence[bytes]) -> dict[int, Any]:
        items = [RequestItem("image", data, None) for data in files]
        options = RequestOptions(on_error="return")
        stream = service(Fleet()).stream(items, options, exchange(), freely)
        return {one["index"]: one async for one in stream}

    found = asyncio.run(collect([b"no", jpeg(64, 64), b"no", jpeg(96, 64)]))
    assert [found[place]["error"]["item"] for place in (0, 2)] == [0, 2]
    assert (found[1]["shape"][0], found[3]["shape"][0]) == (4, 6)


def test_limits_and_tokens_change_while_an_ingress_runs(caplog: pytest.LogCaptureFixture) -> None:
    one, routers = service(Fleet()), list[RouterOptions]()
    router = SimpleNamespace(configure=routers.append)
    options = ServiceOptions(model=MODEL)
    ingress: Any = SimpleNamespace(
        options=options, spec=one.spec, running=False, service=one, router=router
    )
    http = TestClient(build(one))
    files = [("image", jpeg(64, 64)) for _ in range(2)]
    headers = {"authorization": "Bearer let me in"}

    def change(user_config: Any) -> None:
        asyncio.run(Ingress.reconfigure(ingress, user_config))

    def code() -> int:
        return http.post("/v1/encode", files=files, headers=headers).status_code

    with pytest.raises(ConfigError, match="max_outstanding_patches is 3, less than"):
        change({"router": {"max_outstanding_patches": 3}})
    asyncio.run(Ingress.check_health(ingress))
    assert code() == 200
    change({"limits": {"max_items": 1}, "router": {"policy": "random"}})
    assert (code(), one.card["limits"]["max_items"]) == (413, 1)
    assert [router.policy for router in routers] == ["random"]
    change({"limits": {"max_items": "1"}})
    assert "the options stay as they were: limits.max_items: " in caplog.text
    assert code() == 413
    change({"auth": {"token_sha256": ["0" * 64]}, "limits": {"max_pixels": 64}})
    assert code() == 401
    change({"auth": {"token_sha256": [sha256(b"let me in").hexdigest()]}})
    assert code() == 200
    change({"auth": {"token_sha256_file": "/no such file"}, "limits": {"max_items": 1}})
    assert code() == 200, "all of a user_config or nothing"
    change({"limits": {"max_pixels": 64}})
    assert code() == 413
    change({})
    assert code() == 200
