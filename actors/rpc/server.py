"""The server of replica.proto, which routers call over a unix socket or TCP.

Callers must know the replica's random token, which is published only within this Ray cluster
(`record_replica_metadata`). In addition, the unix socket is in a directory that only the replica's
own user may enter, because gRPC does not show a peer's credentials (SO_PEERCRED).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hmac import compare_digest
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Any

import grpc
import numpy as np

from actors.errors import ServiceError, TooLarge, Unavailable
from actors.rows.lending import Lender, Loan
from actors.rows.protocol import MemoryHandle, RowsPlace
from actors.rows.server import RowsServer
from actors.rpc import replica_pb2 as pb
from actors.rpc.codec import (
    VERSION,
    Data,
    EncodeCall,
    Fields,
    error_fields,
    from_message,
    kept_fields,
    message_fields,
    reply_fields,
)
from actors.store.shared_memory import INLINE_BYTES, share
from actors.types import Reply, SharedBytes

log = logging.getLogger("ray.serve")

METADATA_KEY = "rpc"  # key of the endpoint in `record_replica_metadata`
TOKEN_KEY, LINE_KEY, BEGUN_KEY = "token", "line", "begun"
"""Keys of gRPC metadata. The router sends the first two with a stream: the replica's token, and an
id that stays when the router connects again, so that the new stream replaces the earlier one. The
replica sends the last one back before it reads the stream."""

MOST_LINES = 1000
MAX_MESSAGE_BYTES = 2**30  # a reply holds at most 1000 items (limits.max_items) of INLINE_BYTES
END_SECONDS = 1.0  # how long streams that end may take to send what is left
TICKET_SECONDS = 30.0  # how long rows wait to be taken. Routers ask at once, unless they died
TELL_SECONDS = 0.001  # delay of a Load message, so that one serves for several shards
LOAD = b""  # stands for a Load message in a stream's outcomes
STALE_SECONDS = 60.0  # an older socket without a listener was left by a killed replica
DIRECTORY_PREFIX = "encoder-rpc-"
SOCKET_NAME, ROWS_NAME = "replica.sock", "rows.sock"

SERVICE: str = pb.DESCRIPTOR.services_by_name["Replica"].full_name
METHOD = "Calls"

COMMON_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A node that vanishes never closes its connections.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]

TICKETS: dict[str, list[SharedBytes]] = {}
"""Rows in Ray's shared memory by ticket, until they are taken or the ticket expires."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a replica listens, and its token, which the repr leaves out."""

    node: str  # Ray's id of the node
    unix: str  # path of the socket
    tcp: str  # address and port
    actor: str  # name of the replica's Ray actor, which hands over rows in Ray's shared memory
    token: str = field(repr=False)
    version: int = VERSION
    rows_unix: str = ""
    rows_tcp: str = ""
    memory: MemoryHandle | None = None  # where routers on its node read lent rows

    @property
    def metadata(self) -> dict[str, Any]:
        """For `record_replica_metadata`, which Serve's controller passes on to routers."""
        return {METADATA_KEY: asdict(self)}

    @property
    def rows(self) -> RowsPlace:
        """Where language models read the rows of ids: see rows/server.py."""
        return RowsPlace(self.rows_unix, self.rows_tcp)

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Endpoint | None:
        """From a replica's metadata. None: it has another protocol version, or does not listen."""
        said = metadata.get(METADATA_KEY, {})
        if said.get("version") != VERSION:
            return None
        memory = said["memory"] and MemoryHandle(**said["memory"])
        return cls(**said | {"memory": memory})


class ReplicaServer:
    """Serves one encoder to routers, on the encoder's event loop.

    Serve does not see these calls, so the encoder calls `stop` before its process ends.
    """

    def __init__(
        self,
        encoder: Any,
        rows: RowsServer | None = None,
        rows_port: int = 0,
        lender: Lender | None = None,
    ) -> None:
        """`encoder`: an actors.encoder.Encoder, which imports this file. `rows`: starts and stops
        with this one. `lender`: lends the encoder's rows to routers on its node."""
        self._encoder = encoder
        self._lender = lender
        self._rows = rows
        self._rows_port = rows_port
        self._endpoint: Endpoint | None = None
        self._server: grpc.aio.Server | None = None
        self._streams: set[RouterStream] = set()
        self._lent: dict[str, dict[int, Loan]] = {}
        """What ended streams have lent, by their lines."""
        self._works = {
            "check": self._check,
            "fetch": self._fetch,
            "release": self._release,
        }

    @property
    def running(self) -> bool:
        return self._server is not None

    async def start(self, node: str, host: str, actor: str) -> Endpoint:
        """Starts to listen. A second call only returns the endpoint. `host`: the node's address."""
        if self._endpoint:
            return self._endpoint
        token = token_hex(32)
        options = [*COMMON_OPTIONS, ("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)]
        server = grpc.aio.server(options=options)
        handler = grpc.stream_stream_rpc_method_handler(self._calls, pb.Call.FromString)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})]
        )
        address = f"[{host}]" if ":" in host else host
        port = server.add_insecure_port(f"{address}:0")
        directory = await asyncio.to_thread(make_directory)
        path = str(directory / SOCKET_NAME)
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._server = server
        memory = self._lender.handle if self._lender else None
        self._endpoint = Endpoint(node, path, f"{address}:{port}", actor, token, memory=memory)
        if self._rows:
            place = self._rows.start(directory / ROWS_NAME, host, self._rows_port)
            self._endpoint = replace(self._endpoint, rows_unix=place.unix, rows_tcp=place.tcp)
        return self._endpoint

    async def stop(self, grace_seconds: float) -> None:
        """Takes no more calls, and waits at most `grace_seconds` for those in progress."""
        if (server := self._server) is None or self._endpoint is None:
            return
        self._server = None
        end = time.monotonic() + grace_seconds
        tasks = [task for stream in self._streams for task in stream.tasks.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_seconds)
        for stream in self._streams:
            stream.end()
        await server.stop(END_SECONDS)
        for _ in range(40):  # at most 2 s, for routers to exchange their last tickets
            if not TICKETS:
                break
            await asyncio.sleep(0.05)
        if self._rows:  # last, because clients read the rows of the last answers
            await asyncio.to_thread(self._rows.stop, max(END_SECONDS, end - time.monotonic()))
        rmtree(Path(self._endpoint.unix).parent, ignore_errors=True)

    async def _calls(
        self, calls: AsyncIterator[pb.Call], context: grpc.aio.ServicerContext
    ) -> None:
        """Serves one stream, which ends when its router is gone or this replica stops."""
        said = dict(context.invocation_metadata() or ())
        token, line = said.get(TOKEN_KEY, ""), str(said.get(LINE_KEY, ""))
        endpoint = self._endpoint
        if not endpoint or not compare_digest(str(token).encode(), endpoint.token.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not this replica's")
        # If this replica dies, the router knows from this that a call of the stream may have begun.
        await context.send_initial_metadata(((BEGUN_KEY, "1"),))
        self._take_back(line)
        stream = RouterStream(self, calls, line)
        self._streams.add(stream)
        try:
            while (outcome := await stream.outcomes.get()) is not None:
                await context.write(outcome or stream.load())
                del outcome  # it may be large, and the next one may take long to come
        finally:
            self._streams.discard(stream)
            stream.close()
            if line and stream.lent:
                self._lent[line] = stream.lent
                if len(self._lent) > MOST_LINES:  # of routers that are gone
                    del self._lent[next(iter(self._lent))]

    def _take_back(self, line: str) -> None:
        """Ends the loans of a line's earlier streams that the router has not heard of."""
        for before in [one for one in self._streams if one.line == line != ""]:
            before.close()  # so that it lends no more
            self.take_back(before.lent.values())
        self.take_back(self._lent.pop(line, {}).values())

    def take_back(self, loans: Iterable[Loan]) -> None:
        if self._lender:
            self._lender.take_back(loans)

    async def reply(self, call: pb.Call, stream: RouterStream) -> Fields:
        """The fields of a call's last outcome. Raises what the encoder raises."""
        if not self.running:
            raise Unavailable("this encoder is stopping: try again")
        if call.HasField("encode"):
            self._tell_others(stream)
            try:
                return {"encode": await self._encode(call, stream)}
            finally:
                if not self._encoder.outstanding.patches:
                    self._tell_others(stream)
        kind = call.WhichOneof("request")
        return {kind: await self._works[kind](getattr(call, kind))}

    def _tell_others(self, stream: RouterStream) -> None:
        """Sends the load to all routers but this stream's, which learns it from its answer."""
        for other in self._streams - {stream}:
            other.tell_soon()

    def load(self) -> pb.Load:
        patches, pairs = self._encoder.outstanding
        return pb.Load(outstanding_patches=patches, outstanding_pairs=pairs)

    def _ticket(self, shared: list[SharedBytes]) -> str:
        """A ticket for rows in Ray's shared memory, kept until it is exchanged or expires."""
        if not shared:
            return ""
        ticket = token_hex(16)
        TICKETS[ticket] = shared
        asyncio.get_running_loop().call_later(TICKET_SECONDS, TICKETS.pop, ticket, None)
        return ticket

    async def _encode(self, message: pb.Call, stream: RouterStream) -> Fields:
        call = from_message(message.encode, EncodeCall)

        def fields(reply: Reply) -> Fields:
            rows = SentRows(self._lender, call.borrower, stream.unsent)
            answered = reply_fields(reply, rows.put)
            loans = message_fields(stream.unsent)
            return answered | {"ticket": self._ticket(rows.shared), "loans": loans}

        def early(part: Reply) -> None:
            stream.send(pb.Outcome(id=message.id, encode=fields(part) | {"more": True}))

        reply = await self._encoder.encode(
            call.media,
            call.dtype,
            call.timeout_seconds,
            call.origin,
            call.keep,
            call.waiting_per_sent,
            early if call.early else None,
            call.borrower > 0,
        )
        return fields(reply)

    async def _check(self, _: pb.CheckRequest) -> Fields:
        await self._encoder.check_health()
        return {}

    async def _fetch(self, request: pb.FetchRequest) -> Fields:
        if (kept := await self._encoder.fetch(request.name)) is None:
            return {}
        rows = SentRows()
        return {"kept": kept_fields(kept, rows.put), "ticket": self._ticket(rows.shared)}

    async def _release(self, request: pb.ReleaseRequest) -> Fields:
        return {"released": await self._encoder.release(request.name)}


class SentRows:
    """The rows of a reply, put where its router can read them: into memory that is lent, Ray's
    shared memory, or the message."""

    def __init__(
        self, lender: Lender | None = None, borrower: int = 0, loans: list[Loan] | None = None
    ) -> None:
        """`loans`: gets those of the reply."""
        self.shared: list[SharedBytes] = []
        self.loans = [] if loans is None else loans
        self._lender = lender if borrower else None
        self._borrower = borrower

    def put(self, data: Data) -> Fields:
        """Returns the field of the message that says where the rows are."""
        if self._lender and isinstance(data, np.ndarray) and data.nbytes > INLINE_BYTES:
            if loan := self._lender.lend(data, self._borrower):
                self.loans.append(loan)
                return {"lent": len(self.loans) - 1}
            data = share(data)
        if isinstance(data, SharedBytes):
            self.shared.append(data)
            return {"shared": len(self.shared) - 1}
        if not isinstance(data, np.ndarray):
            raise TypeError(f"rows that are {type(data).__name__} in a message. This is a bug.")
        return {"data": data.tobytes()}


class RouterStream:
    """The calls of one stream. Each has a task, which queues its outcomes to be sent."""

    def __init__(self, server: ReplicaServer, calls: AsyncIterator[pb.Call], line: str) -> None:
        self.line = line
        self.lent: dict[int, Loan] = {}
        """The last loan of each slot that this stream told its router of."""
        self.unsent: list[Loan] = []
        """Loans of an outcome that is being made. Nothing is awaited until it is in `outcomes`."""
        self.outcomes: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Serialised. LOAD: the replica's load at the time of sending. None: the stream ends."""
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self._tell = False
        self._telling = False
        """LOAD is in `outcomes`, or soon will be. At most once, because the router may not read."""
        self._server = server
        self._reader = asyncio.create_task(self._read(calls))

    def end(self) -> None:
        """Ends the stream after the outcomes that are queued."""
        self.outcomes.put_nowait(None)

    def close(self) -> None:
        """Cancels all calls, because nobody waits for them any more."""
        self._reader.cancel()
        tasks, self.tasks = self.tasks, {}
        for task in tasks.values():
            task.cancel()

    def tell_soon(self) -> None:
        """Sends the replica's load after TELL_SECONDS, if the router asked for it."""
        if self._tell and not self._telling:
            self._telling = True
            loop = asyncio.get_running_loop()
            loop.call_later(TELL_SECONDS, self.outcomes.put_nowait, LOAD)

    def load(self) -> bytes:
        self._telling = False
        return serialized(pb.Outcome(load=self._server.load()))

    async def _read(self, calls: AsyncIterator[pb.Call]) -> None:
        try:
            async for call in calls:
                if call.HasField("encode"):
                    self._tell = call.encode.tell
                if not call.HasField("cancel"):
                    self.tasks[call.id] = asyncio.create_task(self._answer(call))
                elif task := self.tasks.pop(call.id, None):
                    task.cancel()
                    del task  # it keeps the call's rows
                del call  # it may be large, and the next one may take long to come
        finally:
            self.end()

    async def _answer(self, call: pb.Call) -> None:
        failure: Exception
        try:
            fields = await self._server.reply(call, self)
            self.send(pb.Outcome(id=call.id, **fields))
            self.tasks.pop(call.id, None)
            return
        except asyncio.CancelledError:
            if call.id not in self.tasks:  # the router does not wait for it
                raise
            failure = Unavailable("the encoder dropped the call")
        except Exception as error:
            if not isinstance(error, ServiceError):
                log.exception("a call from a router failed")
            failure = error
        self._server.take_back(self.unsent)
        self.unsent.clear()
        self.send(pb.Outcome(id=call.id, error=error_fields(failure)))
        self.tasks.pop(call.id, None)

    def send(self, outcome: pb.Outcome) -> None:
        """Queues an outcome. Raises TooLarge."""
        self.outcomes.put_nowait(serialized(outcome))
        self.lent.update((loan.slot, loan) for loan in self.unsent)
        self.unsent.clear()


def serialized(message: pb.Call | pb.Outcome) -> bytes:
    """Raises TooLarge if gRPC would reject the message, because that would end the stream."""
    data: bytes = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"the items or their embeddings are {len(data)} bytes, over the {MAX_MESSAGE_BYTES} of "
            "a call to a replica: send fewer or smaller ones"
        )
    return data


def take(_: object, tickets: list[str]) -> list[list[SharedBytes] | None]:
    """Exchanges tickets for their rows. None: the ticket was used before, or expired. Runs in the
    replica's process, as `actor.__ray_call__.remote(take, tickets)`."""
    return [TICKETS.pop(ticket, None) for ticket in tickets]


def make_directory() -> Path:
    """Makes a directory for a socket that only this user may enter (mode 0700). Removes those of
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
