"""The encoder actor, a Serve deployment: load -> capture -> warm -> ready -> drain -> stop.

One replica owns one device. Ray keeps it out of the way of requests until `__init__` returns, which
is after the last graph is captured. Answers are values: one bad item fails only itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import monotonic
from typing import Any, TypeVar

import torch
from ray import serve
from torch import Tensor

from actors.cache import EmbeddingCache, Entry
from actors.errors import DeadlineExceeded, EncodeFailed, ServiceError, Unavailable
from actors.evs import group_tokens, retained_tokens, retention_mask
from actors.logs import name_requests
from actors.metrics import EncoderMetrics
from actors.mirror import start_mirror
from actors.options import ActorOptions
from actors.origin import NOBODY, ORIGIN, Origin
from actors.preprocess import prepare
from actors.references import Kept, References
from actors.scaling import OUTSTANDING_PATCHES
from actors.shared import INLINE_BYTES, read, share
from actors.startup import open_engine
from actors.tensors import flat_tensor
from actors.tracing import open_spans
from actors.types import Answer, Dtype, Embedding, Item, Media, Reply, Source, Timings

log = logging.getLogger("ray.serve")

Result = TypeVar("Result")


class Encoder:
    """Encodes items; the router says which."""

    def __init__(self, options: ActorOptions) -> None:
        name_requests()
        self.options = options
        self.spans = open_spans(options.tracing, "encoder")
        self.replica = serve.get_replica_context().replica_id.unique_id
        self.series = EncoderMetrics()
        self.engine = open_engine(options, self.series)
        self.tower = self.engine.tower
        spec = self.tower.spec
        self.fingerprint = spec.fingerprint  # once: it is a digest of the whole configuration
        self.cache = EmbeddingCache(options.cache.max_bytes, self.series)
        self.references = References(options.references, self.series)
        self.decoders = ThreadPoolExecutor(options.preprocess.threads, "decode")
        self.outstanding_patches = 0
        start_mirror(options.metrics, self.series.text)
        backend = self.engine.device.backend
        log.info("encoder %s is ready: %s on %s", self.replica, spec.id, backend)

    async def encode(
        self, media: list[Media], dtype: Dtype, timeout_seconds: float, origin: Origin = NOBODY
    ) -> Reply:
        """An embedding or an error for each item. Cancelling drops what has not begun."""
        ORIGIN.set(origin)
        patches = sum(item.plan.patches for item in media)
        self.outstanding_patches += patches
        try:
            with self.spans.span(
                "shard", "server", replica=self.replica, items=len(media), patches=patches
            ):
                answers = await asyncio.gather(
                    *(self._answer(item, dtype, timeout_seconds) for item in media)
                )
        finally:
            self.outstanding_patches -= patches
        return Reply(answers, self.outstanding_patches)

    async def _answer(self, media: Media, dtype: Dtype, timeout_seconds: float) -> Answer:
        answer: Answer
        try:
            async with asyncio.timeout(timeout_seconds):
                answer = await self._encode(media, dtype)
        except TimeoutError:
            answer = DeadlineExceeded(
                f"not encoded within the {timeout_seconds:.1f} s that were left of the request's "
                "time: give it more, or send less at a time"
            )
        except ServiceError as error:
            answer = error
            # Here, as the engine's thread knows of no request.
            level = logging.ERROR if isinstance(error, EncodeFailed) else logging.INFO
            log.log(level, "an item of grid %s failed: %s", media.plan.grid_thw, error)
        except Exception as error:
            log.exception("an item of grid %s failed", media.plan.grid_thw)
            answer = EncodeFailed(f"the encoder failed on this item: {error}")
        if isinstance(answer, Embedding):
            self.series.items.labels(media.kind, answer.source).inc()
        else:
            self.series.failures.labels(type(answer).__name__).inc()
        return answer

    async def _encode(self, media: Media, dtype: Dtype) -> Embedding:
        """Cache? Otherwise decode ahead of the device, then wait for the engine."""
        key = (self.fingerprint, *media.identity)
        entry = self.cache.get(key, retained_tokens(media.plan, media.evs_rate))
        source: Source = "cache"
        timings = Timings(0.0, 0.0, 0.0)
        if entry is None:
            rows, source, timings = await self._compute(media)
            kept_as = self.tower.spec.dtype if self.cache.max_bytes else dtype
            frame_tokens: tuple[int, ...] = ()
            if media.evs_rate:
                rows, frame_tokens = await off_the_loop(rows.nbytes, self._pruned, rows, media)
            entry = await off_the_loop(rows.nbytes, shared_rows, rows, kept_as)
            entry = replace(entry, frame_tokens=frame_tokens)
            self.cache.put(key, entry)
        if entry.dtype != dtype:
            rows = flat_tensor(await read(entry.data), entry.dtype).view(entry.shape)
            converted = await off_the_loop(rows.nbytes, shared_rows, rows, dtype)
            entry = replace(converted, frame_tokens=entry.frame_tokens)
        return Embedding(
            data=entry.data,
            dtype=dtype,
            shape=entry.shape,
            grid_thw=media.plan.grid_thw,
            source=source,
            timings=timings,
            replica=self.replica,
            frame_tokens=entry.frame_tokens,
        )

    def _pruned(self, rows: Tensor, media: Media) -> tuple[Tensor, tuple[int, ...]]:
        """The rows that are left of a video, told apart by their main features; of each group."""
        spec, plan = self.tower.spec, media.plan
        main = rows[:, : spec.width // (1 + spec.deepstack)].float().numpy()
        mask = retention_mask(main, plan, media.evs_rate)
        return rows[torch.from_numpy(mask)], group_tokens(mask, plan)

    async def _compute(self, media: Media) -> tuple[Tensor, Source, Timings]:
        """Rows [tokens, width] on the host."""
        item, waited, preprocess_seconds = await asyncio.get_running_loop().run_in_executor(
            self.decoders, self._prepare, media, monotonic()
        )
        self.spans.past("preprocess", preprocess_seconds, patches=item.plan.patches)
        encoded = await asyncio.wrap_future(self.engine.submit(item))
        self.spans.past(
            "replay",
            encoded.encode_seconds,
            source=encoded.source,
            patches=item.plan.patches,
            tokens=item.plan.tokens,
            queue_seconds=encoded.queue_seconds,
        )
        waited += encoded.queue_seconds
        timings = Timings(waited, preprocess_seconds, encoded.encode_seconds)
        pieces = sum(part.nbytes for part in encoded.parts[1:])  # one part is not copied
        rows = await off_the_loop(pieces, lambda: encoded.rows)
        return rows, encoded.source, timings

    def _prepare(self, media: Media, since: float) -> tuple[Item, float, float]:
        """The item, how long it waited for this thread, and how long it took."""
        started = monotonic()
        item = prepare(self.tower, media)
        seconds = monotonic() - started
        self.series.decode_queue_seconds.observe(started - since)
        self.series.preprocess_seconds.observe(seconds)
        return item, started - since, seconds

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
        if not self.engine.alive() or stalled > self.options.encoder.max_stall_seconds:
            raise Unavailable(f"the engine is stuck: nothing has landed for {stalled:.0f} s")

    def __del__(self) -> None:
        """Drained by Serve before: nothing is waiting any more."""
        if hasattr(self, "decoders"):
            self.engine.close()
            self.decoders.shutdown()


async def off_the_loop(size_bytes: int, work: Callable[..., Result], *args: object) -> Result:
    """work(...), which copies so many bytes: in a thread if they are many.

    Not one of the decoding threads: what is done would wait behind what has not begun.
    """
    if size_bytes <= INLINE_BYTES:
        return work(*args)
    return await asyncio.to_thread(work, *args)


def shared_rows(rows: Tensor, dtype: Dtype) -> Entry:
    """Rows [tokens, width] in a dtype; in shared memory if they are many."""
    data = rows.to(getattr(torch, dtype)).view(torch.uint8).numpy().reshape(-1)
    return Entry(share(data), dtype, (rows.shape[0], rows.shape[1]))
