"""What the JSON files of the packed families say, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.errors import CheckpointError, InvalidOption
from actors.families import registry
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset
from actors.spec.sampling import Evenly, Paced
from actors.spec.settings import CLIP_PIXELS
from actors.spec.sizing import (
    CanvasSizing,
    CappedSizing,
    EnlargingSizing,
    FillingSizing,
    LinedSizing,
    NaflexSizing,
    PackedSizing,
    PatchRange,
    ShrinkingSizing,
    WindowedSizing,
)
from actors.spec.slices import PaddedCrops, ScaledSlices, SquareSlices
from actors.spec.video import PooledGroups
from actors.types import ProcessorKwargs

CONFIG, VISION, PROCESSOR = "config.json", "vision_config", "preprocessor_config.json"
LFM2 = SquareSlices(16, 2, 10, 2, 512, 64, 256, 2.0, thumbnail=True)
BOTH = "processor_config.json"


def changed(folder: Path, preset: str, file: str, change: dict[str, Any]) -> ModelOptions:
    """A preset as a folder; `change` goes into the vision configuration or into the processor."""
    files = dict(Preset(preset).files)
    if file == VISION:
        files[CONFIG] |= {VISION: files[CONFIG][VISION] | change}
    else:
        files[file] |= change
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return ModelOptions(id=str(folder))


@pytest.mark.parametrize(
    ("preset", "family", "sizing", "width"),
    [
        ("qwen35-27b", "qwen3_5", PackedSizing(16, 2, 65536, 16777216), 5120),
        ("qwen2vl-7b", "qwen2_vl", PackedSizing(14, 2, 3136, 12845056), 3584),
        ("qwen25vl-7b", "qwen2_5_vl", WindowedSizing(14, 2, 3136, 12845056, 4), 3584),
        ("exaone45-33b", "exaone4_5", WindowedSizing(14, 2, 3136, 1003520, 4), 5120),
        ("glm41v-9b", "glm4v", EnlargingSizing(14, 2, 6272, 4816896), 4096),
        ("glm-ocr", "glm_ocr", EnlargingSizing(14, 2, 6272, 4816896), 1536),
        ("glm53-flash", "glm5_next", CanvasSizing(14, 2, 12544, 6272000), 4096),
        ("hunyuan-ocr", "hunyuan_vl", LinedSizing(16, 2, 262144, 4194304), 1024),
        ("minimax-m3", "minimax_m3", PackedSizing(14, 2, 3136, 451584), 6144),
        ("ernie45vl-28b", "ernie4_5_vl_moe", PackedSizing(14, 2, 3136, 4816896), 2560),
        ("gemma4-31b", "gemma4", FillingSizing(16, 3, 280), 5376),
        ("kimivl-a3b", "kimi_vl", CappedSizing(14, 2, 4096, 512), 2048),
        ("minicpmv-4.6", "minicpmv4_6", ScaledSlices(14, 4, 9, 448), 1024),
        ("phi4-multimodal", "phi4_multimodal", PaddedCrops(14, 2, 448, 36), 3072),
        ("nemotron-3-nano-omni", "nemotron_h_omni", PatchRange(16, 2, 1024, 13312), 2688),
        ("siglip2-base-naflex", "siglip2", NaflexSizing(16, 1, 256), 768),
        ("lfm25vl-1.6b", "lfm2_vl", LFM2, 2048),
    ],
)
def test_presets(preset: str, family: str, sizing: object, width: int) -> None:
    model = registry.read(ModelOptions(id=preset, load_format="dummy"))
    assert (model.family, model.sizing, model.width, model.deepstack) == (family, sizing, width, 0)


def test_the_pixel_range_under_its_two_names(tmp_path: Path) -> None:
    size = {"size": {"shortest_edge": 1, "longest_edge": 2}}
    model = registry.read(changed(tmp_path, "qwen2vl-7b", PROCESSOR, size))
    assert model.sizing == PackedSizing(14, 2, 3136, 12845056)  # min_pixels and max_pixels win
    model = registry.read(
        changed(tmp_path, "qwen2vl-7b", PROCESSOR, size | {"min_pixels": None, "max_pixels": None})
    )
    assert model.sizing == PackedSizing(14, 2, 1, 2)


def test_kimi_k25_as_transformers_saves_it(tmp_path: Path) -> None:
    size = {"max_height": 256, "max_width": 256}
    image = {"max_patches": 4096, "size": size, "patch_size": 14, "merge_size": 2}
    video = {"max_patches": 1024, "size": size, "fps": 1, "temporal_patch_size": 2}
    (tmp_path / BOTH).write_text(json.dumps({"image_processor": image, "video_processor": video}))
    model = registry.read(changed(tmp_path, "kimik25", CONFIG, {}))
    assert model.sizing == ShrinkingSizing(14, 2, max_patches=4096, max_side_patches=256)
    assert isinstance(model.video, PooledGroups)
    assert (model.video.group, model.video.sampling) == (2, Paced(1.0, 2048))
    assert model.video.pictures == ShrinkingSizing(14, 2, max_patches=1024, max_side_patches=256)


def test_a_number_of_frames_in_the_video_processors_settings(tmp_path: Path) -> None:
    frames = {"num_frames": 16}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(frames))
    model = registry.read(changed(tmp_path, "qwen25vl-7b", CONFIG, {}))
    assert model.defaults("video")["num_frames"] == 16
    assert model.video
    assert len(model.video.sampling.indices(3000, 30.0)) == 16


def test_minimax_m3_as_published_and_as_transformers_saves_it(tmp_path: Path) -> None:
    published = registry.read(changed(tmp_path, "minimax-m3", PROCESSOR, {"size": [672, 672]}))
    assert published.sizing == PackedSizing(14, 2, 3136, 451584)
    merge = {"img_token_compression_config": None, "spatial_merge_size": 3}
    saved = registry.read(changed(tmp_path, "minimax-m3", VISION, merge))
    assert saved.sizing == PackedSizing(14, 3, 3136, 451584)
    assert published.kinds == saved.kinds == ("image",)


@pytest.mark.parametrize(
    ("preset", "file", "change"),
    [
        ("qwen2vl-7b", VISION, {"hidden_act": "relu"}),
        ("qwen25vl-7b", VISION, {"hidden_act": "gelu"}),
        ("exaone45-33b", VISION, {"hidden_act": "gelu"}),
        ("glm41v-9b", VISION, {"attention_bias": True}),
        ("glm-ocr", VISION, {"attention_bias": False}),
        ("glm53-flash", VISION, {"attention_bias": False}),
        ("glm53-flash", VISION, {"swiglu_limit": 7.0}),
        ("glm53-flash", BOTH, {"image_processor": {"patch_expand_factor": 2}}),
        ("glm53-flash", BOTH, {"video_processor": {"patch_expand_factor": 2}}),
        ("glm53-flash", BOTH, {"video_processor": {"max_duration": 300}}),
        ("hunyuan-ocr", VISION, {"hidden_act": "gelu_pytorch_tanh"}),
        ("hunyuan-ocr", VISION, {"interpolate_mode": "bicubic"}),
        ("hunyuan-ocr", VISION, {"cat_extra_token": 0}),
        ("hunyuan-ocr", VISION, {"add_patchemb_bias": False}),
        ("hunyuan-ocr", PROCESSOR, {"temporal_patch_size": 2}),
        ("minimax-m3", VISION, {"hidden_act": "quick_gelu"}),
        ("minimax-m3", VISION, {"rope_mode": "2d"}),
        ("minimax-m3", CONFIG, {"multimodal_projector_bias": False}),
        ("ernie45vl-28b", VISION, {"hidden_act": "gelu"}),
        ("ernie45vl-28b", VISION, {"temporal_merge_size": 4}),
        ("gemma4-31b", VISION, {"hidden_activation": "silu"}),
        ("gemma4-31b", VISION, {"num_key_value_heads": 4}),
        ("gemma4-31b", PROCESSOR, {"do_normalize": True}),
        ("gemma4-31b", PROCESSOR, {"pooling_kernel_size": 2}),
        ("kimivl-a3b", VISION, {"merge_kernel_size": [2, 1]}),
        ("kimivl-a3b", VISION, {"init_pos_emb_height": 32}),
        ("kimivl-a3b", PROCESSOR, {"pad_input": False}),
        ("kimivl-a3b", PROCESSOR, {"resample": 2}),
        ("minicpmv-4.6", CONFIG, {"merger_times": 2}),
        ("minicpmv-4.6", CONFIG, {"downsample_mode": "4x"}),
        ("minicpmv-4.6", CONFIG, {"insert_layer_id": 26}),
        ("minicpmv-4.6", VISION, {"window_kernel_size": [4, 4]}),
        ("minicpmv-4.6", VISION, {"hidden_act": "gelu"}),
        ("minicpmv-4.6", PROCESSOR, {"downsample_mode": "4x"}),
        ("minicpmv-4.6", PROCESSOR, {"patch_size": 16}),
        ("phi4-multimodal", VISION, {"hidden_act": "gelu"}),
        ("phi4-multimodal", VISION, {"crop_size": 336}),
        ("phi4-multimodal", VISION, {"patch_size": 64}),
        ("phi4-multimodal", VISION, {"feature_layer": -28}),
        ("phi4-multimodal", PROCESSOR, {"patch_size": 16}),
        ("phi4-multimodal", PROCESSOR, {"size": {"height": 336, "width": 336}}),
        ("phi4-multimodal", PROCESSOR, {"resample": 2}),
        ("nemotron-3-nano-omni", VISION, {"hidden_act": "silu"}),
        ("nemotron-3-nano-omni", VISION, {"layerscale_value": 0.1}),
        ("nemotron-3-nano-omni", VISION, {"use_swiglu_ffn": True}),
        ("nemotron-3-nano-omni", VISION, {"version": "c-radio_v4-so400m"}),
        ("nemotron-3-nano-omni", CONFIG, {"downsample_ratio": 1.0}),
        ("nemotron-3-nano-omni", CONFIG, {"vit_hidden_size": 1024}),
        ("nemotron-3-nano-omni", PROCESSOR, {"patch_size": 14}),
        ("nemotron-3-nano-omni", PROCESSOR, {"min_num_patches": 13312}),
        ("nemotron-3-nano-omni", PROCESSOR, {"video_maintain_aspect_ratio": False}),
        ("nemotron-3-nano-omni", PROCESSOR, {"temporal_patch_size": 4}),
        ("siglip2-base-naflex", PROCESSOR, {"patch_size": 14}),
        ("lfm25vl-1.6b", CONFIG, {"projector_hidden_act": "relu"}),
        ("lfm25vl-1.6b", CONFIG, {"downsample_factor": 4}),
        ("lfm25vl-1.6b", VISION, {"patch_size": 14}),
    ],
)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, preset: str, file: str, change: dict[str, Any]
) -> None:
    key = next(iter(next(iter(change.values())) if file == BOTH else change))
    with pytest.raises(CheckpointError, match=f"{key}.*supported"):
        registry.read(changed(tmp_path, preset, file, change))


def test_nemotron_under_the_names_of_published_files(tmp_path: Path) -> None:
    preset = ModelOptions(id="nemotron-3-nano-omni", load_format="dummy")
    published = registry.read(preset)
    config = {"llm_config": None, "text_config": {"hidden_size": 2688}, "vit_hidden_size": None}
    names = {"model_type": "nemotron_h_omni", "vision_hidden_size": 1280}
    todays = registry.read(changed(tmp_path, preset.id, CONFIG, config | names))
    assert replace(todays, id=published.id, dummy=True, vision=published.vision) == published
    assert published.mean == tuple(CLIP_PIXELS["image_mean"])
    assert published.video
    assert published.video.sampling == Evenly(256, 2.0, by_fps=True)
    assert not published.vision["final_norm"]
    for settings, rule in (
        ({"num_frames": 8}, Evenly(8)),
        ({"fps": 1}, Evenly(256, 1.0, by_fps=True)),
    ):
        video = registry.read(changed(tmp_path, preset.id, PROCESSOR, settings)).video
        assert video
        assert video.sampling == rule
    predicts = {"llm_config": {"hidden_size": 4096, "num_nextn_predict_layers": 1}}
    assert registry.read(changed(tmp_path, preset.id, CONFIG, predicts)).vision["final_norm"]
    still = changed(tmp_path, preset.id, VISION, {"video_temporal_patch_size": 4})
    assert registry.read(still).kinds == ("image",)
    sounds = registry.read(preset.model_copy(update={"tower": "audio"}))
    assert (sounds.kinds, sounds.width) == (("audio",), 2688)
    silent = changed(tmp_path, preset.id, CONFIG, {"sound_config": None})
    with pytest.raises(CheckpointError, match="audio_config: there is none, and so no audio tower"):
        registry.read(silent.model_copy(update={"tower": "audio"}))


def test_nemotrons_range_is_not_empty() -> None:
    model = registry.read(ModelOptions(id="nemotron-3-nano-omni", load_format="dummy"))
    asked = model.asked("image", ProcessorKwargs(max_patches=2048))
    assert asked.sizing == PatchRange(16, 2, 1024, 2048)
    with pytest.raises(InvalidOption, match="max_patches: 1024 is not over the fewest"):
        model.asked("image", ProcessorKwargs(max_patches=1024))


IMAGES = {
    **{"crop_size": 448, "embedding_cls": "tune_image", "hd_transform_order": "sub_glb"},
    **{"image_token_compression_cls": "avg_pool_2d", "projection_cls": "mlp"},
    **{"use_hd_transform": True, "with_learnable_separator": True},
}


def test_phi4_under_the_names_of_its_own_code(tmp_path: Path) -> None:
    config = {"model_type": "phi4mm", "hidden_size": 3072, "embd_layer": {}}
    (tmp_path / PROCESSOR).write_text('{"dynamic_hd": 16}')
    options = ModelOptions(id=str(tmp_path))
    config["embd_layer"] = {"image_embd_layer": IMAGES}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    model = registry.read(options)
    preset = registry.read(ModelOptions(id="phi4-multimodal", load_format="dummy"))
    assert (model.family, model.sizing) == ("phi4mm", PaddedCrops(14, 2, 448, 16))
    assert (model.vision, model.mean, model.std) == (preset.vision, preset.mean, preset.std)
    config["embd_layer"] = {"image_embd_layer": IMAGES | {"hd_transform_order": "glb_sub"}}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="hd_transform_order of image_embd_layer: only sub"):
        registry.read(options)


def test_positions_of_siglip2_are_a_square(tmp_path: Path) -> None:
    options = changed(tmp_path, "siglip2-base-naflex", VISION, {"num_patches": 250})
    with pytest.raises(CheckpointError, match="num_patches of vision_config: 250 is no square"):
        registry.read(options)


def test_siglip2_resizes_as_its_processor_says(tmp_path: Path) -> None:
    options = changed(tmp_path, "siglip2-base-naflex", PROCESSOR, {"resample": 3})
    assert registry.read(options).resample == "bicubic"
    (tmp_path / PROCESSOR).write_text("{}")
    assert registry.read(options).resample == "bilinear"


@pytest.mark.parametrize(
    ("settings", "sizing"),
    [
        ({}, LFM2),
        ({"do_image_splitting": False}, replace(LFM2, max_slices=1)),
        ({"use_thumbnail": False, "max_tiles": 4}, replace(LFM2, thumbnail=False, max_slices=4)),
        ({"tile_size": 256, "min_tiles": 1}, replace(LFM2, slice_pixels=256, min_slices=1)),
    ],
)
def test_tiles_of_lfm2_vl(settings: dict[str, Any], sizing: SquareSlices, tmp_path: Path) -> None:
    change = {"image_processor": settings}
    options = changed(tmp_path, "lfm25vl-1.6b", "processor_config.json", change)
    assert registry.read(options).sizing == sizing


def test_tiles_of_lfm2_vl_are_whole_blocks(tmp_path: Path) -> None:
    change = {"image_processor": {"tile_size": 500}}
    options = changed(tmp_path, "lfm25vl-1.6b", "processor_config.json", change)
    with pytest.raises(CheckpointError, match=r"tile_size .*: 500, only multiples of 32"):
        registry.read(options)


@pytest.mark.parametrize(("kind", "reason"), [("lfm2-vl", "first release"), ("lfm3_vl", "conv")])
def test_relatives_of_lfm2_vl_are_refused(kind: str, reason: str, tmp_path: Path) -> None:
    options = changed(tmp_path, "lfm25vl-1.6b", CONFIG, {"model_type": kind})
    with pytest.raises(CheckpointError, match=f"{reason}.* The nearest that is served is lfm2_vl"):
        registry.read(options)
