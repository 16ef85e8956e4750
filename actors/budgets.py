"""Token budgets: which graphs there are, and which one a pack takes. Pure: no torch, no models."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import ConfigError
from actors.options import GraphOptions

MOST_ITEMS_A_BUDGET = 4
"""Of the largest item's tokens: more saves no launches, and costs memory and time to capture."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one pack may hold. Budgets of each path ascend; none: everything runs eagerly."""

    budgets: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    """Most tokens of each path, with or without graphs."""
    items: int
    frames: int
    exact_graphs: int = 0
    """Layouts that are captured when they recur, within the one budget; 0: budgets are captured."""

    @property
    def segments(self) -> int:
        """Attention segments that a graph must be able to hold: one an image, one a frame."""
        return self.items + self.frames


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 x smallest, ... and `largest`, always included (vLLM: `_generate_budgets`)."""
    budgets = []
    budget = smallest
    while budget < largest:
        budgets.append(budget)
        budget *= 2
    return (*budgets, largest)


def at_least(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest budget that holds so many tokens; None: no budget does."""
    index = bisect_left(budgets, tokens)
    return budgets[index] if index < len(budgets) else None


def capacity(
    options: GraphOptions, token_range: tuple[int, int], max_frames_per_video: int
) -> Capacity:
    """The capacity that the options ask for, for a model of one path.

    Automatic limits mean what they mean in vLLM: items = largest budget // smallest budget,
    frames = items x the model's frames per video. A list that begins above the model's smallest
    budget still counts items by that one: [1024] is not one item a pack. Raises ConfigError.
    """
    given = options.token_budgets
    if list(given) != sorted(set(given)):
        raise ConfigError(f"graphs.token_budgets must ascend without repeats, not {list(given)}")
    smallest, largest = token_range
    if given and given[-1] > MOST_ITEMS_A_BUDGET * largest:
        raise ConfigError(
            f"graphs.token_budgets: {given[-1]} is over {MOST_ITEMS_A_BUDGET} times the "
            f"{largest} tokens of the model's largest item: lower it"
        )
    budgets = given or powers_of_two(smallest, largest)
    graphs = {"budget": budgets, "exact": budgets[-1:], "off": ()}[options.mode]
    items = options.max_vision_items_per_batch or max(1, budgets[-1] // min(budgets[0], smallest))
    frames = options.max_frames_per_batch
    if frames and not max_frames_per_video:
        raise ConfigError(
            f"graphs.max_frames_per_batch is {frames}, but the model takes no video: leave it out"
        )
    return Capacity(
        budgets=(graphs,),
        tokens=(budgets[-1],),
        items=items,
        frames=items * max_frames_per_video if frames is None else frames,
        exact_graphs=options.max_exact_graphs if options.mode == "exact" else 0,
    )
