"""Videos, end to end: an MP4 and lists of frames over both protocols, transformers' rows out."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from actors.media import video_file as container
from actors.media.image import decode
from actors.media.patchify import resize
from actors.models.load import load
from actors.options import ModelOptions
from actors.spec.video import retention_mask
from actors.types import Clip, Size
from encoder_service import Client, Embedding, Frames, ServiceError
from encoder_service.client import Source
from tests.checkpoints import write_qwen3vl
from tests.images import jpeg
from tests.parity.conftest import Pair
from tests.parity.table import TOLERANCE
from tests.parity.test_tower import rows_of
from tests.serve.conftest import Cluster
from tests.serve.deployed import deployed
from tests.serve.tiny import GRPC_PORT
from tests.videos import video

pytestmark = pytest.mark.extended

FILE = video(30, size=(160, 96), fps=10)
IMAGES = [jpeg(96, 64, name) for name in ("coffee.png", "rocket.jpg", "chelsea.png")]


@pytest.fixture(scope="module")
def served(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two replicas of a small random Qwen3-VL, and transformers' model of the same folder."""
    folder = tmp_path_factory.mktemp("videos")
    reference = write_qwen3vl(folder)
    model = {"id": str(folder), "dtype": "float32"}
    sections = {
        "encoder": {"replicas": 2},
        "graphs": {"token_budgets": (64, 256)},
        "cache": {"max_bytes": 10_000_000},
        "ingress": {"grpc_port": GRPC_PORT},
    }
    with deployed("video", model, **sections):
        yield Pair(reference, load(ModelOptions.model_validate(model), torch.device("cpu")), folder)


def expected(pair: Pair, clip: Clip, frames: list[Tensor]) -> Tensor:
    """transformers' rows of decoded frames, uint8 [3, height, width] each."""
    spec = pair.tower.spec
    assert spec.video
    grid = spec.video.plan(clip).grid_thw
    size = Size(width=grid[2] * 16, height=grid[1] * 16)
    mean, std = (torch.tensor(values)[:, None, None] for values in (spec.mean, spec.std))
    pixels = torch.stack([(resize(frame, size) / 255 - mean) / std for frame in frames])
    patches, *_ = Qwen3VLVideoProcessor.patchify(None, pixels[None], 16, 2, 2)
    with torch.no_grad():
        features = pair.reference.model.get_video_features(
            patches[0], torch.tensor([grid]), return_dict=True
        )
    return rows_of(features)


def of_file(pair: Pair) -> Tensor:
    clip = Clip(Size(160, 96), 30, 10.0)
    wanted = [round(index * 29 / 5) for index in range(6)]  # three seconds, two frames each
    found = container.frames(FILE, clip, wanted)
    return expected(pair, clip, [torch.from_numpy(pixels).permute(2, 0, 1) for pixels in found])


def url(cluster: Cluster, protocol: str) -> str:
    return cluster.http if protocol == "http" else f"grpc://{cluster.grpc}"


def close(embedding: Embedding, rows: Tensor) -> bool:
    return bool((embedding.torch() - rows).abs().max() < TOLERANCE)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_videos_and_images_in_one_request(cluster: Cluster, served: Pair, protocol: str) -> None:
    sources: list[Source] = [IMAGES[0], FILE, Frames(IMAGES, fps=4)]
    with Client(url(cluster, protocol)) as client:
        image, file, frames = client.encode(sources, dtype="float32")
    assert [one.type for one in (image, file, frames)] == ["image", "video", "video"]
    assert close(file, of_file(served))
    assert file.grid_thw[0] == 3
    assert file.timestamps == pytest.approx([0.3, 1.45, 2.6])
    assert file.second_per_grid_ts == pytest.approx(1.0)
    chosen = Clip(Size(96, 64), 3, 4.0, chosen=True)
    assert close(frames, expected(served, chosen, [decode(one) for one in IMAGES]))
    assert frames.timestamps == (0.125, 0.5)  # its group is padded with the last frame
    assert (image.timestamps, image.frame_tokens) == ((), ())
    assert {one.source for one in (image, file, frames)} <= {"graph", "cache"}


def test_evs_leaves_out_what_changes_least(cluster: Cluster, served: Pair) -> None:
    with Client(cluster.http) as client:
        (whole,) = client.encode([FILE], dtype="float32")
        for source in ("graph", "cache"):
            pruned, image = client.encode([FILE, IMAGES[1]], dtype="float32", evs_rate=0.5)
            assert pruned.source == source
            plan = served.tower.spec.video.plan(Clip(Size(160, 96), 30, 10.0))  # type: ignore[union-attr]
            mask = retention_mask(whole.numpy(), plan, 0.5)
            assert np.abs(pruned.numpy() - whole.numpy()[mask]).max() < TOLERANCE
            assert pruned.tokens == sum(pruned.frame_tokens) == mask.sum()
            assert pruned.frame_tokens[0] == whole.tokens // 3
            assert pruned.kept_rows == tuple(mask.nonzero()[0])
            assert pruned.grid_thw == whole.grid_thw
            assert not image.frame_tokens + image.kept_rows


def test_a_file_by_itself_and_in_a_form(cluster: Cluster, served: Pair) -> None:
    bare = httpx.post(
        f"{cluster.http}/v1/encode",
        content=FILE,
        headers={"content-type": "video/mp4", "accept": "application/json"},
    )
    form = httpx.post(
        f"{cluster.http}/v1/encode",
        files=[("video", ("a.mp4", FILE)), ("image", ("b.jpg", IMAGES[0]))],
        headers={"accept": "application/json"},
    )
    assert [one["type"] for one in bare.json()["items"]] == ["video"]
    assert [one["type"] for one in form.json()["items"]] == ["video", "image"]
    assert "video" in httpx.get(f"{cluster.http}/v1/model").json()["kinds"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_bad_videos_fail_by_themselves(cluster: Cluster, served: Pair, protocol: str) -> None:
    short = FILE[: len(FILE) // 2]  # the file's index is at its end
    late = video(60, size=(160, 96), movflags="+faststart")
    cut = late[: len(late) // 2]  # only its frames are missing
    sources: list[Source] = [short, cut, Frames(IMAGES[:1]), IMAGES[0]]
    with Client(url(cluster, protocol)) as client:
        broken, missing, single, image = client.encode(sources, on_error="return")
    for error, message in ((broken, "corrupt"), (missing, "truncated"), (single, "at least 2")):
        assert isinstance(error, ServiceError)
        assert message in error.message
        assert not error.retryable
    assert isinstance(image, Embedding)
