"""SGLang's encoder protocol, spoken to by a stand-in that reads messages as SGLang 0.5.23 does.

tests/engines/test_sglang.py has SGLang's own receiver.
"""

from __future__ import annotations

import asyncio
import errno
import io
import pickle
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from ipaddress import ip_network
from typing import Any, ClassVar

import httpx
import pytest
import torch
import zmq
import zmq.asyncio

from actors.errors import EncodeFailed, Overloaded, Unavailable
from encoder_service.api.http import build as build_service
from encoder_service.client import AsyncClient, Embedding
from encoder_service.config import LimitOptions
from encoder_service.engines.sglang_encoder import EncodeRequest, Receivers, SglangEncoder, frames
from tests.images import jpeg
from tests.unit.front_door import Fleet, service
from tests.unit.llm.test_consumers import embedding
from tests.unit.proxied import Distinct, listening


class EmbeddingData:
    """What SGLang's class holds after it is unpickled: attributes."""


class Allowed(pickle.Unpickler):
    """Knows the names that SGLang's own unpickler allows, and that a header needs."""

    NAMES: ClassVar = {
        ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData"): EmbeddingData,
        ("sglang.srt.managers.schedule_batch", "Modality"): {1: "IMAGE", 2: "VIDEO"}.get,
        ("torch", "bfloat16"): torch.bfloat16,
    }

    def find_class(self, module: str, name: str) -> Any:
        return self.NAMES[module, name]


def read(header: bytes) -> dict[str, Any]:
    found = Allowed(io.BytesIO(header)).load()
    assert type(found) is EmbeddingData
    return vars(found)


def data_url(file: bytes) -> str:
    return f"data:image/jpeg;base64,{b64encode(file).decode()}"


def call(*files: bytes, **more: Any) -> dict[str, Any]:
    return {
        "encoder_idx": 0,
        "encoder_url": "http://a",
        "mm_items": [data_url(file) for file in files],
        "num_parts": 1,
        "part_idx": 0,
        "req_id": "r_local_part_0",
        "modality": "IMAGE",
        "prefill_host": "127.0.0.1",
        "embedding_port": None,
        "time_stats_json": None,
    } | more


def request(**more: Any) -> EncodeRequest:
    return EncodeRequest.model_validate(call(jpeg(64, 64), **more))


Story = Callable[[httpx.AsyncClient, zmq.asyncio.Context], Awaitable[None]]


def told(story: Story, fleet: Fleet | None = None, timeout_seconds: float = 20) -> None:
    """Runs a story with a client of the encoder and a ZMQ context."""

    async def run() -> None:
        limits = LimitOptions(timeout_seconds=timeout_seconds)
        async with AsyncExitStack() as stack:
            app = build_service(service(fleet or Distinct()))
            encoder = AsyncClient(await stack.enter_async_context(listening(app)), retries=0)
            front = SglangEncoder(encoder, limits)
            url = await stack.enter_async_context(listening(front.app()))
            client = httpx.AsyncClient(base_url=url, timeout=60)
            context = stack.enter_context(zmq.asyncio.Context())
            await story(await stack.enter_async_context(client), context)
            assert not front.receivers
            assert not front.buffered.held_bytes

    asyncio.run(asyncio.wait_for(run(), 60))


def listen(context: zmq.asyncio.Context) -> tuple[zmq.asyncio.Socket, int]:
    receiver = context.socket(zmq.PULL)
    return receiver, receiver.bind_to_random_port("tcp://127.0.0.1")


async def encoded(*files: bytes) -> list[Embedding]:
    app = build_service(service(Distinct()))
    async with listening(app) as url, AsyncClient(url) as encoder:
        return await encoder.encode(list(files))


def test_rows_go_to_the_socket_that_the_request_names() -> None:
    files = [jpeg(64, 64), jpeg(128, 64)]

    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        receiver, port = listen(context)
        body = call(*files, embedding_port=port)
        body["mm_items"][1] = {"url": body["mm_items"][1], "content_hash": "ab", "detail": "low"}
        answer = await client.post("/encode", json=body)
        assert (answer.status_code, answer.json()) == (200, None)
        header, rows = await receiver.recv_multipart()
        receiver.close()
        expected = await encoded(*files)
        assert rows == b"".join(one.data for one in expected)
        tokens = sum(one.tokens for one in expected)
        assert read(header) == {
            "req_id": "r_local_part_0",
            "num_parts": 1,
            "part_idx": 0,
            "grid_dim": [list(one.grid_thw) for one in expected],
            "modality": "IMAGE",
            "dtype": torch.bfloat16,
            "shape": [tokens, expected[0].shape[1]],
            **dict.fromkeys(("embedding", "send_time", "_mr_ptr", "error_msg", "error_code")),
        }

    told(story)


@pytest.mark.parametrize("early", [True, False])
def test_every_rank_of_a_scheduler_gets_the_rows(early: bool) -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        receivers = [listen(context) for _ in range(2)]
        posts = [
            client.post(
                "/scheduler_receive_url",
                json={
                    "req_id": "r_local_part_0",
                    "receive_count": 2,
                    "receive_url": f"127.0.0.1:{port}",
                    "modality": "IMAGE",
                },
            )
            for _, port in receivers
        ]
        first = (await posts.pop(0),) if early else ()
        encoding = asyncio.create_task(client.post("/encode", json=call(jpeg(64, 64))))
        await asyncio.sleep(0.05)
        assert not encoding.done()
        for answer in (*first, *[await post for post in posts], await encoding):
            assert (answer.status_code, answer.json()) == (200, None)
        messages = [await receiver.recv_multipart() for receiver, _ in receivers]
        for receiver, _ in receivers:
            receiver.close()
        assert messages[0] == messages[1]

    told(story)


def test_a_request_id_can_be_used_again() -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        receiver, port = listen(context)
        named = {"req_id": "r", "receive_count": 1, "receive_url": f"127.0.0.1:{port}"}
        for _ in range(2):
            await client.post("/scheduler_receive_url", json=named)
            await asyncio.sleep(1.2)  # the second time, the first socket would be forgotten by now
            answer = await client.post("/encode", json=call(jpeg(64, 64), req_id="r"))
            assert answer.status_code == 200
            await receiver.recv_multipart()
        receiver.close()

    told(story, timeout_seconds=1)


def test_the_sockets_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_service.engines.sglang_encoder.MOST_RANKS", 2)

    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        receivers = [listen(context) for _ in range(3)]
        codes = []
        for _, port in [*receivers, receivers[0]]:
            named = {"req_id": "r", "receive_count": 2, "receive_url": f"127.0.0.1:{port}"}
            answer = await client.post("/scheduler_receive_url", json=named)
            codes.append(answer.status_code)
        assert codes == [200, 200, 400, 200]
        answer = await client.post("/encode", json=call(jpeg(64, 64), req_id="r"))
        assert answer.status_code == 200
        for receiver, _ in receivers:
            receiver.close()

    told(story)


def test_videos_bring_their_times() -> None:
    clip = replace(
        embedding((3, 4, 4)), type="video", timestamps=(0.25, 0.75, 1.25), second_per_grid_ts=0.5
    )
    header, rows = frames(request(modality="VIDEO"), [clip, clip])
    found = read(bytes(header))
    assert found["modality"] == "VIDEO"
    assert found["video_timestamps"] == [[0.25, 0.75, 1.25]] * 2
    assert "second_per_grid_ts" not in found
    assert (found["grid_dim"], found["shape"]) == ([[3, 4, 4]] * 2, [24, 24])
    assert rows == clip.data * 2
    other = replace(clip, family="qwen2_5_vl")
    found = read(bytes(frames(request(modality="VIDEO"), [other, other])[0]))
    assert found["second_per_grid_ts"] == [0.5, 0.5]
    assert "video_timestamps" not in found


def test_a_pruned_image_is_refused() -> None:
    one = embedding()
    with pytest.raises(EncodeFailed, match=r"preprocess\.prune"):
        frames(request(), [one, replace(one, kept_rows=tuple(range(one.tokens)))])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prefill_host": "8.8.8.8"}, "no rows are sent to 8.8.8.8: allow its network"),
        ({"prefill_host": "169.254.169.254"}, "no rows are sent to"),
        ({"prefill_host": "::ffff:8.8.8.8"}, "no rows are sent to"),
        ({"prefill_host": "evil.example"}, "is not an IP address: set SGLANG_HOST_IP"),
        ({"prefill_host": "127.0.0.1;10.0.0.1"}, "is not an IP address"),
        ({"prefill_host": "fc00::1%a]:0;[2001:db8::1"}, "an IPv6 address with a zone"),
        ({"embedding_port": 80}, "port 80: rows are sent to ports from 1024 on"),
        ({"embedding_port": "50000"}, "embedding_port: "),
        ({"modality": "AUDIO"}, "modality: wrong value; input should be 'IMAGE' or 'VIDEO'"),
        ({"part_idx": 1}, "part_idx 1 of 1 parts"),
        ({"mm_items": []}, "mm_items: "),
        ({"mm_items": ["/etc/passwd"]}, "mm_items[0]: '/etc/passwd' is neither a data: URL nor"),
        ({"mm_items": [{"url": "data:", "max_dynamic_patch": 2}]}, "max_dynamic_patch: "),
        ({"mm_items": ["data:image/jpeg;base64,AAAA"]}, "mm_items[0]: "),
        ({"mm_items": ["https://a/b.jpg"]}, "mm_items[0]: "),
    ],
)
def test_what_is_refused_is_said_as_sglang_reads_it(more: dict[str, Any], message: str) -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        body = call(jpeg(64, 64), embedding_port=50_000) | more
        answer = await client.post("/encode", json=body)
        assert 400 <= answer.status_code < 500
        assert answer.json()["status"] == "error"
        assert message in answer.json()["message"]
        receiver = {"req_id": "r", "receive_count": 1, "receive_url": "8.8.8.8:50000"}
        answer = await client.post("/scheduler_receive_url", json=receiver)
        assert answer.status_code == 400
        assert "8.8.8.8" in answer.json()["message"]

    told(story)


def test_networks_are_those_that_were_allowed() -> None:
    front = object.__new__(SglangEncoder)
    front.networks = [ip_network("8.8.8.0/24"), ip_network("2001:db8::/32")]
    assert front.endpoint("8.8.8.8", 50_000) == "tcp://8.8.8.8:50000"
    assert front.endpoint("[2001:db8::1]", 50_000) == "tcp://[2001:db8::1]:50000"


def test_the_service_says_when_it_is_full() -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        answer = await client.post("/encode", json=call(jpeg(64, 64), embedding_port=50_000))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")

    told(story, Distinct(Overloaded("full", 3)))


def test_a_socket_that_is_not_there_fails_its_request() -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        answer = await client.post("/encode", json=call(jpeg(64, 64), embedding_port=1024))
        assert answer.status_code == 503
        assert "tcp://127.0.0.1:1024 did not take the rows" in answer.json()["message"]
        answer = await client.post("/encode", json=call(jpeg(64, 64)))
        assert answer.status_code == 504
        assert "0 ranks of SGLang's scheduler named their sockets" in answer.json()["message"]

    told(story, timeout_seconds=0.3)


MANY = 1500
"""More than ZMQ has sockets for at a time."""


def test_more_sockets_than_zmq_has_are_served_in_turn() -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        front = SglangEncoder(AsyncClient("http://127.0.0.1:1"), LimitOptions())
        receiver = context.socket(zmq.PULL)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        pushes = [front.push(f"tcp://127.0.0.1:{port}", [b"header", b"rows"]) for _ in range(MANY)]
        await asyncio.gather(*pushes)
        for _ in range(MANY):
            assert await receiver.recv_multipart() == [b"header", b"rows"]
        receiver.close()
        front.context.destroy()

    told(story)


def test_what_zmq_cannot_do_is_said_and_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        front = SglangEncoder(AsyncClient("http://127.0.0.1:1"), LimitOptions())
        opened: list[str] = []

        async def send(endpoint: str, message: object) -> None:
            opened.append(endpoint)
            if len(opened) < 3:
                await asyncio.Event().wait()
            raise zmq.ZMQError(errno.EMFILE)

        monkeypatch.setattr(front, "send", send)
        before = len(asyncio.all_tasks())
        receivers = Receivers({f"tcp://127.0.0.1:{port}" for port in (2001, 2002, 2003)})
        receivers.complete.set()
        with pytest.raises(Unavailable, match=r"open files.*ulimit -n"):
            await front.deliver(receivers, [b"header", b"rows"])
        assert len(asyncio.all_tasks()) == before
        front.context.destroy()

    told(story)


def test_it_is_healthy_if_the_service_is_ready() -> None:
    async def story(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        assert (await client.get("/health")).status_code == 200

    async def ill(client: httpx.AsyncClient, context: zmq.asyncio.Context) -> None:
        assert (await client.get("/health")).status_code == 503

    told(story)
    told(ill, Fleet(Overloaded("no")))
