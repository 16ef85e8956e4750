"""What needs no NIXL of the transport by it: the sum of an item's bytes, and its absence."""

from __future__ import annotations

import pytest
import torch

from actors.errors import ConfigError
from actors.store import nixl
from actors.store.nixl import check_transport, total
from actors.store.writer import tensor
from actors.types import Embedding, ReceivedBytes, Timings


@pytest.mark.parametrize("size", [8, 24, 1001, 4099])
def test_other_bytes_have_another_total(size: int) -> None:
    block = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator())
    before = total(block)
    assert total(block.clone()) == before
    for place in (0, size // 2, size - 1):
        other = block.clone()
        other[place] += 1
        assert total(other) != before
    assert total(torch.zeros_like(block)) != before


def test_a_package_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    check_transport("shared_memory")
    with pytest.raises(ConfigError, match=r"pip install '.\[nixl\]'"):
        check_transport("nixl")


def test_rows_are_a_view_of_what_was_received() -> None:
    data = torch.arange(24, dtype=torch.float32)
    received = ReceivedBytes(data.view(torch.uint8))
    nothing = Timings(0, 0, 0)
    embedding = Embedding(received, "float32", (4, 6), (1, 2, 2), "graph", nothing)
    assert torch.equal(tensor(embedding), data.view(4, 6))
    assert tensor(embedding).data_ptr() == data.data_ptr()
    assert received.nbytes == data.nbytes
