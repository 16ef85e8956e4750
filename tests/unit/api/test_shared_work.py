"""What many ask for is done once; what could not be kept is refused before it is encoded."""

from __future__ import annotations

import asyncio

import pytest

from actors.errors import TooLarge
from actors.families.registry import read
from actors.options import ReferenceOptions
from encoder_service.api.schema import RequestOptions
from encoder_service.config import ServiceOptions
from encoder_service.ops.status import Scrape
from encoder_service.service import Service
from encoder_service.wire.documents import RequestItem
from tests.images import jpeg
from tests.unit.front_door import MODEL, Fleet, exchange, freely


class Counting(Fleet):
    """Counts the scrapes of the whole fleet, which last as long as the gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self.scrapes = 0
        self.gate = asyncio.Event()

    async def scrape(self) -> Scrape:
        self.scrapes += 1
        await self.gate.wait()
        return await super().scrape()


def test_scrapes_that_come_together_are_one() -> None:
    async def run() -> tuple[int, int]:
        fleet = Counting()
        one = Service(ServiceOptions(model=MODEL), read(MODEL), fleet)
        asked = [asyncio.create_task(one.scrape.get()) for _ in range(20)]
        while not fleet.scrapes:
            await asyncio.sleep(0)
        fleet.gate.set()
        pages = await asyncio.gather(*asked)
        assert all(page == pages[0] for page in pages)
        together = fleet.scrapes
        await one.scrape.get()
        return together, fleet.scrapes

    assert asyncio.run(run()) == (1, 2), "one for all of them, and a new one for whoever is later"


async def test_a_stream_of_more_than_can_be_kept_is_refused() -> None:
    fleet = Fleet()
    options = ServiceOptions(model=MODEL, references=ReferenceOptions(max_bytes=1000))
    one = Service(options, read(MODEL), fleet)
    items = [RequestItem("image", jpeg(64, 64), None)] * 3
    stream = one.stream(items, RequestOptions(reference=True), exchange(), freely)
    with pytest.raises(TooLarge, match=r"references\.max_bytes"):
        await anext(stream)
    assert not fleet.calls
