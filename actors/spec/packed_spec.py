"""The packed families' configurations: a function each, from config.json to a ModelSpec.

What a tower or its preprocessing does not do is refused here, by the key that asks for it. Knows
nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec, image_processor, image_spec, only
from actors.spec.sizing import (
    BlockSizing,
    CappedSizing,
    EnlargingSizing,
    FittedSizing,
    PackedSizing,
    RoundingSizing,
    ShrinkingSizing,
)
from actors.spec.video_spec import (
    grouped_video,
    spread_video,
    strided_video,
    thinning_video,
    timed_video,
)

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]

KIMI_SIDE_PATCHES = 512
"""As many patches on a side are refused by Kimi-VL's own processor, whatever its settings."""


def qwen3vl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Qwen3-VL, dense and MoE: transformers.models.qwen3_vl (the towers are the same)."""
    vision, processor = config["vision_config"], image_processor(files)
    deepstack = len(vision["deepstack_visual_indexes"])
    model = packed(
        "qwen3_vl",
        options,
        {"image_mean": 0.5, "image_std": 0.5} | processor,
        vision,
        resized_to(vision, pixel_range(processor, 65536, 16777216)),
        int(vision["out_hidden_size"]) * (1 + deepstack),
    )
    return spread_video(replace(model, deepstack=deepstack), files)


def qwen35(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Qwen3.5, dense and MoE: transformers.models.qwen3_5; Qwen3-VL's tower without deepstack."""
    vision = config["vision_config"] | {"deepstack_visual_indexes": []}
    return replace(qwen3vl(options, files, {"vision_config": vision}), family="qwen3_5")


def qwen2vl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Qwen2-VL: transformers.models.qwen2_vl. Its `hidden_size` is the language model's."""
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "quick_gelu"}, "vision_config")
    sizing = resized_to(vision, pixel_range(processor, 3136, 1003520))
    model = packed("qwen2_vl", options, processor, vision, sizing, vision["hidden_size"])
    return strided_video(model, files)


def qwen25vl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Qwen2.5-VL: transformers.models.qwen2_5_vl."""
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "silu"}, "vision_config")
    sizing = resized_to(vision, pixel_range(processor, 3136, 1003520))
    model = packed("qwen2_5_vl", options, processor, vision, sizing, vision["out_hidden_size"])
    return strided_video(model, files)


def glm4v(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """GLM-4.1V, GLM-4.5V: transformers.models.glm4v."""
    return timed_video(glm(options, files, config), files)


def glm46v(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """GLM-4.6V: transformers.models.glm46v, of glm4v's tower."""
    return thinning_video(glm(options, files, config), files)


def glm(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """What GLM-4.1V, GLM-4.5V and GLM-4.6V share."""
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "silu", "attention_bias": False}, "vision_config")
    smallest, largest = pixel_range(processor, 12544, 11760000)
    # The range counts the pixels of all the frames that are embedded together; an image fills them.
    frames = int(vision["temporal_patch_size"])
    sizing = EnlargingSizing(
        patch_size=int(vision["patch_size"]),
        merge_size=int(vision["spatial_merge_size"]),
        min_pixels=-(-smallest // frames),
        max_pixels=largest // frames,
    )
    return packed("glm4v", options, processor, vision, sizing, vision["out_hidden_size"])


def kimivl(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Kimi-VL: moonshotai/Kimi-VL-A3B-*, whose tower is MoonViT."""
    vision, processor = config["vision_config"], image_processor(files)
    merge, other = vision["merge_kernel_size"]
    if merge != other:
        raise ValueError("merge_kernel_size: only squares are supported")
    if processor.get("pad_input") is not True:
        raise ValueError("pad_input of the image processor: only true is supported")
    if vision["init_pos_emb_height"] != vision["init_pos_emb_width"]:
        raise ValueError("init_pos_emb_height: only that of init_pos_emb_width is supported")
    sizing = CappedSizing(
        patch_size=int(vision["patch_size"]),
        merge_size=int(merge),
        max_patches=int(processor.get("in_token_limit", 4096)),
        max_side_patches=KIMI_SIDE_PATCHES,
    )
    return packed(
        "kimi_vl", options, processor, vision, sizing, config["text_config"]["hidden_size"]
    )


def kimik25(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Kimi-K2.5: moonshotai/Kimi-K2.5."""
    given = config["vision_config"]
    # Published with a prefix; without it, transformers' names.
    plain = {key.removeprefix("vt_"): value for key, value in given.items()}
    side = plain.get("init_pos_emb_height", plain.get("pos_emb_height"))
    if side != plain.get("init_pos_emb_width", plain.get("pos_emb_width")):
        raise ValueError("init_pos_emb_height: only that of init_pos_emb_width is supported")
    media = (files.read_json("preprocessor_config.json") or {}).get("media_proc_cfg", {})
    only(media, {"fixed_output_tokens": None}, "the image processor")
    merge, other = plain["merge_kernel_size"]
    if merge != other:
        raise ValueError("merge_kernel_size: only squares are supported")
    sizing = ShrinkingSizing(
        patch_size=int(plain["patch_size"]),
        merge_size=int(merge),
        max_patches=int(media.get("in_patch_limit", 16384)),
        max_side_patches=int(media.get("patch_limit_on_one_side", 512)),
    )
    frames = plain.get("init_pos_emb_time", plain.get("pos_emb_time", 4))
    vision = plain | {"init_pos_emb_height": side, "pos_emb_time": frames}
    halves = {"image_mean": 0.5, "image_std": 0.5} | media
    width = config["text_config"]["hidden_size"]
    return grouped_video(packed("kimi_k25", options, halves, vision, sizing, width), media)


PIXTRAL = {
    **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu"},
}
"""What transformers takes for keys that `vision_config` leaves out."""


def pixtral(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Pixtral: LLaVA over its own tower: transformers.models.llava, transformers.models.pixtral."""
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy != "full" or config.get("vision_feature_layer", -2) != -1:
        raise ValueError(
            "vision_feature_select_strategy, vision_feature_layer: of Pixtral only full and -1 "
            "are supported"
        )
    bias = config.get("multimodal_projector_bias", True)
    return fitted("pixtral", options, files, config, {"projector_bias": bias}, merge=1)


def mistral3(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """Mistral Small 3.1 and later: transformers.models.mistral3."""
    only(config, {"vision_feature_layer": -1}, "config.json")
    projector = {
        "projector_bias": config.get("multimodal_projector_bias", False),
        "projector_epsilon": config["text_config"].get("rms_norm_eps", 1e-5),
    }
    merge = config.get("spatial_merge_size", 2)
    return fitted("mistral3", options, files, config, projector, merge)


def fitted(
    family: str, options: ModelOptions, files: Files, config: Json, projector: Json, merge: int
) -> ModelSpec:
    """What Pixtral and Mistral 3 share."""
    vision, processor = PIXTRAL | config["vision_config"], image_processor(files)
    only(config, {"projector_hidden_act": "gelu"}, "config.json")
    only(vision, {"hidden_act": "silu"}, "vision_config")
    size = processor.get("size") or {"longest_edge": vision["image_size"]}
    theta = rope_theta(vision)
    vision |= projector | {"spatial_merge_size": merge, "rope_theta": theta}
    sizing = FittedSizing(int(vision["patch_size"]), merge, int(size["longest_edge"]))
    return packed(family, options, processor, vision, sizing, config["text_config"]["hidden_size"])


def paddleocr(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    """PaddleOCR-VL: transformers.models.paddleocr_vl."""
    vision, processor = config["vision_config"], image_processor(files)
    only(vision, {"hidden_act": "gelu_pytorch_tanh"}, "vision_config")
    vision = {"layer_norm_eps": 1e-6} | vision | {"rope_theta": rope_theta(vision)}
    smallest, largest = pixel_range(processor, 384**2, 1536**2)
    sizing = RoundingSizing(
        int(vision["patch_size"]), int(vision["spatial_merge_size"]), smallest, largest
    )
    # The language model's settings stand beside it in published checkpoints.
    width = config.get("text_config", config)["hidden_size"]
    return packed("paddleocr_vl", options, processor, vision, sizing, width)


def rope_theta(vision: Json) -> float:
    """Under its name of today or of 2024; else transformers' default."""
    today = vision.get("rope_parameters") or {}
    return float(today.get("rope_theta") or vision.get("rope_theta") or 10000.0)


def packed(
    family: str,
    options: ModelOptions,
    processor: Json,
    vision: Json,
    sizing: BlockSizing,
    width: int,
) -> ModelSpec:
    """The spec of a packed family; OpenAI CLIP's mean and deviation unless the processor says."""
    defaults = {"image_mean": CLIP_MEAN, "image_std": CLIP_STD}
    return image_spec(family, options, defaults | processor, vision, sizing, width)


def resized_to(vision: Json, pixels: tuple[int, int]) -> PackedSizing:
    """Images are resized into a range of pixels."""
    return PackedSizing(int(vision["patch_size"]), int(vision["spatial_merge_size"]), *pixels)


def pixel_range(processor: Json, smallest: int, largest: int) -> tuple[int, int]:
    """Of the image processor, under the names of today or of 2024; else its class's defaults."""
    size = {"shortest_edge": smallest, "longest_edge": largest} | (processor.get("size") or {})
    return (
        int(processor.get("min_pixels") or size["shortest_edge"]),
        int(processor.get("max_pixels") or size["longest_edge"]),
    )


FAMILIES: dict[str, Callable[[ModelOptions, Files, Json], ModelSpec]] = {
    "qwen3_vl": qwen3vl,
    "qwen3_vl_moe": qwen3vl,
    "qwen3_5": qwen35,
    "qwen3_5_moe": qwen35,
    "qwen2_vl": qwen2vl,
    "qwen2_5_vl": qwen25vl,
    "glm4v": glm4v,
    "glm4v_moe": glm4v,
    "glm46v": glm46v,
    "kimi_vl": kimivl,
    "kimi_k25": kimik25,
    "mistral3": mistral3,
    "paddleocr_vl": paddleocr,
}
