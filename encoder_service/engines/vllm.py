"""Embeddings as content parts of a chat request to vLLM (--enable-mm-embeds).

Follows vLLM 0.33: vllm/renderers/chat_utils and the models' data parsers. For the Qwen families,
vLLM checks neither row counts nor widths and may crash on wrong ones, so they are checked here.
"""

from __future__ import annotations

import base64
import io
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from encoder_service.client.items import Embedding

CONNECTOR = {
    "ec_connector": "EncoderServiceConnector",
    "ec_role": "ec_consumer",
    "ec_connector_module_path": "encoder_service.engines.vllm_connector",
}
"""vLLM's --ec-transfer-config, without `ec_connector_extra_config`."""
REFERENCE = "reference"
"""Key of an item's id in UTF-8, uint8, for our connector, if vLLM knows the item by another name
(llm/vllm_engine.py)."""
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Families for which vLLM takes rows and their grid, from which it derives positions."""
ROWS = ("internvl", "internvl_chat", "llava", "llava_next", "llava_onevision", "lighton_ocr")
"""Families whose images vLLM takes as rows alone."""
TIMED = ("qwen3_vl", "qwen3_5")
"""Families whose prompts contain the time of each temporal group of a video."""
PRUNED = ("qwen2_5_vl", "qwen3_vl")
"""Families whose videos vLLM can prune itself (--video-pruning-rate)."""
PATCHES_PER_TOKEN = 4
"""The square of merge_size, which is 2 in every family of GRIDS."""


def place_of(transfer: Any) -> str:
    """Where the encoder is: "local" or "remote". `transfer`: vLLM's ECTransferConfig. Raises
    ValueError."""
    place: str = transfer.get_from_extra_config("place", "remote")
    if place not in ("local", "remote"):
        raise ValueError(
            f'ec_connector_extra_config: place is {place!r}: use "local" (the encoder runs in '
            'vLLM\'s process) or "remote" (an encoder service at `url`)'
        )
    return place


def content_part(embedding: Embedding) -> dict[str, Any]:
    """Returns {"type": "image_embeds", "image_embeds": ...}, or the same for a video. Needs torch.

    Tensors are base64 of torch.save: the rows [tokens, width] as from Embedding.torch; the grid
    [3], int64, in patches; and for videos of some families the time of each group, [grid t] float64
    in seconds from the start, or the time from one group to the next, [] float64. A reference has
    no rows: its id, without the part that releases it, is the "uuid". Raises ValueError for an
    embedding that vLLM cannot take.
    """
    check(embedding)
    import torch

    name = f"{embedding.type}_embeds"
    if embedding.family in ROWS:
        return {"type": name, name: saved(embedding.torch())}
    content = {f"{embedding.type}_grid_thw": saved(torch.tensor(embedding.grid_thw))}
    if timed(embedding):
        content["timestamps"] = saved(torch.tensor(embedding.timestamps, dtype=torch.float64))
    elif embedding.second_per_grid_ts and embedding.family == "qwen2_5_vl":
        seconds = torch.tensor(embedding.second_per_grid_ts, dtype=torch.float64)
        content["second_per_grid_ts"] = saved(seconds)
    if embedding.reference:
        return {"type": name, name: content, "uuid": content_id(embedding.reference)}
    rows = all_rows(embedding) if embedding.kept_rows else embedding.torch()
    return {"type": name, name: {name: saved(rows)} | content}


def content_id(reference: str) -> str:
    """The part of an id that is equal for equal items of one replica."""
    return ".".join(reference.split(".")[:2])


def all_rows(embedding: Embedding) -> torch.Tensor:
    """Expands a pruned embedding to all rows of its grid, so that vLLM prunes it to the same rows.

    vLLM derives the positions of a video's rows from its own pruning, so it must drop the same
    ones. It drops the rows most similar to the row at the same place in the previous group, so each
    dropped row is replaced by a copy of the last kept row at its place. Raises ValueError if vLLM
    would still drop others.
    """
    import torch

    groups = embedding.grid_thw[0]
    tokens = math.prod(embedding.grid_thw) // PATCHES_PER_TOKEN
    kept = torch.zeros(tokens, dtype=torch.bool)
    kept[list(embedding.kept_rows)] = True
    places = kept.cumsum(0).sub(1).view(groups, -1)
    latest = torch.where(kept.view(groups, -1), torch.arange(groups)[:, None], 0).cummax(0).values
    rows = embedding.torch()[places.gather(0, latest).flatten()]
    for dtype in {rows.dtype, torch.bfloat16}:  # vLLM converts rows to its model's dtype
        grid = rows.to(dtype).view(groups, -1, rows.shape[1])
        unlike = 1 - torch.nn.functional.cosine_similarity(grid[1:], grid[:-1], dim=-1)
        unlike = torch.cat([torch.full_like(unlike[:1], 255), unlike]).flatten()
        chosen = unlike.argsort(descending=True, stable=True)[: len(embedding.kept_rows)]
        if not kept[chosen].all():
            raise ValueError(
                "vLLM would drop other rows than evs_rate did, because too many hardly differ: "
                "encode the video without evs_rate: vLLM's --video-pruning-rate drops rows itself"
            )
    return rows


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
    if embedding.kept_rows and kind == "image":
        raise ValueError(
            "vLLM cannot place the rows of a pruned image: set preprocess.prune of the encoder "
            "service to off"
        )
    if embedding.kept_rows:
        if family not in PRUNED or embedding.reference:
            raise ValueError(
                "vLLM cannot place what evs_rate has left of a video, except embeddings (no "
                f"references) of {', '.join(PRUNED)}: encode it without evs_rate"
            )
        if rows != len(embedding.kept_rows):
            raise ValueError(f"{rows} rows, but {len(embedding.kept_rows)} kept_rows")
    elif family in GRIDS and rows * PATCHES_PER_TOKEN != math.prod(grid):
        expected = math.prod(grid) // PATCHES_PER_TOKEN
        raise ValueError(f"a grid of {grid} patches gives {expected} rows, not {rows}")
    if timed(embedding) and len(embedding.timestamps) != grid[0]:
        raise ValueError(f"{len(embedding.timestamps)} timestamps for {grid[0]} temporal groups")
