"""DeepSeek-OCR, end to end: JPEG bytes in, transformers' rows out, both paths in the metrics."""

from __future__ import annotations

from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.media.image import decode
from actors.media.patchify import patchifier_of
from encoder_service import Client
from tests.checkpoints_ocr import write_deepseek_ocr
from tests.images import PHOTOGRAPHS, item_of, jpeg, photograph
from tests.parity.table import TOLERANCE
from tests.parity.test_deepseek_ocr import Pair, loaded, theirs
from tests.serve.conftest import Cluster
from tests.serve.deployed import deployed

pytestmark = pytest.mark.extended


def test_rows_of_photographs(cluster: Cluster, tmp_path: Path) -> None:
    pair = Pair(write_deepseek_ocr(tmp_path), loaded(tmp_path, "float32"), tmp_path)
    model = {"id": str(tmp_path), "dtype": "float32"}
    budgets = {"global_token_budgets": [20, 60], "local_token_budgets": [0, 36, 81]}
    with deployed("ocr", model, graphs=budgets):
        files = [jpeg(180, 100), *map(photograph, PHOTOGRAPHS)]
        with Client(cluster.http) as client:
            embeddings = client.encode(files, dtype="float32")
        page = metrics(cluster, hits=len(files) + len(PHOTOGRAPHS))
        shown = httpx.get(f"{cluster.http}/v1/model", timeout=30).json()["graphs"]
    for embedding, file in zip(embeddings, files, strict=True):
        item = item_of(patchifier_of(pair.tower.spec), decode(file))
        assert (embedding.grid_thw, embedding.source) == (item.plan.grid_thw, "graph")
        assert (embedding.torch() - theirs(pair, [item])).abs().max() < TOLERANCE
    assert shown["token_budgets"] == {"global": [20, 60], "local": [0, 36, 81]}
    assert total(page, "encoder_graph_hits_total", path="global") == len(files)
    assert total(page, "encoder_graph_hits_total", path="local") == len(PHOTOGRAPHS)
    assert total(page, "encoder_graph_misses_total") == 0
    assert total(page, "encoder_pack_outcomes_total", outcome="graph/graph") > 0


def metrics(cluster: Cluster, hits: int) -> str:
    """The page once it shows so many hits. A busy replica that answers late is missing from it."""
    until = monotonic() + 60
    while True:
        page = httpx.get(f"{cluster.http}/metrics", timeout=30).text
        if total(page, "encoder_graph_hits_total") >= hits or monotonic() > until:
            return page
        sleep(0.2)


def total(page: str, name: str, **labels: str) -> float:
    """Sum over all replicas."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
