"""Kimi-VL (moonshotai/Kimi-VL-A3B-*, not in transformers) and Kimi-K2.5 (moonshotai/Kimi-K2.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.spec.checkpoint import Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Paced
from actors.spec.settings import CLIP_PIXELS, HALVES, ModelSource, only
from actors.spec.sizing import CappedSizing, ShrinkingSizing
from actors.spec.video import PooledGroups

SIDE_PATCHES = 512
"""Kimi-VL's own processor always rejects images with this many patches on a side."""

GROUP_FRAMES, FRAME_PATCHES = 4, 4096
"""Frames of a group and patches of a frame, as published for Kimi-K2.5."""

MOST_FRAMES = 2048
"""Kimi-K2.5 itself has no limit. This is more than the service accepts by default."""


def kimivl(source: ModelSource) -> ModelSpec:
    vision, processor = source.vision, source.image_processor(CLIP_PIXELS)
    if processor.get("pad_input") is not True:
        raise ValueError("pad_input of the image processor: only true is supported")
    if vision["init_pos_emb_height"] != vision["init_pos_emb_width"]:
        raise ValueError("init_pos_emb_height: only that of init_pos_emb_width is supported")
    sizing = CappedSizing(
        patch_size=int(vision["patch_size"]),
        merge_size=merge_size(vision),
        max_patches=int(processor.get("in_token_limit", 4096)),
        max_side_patches=SIDE_PATCHES,
    )
    return source.spec("kimi_vl", processor, vision, sizing, source.text_width)


def kimik25(source: ModelSource) -> ModelSpec:
    """As in transformers.models.kimi_k25."""
    # Published keys have a prefix, transformers' keys have none.
    plain = {key.removeprefix("vt_"): value for key, value in source.vision.items()}
    side = plain.get("init_pos_emb_height", plain.get("pos_emb_height"))
    if side != plain.get("init_pos_emb_width", plain.get("pos_emb_width")):
        raise ValueError("init_pos_emb_height: only that of init_pos_emb_width is supported")
    media = media_of(source)
    only(media, {"fixed_output_tokens": None}, "the image processor")
    sizing = ShrinkingSizing(
        patch_size=int(plain["patch_size"]),
        merge_size=merge_size(plain),
        max_patches=int(media.get("in_patch_limit", 16384)),
        max_side_patches=int(media.get("patch_limit_on_one_side", 512)),
    )
    frames = plain.get("init_pos_emb_time", plain.get("pos_emb_time", 4))
    vision = plain | {"init_pos_emb_height": side, "pos_emb_time": frames}
    model = source.spec(
        "kimi_k25", HALVES | media, vision, sizing, source.text_width, folder="kimi_vl"
    )
    return replace(model, video=grouped_video(sizing, int(frames), media))


def media_of(source: ModelSource) -> Json:
    """`media_proc_cfg` of the published image processor, or the same keys from what transformers
    saves."""
    image = source.image_processor({})
    if "media_proc_cfg" in image:
        return dict(image["media_proc_cfg"])
    video = source.video_processor()
    only(video, {"size": image.get("size")}, "the video processor")
    named = {
        "image_mean": image.get("image_mean"),
        "image_std": image.get("image_std"),
        "in_patch_limit": image.get("max_patches"),
        "patch_limit_on_one_side": image.get("size", {}).get("max_height"),
        "in_patch_limit_each_frame": video.get("max_patches"),
        "sample_fps": video.get("fps"),
        "temporal_merge_kernel_size": video.get("temporal_patch_size"),
    }
    return {key: value for key, value in named.items() if value is not None}


def merge_size(vision: Json) -> int:
    merge, other = vision["merge_kernel_size"]
    if merge != other:
        raise ValueError("merge_kernel_size: only squares are supported")
    return int(merge)


def grouped_video(sizing: ShrinkingSizing, longest_group: int, media: Json) -> PooledGroups:
    """How videos are divided, as `media_proc_cfg` says."""
    only(media, {"in_patch_limit_video": None}, "the image processor")
    each = int(media.get("in_patch_limit_each_frame") or FRAME_PATCHES)
    rule = Paced(
        float(media.get("sample_fps") or 2),
        int(media.get("max_num_frames_each_video") or MOST_FRAMES),
    )
    group = int(media.get("temporal_merge_kernel_size") or GROUP_FRAMES)
    if group > longest_group:
        raise ValueError(f"temporal_merge_kernel_size: {group} is over pos_emb_time")
    pictures = replace(sizing, max_patches=each)
    return PooledGroups(rule, sizing.patch_size, sizing.merge_size, group, pictures=pictures)


MODEL_TYPES = {"kimi_vl": kimivl, "kimi_k25": kimik25}
MOON: Json = {
    **{"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304},
    **{"num_attention_heads": 16, "patch_size": 14, "merge_kernel_size": [2, 2]},
}
VISION_DEFAULTS: Mapping[str, Json] = {
    "kimi_vl": MOON | {"init_pos_emb_height": 64, "init_pos_emb_width": 64},
    "kimi_k25": MOON | {"pos_emb_height": 64, "pos_emb_width": 64, "pos_emb_time": 4},
}
"""From the configuration class in Kimi-VL's own code, and from transformers' for Kimi-K2.5."""
