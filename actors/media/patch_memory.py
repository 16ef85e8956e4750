"""Memory that an actor shares with the processes that decode for it: files, and then patches.

It has no name in the file system and ends with the last process that has it open: nothing is left
behind, however they end. An item's place is free again when nobody holds its arrays any more.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from math import prod

import numpy as np

from actors.media.arena import Arena, Place
from actors.media.decode_messages import BEGUN, MARK_BYTES, files_of
from actors.media.patchify import Shape
from actors.types import Item, ItemPlan, Media


class PatchMemory:
    """Places are taken in one thread, and come back from any, even from the garbage collector."""

    def __init__(self, size_bytes: int, wake: Callable[[], None]) -> None:
        """`wake`: called in any thread when there may be room, after `take` had found none."""
        self.file = os.memfd_create("patches", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.file, size_bytes)
        # Who reads beyond the end of a file that another process has cut off is ended by SIGBUS.
        size_stays = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, size_stays)
        self._bytes = memoryview(mmap.mmap(self.file, size_bytes))
        self._arena = Arena(size_bytes)
        self._returned: deque[Place] = deque()
        self._wanted = False
        self._wake = wake

    def holds(self, size_bytes: int) -> bool:
        """Whether it has so many, free or not."""
        return self._arena.holds(size_bytes)

    def take(self, size_bytes: int) -> Place | None:
        """A place. None: not now."""
        self._wanted = False
        if place := self._taken(size_bytes):
            return place
        self._wanted = True  # and once more: what came back before is told to nobody
        return self._taken(size_bytes)

    def give_back(self, place: Place) -> None:
        """Nobody reads or writes it any more. Takes no lock: it may be called anywhere."""
        self._returned.append(place)
        if self._wanted:
            self._wake()

    def write(self, place: Place, media: Media) -> None:
        """The bytes of an item that nobody has begun, one file after the other."""
        self._bytes[place.end - MARK_BYTES] = not BEGUN
        start = place.start
        for data in files_of(media):
            self._bytes[start : start + len(data)] = data
            start += len(data)

    def begun(self, place: Place) -> bool:
        """Whether a process has begun what was written there."""
        return self._bytes[place.end - MARK_BYTES] == BEGUN

    def item(self, place: Place, plan: ItemPlan, shape: Shape) -> Item:
        """What was made there. It gives the place back in the end."""
        # Views of views hold what owns the memory: here this array, not that of another item.
        whole = np.frombuffer(self._bytes, np.uint8, prod(shape), place.start)
        weakref.finalize(whole, self.give_back, place).atexit = False
        patches, *later = whole.reshape(shape)
        return Item(plan, patches, *later)

    def close(self) -> None:
        """No process can be given it any more; items that there are stay."""
        os.close(self.file)

    def _taken(self, size_bytes: int) -> Place | None:
        while self._returned:
            self._arena.give_back(self._returned.popleft())
        return self._arena.take(size_bytes)
