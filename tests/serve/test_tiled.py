"""Tile families, end to end: a checkpoint on disk, JPEG bytes in, transformers' rows out."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from actors.media.image import decode
from actors.media.patchify import patchifier_of
from encoder_service import Client, Text
from tests.checkpoints_clip import CAPTIONS, units_of, write_clip_texts
from tests.images import PHOTOGRAPHS, jpeg, photograph
from tests.parity.table import TOLERANCE
from tests.parity.test_tiled import CHECKPOINTS, Pair, loaded, theirs
from tests.serve.conftest import Cluster
from tests.serve.deployed import deployed

pytestmark = pytest.mark.extended


def test_rows_of_photographs(cluster: Cluster, tmp_path: Path) -> None:
    write, features = CHECKPOINTS["internvl_chat-300M"]
    pair = Pair(write(tmp_path), features, loaded(tmp_path, "float32"), tmp_path)
    files = [jpeg(84, 60), *map(photograph, PHOTOGRAPHS)]
    model = {"id": str(tmp_path), "dtype": "float32"}
    with deployed("tiled", model), Client(cluster.http) as client:
        embeddings = client.encode(files, dtype="float32")
    for embedding, file in zip(embeddings, files, strict=True):
        plan, patches = patchifier_of(pair.tower.spec).patchify(decode(file))
        assert (embedding.grid_thw, embedding.source) == (plan.grid_thw, "graph")
        exact = theirs(pair, patches)
        assert (embedding.torch() - exact).abs().max() < TOLERANCE


def test_vectors_of_photographs_and_texts(cluster: Cluster, tmp_path: Path) -> None:
    model = write_clip_texts(tmp_path)
    served = {"id": str(tmp_path), "dtype": "float32", "output": "vector"}
    sources: list[bytes | Text] = [*map(photograph, PHOTOGRAPHS), *map(Text, CAPTIONS)]
    with deployed("vectors", served, preprocess={"processes": 1}), Client(cluster.http) as client:
        vectors = client.embed(sources)
        again = client.embed(sources[::-1])
        page = httpx.get(f"{cluster.http}/metrics").text
    assert np.allclose(vectors, again[::-1], atol=1e-6)
    _, texts = units_of(model, tmp_path, PHOTOGRAPHS)
    assert np.abs(vectors[len(PHOTOGRAPHS) :] - texts).max() < TOLERANCE
    assert 'encoder_requests_total{api="embeddings",code="200"' in page
    hits = [line for line in page.splitlines() if line.startswith("encoder_graph_hits_total")]
    for path in ("default", "text"):
        assert any(f'path="{path}"' in line for line in hits)
