"""`encoder-service bench preprocess`, on a small model."""

from __future__ import annotations

import pytest
from rich.console import Console

from actors.options import (
    ActorOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from encoder_service.bench.decoding import preprocess, table
from tests.images import jpeg

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")


@pytest.mark.extended
def test_it_measures_threads_and_processes() -> None:
    cpu = EncoderOptions(device="cpu", num_gpus=0)
    graphs = GraphOptions(token_budgets=(64, 256), max_frames_per_batch=0)
    options = ActorOptions(model=MODEL, encoder=cpu, graphs=graphs)
    ways = [PreprocessOptions(threads=1), PreprocessOptions(processes=1)]
    found = preprocess(options, {"64x64": [jpeg(64, 64)]}, ways, 0.05, Console())
    assert [row["way"] for row in found] == ["1 threads", "1 processes"]
    for row in found:
        assert (row["size"], row["patches"]) == ("64x64", 16)
        rates = row["images_per_second"], row["encoded_images_per_second"]
        assert min(*rates, row["cpu_ms"], row["alone_ms"], row["switches"]) > 0
    assert table(found, "qwen3vl-tiny").row_count == 2
