"""Memory from which other processes on the machine copy rows: a GPU's, by CUDA IPC, or shared.

A process that opens it sees all of it, so handles are given only to processes of the same user.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import nullcontext
from threading import Lock
from typing import Protocol, Self

import torch
from torch import Tensor

from actors.allocator import Allocator
from actors.kernels import checked
from actors.rows.protocol import MemoryHandle
from actors.rows.shared import make_shared, open_shared


class BlockMemory:
    """Allocates blocks of a piece of memory. A block is free again once nobody refers to its
    tensor; views of it do not count. Thread-safe."""

    def __init__(
        self, memory: Tensor, handle: MemoryHandle | None = None, header: Tensor | None = None
    ) -> None:
        """`memory`: uint8. `handle`: None if no other process can open it."""
        self.memory = memory
        self.handle = handle
        self.header = header
        self._allocator = Allocator(len(memory))
        self._lock = Lock()
        self._stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None
        # Copies from the host take milliseconds; those of encoded items do not wait for them.
        self._host_stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None

    @classmethod
    def on_gpu(cls, size_bytes: int, device: torch.device) -> Self:
        """Raises torch.OutOfMemoryError."""
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        return cls(memory, cuda_handle(memory))

    @classmethod
    def shared(cls, size_bytes: int) -> Self:
        """Shared host memory, allocated page by page as it is used. Raises OSError."""
        shared, handle = make_shared(size_bytes)
        return cls(torch.from_numpy(shared.memory), handle, torch.from_numpy(shared.header))

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            return self._allocator.taken_bytes

    def take(self, size_bytes: int) -> Tensor | None:
        """A block, uint8 [size_bytes]. None: there is no room now."""
        with self._lock:
            offset = self._allocator.take(size_bytes)
        if offset is None:
            return None
        block = self.memory[offset : offset + size_bytes]
        weakref.finalize(block, self._allocator.give_back, offset).atexit = False
        return block

    def offset(self, block: Tensor) -> int:
        return block.data_ptr() - self.memory.data_ptr()

    def fill(self, block: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Copies rows [tokens, width] into a block, converted to `dtype`, and returns the completed
        copy. The rows must be complete, and on the same device or the host."""
        copy = block.view(dtype).view(rows.shape)
        stream = self._stream if rows.is_cuda else self._host_stream
        with torch.cuda.stream(stream) if stream else nullcontext():
            copy.copy_(rows)
        if stream:
            stream.synchronize()
        return copy


class OpenedMemory(Protocol):
    """Memory of another process, opened in this one."""

    def copy(self, offset: int, out: Tensor) -> None:
        """Starts copying bytes to a contiguous tensor, on its device's current stream."""

    def close(self) -> None:
        """No copy may be under way."""


class OpenedShared(OpenedMemory):
    def __init__(self, handle: MemoryHandle) -> None:
        """Raises OSError, ValueError."""
        shared = open_shared(handle, writable=True)
        self.header, self.memory = map(torch.from_numpy, (shared.header, shared.memory))

    def pin(self, device: torch.device) -> None:
        """Makes copies to the device asynchronous. Takes a second for gigabytes. Raises
        RuntimeError."""
        pin(self.memory.data_ptr(), self.memory.nbytes, device)

    def copy(self, offset: int, out: Tensor) -> None:
        rows = self.memory[offset : offset + out.nbytes].view(out.dtype).view(out.shape)
        out.copy_(rows, non_blocking=True)

    def close(self) -> None:
        """Nothing to do: the memory is unmapped with its last tensor."""


class OpenedCuda(OpenedMemory):
    """GPU memory of another process, mapped for this process's device: the same GPU, or a peer."""

    def __init__(self, handle: MemoryHandle, device: torch.device) -> None:
        """Raises RuntimeError, ImportError."""
        from cuda.bindings import runtime

        self.device = device
        checked(runtime.cudaSetDevice(device.index))
        ipc = runtime.cudaIpcMemHandle_t()
        where = bytes.fromhex(handle.where)
        ctypes.memmove(int(ipc.getPtr()), where, len(where))
        flags = runtime.cudaIpcMemLazyEnablePeerAccess
        (base,) = checked(runtime.cudaIpcOpenMemHandle(ipc, flags))
        self.base = int(base)
        self.offset = handle.offset

    def copy(self, offset: int, out: Tensor) -> None:
        from cuda.bindings import runtime

        checked(runtime.cudaSetDevice(self.device.index))
        source = self.base + self.offset + offset
        stream = torch.cuda.current_stream(self.device).cuda_stream
        kind = runtime.cudaMemcpyKind.cudaMemcpyDefault
        checked(runtime.cudaMemcpyAsync(out.data_ptr(), source, out.nbytes, kind, stream))

    def close(self) -> None:
        from cuda.bindings import runtime

        torch.cuda.synchronize(self.device)
        checked(runtime.cudaIpcCloseMemHandle(self.base))


def open_memory(handle: MemoryHandle, device: torch.device) -> OpenedMemory:
    """Opens memory for copies to `device`. Raises OSError, ValueError, RuntimeError or ImportError
    if this process cannot, because it is on another machine, of another user, or on a GPU without
    peer access."""
    if handle.kind == "shared":
        return OpenedShared(handle)
    if device.type != "cuda":
        raise RuntimeError(f"memory of a GPU cannot be opened for {device}")
    return OpenedCuda(handle, device)


def pin(address: int, size_bytes: int, device: torch.device) -> None:
    """Lets the device read and write host memory asynchronously. Raises RuntimeError or
    ImportError."""
    from cuda.bindings import runtime

    checked(runtime.cudaSetDevice(device.index))
    checked(runtime.cudaHostRegister(address, size_bytes, 0))


def cuda_handle(memory: Tensor) -> MemoryHandle | None:
    """A handle for GPU memory. None: CUDA does not share it, such as memory of torch's expandable
    segments."""
    try:
        from cuda.bindings import driver, runtime

        checked(runtime.cudaSetDevice(memory.device.index))
        # The handle is for the whole allocation, of which this memory may be a part.
        base, _ = checked(driver.cuMemGetAddressRange(memory.data_ptr()))
        (ipc,) = checked(runtime.cudaIpcGetMemHandle(memory.data_ptr()))
    except (ImportError, RuntimeError):
        return None
    where = ctypes.string_at(int(ipc.getPtr()), runtime.CUDA_IPC_HANDLE_SIZE).hex()
    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    offset = memory.data_ptr() - int(base)
    return MemoryHandle("cuda", where, offset, memory.nbytes, uuid)
