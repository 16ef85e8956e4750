"""Reimplements how vLLM 0.33 reads embeddings from the parts of a chat message.

After vllm/renderers/chat_utils (parsing, merging), multimodal/media/image.py (decoding),
multimodal/parse.py (plain tensors) and models/qwen2_vl.py, qwen3_vl.py (splitting). Where vLLM
would crash later, this fails at once. tests/engines runs vLLM itself.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch

MERGE_SIZE = 2


def decoded(text: str) -> torch.Tensor:
    """ImageEmbeddingMediaIO.load_base64: only a dense tensor is accepted."""
    data = base64.b64decode(text, validate=True)
    tensor = torch.load(io.BytesIO(data), weights_only=True)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.layout is torch.strided
    return tensor


def embeddings(parts: Sequence[dict[str, Any]], width: int) -> list[torch.Tensor]:
    """The rows of each item as the model gets them, [tokens, width]."""
    kinds = {part["type"].removesuffix("_embeds") for part in parts}
    assert len(kinds) == 1, "items of one modality are merged"
    (kind,) = kinds
    assert kind in ("image", "video")
    contents = [part[f"{kind}_embeds"] for part in parts]
    assert all(set(part) <= {"type", f"{kind}_embeds", "uuid"} for part in parts)
    if isinstance(contents[0], str):
        return [plain(decoded(content), width) for content in contents]
    keys = set(contents[0])
    assert all(set(content) == keys for content in contents), "all must have the same keys"
    fields = {key: [decoded(content[key]) for content in contents] for key in keys}
    return by_grid(fields.pop(f"{kind}_embeds"), fields.pop(f"{kind}_grid_thw"), width, fields)


def pruned(rows: torch.Tensor, grid: Sequence[int], rate: float) -> torch.Tensor:
    """multimodal/video_prune/evs.py: the indices of the rows that are kept of a video."""
    each = grid[1] * grid[2] // MERGE_SIZE**2
    groups = rows.view(grid[0], each, -1)
    unlike = 1 - torch.cosine_similarity(groups[1:], groups[:-1], dim=-1)
    unlike = torch.cat([255 * torch.ones_like(groups[:1, :, 0]), unlike]).flatten()
    count = max(each, int(len(rows) * (1 - rate)))
    return unlike.argsort(descending=True, stable=True)[:count].sort().values


def plain(rows: torch.Tensor, width: int) -> torch.Tensor:
    """EmbeddingItems: checks two dimensions and the language model's width."""
    assert rows.ndim == 2
    assert rows.shape[-1] == width
    return rows


def by_grid(
    rows: list[torch.Tensor],
    grids: list[torch.Tensor],
    width: int,
    others: dict[str, list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Joins the rows and splits them by the stacked grids."""
    stacked = torch.stack(grids)
    assert stacked.shape == (len(rows), 3), "one-dimensional grids, or splitting them fails"
    assert not stacked.is_floating_point()
    sizes = (stacked.prod(-1) // MERGE_SIZE // MERGE_SIZE).tolist()
    joined = torch.cat(rows)
    assert joined.shape == (sum(sizes), width)
    assert set(others) <= {"timestamps", "second_per_grid_ts"}
    assert all(one.ndim == 0 for one in others.get("second_per_grid_ts", []))
    for times, grid in zip(others.get("timestamps", []), grids, strict=False):
        assert times.shape == (int(grid[0]),)
    return list(joined.split(sizes))
