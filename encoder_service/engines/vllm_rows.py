"""Brings rows to vLLM's workers by their ids. Imports nothing of vLLM.

RowSource, in the scheduler's process, fetches embeddings from encoders in threads. Each step then
tells the workers where its rows are:

    ipc        in the encoder's own memory, which holds them until the workers have copied them
    unix, tcp  in memory shared by this process, which received them, and the workers
    http       in the step's message; so are all rows until every worker has opened those memories

RowLoader, in each worker, opens the memories and copies from them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import prod
from queue import SimpleQueue
from threading import Event, Lock, Semaphore, Thread
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from actors.rows.memory import BlockMemory, OpenedMemory, OpenedShared, open_memory
from actors.rows.protocol import HeldRows, MemoryHandle, RowsPlace
from actors.rows.reader import RowsReader
from encoder_service.engines.vllm import REFERENCE

if TYPE_CHECKING:
    from encoder_service.client import Client

log = logging.getLogger("vllm.encoder_service")  # below vLLM's logger, so that it is shown

TIMEOUT_SECONDS, PLACE_SECONDS = 10.0, 2.0
"""Timeouts of one fetch over HTTP, once it has its turn, and of locating a replica's rows."""
FETCHES_AT_ONCE = 8
"""Maximum fetches over HTTP at a time, because vLLM asks for the embeddings of its whole queue."""
THREADS = 32
"""Threads that fetch, some of which wait for room in the shared memory."""
ROOM_SECONDS = 1.0
"""If nothing is freed for this long, rows are received outside of the shared memory, because the
requests that hold it may be waiting for these rows."""
AVOIDED_SECONDS, MOST_AVOIDED = 60.0, 1000
"""How long the front door is asked for the rows of an unreachable replica, and how many such
replicas are remembered."""
PING_SECONDS = 15.0
ABORTED_SECONDS = 30.0
"""How long rows of a request that was aborted in its first steps are kept: a step may copy them."""
RECEIVED = 0
"""Number of the memory into which bytes are received."""
COLUMNS = 63
MOST_WORKERS = 63
METADATA = frozenset(
    ("image_grid_thw", "video_grid_thw", "timestamps", "second_per_grid_ts", REFERENCE)
)
"""Keys of an item that has neither rows nor pixels."""
UNKNOWN, OPEN, REFUSED = range(3)
"""States on the board: whether a worker has opened a memory."""


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Rows in a memory that every worker has opened."""

    memory: int
    offset: int
    shape: tuple[int, int]
    dtype: str


@dataclass(eq=False)
class OfferedMemory:
    """A memory that workers are told to open as long as this object is referenced."""

    number: int
    handle: MemoryHandle


@dataclass(eq=False)
class FetchedRows:
    """An embedding that can be sent to the workers. Its memory lives as long as this object."""

    shape: tuple[int, int]
    size_bytes: int
    path: str
    rows: RowsAt | Tensor
    block: Tensor | None = None  # of the shared memory
    offered: OfferedMemory | None = None
    reader: RowsReader | None = None  # which holds the rows in the encoder's memory
    key: str = ""

    @property
    def lost(self) -> bool:
        return self.reader is not None and not self.reader.alive


class RowSource:
    """Embeddings by id, for all workers. Its methods may be called from any thread."""

    def __init__(
        self,
        client: Client,
        check: Callable[[str, tuple[int, int], str, int], None],
        ahead_bytes: int,
        workers: int,
    ) -> None:
        """`check` raises ValueError if an id, a shape, a model and a number of deepstack features
        do not fit. `ahead_bytes`: size of the memory that receives bytes."""
        self.client = client
        self.check = check
        self.workers = workers
        self.received = BlockMemory.shared(ahead_bytes)
        self.board = board_of(self.received.header)
        self.readers: dict[str, RowsReader] = {}
        self.avoided: dict[str, float] = {}
        self.told: set[tuple[str, str]] = set()
        self.offers: dict[RowsReader, OfferedMemory] = {}
        self.offered: WeakValueDictionary[int, OfferedMemory] = WeakValueDictionary()
        self.numbers = count(RECEIVED + 1)
        self.lock = Lock()  # guards connections and offers; never held for long
        self.connecting: WeakValueDictionary[str, Any] = WeakValueDictionary()
        """A lock for each replica that a thread is connecting to."""
        self.line = Lock()  # held by the fetch that waits for room
        self.turns = Semaphore(FETCHES_AT_ONCE)
        self.closed = Event()
        self.threads = ThreadPoolExecutor(THREADS, "rows")
        self.freeing = ThreadPoolExecutor(1, "rows-free")
        self.aborted: SimpleQueue[tuple[float, FetchedRows]] = SimpleQueue()
        """Rows to release, and when; oldest first."""
        Thread(target=self._release_aborted, name="rows-aborted", daemon=True).start()

    def begin(self, name: str) -> Future[FetchedRows]:
        """Never raises, because an error would end vLLM's scheduler."""
        found: Future[FetchedRows] = Future()
        try:
            self.threads.submit(self._fetch_into, found, name)
        except RuntimeError as error:  # no more threads can be started; others may still run it
            if found.cancel():
                found = Future()
                found.set_exception(error)
        return found

    def release(self, fetched: FetchedRows) -> None:
        """Frees the rows held at the encoder. Everything else is freed with its last reference."""
        if fetched.reader and fetched.reader.alive and not self.closed.is_set():
            self.freeing.submit(self._free, fetched.reader, fetched.key)

    def release_later(self, fetched: FetchedRows) -> None:
        self.aborted.put((monotonic() + ABORTED_SECONDS, fetched))

    def memories(self) -> dict[int, MemoryHandle]:
        """The memories that workers must have open; they can close all others."""
        assert self.received.handle
        with self.lock:
            offered = {number: one.handle for number, one in self.offered.items()}
        return {RECEIVED: self.received.handle} | offered

    def close(self) -> None:
        self.closed.set()
        for reader in list(self.readers.values()):
            reader.close()
        self.threads.shutdown(cancel_futures=True)
        self.freeing.shutdown()

    def _fetch_into(self, found: Future[FetchedRows], name: str) -> None:
        if not found.set_running_or_notify_cancel():
            return
        try:
            found.set_result(self._fetch(name))
        except BaseException as error:
            found.set_exception(error)
            del found  # breaks a cycle with the traceback, which would keep rows

    def _fetch(self, name: str) -> FetchedRows:
        if "." not in name:
            raise ValueError(
                "this is vLLM's own name for an item without rows and without an id: send the part "
                "as Embedding.to_vllm() makes it, and neither mm_processor_kwargs nor "
                "media_io_kwargs, also not vLLM's own --media-io-kwargs"
            )
        replica, key = name.split(".")[:2]
        for _ in range(2):  # the connection may have been lost since its last use
            if (reader := self._reader(replica, name)) is None:
                break
            try:
                found = self._held(reader, name, key)
            except ConnectionError:
                self._forget(replica, reader)
            else:
                self._tell(replica, found.path)
                return found
        else:  # it hangs, or its replies are invalid
            self._avoid(replica)
        found = self._by_value(name)
        self._tell(replica, found.path)
        return found

    def _held(self, reader: RowsReader, name: str, key: str) -> FetchedRows:
        held = reader.hold(key)
        try:
            self.check(name, held.shape, held.model, held.deepstack)
            if held.dtype == "float8_e4m3":  # only the front door sends its scales
                found = self._by_value(name)
            elif (offered := self._offer(reader, held.memory)) and self._is_open(offered.number):
                rows = RowsAt(offered.number, held.offset, held.shape, held.dtype)
                return FetchedRows(
                    held.shape, size_of(held), "ipc", rows, None, offered, reader, key
                )
            else:
                found = self._received(reader, key, held)
        except BaseException:
            self.freeing.submit(self._free, reader, key)
            raise
        self.freeing.submit(self._free, reader, key)
        return found

    def _received(self, reader: RowsReader, key: str, held: HeldRows) -> FetchedRows:
        rows: RowsAt | Tensor
        size_bytes = size_of(held)
        block = self._room(size_bytes)
        if block is None:
            rows = torch.empty(held.shape, dtype=getattr(torch, held.dtype))
            target = rows.view(torch.uint8).flatten()
        else:
            rows = RowsAt(RECEIVED, self.received.offset(block), held.shape, held.dtype)
            target = block
        reader.read(key, target.numpy().data)
        return FetchedRows(held.shape, size_bytes, reader.path, rows, block)

    def _room(self, size_bytes: int) -> Tensor | None:
        """A block of the memory that is shared with the workers. Waits while others free blocks.
        None if they do not, or if not all workers have opened the memory."""
        if not self._is_open(RECEIVED) or size_bytes > len(self.received.memory):
            return None
        with self.line:
            taken, since = 0, monotonic()
            while (block := self.received.take(size_bytes)) is None:
                if self.closed.is_set():
                    raise ConnectionError("the connector is shut down")
                if taken != (now := self.received.taken_bytes):
                    taken, since = now, monotonic()
                if monotonic() - since > ROOM_SECONDS:
                    return None
                sleep(0.002)
            return block

    def _by_value(self, name: str) -> FetchedRows:
        with self.turns:
            if self.closed.is_set():
                raise ConnectionError("the connector is shut down")
            embedding = self._asked(self.client.client.fetch(name), TIMEOUT_SECONDS)
        self.check(name, embedding.shape, embedding.model, embedding.deepstack)
        rows = embedding.torch()
        return FetchedRows(embedding.shape, rows.nbytes, "http", rows)

    def _reader(self, replica: str, name: str) -> RowsReader | None:
        """A connection to a replica; None if there is none."""
        found = self.readers.get(replica)
        if found and found.alive:
            return found
        with self.lock:
            connecting = self.connecting.setdefault(replica, Lock())
        with connecting:
            found = self.readers.get(replica)
            if found and found.alive:
                return found
            if self.closed.is_set() or monotonic() < self.avoided.get(replica, 0):
                return None
            found = self._connect(name)
            if found is None:
                self._avoid(replica)
            else:
                with self.lock:
                    self.readers[replica] = found
                ping = partial(self._ping, replica, found)
                Thread(target=ping, name="rows-ping", daemon=True).start()
            return found

    def _avoid(self, replica: str) -> None:
        if len(self.avoided) >= MOST_AVOIDED:  # clients may make up names
            self.avoided.clear()
        self.avoided[replica] = monotonic() + AVOIDED_SECONDS

    def _connect(self, name: str) -> RowsReader | None:
        from encoder_service.client import ServiceError

        transport: Any = self.client.client.transport
        try:
            place = self._asked(transport.place(name), PLACE_SECONDS)
            return RowsReader.connect(RowsPlace.read(place))
        except (ServiceError, TimeoutError, KeyError):  # an older service, or no such replica
            return None

    def _asked(self, call: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Returns the front door's reply. Raises ServiceError, TimeoutError."""

        async def answered() -> Any:
            try:
                async with asyncio.timeout(seconds):  # also limits a reply that trickles in
                    return await call
            except TimeoutError:
                raise TimeoutError(f"not received within {seconds:g} s") from None

        return self.client.run(answered())

    def _forget(self, replica: str, reader: RowsReader) -> None:
        reader.close()
        with self.lock:
            if self.readers.get(replica) is reader:
                del self.readers[replica]
            self.offers.pop(reader, None)

    def _offer(self, reader: RowsReader, handle: MemoryHandle | None) -> OfferedMemory | None:
        """None: the rows are in no memory, the board has no free column, or the connection was
        lost."""
        if handle is None:
            return None
        with self.lock:
            if reader not in self.offers:
                if not reader.alive:  # `_forget` would not remove what is added after it
                    return None
                taken = set(map(column, self.offered))
                if len(taken) == COLUMNS:
                    return None
                number = next(one for one in self.numbers if column(one) not in taken)
                self.board[:, column(number)] = UNKNOWN
                self.offers[reader] = self.offered[number] = OfferedMemory(number, handle)
            return self.offers[reader]

    def _is_open(self, number: int) -> bool:
        said = self.board[: self.workers, column(number)]
        return self.workers <= MOST_WORKERS and bool((said == OPEN).all())

    def _free(self, reader: RowsReader, key: str) -> None:
        try:
            reader.free(key)
        except Exception as error:  # its rows are freed when the connection is lost
            log.debug("an embedding could not be freed: %s", error)

    def _ping(self, replica: str, reader: RowsReader) -> None:
        """Pings until the connection is lost. Replicas close silent connections and free their
        rows."""
        while not self.closed.wait(PING_SECONDS):
            try:
                reader.ping()
            except ConnectionError:
                self._forget(replica, reader)
                return

    def _release_aborted(self) -> None:
        while not self.closed.is_set():
            at, fetched = self.aborted.get()
            self.closed.wait(at - monotonic())
            self.release(fetched)
            del fetched  # or its memory would live until the next one comes

    def _tell(self, replica: str, path: str) -> None:
        if (replica, path) not in self.told:
            self.told.add((replica, path))
            log.info("embeddings of replica %s come by %s", replica, path)


class RowLoader:
    """Copies rows to one worker's device. Called from the worker's thread."""

    def __init__(self, worker: int, device: torch.device, dtype: torch.dtype) -> None:
        """`worker`: its rank."""
        self.worker = worker
        self.device = device
        self.dtype = dtype
        self.opened: dict[int, OpenedMemory | None] = {}
        self.board: Any = None

    def follow(self, memories: Mapping[int, MemoryHandle]) -> None:
        """Opens new memories, records that on the board, and closes those that are gone."""
        for number in self.opened.keys() - memories.keys():
            if gone := self.opened.pop(number):
                gone.close()
        for number in sorted(memories.keys() - self.opened.keys()):
            opened = self.opened[number] = self._open(memories[number])
            if number == RECEIVED and isinstance(opened, OpenedShared):
                self.board = board_of(opened.header)
                if self.device.type == "cuda":
                    Thread(target=self._pin, args=(opened,), name="rows-pin", daemon=True).start()
            if self.board is not None:
                self.board[self.worker, column(number)] = OPEN if opened else REFUSED

    def load(self, rows: RowsAt | Tensor) -> Tensor:
        """Returns [tokens, width] on the device. The copy is queued on the current stream."""
        if isinstance(rows, Tensor):
            return rows.to(self.device, self.dtype)
        opened = self.opened[rows.memory]
        assert opened, "the scheduler sends only what all workers have opened"
        loaded = torch.empty(rows.shape, dtype=getattr(torch, rows.dtype), device=self.device)
        opened.copy(rows.offset, loaded)
        return loaded.to(self.dtype)

    def _open(self, handle: MemoryHandle) -> OpenedMemory | None:
        try:
            return open_memory(handle, self.device)
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            log.info("rows are received, as memory (%s) cannot be opened: %s", handle.kind, error)
            return None

    def _pin(self, opened: OpenedShared) -> None:
        try:
            opened.pin(self.device)
        except (RuntimeError, ImportError) as error:
            log.warning("copies to the device are slower, as memory cannot be pinned: %s", error)


def still_needed(request: Any, num_computed_tokens: int) -> set[str]:
    """Names of items that a request has not computed everywhere. A prompt may repeat an image, and
    vLLM's prefix cache may have only its first occurrence."""
    return {
        feature.identifier
        for feature in request.mm_features
        if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
    }


def is_reference(feature: Any) -> bool:
    """Whether an item has neither rows nor pixels: vLLM would exit if its rows were missing."""
    return feature.data is not None and feature.data.keys() <= METADATA


def check_multimodal(vllm_config: Any) -> None:
    """Raises ValueError for vLLM's settings of images with which the connector cannot work."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    if multimodal is None:
        return
    if multimodal.mm_processor_cache_type == "shm":
        raise ValueError(
            "--mm-processor-cache-type is shm, which hides the items' data from the scheduler: "
            "leave it out, or use lru"
        )
    vision = getattr(model.hf_config, "vision_config", None)
    tower = any(map(multimodal.get_limit_per_prompt, ("image", "video")))
    if getattr(vision, "deepstack_visual_indexes", None) and not tower:
        raise ValueError(
            "--limit-mm-per-prompt is 0 for images and videos (or --language-model-only is set), "
            "so that vLLM drops this model's deepstack features with its tower, and would exit on "
            'the first embedding: use --limit-mm-per-prompt \'{"image": 8, "video": 1}\''
        )


def size_of(held: HeldRows) -> int:
    itemsize: int = getattr(torch, held.dtype).itemsize
    return prod(held.shape) * itemsize


def board_of(header: Tensor | None) -> Any:
    """An array [workers, memories] in the header of the memory that receives bytes."""
    assert header is not None
    return header.numpy().reshape(MOST_WORKERS, -1)


def column(number: int) -> int:
    """Column of a memory on the board."""
    return (number - 1) % COLUMNS + 1 if number else 0
