"""The actor's pipeline: cache look-up -> decode -> encode -> write.

`Pipeline._encode` is one coroutine per item that goes through these stages. Decoding, the engine
and writing have their own threads; the event loop only passes items on. Knows neither Serve nor
gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from asyncio import ALL_COMPLETED, FIRST_COMPLETED
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch

from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.traffic import SizesFile
from actors.engine.video_chunks import rows_of
from actors.errors import (
    DeadlineExceeded,
    EmbeddingLost,
    EncodeFailed,
    ServiceError,
    StartError,
    Unavailable,
)
from actors.kernels.gemm.fp8 import values
from actors.media.decoder import Decoder
from actors.models.precision import rows_digest
from actors.options import ActorOptions
from actors.rows.lending import Lender
from actors.rows.memory import BlockMemory
from actors.rows.protocol import HeldRows
from actors.spec.video import retained_tokens
from actors.startup import open_engine
from actors.store.kept import (
    EmbeddingCache,
    Kept,
    PendingWrite,
    References,
    reference_id,
    written,
)
from actors.store.nixl import DeviceMemory
from actors.store.shared_cache import SharedCache, open_store
from actors.store.shared_memory import INLINE_BYTES, arrays, here
from actors.store.writer import RowBatch, RowWriter, as_bytes, converted, tensor
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import Spans
from actors.types import (
    DTYPE_BYTES,
    Answer,
    Bytes,
    Dtype,
    Embedding,
    Item,
    ItemPlan,
    Media,
    Reply,
    SharedBytes,
    Timings,
)

log = logging.getLogger("ray.serve")

ROW_MEMORY_BYTES = 3 * 2**29
"""Host memory of a replica that rows are read back into. Pinned at start on a GPU. Kept rows stay
in it while it is at most two thirds full; the rest is for rows on their way to callers."""
REPLY_SECONDS = 0.002  # delay of writes after an answer, because they hold the GIL
NO_TIMINGS = Timings(0.0, 0.0, 0.0)
NO_BYTES: Bytes = np.empty(0, np.uint8)

Result = TypeVar("Result")


class Pipeline:
    """Encodes the items of one actor, from media to embeddings. For one event loop."""

    def __init__(
        self,
        decoder: Decoder,
        engine: Engine,
        writer: RowWriter,
        references: References,
        series: EncoderMetrics,
        spans: Spans,
        sizes: SizesFile | None = None,
        memory: BlockMemory | None = None,
    ) -> None:
        """`memory`: gets a copy of the rows of kept embeddings, as far as there is room."""
        self.decoder = decoder
        self.engine = engine
        self.writer = writer
        self.cache = writer.cache
        self.references = references
        self.series = series
        self.spans = spans
        self.sizes = sizes
        self.memory = memory
        self._blocks: weakref.WeakValueDictionary[tuple[str, ...], Any] = (
            weakref.WeakValueDictionary()
        )
        """Blocks of `memory` by cache key and dtype, so that equal items share a block."""
        self._filling: dict[tuple[str, ...], asyncio.Task[None]] = {}
        """Blocks that are being filled from the host, by the same key."""
        self._closed = False

    async def encode(
        self,
        media: Sequence[Media],
        dtype: Dtype,
        timeout_seconds: float,
        *,
        keep: bool = False,
        early: Callable[[Reply], None] | None = None,
        lend: bool = False,
    ) -> dict[int, Answer]:
        """Returns an embedding or an error per item, by its index in `media`.

        Cancelling the call drops the items that have not begun. `keep`: embeddings are kept for a
        while, and answers have a `reference` instead of data. `early`: called with answers as they
        are ready, except for the last ones, which are returned. `lend`: rows may be in row memory
        instead of Ray's shared memory. Raises Unavailable once closed, because a router may call a
        replica that has drained.
        """
        if self._closed:
            raise Unavailable("this encoder is stopping: try again")
        lend = lend and not keep  # kept rows outlive the answer
        batch = RowBatch(self.writer, dtype, lend=lend)
        work = (self._encode(one, dtype, batch, keep=keep, lend=lend) for one in media)
        left = dict(enumerate(map(asyncio.create_task, work)))
        end = monotonic() + timeout_seconds
        enough = FIRST_COMPLETED if early else ALL_COMPLETED

        def answered(places: Sequence[int]) -> dict[int, Answer]:
            return {
                place: self._answer(media[place], left.pop(place), timeout_seconds)
                for place in places
            }

        try:
            while left:
                seconds = max(0.0, end - monotonic())
                await asyncio.wait(left.values(), timeout=seconds, return_when=enough)
                done = [place for place, task in left.items() if task.done()]
                if not early or not done or len(done) == len(left):
                    break
                found = answered(done)
                early(Reply(list(found.values()), 0, 0, tuple(found)))
                del found  # while the next ones are awaited
        finally:
            for task in left.values():
                task.cancel()
        return answered(list(left))

    async def _encode(
        self, media: Media, dtype: Dtype, batch: RowBatch, *, keep: bool, lend: bool
    ) -> Embedding:
        tokens = None if media.prune else retained_tokens(media.plan, media.evs_rate)
        if hit := self.cache.get(self.writer.key(media), tokens):
            hit = replace(await converted(hit, dtype), source="cache", timings=NO_TIMINGS)
            return self._kept_hit(media, hit) if keep else hit
        if hit := await self.writer.from_shared_cache(media, dtype, tokens):
            return self._kept_hit(media, hit) if keep else hit

        item = await result_of(self.decoder.submit(media))
        self.series.decode_queue_seconds.observe(item.decode_queue_seconds)
        self.series.preprocess_seconds.observe(item.preprocess_seconds)
        if item.plan.blocks:
            self.series.pruned_patches.inc(media.plan.patches - item.plan.patches)
        self.spans.past("preprocess", item.preprocess_seconds, patches=item.plan.patches)

        in_memory = keep and self._fits_memory(media, dtype)
        item.on_device = in_memory or self.writer.stays_on_device(media, dtype)
        item.in_fp8 = self.writer.leaves_in_fp8(media, dtype)
        item = await result_of(self.engine.submit(item))
        self._trace_replay(item)

        if in_memory and (block := await self._block(media, item, dtype)) is not None:
            return self._kept(media, self._unwritten(media, item, dtype, block), block)
        later = (keep or self.writer.caches) and self._may_be_written_later(media, item, dtype)
        if keep and later:
            return self._kept(media, self._unwritten(media, item, dtype))
        if lend and (lent := self.writer.in_place(media, item, dtype)):
            if not self.writer.caches:
                return lent
            if later:
                self._unwritten(media, item, dtype, lend=True)
                return lent
        embedding = await batch.write(media, item)
        return self._kept(media, embedding) if keep else embedding

    async def fetch(self, name: str) -> Kept | None:
        """What is kept under a name; None: nothing. Raises EmbeddingLost if its rows could not be
        written."""
        if (found := self.references.find(name, monotonic())) is None:
            return None
        return await self._written(found, self.references.held(found).kept)

    async def _written(self, name: str, kept: Kept) -> Kept:
        """Waits until its rows are in Ray's shared memory. Raises EmbeddingLost."""
        try:
            return replace(kept, embedding=await written(kept.embedding))
        except Exception as error:
            log.exception("a kept embedding could not be written")
            self.references.release(name)
            raise EmbeddingLost(
                f"the embedding could not be written to shared memory ({error!r}): encode the item "
                "again, with a larger object store or a lower references.max_bytes"
            ) from error

    async def hold(self, name: str) -> HeldRows | None:
        """Keeps the rows of a name in place until one `free` per hold. None: unknown."""
        if (hold := self.references.hold(name, monotonic())) is None:
            return None
        spec, embedding = self.writer.spec, hold.kept.embedding
        found = HeldRows(embedding.shape, embedding.dtype, spec.id, spec.deepstack)
        if self.memory and hold.block is not None:
            place = self.memory.offset(hold.block)
            found = replace(found, memory=self.memory.handle, offset=place)
        return found

    def free(self, name: str) -> None:
        self.references.free(name, monotonic())

    async def rows(self, name: str) -> Bytes:
        """The bytes of held rows. Raises EmbeddingLost."""
        held = self.references.held(name)
        shared = held.kept.shared_object
        if isinstance(shared, PendingWrite) and shared.rows is not None:
            return shared.rows
        written = (await self._written(held.name, held.kept)).embedding.data
        if not isinstance(written, SharedBytes):
            return np.asarray(written)
        opened = self.references.opened
        if shared not in opened:
            opened[shared] = await arrays(written)
        return opened[shared][written.place]

    async def take(self, name: str) -> Bytes | None:
        """The bytes under a whole name, which is held until `free`. None: unknown. Raises
        EmbeddingLost."""
        if "." not in name or self.references.hold(name, monotonic()) is None:
            return None
        try:
            return await self.rows(name)
        except BaseException:
            self.free(name)
            raise

    def close(self) -> None:
        """Items in the engine are still answered. Items that are not decoded yet are rejected."""
        self._closed = True
        self.engine.close()
        self.decoder.close()
        self.writer.close()
        if self.sizes:
            self.sizes.close()

    def _trace_replay(self, item: Item) -> None:
        self.spans.past(
            "replay",
            item.encode_seconds,
            source=item.source,
            patches=item.plan.patches,
            tokens=item.plan.tokens,
            queue_seconds=item.queue_seconds,
        )

    def _may_be_written_later(self, media: Media, item: Item, dtype: Dtype) -> bool:
        """Whether an item's rows are in row memory, and that has room to keep them for now. Not
        with an `evs_rate`, because how many rows are left is known only once they are written."""
        lender = self.writer.lender
        if media.evs_rate or media.on_device or lender is None:
            return False
        if self._size_bytes(item.plan, dtype) <= INLINE_BYTES or not holds_all(lender, item):
            return False
        return 3 * lender.taken_bytes <= 2 * lender.handle.size_bytes

    def _fits_memory(self, media: Media, dtype: Dtype) -> bool:
        """Whether an item's rows may be put into `memory`. Blocks have no room for scales, and an
        `evs_rate` needs the rows on the host."""
        if self.memory is None or media.on_device or media.evs_rate or dtype == "float8_e4m3":
            return False
        return self._size_bytes(media.plan, dtype) <= len(self.memory.memory)

    async def _block(self, media: Media, item: Item, dtype: Dtype) -> Any:
        """A block filled with the rows of an encoded item. None: there is no room now."""
        rows = rows_of(item)
        if (filled := await self._filled(rows, dtype)) is None:
            return None
        block, copy = filled
        if rows.is_cuda and dtype == self.writer.spec.dtype:
            item.rows = copy  # frees the original while the write is pending
        self._blocks[*self.writer.key(media), dtype] = block
        return block

    async def _filled(self, rows: torch.Tensor, dtype: Dtype) -> tuple[Any, torch.Tensor] | None:
        """A block filled with rows, and the view of it as rows. None: there is no room now."""
        memory = self.memory
        assert memory
        while (block := memory.take(rows.shape[0] * rows.shape[1] * DTYPE_BYTES[dtype])) is None:
            if not self.references.evict_block():
                return None
        loop, threads = asyncio.get_running_loop(), self.writer.threads
        kind = getattr(torch, dtype)
        return block, await loop.run_in_executor(threads, memory.fill, block, rows, kind)

    def _kept_hit(self, media: Media, hit: Embedding) -> Embedding:
        """As `_kept`. Its rows are copied to a block in the background, so that the answer does
        not wait for the device."""
        key = (*self.writer.key(media), hit.dtype)
        block = self._blocks.get(key)
        answer = self._kept(media, hit, block)
        if block is None and key not in self._filling and self._fits_memory(media, hit.dtype):
            name = answer.reference.partition(".")[2]
            self._filling[key] = asyncio.create_task(self._fill(key, hit, name))
        return answer

    async def _fill(self, key: tuple[str, ...], hit: Embedding, name: str) -> None:
        """Copies rows from the host to a block, for this name and those of equal items."""
        try:
            filled = await self._filled(tensor(await here(hit)), hit.dtype)
            if filled and self.references.give_block(name, filled[0]):
                self._blocks[key] = filled[0]
        except Exception as error:  # readers then receive the rows as bytes
            log.warning("rows of a cache could not be copied to the device: %r", error)
        finally:
            del self._filling[key]

    def _unwritten(
        self, media: Media, item: Item, dtype: Dtype, block: Any = None, *, lend: bool = False
    ) -> Embedding:
        """An embedding that may be answered before its rows are in Ray's shared memory. `lend`:
        only a cache needs the rows there.

        They are written after the answer if a cache needs them, or if they are in a block, which
        may be evicted; otherwise once somebody asks for them. Each item is an object of its own,
        because References counts kept items one by one.
        """
        write = partial(RowBatch(self.writer, dtype, lend=lend).write, media.emptied, item)

        async def after_the_answer(_: Any) -> Embedding:
            await asyncio.sleep(REPLY_SECONDS)
            return await write()

        soon = block is not None or self.writer.caches
        item.patches = item.later = None  # the item lives until it is written
        rows = item.rows
        # Not chunks of a video, rows in FP8 or rows on the device.
        same = isinstance(rows, torch.Tensor) and dtype == self.writer.spec.dtype
        there = as_bytes(rows, dtype)[0] if same and not rows.is_cuda else None
        # The write keeps the block.
        pending = PendingWrite(partial(after_the_answer, block) if soon else write, there)
        if soon:
            pending.embedding()
        data = SharedBytes(pending, self._size_bytes(item.plan, dtype))
        return self.writer.embedding(item, data, dtype, item.plan.tokens)

    def _size_bytes(self, plan: ItemPlan, dtype: Dtype) -> int:
        return plan.tokens * self.writer.spec.width * DTYPE_BYTES[dtype]

    def _kept(self, media: Media, embedding: Embedding, block: Any = None) -> Embedding:
        """Keeps an embedding; returns it with a reference instead of data. Raises TooLarge,
        Overloaded."""
        name = self.references.keep(Kept.of(media, embedding), monotonic(), block)
        reference = reference_id(self.writer.replica, name)
        return replace(embedding, data=NO_BYTES, scales=b"", reference=reference)

    def _answer(
        self, media: Media, task: asyncio.Task[Embedding], timeout_seconds: float
    ) -> Answer:
        """The result of an item's task. Counts and logs it here, where the request id is known."""
        if not task.done() or task.cancelled():
            answer: Answer = DeadlineExceeded(
                f"not encoded within the {timeout_seconds:.1f} s that were left of the request's "
                "time: give it more, or send less at a time"
            )
        elif not (error := task.exception()):
            embedding = task.result()
            self.series.items.labels(media.kind, embedding.source).inc()
            return embedding
        elif isinstance(error, ServiceError):
            answer = error
            level = logging.ERROR if isinstance(error, EncodeFailed) else logging.INFO
            log.log(level, "an item of grid %s failed: %s", media.plan.grid_thw, error)
        else:
            log.error("an item of grid %s failed", media.plan.grid_thw, exc_info=error)
            answer = EncodeFailed(f"the encoder failed on this item: {error}")
        self.series.failures.labels(type(answer).__name__).inc()
        return answer


def holds_all(lender: Lender, item: Item) -> bool:
    """Whether the rows of an encoded item are in the lender's memory, those of all chunks."""
    parts = item.rows if isinstance(item.rows, tuple) else (item.rows,)
    tensors = map(values, parts)
    return all(not one.is_cuda and lender.holds(one.view(torch.uint8).numpy()) for one in tensors)


async def result_of(future: Future[Result]) -> Result:
    """Awaits work in another thread. Cancelling the wait cancels the work.

    Not asyncio.wrap_future, because it makes a reference cycle, which would keep patches and rows
    until the garbage collector runs.
    """
    loop = asyncio.get_running_loop()
    arrived = loop.create_future()

    def wake() -> None:
        if not arrived.done():
            arrived.set_result(None)

    def done(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(wake)

    future.add_done_callback(done)
    try:
        await arrived
    except asyncio.CancelledError:
        future.cancel()
        raise
    try:
        return future.result()
    finally:
        del future  # breaks a cycle with the traceback of a failure, which would keep the file


def open_pipeline(
    options: ActorOptions, series: EncoderMetrics, spans: Spans, replica: str
) -> Pipeline:
    """Opens the pipeline of one replica and captures every graph. Raises StartError."""
    # Its processes start while the engine captures.
    decoder = Decoder(options.model, options.preprocess, series)
    engine = open_engine(options, series)
    references = References(options.references, series)
    memory = None
    if options.encoder.transport == "nixl":
        memory = DeviceMemory(options.encoder.nixl_bytes, engine.device.device, series)
    if rows := open_block_memory(options, engine.device.device):
        series.reference_device_bytes.set_function(lambda: rows.taken_bytes)
    cache = EmbeddingCache(options.cache.max_bytes, series)
    spec = engine.tower.spec
    shared = None
    if options.cache.shared:
        weights = rows_digest(options.graphs, options.model, engine.device.device)
        shared = SharedCache(open_store(options.cache.shared), weights, series)
    lender = open_lender(engine.device, series)
    writer = RowWriter(spec, cache, memory, references.largest_bytes, replica, shared, lender)
    decoder.wait_until_started()
    sizes = None
    if options.graphs.sizes_file:
        sizes = SizesFile(options.graphs.sizes_file, spec.id, engine.item_tokens)
    return Pipeline(decoder, engine, writer, references, series, spans, sizes, rows)


def open_lender(device: Device, series: EncoderMetrics) -> Lender | None:
    """Allocates row memory, and has rows read back into it. None: the system does not allow it."""
    try:
        lender = Lender(ROW_MEMORY_BYTES)
        device.lend(lender)
    except (OSError, RuntimeError, ImportError) as error:
        log.warning("rows go through Ray's shared memory, which is slower: %s", error)
        return None
    series.row_memory_bytes.set_function(lambda: lender.taken_bytes)
    return lender


def open_block_memory(options: ActorOptions, device: torch.device) -> BlockMemory | None:
    """Allocates `references.device_bytes`. None: that is 0, or CUDA does not share the memory.
    Raises StartError."""
    size_bytes = options.references.device_bytes
    if not size_bytes:
        return None
    if device.type == "cpu":
        return BlockMemory.shared(size_bytes)
    try:
        memory = BlockMemory.on_gpu(size_bytes, device)
    except torch.OutOfMemoryError as error:
        raise StartError(
            f"references.device_bytes is {size_bytes}: the device's memory, or encoder."
            "gpu_memory_bytes of it, does not hold that beside weights and graphs: lower it"
        ) from error
    if memory.handle is None:
        log.warning(
            "references.device_bytes has no effect: CUDA does not share this memory between "
            "processes (expandable segments?)"
        )
        return None
    return memory
