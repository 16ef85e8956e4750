"""Benchmarks vLLM servers on chats with images: vLLM alone, and with our encoder inside.

All servers get the same traffic. First requests arrive at the same random times (Poisson), whether
or not earlier ones have been answered; then a fixed number is in flight; then text streams run
beside images. All images differ, unless some are to be repeated.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from io import BytesIO
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
from rich.console import Console
from rich.table import Table

from actors.errors import StartError
from encoder_service.bench.cluster import free_ports
from encoder_service.bench.mix import Shape, picture, stamped
from encoder_service.client import AsyncClient, ServiceError
from encoder_service.client.transports import unreachable
from encoder_service.engines.vllm import CONNECTOR

START_SECONDS, STOP_SECONDS, REQUEST_SECONDS = 600, 30, 120
KEPT_ALIVE_SECONDS = 2.0  # below the 5 s after which vLLM closes an idle connection
WARM_UPS = 6
GOOD_FIRST_SECONDS, GOOD_BETWEEN_SECONDS = 1.0, 0.05
"""An answer is good if its first token, and its mean time between tokens, come within these."""
STREAM_TOKENS = 100, 300
"""Fewest and most tokens of a text stream. They differ so that streams do not all begin at once."""
STREAMS_SECONDS = 0.5
"""Text streams run for this long before images arrive beside them."""
PROMPT = "What is in these pictures? Answer in a few words."
PICTURES = 4
"""Different pictures of a size. They are drawn when the first request of the size is made."""
Images = list[bytes]
"""JPEGs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What each request of a load contains."""

    name: str
    requests: tuple[tuple[Shape, ...], ...]
    """Sizes of a request's images; none: text only. If there are several, each request takes one
    of them at random."""


@dataclass(frozen=True, slots=True)
class AnswersPlan:
    """The traffic. Every kind goes through all phases."""

    kinds: list[Kind]
    per_second: list[float]
    """Mean rates of random arrivals, a phase each."""
    in_flight: int
    """Requests in flight in the phase after those."""
    streams: int
    """Text streams beside images that arrive at the first rate, in the last phase; 0: none."""
    seconds: float
    """Length of each phase."""
    tokens: int = 64
    """Length of each answer, except for text streams."""
    repeated: float = 0.0
    """The share of requests that repeat the images of an earlier one."""


@dataclass(slots=True)
class Streamed:
    """One answer, as its reader sees it. Times in seconds."""

    began: float
    first: float = math.nan  # until the first token
    between: list[float] = field(default_factory=list)  # from token to token
    ended: float = math.nan
    error: str = ""

    @property
    def good(self) -> bool:
        between = statistics.fmean(self.between) if self.between else 0.0
        return self.first <= GOOD_FIRST_SECONDS and between <= GOOD_BETWEEN_SECONDS


@dataclass(frozen=True, slots=True)
class PhaseReport:
    server: str
    load: str
    answers: int
    errors: int
    first_error: str
    per_second: float
    good_per_second: float
    first_token_ms: list[float]
    """The 50th and the 99th percentile. NaN without answers."""
    between_tokens_ms: list[float]


class OpenAiServer:
    """One server under load, or several that share it: the one with the fewest requests gets the
    next."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        session: aiohttp.ClientSession,
        model: str,
        encoder: AsyncClient | None = None,
    ) -> None:
        """`encoder`: encodes images first, which are then sent by id."""
        self.name = name
        self.outstanding = dict.fromkeys(urls, 0)
        self.session = session
        self.model = model
        self.encoder = encoder

    async def ask(self, images: Images, number: int, tokens: int) -> Streamed:
        """Sends one chat. Its text begins with `number`, so that no two share a prefix."""
        found = Streamed(time.perf_counter())
        seen, last = 0, found.began
        url = min(self.outstanding, key=lambda one: self.outstanding[one])
        self.outstanding[url] += 1
        try:
            text = {"type": "text", "text": f"{number:08d} {PROMPT}"}
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": [*await self.parts(images), text]}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            post = self.session.post(
                f"{url}/v1/chat/completions",
                data=BytesIO(filled(body, [] if self.encoder else images)),
                headers={"Content-Type": "application/json"},
            )
            async with post as response:
                if response.status != 200:
                    found.error = f"{response.status}: {(await response.text())[:200]}"
                    return found
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if error := event.get("error"):
                        found.error = str(error)[:200]
                        return found
                    usage = event.get("usage") or {}
                    if usage.get("completion_tokens", 0) <= seen:
                        continue
                    now = time.perf_counter()
                    if seen:
                        found.between.append(now - last)
                    else:
                        found.first = now - found.began
                    seen, last = usage["completion_tokens"], now
        except (aiohttp.ClientError, TimeoutError, ValueError, ServiceError) as error:
            found.error = repr(error)[:200]
            return found
        finally:
            self.outstanding[url] -= 1
        found.ended = last
        if seen != tokens:
            found.error = f"{seen} tokens instead of {tokens}"
        return found

    async def parts(self, images: Images) -> list[dict[str, Any]]:
        """The parts of a chat message, for `filled`. Raises ServiceError, ValueError."""
        if self.encoder and images:
            kept = await self.encoder.encode(images, reference=True)
            return [one.to_vllm() for one in kept]
        return [{"type": "image_url", "image_url": {"url": ""}} for _ in images]


class Pictures:
    """The images of requests: files that all differ, of few pictures."""

    def __init__(self, repeated: float) -> None:
        self.repeated = repeated
        self.made = 0
        self.earlier: defaultdict[Kind, list[Images]] = defaultdict(list)

    def of(self, kind: Kind) -> Iterator[Images]:
        """Those of one request after another, without end. Unless some are repeated, sizes come in
        the same random order each time, so that all servers get the same."""
        random, earlier = Random(7), self.earlier[kind]
        while True:
            sizes = random.choice(kind.requests)
            if earlier and random.random() < self.repeated:
                images = random.choice(earlier)
            else:
                images = [self.next(size) for size in sizes]
            if self.repeated and any(kind.requests):
                earlier.append(images)
            yield images

    def next(self, size: Shape) -> bytes:
        self.made += 1
        return stamped(drawn(*size, self.made % PICTURES), self.made)


drawn = cache(picture)


def filled(body: dict[str, Any], images: Images) -> bytes:
    """JSON with the images at the empty URLs. json would take milliseconds for a large image, and
    tokens that come meanwhile would seem late."""
    first, *others = json.dumps(body).encode().split(b'"url": ""')
    pieces = [first]
    for image, other in zip(images, others, strict=True):
        pieces += [b'"url": "data:image/jpeg;base64,', b64encode(image), b'"', other]
    return b"".join(pieces)


async def measure(server: OpenAiServer, plan: AnswersPlan, console: Console) -> list[PhaseReport]:
    """Runs all phases against one server, and prints each as it ends."""
    pictures, found = Pictures(plan.repeated), []

    def ended(load: str, answers: list[Streamed], seconds: float) -> None:
        one = report(server.name, load, answers, seconds)
        found.append(one)
        console.print(line(one))

    for kind in plan.kinds:
        for number, images in enumerate(islice(pictures.of(kind), WARM_UPS)):
            await server.ask(images, number, plan.tokens)
        for per_second in plan.per_second:
            count = max(1, round(per_second * plan.seconds))
            images_of = list(islice(pictures.of(kind), count))
            began = time.perf_counter()
            answers = await arrivals(server, images_of, plan.seconds, plan.tokens)
            ended(f"{kind.name}, {per_second:g}/s", answers, time.perf_counter() - began)
        answers, seconds = await saturated(server, plan, kind, pictures)
        ended(f"{kind.name}, {plan.in_flight} in flight", answers, seconds)
        if plan.streams:
            per_second = plan.per_second[0] if any(kind.requests) else 0.0
            count = round(per_second * plan.seconds)
            images_of = list(islice(pictures.of(kind), count))
            began = time.perf_counter()
            answers = await beside(server, plan, images_of)
            load = f"{plan.streams} text streams beside {kind.name}, {per_second:g}/s"
            ended(load, answers, time.perf_counter() - began)
    return found


def arrival_times(count: int, seconds: float) -> list[float]:
    """Random times from 0 to `seconds`, in order, and the same in each call. Intervals drawn one by
    one would have another mean rate than the one that was asked for."""
    random = Random(7)
    return sorted(random.uniform(0, seconds) for _ in range(count))


async def arrivals(
    server: OpenAiServer, requests: list[Images], seconds: float, tokens: int
) -> list[Streamed]:
    """Sends each request at its time, whether or not earlier ones have been answered."""
    began, sent = time.perf_counter(), []
    times = arrival_times(len(requests), seconds)
    for number, (at, images) in enumerate(zip(times, requests, strict=True)):
        await asyncio.sleep(began + at - time.perf_counter())
        sent.append(asyncio.create_task(server.ask(images, number, tokens)))
    return list(await asyncio.gather(*sent))


async def saturated(
    server: OpenAiServer, plan: AnswersPlan, kind: Kind, pictures: Pictures
) -> tuple[list[Streamed], float]:
    """Keeps a fixed number of requests in flight. The phase begins when the first of them, which
    are all sent at once and wait for each other, have ended. Returns the answers that end in it,
    and the seconds that they stand for: their summed durations over the number in flight. Counting
    answers per second would mislead, because requests start in waves."""
    answers: list[Streamed] = []
    requests = pictures.of(kind)
    ready = list(islice(requests, plan.in_flight))
    left, began = plan.in_flight, math.inf  # left: how many of the first have not ended

    async def reader(images: Images) -> None:
        nonlocal left, began
        answers.append(await server.ask(images, len(answers), plan.tokens))
        left -= 1
        if not left:
            began = time.perf_counter()
        while time.perf_counter() < began + plan.seconds:
            answers.append(await server.ask(next(requests), len(answers), plan.tokens))

    await asyncio.gather(*map(reader, ready))
    end = began + plan.seconds
    counted = [one for one in answers if one.error or began <= one.ended <= end]
    whole = [one.ended - one.began for one in counted if not one.error]
    return counted, math.fsum(whole) / plan.in_flight if whole else plan.seconds


async def beside(server: OpenAiServer, plan: AnswersPlan, requests: list[Images]) -> list[Streamed]:
    """The answers of text streams that follow one another while images arrive."""
    streamed: list[Streamed] = []
    over = asyncio.Event()

    async def stream(number: int) -> None:
        random = Random(number)
        while not over.is_set():
            tokens = random.randint(*STREAM_TOKENS)
            streamed.append(await server.ask([], len(streamed), tokens))

    streams = [asyncio.create_task(stream(number)) for number in range(plan.streams)]
    await asyncio.sleep(STREAMS_SECONDS)
    began = time.perf_counter()
    pictures = await arrivals(server, requests, plan.seconds, plan.tokens)
    await asyncio.sleep(began + plan.seconds - time.perf_counter())
    over.set()
    await asyncio.gather(*streams)
    return [*streamed, *(one for one in pictures if one.error)]


def report(server: str, load: str, answers: Sequence[Streamed], seconds: float) -> PhaseReport:
    fine = [one for one in answers if not one.error]
    errors = [one.error for one in answers if one.error]
    return PhaseReport(
        server=server,
        load=load,
        answers=len(fine),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        per_second=len(fine) / seconds,
        good_per_second=sum(one.good for one in fine) / seconds,
        first_token_ms=percentiles_ms([one.first for one in fine]),
        between_tokens_ms=percentiles_ms([gap for one in fine for gap in one.between]),
    )


def percentiles_ms(seconds: Sequence[float]) -> list[float]:
    if not seconds:
        return [math.nan, math.nan]
    return [float(value) * 1e3 for value in np.percentile(seconds, [50, 99])]


@asynccontextmanager
async def connected(
    name: str, urls: Sequence[str], encoder: str = ""
) -> AsyncIterator[OpenAiServer]:
    """Raises StartError if a server names no model. `encoder`: URL of a service for its images."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE_SECONDS)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, read_bufsize=2**20
    ) as session:
        for url in urls:
            try:
                async with session.get(url + "/v1/models") as response:
                    models = (await response.json())["data"]
                model = str(models[0]["id"])
            except aiohttp.ClientConnectorError as error:
                raise StartError(f"{url}: {unreachable(error)}") from None
            except (
                aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError,
            ) as error:  # fmt: skip
                raise StartError(f"{url}/v1/models names no model: {error!r}") from error
        if not encoder:
            yield OpenAiServer(name, urls, session, model)
            return
        async with AsyncClient(encoder, os.environ.get("ENCODER_SERVICE_TOKEN")) as client:
            yield OpenAiServer(name, urls, session, model, client)


@contextmanager
def vllm(
    model: str, place: dict[str, Any] | None, options: Sequence[str], console: Console
) -> Iterator[str]:
    """Runs a vLLM server of this Python environment; yields its URL once it responds. `place`:
    settings of our connector; None: without it. Raises StartError with the end of the server's
    log."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    # `vllm serve`: the module of the API server ignores --api-server-count.
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *options]
    if place is not None:
        settings = CONNECTOR | {"ec_connector_extra_config": place}
        command += ["--ec-transfer-config", json.dumps(settings)]
    with tempfile.NamedTemporaryFile(prefix="vllm-", suffix=".log", delete=False) as log:
        console.print(f"starting vLLM; its log is {log.name} ...")
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            wait_until_ready(process, url, Path(log.name))
            yield url
        finally:
            stop(process)


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import httpx

    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if httpx.get(url + "/health", trust_env=False).is_success:
                return
        time.sleep(0.5)
    last = log.read_text(errors="replace").splitlines()[-15:]
    raise StartError("\n".join(["vLLM did not start; its log ends with", *last]))


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and whatever it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)


def line(one: PhaseReport) -> str:
    return (
        f"  {one.server}, {one.load}: {one.per_second:.2f}/s, first token "
        f"{' '.join(map(milliseconds, one.first_token_ms))} ms, between tokens "
        f"{' '.join(map(milliseconds, one.between_tokens_ms))} ms" + wrong(one)
    )


def milliseconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def wrong(one: PhaseReport) -> str:
    return f", {one.errors} failed: {one.first_error}" if one.errors else ""


def table(reports: Sequence[PhaseReport]) -> Table:
    """A row for each load and server, with the servers of a load next to each other."""
    shown = Table(
        caption="Times in ms: 50th and 99th percentile. Good: first token within "
        f"{GOOD_FIRST_SECONDS:g} s, {GOOD_BETWEEN_SECONDS * 1e3:g} ms per token on average",
        caption_justify="left",
    )
    for name in ("load", "server"):
        shown.add_column(name)
    for name in ("requests/s", "good/s", "first token", "between tokens", "failed"):
        shown.add_column(name, justify="right")
    loads = list(dict.fromkeys(one.load for one in reports))
    for one in sorted(reports, key=lambda each: loads.index(each.load)):
        shown.add_row(
            one.load,
            one.server,
            f"{one.per_second:.2f}",
            f"{one.good_per_second:.2f}",
            " ".join(map(milliseconds, one.first_token_ms)),
            " ".join(map(milliseconds, one.between_tokens_ms)),
            str(one.errors or ""),
        )
    return shown


def plot(reports: Sequence[PhaseReport], path: Path) -> None:
    """A row of panels: requests per second, first token and time between tokens, by load."""
    from matplotlib.figure import Figure  # optional, and slow to import

    loads = list(dict.fromkeys(one.load for one in reports))
    servers = list(dict.fromkeys(one.server for one in reports))
    panels: dict[str, tuple[str | Callable[[float], str], Callable[[PhaseReport], float]]] = {
        "requests/s": ("%.2f", lambda one: one.per_second),
        "first token, p50, ms": (milliseconds, lambda one: one.first_token_ms[0]),
        "between tokens, p99, ms": (milliseconds, lambda one: one.between_tokens_ms[1]),
    }
    figure = Figure(figsize=(14, 1.5 + 0.3 * len(loads) * len(servers)), layout="constrained")
    for place, (axes, (title, (shown, value))) in enumerate(
        zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True)
    ):
        for number, server in enumerate(servers):
            values = {one.load: value(one) for one in reports if one.server == server}
            heights = [index + 0.8 * number / len(servers) for index in range(len(loads))]
            widths = [values.get(load, math.nan) for load in loads]
            bars = axes.barh(heights, widths, 0.8 / len(servers), align="edge", label=server)
            axes.bar_label(bars, fmt=shown, fontsize="x-small", padding=2)
        axes.set_title(title, fontsize="medium")
        axes.margins(x=0.2)
        if not place:
            axes.set_yticks([index + 0.4 for index in range(len(loads))], loads)
            axes.invert_yaxis()
            figure.legend(loc="outside lower center", ncols=len(servers), fontsize="small")
    figure.savefig(path, dpi=110, format="png")


def documents(reports: Sequence[PhaseReport]) -> list[dict[str, Any]]:
    """The reports for JSON, which has no NaN."""
    text = json.dumps([asdict(one) for one in reports])
    found: list[dict[str, Any]] = json.loads(text, parse_constant=lambda _: None)
    return found
