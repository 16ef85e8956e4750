"""Shared memory between a replica and its decoding processes: files in, patches out, in place.

An anonymous memfd: it has no name in the file system and disappears with its last process. A block
is freed when the last array that refers to it is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod

import numpy as np

from actors.allocator import Allocator
from actors.media.patchify import Shape
from actors.types import Item, ItemPlan, Media

MARK_BYTES, BEGUN = 1, 1
"""The last byte of a block is set when a process begins the item. Only an item that was begun may
be the one that ended its process."""


class Slab:
    """One thread at a time may take blocks; they may be given back anywhere."""

    def __init__(self, size_bytes: int) -> None:
        self.file = os.memfd_create("patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.file, size_bytes)
        # A process that truncated the file would end the replica with SIGBUS.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals)
        self.bytes = memoryview(mmap.mmap(self.file, size_bytes))
        self._allocator = Allocator(size_bytes)
        self._returned: deque[int] = deque()

    def fits(self, size_bytes: int) -> bool:
        return self._allocator.fits(size_bytes)

    def take(self, size_bytes: int) -> int | None:
        """The offset of a block; None if there is no room now."""
        while self._returned:
            self._allocator.give_back(self._returned.popleft())
        return self._allocator.take(size_bytes)

    def give_back(self, offset: int) -> None:
        """Frees a block that no process uses any more.

        Takes no lock, because finalizers call it: the garbage collector may run them in a thread
        that holds any lock.
        """
        self._returned.append(offset)

    def write(self, offset: int, size_bytes: int, media: Media) -> None:
        """Writes an item's files, one after the other, and clears the mark that it was begun."""
        self.bytes[offset + size_bytes - MARK_BYTES] = not BEGUN
        for data in files_of(media):
            self.bytes[offset : offset + len(data)] = data
            offset += len(data)

    def begun(self, offset: int, size_bytes: int) -> bool:
        return self.bytes[offset + size_bytes - MARK_BYTES] == BEGUN

    def item(self, offset: int, plan: ItemPlan, shape: Shape) -> Item:
        """The item whose patches a process left in this block, which is freed with its arrays."""
        # A view of a view refers to the array that owns the memory, which is this one.
        whole = np.frombuffer(self.bytes, np.uint8, prod(shape), offset)
        weakref.finalize(whole, self.give_back, offset).atexit = False
        patches, *later = whole.reshape(shape)
        return Item(plan, patches, later[0] if later else None)

    def close(self) -> None:
        """No more processes can open it. Items that refer to it stay valid."""
        os.close(self.file)


def size_of(media: Media, shape: Shape) -> int:
    """The bytes that an item takes: its files, then in their place its patches, and the mark."""
    return max(sum(map(len, files_of(media))), prod(shape)) + MARK_BYTES


def files_of(media: Media) -> Sequence[bytes]:
    return media.data, *media.frames
