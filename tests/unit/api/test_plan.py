"""Plans say what encoding gives, and need no encoder. Both protocols, through the real client."""

from __future__ import annotations

import asyncio
import hashlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from actors.errors import Overloaded, Unavailable
from actors.families import registry
from actors.options import (
    ActorOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from actors.pipeline import open_pipeline
from actors.spec.video import retention_mask
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import open_spans
from actors.types import Answer, Dtype, Kind, Media
from encoder_service.api.grpc import serving
from encoder_service.api.http import build
from encoder_service.api.schema import RequestOptions
from encoder_service.bench.cluster import free_ports
from encoder_service.client import (
    AsyncClient,
    Embedding,
    Frames,
    Input,
    Plan,
    ServiceError,
    Source,
    Video,
)
from encoder_service.client.items import read_plans
from encoder_service.config import AuthOptions, FetchOptions, IngressOptions, ServiceOptions
from encoder_service.intake.fetch import Fetcher
from encoder_service.service import Service
from encoder_service.wire.documents import KWARGS, RequestItem
from tests import checkpoints_audio
from tests.images import animated, encoded, jpeg, opened, png
from tests.small_presets import SMALL, write_small
from tests.unit.front_door import JSON, MODEL, Fleet, client, service
from tests.unit.proxied import listening
from tests.videos import video

TINY = ["qwen3vl-tiny", "deepseek-ocr-tiny"]
PRESETS = [*TINY, *(pytest.param(name, marks=pytest.mark.extended) for name in SMALL)]
ROTATED = encoded(opened().resize((90, 60)), "JPEG", orientation=6)


@pytest.fixture(autouse=True)
def no_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have started Ray, and nobody here reads from its store."""
    monkeypatch.setattr("actors.store.shared_memory.ray.is_initialized", lambda: False)


class Encoding(Fleet):
    """Encodes on the CPU."""

    def __init__(self, model: ModelOptions) -> None:
        super().__init__()
        options = ActorOptions(
            model=model,
            encoder=EncoderOptions(device="cpu", num_gpus=0),
            graphs=GraphOptions(mode="off", blocks="reference"),
        )
        spans = open_spans(options.tracing, "encoder")
        self.pipeline = open_pipeline(options, EncoderMetrics(), spans, "one")

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        self.calls.append((dtype, timeout_seconds))
        self.plans = [one.plan for one in media]
        return list((await self.pipeline.encode(media, dtype, timeout_seconds)).values())


@asynccontextmanager
async def clients(one: Service) -> AsyncIterator[list[AsyncClient]]:
    """One over HTTP and one over gRPC."""
    (port,) = free_ports(1)
    async with (
        serving(one, IngressOptions(grpc_port=port)),
        listening(build(one)) as url,
        AsyncClient(url, "open", retries=0) as http,
        AsyncClient(f"grpc://127.0.0.1:{port}", "open", retries=0) as rpc,
    ):
        yield [http, rpc]


def facts(one: Plan | Embedding | ServiceError) -> tuple[object, ...]:
    if isinstance(one, ServiceError):
        return one.type, one.message, one.item
    times = one.timestamps, one.second_per_grid_ts
    return one.index, one.type, one.grid_thw, one.tokens, one.digest, one.notice, times


def test_every_family_has_a_preset_here() -> None:
    folder = Path(registry.__file__).parent
    files = [file for name in (*TINY, *SMALL) for file in folder.glob(f"*/{name}.json")]
    hearing = [
        one for one in registry.specs() if one.MODEL_TYPES.keys() & checkpoints_audio.WRITERS.keys()
    ]
    found = {file.parent for file in files} | {Path(str(one.__file__)).parent for one in hearing}
    assert found == {file.parent for file in folder.glob("*/spec.py")}


MAX_PATCHES = {"nemotron-3-nano-omni": 100}
"""Where an image has no fewer than so many."""


@pytest.mark.parametrize("preset", PRESETS)
def test_a_plan_is_what_encoding_gives(preset: str, tmp_path: Path) -> None:
    name = str(write_small(tmp_path, preset)) if preset in SMALL else preset
    model = ModelOptions(id=name, load_format="dummy")
    frames = Frames([jpeg(64, 48)] * 4, fps=2)
    gif = animated("GIF", 3)
    moving = [Video(animated("GIF", 12)), Video(animated("WEBP", 5))]
    sources: list[Source] = [jpeg(300, 200), ROTATED, gif, video(8), frames, *moving, b"no image"]
    asked: list[tuple[Kind, dict[str, Any]]] = [
        ("image", {"max_pixels": 20_000}),
        ("image", {"min_pixels": 70_000}),
        ("image", {"max_patches": MAX_PATCHES.get(preset, 2)}),
        ("video", {"max_pixels": 5_000}),
        ("video", {"fps": 2}),
        ("video", {"num_frames": 4}),
    ]
    files = {"image": jpeg(300, 200), "video": video(8)}
    sources += [Input(files[kind], **kwargs) for kind, kwargs in asked]

    async def run() -> None:
        fleet = Encoding(model)
        spec = registry.read(model)
        async with clients(Service(ServiceOptions(model=model), spec, fleet)) as both:
            for one in both:
                fleet.calls.clear()
                plans = await one.plan(sources, "return", evs_rate=0.5)
                assert not fleet.calls
                answers = await one.encode(sources, on_error="return", evs_rate=0.5)
                assert len(fleet.calls) == 1
                assert [facts(plan) for plan in plans] == [facts(answer) for answer in answers]
                kinds = [type(plan) for plan in plans]
                taken = [Plan if spec.video else ServiceError] * 4
                taken += [ServiceError]
                taken += [
                    Plan if kwargs.keys() <= spec.defaults(kind).keys() else ServiceError
                    for kind, kwargs in asked
                ]
                assert kinds == [Plan, Plan, Plan, *taken]
        fleet.pipeline.close()

    asyncio.run(run())


async def test_rows_that_are_left_of_a_video_are_named() -> None:
    fleet = Encoding(MODEL)
    film = video(8, size=(96, 64))
    async with clients(Service(ServiceOptions(model=MODEL), registry.read(MODEL), fleet)) as both:
        for one in both:
            (whole,) = await one.encode([film], "float32")
            photo, left = await one.encode([jpeg(64, 64), film], "float32", evs_rate=0.5)
            assert whole.kept_rows == photo.kept_rows == ()
            assert len(left.kept_rows) == left.tokens == sum(left.frame_tokens) < whole.tokens
            assert np.array_equal(left.numpy(), whole.numpy()[list(left.kept_rows)])
            # All values of a row count, those of deepstack features too.
            plan = fleet.plans[-1]
            mask = retention_mask(whole.numpy(), plan, 0.5)
            assert left.kept_rows == tuple(mask.nonzero()[0])
    fleet.pipeline.close()


def test_the_plan_of_an_image_that_may_be_pruned_is_that_of_the_whole() -> None:
    prune = PreprocessOptions(prune="exact")
    sheet = Image.new("RGB", (192, 128), "white")
    sheet.paste(opened().resize((64, 64)), (96, 32))
    sources: list[Source] = [encoded(sheet, "PNG"), jpeg(64, 64), video(8, size=(96, 64))]

    async def run() -> None:
        fleet, spec = Encoding(MODEL), registry.read(MODEL)
        options = ServiceOptions(model=MODEL, preprocess=prune)
        async with clients(Service(options, spec, fleet)) as both:
            for one in both:
                assert (await one.model())["preprocess"] == {"prune": "exact"}
                plans = await one.plan(sources)
                left, photo, film = await one.encode(sources, "float32")
                tokens = [plan.tokens for plan in plans if isinstance(plan, Plan)]
                assert tokens[0] > left.tokens == len(left.kept_rows) == len(left.numpy())
                assert tokens[1:] == [photo.tokens, film.tokens]
                assert photo.kept_rows == film.kept_rows == left.frame_tokens == ()
                assert left.grid_thw == (1, 8, 12)
                # The photograph's four blocks, and those that are predicted from it wrongly.
                assert left.kept_rows == (0, 9, 10, 11, 15, 16, 17, 21)
        fleet.pipeline.close()

    asyncio.run(run())


PHOTO = jpeg(640, 480)
ITEM = {"data": b64encode(PHOTO).decode()}
PHOTO_URL = f"data:image/jpeg;base64,{ITEM['data']}"
FILM = b64encode(video(8)).decode()
RANGE = {"min_pixels": 4096, "max_pixels": 65536}
QUERY = "/v1/plan?min_pixels=4096&max_pixels=65536"


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("/v1/plan", {"json": {"items": [ITEM | RANGE]}}),
        ("/v1/plan", {"json": {"items": [ITEM], "options": RANGE}}),
        ("/v1/plan", {"json": {"items": [ITEM | RANGE], "options": {"max_pixels": 200_000}}}),
        ("/v1/plan", {"content": msgpack.packb({"items": [{"data": PHOTO} | RANGE]})}),
        ("/v1/plan", {"content": msgpack.packb({"items": [{"url": PHOTO_URL} | RANGE]})}),
        ("/v1/plan", {"files": {"image": PHOTO}, "data": {"options": json.dumps(RANGE)}}),
        (QUERY, {"content": PHOTO, "headers": {"content-type": "image/jpeg"}}),
    ],
)
def test_every_body_says_how_an_image_is_sized(url: str, sent: dict[str, Any]) -> None:
    packed = {"headers": {"content-type": "application/msgpack"}} if "content" in sent else {}
    response = client(Fleet()).post(url, **packed | sent)
    (item,) = response.json()["items"]
    assert item["grid_thw"] == [1, 12, 18]
    assert item["tokens"] == 54


def test_options_of_a_request_are_for_the_kinds_that_take_them() -> None:
    sources: list[Source] = [
        PHOTO,
        Input(PHOTO, max_pixels=65536),
        video(40, size=(64, 48), fps=10),
        Input(video(40, size=(64, 48), fps=10), num_frames=8),
        Frames([jpeg(64, 48)] * 6, fps=4),
    ]

    async def run() -> None:
        async with clients(service(Fleet())) as both:
            for one in both:
                found = await one.plan(sources, max_pixels=200_000, fps=1)
                grids = [plan.grid_thw for plan in found]
                assert grids == [(1, 24, 32), (1, 12, 18), (2, 4, 4), (4, 4, 4), (3, 4, 4)]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("source", "options", "says"),
    [
        (PHOTO, {"max_patches": 4}, "max_patches: qwen3vl-tiny (qwen3_vl) does not take it for "
         "images and videos; it takes min_pixels, max_pixels, fps, num_frames"),
        (Input(PHOTO, fps=2), {}, "fps: qwen3vl-tiny (qwen3_vl) does not take it for images; it "
         "takes min_pixels, max_pixels"),
        (Input(PHOTO, max_pixels=2**21), {}, "max_pixels: 2097152 is over 1048576, which gives "
         "1024 tokens (the largest of graphs.token_budgets): lower it"),
        (PHOTO, {"min_pixels": 2**21}, "min_pixels: 2097152 is over 1048576"),
        (PHOTO, {"min_pixels": 9000, "max_pixels": 8000}, "min_pixels: 9000 is over max_pixels, "
         "8000: lower it"),
        (PHOTO, {"fps": 2, "num_frames": 4}, "fps and num_frames exclude each other"),
        (Input(video(8), num_frames=900), {}, "num_frames: 900 is over the 768 of qwen3vl-tiny"),
        (video(8), {"fps": 500}, "fps: 500 is over the 240 of qwen3vl-tiny"),
        (PHOTO, {"max_pixels": "x"}, "options.max_pixels must be a whole number above zero and "
         "below 2147483648, not 'x'"),
        (Input(PHOTO, max_pixels="x"), {}, "max_pixels must be a whole number above zero"),  # type: ignore[arg-type]
        (PHOTO, {"max_pixels": 0}, "options.max_pixels must be a whole number above zero and "
         "below 2147483648, not 0"),
        (Input(PHOTO, max_pixels=0), {}, "max_pixels must be a whole number above zero"),
        (video(8), {"fps": 0.0}, "options.fps must be a number above zero"),
        (Input(video(8), fps=0.0), {}, "fps must be a number above zero"),
        (Frames([jpeg(64, 48)] * 4, fps=0.0), {}, "fps must be a number above zero"),
        (PHOTO, {"dtype": 5}, "options.dtype cannot be 5"),
    ],
)  # fmt: skip
async def test_what_cannot_be_asked_for(source: Source, options: dict[str, Any], says: str) -> None:
    async with clients(service(Fleet())) as both:
        for one in both:
            with pytest.raises(ServiceError) as refused:
                await one.encode([source], **options)
            assert refused.value.type == "invalid_option"
            assert says in refused.value.message


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_pixels": "100"}, "max_pixels must be a whole number above zero and below 2147483648"
         ", not '100'"),
        ({"max_pixels": True}, "max_pixels must be a whole number above zero"),
        ({"min_pixels": 0}, "min_pixels must be a whole number above zero"),
        ({"max_pixels": 10**400}, "max_pixels must be a whole number above zero"),
        ({"max_pixels": 2**21}, "max_pixels: 2097152 is over 1048576"),
        ({"min_pixels": 9000, "max_pixels": 8000}, "min_pixels: 9000 is over max_pixels, 8000"),
        ({"fps": -1}, "fps must be a number above zero"),
        ({"fps": 10**400}, "fps must be a number above zero"),
        ({"num_frames": [1]}, "num_frames must be a whole number above zero"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_its_item_s_error_or_its_request_s(
    wrong: dict[str, Any], says: str
) -> None:
    http, video_item = client(Fleet()), {"type": "video", "data": FILM}
    item = video_item if wrong.keys() & {"fps", "num_frames"} else ITEM

    def post(**body: Any) -> tuple[int, dict[str, Any]]:
        answer = http.post("/v1/plan", json=body)
        return answer.status_code, answer.json()

    status, document = post(items=[ITEM, item | wrong])
    assert (status, document["error"]["item"]) == (422, 1)
    assert says in document["error"]["message"]
    returned = {"on_error": "return"}
    status, document = post(items=[ITEM, item | wrong], options=returned)
    assert (status, document["items"][0]["tokens"]) == (200, 300)
    assert document["items"][1]["error"]["type"] == "invalid_option"
    status, document = post(items=[ITEM, item], options=returned | wrong)
    assert (status, document["error"]["item"]) == (422, None)
    assert document["error"]["type"] == "invalid_option"


def test_null_is_as_nothing() -> None:
    options = dict.fromkeys(RequestOptions.model_fields)
    item = dict.fromkeys([*KWARGS, "type", "url", "frames"]) | ITEM
    fleet = Fleet()
    answer = client(fleet).post("/v1/encode", json={"items": [item], "options": options})
    assert answer.status_code == 200
    assert fleet.calls[0][0] == "float32", "as without a dtype"


def test_a_list_of_frames_takes_no_number_of_frames() -> None:
    item = {"type": "video", "frames": [ITEM["data"]], "num_frames": 2}
    response = client(Fleet()).post("/v1/plan", json={"items": [item]})
    assert response.status_code == 422
    assert "num_frames goes with a video file" in response.json()["error"]["message"]


def test_limits_hold_for_what_is_asked() -> None:
    http = client(Fleet(), max_image_tokens=64)
    asked = http.post("/v1/plan", json={"items": [ITEM | {"max_pixels": 65537}]}).json()["error"]
    assert asked["type"] == "invalid_option"
    assert "max_pixels: 65537 is over 65536, which gives 64 tokens" in asked["message"]
    assert "(limits.max_image_tokens): lower it" in asked["message"]
    whole = http.post("/v1/plan", json={"items": [ITEM]}).json()["error"]
    assert whole["type"] == "too_large"
    assert "over 64 (limits.max_image_tokens)" in whole["message"]
    fits = http.post("/v1/plan", json={"items": [ITEM | {"max_pixels": 65536}]}).json()
    assert fits["items"][0]["tokens"] == 54


async def test_sizes_are_upright_pixels() -> None:
    async with clients(service(Fleet())) as both:
        for one in both:
            photo, film = await one.plan([ROTATED, video(8, size=(64, 48))])
            assert (photo.type, photo.width, photo.height) == ("image", 60, 90)
            assert (film.type, film.width, film.height) == ("video", 64, 48)
            assert len(film.timestamps) == film.grid_thw[0] > 1
            assert film.second_per_grid_ts
            assert not photo.timestamps
            assert photo.patches == 4 * photo.tokens
            assert photo.digest == hashlib.sha256(ROTATED).hexdigest()


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("no encoder")])
def test_no_encoder_is_needed(error: Overloaded | Unavailable) -> None:
    fleet = Fleet(error)
    fleet.full = error if isinstance(error, Overloaded) else None

    async def run() -> None:
        async with clients(service(fleet)) as both:
            for one in both:
                assert [plan.tokens for plan in await one.plan([jpeg(64, 64)])] == [4]
                with pytest.raises(ServiceError, match=error.message):
                    await one.encode([jpeg(64, 64)])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sources", "kind"),
    [
        ([], "invalid_request"),
        ([jpeg(64, 64), b"no image"], "invalid_request"),
        ([b"%PDF-"], "unsupported_media"),
        ([jpeg(64, 64)] * 3, "too_large"),
        ([png(200, 200)], "too_large"),
        ([bytes(40_000)], "too_large"),
        (["https://example.com/a.jpg"], "invalid_request"),
    ],
)
def test_errors_and_limits_are_those_of_encoding(sources: list[Source], kind: str) -> None:
    limits = {"max_items": 2, "max_pixels": 30_000, "max_body_bytes": 30_000}

    async def run() -> None:
        async with clients(service(Fleet(), **limits)) as both:
            for one in both:
                with pytest.raises(ServiceError) as planned:
                    await one.plan(sources)
                with pytest.raises(ServiceError) as encoded:
                    await one.encode(sources)
                assert planned.value.args == encoded.value.args
                assert planned.value.type == kind

    asyncio.run(run())


async def test_a_message_that_grpc_itself_refuses_is_too_large() -> None:
    async with clients(service(Fleet(), max_body_bytes=1000)) as both:
        for one in both:
            with pytest.raises(ServiceError, match=r"limits\.max_body_bytes.*fewer") as refused:
                await one.encode([bytes(2**21)])
            assert (refused.value.type, refused.value.retryable) == ("too_large", False)


def fetching(photo: bytes, asked: list[str], **limits: int) -> Service:
    """A service that gets this photograph from every URL, and notes what it asked for."""

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, content=photo)

    async def resolve(host: str) -> list[str]:
        return ["93.184.216.34"]

    one, allowed = service(Fleet(), **limits), FetchOptions(allow_hosts=("a.example",))
    one.admission.fetcher = Fetcher(allowed, resolve, httpx.MockTransport(answer))
    return one


def test_urls_are_fetched_each_once() -> None:
    photo, asked = jpeg(64, 64), list[str]()

    async def run() -> None:
        async with clients(fetching(photo, asked)) as both:
            for caller in both:
                urls = [f"https://a.example/{name}.jpg" for name in "bcb"]
                for plan in await caller.plan(urls):
                    assert plan.digest == hashlib.sha256(photo).hexdigest()
                assert sorted(asked) == ["/b.jpg", "/c.jpg"]
                asked.clear()

    asyncio.run(run())


def data_url(file: bytes) -> str:
    return f"data:;base64,{b64encode(file).decode()}"


def test_data_urls_are_as_their_bytes() -> None:
    large = png(400, 400) + bytes(300_000)  # over INLINE_BYTES
    files = [PHOTO, large, video(8)]
    items = [
        RequestItem("image", url=PHOTO_URL),
        RequestItem("image", url=data_url(large)),
        RequestItem("video", url=f"data:video/mp4;base64,{FILM}"),
    ]

    async def run() -> None:
        async with clients(service(Fleet())) as both:
            for caller in both:
                plans = await caller.plan(files)
                found = read_plans(await caller.transport.plan(items, {}), len(items))
                assert found == plans
                document = await caller.transport.encode(items, {})
                digests = [one["digest"] for one in document["items"]]
                assert digests == [plan.digest for plan in plans]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "kind", "says"),
    [
        ("data:image/jpeg,abc", "invalid_request", r"items\[1\].url: a data URL must read data:"),
        ("data:image/jpeg;base64,a", "invalid_request", r"items\[1\].url is not base64"),
        (data_url(bytes(30_000)), "too_large", r"limits\.max_body_bytes"),
    ],
)
def test_data_urls_that_are_refused(url: str, kind: str, says: str) -> None:
    items = [RequestItem("image", jpeg(64, 64)), RequestItem("image", url=url)]

    async def run() -> None:
        async with clients(service(Fleet(), max_body_bytes=30_000)) as both:
            for caller in both:
                with pytest.raises(ServiceError, match=says) as refused:
                    await caller.transport.plan(items, {})
                assert refused.value.type == kind

    asyncio.run(run())


def test_what_is_fetched_counts_as_what_is_sent() -> None:
    photo = jpeg(64, 64)
    most_bytes = 2 * len(photo) + 1000
    one = fetching(photo, [], max_body_bytes=most_bytes, max_buffered_bytes=most_bytes)

    async def run() -> None:
        async with clients(one) as both:
            for caller in both:
                assert await caller.plan(["https://a.example/b.jpg"] * 2)
                both_files = ["https://a.example/b.jpg", "https://a.example/c.jpg"]
                assert await caller.plan(both_files)
                with one.buffered.hold() as take:
                    take(len(photo))  # of another request
                    with pytest.raises(ServiceError, match=r"limits\.max_buffered") as refused:
                        await caller.plan(both_files)
                assert (refused.value.type, refused.value.retryable) == ("overloaded", True)
                assert one.buffered.held_bytes == 0

    asyncio.run(run())


def test_a_token_is_asked_for() -> None:
    closed = ServiceOptions(model=MODEL, auth=AuthOptions(token_sha256=("0" * 64,)))

    async def run() -> None:
        async with clients(Service(closed, registry.read(MODEL), Fleet())) as both:
            for one in both:
                with pytest.raises(ServiceError) as refused:
                    await one.plan([jpeg(64, 64)])
                assert refused.value.status in (401, "UNAUTHENTICATED")

    asyncio.run(run())


@pytest.mark.parametrize(
    "item",
    [RequestItem("image", png(64, 64)), RequestItem("image", url=data_url(png(64, 64)))],
)
def test_bytes_in_flight_are_limited_and_released(item: RequestItem) -> None:
    one = service(Fleet(), max_buffered_bytes=1000, max_body_bytes=1000)

    async def run() -> None:
        async with clients(one) as both:
            for caller in both:
                with one.buffered.hold() as take:
                    take(1000)
                    with pytest.raises(ServiceError) as refused:
                        await caller.transport.plan([item], {})
                assert refused.value.type == "overloaded"
                await caller.transport.plan([item], {})
                assert one.buffered.held_bytes == 0

    asyncio.run(run())


def plan(http: TestClient, **headers: str) -> Any:
    return http.post("/v1/plan", files={"image": jpeg(64, 64)}, headers=headers)


@pytest.mark.parametrize(
    ("accept", "found"),
    [
        ("*/*", "application/json"),
        ("application/msgpack", "application/msgpack"),
        ("application/msgpack;q=0.5, application/json", "application/json"),
    ],
)
def test_json_unless_msgpack_is_asked_for(accept: str, found: str) -> None:
    response = plan(client(Fleet()), accept=accept)
    assert response.headers["content-type"] == found
    packed = found == "application/msgpack"
    document = msgpack.unpackb(response.content) if packed else response.json()
    assert {key: document[key] for key in ("model", "family", "weights")} == {
        "model": "qwen3vl-tiny",
        "family": "qwen3_vl",
        "weights": "dummy",
    }
    (item,) = document["items"]
    assert item == {
        **{"index": 0, "type": "image", "width": 64, "height": 64, "grid_thw": [1, 4, 4]},
        **{"tokens": 4, "patches": 16, "digest": hashlib.sha256(jpeg(64, 64)).hexdigest()},
    }


def test_wrong_requests() -> None:
    http = client(Fleet())
    assert plan(http, accept="application/vnd.safetensors").status_code == 406
    assert http.post("/v1/plan?evs_rate=0.5", json={"items": []}).status_code == 422
    wrong = {"items": [{"data": "eA=="}], "options": {"evs_rate": 2}}
    assert http.post("/v1/plan", json=wrong).status_code == 422


def test_a_bare_file_has_its_options_in_the_query() -> None:
    headers = {"content-type": "image/jpeg", "accept": "application/json"}
    url = "/v1/plan?on_error=return"
    response = client(Fleet()).post(url, content=b"no image", headers=headers)
    assert response.json()["items"][0]["error"]["type"] == "invalid_request"


def test_plans_are_counted_apart() -> None:
    one = service(Fleet())

    async def run() -> None:
        async with clients(one) as both:
            for caller in both:
                await caller.plan([jpeg(64, 64)])

    asyncio.run(run())
    text = one.metrics.text()
    assert 'encoder_requests_total{api="plan",code="200"} 1.0' in text
    assert 'encoder_requests_total{api="grpc_plan",code="OK"} 1.0' in text
    assert 'api="http"' not in text


def test_the_openapi_document_describes_plans() -> None:
    document = client(Fleet()).get("/openapi.json").json()
    operation = document["paths"]["/v1/plan"]["post"]
    assert operation["requestBody"] == document["paths"]["/v1/encode"]["post"]["requestBody"]
    answer = operation["responses"]["200"]["content"]
    assert answer.keys() == {"application/json", "application/msgpack"}
    assert answer["application/json"]["schema"] == {"$ref": "#/components/schemas/PlanDocument"}
    response = plan(client(Fleet()), **JSON).json()["items"][0]
    required = document["components"]["schemas"]["PlannedItem"]["required"]
    assert set(response) == set(required)
