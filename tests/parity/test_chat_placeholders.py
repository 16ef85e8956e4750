"""What stands for a video in a prompt against what each family's own processor writes."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.processing_glm46v import Glm46VProcessor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from actors.families.registry import read, video_styles
from actors.options import ModelOptions
from actors.spec.sampling import Spread
from actors.spec.video import MeanTimes, TotalPixels, VideoSizing, retention_mask
from actors.types import Clip, Grid, Media, Size
from encoder_service.config import LlmOptions
from encoder_service.llm import model
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.prompt import TEXT, VIDEO, Prompt, byte_tokenizer, expand, place

GLM = ["<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"]
GLM += ["<|begin_of_video|>", "<|end_of_video|>"]
QWEN_MARKS = "<|vision_start|><|video_pad|><|vision_end|>"
GLM_MARKS = "<|begin_of_video|><|video|><|end_of_video|>"
TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
CUT = (Spread(2.0, 4, 768), 16, 2, 2, 4096, 1048576)
PROCESSORS: dict[str, tuple[Any, VideoSizing]] = {
    "qwen2_vl": (Qwen2VLProcessor, TotalPixels(*CUT)),
    "qwen2_5_vl": (Qwen2_5_VLProcessor, TotalPixels(*CUT)),
    "qwen3_vl": (Qwen3VLProcessor, MeanTimes(*CUT)),
    "glm4v": (Glm4vProcessor, TotalPixels(*CUT)),
    "glm46v": (Glm46VProcessor, TotalPixels(*CUT)),
}


def of_vllm(made: Prompt, kept: set[int], grid: Grid, *, frame_by_frame: bool) -> list[list[int]]:
    """vLLM 0.33's positions [3, tokens] of a pruned prompt (video_prune/evs.py, qwen2_5_vl.py,
    qwen3_vl.py): of a video wider than high, its groups a second apart, two positions a second."""
    height, width = grid[1] // 2, grid[2] // 2
    now, row, found = 0, 0, []
    for kind, run in groupby(made.kinds):
        count = len(list(run))
        if kind == TEXT:
            found += [(now + i, now + i, now + i) for i in range(count)]
            now += count
            continue
        for i in range(count):
            group, place = divmod(i, height * width)
            if row + i in kept:
                time = 0 if frame_by_frame else 2 * group
                found.append((now + time, now + place // width, now + place % width))
        row += count
        now += width
    return [list(axis) for axis in zip(*found, strict=True)]


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_a_pruned_video_has_the_positions_of_vllm(model_type: str) -> None:
    kind: Any = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel}[model_type]
    video, clip = PROCESSORS[model_type][1], Clip(Size(128, 96), 12, 2.0)
    plan, tokenizer = video.plan(clip), byte_tokenizer()
    spec = replace(
        llm_spec.read(LlmOptions(num_gpus=0, device="cpu"), TINY, read(TINY)),
        video_style=video_styles()[model_type],
    )
    media = Media("video", b"", plan, "", clip=clip, evs_rate=0.6)
    placed = place(media, video)
    ids, kinds = expand(tokenizer.encode(f"before{QWEN_MARKS}after"), [placed], spec, tokenizer)
    rows = torch.randn(plan.tokens, 8, generator=torch.Generator().manual_seed(0))
    kept = retention_mask(rows.numpy(), plan, 0.6).nonzero()[0].tolist()
    assert len(kept) == plan.tokens - placed.dropped
    whole = Prompt(ids, kinds, (placed,), 10)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    inner = kind.__new__(kind)
    inner.__dict__["config"] = SimpleNamespace(vision_config=vision)
    made = model.pruned(
        SimpleNamespace(model=inner),
        model.inputs(whole, [rows[kept]], replace(spec, deepstack=0)),
        [placed],
        [kept],
    )
    order, *positions = made["position_ids"][:, 0].tolist()
    assert order == list(range(len(ids) - placed.dropped))
    by_frame = model_type == "qwen3_vl"
    assert positions == of_vllm(whole, set(kept), plan.grid_thw, frame_by_frame=by_frame)
    assert made["input_ids"][0].tolist().count(spec.video_token_id) == len(kept)


@pytest.mark.parametrize("frames", [4, 95])
@pytest.mark.parametrize("model_type", sorted(PROCESSORS))
def test_equals_the_processor(model_type: str, frames: int) -> None:
    kind, video = PROCESSORS[model_type]
    glm, clip = model_type.startswith("glm"), Clip(Size(96, 64), frames, 12.5)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": GLM})
    plan = video.plan(clip)
    text = "before" + (GLM_MARKS if glm else QWEN_MARKS) + "after"

    processor = kind.__new__(kind)
    processor.tokenizer = tokenizer
    processor.image_token, processor.video_token = (
        GLM[:2] if glm else ("<|image_pad|>", "<|video_pad|>")
    )
    processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    metadata = VideoMetadata(
        total_num_frames=frames, fps=clip.fps, frames_indices=video.indices(clip)
    )
    grids = {"video_grid_thw": np.array([plan.grid_thw]), "video_metadata": [metadata]}
    written = processor.replace_video_token(grids, 0)
    (whole,), _ = processor.get_text_with_replacements([text], videos_replacements=[written])

    spec = replace(
        llm_spec.read(LlmOptions(num_gpus=0, device="cpu"), TINY, read(TINY)),
        image_token_id=tokenizer.convert_tokens_to_ids(processor.image_token),
        video_token_id=tokenizer.convert_tokens_to_ids(processor.video_token),
        video_style=video_styles()[model_type],
    )
    placed = place(Media("video", b"", plan, "", clip=clip), video)
    ids, kinds = expand(tokenizer.encode(text), [placed], spec, tokenizer)
    assert ids == tokenizer.encode(whole)
    assert kinds.count(VIDEO) == plan.tokens
    if "qwen2_5" in model_type:
        assert placed.seconds_per_group == pytest.approx(2 / metadata.sampled_fps)
