"""`bench dataplane`: data arrives in every way, and the table has a row for each."""

from __future__ import annotations

import pytest
from rich.console import Console

from encoder_service.bench.dataplane import HITS, WAYS, measure, table
from tests.serve.conftest import Cluster

pytestmark = pytest.mark.extended


def test_every_way_is_measured(cluster: Cluster) -> None:
    report = measure(size_bytes=2 * 2**20, repeats=1)
    for way in WAYS:
        here, was_read = report[way]
        assert 0 < here < was_read
    in_source, here = report["hits"]
    assert 0 < in_source < here
    console = Console(width=120, record=True)
    console.print(table(report))
    shown = console.export_text()
    assert all(name in shown for name in (*WAYS.values(), f"{HITS} cache hits"))
