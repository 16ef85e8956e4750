"""Rows that go from device to device, by Ray Direct Transport over NIXL: the encoder's side.

Rows are copied into a piece of memory that NIXL knows from the start, so that nothing is registered
for an item and no graph writes there, and stay until nobody holds their reference. Consumers read
them from there by themselves (received.py). Ray calls this interface alpha; beside `ray.put` three
calls of `ray.experimental` are used, in these two files alone.

Shared memory is written once and an object that is freed too early cannot be read. Memory that is
read from outside is written again: so each item has a sum of its bytes, which its reader compares.
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import nullcontext
from importlib.util import find_spec
from threading import Lock

import ray
import torch
from ray.experimental import register_nixl_memory, set_nixl_cuda_stream
from torch import Tensor

from actors.allocator import Allocator
from actors.errors import ConfigError, StartError
from actors.options import Transport
from actors.telemetry.metrics import EncoderMetrics
from actors.types import RemoteBytes, SharedBytes

WORD_BYTES = 8


class DeviceMemory:
    """The memory of one encoder that consumers read. May be used from any thread."""

    def __init__(self, size_bytes: int, device: torch.device, metrics: EncoderMetrics) -> None:
        """Raises StartError where there is no NIXL, or not so much memory."""
        check_transport("nixl")
        try:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"encoder.nixl_bytes is {size_bytes}, which the device's memory does not hold "
                "beside weights and graphs: lower it"
            ) from error
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        register_nixl_memory(self._memory)
        if self._stream:
            set_nixl_cuda_stream(self._stream)  # otherwise each put waits for the whole device
        self._metrics = metrics
        self._allocator = Allocator(size_bytes)
        self._lock = Lock()
        # Filled by finalizers, which may run anywhere: also in a thread that has the lock.
        self._given: deque[int] = deque()
        metrics.nixl_bytes.set_function(self._taken_bytes)

    def put(self, rows: Tensor, dtype: torch.dtype) -> SharedBytes | None:
        """A copy in a dtype, to be referred to. None: there is no room now.

        rows: [tokens, width] on this device, complete.
        """
        size = rows.numel() * dtype.itemsize
        with self._lock, torch.cuda.stream(self._stream) if self._stream else nullcontext():
            self._take_back()
            offset = self._allocator.take(size)
            if offset is None:
                self._metrics.nixl_full.inc()
                return None
            block = self._memory[offset : offset + size]
            weakref.finalize(block, self._given.append, offset)
            block.view(dtype).view(rows.shape).copy_(rows)
            summed = total(block)  # waits for the copy
            remote = RemoteBytes(ray.put(block, _tensor_transport="nixl"), size, summed)
        self._metrics.nixl_items.inc()
        # In an object of its own: whoever hands a direct transport reference on keeps what Ray
        # knows of it for ever (ray-project/ray#57962), whoever hands this one on does not.
        return SharedBytes(ray.put([remote]), size)

    def _taken_bytes(self) -> float:
        with self._lock:
            self._take_back()
            return self._allocator.taken_bytes

    def _take_back(self) -> None:
        while self._given:
            self._allocator.give_back(self._given.popleft())


def total(block: Tensor) -> int:
    """The sum of the 64-bit words of uint8 bytes [n], modulo 2 ** 64, and of the last few bytes.

    In place and as fast as memory is read. Other rows, or what is left of them, have another one.
    """
    whole = len(block) // WORD_BYTES * WORD_BYTES
    words = block[:whole].view(torch.int64).sum()
    return int(words.item()) + int(block[whole:].sum(dtype=torch.int64).item())


def check_transport(transport: Transport) -> None:
    """Raises ConfigError where it takes a package that is not installed."""
    if transport == "nixl" and find_spec("nixl") is None:
        raise ConfigError(
            "encoder.transport is nixl, but the package nixl is not installed here: "
            "pip install 'encoder-service[nixl]' on every node, or set it to shared_memory"
        )
