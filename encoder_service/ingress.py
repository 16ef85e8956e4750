"""The front door's deployment: one Service behind FastAPI and gRPC, with a router of its own.

The only file between the API and Ray. serve_fleet.py translates what Ray raises.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from time import monotonic

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost, Unavailable
from actors.spec.model_spec import ModelSpec
from actors.store.references import Kept
from actors.store.shared_memory import here
from actors.telemetry.request_context import keep_from_log, name_requests
from actors.types import Answer, Dtype, Media
from encoder_service.api import http
from encoder_service.api.exchange import Failure
from encoder_service.api.grpc import EncoderCalls, Refused
from encoder_service.api.health import HealthCalls
from encoder_service.config import ServiceOptions
from encoder_service.llm.fleet import ChatFleet
from encoder_service.llm.service import ChatService
from encoder_service.llm.spec import LlmSpec
from encoder_service.ops.metrics import Page, Scrape
from encoder_service.ops.replicas import ask_all
from encoder_service.ops.status import Glance
from encoder_service.service import Service
from router.here import answer_here, encode_here
from router.replicas.references import unknown
from router.router import Router


@serve.ingress()
class Ingress(EncoderCalls, HealthCalls):
    """HTTP and gRPC on one class: Serve calls gRPC methods by their names."""

    def __init__(
        self,
        options: ServiceOptions,
        spec: ModelSpec,
        encoder: DeploymentHandle,
        router: DeploymentHandle,
        chat: DeploymentHandle | None = None,
        llm: LlmSpec | None = None,
    ) -> None:
        name_requests()
        keep_from_log(Refused)
        context = serve.get_replica_context()
        own = serve.get_deployment_handle(context.deployment, context.app_name)
        self.replica = context.replica_id.unique_id
        self.router = Router(
            encoder, options.router, spec.fingerprint, options.tracing, options.cache.max_bytes
        )
        scraped = [handle for handle in (encoder, router, own, chat) if handle]
        self.service = Service(options, spec, Fleet(self.router, scraped, own))
        self.chat = None
        if chat and llm and options.llm:
            admission = self.service.admission
            self.chat = ChatService(options.llm, llm, admission, ChatFleet(chat))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Asked for by Serve, once, after the constructor."""
        return http.build(self.service, self.chat)

    def scrape(self) -> tuple[str, str]:
        """This replica's id, and its own series in Prometheus' text format."""
        return self.replica, self.text()

    def text(self) -> str:
        """The same without the id. May be called from any thread."""
        return self.service.metrics.text() + self.router.metrics()

    def failures(self) -> tuple[str, str]:
        """This replica's id, and its last failures as JSON."""
        return self.replica, json.dumps([asdict(one) for one in self.service.observer.failures])


class Fleet:
    """service.Backend over a router of this process, which spares each request a hop."""

    def __init__(
        self, router: Router, scraped: list[DeploymentHandle], own: DeploymentHandle
    ) -> None:
        self.router = router
        self.scraped = scraped
        self.own = own

    def check_room(self) -> None:
        """See service.Backend."""
        self.router.check_room()

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool = False
    ) -> list[Answer]:
        """See service.Backend."""
        encode = partial(self.router.encode, keep=reference)
        return await encode_here(encode, media, dtype, timeout_seconds)

    async def stream(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool = False
    ) -> AsyncGenerator[tuple[int, Answer]]:
        """See service.Backend."""
        encode = partial(self.router.encode, keep=reference)
        deadline = monotonic() + timeout_seconds
        answers = self.router.encode_stream(media, dtype, timeout_seconds, reference)
        async with aclosing(answers):
            async for place, answer in answers:
                found = await answer_here(answer)
                if isinstance(found, EmbeddingLost):
                    left = max(0.0, deadline - monotonic())
                    (found,) = await encode_here(encode, [media[place]], dtype, left)
                yield place, found

    async def fetch(self, reference: str) -> Kept:
        """See service.Backend."""
        kept = await self.router.fetch(reference)
        try:
            return replace(kept, embedding=await here(kept.embedding))
        except EmbeddingLost:  # its replica ended just now
            raise unknown(reference) from None

    async def release(self, reference: str) -> None:
        """See service.Backend."""
        await self.router.release(reference)

    async def ready_replicas(self) -> int:
        """Encoders that may be given work. Raises Unavailable if there is none."""
        status = await self.router.status()
        if not status.ready:
            raise Unavailable("no encoder is ready yet: weights are loaded and graphs captured")
        return len(status.replicas)

    async def scrape(self) -> Scrape:
        """The series of all replicas of all deployments, as far as they answer in time."""
        names = [handle.deployment_name for handle in self.scraped]
        found = await asyncio.gather(*(ask_all(handle, "scrape") for handle in self.scraped))
        return Scrape(
            pages=tuple(
                Page(name, *page)
                for name, pages in zip(names, found, strict=True)
                for page in pages
                if page is not None
            ),
            missing={
                name: sum(page is None for page in pages)
                for name, pages in zip(names, found, strict=True)
            },
        )

    async def glance(self) -> Glance:
        """All that there is to see now."""
        scrape, status, told = await asyncio.gather(
            self.scrape(), self.router.status(), ask_all(self.own, "failures")
        )
        lists = [json.loads(one[1]) for one in told if one is not None]
        return Glance(
            scrape,
            excluded={one.replica: one.excluded for one in status.replicas},
            failures=[Failure(**fields) for each in lists for fields in each],
        )
