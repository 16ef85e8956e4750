"""The client of a RowsServer."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

from actors.rows.protocol import (
    FREE,
    HOLD,
    NAME_BYTES,
    NO_NAME,
    PING,
    READ,
    TAKE,
    VERSION,
    HeldRows,
    RowsPlace,
    limited,
    receive_answer,
    receive_into,
    send,
)

CONNECT_SECONDS = 2.0
CALL_SECONDS = 10.0


class RowsRefused(Exception):
    """The replica did not give an embedding, for the reason in the message."""


class RowsReader:
    """A connection to one replica. Thread-safe: one call is made at a time.

    Calls raise RowsRefused, or ConnectionError once the connection is lost, which ends its holds.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.path = "unix" if channel.family == socket.AF_UNIX else "tcp"
        self._channel = channel
        self._closed = False
        self._lock = Lock()
        limited(channel, CALL_SECONDS, CALL_SECONDS)

    @classmethod
    def connect(cls, place: RowsPlace) -> RowsReader | None:
        """Connects over the unix socket if that can be reached, otherwise over TCP. None: neither
        works."""
        if place.version != VERSION:
            return None
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.settimeout(CONNECT_SECONDS)
            channel.connect(place.unix)
            if owner(channel) == os.getuid():
                return cls(channel)
        except OSError:  # another machine, container or user
            pass
        channel.close()
        host, _, port = place.tcp.rpartition(":")
        try:
            return cls(socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS))
        except (OSError, ValueError):
            return None

    @property
    def alive(self) -> bool:
        """False once the connection is lost. Makes a system call, which finds out at once that the
        replica was killed."""
        if self._closed or not self._lock.acquire(blocking=False):
            return not self._closed  # a call in progress will find out
        try:
            ended = self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            ended = False
        except OSError:
            ended = True
        finally:
            self._lock.release()
        if ended:
            self.close()
        return not ended

    def hold(self, name: str) -> HeldRows:
        """Holds the rows of a name until `free` or the end of this connection."""
        try:
            return HeldRows.read(self._call(HOLD, name))
        except (TypeError, KeyError, ValueError) as error:
            raise self._lost(error) from error

    def read(self, name: str, target: memoryview) -> None:
        """Receives the bytes of held rows. `target` must be of their size."""
        self._call(READ, name, target)

    def take(self, wanted: Sequence[tuple[str, memoryview]]) -> Iterator[RowsRefused | None]:
        """Receives the rows of whole names, both halves of them, into targets, and releases them.
        Yields why each was refused, once its answer has arrived, so that what arrived before the
        connection was lost can be kept. A target of another size ends the connection."""
        for answer in self._calls(TAKE, wanted):
            yield answer if isinstance(answer, RowsRefused) else None

    def free(self, name: str) -> None:
        self._call(FREE, name)

    def ping(self) -> None:
        """Keeps the connection alive. Must be called more often than every HOLD_SECONDS."""
        self._call(PING, NO_NAME)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)  # wakes a call in another thread
        self._channel.close()

    def _call(self, verb: bytes, name: str, target: memoryview | None = None) -> dict[str, Any]:
        (answer,) = self._calls(verb, [(name, target)])
        if isinstance(answer, RowsRefused):
            raise answer
        return answer

    def _calls(
        self, verb: bytes, calls: Sequence[tuple[str, memoryview | None]]
    ) -> Iterator[dict[str, Any] | RowsRefused]:
        """Sends requests together, and then yields their answers. Not taking all of them ends the
        connection."""
        halves = 2 if verb == TAKE else 1
        right = [is_name(name, halves) for name, _ in calls]
        names = (name for (name, _), sent in zip(calls, right, strict=True) if sent)
        begin = bytes([VERSION]) + verb
        requests = b"".join(begin + name.replace(".", "").encode() for name in names)
        with self._lock:
            if self._closed:
                raise ConnectionError("the connection to the replica was lost")
            try:
                # In one system call, because the replica may not read before its answer is read.
                # Sockets hold the requests of 1000 items, the most that limits.max_items may be.
                send(self._channel, memoryview(requests))
                for (_, target), sent in zip(calls, right, strict=True):
                    yield self._answer(target) if sent else RowsRefused("this is not an id")
            except (OSError, ValueError) as error:
                raise self._lost(error) from error
            except BaseException:  # the next call would receive what is left of the answers
                self.close()
                raise

    def _answer(self, target: memoryview | None) -> dict[str, Any] | RowsRefused:
        fields = receive_answer(self._channel)
        if "error" in fields:
            return RowsRefused(str(fields["error"]))
        if target is not None:
            if fields.get("size_bytes") != len(target):
                raise ValueError(f"{fields} in place of {len(target)} bytes")
            receive_into(self._channel, target)
        return fields

    def _lost(self, error: Exception) -> ConnectionError:
        self.close()
        return ConnectionError(f"the connection to the replica was lost: {error}")


def is_name(name: str, halves: int) -> bool:
    found = name.split(".")
    return name.isascii() and len(found) == halves and {len(half) for half in found} == {NAME_BYTES}


def owner(channel: socket.socket) -> int:
    """The user of the process that listens on a unix socket. It is checked, because anybody can
    recreate a replica's folder in /tmp once the replica is gone."""
    found = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", found)[1]
    return uid
