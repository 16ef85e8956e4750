"""Models that hear: log-mel frames and rows against transformers, packed as the engine does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from actors.engine.budgets import Segments, model_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import GraphSet, capture
from actors.engine.video_chunks import rows_of
from actors.errors import CheckpointError
from actors.families.registry import read
from actors.media.log_mel import log_mel
from actors.media.patchify import patchifier_of
from actors.models.load import family_of, load
from actors.models.tower import Tower
from actors.options import GraphOptions, ModelOptions
from actors.spec.audio import AudioSizing
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, ItemPlan, Size
from tests.checkpoints_audio import (
    RATE,
    WINDOW_SECONDS,
    WRITERS,
    Hearing,
    tones,
)
from tests.parity.table import FAMILIES, check, rows
from tests.unit.spec.test_tile_spec import changed

LENGTHS = [[2.0], [0.031, 1.9999], [0.5, 0.73, 1.0001, 0.041, 2.0]]
"""Seconds: a whole window; the fewest; some whose last position shares a token with silence."""


ENCODER = {"num_mel_bins": 128, "max_source_positions": 1500}
OWN = {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120}
LARGE = ENCODER | OWN | {"encoder_attention_heads": 20}
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "whisper": (LARGE, 637),
    "qwen2_audio": ({"audio_config": LARGE, "text_config": {"vocab_size": 156032}}, 642),
    "voxtral": ({"audio_config": ENCODER, "text_config": {"hidden_size": 3072}}, 662),
}
"""config.json of whisper-large-v3, Qwen2-Audio-7B and Voxtral-Mini-3B, as far as it is read, and
the millions of weights of their encoders and projectors."""


@dataclass(frozen=True)
class Pair(Hearing):
    """The same weights in transformers' model and in our tower, in float32."""

    tower: Tower


@pytest.fixture(scope="module", params=WRITERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = WRITERS[request.param](folder)
    tower = load(ModelOptions(id=str(folder), dtype="float32"), torch.device("cpu"))
    return Pair(request.param, model, tower)


def patches_of(
    pair: Pair, waves: Sequence[npt.NDArray[np.float32]]
) -> tuple[list[ItemPlan], list[Tensor]]:
    patchifier = patchifier_of(pair.tower.spec)
    found = [patchifier.patchify(torch.from_numpy(wave).view(1, 1, -1)) for wave in waves]
    return [plan for plan, _ in found], [patches for _, patches in found]


@pytest.mark.parametrize("seconds", LENGTHS, ids=str)
@pytest.mark.parametrize("spare", [0, 37], ids=["exact", "spare"])
def test_rows_equal_transformers(pair: Pair, seconds: Sequence[float], spare: int) -> None:
    """Also where the graph's inputs still hold an earlier, longer pack."""
    waves = [tones(one, seed=place) for place, one in enumerate(seconds)]
    plans, patches = patches_of(pair, waves)
    budget = sum(plan.path_tokens[0] for plan in plans) + spare
    graphs = GraphSet(pair.tower, "default", (budget,), Segments(len(plans)), Device())
    graphs.capture(lambda *_: None)
    earlier = torch.randn(len(graphs.inputs.tensors["patches"]), patches[0].shape[1] // 4)
    graphs.inputs.tensors["patches"].copy_(earlier.view(torch.uint8))
    ours = pair.tower.postprocess([graphs.encode(budget, plans, patches)], plans)
    exact = pair.rows(waves)
    assert ours.shape == exact.shape == (sum(plan.tokens for plan in plans), pair.tower.spec.width)
    check(pair.model_type, ours, exact)


def test_a_long_sound_is_windows(pair: Pair, tmp_path: Path) -> None:
    """Voxtral's, in one pack, and cut into chunks by the engine."""
    if pair.model_type != "voxtral":
        pytest.skip("sounds of one window")
    wave = tones(3.3 * WINDOW_SECONDS)
    (plan,), (patches,) = patches_of(pair, [wave])
    exact, window = pair.rows([wave]), plan.tokens // 4
    assert (plan.frames, plan.tokens) == (4, len(exact))
    for budgets in ([plan.tokens], [window, 2 * window]):
        room = model_capacity(GraphOptions(token_budgets=budgets), pair.tower.spec)
        device, series = Device(), EncoderMetrics()
        graphs = capture(pair.tower, room, device, series)
        engine = Engine(pair.tower, graphs, room, device, series)
        answer = engine.submit(Item(plan, patches.numpy())).result()
        engine.close()
        assert answer.source == "graph"
        check(pair.model_type, rows_of(answer), exact)


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize("seconds", [0.5, 7.003, 30.0])
def test_frames_equal_transformers(seconds: float, mels: int) -> None:
    """By torch, bit for bit on one thread, and by numpy, in float64."""
    theirs = WhisperFeatureExtractor(mels)
    sizing = AudioSizing(16000, 160, 400, mels, 3000, 1, whole=True, several=False)
    wave = tones(seconds)
    ours = log_mel(torch.from_numpy(wave), sizing)
    exact = theirs(wave, sampling_rate=RATE, return_tensors="pt").input_features
    assert torch.equal(ours, exact)
    padded = np.pad(wave, (0, 30 * RATE - len(wave)))
    by_numpy = theirs._np_extract_fbank_features(padded[None], "cpu")
    assert np.abs(ours.numpy() - by_numpy).max() < 1e-4


def test_rows_are_as_many_as_the_processor_counts() -> None:
    """Qwen2-Audio's, of every length around the places where a token is added."""
    sizing = AudioSizing(16000, 160, 400, 128, 3000, 2, whole=False, several=False)
    for samples in (*range(321, 3000, 17), 479_999, 480_000):
        mask = np.arange(0, 480_000, 160) < samples
        length = int(mask.sum())
        tokens = ((length - 1) // 2 + 1 - 2) // 2 + 1
        assert sizing.plan(Size(samples, 1)).tokens == tokens


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_sizes(kind: str, tmp_path: Path) -> None:
    config, million_parameters = PUBLISHED[kind]
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    spec = read(ModelOptions(id=str(tmp_path), load_format="dummy"))
    tokens = [spec.sizing.plan(Size(seconds * RATE, 1)).tokens for seconds in (1, 10, 30)]
    assert tokens == rows()[FAMILIES[kind]].tokens
    family = family_of(spec)
    assert family.head_size == 64
    assert round(sum(map(prod, family.expected.values())) / 1e6) == million_parameters


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("config.json", {"activation_function": "relu"}, "activation_function of the audio enc"),
        ("config.json", {"num_mel_bins": 128}, "feature_size of the feature extractor: only 128"),
        ("preprocessor_config.json", {"chunk_length": 20}, "chunk_length of the feature extr"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither of the feature extractor: only 0.0"),
        ("config.json", {"model_type": "qwen2_5_omni"}, "in chunks.*nearest.*is qwen2_audio"),
        ("config.json", {"model_type": "voxtral_realtime"}, "causal.*nearest.*is voxtral"),
        ("config.json", {"max_source_positions": 1000}, "chunk_length of the feature extr"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, name: str, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        read(changed(tmp_path, "whisper-tiny", name, change))
