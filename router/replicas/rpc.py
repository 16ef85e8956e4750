"""The router's end of replica.proto: over a replica's unix socket on this node, else over TCP."""

from __future__ import annotations

import asyncio
import errno
import os
from typing import Any

import grpc
from grpc import StatusCode

from actors.errors import DeadlineExceeded, TooLarge
from actors.rpc import replica_pb2 as pb
from actors.rpc.codec import error_of
from actors.rpc.server import (
    BEGUN_KEY,
    COMMON_OPTIONS,
    ERROR_KEY,
    TOKEN_KEY,
    Endpoint,
    stubs,
)
from router.replicas.fleet import ReplicaDied, ReplicaUnreachable, ShardLost

CHANNEL_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # While there are calls: a node that vanishes never closes its connections.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

STOPPED = "Cancelling all calls"
"""What gRPC says of calls that outlasted the grace of a server that stops: not a death."""


class ReplicaChannel:
    """A channel to one replica, for one event loop. gRPC reopens it when it breaks."""

    def __init__(self, endpoint: Endpoint, node: str) -> None:
        """`node`: Ray's id of this process's node."""
        self.endpoint = endpoint
        self._near = endpoint.node == node and os.access(endpoint.unix, os.W_OK)
        target = f"unix:{endpoint.unix}" if self._near else endpoint.tcp
        self._channel = grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
        self._stubs = stubs(self._channel)
        self._metadata = ((TOKEN_KEY, endpoint.token),)
        self._calls = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None

    async def call(self, method: str, request: Any, timeout_seconds: float | None = None) -> Any:
        """The reply. Cancelling it cancels the call.

        Raises ReplicaDied, ReplicaUnreachable, ShardLost, or the ServiceError of the replica.
        """
        self._calls += 1
        try:
            call = self._stubs[method](request, timeout=timeout_seconds, metadata=self._metadata)
            try:
                return await call
            except grpc.aio.AioRpcError as error:
                raise failure(error) from None
        finally:
            self._calls -= 1
            self._close_if_done()

    async def reach(self) -> None:
        """Returns if the node accepts or refuses a connection. Raises OSError if it is cut off."""
        if self._near:
            return
        host, _, port = self.endpoint.tcp.rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
        except OSError as error:
            if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
                raise

    def retire(self) -> None:
        """Closes once the calls in progress have ended, which a draining replica still answers."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self._calls and not self._closing:
            self._closing = asyncio.get_running_loop().create_task(self._channel.close())


def failure(error: grpc.aio.AioRpcError) -> Exception:
    """The exception for a call that ended with this status."""
    code, details = error.code(), error.details() or error.code().name
    for key, value in error.trailing_metadata() or ():
        if key == ERROR_KEY:
            return error_of(pb.Error.FromString(value))
    if code == StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the replica did not answer within the time that was left")
    if code == StatusCode.RESOURCE_EXHAUSTED:
        return TooLarge(f"the items or their embeddings are too large for a call: {details}")
    if code in {StatusCode.CANCELLED, StatusCode.UNAUTHENTICATED} or details == STOPPED:
        return ShardLost(details)
    if any(key == BEGUN_KEY for key, _ in error.initial_metadata() or ()):
        return ReplicaDied(details)
    return ReplicaUnreachable(details)
