"""Row memory: host memory of an encoder, from which it lends rows to routers on its node, which
read them in place.

Each loan has a slot, which is a byte in the header of the shared memory. The lender marks it, the
borrower changes the mark when it hears of the loan, and clears it once it no longer refers to the
rows. So a loan does not end because a connection broke, and giving rows back takes one write, which
a finalizer may do: it must neither wait nor lock. When a process ends, so do its loans.
"""

from __future__ import annotations

import os
import select
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock

import numpy as np

from actors.allocator import Allocator
from actors.rows.protocol import MemoryHandle
from actors.rows.shared import make_shared, open_shared
from actors.types import Bytes

LENT, TAKEN, FREE = 1, 2, 0


@dataclass(frozen=True, slots=True)
class Loan:
    """Rows that a process may read until it clears the slot."""

    slot: int
    offset: int
    size_bytes: int


class Lender:
    """Allocates blocks of row memory, and lends what is in them. Thread-safe.

    A block is free once nobody refers to it, neither here nor in a process that borrowed from it.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError, also if the system cannot tell when a process ends."""
        os.close(os.pidfd_open(os.getpid()))
        self.shared, self.handle = make_shared(size_bytes)
        self._marks = self.shared.header
        self._allocator = Allocator(size_bytes)
        self._slots = list(range(len(self._marks)))
        self._loans: dict[int, tuple[Loan, Bytes, int]] = {}
        """The loan, its rows and the borrower, a process id, of each slot in use."""
        self._processes: dict[int, int] = {}  # descriptor of each process that borrowed
        self._ended = select.poll()
        self._lock = Lock()

    @property
    def taken_bytes(self) -> int:
        with self._lock:
            self._end_loans()
            return self._allocator.taken_bytes

    @property
    def loans(self) -> int:
        with self._lock:
            self._end_loans()
            return len(self._loans)

    def block(self, size_bytes: int) -> Bytes | None:
        """Uninitialised memory, which its views keep too. None: there is no room now."""
        with self._lock:
            offset = self._allocator.take(size_bytes)
            if offset is None:
                self._end_loans()
                offset = self._allocator.take(size_bytes)
        if offset is None:
            return None
        block = self.shared.part(offset, size_bytes)
        weakref.finalize(block, self._allocator.give_back, offset).atexit = False
        return block

    def holds(self, rows: Bytes) -> bool:
        """Whether the array is a part of a block."""
        return self._offset(rows) is not None

    def lend(self, rows: Bytes, process: int) -> Loan | None:
        """Keeps the block of these rows until `process` gives them back or ends. None: they are not
        in a block, all slots are in use, or there is no such process."""
        if (offset := self._offset(rows)) is None:
            return None
        with self._lock:
            self._end_loans()
            if not self._slots or not self._watch(process):
                return None
            loan = Loan(self._slots.pop(), offset, rows.nbytes)
            self._marks[loan.slot] = LENT
            self._loans[loan.slot] = loan, rows, process
        return loan

    def take_back(self, loans: Iterable[Loan]) -> None:
        """Ends those that were not taken. Only for loans of which nobody can hear any more."""
        with self._lock:
            for loan in loans:
                known = self._loans.get(loan.slot)
                if known and known[0] is loan and self._marks[loan.slot] == LENT:
                    self._marks[loan.slot] = FREE

    def _offset(self, rows: Bytes) -> int | None:
        offset = rows.ctypes.data - self.shared.memory.ctypes.data
        inside = offset >= 0 and offset + rows.nbytes <= len(self.shared.memory)
        return offset if inside and rows.flags.c_contiguous else None

    def _watch(self, process: int) -> bool:
        """Makes `_end_loans` notice the end of a process. False: it cannot be watched."""
        if process not in self._processes:
            try:
                self._processes[process] = os.pidfd_open(process)
            except OSError:
                return False
            self._ended.register(self._processes[process], select.POLLIN)
        return True

    def _end_loans(self) -> None:
        ended = {file for file, _ in self._ended.poll(0)}
        gone = {process for process, file in self._processes.items() if file in ended}
        for process in gone:
            file = self._processes.pop(process)
            self._ended.unregister(file)
            os.close(file)
        if not gone and np.count_nonzero(self._marks) == len(self._loans):
            return
        for slot, (*_, process) in list(self._loans.items()):
            if self._marks[slot] == FREE or process in gone:
                del self._loans[slot]
                self._marks[slot] = FREE
                self._slots.append(slot)


class Borrower:
    """The row memory of an encoder, opened in a router."""

    def __init__(self, handle: MemoryHandle) -> None:
        """Raises OSError or ValueError, as for memory of another machine, container or user."""
        self._shared = open_shared(handle, writable=False)
        self._marks = self._shared.header
        self.process = int(os.readlink("/proc/self"))
        """This process, as the lender numbers processes: its memory was found in the same /proc. In
        a PID namespace of its own, `os.getpid` says another number."""

    def rows(self, loan: Loan) -> Bytes:
        """The rows, read-only. They are given back once nobody refers to them."""
        rows = self._shared.part(loan.offset, loan.size_bytes)
        self._marks[loan.slot] = TAKEN
        weakref.finalize(rows, self._give_back, loan.slot).atexit = False
        return rows

    def _give_back(self, slot: int) -> None:
        self._marks[slot] = FREE
