"""End to end: a checkpoint on disk, JPEG bytes over HTTP, embeddings equal to transformers'."""

from __future__ import annotations

from io import BytesIO

import httpx
import pytest
import torch
from PIL import Image

from actors.media.image import decode
from actors.media.patchify import patchifier_of
from encoder_service import Client
from tests.checkpoints import PROCESSOR
from tests.images import PHOTOGRAPHS, jpeg, photograph
from tests.parity.conftest import Pair
from tests.parity.table import TOLERANCE
from tests.parity.test_tower import theirs
from tests.serve.checkpoint.conftest import BUDGETS
from tests.serve.conftest import Cluster

SIDES = (40, 64, 96, 130, 200, 256, 320, 400, 480)
"""The largest gives 225 tokens. Photographs of more than 256 tokens run eagerly."""


def expected(pair: Pair, files: list[bytes]) -> list[torch.Tensor]:
    """transformers' rows of each file, after our preprocessing."""
    plans, patches = zip(
        *(patchifier_of(pair.tower.spec).patchify(decode(file)) for file in files), strict=True
    )
    rows = theirs(pair, plans, torch.cat(patches))
    return list(rows.split([plan.tokens for plan in plans]))


def assert_equal(pair: Pair, url: str, files: list[bytes]) -> list[str]:
    """Encodes all files in one request and compares the rows. Returns the sources."""
    with Client(url) as client:
        embeddings = client.encode(files, dtype="float32")
    for embedding, rows in zip(embeddings, expected(pair, files), strict=True):
        difference = (embedding.torch() - rows).abs().max()
        assert difference < TOLERANCE, (embedding.index, embedding.grid_thw)
    return [embedding.source for embedding in embeddings]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 20])
def test_mixed_sizes_packed_together(served: Pair, cluster: Cluster, count: int) -> None:
    files = [
        jpeg(SIDES[(count + i) % len(SIDES)], SIDES[(count + 4 * i) % len(SIDES)])
        for i in range(count)
    ]
    assert set(assert_equal(served, cluster.http, files)) == {"graph"}


def test_photographs_through_graphs_and_beyond_them(served: Pair, cluster: Cluster) -> None:
    files = [jpeg(100, 100), *(photograph(name) for name in PHOTOGRAPHS)]
    sources = assert_equal(served, cluster.http, files)
    tokens = [len(rows) for rows in expected(served, files)]
    assert sources == ["eager" if each > BUDGETS[-1] else "graph" for each in tokens]
    assert set(sources) == {"eager", "graph"}


def test_every_budget_was_replayed(served: Pair, cluster: Cluster) -> None:
    for side in (64, 200, 400):  # 4, 36 and 144 tokens: one size per budget
        assert_equal(served, cluster.http, [jpeg(side, side)])
    page = httpx.get(f"{cluster.http}/metrics").text
    for budget in BUDGETS:
        assert f'budget="{budget}"' in page
    assert 'reason="beyond_budgets"' in page


def test_from_jpeg_bytes_the_direction_is_that_of_transformers(
    served: Pair, cluster: Cluster
) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(**PROCESSOR)
    file = jpeg(500, 330)
    inputs = processor(Image.open(BytesIO(file)), return_tensors="pt")
    with torch.no_grad():
        features = served.reference.model.get_image_features(**inputs, return_dict=True)
    columns = [features.pooler_output, *features.deepstack_features]
    rows = torch.cat([torch.cat(list(items)) for items in columns], dim=1)
    with Client(cluster.http) as client:
        (embedding,) = client.encode([file], dtype="float32")
    ours = embedding.torch()
    assert torch.cosine_similarity(ours, rows, dim=1).min() > 0.9999
