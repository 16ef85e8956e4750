"""The packed families' configurations: a function each, from config.json to a ModelSpec.

What a tower or its preprocessing does not do is refused here, by the key that asks for it. Knows
nothing of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from actors.checkpoint import Files, Json
from actors.options import ModelOptions
from actors.sizing import BlockSizing, CappedSizing, EnlargingSizing, PackedSizing
from actors.spec import ModelSpec, image_processor, image_spec, only
from actors.video_spec import spread_video, strided_video, thinning_video, timed_video

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
}
