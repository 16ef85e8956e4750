"""A video beyond what one pack holds, cut into runs: groups of frames that follow each other.

A group of frames is one attention segment (VideoSizing), so that the rows of a video are those of
its runs, one after the other. Pure: knows neither packs nor graphs.
"""

from __future__ import annotations

from dataclasses import replace

from actors.engine.budgets import Capacity
from actors.types import Item, ItemPlan


def cut(item: Item, capacity: Capacity) -> list[Item]:
    """The runs of an item, each as long as a pack holds; an image, or what fits, is one.

    A group that no pack holds is a run by itself.
    """
    groups, most = item.plan.frames, longest_run(item.plan, capacity)
    if groups <= most:
        return [item]
    starts = range(0, groups, most)
    return [run(item, start, min(start + most, groups)) for start in starts]


def longest_run(plan: ItemPlan, capacity: Capacity) -> int:
    """Groups of a video that a pack holds, one at least. Without graphs for videos tokens bind."""
    if not plan.frames:
        return 1
    most = capacity.tokens[0] // computed_tokens(plan, plan.group_patches)
    if capacity.frames:
        most = min(most, capacity.frames)
    return max(1, most)


def run(item: Item, start: int, end: int) -> Item:
    """The groups from `start` to before `end` of a video, as views of its patches."""
    plan, groups = item.plan, end - start
    rows = slice(start * plan.group_patches, min(end * plan.group_patches, plan.patches))
    patches = rows.stop - rows.start
    after = plan.tokens - plan.frames * plan.group_tokens if end == plan.frames else 0
    part = replace(
        plan,
        grid_thw=(groups, *plan.grid_thw[1:]),
        patches=patches,
        tokens=groups * plan.group_tokens + after,
        path_tokens=(computed_tokens(plan, patches),),
        frames=groups,
    )
    later = None if item.later is None else item.later[rows]
    return Item(part, item.patches[rows], later)


def computed_tokens(plan: ItemPlan, patches: int) -> int:
    """Of so many of its patches."""
    return plan.path_tokens[0] * patches // plan.patches
