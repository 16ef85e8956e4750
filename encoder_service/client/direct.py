"""Gets rows from the encoders themselves instead of through the front door. The client asks for ids
and reads their rows from the replicas' own sockets (actors/rows)."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any

from actors.rows.protocol import RowsPlace
from actors.rows.reader import RowsReader
from encoder_service.client.items import ServiceError, reading
from encoder_service.client.receiving import MOST_ROWS_BYTES, uninitialised
from encoder_service.client.transports import Transport
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import WIDTHS, Document

CONNECTIONS = 4
"""Maximum connections to one replica, which accepts 128 in total and then ends idle ones."""
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
            # Evicted, or gone with their replica, before they were taken:
            lost = [place for place, item in enumerate(document["items"]) if item.get("reference")]
            if lost:
                await self._encode_again(lost, items, options, document)
        return document

    async def _encode_again(
        self,
        places: Sequence[int],
        items: Sequence[RequestItem],
        options: dict[str, Any],
        document: Document,
    ) -> None:
        """Puts items into a document again, with their rows, through the front door."""
        try:
            again = await self._transport.encode([items[place] for place in places], options)
        except ServiceError as error:
            if error.item is not None:
                error.item = places[error.item]
            raise
        for place, item in zip(places, again["items"], strict=True):
            document["items"][place] = item | {"index": place}

    @property
    def avoided(self) -> bool:
        """Whether rows come through the front door, because a replica could not be reached."""
        return monotonic() < self._avoided_until

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()

    async def _take(self, name: str, items: Sequence[Document]) -> None:
        """Gets the rows of the items that one replica keeps, and puts them into the items. Those
        that are lost keep their ids."""
        if (replica := self._replicas.get(name)) is None:
            # Replicas that are gone give out no ids, so only this closes their connections.
            self._replicas = {key: one for key, one in self._replicas.items() if one.connected}
            replica = self._replicas[name] = ReplicaRows()
        async with replica.turn():
            try:
                if not self.avoided:  # by now
                    await replica.take(self._transport, items)
            except (ConnectionError, ServiceError):
                self._avoided_until = monotonic() + AVOIDED_SECONDS
                replica.close()
        turns = asyncio.Semaphore(FETCHES_AT_ONCE)
        left = (item for item in items if "reference" in item)
        await all_of(self._fetch(item, turns) for item in left)

    async def _fetch(self, item: Document, turns: asyncio.Semaphore) -> None:
        """Gets the rows of an item through the front door, and releases its id, unless they are
        lost."""
        reference = item["reference"]
        async with turns:
            try:
                document = await self._transport.fetch(reference)
            except ServiceError as error:
                if error.type == "not_found":
                    return
                raise
            with suppress(ServiceError):  # it expires anyway
                await self._transport.release(reference)
        del item["reference"]
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
            self._place = RowsPlace.read(await transport.place(reference))
        found = await asyncio.to_thread(RowsReader.connect, self._place)
        if found is None:
            raise ConnectionError("the replica cannot be reached")
        return found

    async def take(self, transport: Transport, items: Sequence[Document]) -> None:
        """Replaces the ids of items by their rows, unless the replica refuses them. Raises
        ConnectionError, ServiceError."""
        for last in (False, True):  # the replica may just have ended an idle connection
            left = [item for item in items if "reference" in item]
            reader = await self.reader(transport, left[0]["reference"])
            try:
                await asyncio.to_thread(take_all, reader, left)
            except BaseException as error:  # also if cancelled: the thread may still be reading
                reader.close()
                if last or not isinstance(error.__cause__, ConnectionError):  # it hangs
                    raise
            else:
                self._idle.append(reader)
                return

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
    """Gets the rows of items from one replica. Items that it refuses keep their ids, because the
    front door may still have them."""
    rows = [uninitialised(None, rows_bytes(item)) for item in items]
    names = [item["reference"].partition(".")[2] for item in items]
    targets = [memoryview(one) for one in rows]
    refused = reader.take(list(zip(names, targets, strict=True)))
    for refusal, item, data in zip(refused, items, rows, strict=True):
        if refusal is None:
            del item["reference"]
            item["data"] = data


def rows_bytes(item: Document) -> int:
    size_bytes: int = math.prod(item["shape"]) * WIDTHS[item["dtype"]]
    if not 0 <= size_bytes <= MOST_ROWS_BYTES:
        raise ValueError(f"rows of {size_bytes} bytes")
    return size_bytes
