"""Rows without a grid inside vLLM: `make vllm`. On the CPU, with small random models."""

from __future__ import annotations

from pathlib import Path

import pytest

from encoder_service import Client
from encoder_service.bench.cluster import cluster, logical_cpus, service
from tests.engines import checkpoint
from tests.engines.servers import vllm
from tests.engines.test_vllm import (
    FILES,
    PYTHON,
    TOLERANCE,
    answer,
    assert_same,
    on_cpu,
    parts,
    shown,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize("family", sorted(checkpoint.WITHOUT_GRIDS))
def test_rows_without_a_grid_are_answered_as_the_images_are(family: str, tmp_path: Path) -> None:
    checkpoint.write_without_grids(tmp_path / "model", family)
    options = on_cpu(tmp_path / "model")
    kinds = ("one image", "two images", "a resized image")
    with (
        cluster(logical_cpus(options), object_store_bytes=400_000_000) as where,
        service(options, where),
        Client(where.http) as client,
    ):
        found = {kind: parts(client.encode(FILES[kind], dtype="float32")) for kind in kinds}
    whole = vllm(PYTHON, tmp_path, "whole", limit_mm_per_prompt={"image": 3})
    with whole as url, vllm(PYTHON, tmp_path, "language", limit_mm_per_prompt={"image": 0}) as rows:
        likely = []
        for kind, embedded in found.items():
            expected = answer(url, [shown(file) for file in FILES[kind]])
            assert_same(answer(rows, embedded), expected)
            likely.append(max(expected.likely[0].values()))
    assert max(likely) - min(likely) > 10 * TOLERANCE, "the images matter"
