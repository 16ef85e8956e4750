"""Memory that other processes open: shared memory, in the place of a GPU's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from actors.rows.memory import BlockMemory, open_memory
from actors.rows.protocol import MemoryHandle

CPU = torch.device("cpu")

READER = """
import json, sys, torch
from actors.rows.memory import open_memory
from actors.rows.protocol import MemoryHandle
assert "ray" not in sys.modules
handle = MemoryHandle(**json.loads(sys.argv[1]))
opened = open_memory(handle, torch.device("cpu"))
rows = torch.empty(8, 4, dtype=torch.bfloat16)
opened.copy(int(sys.argv[2]), rows)
print(rows.float().sum().item())
"""


def test_another_process_reads_rows_in_place() -> None:
    memory = BlockMemory.shared(2**20)
    assert memory.handle
    blocks = [memory.take(8 * 4 * 2) for _ in range(3)]
    for number, block in enumerate(blocks):
        assert block is not None
        memory.fill(block, torch.full((8, 4), float(number)), torch.bfloat16)

    handle = json.dumps(asdict(memory.handle))
    block = blocks[2]
    assert block is not None
    command = [sys.executable, "-c", READER, handle, str(memory.offset(block))]
    assert subprocess.run(command, capture_output=True, check=True, text=True).stdout == "64.0\n"


def test_a_block_is_free_once_nobody_refers_to_it() -> None:
    memory = BlockMemory.shared(4096)
    first, second = memory.take(2048), memory.take(2048)
    assert first is not None
    assert second is not None
    assert memory.take(1) is None
    place = memory.offset(second)
    view = second.view(torch.int32)
    del second
    again = memory.take(2048)
    assert again is not None
    assert memory.offset(again) == place, "views do not count"
    assert view.shape == (512,)
    assert memory.taken_bytes == 4096


def test_what_is_not_the_memory_that_was_offered_is_not_opened() -> None:
    memory, other = BlockMemory.shared(4096), BlockMemory.shared(4096)
    assert memory.handle
    assert other.handle
    wrong: list[MemoryHandle] = [
        replace(memory.handle, where="/proc/1/fd/999999"),
        replace(memory.handle, where=other.handle.where),
        replace(memory.handle, check="0" * 64),
        replace(memory.handle, size_bytes=2**30),
        replace(memory.handle, kind="cuda"),
    ]
    for handle in wrong:
        with pytest.raises((OSError, ValueError, RuntimeError)):
            open_memory(handle, CPU)
    where = memory.handle.where
    handle = memory.handle
    del memory
    with pytest.raises(OSError, match=where):
        open_memory(handle, CPU)
