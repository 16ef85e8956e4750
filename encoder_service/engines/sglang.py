"""Embeddings as `image_data` or `video_data` of SGLang's Engine.generate.

Follows SGLang 0.5.23, where a dict of the format "processor_output" with "precomputed_embeddings"
replaces the vision tower of every model. A request has one dict for all its images and one for all
its videos, and no raw images beside them. SGLang's HTTP endpoints cannot take them, because JSON
has no tensors. SGLang does not expand the prompt for them: see `expanded`. tests/engines runs them
through SGLang's processor on the CPU.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encoder_service.client.items import Embedding

GRIDLESS = ("internvl", "internvl_chat", "llama4", "deepseek_ocr")
"""Families whose positions need no grid: their tokens are tiles or crops, not rows and columns."""


def processor_output(embeddings: Sequence[Embedding]) -> dict[str, Any]:
    """All images, or all videos, of one request, in the order of the prompt. Needs torch.

    "precomputed_embeddings": [tokens, width] on the CPU, the items' rows one after the other;
    "image_grid_thw" or "video_grid_thw": [items, 3] int64, in patches; "hash": 64 bits that
    identify them, so that SGLang need not hash all rows; for videos of Qwen2.5-VL
    "second_per_grid_ts": [items] float32. Raises ValueError for embeddings that do not belong
    together.
    """
    first = embeddings[0] if embeddings else None
    if first is None:
        raise ValueError("no embeddings: a request without images has no image_data")
    if first.type == "audio":
        raise ValueError("SGLang takes no embeddings of sounds: send it the sounds themselves")
    for name in ("type", "family", "model", "dtype", "deepstack"):
        values = {getattr(embedding, name) for embedding in embeddings}
        if len(values) > 1:
            raise ValueError(f"embeddings of one request differ in {name}: {sorted(values)}")
    widths = {embedding.shape[1] for embedding in embeddings}
    if len(widths) > 1 or any(one.shape[0] != one.tokens for one in embeddings):
        raise ValueError(f"shapes {[one.shape for one in embeddings]} are not tokens of one width")
    if any(embedding.kept_rows for embedding in embeddings):
        raise ValueError(
            f"SGLang takes no pruned {first.type}s: its grid counts all rows. Encode without "
            "evs_rate; for images set preprocess.prune of the encoder service to off"
        )
    import torch

    output = {
        "format": "processor_output",
        "modality": first.type.upper(),
        "precomputed_embeddings": torch.cat([embedding.torch() for embedding in embeddings]),
        "hash": name_of(embeddings),
    }
    if first.family in GRIDLESS:
        return output
    output[f"{first.type}_grid_thw"] = torch.tensor([one.grid_thw for one in embeddings])
    if first.type == "video" and first.family == "qwen2_5_vl":
        output["second_per_grid_ts"] = torch.tensor([one.second_per_grid_ts for one in embeddings])
    return output


def name_of(embeddings: Sequence[Embedding]) -> int:
    """A hash that is equal for equal rows: of the files and of whatever else the rows depend on."""
    key = [
        (e.digest, e.model, e.dtype, e.grid_thw, e.shape, e.timestamps, e.frame_tokens)
        for e in embeddings
    ]
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big")


def expanded(input_ids: Sequence[int], images: Sequence[Embedding], placeholder: int) -> list[int]:
    """Expands a prompt with one placeholder per image to one placeholder per row of each image.

    For Engine.generate(input_ids=...): in a text prompt, SGLang pairs placeholders with dicts and
    warns. Raises ValueError unless there are as many images as placeholders.
    """
    if input_ids.count(placeholder) != len(images):
        raise ValueError(
            f"{input_ids.count(placeholder)} placeholders in the prompt for {len(images)} images"
        )
    tokens = iter([image.tokens for image in images])
    return [
        one
        for token in input_ids
        for one in [token] * (next(tokens) if token == placeholder else 1)
    ]
