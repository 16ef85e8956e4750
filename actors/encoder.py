"""The encoder actor, a Serve deployment: load -> capture -> warm -> ready -> drain -> stop.

One replica owns one device. Ray keeps it out of the way of requests until `__init__` returns, which
is after the last graph is captured. Answers are values: one bad item fails only itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import ray
from ray import serve
from torch import Tensor

from actors.autoscaling import OUTSTANDING_PATCHES
from actors.errors import (
    DeadlineExceeded,
    EmbeddingLost,
    EncodeFailed,
    ServiceError,
    TooLarge,
    Unavailable,
)
from actors.options import ActorOptions
from actors.pipeline import Made, Stages, Work
from actors.rpc.server import ReplicaServer
from actors.spec.evs import retained_tokens
from actors.startup import open_beside, open_decoding, open_engine
from actors.store.cache import EmbeddingCache, Entry
from actors.store.entries import all_converted
from actors.store.nixl import DeviceMemory
from actors.store.references import Kept, References, reference_id
from actors.store.sharing import Sharing, written
from actors.telemetry.logs import name_requests
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.ray_metrics import start_mirror
from actors.telemetry.request_context import NOBODY, ORIGIN, Origin
from actors.telemetry.tracing import open_spans
from actors.types import (
    Answer,
    Bytes,
    Dtype,
    Embedding,
    Media,
    Reply,
    Source,
    Timings,
)

log = logging.getLogger("ray.serve")

NOTHING: Bytes = np.empty(0, np.uint8)

Outcome = Embedding | Exception | None
"""Of an item; None: its time was over."""


class Encoder:
    """Encodes items; the router says which."""

    def __init__(self, options: ActorOptions) -> None:
        name_requests()
        self.options = options
        self.spans = open_spans(options.tracing, "encoder")
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.series = EncoderMetrics()
        beside = open_beside(options, self.series)
        self.engine = open_engine(options, self.series)
        self.tower = self.engine.tower
        spec = self.tower.spec
        self.cache = EmbeddingCache(options.cache.max_bytes, self.series)
        self.references = References(options.references, self.series)
        memory = None
        if options.encoder.transport == "nixl":
            size = options.encoder.nixl_bytes
            memory = DeviceMemory(size, self.engine.device.device, self.series)
        self.sharing = Sharing(spec, self.cache, memory, self.references.largest_bytes)
        decoding = open_decoding(options, self.engine, self.series, beside)
        self.stages = Stages(self.engine, decoding, self.series)
        self.outstanding_patches = 0
        self.rpc = ReplicaServer(self)
        start_mirror(options.metrics, self.series.text)
        backend = self.engine.device.backend
        log.info("encoder %s is ready: %s on %s", self.replica, spec.id, backend)

    async def encode(
        self,
        media: list[Media],
        dtype: Dtype,
        timeout_seconds: float,
        origin: Origin = NOBODY,
        keep: bool = False,
    ) -> Reply:
        """An embedding or an error for each item. Cancelling drops what has not begun.

        `keep`: embeddings are kept for a while, `reference` is the id of each. Raises Unavailable
        once it is stopped.
        """
        ORIGIN.set(origin)
        patches = sum(item.plan.patches for item in media)
        self.outstanding_patches += patches
        try:
            with self.spans.span(
                "shard", "server", replica=self.replica, items=len(media), patches=patches
            ):
                share = self.sharing.share_behind if keep else self.sharing.share
                answers = await self._answers(media, dtype, timeout_seconds, share)
                if keep:
                    answers = list(map(self._kept, media, answers))
        finally:
            self.outstanding_patches -= patches
        return Reply(answers, self.outstanding_patches)

    async def _answers(
        self,
        media: Sequence[Media],
        dtype: Dtype,
        timeout_seconds: float,
        share: Callable[[Dtype, Sequence[tuple[Media, Tensor]]], Sequence[Entry]],
    ) -> list[Answer]:
        """Cache? Otherwise through the stages. What each item comes to, in order."""
        cached = [
            self.cache.get(self.sharing.key(one), retained_tokens(one.plan, one.evs_rate))
            for one in media
        ]
        missing = [
            replace(one, on_device=self.sharing.stays(one, dtype))
            for one, entry in zip(media, cached, strict=True)
            if entry is None
        ]
        call = self.stages.begin(missing, partial(share, dtype))
        # Together, so that what was begun is given up if this is cancelled meanwhile.
        hits, _ = await asyncio.gather(all_converted(cached, dtype), call.wait(timeout_seconds))
        works, answers = iter(call.works), []
        for one, hit in zip(media, hits, strict=True):
            if isinstance(hit, Entry):
                outcome: Outcome = self._embedding(one, hit, "cache", Timings(0.0, 0.0, 0.0))
            else:
                outcome = hit or self._made(next(works))
            answers.append(self._answer(one, outcome, timeout_seconds))
        return answers

    def _made(self, work: Work) -> Outcome:
        """What the stages made of an item."""
        made, plan = work.outcome, work.media.plan
        if not isinstance(made, Made):
            return made
        now = monotonic()
        self.spans.past(
            "preprocess",
            work.preprocess_seconds,
            ago_seconds=now - work.decoded,
            patches=plan.patches,
        )
        self.spans.past(
            "replay",
            made.encode_seconds,
            ago_seconds=now - work.landed,
            source=made.source,
            patches=plan.patches,
            tokens=plan.tokens,
            queue_seconds=made.queue_seconds,
        )
        waited = work.queue_seconds + made.queue_seconds
        timings = Timings(waited, work.preprocess_seconds, made.encode_seconds)
        return self._embedding(work.media, made.entry, made.source, timings)

    def _embedding(self, media: Media, entry: Entry, source: Source, timings: Timings) -> Embedding:
        return Embedding(
            data=entry.data,
            dtype=entry.dtype,
            shape=entry.shape,
            grid_thw=media.plan.grid_thw,
            source=source,
            timings=timings,
            replica=self.replica,
            frame_tokens=entry.frame_tokens,
        )

    def _answer(self, media: Media, outcome: Outcome, timeout_seconds: float) -> Answer:
        """In the caller's words; counted, and logged where the request's id is known."""
        if isinstance(outcome, Embedding):
            self.series.items.labels(media.kind, outcome.source).inc()
            return outcome
        answer: ServiceError
        if outcome is None:
            answer = DeadlineExceeded(
                f"not encoded within the {timeout_seconds:.1f} s that were left of the request's "
                "time: give it more, or send less at a time"
            )
        elif isinstance(outcome, ServiceError):
            answer = outcome
            level = logging.ERROR if isinstance(outcome, EncodeFailed) else logging.INFO
            log.log(level, "an item of grid %s failed: %s", media.plan.grid_thw, outcome)
        else:
            log.error("an item of grid %s failed", media.plan.grid_thw, exc_info=outcome)
            answer = EncodeFailed(f"the encoder failed on this item: {outcome}")
        self.series.failures.labels(type(answer).__name__).inc()
        return answer

    def _kept(self, media: Media, answer: Answer) -> Answer:
        """The same, kept if it is an embedding; TooLarge in its place if it cannot be."""
        if not isinstance(answer, Embedding):
            return answer
        try:
            name = self.references.keep(Kept.of(media, answer), monotonic())
        except TooLarge as error:
            return error
        reference = reference_id(self.replica, name)
        return replace(answer, data=NOTHING, reference=reference)

    async def fetch(self, name: str) -> Kept | None:
        """What is kept under a name. Raises EmbeddingLost."""
        if (kept := self.references.get(name, monotonic())) is None:
            return None
        try:
            return replace(kept, embedding=await written(kept.embedding))
        except Exception as error:
            log.exception("what was to be kept is not")
            self.references.release(name)
            raise EmbeddingLost(
                f"the embedding could not be written to shared memory ({error!r}): encode the item "
                "again, with a larger object store or a lower references.max_bytes"
            ) from error

    async def release(self, name: str) -> bool:
        """Lets go of it. False: there was nothing."""
        return self.references.release(name)

    def scrape(self) -> tuple[str, str]:
        """This replica's id, and its series in Prometheus' text format."""
        return self.replica, self.series.text()

    async def record_replica_metadata(self) -> dict[str, Any]:
        """What routers go by; asked once by Serve."""
        process = ray.get_runtime_context()
        endpoint = await self.rpc.start(
            process.get_node_id(), ray.util.get_node_ip_address(), process.get_actor_name()
        )
        return {"fingerprint": self.sharing.fingerprint, **endpoint.metadata}

    async def record_routing_stats(self) -> dict[str, Any]:
        """The load that this replica has accepted from all routers; asked every second."""
        self.references.expire(monotonic())
        return {OUTSTANDING_PATCHES: self.outstanding_patches}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The same, for the policy in scaling.py."""
        return {OUTSTANDING_PATCHES: self.outstanding_patches}

    async def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        stalled = self.engine.stalled_seconds()
        if not self.stages.alive():
            raise Unavailable("nothing is decoded any more: the processes that decode do not start")
        if not self.engine.alive() or stalled > self.options.encoder.max_stall_seconds:
            raise Unavailable(f"the engine is stuck: nothing has landed for {stalled:.0f} s")

    async def stop(self) -> None:
        """Serve has waited for its own calls; this waits for those over gRPC."""
        await self.rpc.stop(self.options.encoder.drain_timeout_seconds)
        self.stages.close()
        self.sharing.close()

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        """Serve asks for it once, at the end, and awaits what it gets."""
        if hasattr(self, "rpc") and self.rpc.running:
            return self.stop()
        if hasattr(self, "stages"):
            self.stages.close()
            self.sharing.close()
        return None
