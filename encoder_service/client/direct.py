"""Gets rows from the encoders themselves instead of through the front door. The client asks for ids
and reads their rows from the replicas' own sockets (actors/rows)."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import fields
from time import monotonic
from typing import Any

from actors.rows.protocol import RowsPlace
from actors.rows.reader import RowsReader, RowsRefused
from encoder_service.client.items import ServiceError, reading
from encoder_service.client.receiving import MOST_ROWS_BYTES, uninitialised
from encoder_service.client.transports import Transport
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import WIDTHS, Document

CONNECTIONS = 4
"""Maximum connections to one replica, which accepts 128 in total."""
AVOIDED_SECONDS = 60.0
"""How long rows come through the front door after a replica could not be reached."""
FETCHES_AT_ONCE = 4


class DirectRows:
    """The `encode` of a transport, with rows that come directly from the encoders."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._replicas: dict[str, ReplicaRows] = {}
        self._avoided_until = 0.0

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        """The same document as the transport's. Raises ServiceError."""
        # The encoders' sockets send rows without the scales of float8.
        by_id = options.get("reference") or options.get("dtype") == "float8_e4m3"
        if by_id or self.avoided:
            return await self._transport.encode(items, options)
        try:
            document = await self._transport.encode(items, options | {"reference": True})
        except ServiceError as error:
            if error.type != "too_large":
                raise
            # Perhaps only too large to keep: references.max_bytes is not limits.max_response_bytes.
            return await self._transport.encode(items, options)
        with reading():
            kept = defaultdict[str, list[Document]](list)
            for item in document["items"]:
                if reference := item.get("reference"):
                    kept[reference.partition(".")[0]].append(item)
            await all_of(self._take(replica, found) for replica, found in kept.items())
        return document

    @property
    def avoided(self) -> bool:
        """Whether rows come through the front door, because a replica could not be reached."""
        return monotonic() < self._avoided_until

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()

    async def _take(self, name: str, items: Sequence[Document]) -> None:
        """Gets the rows of the items that one replica keeps, and puts them into the items."""
        if (replica := self._replicas.get(name)) is None:
            # Replicas that are gone give out no ids, so only this closes their connections.
            self._replicas = {key: one for key, one in self._replicas.items() if one.connected}
            replica = self._replicas[name] = ReplicaRows()
        async with replica.turn():
            try:
                reader = await replica.reader(self._transport, items[0]["reference"])
                await replica.take(reader, items)
            except (ConnectionError, RowsRefused, ServiceError):
                self._avoided_until = monotonic() + AVOIDED_SECONDS
                replica.close()
        turns = asyncio.Semaphore(FETCHES_AT_ONCE)
        left = (item for item in items if "reference" in item)
        await all_of(self._fetch(item, turns) for item in left)

    async def _fetch(self, item: Document, turns: asyncio.Semaphore) -> None:
        """Gets the rows of an item through the front door, and releases its id."""
        reference = item.pop("reference")
        try:
            async with turns:
                document = await self._transport.fetch(reference)
                with suppress(ServiceError):  # it expires anyway
                    await self._transport.release(reference)
        except ServiceError as error:
            if error.type != "not_found":
                raise
            message = f"the embedding was lost before its rows were received: {error.message}"
            raise ServiceError("unavailable", message, retryable=True) from error
        item["data"] = document["items"][0]["data"]


class ReplicaRows:
    """The connections to one replica."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(CONNECTIONS)
        self._calls = 0
        self._idle: list[RowsReader] = []
        self._place: RowsPlace | None = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for one of the CONNECTIONS."""
        self._calls += 1
        try:
            async with self._turns:
                yield
        finally:
            self._calls -= 1

    @property
    def connected(self) -> bool:
        """Whether a call is under way or a connection is open. Closes those that were lost."""
        self._idle = [reader for reader in self._idle if reader.alive]
        return bool(self._idle) or self._calls > 0

    async def reader(self, transport: Transport, reference: str) -> RowsReader:
        """An idle connection, or a new one. Raises ConnectionError, ServiceError."""
        while self._idle:
            if (reader := self._idle.pop()).alive:
                return reader
        if self._place is None:
            place = await transport.place(reference)
            # A newer service may send more fields.
            self._place = RowsPlace(**{one.name: place[one.name] for one in fields(RowsPlace)})
        found = await asyncio.to_thread(RowsReader.connect, self._place)
        if found is None:
            raise ConnectionError("the replica cannot be reached")
        return found

    async def take(self, reader: RowsReader, items: Sequence[Document]) -> None:
        """Replaces the ids of items by their rows. Raises as the reader does."""
        try:
            await asyncio.to_thread(take_all, reader, items)
        except BaseException:  # also if cancelled, because the thread may still be reading
            reader.close()
            raise
        self._idle.append(reader)

    def close(self) -> None:
        """Closes idle connections. The next one asks for the replica's place again."""
        self._place = None
        while self._idle:
            self._idle.pop().close()


async def all_of(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs all calls. If one fails, cancels the others, because the next attempt makes its own."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def take_all(reader: RowsReader, items: Sequence[Document]) -> None:
    for item in items:
        size_bytes = math.prod(item["shape"]) * WIDTHS[item["dtype"]]
        if not 0 <= size_bytes <= MOST_ROWS_BYTES:
            raise ValueError(f"rows of {size_bytes} bytes")
        data = uninitialised(None, size_bytes)
        reader.take(item["reference"].partition(".")[2], memoryview(data))
        del item["reference"]
        item["data"] = data
