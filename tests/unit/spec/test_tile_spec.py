"""What the JSON files of the tile families say: InternVL, Llama 4, Aya Vision; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors.errors import CheckpointError
from actors.families import registry
from actors.options import ModelOptions
from actors.spec.checkpoint import Preset
from actors.spec.tiles import (
    CentredTile,
    CoveringTiles,
    FilledTiles,
    OverlappingTiles,
    PaddedTiles,
    PartitionedTiles,
    StretchedTiles,
)
from encoder_service import cli

CONFIGS = Path(__file__).parents[3] / "configs"
STRETCHED = StretchedTiles(tile_pixels=448, patch_size=14, merge_size=2, max_tiles=12, min_tiles=1)
JANUS = CentredTile(384, 16, 1, 1, 384, cropped=False, class_tokens=0, shortest_pixels=14)
MOLMO2 = OverlappingTiles(378, 14, 1, 8, window=2, margins=(4, 4))
PADDED = PaddedTiles(tile_pixels=336, patch_size=14, merge_size=2, max_tiles=16)

QIANFAN: dict[str, Any] = {"model_type": "qianfan_ocr", "vision_config": {}}


def changed(folder: Path, preset: str, file: str, change: dict[str, Any]) -> ModelOptions:
    """A preset as a folder, with a file changed; None removes a key."""
    for name, content in Preset(preset).files.items():
        merged = content | change if name == file else content
        kept = {key: value for key, value in merged.items() if value is not None}
        (folder / name).write_text(json.dumps(kept))
    return ModelOptions(id=str(folder))


@pytest.mark.parametrize(
    ("preset", "family", "sizing", "width"),
    [
        ("internvl3-8b", "internvl", STRETCHED, 3584),
        ("internvl3-78b", "internvl_chat", STRETCHED, 8192),
        ("llama4-scout", "llama4", PADDED, 5120),
        ("llama32-vision-11b", "mllama", FilledTiles(560, 14, 1, 4), 4096),
        ("aya-vision-8b", "aya_vision", StretchedTiles(364, 14, 2, 12, 1), 4096),
        ("command-a-vision", "cohere2_vision", CoveringTiles(512, 16, 2, 12, 1), 12288),
        ("janus-pro-1b", "janus", JANUS, 2048),
        ("molmo2-4b", "molmo2", MOLMO2, 2560),
        ("ovis2-2b", "ovis2", PartitionedTiles(448, 14, 2, 12), 1536),
        ("gemma3-4b", "gemma3", StretchedTiles(896, 14, 4, 1, 1), 2560),
    ],
)
def test_presets(preset: str, family: str, sizing: object, width: int) -> None:
    model = registry.read(ModelOptions(id=preset, load_format="dummy"))
    assert (model.family, model.sizing, model.width) == (family, sizing, width)
    assert (model.paths, model.deepstack) == (("default",), 0)
    videos = ("video",) if family.startswith(("internvl", "molmo2")) else ()
    assert model.kinds == ("image", *videos)


def test_qianfan_ocr_has_the_tiles_of_internvl_and_no_videos(tmp_path: Path) -> None:
    options = changed(tmp_path, "internvl3-8b", "config.json", QIANFAN)
    model = registry.read(options)
    assert (model.family, model.sizing, model.kinds) == ("qianfan_ocr", STRETCHED, ("image",))
    assert model.vision["attention_bias"]


def test_without_a_processor_the_means_are_those_of_imagenet(tmp_path: Path) -> None:
    options = changed(tmp_path, "internvl3-8b", "", {})
    (tmp_path / "preprocessor_config.json").unlink()
    model = registry.read(options)
    assert (model.mean, model.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert model.sizing == STRETCHED


def test_pixels_of_llama_32_where_the_processor_does_not_say(tmp_path: Path) -> None:
    """transformers: MllamaImageProcessor, whose published file says CLIP's."""
    absent = {"image_mean": None, "image_std": None}
    model = registry.read(changed(tmp_path, "llama32-vision-11b", PROCESSOR, absent))
    assert (model.mean, model.std) == ((0.5,) * 3, (0.5,) * 3)


def test_ovis2_may_have_one_tile(tmp_path: Path) -> None:
    options = changed(tmp_path, "ovis2-2b", PROCESSOR, {"crop_to_patches": None})
    assert registry.read(options).sizing == PartitionedTiles(448, 14, 2, 1)


def test_tiles_are_limited_by_the_processor_or_by_the_chat_models_own_config(
    tmp_path: Path,
) -> None:
    limits = {"min_patches": 2, "max_patches": 6}
    options = changed(tmp_path, "internvl3-8b", "preprocessor_config.json", limits)
    assert registry.read(options).sizing == StretchedTiles(448, 14, 2, 6, 2)
    options = changed(tmp_path, "internvl3-78b", "config.json", {"max_dynamic_patch": 24})
    assert registry.read(options).sizing == StretchedTiles(448, 14, 2, 24, 1)
    options = changed(tmp_path, "internvl3-78b", "config.json", {"max_dynamic_patch": None})
    assert registry.read(options).sizing == StretchedTiles(448, 14, 2, 6, 1)


CLIP = {"model_type": "clip_vision_model"}
STRIDE = {"hidden_stride": 3, "image_size": 448}
CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"
FRAMES = "video_preprocessor_config.json"


def adapter(**change: Any) -> dict[str, Any]:
    return {"adapter_config": Preset("molmo2-4b").files[CONFIG]["adapter_config"] | change}


@pytest.mark.parametrize(
    ("preset", "file", "change", "message"),
    [
        ("internvl3-8b", "config.json", {"vision_feature_layer": -2}, "vision_feature_layer"),
        (
            "internvl3-8b",
            PROCESSOR,
            {"size": {"height": 224, "width": 224}},
            "only the tower's 448",
        ),
        ("internvl3-8b", PROCESSOR, {"size": {"height": 448, "width": 224}}, "only squares"),
        ("internvl3-8b", PROCESSOR, {"resample": 2}, "resample of the image processor"),
        (
            "internvl3-78b",
            "config.json",
            {"ps_version": None},
            "ps_version of config.json: only v2",
        ),
        ("internvl3-78b", "config.json", {"use_thumbnail": False}, "use_thumbnail"),
        ("internvl3-78b", "config.json", {"select_layer": -4}, "select_layer"),
        (
            "internvl3-8b",
            "config.json",
            QIANFAN | {"vision_config": {"use_qk_norm": True}},
            "use_qk_norm",
        ),
        ("internvl3-78b", "config.json", {"llm_config": {}}, "lacks or misstates 'hidden_size'"),
        ("llama4-scout", PROCESSOR, {"resize_to_max_canvas": True}, "resize_to_max_canvas"),
        ("gemma3-4b", PROCESSOR, {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("aya-vision-8b", "config.json", {"vision_feature_layer": -2}, "vision_feature_layer"),
        ("aya-vision-8b", "config.json", {"vision_config": CLIP}, "only siglip_vision_model"),
        ("command-a-vision", PROCESSOR, {"crop_to_patches": False}, "crop_to_patches"),
        ("janus-pro-1b", "config.json", {"vision_config": {"use_qk_norm": True}}, "use_qk_norm"),
        (
            "ovis2-2b",
            "config.json",
            {"vision_config": {"tokenize_function": "st_argmax"}},
            "softmax",
        ),
        ("ovis2-2b", "config.json", {"vision_config": {"hidden_act": "gelu"}}, "hidden_act"),
        ("ovis2-2b", "config.json", {"vision_config": STRIDE}, "hidden_stride .* divide the 32"),
        ("ovis2-2b", "config.json", {"model_type": "ovis"}, "code of its own"),
        ("ovis2-2b", "config.json", {"model_type": "ovis2_5"}, "its tower is another"),
        ("ovis2-2b", PROCESSOR, {"use_covering_area_grid": False}, "use_covering_area_grid"),
        ("llama4-scout", PROCESSOR, {"resample": 3}, "resample of the image processor"),
        ("molmo2-4b", PROCESSOR, {"patch_size": 16}, "patch_size of the image processor"),
        ("molmo2-4b", PROCESSOR, {"size": {"height": 336, "width": 336}}, "only the tower's 378"),
        ("molmo2-4b", PROCESSOR, {"overlap_margins": [14, 13]}, "leave nothing of a crop"),
        ("molmo2-4b", PROCESSOR, {"pooling_size": [4, 4]}, "pooling_size of the video processor"),
        ("molmo2-4b", FRAMES, {"resample": 3}, "resample of the video processor"),
        ("molmo2-4b", FRAMES, {"size": {"height": 336, "width": 336}}, "size of the video proc"),
        ("molmo2-4b", CONFIG, adapter(hidden_act="gelu"), "hidden_act of adapter_config"),
        ("molmo2-4b", CONFIG, adapter(hidden_size=2304), "hidden_size of adapter_config"),
        ("molmo2-4b", CONFIG, adapter(num_key_value_heads=4), "num_key_value_heads of adapter"),
        ("molmo2-4b", CONFIG, adapter(vit_layers=[-3, -28]), "are not of 27 layers"),
        ("llama32-vision-11b", PROCESSOR, {"max_image_tiles": 2}, "max_image_tiles"),
        ("llama32-vision-11b", PROCESSOR, {"do_pad": False}, "do_pad"),
    ],
)
def test_what_the_tower_does_not_do_is_refused(
    tmp_path: Path, preset: str, file: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        registry.read(changed(tmp_path, preset, file, change))


@pytest.mark.parametrize(
    ("config", "preset", "budgets"),
    [
        ("internvl.yaml", "internvl3-8b", "256 512 768 1024 1280"),
        ("qianfan_ocr.yaml", "internvl3-8b", "256 512 768 1024 1280"),
        ("llama4.yaml", "llama4-scout", "144 288 432 576 720"),
        ("mllama.yaml", "llama32-vision-11b", "6404 12808"),
        ("aya_vision.yaml", "aya-vision-8b", "169 338 507 676 845"),
        ("cohere2_vision.yaml", "command-a-vision", "256 512 768 1024 1280"),
        ("molmo2.yaml", "molmo2-4b", "196 392 588 784 980"),
        ("janus.yaml", "janus-pro-1b", "576 1152"),
        ("ovis2.yaml", "ovis2-2b", "256 512 768 1024 1280"),
        ("gemma3.yaml", "gemma3-4b", "256"),
    ],
)
def test_the_configs_can_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, preset: str, budgets: str
) -> None:
    text = (CONFIGS / config).read_text()
    (model,) = [line for line in text.splitlines() if "model: {id:" in line]
    dummy = f"      model: {{id: {preset}, load_format: dummy}}"
    (tmp_path / config).write_text(text.replace(model, dummy))
    assert cli.main(["check", str(tmp_path / config)]) == 0
    assert budgets in capsys.readouterr().out


def test_layers_of_molmo2(tmp_path: Path) -> None:
    """Published files count two layers that are not there; transformers' own count those that
    are."""
    model = registry.read(ModelOptions(id="molmo2-4b", load_format="dummy"))
    used = {"used_layers": 25, "num_hidden_layers": 25, "taps": [18], "features": [1, 0]}
    assert used.items() <= model.vision.items()
    assert model.max_frames_per_video == 64
    vision = {"vision_config": {}, "vit_config": None} | adapter(vision_feature_layer=[20, 18])
    model = registry.read(changed(tmp_path, "molmo2-4b", CONFIG, vision))
    used = {"used_layers": 21, "num_hidden_layers": 25, "taps": [18], "features": [1, 0]}
    assert used.items() <= model.vision.items()
    assert model.sizing == MOLMO2
