"""The replica's end of replica.proto: what routers call, over a unix socket or TCP.

Callers must know the replica's random token, which only this Ray cluster is told
(`record_replica_metadata`). In addition, the unix socket is in a directory that only the replica's
own user may enter, because gRPC does not show a peer's credentials (SO_PEERCRED).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from hmac import compare_digest
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from actors.errors import ServiceError, Unavailable
from actors.rpc import replica_pb2 as pb
from actors.rpc.codec import (
    VERSION,
    EncodeCall,
    error_message,
    from_message,
    kept_message,
    reply_message,
)
from actors.types import SharedBytes

log = logging.getLogger("ray.serve")

METADATA_KEY = "rpc"  # key of the endpoint in `record_replica_metadata`
TOKEN_KEY, BEGUN_KEY, ERROR_KEY = "token", "begun", "error-bin"
"""Keys of gRPC metadata: with a call; in return, before any work; at the end."""

MAX_MESSAGE_BYTES = 2**30  # a reply holds at most 1000 items (limits.max_items) of INLINE_BYTES
MAX_ERROR_CHARS = 2000  # limit of an error message in the metadata, for which gRPC allows 8 KiB
TICKET_SECONDS = 30.0  # how long rows wait to be taken. Routers ask at once, unless they died
STALE_SECONDS = 60.0  # an older socket without a listener was left by a killed replica
DIRECTORY_PREFIX = "encoder-rpc-"
SOCKET_NAME = "replica.sock"

SERVICE: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["Replica"]

COMMON_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

TICKETS: dict[str, list[SharedBytes]] = {}
"""Rows in shared memory that answers of this process refer to, until they are taken or expire."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica listens, and its token. Does not print the token."""

    node: str  # Ray's id of the node
    unix: str  # path of the socket
    tcp: str  # address and port
    actor: str  # name of the replica's Ray actor, which hands over rows in shared memory
    token: str = field(repr=False)
    version: int = VERSION

    @property
    def metadata(self) -> dict[str, Any]:
        """For `record_replica_metadata`, which Ray's controller passes on to routers."""
        return {METADATA_KEY: asdict(self)}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Endpoint | None:
        """From a replica's metadata. None: it speaks another version, or listens nowhere."""
        said = metadata.get(METADATA_KEY, {})
        return cls(**said) if said.get("version") == VERSION else None


class ReplicaServer:
    """Serves one encoder to routers, on the encoder's event loop.

    Serve does not see these calls, so the encoder calls `stop` before its process ends.
    """

    def __init__(self, encoder: Any) -> None:
        """`encoder`: an actors.encoder.Encoder, which imports this file."""
        self._encoder = encoder
        self._endpoint: Endpoint | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def running(self) -> bool:
        return self._server is not None

    async def start(self, node: str, host: str, actor: str) -> Endpoint:
        """Starts to listen; a second call only returns where. `host`: the node's address."""
        if self._endpoint:
            return self._endpoint
        token = token_hex(32)
        options = [*COMMON_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]
        server = grpc.aio.server(interceptors=[TokenCheck(token)], options=options)
        server.add_generic_rpc_handlers([self._handlers()])
        host = f"[{host}]" if ":" in host else host
        port = server.add_insecure_port(f"{host}:0")
        directory = await asyncio.to_thread(make_directory)
        path = str(directory / SOCKET_NAME)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._server = server
        self._endpoint = Endpoint(node, path, f"{host}:{port}", actor, token)
        return self._endpoint

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more calls, and waits at most `grace_seconds` for those in progress."""
        if (server := self._server) is None or self._endpoint is None:
            return
        self._server = None
        await server.stop(grace_seconds)
        for _ in range(40):  # at most 2 s: routers exchange their last tickets
            if not TICKETS:
                break
            await asyncio.sleep(0.05)
        rmtree(Path(self._endpoint.unix).parent, ignore_errors=True)

    def _handlers(self) -> grpc.GenericRpcHandler:
        works = {
            "Encode": self._encode,
            "Check": self._check,
            "Fetch": self._fetch,
            "Release": self._release,
        }
        handlers = {
            method.name: grpc.unary_unary_rpc_method_handler(
                _method(works[method.name]),
                request_deserializer=GetMessageClass(method.input_type).FromString,
                response_serializer=GetMessageClass(method.output_type).SerializeToString,
            )
            for method in SERVICE.methods
        }
        return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)

    def _ticket(self, shared: list[SharedBytes]) -> str:
        """A ticket for rows in shared memory, which stay until it is exchanged or expires."""
        if not shared:
            return ""
        ticket = token_hex(16)
        TICKETS[ticket] = shared
        asyncio.get_running_loop().call_later(TICKET_SECONDS, TICKETS.pop, ticket, None)
        return ticket

    async def _encode(self, request: pb.EncodeRequest) -> pb.EncodeReply:
        call = from_message(request, EncodeCall)
        message, shared = reply_message(
            await self._encoder.encode(
                call.media, call.dtype, call.timeout_seconds, call.origin, call.keep
            )
        )
        message.ticket = self._ticket(shared)
        return message

    async def _check(self, request: pb.CheckRequest) -> pb.CheckReply:
        await self._encoder.check_health()
        return pb.CheckReply()

    async def _fetch(self, request: pb.FetchRequest) -> pb.FetchReply:
        kept = await self._encoder.fetch(request.name)
        shared: list[SharedBytes] = []
        message = kept and kept_message(kept, shared)
        return pb.FetchReply(kept=message, ticket=self._ticket(shared))

    async def _release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        return pb.ReleaseReply(released=await self._encoder.release(request.name))


def take(_: object, tickets: list[str]) -> list[list[SharedBytes] | None]:
    """The rows that each ticket stands for, once. None: it was taken, or expired. Runs in the
    replica's process, as `actor.__ray_call__.remote(take, tickets)`."""
    return [TICKETS.pop(ticket, None) for ticket in tickets]


def _method(
    work: Callable[[Any], Awaitable[Any]],
) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]:
    """A handler that announces the start of a call, and ends it with the result or error."""

    async def method(request: Any, context: grpc.aio.ServicerContext) -> Any:
        # Before the work: the router can tell a replica that died of the call from one that
        # was dead before.
        await context.send_initial_metadata(((BEGUN_KEY, "1"),))
        failure: Exception
        try:
            return await work(request)
        except asyncio.CancelledError:
            if context.cancelled():
                raise
            failure = Unavailable("the encoder dropped the call")
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("a call of a router failed")
            failure = error
        message = error_message(failure)
        message.message = message.message[:MAX_ERROR_CHARS]
        details = ((ERROR_KEY, message.SerializeToString()),)
        await context.abort(grpc.StatusCode.ABORTED, message.type, details)

    return method


class TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the token, before their message is read."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

        async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this replica's")

        # Streaming, so that nothing is read; a unary handler starts with the whole message.
        self._refuse = grpc.stream_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        for key, value in handler_call_details.invocation_metadata:
            if key == TOKEN_KEY and compare_digest(value.encode(), self._token):
                return await continuation(handler_call_details)
        return self._refuse


def stubs(channel: grpc.aio.Channel) -> dict[str, grpc.aio.UnaryUnaryMultiCallable]:
    """The calls of a client, by the method's name."""
    return {
        method.name: channel.unary_unary(
            f"/{SERVICE.full_name}/{method.name}",
            request_serializer=GetMessageClass(method.input_type).SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        for method in SERVICE.methods
    }


def make_directory() -> Path:
    """A new directory that only this user may enter (mode 0700), for a socket. Removes those of
    replicas that were killed."""
    parent = tempfile.gettempdir()
    if len(parent) > 60:  # a socket's path has at most 107 bytes
        parent = "/tmp"
    for left in Path(parent).glob(f"{DIRECTORY_PREFIX}*/{SOCKET_NAME}"):
        if is_stale(left):
            rmtree(left.parent, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=parent))


def is_stale(path: Path) -> bool:
    """Whether a socket older than STALE_SECONDS has no listener."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # a process that hangs accepts nothing
        try:
            if time.time() - path.stat().st_mtime < STALE_SECONDS:
                return False
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # not ours, or gone meanwhile
            return False
    return False
