"""The encoder actor, a Serve deployment: load -> capture -> warm -> ready -> drain -> stop.

One replica owns one device. Ray keeps it out of the way of requests until `__init__` returns, which
is after the last graph is captured. Answers are values: one bad item fails only itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import torch
from ray import serve
from torch import Tensor

from actors.cache import EmbeddingCache, Entry, Key
from actors.entries import all_converted, as_bytes, shared_rows
from actors.errors import DeadlineExceeded, EncodeFailed, ServiceError, TooLarge, Unavailable
from actors.evs import group_tokens, retained_tokens, retention_mask
from actors.logs import name_requests
from actors.metrics import EncoderMetrics
from actors.mirror import start_mirror
from actors.nixl import DeviceMemory
from actors.options import ActorOptions
from actors.origin import NOBODY, ORIGIN, Origin
from actors.references import Kept, References, reference_id
from actors.scaling import OUTSTANDING_PATCHES
from actors.shared import INLINE_BYTES, MOST_TOGETHER_BYTES, share_together
from actors.stages import Made, Stages, Work
from actors.startup import open_beside, open_decoding, open_engine
from actors.tracing import open_spans
from actors.types import DTYPE_BYTES, Answer, Dtype, Embedding, Media, Reply, Source, Timings

log = logging.getLogger("ray.serve")

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
        self.fingerprint = spec.fingerprint  # once: it is a digest of the whole configuration
        self.cache = EmbeddingCache(options.cache.max_bytes, self.series)
        self.references = References(options.references, self.series)
        # What is shared together is kept together: more could be refused where each alone is not.
        largest = self.references.largest_bytes
        most = MOST_TOGETHER_BYTES
        self.together_bytes = min(most, largest) if largest > 0 else most
        self.memory = None
        if options.encoder.transport == "nixl":
            size = options.encoder.nixl_bytes
            self.memory = DeviceMemory(size, self.engine.device.device, self.series)
        decoding = open_decoding(options, self.engine, self.series, beside)
        self.stages = Stages(self.engine, decoding, self.series)
        self.outstanding_patches = 0
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
                answers = await self._answers(media, dtype, timeout_seconds)
                if keep:
                    answers = list(map(self._kept, media, answers))
        finally:
            self.outstanding_patches -= patches
        return Reply(answers, self.outstanding_patches)

    async def _answers(
        self, media: Sequence[Media], dtype: Dtype, timeout_seconds: float
    ) -> list[Answer]:
        """Cache? Otherwise through the stages. What each item comes to, in order."""
        cached = [
            self.cache.get(self._key(one), retained_tokens(one.plan, one.evs_rate)) for one in media
        ]
        missing = [
            replace(one, on_device=self._stays(one, dtype))
            for one, entry in zip(media, cached, strict=True)
            if entry is None
        ]
        call = self.stages.begin(missing, partial(self._share, dtype))
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

    def _key(self, media: Media) -> Key:
        return (self.fingerprint, *media.identity)

    def _stays(self, media: Media, dtype: Dtype) -> bool:
        """Whether its rows are left on the device: those that are pruned are on the host first."""
        if self.memory is None or not media.on_device or media.evs_rate:
            return False
        return media.plan.tokens * self.tower.spec.width * DTYPE_BYTES[dtype] > INLINE_BYTES

    def _share(self, dtype: Dtype, done: Sequence[tuple[Media, Tensor]]) -> list[Entry]:
        """Rows that left the engine, in the dtype that was asked for, to be referred to."""
        staying = [self._left(media, rows, dtype) for media, rows in done]
        rest = [
            (media, rows.cpu())
            for (media, rows), entry in zip(done, staying, strict=True)
            if entry is None
        ]
        shared = iter(self._shared(dtype, rest))
        return [entry or next(shared) for entry in staying]

    def _left(self, media: Media, rows: Tensor, dtype: Dtype) -> Entry | None:
        """Rows that stay on the device. None: they do not, or there is no room for them now."""
        if self.memory is None or not media.on_device:
            return None
        data = self.memory.put(rows, getattr(torch, dtype))
        if data is None:
            return None
        if self.cache.max_bytes:  # which keeps rows of its own, on the host
            self.cache.put(self._key(media), shared_rows(rows.cpu(), self.tower.spec.dtype, ()))
        return Entry(data, dtype, (rows.shape[0], rows.shape[1]))

    def _shared(self, dtype: Dtype, done: Sequence[tuple[Media, Tensor]]) -> list[Entry]:
        """Rows on the host."""
        kept = [self._pruned(rows, media) if media.evs_rate else (rows, ()) for media, rows in done]
        if not self.cache.max_bytes:
            arrays = [as_bytes(rows, dtype) for rows, _ in kept]
            data = share_together(arrays, self.together_bytes)
            return [
                Entry(one, dtype, (rows.shape[0], rows.shape[1]), frame_tokens)
                for one, (rows, frame_tokens) in zip(data, kept, strict=True)
            ]
        # Each by itself, so that the cache frees what it lets go of.
        entries = []
        for (media, _), (rows, frame_tokens) in zip(done, kept, strict=True):
            entry = shared_rows(rows, self.tower.spec.dtype, frame_tokens)
            self.cache.put(self._key(media), entry)
            same = entry.dtype == dtype
            entries.append(entry if same else shared_rows(rows, dtype, frame_tokens))
        return entries

    def _pruned(self, rows: Tensor, media: Media) -> tuple[Tensor, tuple[int, ...]]:
        """The rows that are left of a video, told apart by their main features; of each group."""
        spec, plan = self.tower.spec, media.plan
        main = rows[:, : spec.width // (1 + spec.deepstack)].float().numpy()
        mask = retention_mask(main, plan, media.evs_rate)
        return rows[torch.from_numpy(mask)], group_tokens(mask, plan)

    def _kept(self, media: Media, answer: Answer) -> Answer:
        """The same, kept if it is an embedding; TooLarge in its place if it cannot be."""
        if not isinstance(answer, Embedding):
            return answer
        try:
            name = self.references.keep(Kept.of(media, answer), monotonic())
        except TooLarge as error:
            return error
        return replace(answer, reference=reference_id(self.replica, name))

    async def keep(self, kept: list[Kept]) -> list[str]:
        """Keeps these for a while; gives the name of each. Raises TooLarge."""
        return [self.references.keep(one, monotonic()) for one in kept]

    async def fetch(self, name: str) -> Kept | None:
        """What is kept under a name."""
        return self.references.get(name, monotonic())

    async def release(self, name: str) -> bool:
        """Lets go of it. False: there was nothing."""
        return self.references.release(name)

    def scrape(self) -> tuple[str, str]:
        """This replica's id, and its series in Prometheus' text format."""
        return self.replica, self.series.text()

    def record_replica_metadata(self) -> dict[str, Any]:
        """What the router goes by; asked once by Serve."""
        return {"fingerprint": self.fingerprint}

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

    def __del__(self) -> None:
        """Drained by Serve before: nothing is waiting any more."""
        if hasattr(self, "stages"):
            self.stages.close()
