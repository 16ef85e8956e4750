"""A proxy for a vLLM server that replaces the images of chat requests by their embeddings.

Everything else passes unchanged. Clients use OpenAI's API, and their key is forwarded to vLLM. If
the proxy has keys of its own, it checks a request's key before anything is encoded. vLLM can then
run without its vision tower (docs/engines.md). By id, only the names of the embeddings pass, and
vLLM's EC connector fetches the rows.

Images in data URLs are decoded here. https URLs go to the encoder service, which decides what it
fetches. Other URLs are rejected, and so are embeddings that a client made itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from actors.errors import DeadlineExceeded, EncodeFailed, InvalidRequest, Unavailable
from encoder_service.api.auth import Tokens
from encoder_service.api.errors import TABLE, Fault, error_response, fault, request_id_of
from encoder_service.api.upload import read_body
from encoder_service.client import AsyncClient, Embedding, ServiceError
from encoder_service.client.items import ProcessorOptions
from encoder_service.config import AuthOptions, LimitOptions
from encoder_service.engines.vllm import GRIDS
from encoder_service.intake.limits import Buffered, Take, check_items
from encoder_service.wire.formats import WireError, check_json, from_base64, read_json

log = logging.getLogger(__name__)

Json = dict[str, Any]
Result = TypeVar("Result")

CHAT_PATH = "/v1/chat/completions"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
HOP_BY_HOP = frozenset(
    (
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization",
        "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade",
        "host", "content-length", "expect",
    )
)  # fmt: skip
"""Headers of a single connection (RFC 9110 section 7.6.1), and those that httpx sets itself."""
RENAMING = ("mm_processor_kwargs", "media_io_kwargs")
"""Keys of a request for which vLLM would replace the ids of embeddings by hashes. They have no
effect on embeddings."""
READY_MADE = ("image_pil", "kwargs_data")
"""Keys besides ..._embeds that hold tensors. kwargs_data belongs to /inference/v1/generate."""
MOST_VALUES = 2**20
"""Maximum number of values in a body, as wire/formats.py counts them."""
UPSTREAM_TIMEOUT_SECONDS = 600
"""Maximum time between two pieces of a response."""


@dataclass(frozen=True, slots=True)
class ChatImage:
    where: str
    """Its path for error messages, such as messages[0].content[1]."""
    content: list[Any]
    index: int
    uuid: str | None
    """The client's own name for the image, under which vLLM caches it."""
    source: bytes | str
    """The file's bytes, or an https URL."""


class Relayed(StreamingResponse):
    """vLLM's response, streamed. What it needs is closed even if the client hangs up first."""

    def __init__(self, answer: httpx.Response, needed: AsyncExitStack) -> None:
        super().__init__(answer.aiter_raw(), answer.status_code)
        self.needed = needed
        self.raw_headers = [
            (name.lower(), value)
            for name, value in answer.headers.raw
            if name.decode().lower() not in HOP_BY_HOP or name.lower() == b"content-length"
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self.needed.aclose()


class Proxy:
    """One encoder service, one vLLM server, and the connections to both."""

    def __init__(
        self,
        upstream: str,
        limits: LimitOptions,
        auth: AuthOptions,
        encoder: AsyncClient,
        *,
        by_id: bool = False,
    ) -> None:
        """`upstream`: URL of the vLLM server, without /v1.

        limits.timeout_seconds applies to receiving a body, and again to encoding its images.
        `auth`: keys of clients, empty if none is needed. The clients' header is forwarded to vLLM
        in any case.
        `by_id`: vLLM gets the ids of embeddings, whose rows its EC connector fetches.
        """
        self.upstream = upstream
        self.by_id = by_id
        self.checked = False
        """Whether the encoder service is known to keep embeddings that vLLM can take by id."""
        self.releasing: set[asyncio.Task[None]] = set()
        self.limits = limits
        self.encoder = encoder
        self.tokens = Tokens(auth)
        self.buffered = Buffered(
            limits.max_buffered_bytes, "buffered requests (limits.max_buffered_bytes)"
        )
        self.client = httpx.AsyncClient(
            base_url=upstream,
            timeout=httpx.Timeout(UPSTREAM_TIMEOUT_SECONDS, connect=10),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )

    async def answer(self, request: Request) -> Response:
        try:
            if request.method != "OPTIONS":  # browsers send no key with it, and vLLM asks for none
                self.tokens.authorize(*request.headers.getlist("authorization"))
            async with AsyncExitStack() as needed:
                with self.buffered.hold() as take:
                    body = await read_body(request, self.limits, take)
                    if request.method == "POST" and request.scope["path"] == CHAT_PATH:
                        body = await self.with_embeddings(body, take, needed)
                    else:
                        await asyncio.to_thread(check_other, body)
                    answer = await unless_gone(request, self.send(request, body))
                needed.push_async_callback(answer.aclose)
                return Relayed(answer, needed.pop_all())
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except Exception as problem:
            return refusal(problem, request_id_of(request.headers.get("x-request-id")))

    async def with_embeddings(self, body: bytes, take: Take, needed: AsyncExitStack) -> bytes:
        """The request's body with embeddings in place of images; unchanged if it has no images.
        `take` counts their rows. When `needed` is closed, their ids are released."""
        try:
            document = await asyncio.to_thread(read_json, body, MOST_VALUES)
        except WireError as error:
            raise InvalidRequest(str(error)) from None
        await asyncio.to_thread(refuse_ready_made, document)
        found = await asyncio.to_thread(images_of, document)
        if not found:
            return body
        check_items(len(found), self.limits)
        if self.by_id:
            await self.check_by_id()
        try:
            sources = [one.source for one in found]
            embeddings = await self.encoder.encode(
                sources, reference=self.by_id, **asked_of(document)
            )
        except ServiceError as problem:
            if problem.item is not None:
                problem.message = f"{found[problem.item].where}: {problem.message}"
            raise
        if self.by_id:
            needed.callback(self.release, [one.reference for one in embeddings])
        take(sum(len(one.data) for one in embeddings))  # none by id

        def written() -> bytes:
            replace_images(found, embeddings)
            if self.by_id:
                for key in RENAMING:
                    document.pop(key, None)
            return json.dumps(document).encode()

        return await asyncio.to_thread(written)

    async def check_by_id(self) -> None:
        """Asks the encoder service once. Raises InvalidRequest if vLLM cannot take its family's
        embeddings by id, Unavailable if they could expire while a request waits in vLLM."""
        if self.checked:
            return
        card = await self.encoder.model()
        family, seconds = card["family"], card["references"]["ttl_seconds"]
        if family not in GRIDS:
            raise InvalidRequest(
                f"vLLM takes no ids of the family {family!r}, only of {', '.join(GRIDS)}: start "
                "this proxy without --by-id"
            )
        if seconds < UPSTREAM_TIMEOUT_SECONDS:
            raise Unavailable(
                f"references.ttl_seconds of the encoder service is {seconds:g}: set it to at least "
                f"{UPSTREAM_TIMEOUT_SECONDS}, because requests with ids may wait that long in vLLM"
            )
        self.checked = True

    def release(self, references: Sequence[str]) -> None:
        """Lets the encoders forget embeddings. Does not wait for it."""
        for one in references:
            task = asyncio.create_task(self.released(one))
            self.releasing.add(task)
            task.add_done_callback(self.releasing.discard)

    async def released(self, reference: str) -> None:
        try:
            await self.encoder.release(reference)
        except ServiceError as error:
            log.debug("an embedding was not released, and will expire: %s", error)

    async def send(self, request: Request, body: bytes) -> httpx.Response:
        """Returns vLLM's response before its body is read. Raises Unavailable, DeadlineExceeded."""
        named = request.headers.get("connection", "").lower().split(",")
        # The body is no longer compressed.
        dropped = HOP_BY_HOP.union(map(str.strip, named), ["content-encoding"])
        headers = [(k, v) for k, v in request.headers.raw if k.decode("latin-1") not in dropped]
        if "accept-encoding" not in request.headers:
            headers.append((b"accept-encoding", b"identity"))  # httpx would add its own
        outgoing = self.client.build_request(
            request.method, self.target(request), content=body, headers=headers
        )
        try:
            return await self.client.send(outgoing, stream=True)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"no response from {self.upstream}: {error!r}") from None
        except httpx.TransportError as error:
            raise Unavailable(
                f"{self.upstream} cannot be reached: {error!r}. Start vLLM there, or start this "
                "proxy with another --upstream"
            ) from None

    def target(self, request: Request) -> httpx.URL:
        """The same path and query on the vLLM server, with their original quoting."""
        path: bytes = request.scope.get("raw_path") or request.url.path.encode()
        query: bytes = request.scope["query_string"]
        base = self.client.base_url
        whole = base.raw_path.rstrip(b"/") + path + (b"?" + query if query else b"")
        return base.copy_with(raw_path=whole)

    def app(self) -> Starlette:
        """The ASGI application. It closes the proxy's connections when it ends."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            yield
            await self.client.aclose()
            await asyncio.gather(*self.releasing)
            await self.encoder.close()

        routes = [Route("/{path:path}", self.answer, methods=METHODS)]
        return Starlette(routes=routes, lifespan=lifespan)


async def unless_gone(request: Request, call: Coroutine[Any, Any, Result]) -> Result:
    """The result of a call, which is cancelled if the client hangs up, so that vLLM hears of it.
    The request's body must have been read. Raises ClientDisconnect."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    calling, gone = asyncio.create_task(call), asyncio.create_task(hung_up())
    try:
        await asyncio.wait((calling, gone), return_when=asyncio.FIRST_COMPLETED)
        if not calling.done():
            raise ClientDisconnect
        return calling.result()
    finally:
        calling.cancel()
        gone.cancel()


def images_of(request: Json) -> list[ChatImage]:
    """Every image of a request, in order. Raises InvalidRequest."""
    messages = request.get("messages")
    found = []
    for i, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for j, part in enumerate(content if isinstance(content, list) else []):
            where = f"messages[{i}].content[{j}]"
            kinds = kinds_of(part) if isinstance(part, dict) else set()
            if "video_url" in kinds:
                raise InvalidRequest(
                    f"{where}: videos are not supported by this proxy; send images"
                )
            if "image_url" in kinds:
                assert isinstance(content, list)
                source = source_of(part, where)
                found.append(ChatImage(where, content, j, part.get("uuid"), source))
    return found


def asked_of(request: Json) -> ProcessorOptions:
    """The sizes in `mm_processor_kwargs`. Applied here, because vLLM does not resize embeddings.
    Raises InvalidRequest."""
    kwargs = request.get("mm_processor_kwargs")
    given = kwargs if isinstance(kwargs, dict) else {}
    names = ("min_pixels", "max_pixels", "max_patches")
    sizes = {name: given[name] for name in names if given.get(name) is not None}
    for name, size in sizes.items():
        if not isinstance(size, int) or abs(size) >= 2**63:
            raise InvalidRequest(f"mm_processor_kwargs.{name} is not a number of pixels or patches")
    return cast(ProcessorOptions, sizes)


def kinds_of(part: Json) -> set[Any]:
    """What vLLM may take a part for: its type, or a key of it, as without a type or with a uuid."""
    return {part.get("type") if isinstance(part.get("type"), str) else None} | part.keys()


def refuse_ready_made(request: Any) -> None:
    """Raises InvalidRequest if the request has embeddings, because vLLM may crash on wrong ones."""
    # A path is a chain of (its beginning, the rest): as strings, the paths of a million values
    # under one long key would fill the memory.
    left: list[tuple[Any, Any]] = [((), request)]
    while left:
        where, one = left.pop()
        if isinstance(one, list):
            left += [((where, f"[{i}]"), each) for i, each in enumerate(one)]
        if not isinstance(one, dict):
            continue
        for kind in kinds_of(one) - {None}:
            if kind.endswith("_embeds") or kind in READY_MADE:
                raise InvalidRequest(
                    f"{path_of(where) or 'the body'}: {kind} is not accepted by this proxy; "
                    "send images"
                )
        left += [((where, f".{key}"), each) for key, each in one.items()]


def path_of(where: Any) -> str:
    keys = []
    while where:
        where, key = where
        keys.append(key)
    return "".join(reversed(keys)).lstrip(".")


def source_of(part: Json, where: str) -> bytes | str:
    """The file's bytes from a data URL, or the https URL. Raises InvalidRequest."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.image_url needs a url")
    if url.startswith("https://"):
        if any("\ud800" <= sign <= "\udfff" for sign in url):
            raise InvalidRequest(f"{where}.image_url has an unpaired surrogate: send valid Unicode")
        return url
    head, comma, data = url.partition(",")
    if not (head.lower().startswith("data:image/") and head.lower().endswith(";base64") and comma):
        raise InvalidRequest(f"{where}.image_url: send data:image/...;base64,... or an https URL")
    try:
        return from_base64(data, f"{where}.image_url")
    except WireError as error:
        raise InvalidRequest(str(error)) from None


def replace_images(found: list[ChatImage], embeddings: list[Embedding]) -> None:
    """Puts embeddings where the images were. Raises EncodeFailed if vLLM cannot take one. The
    client's names for them are kept, except where an id takes their place."""
    for one, embedding in zip(found, embeddings, strict=True):
        try:
            part = embedding.to_vllm()
        except ValueError as error:
            raise EncodeFailed(f"{one.where}: {error}") from None
        one.content[one.index] = part if one.uuid is None else {"uuid": one.uuid} | part


def check_other(body: bytes) -> None:
    """Raises InvalidRequest for ready-made embeddings in a request to another path than chat, and
    for a body that would take too much memory once parsed."""
    try:
        check_json(body, MOST_VALUES)
        document = json.loads(body)
    except WireError as error:
        raise InvalidRequest(str(error)) from None
    except ValueError:
        return  # a form, or empty: vLLM reads embeddings from JSON only
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    refuse_ready_made(document)


def refusal(problem: Exception, request_id: str) -> Response:
    found = passed_on(problem, request_id)
    return error_response(found, found.openai_document())


def passed_on(problem: Exception, request_id: str) -> Fault:
    """The error for the client. The encoder service's own errors are passed on, except those that
    are the proxy's fault."""
    if isinstance(problem, ServiceError) and problem.type not in ("unauthorized", "not_found"):
        for row in TABLE.values():
            if row.type == problem.type:
                return Fault(row, problem.message, problem.item, problem.retry_after_seconds)
    return fault(problem, request_id)
