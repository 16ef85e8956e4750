"""The front door's deployment: HTTP and gRPC around one Service, and a Router in the process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from functools import partial
from time import monotonic
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from actors.errors import EmbeddingLost, Overloaded, Unavailable
from actors.options import refused, updated
from actors.spec.model_spec import ModelSpec
from actors.store.kept import Kept
from actors.store.shared_memory import here
from actors.telemetry.tracing import name_requests
from actors.types import Answer, Dtype, Media
from encoder_service.api import grpc, http
from encoder_service.api.errors import AtItem
from encoder_service.config import LIVE, ServiceOptions, fit
from encoder_service.llm import embeddings
from encoder_service.llm import http as chat_http
from encoder_service.llm.calls import ChatCall, ChatEvent, ChatFailed
from encoder_service.llm.http import ChatService, ReplicaLost
from encoder_service.llm.spec import LlmSpec
from encoder_service.ops.exchange import Failure
from encoder_service.ops.status import Glance, Page, Scrape
from encoder_service.service import Service
from router.here import answer_here, encode_here
from router.replicas.pinned import ask_all
from router.replicas.serve_fleet import LOST, brief
from router.router import Router


@serve.ingress()
class Ingress:
    """HTTP through Serve's proxy, and gRPC on its own port because Serve's proxies copy rows."""

    def __init__(
        self,
        options: ServiceOptions,
        spec: ModelSpec,
        encoders: list[DeploymentHandle],
        router: DeploymentHandle,
        chat: DeploymentHandle | None = None,
        llm: LlmSpec | None = None,
    ) -> None:
        name_requests()
        context = serve.get_replica_context()
        own = serve.get_deployment_handle(context.deployment, context.app_name)
        self.replica = context.replica_id.unique_id
        self.owner = f"{ray.get_runtime_context().gcs_address} {context.app_name}"
        self.router = Router(
            encoders,
            options.router,
            spec.fingerprint,
            options.tracing,
            options.cache.max_bytes,
            borrows=True,
        )
        # `options` connects a handle now. Later, with the head node down, that would block.
        asked = [handle.options() for handle in encoders]
        others = [handle.options() for handle in (router, own, chat) if handle]
        self.options = options
        self.spec = spec
        self.running = False
        self.service = Service(options, spec, RouterBackend(self.router, asked, others, own))
        self.chat = None
        if chat and llm and options.llm:
            self.chat = ChatService(options.llm, llm, self.service.admission, ChatFleet(chat))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, after the constructor."""
        app = http.build(self.service, self.lifespan if self.options.ingress.grpc_port else None)
        embeddings.add(app, self.service)
        if self.chat:
            chat_http.add(app, self.service, self.chat)
        return app

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Serves gRPC while the application runs."""
        async with grpc.serving(self.service, self.options.ingress, self.owner):
            yield

    async def reconfigure(self, user_config: Any) -> None:
        """Serve calls this with the deployment's `user_config`, at start and when it changes."""
        with refused(running=self.running):
            options = updated(self.options, user_config, LIVE["Ingress"])
            fit(options, self.spec)
            self.service.configure(options)
            self.router.configure(options.router)

    async def check_health(self) -> None:
        """Serve calls this once the replica has started, and then periodically."""
        self.running = True

    def scrape(self) -> tuple[str, str]:
        """This replica's id, and its own series in Prometheus text format."""
        return self.replica, self.service.metrics.text() + self.router.metrics()

    def failures(self) -> tuple[str, str]:
        return self.replica, json.dumps([asdict(one) for one in self.service.observer.failures])


class RouterBackend:
    """A service.Backend over a router in this process, which saves a hop per request."""

    def __init__(
        self,
        router: Router,
        encoders: list[DeploymentHandle],
        others: list[DeploymentHandle],
        own: DeploymentHandle,
    ) -> None:
        self.router = router
        self.encoders = encoders
        self.scraped = [*encoders, *others]
        self.own = own
        self.check_room = router.check_room
        self.release = router.release
        self.release_all = router.release_all
        self.place = router.place
        self.precisions = router.precisions

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool = False
    ) -> list[Answer]:
        encode = partial(self.router.encode, keep=reference)
        return await encode_here(encode, media, dtype, timeout_seconds)

    async def stream(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, *, reference: bool = False
    ) -> AsyncGenerator[tuple[int, Answer]]:
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
        kept = await self.router.fetch(reference)
        return replace(kept, embedding=await here(kept.embedding))

    async def ready_replicas(self) -> int:
        status = await self.router.status()
        if not status.replicas:
            raise Unavailable(
                "no encoder is ready yet: encoders are loading weights and capturing graphs, or "
                "they fail to start (see `RAY_AUTH_MODE=token serve status`)"
            )
        return len(status.replicas)

    async def scrape(self) -> Scrape:
        found = await asyncio.gather(*(ask_all(handle, "scrape") for handle in self.scraped))
        pages: list[Page] = []
        missing: dict[str, int] = {}
        for handle, results in zip(self.scraped, found, strict=True):
            name = handle.deployment_name
            pages += [Page(name, *one) for one in results if one is not None]
            missing[name] = results.count(None)
        return Scrape(tuple(pages), missing, self.router.pools())

    async def glance(self) -> Glance:
        scrape, status, told, counted = await asyncio.gather(
            self.scrape(),
            self.router.status(),
            ask_all(self.own, "failures"),
            asyncio.gather(*(ask_all(handle, "item_tokens") for handle in self.encoders)),
        )
        lists = [json.loads(one[1]) for one in told if one is not None]
        counts = [json.loads(one[1]) for each in counted for one in each if one is not None]
        return Glance(
            scrape,
            excluded={one.replica: one.excluded for one in status.replicas},
            failures=[Failure(**fields) for each in lists for fields in each],
            item_tokens=counts,
            precisions=self.router.precisions(),
        )


class ChatFleet:
    """An llm.http.ChatBackend over a Serve handle, which picks the least busy replica."""

    def __init__(self, chat: DeploymentHandle) -> None:
        self.handle = chat
        self.calls = chat.options(method_name="complete", stream=True)

    async def complete(self, call: ChatCall) -> AsyncGenerator[ChatEvent]:
        response = self.calls.remote(call)
        try:
            async for event in response:
                if isinstance(event, ChatFailed):
                    raise event.error if event.item is None else AtItem(event.item, event.error)
                yield event
        except BackPressureError:
            raise Overloaded(
                "every replica of the language model is busy and the queue is full "
                "(llm.max_queued_requests): try again later"
            ) from None
        except (*LOST, RayTaskError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, LOST):
                raise
            raise ReplicaLost(
                f"a replica of the language model was lost ({brief(cause)}): send the request again"
            ) from error
        except (asyncio.CancelledError, GeneratorExit):
            response.cancel()
            raise

    async def ready_replicas(self) -> int:
        return sum(page is not None for page in await ask_all(self.handle, "scrape"))
