"""A RowsServer over rows in a dictionary, as an encoder would have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_urlsafe

import torch
from torch import Tensor

from actors.errors import EmbeddingLost
from actors.rows.memory import BlockMemory
from actors.rows.protocol import HeldRows, RowsPlace
from actors.rows.server import RowsServer


@dataclass
class Dictionary:
    """A server.RowStore. Only the server's threads change `holds`."""

    memory: BlockMemory | None = None
    deepstack: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)
    holds: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)

    def keep(self, rows: Tensor) -> str:
        """Returns the name of rows [tokens, width], which get a block if there is memory."""
        name = token_urlsafe(24)
        self.tensors[name] = rows.cpu()
        if self.memory and (block := self.memory.take(rows.nbytes)) is not None:
            self.memory.fill(block, rows, rows.dtype)
            self.blocks[name] = block
        return name

    def hold(self, name: str) -> HeldRows | None:
        rows = self.tensors.get(name)
        if rows is None:
            return None
        self.holds[name] += 1
        dtype = str(rows.dtype).removeprefix("torch.")
        handle, offset = None, 0
        if self.memory and name in self.blocks:
            handle, offset = self.memory.handle, self.memory.offset(self.blocks[name])
        tokens, width = rows.shape
        return HeldRows((tokens, width), dtype, "a model", self.deepstack, handle, offset)

    def free(self, name: str) -> None:
        self.holds[name] -= 1

    def rows(self, name: str) -> memoryview:
        if name in self.lost:
            raise EmbeddingLost("the rows were not written")
        return self.tensors[name].view(torch.uint8).flatten().numpy().data

    def take(self, name: str) -> memoryview | None:
        if "." not in name or name not in self.tensors:
            return None
        rows = self.rows(name)
        self.holds[name] += 1
        return rows

    def release(self, name: str) -> None:
        del self.tensors[name]

    @property
    def held(self) -> int:
        return self.holds.total()


@contextmanager
def serving(store: Dictionary, folder: Path) -> Iterator[tuple[RowsServer, RowsPlace]]:
    server = RowsServer(store)
    place = server.start(folder / "rows.sock", "127.0.0.1")
    yield server, place
    server.stop()
