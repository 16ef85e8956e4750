"""`bench answers` against small servers that stream as vLLM does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import BytesIO, StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.errors import StartError
from actors.types import Answer, Dtype, Media
from encoder_service import cli
from encoder_service.api.http import build
from encoder_service.bench import answers, cluster
from encoder_service.bench.answers import AnswersPlan, Kind, OpenAiServer, Streamed
from encoder_service.bench.cluster import Cluster, free_ports
from encoder_service.config import ServiceOptions
from tests.images import jpeg
from tests.unit.front_door import Fleet, service, zeros
from tests.unit.proxied import listening

FIRST_SECONDS, BETWEEN_SECONDS = 0.03, 0.005


class Server:
    """Streams at fixed times, in order of arrival or not. `fails`: every second request."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.bodies: list[dict[str, Any]] = []
        self.under_way = self.most = 0
        paths = {"/v1/chat/completions": self.chat, "/v1/models": self.models}
        self.app = Starlette(
            routes=[Route(path, call, methods=["GET", "POST"]) for path, call in paths.items()]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "m"}]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.fails and len(self.bodies) % 2:
            return JSONResponse({"error": "no room"}, 500)

        async def stream() -> AsyncIterator[str]:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            yield 'data: {"usage": {"completion_tokens": 0}}\n\n'
            for count in range(1, body["max_tokens"] + 1):
                await asyncio.sleep(FIRST_SECONDS if count == 1 else BETWEEN_SECONDS)
                yield f"data: {json.dumps({'usage': {'completion_tokens': count}})}\n\n"
            yield "data: [DONE]\n\n"
            self.under_way -= 1

        return StreamingResponse(stream(), media_type="text/event-stream")

    def images(self) -> list[str]:
        """Of all requests, as they were sent."""
        contents = [body["messages"][0]["content"] for body in self.bodies]
        return [
            part["image_url"]["url"]
            for content in contents
            for part in content
            if part["type"] == "image_url"
        ]


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=200)


def plan(**changes: Any) -> AnswersPlan:
    kinds = [Kind("text", ((),)), Kind("64x64*2", (((64, 64), (64, 64)),))]
    usual: dict[str, Any] = {"kinds": kinds, "per_second": [20.0], "in_flight": 3, "streams": 2}
    return AnswersPlan(**usual | {"seconds": 0.5, "tokens": 4} | changes)


async def measured(server: Server, what: AnswersPlan, console: Console) -> list[Any]:
    async with listening(server.app) as url, answers.connected("one", [url]) as one:
        return await answers.measure(one, what, console)


def test_times_are_those_that_a_reader_sees(console: Console) -> None:
    server = Server()
    found = asyncio.run(measured(server, plan(), console))
    assert [one.load for one in found] == [
        *("text, 20/s", "text, 3 in flight", "2 text streams beside text, 0/s"),
        *("64x64*2, 20/s", "64x64*2, 3 in flight", "2 text streams beside 64x64*2, 20/s"),
    ]
    for one in found:
        assert one.errors == 0
        assert one.answers
        assert one.first_token_ms[0] >= FIRST_SECONDS * 1e3
        # A reader that stalls sees tokens at once that were sent one after another.
        assert one.between_tokens_ms[1] >= BETWEEN_SECONDS * 1e3 * 0.9
        assert one.between_tokens_ms[1] >= one.between_tokens_ms[0] > 0
        assert 0 < one.good_per_second <= one.per_second
    # Three at a time, each of at least 45 ms, cannot be more than these.
    assert found[1].per_second <= 3 / (FIRST_SECONDS + 3 * BETWEEN_SECONDS)
    lengths = {body["max_tokens"] for body in server.bodies} - {plan().tokens}
    assert len(lengths) > 1, "text streams do not end together"
    images = server.images()
    assert len(set(images)) == len(images) > 20
    for url in images:
        kind, _, data = url.partition(",")
        assert kind == "data:image/jpeg;base64"
        with Image.open(BytesIO(b64decode(data))) as image:
            assert (image.format, image.size) == ("JPEG", (64, 64))


def test_arrivals_have_the_mean_rate_that_was_asked_for() -> None:
    times = answers.arrival_times(60, 15)
    assert times == sorted(times) == answers.arrival_times(60, 15), "the same for every server"
    assert 0 <= times[0] < 2
    assert 13 < times[-1] <= 15
    assert len(set(times)) == 60
    assert answers.arrival_times(0, 15) == []


def test_arrivals_do_not_wait_for_answers() -> None:
    server = Server()

    async def run() -> list[Streamed]:
        async with listening(server.app) as url, answers.connected("one", [url]) as one:
            return await answers.arrivals(one, [[]] * 40, 0.1, 4)

    found = asyncio.run(run())
    assert len(found) == 40
    assert server.most > 5


def test_several_urls_share_the_load_of_one_server() -> None:
    servers = [Server(), Server()]

    async def run() -> list[Streamed]:
        async with (
            listening(servers[0].app) as one,
            listening(servers[1].app) as other,
            answers.connected("both", [one, other]) as both,
        ):
            return await answers.arrivals(both, [[]] * 40, 0.1, 4)

    assert not any(one.error for one in asyncio.run(run()))
    assert sum(len(server.bodies) for server in servers) == 40
    assert all(15 < len(server.bodies) < 25 for server in servers)


def test_images_are_sent_by_id_once_they_are_encoded() -> None:
    server, fleet = Server(), Slow()

    async def run() -> Streamed:
        async with (
            listening(server.app) as url,
            listening(build(service(fleet))) as encoder,
            answers.connected("by id", [url], encoder) as one,
        ):
            assert not (await one.ask([], 0, 1)).error
            return await one.ask([jpeg(64, 64), jpeg(96, 64)], 1, 4)

    found = asyncio.run(run())
    assert not found.error
    assert found.first > ENCODE_SECONDS + FIRST_SECONDS, "encoding counts"
    *parts, text = server.bodies[1]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_embeds"] * 2
    assert len({part["uuid"] for part in parts}) == 2
    assert text["type"] == "text"


ENCODE_SECONDS = 0.2


class Slow(Fleet):
    """Encodes for a while, and keeps under ids."""

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, **_: Any
    ) -> list[Answer]:
        await asyncio.sleep(ENCODE_SECONDS)
        return [replace(zeros(one), reference=f"replica.{one.digest}") for one in media]


@pytest.mark.parametrize("rates", [[50.0], []], ids=["arrivals", "in flight"])
def test_some_images_are_repeated(console: Console, rates: list[float]) -> None:
    server = Server()
    what = plan(
        **{"kinds": plan().kinds[1:], "per_second": rates, "repeated": 0.5, "seconds": 1.0},
        **{"streams": 0, "in_flight": 1, "tokens": 1},
    )
    asyncio.run(measured(server, what, console))
    images = server.images()[2 * answers.WARM_UPS :]
    assert 0.25 < len(set(images)) / len(images) < 0.9


def test_failures_are_counted_and_shown(console: Console, tmp_path: Path) -> None:
    found = asyncio.run(measured(Server(fails=True), plan(streams=0), console))
    assert all(one.errors for one in found)
    assert "no room" in answers.line(found[0])
    nothing = answers.report("one", "text", [Streamed(0.0, error="gone")], 1.0)
    assert answers.documents([nothing])[0]["first_token_ms"] == [None, None]
    pytest.importorskip("matplotlib")
    answers.plot([*found, nothing], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"usage": {"completion_tokens": 1}}, "1 tokens instead of 4"),
        ({"error": {"message": "the replica was lost"}}, "the replica was lost"),
    ],
)
def test_a_stream_that_is_no_answer_says_why(event: dict[str, Any], error: str) -> None:
    class Failing(Server):
        async def chat(self, request: Request) -> Response:
            return Response(f"data: {json.dumps(event)}\n\n")

    async def run() -> Streamed:
        async with listening(Failing().app) as url, answers.connected("one", [url]) as one:
            return await one.ask([], 0, 4)

    assert error in asyncio.run(run()).error


def test_a_server_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Server):
        async def models(self, request: Request) -> Response:
            await asyncio.sleep(1)
            return JSONResponse({})

    async def run() -> None:
        async with listening(Hanging().app) as url, answers.connected("one", [url]):
            pass

    monkeypatch.setattr(answers, "REQUEST_SECONDS", 0.1)
    with pytest.raises(StartError, match="/v1/models names no model"):
        asyncio.run(run())


def test_requests_with_many_images_share_none() -> None:
    pictures = answers.Pictures(repeated=0)
    kinds = [Kind("20", (((32, 32),) * 20,)), Kind("1", (((32, 32),),))]
    images = [one for kind in kinds for request in islice(pictures.of(kind), 2) for one in request]
    assert len(set(images)) == len(images) == 42


def test_requests_that_were_sent_at_once_do_not_count(console: Console) -> None:
    class Slow(Server):
        async def chat(self, request: Request) -> Response:
            if len(self.bodies) < answers.WARM_UPS + 3:
                await asyncio.sleep(0.5)
            return await super().chat(request)

    server = Slow()
    what = plan(kinds=plan().kinds[:1], per_second=[], streams=0)
    (found,) = asyncio.run(measured(server, what, console))
    assert found.answers > 10
    assert found.first_token_ms[0] < 300


def test_a_mix_stays_one_with_a_fixed_number_in_flight(console: Console) -> None:
    server = Server()
    kinds = [Kind("text/64x64", ((), ((64, 64),)))]
    what = plan(kinds=kinds, per_second=[], in_flight=1, streams=0, seconds=1.0, tokens=1)
    asyncio.run(measured(server, what, console))
    contents = [body["messages"][0]["content"] for body in server.bodies[answers.WARM_UPS :]]
    share = sum(len(content) > 1 for content in contents) / len(contents)
    assert len(contents) > 20
    assert 0.25 < share < 0.75


def test_the_command_measures_running_servers(tmp_path: Path) -> None:
    written = tmp_path / "found.json"

    async def run() -> int:
        async with listening(Server().app) as url:
            arguments = ["bench", "answers", "--url", f"stand-in={url}", "--mix", "text,64x64"]
            arguments += ["--rate", "20", "--seconds", "0.3", "--tokens", "4", "--streams", "0"]
            return await asyncio.to_thread(cli.main, [*arguments, "--json", str(written)])

    assert asyncio.run(run()) == 0
    found = json.loads(written.read_text())
    assert [one["server"] for one in found] == ["stand-in"] * 4


def test_the_command_starts_a_service_with_vllm_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "found.json"
    started = []

    async def run() -> int:
        async with listening(Server().app) as url:
            monkeypatch.setattr(cluster, "cluster", lambda *_: nullcontext(Cluster(url, 1)))

            def service(options: ServiceOptions, where: Cluster) -> AbstractContextManager[None]:
                started.append(options.llm)
                return nullcontext()

            monkeypatch.setattr(cluster, "service", service)
            arguments = ["bench", "answers", "--config", "configs/qwen3vl-vllm.yaml"]
            arguments += ["--mix", "64x64", "--rate", "20", "--seconds", "0.3", "--tokens", "4"]
            arguments += ["--streams", "0", "--json", str(written)]
            return await asyncio.to_thread(cli.main, arguments)

    assert asyncio.run(run()) == 0
    assert {one["server"] for one in json.loads(written.read_text())} == {"inside"}
    assert [llm and llm.engine for llm in started] == ["vllm"]


def test_a_service_that_wants_a_token_is_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    auth = f"      auth: {{token_sha256: [{64 * 'a'}]}}\n"
    file.write_text(Path("configs/qwen3vl-vllm.yaml").read_text() + auth)
    assert cli.main(["bench", "answers", "--config", str(file)]) == 1
    assert "leave auth out" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--config", "configs/qwen3vl-chat.yaml"],
        ["--config", "configs/qwen3vl-vllm.yaml", "--url", "inside=http://b"],
        ["--url", "here"],
        ["--model", "m", "--repeated", "1"],
        ["--mix", "big"],
        ["--mix", "heavy-tailed"],
        ["--mix", "text/heavy-tailed"],
        ["--local", "chunk_ms"],
        ["--model", "m", "--vllm", "--port '1"],
        ["--model", "m", "--streams", "257"],
        ["--url", "a=http://b", "--encoder", "c=http://d"],
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str]) -> None:
    wrong = {"--mix", "--local", "--vllm", "--streams"} & set(arguments) or arguments == [
        "--url",
        "here",
    ]
    with pytest.raises(SystemExit) if wrong else nullcontext():
        assert cli.main(["bench", "answers", *arguments]) == 1


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named vllm, whose server is what a test writes there."""
    folder = tmp_path / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    return folder / "main.py"


SERVER = """
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(repr(sys.argv).encode())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def test_a_server_is_started_with_the_connector_and_ended(module: Path, console: Console) -> None:
    import httpx

    module.write_text(SERVER)
    place = {"place": "local", "chunk_ms": 5.0}
    with answers.vllm("m", place, ["--max-num-seqs", "8"], console) as url:
        arguments = httpx.get(url).text
        assert "--max-num-seqs" in arguments
        assert '"place": "local"' in arguments
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_server_ends_with_the_command(module: Path) -> None:
    # It never responds: the command would end by itself, as this server names no model.
    module.write_text("import os, time\nopen('PID', 'w').write(str(os.getpid()))\ntime.sleep(60)")
    command = [sys.executable, "-m", "encoder_service.cli", "bench", "answers", "--model", "m"]
    bench = subprocess.Popen(command, cwd=module.parent)
    written, deadline = module.parent / "PID", time.monotonic() + 60
    while not (written.exists() and written.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    server = int(written.read_text())
    bench.send_signal(signal.SIGTERM)
    assert bench.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_a_server_that_ends_at_start_is_quoted(module: Path, console: Console) -> None:
    module.write_text("raise SystemExit('no GPU here')")
    with (
        pytest.raises(StartError, match="no GPU here"),
        answers.vllm("m", None, [], console),
    ):
        pass


async def test_a_server_that_cannot_be_reached_is_told_in_a_line() -> None:
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    with pytest.raises(StartError, match="no connection: is the service running") as failed:
        async with answers.connected("a", [address]):
            pass
    assert str(failed.value).startswith(f"{address}: ")


def test_a_server_without_a_model_is_refused() -> None:
    async def run() -> OpenAiServer:
        async with listening(Starlette()) as url, answers.connected("one", [url]) as one:
            return one

    with pytest.raises(StartError, match="names no model"):
        asyncio.run(run())
