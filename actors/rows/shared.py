"""Memory that processes of one user share: a file without a name, which each of them maps.

It begins with a header of one page. The header begins with a key in hexadecimal, and the processes
may use the rest of it. Knows no torch.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from secrets import token_hex

import numpy as np
import numpy.typing as npt

from actors.rows.protocol import MemoryHandle

HEADER_BYTES, KEY_BYTES = 4096, 64

Bytes = npt.NDArray[np.uint8]  # types.Bytes, which the client's wheel does not have


@dataclass(frozen=True, slots=True)
class SharedMemory:
    header: Bytes  # without the key
    memory: Bytes

    def part(self, offset: int, size_bytes: int) -> Bytes:
        """A part of the memory. Not a slice, because views of a slice refer to the whole memory, so
        finalizers of the slice would run while its views are still in use."""
        return np.frombuffer(self.memory.data, np.uint8, size_bytes, offset)


def make_shared(size_bytes: int) -> tuple[SharedMemory, MemoryHandle]:
    """Memory that is allocated page by page as it is used, and its handle, which is valid as long
    as the memory is referred to. Raises OSError."""
    file = sealed_file("rows", HEADER_BYTES + size_bytes)
    whole = np.frombuffer(mmap.mmap(file, HEADER_BYTES + size_bytes), np.uint8)
    key = token_hex(KEY_BYTES // 2)
    whole[:KEY_BYTES] = np.frombuffer(key.encode(), np.uint8)
    made = SharedMemory(whole[KEY_BYTES:HEADER_BYTES], whole[HEADER_BYTES:])
    weakref.finalize(made.memory, os.close, file)
    where = f"/proc/{os.getpid()}/fd/{file}"
    return made, MemoryHandle("shared", where, HEADER_BYTES, size_bytes, key)


def open_shared(handle: MemoryHandle, *, writable: bool) -> SharedMemory:
    """Maps the memory of another process. `writable`: also the memory, not only its header. Raises
    OSError, ValueError."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    file = os.open(handle.where, os.O_RDWR | os.O_CLOEXEC)
    try:
        header = np.frombuffer(mmap.mmap(file, handle.offset), np.uint8)
        memory = mmap.mmap(file, handle.size_bytes, prot=protection, offset=handle.offset)
    finally:
        os.close(file)
    if header[:KEY_BYTES].tobytes() != handle.check.encode():
        raise OSError(f"{handle.where} is not the offered memory")
    return SharedMemory(header[KEY_BYTES:], np.frombuffer(memory, np.uint8))


def sealed_file(name: str, size_bytes: int) -> int:
    """A memfd, which has no name in the file system and disappears with its last process. Its size
    is sealed, because a process that truncated it would crash the others with SIGBUS."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(file, size_bytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file
