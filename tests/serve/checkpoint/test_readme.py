"""Runs the examples of the README and of docs/ as they stand, against a service."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from ray import serve

from encoder_service.app import build
from tests.checkpoints_clip import write_clip_texts
from tests.images import jpeg, photograph
from tests.serve.checkpoint.conftest import APP
from tests.serve.conftest import Cluster
from tests.unit.deploy.test_pages import PAGES, ROOT


def blocks(language: str, word: str) -> list[str]:
    """The pages' code blocks in a language that contain a word."""
    found = (re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) for page in PAGES.values())
    return [block for blocks in found for block in blocks if word in block]


CHAT, VECTORS, CLIP = ":8000/v1/chat", "client.embed", "openai/clip-vit-large-patch14"
OTHERS = [block for block in blocks("python", "") if CHAT in block or VECTORS in block]
"""Examples that replace the service with one of their own."""
EXAMPLES = [
    *(block for block in blocks("python", "") if block not in OTHERS),
    *(pytest.param(block, marks=pytest.mark.extended) for block in OTHERS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "photo.jpg").write_bytes(jpeg(320, 240))
    (folder / "chart.png").write_bytes(photograph("coffee.png"))
    return folder


def here(block: str, cluster: Cluster) -> str:
    """The example with the ports of this run."""
    return block.replace("http://127.0.0.1:8000", cluster.http).replace(
        "127.0.0.1:9000", cluster.grpc
    )


def test_curl(folder: Path, cluster: Cluster) -> None:
    for block in blocks("sh", "curl"):
        subprocess.run(["sh", "-c", here(block, cluster)], cwd=folder, check=True)
    assert '"tokens":' in (folder / "photo.json").read_text()
    assert np.load(folder / "photo.npz")["0"].dtype == np.float32


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("block", EXAMPLES, ids=map(str, range(len(EXAMPLES))))
def test_python(
    folder: Path,
    cluster: Cluster,
    block: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if CHAT in block:
        document = yaml.safe_load((ROOT / "configs/tiny-chat.yaml").read_text())
        serve.run(build(document["applications"][0]["args"]), name=APP, route_prefix="/")
    if VECTORS in block:
        clip = folder / "clip"
        if not clip.exists():
            clip.mkdir()
            write_clip_texts(clip)
        model = {"id": str(clip), "dtype": "float32", "output": "vector"}
        encoder = {"num_gpus": 0, "num_cpus": 0.1, "device": "cpu"}
        few = {"num_cpus": 0.1}
        args = {"model": model, "encoder": encoder, "router": few, "ingress": few}
        serve.run(build(args), name=APP, route_prefix="/")
        block = block.replace(CLIP, str(clip))
    monkeypatch.chdir(folder)
    exec(here(block, cluster), {})
    assert capsys.readouterr().out
