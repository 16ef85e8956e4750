"""The router's side of replica.proto, over a replica's unix socket on this node, else over TCP."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from itertools import count
from secrets import token_hex
from typing import Any

import grpc
from grpc import StatusCode

from actors.errors import DeadlineExceeded
from actors.rows.lending import Borrower, Loan
from actors.rpc import replica_pb2 as pb
from actors.rpc.codec import Fields, error_of, from_message
from actors.rpc.server import (
    BEGUN_KEY,
    COMMON_OPTIONS,
    LINE_KEY,
    METHOD,
    SERVICE,
    TOKEN_KEY,
    Endpoint,
    serialized,
)
from actors.types import Bytes, Work
from router.replicas.fleet import ReplicaDied, ReplicaUnreachable, ShardLost, detached

log = logging.getLogger("ray.serve")

CHANNEL_OPTIONS = [
    *COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]

STOPPED = "Cancelling all calls"
"""gRPC's message for calls that outlasted the grace period of a stopping server: not a death."""

Metadata = tuple[tuple[str, str], ...]
Arrival = tuple[pb.Outcome, list[Bytes]]
"""An outcome, and the rows that it lends."""


class ReplicaChannel:
    """A channel to one replica, for one event loop. Reopens streams that broke."""

    def __init__(
        self,
        endpoint: Endpoint,
        node: str,
        heard: Callable[[Work], None] = lambda _: None,
        *,
        borrows: bool = False,
    ) -> None:
        """`node`: Ray's id of this process's node. `heard` is called with the replica's outstanding
        work when the replica sends that on its own. `borrows`: rows are read in place if the
        replica's memory can be opened."""
        self.endpoint = endpoint
        self._heard = heard
        self._near = endpoint.node == node and os.access(endpoint.unix, os.W_OK)
        self.borrower = borrower_of(endpoint) if borrows and self._near else None
        target = f"unix:{endpoint.unix}" if self._near else endpoint.tcp
        self._channel = grpc.aio.insecure_channel(target, CHANNEL_OPTIONS)
        self._ids = count(1)
        self._lines = {False: token_hex(8), True: token_hex(8)}
        self._streams: dict[bool, ReplicaStream] = {}
        """One for items to encode and one (True) for everything else, because a message waits for
        those before it on its stream."""
        self._calls = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None

    async def call(
        self,
        method: str,
        request: Fields,
        timeout_seconds: float | None = None,
        early: Callable[[Any, list[Bytes]], Awaitable[None]] | None = None,
    ) -> tuple[Any, list[Bytes]]:
        """Returns the reply to a `method` of replica.proto's Call, and the rows that it lends.
        Cancelling it cancels the call. `early` is called with the replies before the last, one
        after another.

        Raises ReplicaDied, ReplicaUnreachable, ShardLost, or the ServiceError of the replica.
        """
        number = next(self._ids)
        data = serialized(pb.Call(id=number, **{method: request}))
        self._calls += 1
        try:
            small = method != "encode"
            if small not in self._streams or self._streams[small].ended:
                metadata = ((TOKEN_KEY, self.endpoint.token), (LINE_KEY, self._lines[small]))
                self._streams[small] = ReplicaStream(
                    self._channel, metadata, self._heard, self.borrower
                )
            outcomes = self._streams[small].outcomes(number, data)
            async with asyncio.timeout(timeout_seconds), aclosing(outcomes):
                async for outcome, lent in outcomes:
                    if outcome.HasField("error"):
                        raise error_of(outcome.error)
                    reply = getattr(outcome, method)
                    if early and is_early(outcome):
                        await early(reply, lent)
                        del outcome, reply, lent  # while the next ones are awaited
        except TimeoutError:
            raise DeadlineExceeded(
                "the replica did not answer within the time that was left"
            ) from None
        finally:
            self._calls -= 1
            self._close_if_done()
        return reply, lent

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
        """Closes once the calls in progress have ended. A draining replica still answers them."""
        self._retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._retired and not self._calls and not self._closing:
            self._closing = asyncio.get_running_loop().create_task(self._channel.close())


class ReplicaStream:
    """The calls over one stream, until it breaks."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        metadata: Metadata,
        heard: Callable[[Work], None],
        borrower: Borrower | None,
    ) -> None:
        self.ended = False
        self._heard = heard
        self._borrower = borrower
        self._unsent: dict[int, bytes] = {}
        self._order: asyncio.Queue[int | None] = asyncio.Queue()
        """Ids of messages in `_unsent`, or that were in it and were dropped. None: the stream has
        ended."""
        self._waiting: dict[int, asyncio.Queue[Arrival | ShardLost]] = {}
        self._writer: asyncio.Task[None] | None = None
        self._reader = detached(self._read(channel, metadata))

    async def outcomes(self, number: int, call: bytes) -> AsyncGenerator[Arrival]:
        """Sends a call and yields its outcomes. Cancels the call if not all of them are taken.
        Raises ShardLost."""
        found: asyncio.Queue[Arrival | ShardLost] = asyncio.Queue()
        self._waiting[number] = found
        self._send(number, call)
        arrival: Arrival | ShardLost | None = None
        more = True
        try:
            while more:
                arrival = await found.get()
                if isinstance(arrival, ShardLost):
                    more = False
                    raise arrival
                more = is_early(arrival[0])
                yield arrival
                arrival = None
        finally:
            self._waiting.pop(number, None)
            if more and self._unsent.pop(number, None) is None:  # it was sent
                self._send(number, serialized(pb.Call(id=number, cancel={})))
            arrival = None  # else a failure's traceback would refer to it, in a cycle

    def _send(self, number: int, message: bytes) -> None:
        if not self.ended:
            self._unsent[number] = message
            self._order.put_nowait(number)

    async def _write(self, stream: grpc.aio.StreamStreamCall) -> None:
        """Writes messages one after another, in its own task, because a cancelled write would end
        the stream."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # `_read` hears of it
            while (number := await self._order.get()) is not None:
                if number in self._unsent:
                    await stream.write(self._unsent.pop(number))

    async def _read(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        lost, begun = ShardLost("the replica stopped"), False
        try:
            open_stream = channel.stream_stream(f"/{SERVICE}/{METHOD}", None, pb.Outcome.FromString)
            stream = open_stream(metadata=metadata)
            self._writer = detached(self._write(stream))
            begun = any(key == BEGUN_KEY for key, _ in await stream.initial_metadata())
            async for outcome in stream:
                if outcome.HasField("load"):
                    load = outcome.load
                    self._heard(Work(load.outstanding_patches, load.outstanding_pairs))
                else:
                    # Borrowed even if nobody waits, because only the borrower can give them back.
                    lent = self._borrowed(outcome)
                    if waiting := self._waiting.get(outcome.id):
                        waiting.put_nowait((outcome, lent))
                    del lent
                waiting = None
                del outcome  # it may be large, and the next one may take long
        except grpc.aio.AioRpcError as error:
            lost = failure(error, begun=begun)
        except asyncio.CancelledError:  # the channel was closed
            lost = ShardLost("the channel to the replica was closed")
        except Exception as error:
            log.exception("the stream of a replica cannot be read")
            lost = ShardLost(f"its answers cannot be read: {error!r}")
        self.ended = True
        self._order.put_nowait(None)
        for number, waiting in self._waiting.items():
            never_sent = number in self._unsent
            kind = ReplicaUnreachable if never_sent else type(lost)
            waiting.put_nowait(kind(str(lost)))  # one for each, because it will have a traceback
        self._unsent.clear()

    def _borrowed(self, outcome: pb.Outcome) -> list[Bytes]:
        if not outcome.HasField("encode") or not outcome.encode.loans:
            return []
        assert self._borrower, "rows were lent to a router that did not ask for it. This is a bug."
        return [self._borrower.rows(from_message(one, Loan)) for one in outcome.encode.loans]


def borrower_of(endpoint: Endpoint) -> Borrower | None:
    """None: the replica lends nothing, or its memory cannot be opened here, for example because it
    is in another container."""
    try:
        return Borrower(endpoint.memory) if endpoint.memory else None
    except (OSError, ValueError) as error:
        log.info("rows of this node go through Ray, as their memory cannot be opened: %s", error)
        return None


def is_early(outcome: pb.Outcome) -> bool:
    """Whether another outcome of the same call follows."""
    return bool(outcome.HasField("encode") and outcome.encode.more)


def failure(error: grpc.aio.AioRpcError, *, begun: bool) -> ShardLost:
    """The exception for the calls of a stream that ended with this status.

    `begun`: the replica had begun to read the stream.
    """
    code, details = error.code(), error.details() or error.code().name
    # INTERNAL: the stream ended while a call was being written, and gRPC forgets the reason.
    alive = {StatusCode.CANCELLED, StatusCode.UNAUTHENTICATED, StatusCode.INTERNAL}
    if code in alive or details == STOPPED:
        return ShardLost(details)
    return ReplicaDied(details) if begun else ReplicaUnreachable(details)
