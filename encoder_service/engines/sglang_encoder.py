"""SGLang's encoder protocol, so that a stock SGLang server uses the encoder service:

    encoder-service sglang --port 8200
    python -m sglang.launch_server --model-path MODEL --language-only --encoder-urls http://HOST:8200

Follows SGLang 0.5.23 (disaggregation/encoder) with its ZMQ transfer backends. SGLang posts images
or videos to /encode. Their rows go to a ZMQ socket of the SGLang server as two frames: a pickled
header, then the rows. /encode names the socket, or each rank of SGLang's scheduler names its own
with /scheduler_receive_url. Pickles are written, opcode by opcode, but never read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pickle import dumps
from typing import Annotated, Any, Literal, TypeVar

import zmq
import zmq.asyncio
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from actors.errors import (
    DeadlineExceeded,
    EncodeFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from encoder_service.api.errors import error_response, request_id_of
from encoder_service.api.upload import read_body
from encoder_service.client import AsyncClient, Embedding
from encoder_service.client.items import read_items
from encoder_service.config import LimitOptions
from encoder_service.engines.openai_proxy import passed_on
from encoder_service.intake.limits import Buffered
from encoder_service.llm.schema import ImagePart, ImageUrl, VideoPart, VideoUrl, item, reason
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import WireError, read_json

Network = IPv4Network | IPv6Network
Message = list[bytes | bytearray]
Read = TypeVar("Read", bound=BaseModel)

PRIVATE: tuple[Network, ...] = tuple(
    ip_network(one)
    for one in (
        "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1", "fc00::/7",
    )
)  # fmt: skip
"""Networks that rows are sent to by default."""
MODALITIES = {"IMAGE": 1, "VIDEO": 2}
"""Names and values of SGLang's enumeration."""
RECEIVER = "sglang.srt.disaggregation.encoder.receiver"
MODALITY = "sglang.srt.managers.schedule_batch"
MOST_WAITING = 4096
"""Maximum requests whose sockets are known but whose images are not, or vice versa."""
MOST_RANKS = 1024
MOST_VALUES = 2**16
"""Maximum number of values in a body, as wire/formats.py counts them."""
MOST_SOCKETS = 256
"""Maximum sockets that rows are sent to at a time; others wait. Each takes ZMQ a few open files."""
LINGER_MS = 1000
"""How long a closed socket may go on sending what its kernel buffer has not taken yet."""
POLL_SECONDS = 0.001


class MediaItem(BaseModel):
    """An image or video with options. Options that would change the rows are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    url: str
    detail: Literal["auto", "low", "high"] = "auto"
    """Ignored: the model determines the resolution."""
    content_hash: str | None = None
    """Ignored: the service computes its own."""


def as_item(given: Any) -> Any:
    return {"url": given} if isinstance(given, str) else given


class EncodeRequest(BaseModel):
    """What POST /encode reads; other keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    req_id: str = Field(min_length=1, max_length=256)
    modality: Literal["IMAGE", "VIDEO"]
    mm_items: list[Annotated[MediaItem, BeforeValidator(as_item)]] = Field(min_length=1)
    num_parts: int = Field(gt=0)
    """Number of parts of the whole request, which SGLang spreads over its encoder URLs."""
    part_idx: int = Field(ge=0)
    prefill_host: str = ""
    embedding_port: int | None = None
    """None: the scheduler's ranks name their sockets with POST /scheduler_receive_url."""


class ReceiveRequest(BaseModel):
    """What POST /scheduler_receive_url reads; other keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)

    req_id: str = Field(min_length=1, max_length=256)
    receive_count: int = Field(gt=0, le=MOST_RANKS)
    receive_url: str
    """host:port"""


@dataclass
class Receivers:
    """The sockets that receive the rows of one request."""

    endpoints: set[str] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class SglangEncoder:
    """One encoder service, and the SGLang servers that its rows are sent to."""

    def __init__(
        self, encoder: AsyncClient, limits: LimitOptions, networks: Sequence[Network] = PRIVATE
    ) -> None:
        """limits.timeout_seconds applies to receiving a body, and again to naming sockets and to
        sending the rows. `networks`: rows go only to addresses in these."""
        self.encoder = encoder
        self.limits = limits
        self.networks = networks
        self.buffered = Buffered(
            limits.max_buffered_bytes, "buffered requests (limits.max_buffered_bytes)"
        )
        self.receivers: dict[str, Receivers] = {}
        self.context = zmq.asyncio.Context()
        self.sockets = asyncio.Semaphore(MOST_SOCKETS)

    async def encode(self, request: Request) -> Response:
        """Responds after the rows were sent, or with an error, which SGLang's client gets."""
        try:
            with self.buffered.hold() as take:
                body = await read_body(request, self.limits, take)
                call = await asyncio.to_thread(parse, EncodeRequest, body)
                if call.part_idx >= call.num_parts:
                    raise InvalidRequest(f"part_idx {call.part_idx} of {call.num_parts} parts")
                items = await asyncio.to_thread(items_of, call)
                del body
                receivers = self.receivers_of(call)
                try:
                    embeddings = await self.embeddings(items)
                    take(sum(len(one.data) for one in embeddings))
                    message = await asyncio.to_thread(frames, call, embeddings)
                    await self.deliver(receivers, message)
                finally:
                    self.forget(call.req_id, receivers)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as problem:
            return refusal(problem)
        return JSONResponse(None)

    async def receive_url(self, request: Request) -> Response:
        """Records a rank's socket for the rows of a request, before or after /encode."""
        try:
            with self.buffered.hold() as take:
                body = await read_body(request, self.limits, take)
            call = parse(ReceiveRequest, body)
            host, _, port = call.receive_url.rpartition(":")
            endpoint = self.endpoint(host, int(port) if port.isdecimal() and len(port) < 6 else 0)
            receivers = self.waiting(call.req_id)
            receivers.endpoints.add(endpoint)
            if len(receivers.endpoints) > MOST_RANKS:
                receivers.endpoints.remove(endpoint)
                raise InvalidRequest(f"{MOST_RANKS} sockets are named for this request already")
            if len(receivers.endpoints) >= call.receive_count:
                receivers.complete.set()
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as problem:
            return refusal(problem)
        return JSONResponse(None)

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if await self.encoder.ready() else 503)

    def receivers_of(self, call: EncodeRequest) -> Receivers:
        if call.embedding_port is None:
            return self.waiting(call.req_id)
        receivers = Receivers({self.endpoint(call.prefill_host, call.embedding_port)})
        receivers.complete.set()
        return receivers

    def waiting(self, req_id: str) -> Receivers:
        """Returns the receivers of a request, and creates them if there are none. Without an
        /encode, they are forgotten after two timeouts."""
        receivers = self.receivers.get(req_id)
        if receivers is None:
            if len(self.receivers) >= MOST_WAITING:
                raise Overloaded(f"{MOST_WAITING} requests are waiting here: try again later")
            receivers = self.receivers[req_id] = Receivers()
            seconds = 2 * self.limits.timeout_seconds
            asyncio.get_running_loop().call_later(seconds, self.forget, req_id, receivers)
        return receivers

    def forget(self, req_id: str, receivers: Receivers) -> None:
        """Leaves those of a later request with the same id alone."""
        if self.receivers.get(req_id) is receivers:
            del self.receivers[req_id]

    def endpoint(self, host: str, port: int) -> str:
        """Raises InvalidRequest for an address outside of the networks."""
        try:
            address = ip_address(host.removeprefix("[").removesuffix("]"))
        except ValueError:
            raise InvalidRequest(
                f"{host[:100]!r} is not an IP address: set SGLANG_HOST_IP for the SGLang server"
            ) from None
        if getattr(address, "scope_id", None):
            raise InvalidRequest("an IPv6 address with a zone: name the address alone")
        if not any(address in network for network in self.networks):
            raise InvalidRequest(f"no rows are sent to {address}: allow its network with --network")
        if not 1024 <= port < 2**16:
            raise InvalidRequest(f"port {port}: rows are sent to ports from 1024 on")
        return f"tcp://[{address}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"

    async def embeddings(self, items: list[RequestItem]) -> list[Embedding]:
        """Raises the client's ServiceError."""
        options = {"dtype": "bfloat16", "on_error": "fail"}
        call = partial(self.encoder.transport.encode, items, options)
        found = read_items(await self.encoder.persist(call), len(items))
        return [one for one in found if isinstance(one, Embedding)]

    async def deliver(self, receivers: Receivers, message: Message) -> None:
        """Raises DeadlineExceeded, Unavailable."""
        try:
            async with asyncio.timeout(self.limits.timeout_seconds):
                await receivers.complete.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"{len(receivers.endpoints)} ranks of SGLang's scheduler named their sockets "
                f"within {self.limits.timeout_seconds:g} s, fewer than it has: if all of them run, "
                "send the request again"
            ) from None
        try:
            async with asyncio.TaskGroup() as group:
                for one in receivers.endpoints:
                    group.create_task(self.push(one, message))
        except ExceptionGroup as failures:  # the first one cancelled the others
            raise failures.exceptions[0] from None

    async def push(self, endpoint: str, message: Message) -> None:
        """Returns when ZMQ has handed the message to the kernel. Raises Unavailable."""
        try:
            async with asyncio.timeout(self.limits.timeout_seconds), self.sockets:
                await self.send(endpoint, message)
        except TimeoutError:
            raise Unavailable(
                f"{endpoint} did not take the rows within {self.limits.timeout_seconds:g} s"
            ) from None
        except zmq.ZMQError as error:
            raise Unavailable(
                f"no socket for {endpoint}: {error}: try again, or raise the limit of open files "
                "(ulimit -n) of `encoder-service sglang`"
            ) from None

    async def send(self, endpoint: str, message: Message) -> None:
        socket = self.context.socket(zmq.PUSH)
        try:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # sending waits for the connection
            socket.connect(endpoint)
            sent = await socket.send_multipart(message, copy=False, track=True)
            while sent and not sent.done:
                await asyncio.sleep(POLL_SECONDS)
        finally:
            socket.close(linger=LINGER_MS)

    def app(self) -> Starlette:
        """The ASGI application. It closes the connections when it ends."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self.encoder.close()
            self.context.destroy(linger=LINGER_MS)

        routes = [
            Route("/encode", self.encode, methods=["POST"]),
            Route("/scheduler_receive_url", self.receive_url, methods=["POST"]),
            Route("/health", self.health),
        ]
        return Starlette(routes=routes, lifespan=lifespan)


def parse(kind: type[Read], body: bytes) -> Read:
    """Raises InvalidRequest, which names the first wrong key."""
    try:
        return kind.model_validate(read_json(body, MOST_VALUES))
    except WireError as error:
        raise InvalidRequest(str(error)) from None
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise InvalidRequest(f"{'.'.join(map(str, first['loc']))}: {reason(first)}") from None


def items_of(call: EncodeRequest) -> list[RequestItem]:
    """Raises InvalidRequest for what is neither a data URL nor an https URL."""
    found = []
    for i, media in enumerate(call.mm_items):
        part: ImagePart | VideoPart = (
            ImagePart(type="image_url", image_url=ImageUrl(url=media.url))
            if call.modality == "IMAGE"
            else VideoPart(type="video_url", video_url=VideoUrl(url=media.url))
        )
        found.append(item(f"mm_items[{i}]", part))
    return found


def frames(call: EncodeRequest, embeddings: Sequence[Embedding]) -> Message:
    """The header, then the rows of all items, one after the other. Raises EncodeFailed."""
    dtype, width = embeddings[0].dtype, embeddings[0].shape[1]
    if any(one.shape != (one.tokens, width) for one in embeddings):
        shapes = [one.shape for one in embeddings]
        raise EncodeFailed(f"shapes {shapes} are not tokens of one width")
    if any(one.kept_rows for one in embeddings):
        raise EncodeFailed(
            "SGLang cannot place the rows of a pruned image: set preprocess.prune of the encoder "
            "service to off"
        )
    attributes: dict[str, Any] = {
        "req_id": call.req_id,
        "num_parts": call.num_parts,
        "part_idx": call.part_idx,
        "grid_dim": [list(one.grid_thw) for one in embeddings],
        "embedding": None,
        "send_time": None,
        "shape": [sum(one.tokens for one in embeddings), width],
        "_mr_ptr": None,
        "error_msg": None,
        "error_code": None,
    }
    if call.modality == "VIDEO" and embeddings[0].family == "qwen2_5_vl":
        attributes["second_per_grid_ts"] = [one.second_per_grid_ts for one in embeddings]
    elif call.modality == "VIDEO":  # with second_per_grid_ts, SGLang's positions fail
        attributes["video_timestamps"] = [list(one.timestamps) for one in embeddings]
    rows = embeddings[0].data if len(embeddings) == 1 else b"".join(one.data for one in embeddings)
    return [header(attributes, call.modality, dtype), rows]


def header(attributes: dict[str, Any], modality: str, dtype: str) -> bytes:
    """Pickles SGLang's EmbeddingData with plain attributes, its modality and its torch dtype.

    Written opcode by opcode (see Python's pickletools), because pickle would import SGLang's
    classes.
    """
    return b"".join(
        (
            b"\x80\x02",  # protocol 2
            reference(RECEIVER, "EmbeddingData") + b")\x81",  # EmbeddingData.__new__()
            plain(attributes),
            plain("modality") + reference(MODALITY, "Modality"),
            plain((MODALITIES[modality],)) + b"Rs",  # attributes["modality"] = Modality(1)
            plain("dtype") + reference("torch", dtype) + b"s",
            b"b.",  # __dict__.update(attributes)
        )
    )


def plain(value: Any) -> bytes:
    """Opcodes that push a value of built-in types."""
    return dumps(value, 2)[2:-1]  # without the opcodes for the protocol and the end


def reference(module: str, name: str) -> bytes:
    """The opcode that pushes a class or constant."""
    return f"c{module}\n{name}\n".encode()


def refusal(problem: Exception) -> Response:
    """An error as SGLang reads it."""
    found = passed_on(problem, request_id_of(None))
    where = "" if found.item is None else f"mm_items[{found.item}]: "
    return error_response(found, {"status": "error", "message": where + found.message})
