"""What the JSON files of CLIP, SigLIP, their kin, PaddleOCR-VL and Kimi-K2.5 say; refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from actors.engine.budgets import model_capacity
from actors.errors import CheckpointError, TooLarge
from actors.families import registry
from actors.models.load import family_of
from actors.options import GraphOptions, ModelOptions
from actors.spec.checkpoint import Preset
from actors.spec.sizing import FittedSizing, PackedSizing, RoundingSizing, ShrinkingSizing
from actors.spec.tiles import AnyresSizing, OneTile, SplitTiles
from actors.types import Clip, ItemPlan, Size
from tests.unit.spec.test_tile_spec import CONFIGS, PROCESSOR, changed

SIGLIP = OneTile(378, 14, 1, 1, picture_pixels=384, cropped=False, class_tokens=0)
CLIP = OneTile(336, 14, 1, 1, picture_pixels=336, cropped=True, class_tokens=1)
LLAVA = OneTile(336, 14, 1, 1, picture_pixels=336, cropped=True, class_tokens=0)
DINOV2 = OneTile(*(224, 14, 1, 1, 224), cropped=True, class_tokens=1, shorter_pixels=256)
AIMV2 = OneTile(*(224, 14, 1, 1, 224), cropped=True, class_tokens=0)
MLCD = OneTile(*(448, 14, 1, 1, 448), cropped=True, class_tokens=1)
DINOV3 = OneTile(*(224, 16, 1, 1, 224), cropped=False, class_tokens=5)
SMOLVLM = SplitTiles(378, 14, 3, 16, picture_pixels=384, longest_pixels=1536)
GRANITE = "granite-vision-4.1-4b"
LLAVA_NEXT = AnyresSizing(
    *(336, 14, 1, 4, 336), canvases=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)), most_tiles=4
)
PALIGEMMA = OneTile(224, 14, 1, 1, picture_pixels=224, cropped=False, class_tokens=0)


@pytest.mark.parametrize(
    ("preset", "family", "sizing", "width"),
    [
        ("siglip-so400m", "siglip", SIGLIP, 1152),
        ("clip-vit-l-336", "clip", CLIP, 1024),
        ("dinov2-base", "dinov2", DINOV2, 768),
        ("dinov3-vitb16", "dinov3_vit", DINOV3, 768),
        ("aimv2-large-224", "aimv2_vision_model", AIMV2, 1024),
        ("mlcd-bigg-448", "mlcd", MLCD, 1664),
        ("llava15-7b", "llava", LLAVA, 4096),
        ("paligemma2-3b", "paligemma", PALIGEMMA, 2304),
        ("smolvlm2-2b", "idefics3", SMOLVLM, 2048),
        ("llava-next-7b", "llava_next", LLAVA_NEXT, 4096),
        ("llava-next-video-7b", "llava_next_video", LLAVA_NEXT, 4096),
        ("pixtral-12b", "pixtral", FittedSizing(16, 1, 1024), 5120),
        ("mistral-small31", "mistral3", FittedSizing(14, 2, 1540), 5120),
        ("lighton-ocr", "lighton_ocr", FittedSizing(14, 2, 1540), 1024),
        ("kimik25", "kimi_k25", ShrinkingSizing(14, 2, 16384, 512), 7168),
        ("paddleocr-vl", "paddleocr_vl", RoundingSizing(14, 2, 147384, 2822400), 1024),
        ("videollama3-7b", "video_llama_3", PackedSizing(14, 1, 3136, 3211264), 3584),
    ],
)
def test_presets(preset: str, family: str, sizing: object, width: int) -> None:
    model = registry.read(ModelOptions(id=preset, load_format="dummy"))
    assert (model.family, model.sizing, model.width) == (family, sizing, width)
    assert (model.paths, model.deepstack) == (("default",), 0)
    with_videos = family in ("kimi_k25", "llava_next_video")
    assert model.kinds == (("image", "video") if with_videos else ("image",))


@pytest.mark.parametrize(
    ("preset", "width"),
    [
        ("siglip-so400m", 1152),
        ("clip-vit-l-336", 768),
        ("siglip2-base-naflex", 768),
        ("dinov2-base", 768),
        ("dinov3-vitb16", 768),
        ("mlcd-bigg-448", 1664),
    ],
)
def test_vectors(preset: str, width: int) -> None:
    """Presets have no text tower."""
    model = registry.read(ModelOptions(id=preset, load_format="dummy", output="vector"))
    plan, tokens = model.sizing.plan(Size(512, 512)), model.sizing.token_range()[0]
    assert (model.vector, model.width, model.text_plan) == (True, width, None)
    assert (plan.tokens, plan.path_tokens, model.paths) == (1, (tokens,), ("default",))


TEXTS = {"hidden_size": 768, "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("preset", "tokens", "budgets"),
    [
        ("siglip-so400m", 64, (64, 128, 256, 512, 1024)),
        ("siglip2-base-naflex", 64, (64, 128, 256, 512, 1024)),
        ("clip-vit-l-336", 77, (77, 154, 308)),
    ],
)
def test_texts(tmp_path: Path, preset: str, tokens: int, budgets: tuple[int, ...]) -> None:
    """Each is padded to the longest, on a path of its own."""
    width = {} if preset.startswith("siglip2") else PROJECTED
    options = changed(tmp_path, preset, "config.json", {"text_config": TEXTS | width})
    model = registry.read(options.model_copy(update={"output": "vector"}))
    assert model.text_plan == ItemPlan((1, 1, tokens), tokens, 1, (0, tokens))
    assert model.sizing.plan(Size(512, 512)).path_tokens == (model.sizing.token_range()[0], 0)
    room = model_capacity(GraphOptions(), model)
    images, texts = room.budgets
    assert (images[:2], texts[: len(budgets) + 1]) == (
        (0, model.sizing.token_range()[0]),
        (0, *budgets),
    )
    assert room.tokens == (images[-1], texts[-1]) == (images[-1], 16 * tokens)


@pytest.mark.parametrize(
    ("preset", "side", "text", "published"),
    [
        ("clip-vit-l-336", 224, (768, 3072, 12, 12), 427_616_513),
        ("siglip-so400m", 384, (1152, 4304, 27, 16), 877_960_498),
    ],
)
def test_a_model_has_all_the_parameters_of_its_checkpoint(
    tmp_path: Path, preset: str, side: int, text: tuple[int, ...], published: int
) -> None:
    """Of openai/clip-vit-large-patch14 and google/siglip-so400m-patch14-384, besides the scale of
    their scores (and SigLIP's bias), which vectors do not need."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = {"text_config": dict(zip(keys, text, strict=True)), **vision(preset, image_size=side)}
    changed(tmp_path, preset, PROCESSOR, {"size": side, "crop_size": side})
    options = changed_again(tmp_path, sizes)
    expected = family_of(registry.read(options)).expected.values()
    assert published - sum(map(math.prod, expected)) == (1 if preset.startswith("clip") else 2)


def test_dinov3_has_all_the_parameters_of_its_checkpoint() -> None:
    """Of facebook/dinov3-vitb16-pretrain-lvd1689m, besides the token for what is masked."""
    expected = family_of(registry.read(ModelOptions(id="dinov3-vitb16", load_format="dummy")))
    assert sum(map(math.prod, expected.expected.values())) == 85_660_416 - 768


def test_aimv2_has_all_the_parameters_of_its_checkpoint() -> None:
    """Of apple/aimv2-large-patch14-224."""
    expected = family_of(registry.read(ModelOptions(id="aimv2-large-224", load_format="dummy")))
    assert sum(map(math.prod, expected.expected.values())) == 309_197_824


def test_mlcd_has_all_the_parameters_of_its_checkpoint() -> None:
    """Of DeepGlint-AI/mlcd-vit-bigG-patch14-448: 7369398992 bytes of float32."""
    options = ModelOptions(id="mlcd-bigg-448", load_format="dummy", output="vector")
    expected = family_of(registry.read(options)).expected.values()
    assert sum(map(math.prod, expected)) == 7_369_398_992 // 4


def changed_again(folder: Path, change: dict[str, Any]) -> ModelOptions:
    """Of the folder's config.json, for vectors."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return ModelOptions(id=str(folder), output="vector")


PROJECTED = {"projection_size": 1152}
"""Of SigLIP's texts; CLIP's `projection_dim` is not in `text_config`."""


@pytest.mark.parametrize(
    ("preset", "change", "message"),
    [
        ("llava15-7b", {}, "output is vector, but the family llava has no pooled output"),
        ("siglip-so400m", {"text_config": TEXTS}, "projection_size of text_config: 768, .* 1152"),
        ("siglip-so400m", {"vision_config": {"vision_use_head": False}}, "vision_use_head"),
    ],
)
def test_vectors_that_are_not_there(
    tmp_path: Path, preset: str, change: dict[str, Any], message: str
) -> None:
    if "vision_config" in change:
        change = vision(preset, **change["vision_config"])
    options = changed(tmp_path, preset, "config.json", change)
    with pytest.raises(CheckpointError, match=message):
        registry.read(options.model_copy(update={"output": "vector"}))


def vision(preset: str, **change: Any) -> dict[str, Any]:
    config = Preset(preset).files["config.json"]
    return {"vision_config": config["vision_config"] | change}


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("preset", "file", "change", "message"),
    [
        ("siglip-so400m", PROCESSOR, {"size": {"height": 224, "width": 224}}, "tower's 384"),
        ("siglip-so400m", PROCESSOR, {"resample": 4}, r"resample .* 4 is none of"),
        ("clip-vit-l-336", PROCESSOR, {"resample": 2}, "resample"),
        ("clip-vit-l-336", PROCESSOR, {"size": {"shortest_edge": 224}}, "tower's 336"),
        ("clip-vit-l-336", PROCESSOR, {"size": {"height": 336, "width": 336}}, "a shortest_edge"),
        ("clip-vit-l-336", PROCESSOR, {"crop_size": 224}, "crop_size .* only 336"),
        ("clip-vit-l-336", PROCESSOR, {"do_center_crop": False}, "do_center_crop"),
        ("dinov2-base", "config.json", {"hidden_act": "silu"}, "hidden_act"),
        ("dinov2-base", "config.json", {"qkv_bias": False}, "qkv_bias"),
        ("dinov2-base", PROCESSOR, {"do_center_crop": False}, "do_center_crop"),
        ("dinov2-base", PROCESSOR, {"crop_size": 288}, "256, where only a shortest_edge .* 288"),
        ("dinov2-base", PROCESSOR, {"size": {"height": 9, "width": 9}}, "only a shortest_edge"),
        ("dinov2-base", PROCESSOR, {"resample": 2}, "resample"),
        ("aimv2-large-224", "config.json", {"is_native": True}, "is_native"),
        ("aimv2-large-224", "config.json", {"hidden_act": "gelu"}, "only silu"),
        ("aimv2-large-224", "config.json", {"model_type": "aimv2"}, "pooling"),
        ("mlcd-bigg-448", "config.json", {"num_key_value_groups": 2}, "num_key_value_groups"),
        ("dinov3-vitb16", "config.json", {"hidden_act": "silu"}, "hidden_act"),
        ("dinov3-vitb16", "config.json", {"use_gated_mlp": True}, "hidden_act .* only silu"),
        ("dinov3-vitb16", "config.json", {"model_type": "dinov3_convnext"}, "without attention"),
        ("dinov3-vitb16", PROCESSOR, {"do_center_crop": True}, "do_center_crop"),
        ("dinov3-vitb16", PROCESSOR, {"size": {"height": 9, "width": 8}}, "only squares"),
        ("dinov3-vitb16", PROCESSOR, {"size": {"shortest_edge": 224}}, "only height and width"),
        ("dinov3-vitb16", PROCESSOR, {"resample": 4}, "4 is none of"),
        ("llava15-7b", "config.json", {"projector_hidden_act": "relu"}, "projector_hidden_act"),
        ("llava15-7b", "config.json", vision("llava15-7b", model_type="vit"), "'vit' is none of"),
        ("llava15-7b", "config.json", vision("siglip-so400m"), "SigLIP has no class"),
        ("llava15-7b", "config.json", {"vision_feature_layer": [-2, -5]}, "not in ascending order"),
        (
            "llava15-7b",
            "config.json",
            {"vision_feature_layer": 25},
            "25 is not supported, as there",
        ),
        ("llava15-7b", PROCESSOR, {"do_pad": True}, "do_pad of the image processor: only False"),
        ("llava-next-7b", "config.json", {"vision_feature_select_strategy": "full"}, "of CLIP"),
        ("llava-next-7b", PROCESSOR, {"crop_size": 224}, "crop_size .* only 336"),
        ("llava-next-7b", PROCESSOR, {"size": {"shortest_edge": 224}}, "tower's 336"),
        ("llava-next-7b", PROCESSOR, {"image_grid_pinpoints": [[336, 336]]}, "differ"),
        ("llava-next-video-7b", "config.json", {"spatial_pool_mode": "max"}, "spatial_pool_mode"),
        ("llava-next-video-7b", "config.json", {"spatial_pool_stride": 3}, "spatial_pool_stride"),
        (GRANITE, "config.json", vision("clip-vit-l-336"), "only siglip_vision_model"),
        (GRANITE, "config.json", {"vision_feature_select_strategy": "default"}, "only full"),
        (GRANITE, "config.json", {"spatial_target_layers": [12, 15]}, "only 4 layers"),
        (GRANITE, "config.json", {"deepstack_layer_map": [[-29, 0]]}, "as there are 27 layers"),
        (GRANITE, "config.json", {"downsample_rate": "3/8"}, "3/8 is not one half"),
        (GRANITE, "config.json", {"downsample_rate": "5/10"}, "in whole windows"),
        (GRANITE, "config.json", {"qformer_config": {"num_hidden_layers": 2}}, "qformer_config"),
        (GRANITE, PROCESSOR, {"crop_size": 224}, "crop_size .* only 384"),
        ("paligemma2-3b", "config.json", vision("clip-vit-l-336"), "only siglip_vision_model"),
        ("paligemma2-3b", "config.json", vision("paligemma2-3b", hidden_act="gelu"), "hidden_act"),
        ("paligemma2-3b", PROCESSOR, {"size": {"height": 448, "width": 448}}, "tower's 224"),
        ("paligemma2-3b", PROCESSOR, {"resample": 2}, "resample"),
        ("smolvlm2-2b", PROCESSOR, {"do_image_splitting": False}, "do_image_splitting"),
        ("smolvlm2-2b", PROCESSOR, {"max_image_size": {"longest_edge": 364}}, "tower's 384"),
        ("smolvlm2-2b", PROCESSOR, {"size": {"longest_edge": 1400}}, "only multiples of 384"),
        ("smolvlm2-2b", PROCESSOR, {"size": {"longest_edge": 4224}}, "up to 4096"),
        ("smolvlm2-2b", PROCESSOR, {"resample": 3}, "resample of the image processor: only 1"),
        ("pixtral-12b", "config.json", {"vision_feature_layer": -2}, "only full and -1"),
        ("pixtral-12b", "config.json", vision("pixtral-12b", hidden_act="gelu"), "hidden_act"),
        ("mistral-small31", "config.json", {"vision_feature_layer": -2}, "vision_feature_layer"),
        ("lighton-ocr", "config.json", vision("lighton-ocr", hidden_act="gelu"), "hidden_act"),
        ("kimik25", "config.json", vision("kimik25", init_pos_emb_width=32), "init_pos_emb_height"),
        ("kimik25", "config.json", vision("kimik25", merge_kernel_size=[2, 1]), "only squares"),
        ("kimik25", PROCESSOR, {"media_proc_cfg": {"fixed_output_tokens": 9}}, "fixed_output"),
        ("kimik25", PROCESSOR, {"media_proc_cfg": {"in_patch_limit_video": 9}}, "limit_video"),
        ("kimik25", PROCESSOR, {"media_proc_cfg": {"temporal_merge_kernel_size": 5}}, "pos_emb"),
        ("paddleocr-vl", "config.json", vision("paddleocr-vl", hidden_act="relu"), "hidden_act"),
        ("videollama3-7b", PROCESSOR, {"merge_size": 2}, "merge_size"),
        (
            "videollama3-7b",
            "config.json",
            vision("videollama3-7b", **LINEAR),
            "rope_type .* linear",
        ),
        ("videollama3-7b", "config.json", {"model_type": "videollama3_qwen2"}, "-HF"),
    ],
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, preset: str, file: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        registry.read(changed(tmp_path, preset, file, change))


@pytest.mark.parametrize("preset", ["siglip-so400m", "clip-vit-l-336", "llava15-7b"])
def test_an_unknown_activation_is_named_before_weights_are_read(
    tmp_path: Path, preset: str
) -> None:
    change = vision(preset, hidden_act="relu")
    model = registry.read(changed(tmp_path, preset, "config.json", change))
    with pytest.raises(CheckpointError, match="hidden_act 'relu': supported are"):
        family_of(model)


ONEVISION, VIDEO_PROCESSOR = "llava-onevision-7b", "video_preprocessor_config.json"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"vision_feature_layer": -2}, "vision_feature_layer"),
        ("config.json", {"vision_aspect_ratio": "anyres"}, "no anyres_max_N"),
        ("config.json", {"vision_aspect_ratio": "anyres_max_0"}, "no anyres_max_N"),
        ("config.json", {"vision_aspect_ratio": 9}, "9 is no anyres_max_N"),
        ("config.json", {"image_grid_pinpoints": [[384, 400]]}, "only whole tiles of 384"),
        ("config.json", {"image_grid_pinpoints": [[384, -384]]}, "only whole tiles of 384"),
        ("config.json", vision(ONEVISION, model_type="clip_vision_model"), "siglip_vision_model"),
        (PROCESSOR, {"size": {"height": 224, "width": 224}}, "tower's 384"),
        (VIDEO_PROCESSOR, {"fps": 2}, "fps of the video processor"),
        (VIDEO_PROCESSOR, {"size": 224}, "size of the video processor"),
        ("config.json", {"model_type": "llava", "mm_vision_tower": "vit"}, "'vit' is none of"),
    ],
)
def test_what_is_not_supported_of_llava_onevision_is_named(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    options = changed(tmp_path, ONEVISION, file, change)
    if file == VIDEO_PROCESSOR:
        (tmp_path / file).write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=message):
        registry.read(options)


def test_canvases_of_llava_onevision(tmp_path: Path) -> None:
    grid = {"image_grid_pinpoints": [[384, 384], [384, 1152]]}
    options = changed(tmp_path, ONEVISION, "config.json", grid)
    sizing = registry.read(options).sizing
    assert isinstance(sizing, AnyresSizing)
    assert (sizing.canvases, sizing.max_tiles, sizing.most_tiles) == (((1, 1), (1, 3)), 3, 9)
    (tmp_path / PROCESSOR).write_text(json.dumps({"image_grid_pinpoints": [[384, 384]]}))
    with pytest.raises(CheckpointError, match="and the image processor differ"):
        registry.read(options)


def test_frames_of_llava_onevision(tmp_path: Path) -> None:
    options = changed(tmp_path, ONEVISION, "config.json", {})
    assert registry.read(options).max_frames_per_video == 32
    (tmp_path / VIDEO_PROCESSOR).write_text(json.dumps({"num_frames": 8}))
    assert registry.read(options).max_frames_per_video == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fps": 2}, "fps of the video processor"),
        ({"do_center_crop": False}, "do_center_crop of the video processor"),
        ({"size": {"shortest_edge": 224}}, "size of the video processor: only the tower's 336"),
        ({"size": {"height": 336, "width": 336}}, "only a shortest_edge"),
        ({"crop_size": 224}, "crop_size of the video processor: only the tower's 336"),
    ],
)
def test_frames_of_llava_next_video(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    options = changed(tmp_path, "llava-next-video-7b", "config.json", {})
    (tmp_path / VIDEO_PROCESSOR).write_text(json.dumps({"num_frames": 8}))
    assert registry.read(options).max_frames_per_video == 8
    (tmp_path / VIDEO_PROCESSOR).write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=message):
        registry.read(options)


def test_features_of_granite4_vision() -> None:
    """Four layers, and four times one of them; a feature is as wide as the language model."""
    model = registry.read(ModelOptions(id=GRANITE, load_format="dummy"))
    sizing = model.sizing
    assert isinstance(sizing, AnyresSizing)
    assert (model.width, model.deepstack, model.kinds) == (8 * 2560, 7, ("image",))
    assert (model.vision["taps"], model.vision["used_layers"]) == ([9, 15, 21], 27)
    assert model.vision["features"] == [0, 1, 2, 3, 3, 3, 3, 3]
    assert (sizing.tile_tokens, sizing.max_tiles, len(sizing.canvases)) == (144, 10, 27)


def test_a_frame_that_is_too_long_is_refused() -> None:
    video = registry.read(ModelOptions(id="llava-next-video-7b", load_format="dummy")).video
    assert video
    with pytest.raises(TooLarge, match="aspect ratio"):
        video.plan(Clip(Size(20100, 100), 8, 1.0))


def test_a_siglip_tower_in_llava_stops_at_the_layer_that_is_used(tmp_path: Path) -> None:
    tower = vision("siglip-so400m") | {"vision_feature_select_strategy": "full"}
    options = changed(tmp_path, "llava15-7b", "config.json", tower)
    square = Preset("siglip-so400m").files[PROCESSOR]
    (tmp_path / PROCESSOR).write_text(json.dumps(square))
    model = registry.read(options)
    assert model.sizing == SIGLIP
    assert model.vision["used_layers"] == 26
    options = changed(tmp_path, "llava15-7b", "config.json", tower | {"vision_feature_layer": -1})
    (tmp_path / PROCESSOR).write_text(json.dumps(square))
    assert registry.read(options).vision["used_layers"] == 27


def test_paligemmas_differ_in_width_and_size(tmp_path: Path) -> None:
    change = vision("paligemma2-3b", image_size=448, projection_dim=9) | {"projection_dim": None}
    options = changed(tmp_path, "paligemma2-3b", "config.json", change)
    (tmp_path / PROCESSOR).write_text('{"size": {"height": 448, "width": 448}}')
    model = registry.read(options)
    assert (model.width, model.sizing.plan(Size(1000, 3)).tokens) == (2048, 32**2)
    assert (model.mean, model.std, model.resample) == ((0.5,) * 3, (0.5,) * 3, "bicubic")


def test_keys_that_published_files_leave_out(tmp_path: Path) -> None:
    options = changed(tmp_path, "clip-vit-l-336", "config.json", {"vision_config": {}})
    (tmp_path / PROCESSOR).write_text('{"size": 224, "crop_size": 224, "resample": 3}')
    model = registry.read(options)
    assert model.sizing == OneTile(224, 32, 1, 1, 224, cropped=True, class_tokens=1)
    assert model.vision["num_hidden_layers"] == 12


@pytest.mark.parametrize(
    ("preset", "model_type", "width"),
    [
        ("llava15-7b", "llama", 4096),
        ("llava-next-7b", "mistral", 4096),
        ("llava-next-video-7b", "llama", 4096),
        ("smolvlm2-2b", "llama", 4096),
        ("internvl3-8b", "qwen3", 4096),
        ("aya-vision-8b", "cohere2", 8192),
    ],
)
def test_a_width_that_published_files_leave_out(
    tmp_path: Path, preset: str, model_type: str, width: int
) -> None:
    """As llava-hf/llava-1.5-7b-hf does: older versions of transformers did not save defaults."""
    text = {"text_config": {"model_type": model_type}}
    assert registry.read(changed(tmp_path, preset, "config.json", text)).width == width
    assert CONFIG_MAPPING[model_type]().hidden_size == width


def test_an_epsilon_that_published_files_leave_out(tmp_path: Path) -> None:
    text = {"model_type": "mistral", "hidden_size": 64}
    options = changed(tmp_path, "mistral-small31", "config.json", {"text_config": text})
    theirs = CONFIG_MAPPING["mistral3"](text_config=text).text_config.rms_norm_eps
    assert registry.read(options).vision["projector_epsilon"] == theirs


def test_a_pack_holds_many_small_images() -> None:
    assert CLIP.token_range() == (577, 16 * 577)
    assert SIGLIP.plan(Size(1000, 3)).tokens == 729


@pytest.mark.parametrize(
    "name",
    [
        *("siglip", "clip", "dinov2", "llava", "paligemma", "pixtral", "mistral3", "lighton_ocr"),
        *("llava_next", "llava_next_video", "granite4_vision", "smolvlm", "paddleocr", "kimik25"),
        *("siglip2", "lfm2_vl", "dinov3", "video_llama_3", "mlcd", "aimv2"),
    ],
)
def test_there_is_a_config(name: str) -> None:
    assert (CONFIGS / f"{name}.yaml").is_file()
