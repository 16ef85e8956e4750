"""Efficient Video Sampling (arXiv 2510.14624): drops the rows of a video that change least.

With the exact semantics of SGLang's evs_core. Saves the language model's time, not the encoder's.
Pure functions of rows: neither torch nor Ray.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from actors.types import ItemPlan

ALWAYS = 255.0
"""The dissimilarity of the first group of frames, which has none before it."""
TINY = 1e-8  # as in torch's cosine_similarity: rows of zeros are similar to nothing


def retained_tokens(plan: ItemPlan, rate: float) -> int:
    """Rows kept of a video at a rate in [0, 1), truncated to an integer; at least one group.

    All rows of an image, and of a video of one group.
    """
    if plan.frames < 2 or not rate:
        return plan.tokens
    rows = plan.group_tokens * plan.frames
    return max(plan.group_tokens, int(rows * (1 - rate))) + plan.tokens - rows


def retention_mask(
    rows: npt.NDArray[np.float32], plan: ItemPlan, rate: float
) -> npt.NDArray[np.bool_]:
    """Which rows [tokens, width] of a video are kept: bool [tokens].

    The rows that are least similar to the row at the same place in the previous group, over the
    whole video; of equal ones the earlier. Rows after the last group are kept.
    """
    judged = plan.group_tokens * plan.frames
    groups = rows[:judged].reshape(plan.frames, -1, rows.shape[1])
    lengths = np.maximum(np.linalg.norm(groups, axis=2), TINY)
    dots = (groups[1:] * groups[:-1]).sum(2)
    unlike = np.full(groups.shape[:2], ALWAYS, np.float32)
    unlike[1:] = 1 - dots / (lengths[1:] * lengths[:-1])
    order = np.argsort(-unlike.ravel(), kind="stable")
    mask = np.zeros(len(rows), np.bool_)
    mask[judged:] = True
    mask[order[: retained_tokens(plan, rate) - (len(rows) - judged)]] = True
    return mask


def group_tokens(mask: npt.NDArray[np.bool_], plan: ItemPlan) -> tuple[int, ...]:
    """Rows kept of each group."""
    judged = mask[: plan.group_tokens * plan.frames]
    return tuple(judged.reshape(plan.frames, -1).sum(1).tolist())
