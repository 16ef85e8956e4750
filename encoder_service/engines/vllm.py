"""Embeddings as content parts of a chat request to vLLM (--enable-mm-embeds).

Follows vLLM 0.33: vllm/renderers/chat_utils and the models' data parsers. vLLM does not check rows
and widths of the Qwen families, and may crash on wrong ones, so they are checked here.
"""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from encoder_service.client.items import Embedding

GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Families for which vLLM takes rows and their grid, from which it derives positions."""
ROWS = ("internvl", "internvl_chat", "llava", "llava_onevision")
"""Families for whose images vLLM takes the rows alone."""
TIMED = ("qwen3_vl", "qwen3_5")
"""Families whose prompts contain the time of each temporal group of a video."""
PATCHES_PER_TOKEN = 4
"""In every family of GRIDS: merge_size 2, squared."""


def content_part(embedding: Embedding) -> dict[str, Any]:
    """{"type": "image_embeds", "image_embeds": ...}, or the same for a video. Needs torch.

    Tensors are base64 of torch.save: rows [tokens, width] in the embedding's dtype, the grid [3]
    int64 in patches, the times [grid t] float64 in seconds from the start of a video. A reference
    has its id as "uuid" instead of rows. Raises ValueError for an embedding that vLLM cannot take.
    """
    check(embedding)
    import torch

    name = f"{embedding.type}_embeds"
    if embedding.family in ROWS:
        return {"type": name, name: saved(embedding.torch())}
    content = {f"{embedding.type}_grid_thw": saved(torch.tensor(embedding.grid_thw))}
    if timed(embedding):
        content["timestamps"] = saved(torch.tensor(embedding.timestamps, dtype=torch.float64))
    if embedding.reference:
        return {"type": name, name: content, "uuid": embedding.reference}
    return {"type": name, name: {name: saved(embedding.torch())} | content}


def saved(tensor: torch.Tensor) -> str:
    """Base64 of torch.save, which vLLM reads with torch.load(weights_only=True)."""
    import torch

    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getbuffer()).decode()


def timed(embedding: Embedding) -> bool:
    return embedding.type == "video" and embedding.family in TIMED


def check(embedding: Embedding) -> None:
    family, kind, grid = embedding.family, embedding.type, embedding.grid_thw
    if family not in GRIDS + ROWS or (kind == "video" and family in ROWS):
        raise ValueError(
            f"vLLM takes no embeddings of {kind}s of the family {family!r}, only of "
            f"{', '.join(GRIDS)}, and of images of {', '.join(ROWS)}: send it the {kind} itself"
        )
    if embedding.reference and family in ROWS:
        raise ValueError(
            f"vLLM cannot tell the tokens of the family {family!r} from a grid: fetch the "
            f"reference {embedding.reference!r}, and give the embedding"
        )
    rows, width = embedding.shape
    if rows != embedding.tokens or width % (1 + embedding.deepstack):
        raise ValueError(
            f"shape {embedding.shape} is not {embedding.tokens} tokens of a width with "
            f"{embedding.deepstack} deepstack features"
        )
    if family in GRIDS and rows * PATCHES_PER_TOKEN != math.prod(grid):
        raise ValueError(f"a grid of {grid} patches gives {math.prod(grid) // 4} rows, not {rows}")
    if timed(embedding) and len(embedding.timestamps) != grid[0]:
        raise ValueError(f"{len(embedding.timestamps)} timestamps for {grid[0]} temporal groups")
