"""Models that hear: log-mel frames and rows against transformers, packed as the engine does it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Processor,
    NemotronH_Omni_Reasoning_V3Processor,
    ParakeetFeatureExtractor,
    Phi4MultimodalFeatureExtractor,
    Qwen3ASRFeatureExtractor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni import processing_qwen2_5_omni
from transformers.models.qwen3_omni_moe import processing_qwen3_omni_moe

from actors.engine.budgets import Segments, model_capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import GraphSet, capture
from actors.engine.video_chunks import rows_of
from actors.errors import CheckpointError, ConfigError
from actors.families.nemotron_h_omni.audio import CONVOLUTIONS
from actors.families.registry import read
from actors.families.whisper.tower import audio
from actors.media.log_mel import conformer_frames, cut_conformer, log_mel
from actors.media.patchify import patchifier_of
from actors.models.load import family_of, load, tensors
from actors.models.tower import Tower
from actors.options import GraphOptions, ModelOptions
from actors.spec.audio import BEYOND, ConformerSizing, Features, WhisperSizing
from actors.spec.model_spec import ModelSpec
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Item, ItemPlan, Size
from tests.checkpoints_audio import (
    RATE,
    WINDOW_SECONDS,
    WRITERS,
    Hearing,
    tones,
    write_qwen3_asr,
    write_qwen3_omni,
)
from tests.checkpoints_nemotron import write_nemotron
from tests.checkpoints_tiles import write_gemma4
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
    "qwen2_5_omni": ({"thinker_config": {"audio_config": LARGE | {"n_window": 100}}}, 640),
    "qwen3_omni_moe": ({"thinker_config": {"audio_config": LARGE | {"output_dim": 2048}}}, 648),
    "qwen3_asr": ({"audio_config": {"output_dim": 2048}}, 317),
    "phi4_multimodal-audio": (
        {"audio_config": {"bias_max_distance": 500}, "hidden_size": 3072},
        454,
    ),
    "nemotron_h_omni-audio": (
        {
            "audio_config": {
                **{"num_mel_bins": 128, "convolution_bias": False},
                **{"projection_hidden_size": 4096, "projection_bias": False},
            },
            "text_config": {"hidden_size": 2688},
        },
        624,
    ),
    "gemma4-audio": (
        {
            "audio_config": {"use_clipped_linears": True},
            "text_config": {"hidden_size": 1536},
            "vision_config": {},
        },
        307,
    ),
}
"""config.json of whisper-large-v3, Qwen2-Audio-7B, Voxtral-Mini-3B, Qwen2.5-Omni-7B,
Qwen3-Omni-30B-A3B, Qwen3-ASR-1.7B, Phi-4-multimodal, Nemotron-3-Nano-Omni-30B-A3B and Gemma 4 E2B,
as far as it is read, and the millions of weights of their encoders and projectors, as transformers
counts them."""
HEAD_SIZES = dict.fromkeys(PUBLISHED, 64) | {"nemotron_h_omni-audio": 128, "gemma4-audio": 128}

PHI4MM = {
    **{"attention_dim": 1024, "attention_heads": 16, "linear_units": 1536, "num_blocks": 24},
    **{"activation": "swish", "conv_activation": "swish", "conv_glu_type": "swish"},
    **{"batch_norm": False, "bias_in_glu": True, "causal": True, "chunk_size": -1},
    **{"depthwise_multiplier": 1, "depthwise_seperable_out_channel": 1024, "kernel_size": 3},
    **{"ext_pw_kernel_size": 1, "ext_pw_out_channel": 1024, "input_layer": "nemo_conv"},
    **{"input_size": 80, "time_reduction": 8, "nemo_conv_settings": {"conv_channels": 1024}},
    "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
}
"""`audio_processor.config` of Phi-4-multimodal as published, in tests of TensorRT-LLM."""

CONFORMERS = {
    "phi4": ConformerSizing(16000, 160, 512, 80, 4000, 1, math.inf, 3, "phi4", 240),
    "parakeet": ConformerSizing(16000, 160, 512, 128, 40000, 1, 400, 3, "parakeet", 0, 2, 1),
    "gemma4": ConformerSizing(16000, 160, 512, 128, 3000, 1, 30, 2, "gemma4", 1),
}

tokens_of = processing_qwen2_5_omni._get_feat_extract_output_lengths
tokens_in_windows = processing_qwen3_omni_moe._get_feat_extract_output_lengths


@dataclass(frozen=True)
class Pair(Hearing):
    """The same weights in transformers' model and in our tower, in float32."""

    tower: Tower


@pytest.fixture(scope="module", params=WRITERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    model = WRITERS[request.param](folder)
    options = ModelOptions(id=str(folder), dtype="float32", tower="audio")
    tower = load(options, torch.device("cpu"))
    return Pair(request.param, model, tower)


def patches_of(
    pair: Pair, waves: Sequence[npt.NDArray[np.float32]]
) -> tuple[list[ItemPlan], list[Tensor]]:
    patchifier = patchifier_of(pair.tower.spec)
    found = [patchifier.patchify(torch.from_numpy(wave).view(1, 1, -1)) for wave in waves]
    return [plan for plan, _ in found], [patches for _, patches in found]


@pytest.mark.parametrize("seconds", LENGTHS, ids=str)
@pytest.mark.parametrize("spare", [0, 39], ids=["exact", "spare"])
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


def test_a_pack_does_not_hear_an_earlier_one(pair: Pair) -> None:
    """Whose positions, and where its sounds end, are still behind its own."""
    waves = [tones(2.0), tones(2.0, seed=1), tones(1.3, seed=2), tones(0.4, seed=3)]
    plans, patches = patches_of(pair, waves)
    budget = sum(plan.path_tokens[0] for plan in plans[:2])
    graphs = GraphSet(pair.tower, "default", (budget,), Segments(2), Device())
    graphs.capture(lambda *_: None)
    graphs.encode(budget, plans[:2], patches[:2])
    plans, patches, waves = plans[2:], patches[2:], waves[2:]
    ours = pair.tower.postprocess([graphs.encode(budget, plans, patches)], plans)
    check(pair.model_type, ours, pair.rows(waves))


@pytest.mark.parametrize("seconds", [3.3 * WINDOW_SECONDS, 6.013, 4.001, 7.5, 81.3])
def test_a_long_sound_is_windows(pair: Pair, seconds: float, tmp_path: Path) -> None:
    """In one pack, and cut into chunks by the engine."""
    sizing = audio(pair.tower.spec)
    if not sizing.several:
        pytest.skip("sounds of one window")
    if seconds > 40 and sizing.window_seconds < 40:
        pytest.skip("of several windows whenever shorter")
    wave = tones(seconds)
    (plan,), (patches,) = patches_of(pair, [wave])
    exact, segment = pair.rows([wave]), sizing.segment_tokens
    assert (plan.frames, plan.tokens) == (-(-plan.path_tokens[0] // segment), len(exact))
    for budgets in ([plan.path_tokens[0]], [segment, 2 * segment]):
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
    sizing = WhisperSizing(16000, 160, 400, mels, 3000, 1, 30, whole=True)
    wave = tones(seconds)
    ours = log_mel(torch.from_numpy(wave), sizing)
    exact = theirs(wave, sampling_rate=RATE, return_tensors="pt").input_features
    assert torch.equal(ours, exact)
    padded = np.pad(wave, (0, 30 * RATE - len(wave)))
    by_numpy = theirs._np_extract_fbank_features(padded[None], "cpu")
    assert np.abs(ours.numpy() - by_numpy).max() < 1e-4


@pytest.mark.parametrize("seconds", [0.031, 0.5, 1.0, 7.003, 30.0])
@pytest.mark.parametrize("features", CONFORMERS)
def test_frames_of_conformers_equal_transformers(features: Features, seconds: float) -> None:
    """And where each position finds its own."""
    sizing, wave = CONFORMERS[features], tones(seconds)
    exact, tokens = heard(features, wave)
    ours = conformer_frames(torch.from_numpy(wave), sizing)
    assert ours.shape == exact.shape
    assert (ours - exact).abs().max() < 1e-5
    assert sizing.plan(Size(len(wave), 1)).tokens == tokens
    patches = cut_conformer(ours, tokens, sizing).unflatten(1, (sizing.seen_frames, -1))
    own = patches[:, sizing.stride - 1 :].flatten(0, 1)
    assert torch.equal(own[: len(ours)], ours)
    assert bool((own[len(ours) :] == BEYOND).all())
    assert bool((patches[0, : sizing.stride - 1] == BEYOND).all())
    assert torch.equal(patches[1:, : sizing.stride - 1], patches[:-1, sizing.stride :])


@pytest.mark.parametrize("loudness", [0, 1e-6])
@pytest.mark.parametrize("features", CONFORMERS)
def test_frames_of_silence_equal_transformers(features: Features, loudness: float) -> None:
    """Parakeet divides what rounding leaves of them by almost nothing."""
    noise = np.random.default_rng(0).normal(0, 1, 10 * RATE).astype(np.float32)
    wave = noise * np.float32(loudness)
    exact, _ = heard(features, wave)
    ours = conformer_frames(torch.from_numpy(wave), CONFORMERS[features])
    assert (ours - exact).abs().max() < 1e-5


def test_a_long_sound_is_heard_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-4's frames are computed in float64, which takes much memory."""
    seen, rfft = list[int](), torch.fft.rfft

    def counted(frames: Tensor, size: int) -> Any:
        seen.append(len(frames))
        return rfft(frames, size)

    monkeypatch.setattr(torch.fft, "rfft", counted)
    frames = conformer_frames(torch.zeros(100 * RATE), CONFORMERS["phi4"])
    assert sum(seen) == len(frames) == 9998
    assert max(seen) <= 4096


def heard(features: Features, wave: npt.NDArray[np.float32]) -> tuple[Tensor, int]:
    """Frames of a sound in transformers, and rows by its processor."""
    asked = {"sampling_rate": RATE, "return_tensors": "pt"}
    if features == "phi4":
        found = Phi4MultimodalFeatureExtractor()(wave, **asked)
        return found.audio_input_features[0], int(found.audio_embed_sizes)
    if features == "gemma4":
        found = Gemma4AudioFeatureExtractor()([wave], **asked)
        mask = found.input_features_mask[0]
        text = SimpleNamespace(audio_token="1", boa_token="", eoa_token="")
        counted = Gemma4Processor.replace_audio_token(text, {"input_features_mask": [mask]}, 0)
        return found.input_features[0, mask], len(counted)
    found = ParakeetFeatureExtractor(128)(wave, **asked)
    processor = SimpleNamespace(audio_hop_length=160, audio_subsampling_factor=8)
    tokens = NemotronH_Omni_Reasoning_V3Processor._estimate_audio_num_embeddings
    frames = int(found.attention_mask.sum())
    return found.input_features[0, :frames], tokens(processor, len(wave))


def test_rows_are_as_many_as_the_processor_counts() -> None:
    """Qwen2-Audio's, of every length around the places where a token is added."""
    sizing = WhisperSizing(16000, 160, 400, 128, 3000, 2, 30, whole=False)
    for samples in (*range(321, 3000, 17), 479_999, 480_000):
        mask = np.arange(0, 480_000, 160) < samples
        length = int(mask.sum())
        tokens = ((length - 1) // 2 + 1 - 2) // 2 + 1
        assert sizing.plan(Size(samples, 1)).tokens == tokens


@pytest.mark.parametrize("seconds", [0.013, 0.3, 0.99, 1.0, 2.003, 29.9999])
@pytest.mark.parametrize("kind", ["qwen2_5_omni", "qwen3_omni_moe", "qwen3_asr"])
def test_frames_end_with_the_sound(kind: str, seconds: float, tmp_path: Path) -> None:
    """Those of a sound alone, as its processor asks for them; and as many rows as it counts."""
    spec, wave = published(kind, tmp_path), tones(seconds)
    count = tokens_of if kind == "qwen2_5_omni" else tokens_in_windows
    if kind == "qwen3_asr":
        extractor: Any = Qwen3ASRFeatureExtractor(n_window=0)
        padding: dict[str, Any] = {"padding": True}
    else:
        extractor = WhisperFeatureExtractor(128)
        padding = {"padding": "max_length" if kind == "qwen2_5_omni" else True}
    padding |= {"truncation": False, "return_attention_mask": True, "return_tensors": "pt"}
    found = extractor(wave, sampling_rate=RATE, **padding)
    frames = int(found.attention_mask.sum())
    ours = log_mel(torch.from_numpy(wave), audio(spec)).transpose(0, 1).flatten(1)
    assert (ours[:, :frames] - found.input_features[0, :, :frames]).abs().max() < 1e-6
    rest = ours[:, frames:]
    assert bool(((rest == BEYOND) | (rest == 0)).all())
    assert len(rest[0]) == -frames % audio(spec).window_frames
    assert spec.sizing.plan(Size(len(wave), 1)).tokens == count(frames)


def test_sounds_that_are_too_short_have_no_tokens(tmp_path: Path) -> None:
    """transformers fails below 201 samples, half of what a frame is computed from and one."""
    sizing = published("qwen3_omni_moe", tmp_path).sizing
    assert [sizing.plan(Size(samples, 1)).tokens for samples in (0, 1, 200, 201)] == [0, 0, 0, 1]
    sizing = published("qwen3_asr", tmp_path).sizing
    assert [sizing.plan(Size(samples, 1)).tokens for samples in (0, 1, 8000)] == [0, 7, 7]


@pytest.mark.parametrize(
    ("features", "samples"), [("phi4", 400), ("parakeet", 320), ("gemma4", 161)]
)
def test_the_shortest_sound_of_a_conformer(features: Features, samples: int) -> None:
    """transformers fails below, or gives what is not finite."""
    sizing = CONFORMERS[features]
    counts = [sizing.plan(Size(count, 1)).tokens for count in (0, samples - 1, samples)]
    assert counts == [0, 0, 1]
    assert conformer_frames(torch.from_numpy(tones(samples / RATE)), sizing).isfinite().all()


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_sizes(kind: str, tmp_path: Path) -> None:
    spec, (_, million_parameters) = published(kind, tmp_path), PUBLISHED[kind]
    tokens = [spec.sizing.plan(Size(seconds * RATE, 1)).tokens for seconds in (1, 10, 30)]
    assert tokens == rows()[FAMILIES[kind]].tokens
    family = family_of(spec)
    assert family.head_size == HEAD_SIZES[kind]
    assert round(sum(map(prod, family.expected.values())) / 1e6) == million_parameters


def published(kind: str, folder: Path) -> ModelSpec:
    config, _ = PUBLISHED[kind]
    config = config | {"model_type": kind.removesuffix("-audio")}
    (folder / "config.json").write_text(json.dumps(config))
    return read(ModelOptions(id=str(folder), load_format="dummy", tower="audio"))


def test_asr_as_published_at_first_is_the_same(tmp_path: Path) -> None:
    """Within a thinker, the projector within the encoder."""
    write_qwen3_asr(tmp_path)
    options = ModelOptions(id=str(tmp_path), dtype="float32")
    saved = tensors(options, read(options), torch.device("cpu"))
    config = json.loads((tmp_path / "config.json").read_text())
    thinker = {"audio_config": config["audio_config"]}
    config = {"model_type": "qwen3_asr", "thinker_config": thinker}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = {"linear_1": "proj1", "linear_2": "proj2"}
    renamed = {
        f"thinker.audio_tower.{names.get(module, module)}{dot}{rest}": tensor
        for name, tensor in saved.items()
        for module, dot, rest in [name.partition(".")]
    }
    save_file(renamed, tmp_path / "model.safetensors")
    found = tensors(options, read(options), torch.device("cpu"))
    assert len(found) == len(saved)
    assert torch.equal(found["proj2.weight"], saved["linear_2.weight"])


def test_phi4_as_published_is_the_same(tmp_path: Path) -> None:
    theirs = published("phi4_multimodal-audio", tmp_path)
    config: dict[str, Any] = {"model_type": "phi4mm", "hidden_size": 3072}
    config["embd_layer"] = {"audio_embd_layer": {"compression_rate": 8, "use_qformer": False}}
    config["audio_processor"] = {"name": "cascades", "config": PHI4MM}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ModelOptions(id=str(tmp_path), load_format="dummy", tower="audio")
    ours = read(options)
    assert (ours.sizing, ours.width) == (theirs.sizing, theirs.width)
    for key, value in theirs.vision.items():
        assert ours.vision[key] == value, key
    assert len(family_of(ours).expected) == len(family_of(theirs).expected)
    config["embd_layer"]["audio_embd_layer"]["use_qformer"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="use_qformer of audio_embd_layer: only False"):
        read(options)


@pytest.mark.parametrize("told", [True, False])
def test_biases_are_added_as_the_configuration_says(told: bool, tmp_path: Path) -> None:
    """Of Nemotron-H Omni. Those of convolutions that it denies are not read."""
    model = write_nemotron(tmp_path, biased=True)
    if not told:
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        config["audio_config"]["convolution_bias"] = False
        file.write_text(json.dumps(config))
        for name, values in model.audio_tower.named_parameters():
            if name.endswith(tuple(f".{one}.bias" for one in CONVOLUTIONS)):
                values.data.zero_()
    options = ModelOptions(id=str(tmp_path), dtype="float32", tower="audio")
    pair = Pair("nemotron_h_omni-audio", model, load(options, torch.device("cpu")))
    waves = [tones(0.9)]
    plans, patches = patches_of(pair, waves)
    graphs = GraphSet(pair.tower, "default", (), Segments(1), Device())
    rows = graphs.run(None, [Item(plans[0], patches[0].numpy())])
    check(pair.model_type, pair.tower.postprocess([rows], plans), pair.rows(waves))


def test_the_key_that_decides_is_named(tmp_path: Path) -> None:
    """Also where config.json lacks it, and has no vision tower."""
    write_gemma4(tmp_path, clipped=True)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"vision_config": None}
    config["audio_config"]["use_clipped_linears"] = False
    file.write_text(json.dumps(config))
    options = ModelOptions(id=str(tmp_path), tower="audio")
    with pytest.raises(
        CheckpointError, match=r"on audio_config\.use_clipped_linears, which is False"
    ):
        load(options, torch.device("cpu"))
    write_nemotron(tmp_path, biased=True)
    config = json.loads(file.read_text())
    del config["audio_config"]["attention_bias"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"on audio_config\.attention_bias, which is False"):
        load(options, torch.device("cpu"))


def test_budgets_are_whole_windows(tmp_path: Path) -> None:
    write_qwen3_omni(tmp_path)
    options = ModelOptions(id=str(tmp_path), dtype="float32", tower="audio")
    tower = load(options, torch.device("cpu"))
    room = model_capacity(GraphOptions(), tower.spec)
    assert all(budget % 13 == 0 for budget in room.budgets[0])
    with pytest.raises(ConfigError, match="100 is not a multiple of 13, the tokens per window"):
        tower.inputs("default", 100, 1)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("config.json", {"activation_function": "relu"}, "activation_function of the audio enc"),
        ("config.json", {"num_mel_bins": 128}, "feature_size of the feature extractor: only 128"),
        ("preprocessor_config.json", {"chunk_length": 20}, "chunk_length of the feature extr"),
        ("preprocessor_config.json", {"dither": 0.1}, "dither of the feature extractor: only 0.0"),
        ("preprocessor_config.json", {"padding_side": "left"}, "padding_side.*: only right"),
        ("config.json", {"model_type": "voxtral_realtime"}, "causal.*nearest.*is voxtral"),
        ("config.json", {"max_source_positions": 1000}, "chunk_length of the feature extr"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, name: str, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        read(changed(tmp_path, "whisper-tiny", name, change))


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("phi4_multimodal", {"chunk_size": 18}, "chunk_size of the audio encoder: only -1"),
        ("phi4_multimodal", {"ext_pw_out_channel": 512}, "ext_pw_out_channel.*: only 1024"),
        ("nemotron_h_omni", {"scale_input": True}, "scale_input of the audio encoder: only False"),
        ("nemotron_h_omni", {"conv_kernel_size": 8}, "conv_kernel_size.*: only odd numbers"),
        ("nemotron_h_omni", {"max_position_embeddings": 0}, "max_position_embeddings.*: 0"),
        ("nemotron_h_omni", {"num_hidden_layers": 10**9}, "audio encoder's.*1000000000 layers"),
        ("gemma4", {"attention_context_right": 4}, "attention_context_right.*: only 0"),
        ("gemma4", {"attention_context_left": 9}, "attention_chunk_size.*: only 8"),
    ],
)
def test_conformers_that_are_not_supported_are_named(
    kind: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config, _ = PUBLISHED[f"{kind}-audio"]
    config = config | {"model_type": kind, "audio_config": config["audio_config"] | change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=told):
        family_of(read(ModelOptions(id=str(tmp_path), load_format="dummy", tower="audio")))


@pytest.mark.parametrize("place", ["feature_extractor", "audio_processor"])
@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("phi4_multimodal", {"mel_min_frequency": 20}, "mel_min_frequency.*: only 0"),
        ("phi4_multimodal", {"mel_max_frequency": 8000}, "mel_max_frequency.*: only 7690"),
        ("nemotron_h_omni", {"preemphasis": 0.9}, r"preemphasis.*: only 0\.97"),
        ("gemma4", {"frame_length_ms": 32.0}, r"frame_length_ms.*: only 20\.0"),
        ("gemma4", {"hop_length_ms": 5.0}, r"hop_length_ms.*: only 10\.0"),
    ],
)
def test_conformers_that_hear_otherwise_are_named(
    kind: str, change: dict[str, Any], told: str, place: str, tmp_path: Path
) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({place: change}))
    with pytest.raises(CheckpointError, match=told):
        published(f"{kind}-audio", tmp_path)


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("qwen3_omni_moe", {"n_window": 100}, "n_window of the audio encoder: only 50"),
        ("qwen3_omni_moe", {"n_window_infer": 250}, "n_window_infer.*not a multiple of 100"),
        ("qwen2_5_omni", {"n_window": 75}, "a token would be of two windows"),
        ("qwen2_5_omni", {"activation_function": "relu"}, "activation_function of the audio"),
    ],
)
def test_windows_that_are_not_supported_are_named(
    kind: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    config = {"model_type": kind, "thinker_config": {"audio_config": change}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=told):
        read(ModelOptions(id=str(tmp_path), load_format="dummy", tower="audio"))


@pytest.mark.parametrize(
    ("kind", "tower", "told"),
    [
        ("qwen3_omni_moe", None, "has a vision tower and an audio tower.*set model.tower to"),
        ("qwen2_5_omni", None, "has a vision tower and an audio tower.*set model.tower to"),
        ("whisper", "vision", "model.tower is vision, but the family whisper has only the audio"),
        ("qwen3_vl", "audio", "model.tower is audio, but the family qwen3_vl has only the vision"),
    ],
)
def test_a_service_has_one_tower(
    kind: str, tower: Literal["vision", "audio"] | None, told: str, tmp_path: Path
) -> None:
    config = {"model_type": kind, "thinker_config": {}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=told):
        read(ModelOptions(id=str(tmp_path), load_format="dummy", tower=tower))
