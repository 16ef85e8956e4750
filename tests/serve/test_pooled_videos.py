"""Videos with fewer rows than computed tokens, end to end, beside images: transformers' rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.families.llava_onevision.tower import OnevisionTower
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.models.tower import Tower
from actors.options import ModelOptions
from actors.spec.video import retention_mask
from actors.types import Clip, Item, Size
from encoder_service import Client, Frames
from encoder_service.client import Source
from tests.checkpoints import KIMI_K25, write
from tests.checkpoints_clip import write_onevision
from tests.images import item_of, jpeg
from tests.parity import conftest, test_video
from tests.parity.table import TOLERANCE
from tests.parity.test_llava_onevision import Pair, image_rows, video_rows
from tests.serve.conftest import Cluster
from tests.serve.deployed import deployed
from tests.videos import patchify_video

pytestmark = pytest.mark.extended

IMAGES = [
    jpeg(120, 80, name) for name in ("coffee.png", "rocket.jpg", "chelsea.png", "astronaut.png")
]
SIZE = Size(120, 80)


@contextmanager
def served(folder: Path, cluster: Cluster, budgets: Sequence[int]) -> Iterator[Client]:
    """Runs a replica on the CPU."""
    model = {"id": str(folder), "dtype": "float32"}
    with (
        deployed("pooled", model, graphs={"token_budgets": budgets}),
        Client(cluster.http) as client,
    ):
        yield client


def video_of(tower: Tower, count: int) -> Item:
    """The first images as frames of a video."""
    frames = [decode(one) for one in IMAGES[:count]]
    return patchify_video(tower.spec, Clip(SIZE, count, 1.0, chosen=True), frames)


def test_llava_onevision(cluster: Cluster, tmp_path: Path) -> None:
    model = write_onevision(tmp_path)
    tower = load(ModelOptions(id=str(tmp_path), dtype="float32"), torch.device("cpu"))
    assert isinstance(tower, OnevisionTower)
    pair, tile = Pair(model, tower), tower.sizing.tile_tokens
    sources: list[Source] = [IMAGES[0], Frames(IMAGES, fps=1)]
    with served(tmp_path, cluster, (tile, 3 * tile, 10 * tile)) as client:
        image, film = client.encode(sources, dtype="float32")
        _, pruned = client.encode(sources, dtype="float32", evs_rate=0.5)
    item = item_of(patchifier_of(tower.spec), decode(IMAGES[0]))
    assert (image.torch() - image_rows(pair, item, SIZE)).abs().max() < TOLERANCE
    item = video_of(tower, 4)
    assert film.tokens == item.plan.tokens == 4 * 9 + 1
    assert (film.torch() - video_rows(pair, item)).abs().max() < TOLERANCE
    mask = retention_mask(film.numpy(), item.plan, 0.5)
    assert np.abs(pruned.numpy() - film.numpy()[mask]).max() < TOLERANCE
    assert pruned.tokens == sum(pruned.frame_tokens) + 1  # the newline


def test_kimi_k25(cluster: Cluster, tmp_path: Path) -> None:
    reference = write(tmp_path, KIMI_K25)
    tower = load(ModelOptions(id=str(tmp_path), dtype="float32"), torch.device("cpu"))
    pair = conftest.Pair(reference, tower, tmp_path, KIMI_K25)
    with served(tmp_path, cluster, (64, 256)) as client:
        film, short = client.encode([Frames(IMAGES, fps=1), Frames(IMAGES[:1])], dtype="float32")
    assert film.grid_thw[0] == short.grid_thw[0] == 1
    for embedding, count in ((film, 4), (short, 1)):
        exact = test_video.group_rows(pair, video_of(tower, count))
        assert embedding.torch().shape == exact.shape
        assert (embedding.torch() - exact).abs().max() < TOLERANCE
