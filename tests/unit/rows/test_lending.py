"""Rows that are lent to another process: real processes, real shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import IO

import numpy as np
import pytest
import torch

from actors.rows.lending import Borrower, Lender, Loan
from tests.waiting import until

SIZE = 2**20
ME = os.getpid()

BORROWER = """
import json, sys
from actors.rows.lending import Borrower, Loan
from actors.rows.protocol import MemoryHandle
assert "ray" not in sys.modules and "torch" not in sys.modules
borrower = Borrower(MemoryHandle(**json.loads(sys.argv[1])))
print(borrower.process, flush=True)
kept = []
for line in sys.stdin:
    if line == "drop\\n":
        kept.clear()
    else:
        kept.append(borrower.rows(Loan(**json.loads(line))))
    print(sum(int(one.sum()) for one in kept), flush=True)
"""


class Process:
    """A process that borrows what it is told, and says the sum of the bytes that it has."""

    def __init__(self, lender: Lender, *within: str) -> None:
        command = [*within, sys.executable, "-c", BORROWER, json.dumps(asdict(lender.handle))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdin
        assert self.process.stdout
        self.input: IO[str] = self.process.stdin
        self.output: IO[str] = self.process.stdout
        self.pid = int(self.output.readline())

    def say(self, line: str) -> int:
        print(line, file=self.input, flush=True)
        return int(self.output.readline())

    def borrow(self, loan: Loan | None) -> int:
        assert loan
        return self.say(json.dumps(asdict(loan)))


@contextmanager
def process(lender: Lender, *within: str) -> Iterator[Process]:
    made = Process(lender, *within)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.communicate()


def rows(lender: Lender, size_bytes: int, value: int) -> np.ndarray:
    block = lender.block(size_bytes)
    assert block is not None
    block[:] = value
    return block


def test_another_process_reads_rows_in_place_and_gives_them_back() -> None:
    lender = Lender(SIZE)
    with process(lender) as other:
        first, second = rows(lender, 1000, 1), rows(lender, 500, 2)
        assert other.borrow(lender.lend(first, other.process.pid)) == 1000
        assert other.borrow(lender.lend(second[100:200], other.process.pid)) == 1200
        del first, second
        assert lender.loans == 2
        assert lender.taken_bytes >= 1500
        assert other.say("drop") == 0
        assert (lender.loans, lender.taken_bytes) == (0, 0)


def test_the_loans_of_a_process_end_with_it() -> None:
    lender = Lender(SIZE)
    with process(lender) as other, process(lender) as lives:
        for one in (other, lives):
            assert one.borrow(lender.lend(rows(lender, 10, 3), one.process.pid)) == 30
        other.process.kill()
        until(lambda: lender.loans == 1)
        assert lives.say("drop") == 0
        assert lender.loans == 0
    assert lender.lend(rows(lender, 10, 3), other.process.pid) is None, "it has ended"


def test_a_process_in_a_namespace_of_its_own_is_known_by_its_number_here() -> None:
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespace may be made here")
    lender = Lender(SIZE)
    with process(lender, *apart) as other:
        assert Path(f"/proc/{other.pid}/cmdline").read_bytes().startswith(sys.executable.encode())
        assert other.borrow(lender.lend(rows(lender, 10, 3), other.pid)) == 30
        other.process.kill()
        until(lambda: lender.loans == 0)


def test_only_what_is_not_taken_is_taken_back() -> None:
    lender = Lender(SIZE)
    borrower = Borrower(lender.handle)
    loans = [lender.lend(rows(lender, 100, value), ME) for value in range(3)]
    first, second, third = (one for one in loans if one)
    found = borrower.rows(second)
    lender.take_back([first, second])
    assert lender.loans == 2
    assert set(found) == {1}
    again = lender.lend(rows(lender, 100, 4), ME)
    assert again
    assert again.slot == first.slot
    lender.take_back([first])
    assert lender.loans == 3, "the slot has another loan"
    del found
    lender.take_back([third, again])
    assert lender.loans == 0


def test_nothing_is_lent_where_the_end_of_a_process_cannot_be_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(process: int) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    with pytest.raises(PermissionError):
        Lender(SIZE)


def test_borrowed_rows_are_kept_by_their_views_and_cannot_be_written_to() -> None:
    lender = Lender(SIZE)
    borrower = Borrower(lender.handle)
    loan = lender.lend(rows(lender, 100, 5), ME)
    assert loan
    found = borrower.rows(loan)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    views = [found.data[3:], np.asarray(found)[1:], np.frombuffer(found, np.uint8)[7:]]
    del found
    while views:
        assert lender.loans == 1
        assert set(views[-1]) == {5}
        views.pop()
    assert lender.loans == 0


def test_blocks_are_kept_by_their_views() -> None:
    lender = Lender(SIZE)
    tensor = torch.from_numpy(rows(lender, 128, 1)).view(torch.bfloat16).view(8, 8)[2:4]
    array = tensor.view(torch.uint8).numpy().reshape(-1)
    assert lender.holds(array)
    del tensor
    assert lender.taken_bytes == 256
    del array
    assert lender.taken_bytes == 0


def test_what_cannot_be_lent() -> None:
    lender = Lender(SIZE)
    assert lender.lend(np.zeros(10, np.uint8), ME) is None, "not a block's"
    assert lender.lend(rows(lender, 10, 1), 2**22 + 1) is None, "no such process"
    assert lender.block(SIZE + 1) is None
    one = rows(lender, 10, 1)
    loans = [lender.lend(one, ME) for _ in range(5000)]
    assert 0 < sum(loan is not None for loan in loans) < 5000, "one slot each"
    borrower = Borrower(lender.handle)
    for loan in loans:
        if loan:
            borrower.rows(loan)  # and gives it back
    assert lender.loans == 0
    assert lender.lend(one, ME)


def test_no_block_is_used_again_while_it_is_lent() -> None:
    """Two threads lend, as the engine's and the event loop's do, and give back in any order."""
    lender = Lender(SIZE)
    borrower = Borrower(lender.handle)
    wrong: list[int] = []

    def work(seed: int) -> None:
        random, borrowed = Random(seed), list[tuple[int, np.ndarray]]()
        for turn in range(400):
            value = (seed * 100 + turn) % 256
            block = lender.block(random.randrange(1, 60_000))
            if block is not None:
                block[:] = value
                loan = lender.lend(block, ME)
                del block
                assert loan
                borrowed.append((value, borrower.rows(loan)))
            while len(borrowed) > (0 if turn == 399 else random.randrange(12)):
                was, found = borrowed.pop(random.randrange(len(borrowed)))
                wrong.extend([was] * bool((found != was).any()))
                del found

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (lender.loans, lender.taken_bytes) == (0, 0)
