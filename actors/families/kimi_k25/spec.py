"""Kimi-K2.5: moonshotai/Kimi-K2.5; transformers.models.kimi_k25."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from actors.families.kimi_vl.spec import merge_size
from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Paced
from actors.spec.settings import HALVES, Reader, image_spec, only
from actors.spec.sizing import ShrinkingSizing
from actors.spec.video import PooledGroups

GROUP_FRAMES, FRAME_PATCHES = 4, 4096
"""Frames of a group and patches of a frame, as published."""

MOST_FRAMES = 2048
"""Kimi-K2.5 itself has no limit: this is more than the service accepts by default."""


def kimik25(options: ModelOptions, files: Files, config: Json) -> ModelSpec:
    # Published keys have a prefix, transformers' keys have none.
    plain = {key.removeprefix("vt_"): value for key, value in config["vision_config"].items()}
    side = plain.get("init_pos_emb_height", plain.get("pos_emb_height"))
    if side != plain.get("init_pos_emb_width", plain.get("pos_emb_width")):
        raise ValueError("init_pos_emb_height: only that of init_pos_emb_width is supported")
    media = (files.read_json("preprocessor_config.json") or {}).get("media_proc_cfg", {})
    only(media, {"fixed_output_tokens": None}, "the image processor")
    sizing = ShrinkingSizing(
        patch_size=int(plain["patch_size"]),
        merge_size=merge_size(plain),
        max_patches=int(media.get("in_patch_limit", 16384)),
        max_side_patches=int(media.get("patch_limit_on_one_side", 512)),
    )
    frames = plain.get("init_pos_emb_time", plain.get("pos_emb_time", 4))
    vision = plain | {"init_pos_emb_height": side, "pos_emb_time": frames}
    width = config["text_config"]["hidden_size"]
    model = image_spec("kimi_k25", options, HALVES | media, vision, sizing, width)
    return replace(model, video=grouped_video(sizing, int(frames), media))


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


MODEL_TYPES: Mapping[str, Reader] = {"kimi_k25": kimik25}
