"""Rows from the encoders themselves instead of through the front door: a client asks for ids, and
takes what they stand for from the replicas' own sockets (actors/rows)."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Sequence
from time import monotonic
from typing import Any

from actors.rows.protocol import RowsPlace
from actors.rows.reader import RowsReader, RowsRefused
from encoder_service.client.items import ServiceError
from encoder_service.client.receiving import uninitialised
from encoder_service.client.transports import Transport
from encoder_service.wire.documents import RequestItem
from encoder_service.wire.formats import WIDTHS, Document

CONNECTIONS = 4
"""To one replica, which takes 128 in all."""
AVOIDED_SECONDS = 60.0
"""How long rows come through the front door once a replica could not be reached."""
FETCHES_AT_ONCE = 4


class DirectRows:
    """`encode` of a transport, whose rows come from the encoders."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._replicas: dict[str, ReplicaRows] = {}
        self._avoided_until = 0.0

    async def encode(self, items: list[RequestItem], options: dict[str, Any]) -> Document:
        """The same document as the transport's. Raises ServiceError."""
        # Scales of float8 do not travel with rows.
        by_id = options.get("reference") or options.get("dtype") == "float8_e4m3"
        if by_id or self.avoided:
            return await self._transport.encode(items, options)
        document = await self._transport.encode(items, options | {"reference": True})
        kept = defaultdict[str, list[Document]](list)
        for item in document["items"]:
            if reference := item.get("reference"):
                kept[reference.partition(".")[0]].append(item)
        await asyncio.gather(*(self._take(replica, found) for replica, found in kept.items()))
        return document

    @property
    def avoided(self) -> bool:
        """Whether rows come through the front door, because a replica could not be reached."""
        return monotonic() < self._avoided_until

    def close(self) -> None:
        for replica in self._replicas.values():
            replica.close()

    async def _take(self, name: str, items: Sequence[Document]) -> None:
        """Puts the rows of one replica's items into them."""
        replica = self._replicas.setdefault(name, ReplicaRows())
        async with replica.turns:
            try:
                reader = await replica.reader(self._transport, items[0]["reference"])
                await replica.take(reader, items)
            except (ConnectionError, RowsRefused, ServiceError):
                self._avoided_until = monotonic() + AVOIDED_SECONDS
                self._replicas.pop(name, None)
                replica.close()
        turns = asyncio.Semaphore(FETCHES_AT_ONCE)
        left = (item for item in items if "reference" in item)
        await asyncio.gather(*(self._fetch(item, turns) for item in left))

    async def _fetch(self, item: Document, turns: asyncio.Semaphore) -> None:
        """Puts the rows of an item into it, through the front door."""
        reference = item.pop("reference")
        try:
            async with turns:
                document = await self._transport.fetch(reference)
        except ServiceError as error:
            if error.type != "not_found":
                raise
            message = f"the embedding was lost before its rows were here: {error.message}"
            raise ServiceError("unavailable", message, retryable=True) from error
        item["data"] = document["items"][0]["data"]


class ReplicaRows:
    """The connections to one replica."""

    def __init__(self) -> None:
        self.turns = asyncio.Semaphore(CONNECTIONS)
        self._idle: list[RowsReader] = []
        self._place: RowsPlace | None = None

    async def reader(self, transport: Transport, reference: str) -> RowsReader:
        """An idle connection, or a new one. Raises ConnectionError, ServiceError."""
        while self._idle:
            if (reader := self._idle.pop()).alive:
                return reader
        if self._place is None:
            self._place = RowsPlace(**await transport.place(reference))
        found = await asyncio.to_thread(RowsReader.connect, self._place)
        if found is None:
            raise ConnectionError("the replica cannot be reached")
        return found

    async def take(self, reader: RowsReader, items: Sequence[Document]) -> None:
        """Puts the rows of items into them, in place of their ids. Raises as the reader does."""
        try:
            await asyncio.to_thread(take_all, reader, items)
        except BaseException:  # also a cancelled wait: its thread may still be reading
            reader.close()
            raise
        self._idle.append(reader)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def take_all(reader: RowsReader, items: Sequence[Document]) -> None:
    for item in items:
        size_bytes = math.prod(item["shape"]) * WIDTHS[item["dtype"]]
        data = uninitialised(None, size_bytes)
        reader.take(item["reference"].partition(".")[2], memoryview(data))
        del item["reference"]
        item["data"] = data
