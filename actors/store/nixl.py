"""Moves rows from device to device with Ray Direct Transport over NIXL, which Ray calls alpha.

The encoder copies rows into memory that is registered with NIXL once, at start. Consumers read them
from there, and they stay until nobody holds their reference. Unlike shared memory, this memory is
reused, so each item carries a checksum that its reader compares.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from threading import Lock
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, RayDirectTransportError
from ray.experimental import register_nixl_memory, set_nixl_cuda_stream, set_target_for_ref
from torch import Tensor

from actors.errors import ConfigError, EmbeddingLost, StartError, how_to_install
from actors.options import Transport
from actors.rows.memory import BlockMemory
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Bytes, Embedding, ReceivedBytes, RemoteBytes, SharedBytes

WORD_BYTES = 8
READ_SECONDS = 5  # time limit for reading one item; beyond it the embedding is lost
READ_THREAD = ThreadPoolExecutor(1, "nixl")
"""One thread per process reads all items, because NIXL's agent is not thread-safe."""


class DeviceMemory:
    """The memory of one encoder that consumers read. Thread-safe."""

    def __init__(self, size_bytes: int, device: torch.device, metrics: EncoderMetrics) -> None:
        """Raises StartError if NIXL is not installed, or there is not enough memory."""
        check_transport("nixl")
        try:
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"encoder.nixl_bytes is {size_bytes}: the device's memory, or encoder."
                "gpu_memory_bytes of it, does not hold that beside weights and graphs: lower it"
            ) from error
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        register_nixl_memory(memory)
        if self._stream:
            set_nixl_cuda_stream(self._stream)  # otherwise each put waits for the whole device
        self._metrics = metrics
        self._memory = BlockMemory(memory)
        self._lock = Lock()
        metrics.nixl_bytes.set_function(lambda: self._memory.taken_bytes)

    def put(self, rows: Tensor, dtype: torch.dtype) -> SharedBytes | None:
        """Copies rows [tokens, width] into this memory, converted to `dtype`. They must be complete
        and on this device. None: there is no room now."""
        size = rows.numel() * dtype.itemsize
        with self._lock, torch.cuda.stream(self._stream) if self._stream else nullcontext():
            block = self._memory.take(size)
            if block is None:
                self._metrics.nixl_full.inc()
                return None
            block.view(dtype).view(rows.shape).copy_(rows)
            summed = total(block)  # waits for the copy
            remote = RemoteBytes(ray.put(block, _tensor_transport="nixl"), size, summed)
        self._metrics.nixl_items.inc()
        # Wrapped in an ordinary object, because a process that passes on a direct transport
        # reference keeps Ray's metadata of it for ever (ray-project/ray#57962).
        return SharedBytes(ray.put([remote]), size)


def total(block: Tensor) -> int:
    """A checksum of uint8 [n]: the sum of its 64-bit words, modulo 2 ** 64, plus the sum of the
    remaining bytes."""
    whole = len(block) // WORD_BYTES * WORD_BYTES
    words = block[:whole].view(torch.int64).sum()
    return int(words.item()) + int(block[whole:].sum(dtype=torch.int64).item())


def check_transport(transport: Transport) -> None:
    """Raises ConfigError if the transport needs a package that is not installed."""
    if transport == "nixl" and find_spec("nixl") is None:
        raise ConfigError(
            "encoder.transport is nixl, but the package nixl is not installed here: "
            f"{how_to_install('nixl')} on every node, or set it to shared_memory"
        )


class Receiver:
    """Reads rows to a device of this process."""

    def __init__(self, device: str) -> None:
        """Raises ConfigError if NIXL is not installed."""
        check_transport("nixl")
        self.device = torch.device(device)

    async def here(self, embedding: Embedding) -> Embedding:
        """The embedding with its data in this process: on the device if it was on one, otherwise as
        an array. Raises EmbeddingLost."""
        data = embedding.data
        if not isinstance(data, SharedBytes):
            return embedding
        read = asyncio.get_running_loop().run_in_executor(READ_THREAD, self._read, data)
        return replace(embedding, data=await read)

    def _read(self, data: SharedBytes) -> Bytes | ReceivedBytes:
        reference: Any = data.object_ref
        try:
            found: list[Bytes | RemoteBytes] = ray.get(reference, timeout=READ_SECONDS)
            one = found[data.place]
            return one if not isinstance(one, RemoteBytes) else ReceivedBytes(self._fetch(one))
        except (ObjectLostError, RayDirectTransportError, GetTimeoutError) as error:
            raise EmbeddingLost(
                "the replica that encoded the item ended, or cannot be reached, before its "
                "embedding was read; try again"
            ) from error

    def _fetch(self, remote: RemoteBytes) -> Tensor:
        rows = torch.empty(remote.size_bytes, dtype=torch.uint8, device=self.device)
        if rows.is_cuda:
            # NIXL does not wait for streams, so earlier uses of this memory must have finished.
            torch.cuda.current_stream(rows.device).synchronize()
        reference: Any = remote.object_ref
        try:
            set_target_for_ref(reference, [rows])
            ray.get(reference, timeout=READ_SECONDS)
        finally:
            forget(reference)
        if total(rows) != remote.total:
            raise EmbeddingLost("the embedding's memory was reused before it was read")
        return rows


def forget(reference: Any) -> None:
    """Drops Ray's metadata of a direct transport object, in a process that borrowed it. Ray never
    drops it, about a kilobyte per object (ray-project/ray#57962). Must not be called in the process
    that owns the object."""
    manager = ray._private.worker.global_worker.rdt_manager
    with manager._lock:
        manager._managed_rdt_metadata.pop(reference.hex(), None)
