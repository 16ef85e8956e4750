"""The front door around a fleet in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
from opentelemetry.trace import INVALID_SPAN
from starlette.testclient import TestClient

from actors.errors import Overloaded
from actors.families.registry import read
from actors.options import ModelOptions
from actors.rows.protocol import RowsPlace
from actors.store.kept import Kept
from actors.types import Answer, Dtype, Embedding, Media, Timings
from encoder_service.api.http import build
from encoder_service.config import LimitOptions, ServiceOptions
from encoder_service.ops.exchange import Exchange
from encoder_service.ops.status import Glance, Page, Scrape
from encoder_service.service import Service
from router.replicas.serve_fleet import unknown
from tests.images import jpeg

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
JSON = {"accept": "application/json"}


class Fleet:
    """Answers with zeros, after `seconds`, or raises `error`."""

    def __init__(self, error: Exception | None = None, seconds: float = 0) -> None:
        self.error = error
        self.seconds = seconds
        self.calls: list[tuple[Dtype, float]] = []
        self.cancelled = False
        self.glances = 0
        self.full: Overloaded | None = None
        self.precision = {"e": "bf16"}

    def check_room(self) -> None:
        if self.full:
            raise self.full

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> list[Answer]:
        self.calls.append((dtype, timeout_seconds))
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self.error:
            raise self.error
        return [zeros(one) for one in media]

    async def stream(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool
    ) -> AsyncGenerator[tuple[int, Answer]]:
        for place, answer in reversed(
            list(enumerate(await self.encode(media, dtype, timeout_seconds, reference=reference)))
        ):
            yield place, answer

    async def fetch(self, reference: str) -> Kept:
        raise unknown(reference)

    async def release(self, reference: str) -> None:
        raise unknown(reference)

    async def release_all(self, references: list[str]) -> None:
        await asyncio.gather(*map(self.release, references), return_exceptions=True)

    async def place(self, reference: str) -> RowsPlace:
        raise unknown(reference)

    def precisions(self) -> dict[str, str]:
        return self.precision

    async def ready_replicas(self) -> int:
        if self.error:
            raise self.error
        return 1

    async def scrape(self) -> Scrape:
        return Scrape((Page("Encoder", "e", "# TYPE x gauge\nx 1\n"),), {"Router": 1})

    async def glance(self) -> Glance:
        self.glances += 1
        return Glance(await self.scrape(), {"e": False}, ())


def zeros(media: Media) -> Embedding:
    tokens = media.plan.tokens
    return Embedding(
        data=np.zeros(tokens * 192 * 2, np.uint8),
        dtype="bfloat16",
        shape=(tokens, 192),
        grid_thw=media.plan.grid_thw,
        source="graph",
        timings=Timings(0.001, 0.002, 0.003),
    )


def service(fleet: Fleet, **limits: Any) -> Service:
    options = ServiceOptions(model=MODEL, limits=LimitOptions(**limits))
    return Service(options, read(MODEL), fleet)


def freely(size_bytes: int) -> None:
    """A `Take` that always has room."""


def exchange() -> Exchange:
    return Exchange("r", INVALID_SPAN, "499")


def client(fleet: Fleet, **limits: Any) -> TestClient:
    return TestClient(build(service(fleet, **limits)), raise_server_exceptions=False)


def post(http: TestClient, **headers: str) -> Any:
    return http.post("/v1/encode", files={"image": jpeg(64, 64)}, headers=JSON | headers)
