"""Tells readers where the rows of an id are, or sends their bytes: see protocol.py.

The id is the capability: whoever has it may hold and read its rows, and nothing else. There is a
thread per connection, because sending megabytes would block an event loop.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from threading import Condition, Thread
from time import sleep
from typing import Any, Protocol

from actors.errors import ServiceError
from actors.rows.protocol import (
    FREE,
    HOLD,
    HOLD_SECONDS,
    NAME_BYTES,
    PING,
    READ,
    REQUEST_BYTES,
    TAKE,
    VERSION,
    HeldRows,
    RowsPlace,
    answer,
    limited,
    send,
)

log = logging.getLogger("ray.serve")

MOST_CONNECTIONS = 128
STRANGER_SECONDS = 5.0
"""Time limit for a request on a TCP connection that has not named a kept id yet."""
SEND_SECONDS = 5.0  # without any progress
PORTS = 16  # tried from `references.port` on; each replica of a node uses one
UNKNOWN = "no embedding is kept under this id: it expired, was released or evicted"


class RowStore(Protocol):
    """The kept rows. Methods are called from the server's threads, and may raise ServiceError."""

    def hold(self, name: str) -> HeldRows | None:
        """Keeps the rows of a name in place until one `free` per hold. None: unknown."""

    def free(self, name: str) -> None: ...

    def rows(self, name: str) -> memoryview:
        """The bytes of held rows."""

    def take(self, name: str) -> memoryview | None:
        """The bytes under a whole name, which is held until `free`. None: unknown."""

    def release(self, name: str) -> None:
        """Drops what is kept under a whole name, once nobody holds it."""


class RowsConnection:
    """One reader."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.local = channel.family == socket.AF_UNIX
        self.known = self.local  # a process of this user, or one that has named a kept id
        self.held: Counter[str] = Counter()
        limited(channel, HOLD_SECONDS if self.known else STRANGER_SECONDS, SEND_SECONDS)

    def request(self) -> tuple[bytes, str] | None:
        """Verb and name of the next request. None: the connection ended, is too slow, or speaks
        another protocol."""
        found = self.channel.recv(REQUEST_BYTES, socket.MSG_WAITALL)
        if len(found) < REQUEST_BYTES or found[0] != VERSION:
            return None
        verb, name = found[1:2], found[2:]
        if verb == TAKE:
            name += b"." + self.channel.recv(NAME_BYTES, socket.MSG_WAITALL)
        return verb, name.decode("ascii")

    def holds(self, name: str) -> None:
        self.held[name] += 1
        if not self.known:
            self.known = True
            limited(self.channel, HOLD_SECONDS, SEND_SECONDS)

    def end(self) -> None:
        """Wakes its thread, which closes it."""
        with suppress(OSError):  # it has ended
            self.channel.shutdown(socket.SHUT_RDWR)


class RowsServer:
    """Serves one replica's rows."""

    def __init__(self, store: RowStore) -> None:
        self._store = store
        self._listeners: list[socket.socket] = []
        self._connections: OrderedDict[RowsConnection, None] = OrderedDict()  # used last at the end
        self._changed = Condition()
        self._running = False

    def start(self, path: Path, host: str, port: int = 0) -> RowsPlace:
        """Listens on a unix socket, which the caller's directory protects, and on TCP.

        `port`: the first of PORTS that are tried. 0: the system chooses. If none is free, it does
        not listen on TCP.
        """
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(path))
        self._listeners = [unix]
        tcp = ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for tried in range(port, port + PORTS) if port else (0,):
            try:
                listener = socket.create_server((host, tried), family=family)
            except OSError as error:
                log.warning("rows cannot be served on %s, port %d: %s", host, tried, error)
                continue
            self._listeners.append(listener)
            shown = f"[{host}]" if ":" in host else host
            tcp = f"{shown}:{listener.getsockname()[1]}"
            break
        self._running = True
        for listener in self._listeners:
            listener.listen()
            Thread(target=self._accept, args=(listener,), name="rows", daemon=True).start()
        return RowsPlace(str(path), tcp)

    def stop(self, grace_seconds: float = 0) -> None:
        """Accepts no more connections, and ends all others once none of them holds rows, at the
        latest after `grace_seconds`."""
        self._running = False
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
            listener.close()
        with self._changed:
            self._changed.wait_for(
                lambda: not any(one.held for one in self._connections), grace_seconds
            )
            for one in self._connections:
                one.end()
            self._changed.wait_for(lambda: not self._connections, SEND_SECONDS)

    def _accept(self, listener: socket.socket) -> None:
        while self._running:
            try:
                channel, _ = listener.accept()
            except OSError:
                sleep(0.05)  # it was closed, or no more files can be opened
                continue
            connection = RowsConnection(channel)
            thread = Thread(target=self._serve, args=(connection,), name="rows", daemon=True)
            try:
                if self._take(connection):
                    thread.start()
                    continue
            except RuntimeError as error:  # no more threads can be started
                log.warning("a reader of rows could not be served: %s", error)
            self._close(connection)

    def _take(self, connection: RowsConnection) -> bool:
        """Adds a connection if there is room. If not, one that has named no id is ended to make
        room, or else the least recently used one that holds nothing. False: there is none."""
        with self._changed:
            if not self._running:
                return False
            if len(self._connections) >= MOST_CONNECTIONS:
                strangers = [one for one in self._connections if not one.known]
                idle = (one for one in self._connections if not one.held)
                if (gone := next(chain(strangers, idle), None)) is None:
                    return False
                del self._connections[gone]
                gone.end()
            self._connections[connection] = None
            return True

    def _serve(self, connection: RowsConnection) -> None:
        try:
            while request := connection.request():
                self._answer(connection, *request)
        except (OSError, ValueError):  # it is gone, too slow, or speaks another protocol
            pass
        except Exception:
            log.exception("a reader of rows could not be answered")
        finally:
            self._close(connection)

    def _close(self, connection: RowsConnection) -> None:
        connection.channel.close()
        for name in connection.held.elements():
            self._store.free(name)
        connection.held.clear()
        with self._changed:
            self._connections.pop(connection, None)
            self._changed.notify_all()

    def _answer(self, connection: RowsConnection, verb: bytes, name: str) -> None:
        with self._changed:
            if connection in self._connections:
                self._connections.move_to_end(connection)
        fields: dict[str, Any] = {}
        rows: memoryview | None = None
        try:
            if verb == HOLD:
                fields = self._held(connection, name)
            elif verb == TAKE:
                fields = {"error": UNKNOWN}
                if (rows := self._store.take(name)) is not None:
                    connection.holds(name)
            elif verb == READ and name in connection.held:
                rows = self._store.rows(name)
            elif verb == FREE and name in connection.held:
                self._free(connection, name)
            elif verb != PING:
                fields = {"error": "this connection does not hold that id"}
        except ServiceError as error:
            fields = {"error": error.message}
        if rows is None:
            send(connection.channel, memoryview(answer(fields)))
        else:
            send(connection.channel, memoryview(answer({"size_bytes": len(rows)})))
            send(connection.channel, rows)
            if verb == TAKE:
                self._store.release(name)
                self._free(connection, name)
        with self._changed:  # after the answer, because `stop` ends connections that hold nothing
            self._changed.notify_all()

    def _held(self, connection: RowsConnection, name: str) -> dict[str, Any]:
        found = self._store.hold(name)
        if found is None:
            return {"error": UNKNOWN}
        connection.holds(name)
        # A process that opens the memory sees all of it, so only those of this user get the handle.
        return asdict(found if connection.local else replace(found, memory=None))

    def _free(self, connection: RowsConnection, name: str) -> None:
        connection.held[name] -= 1
        if not connection.held[name]:
            del connection.held[name]
        self._store.free(name)
