"""Token budgets: which graphs there are, and which one a pack takes. Pure: no torch, no models."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from actors.errors import ConfigError
from actors.options import GraphOptions

MOST_ITEMS_A_BUDGET = 4
"""Of the largest item's tokens: more saves no launches, and costs memory and time to capture."""

UNIT_TOKENS = 8
"""Of budgets that are generated for images of any size: 32 patches, whole tiles of rows in matrix
products. Models of tiles have budgets of whole tiles."""

FRAME_TOKENS = 32
"""A graph holds one frame of a video, a temporal group of it, for each so many tokens: the table of
segments is a cost of every replay. Of smaller frames, fewer tokens fit."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Attention segments that the graphs of a path must be able to hold."""

    items: int
    """Of a graph for images: one each."""
    frames: int = 0
    """Of a graph for packs with videos, beside them. 0: there are no such graphs."""
    frame_tokens: int = FRAME_TOKENS

    def of(self, budget: int, *, videos: bool) -> int:
        """Segments of one graph; none is empty, so there are no more than tokens."""
        frames = min(self.frames, budget // self.frame_tokens) if videos else 0
        return min(self.items + frames, budget)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one pack may hold. Budgets of each path ascend; none: everything runs eagerly."""

    budgets: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    """Most tokens of each path, with or without graphs."""
    items: int
    frames: int
    """Attention segments of all videos of a pack."""
    exact_graphs: int = 0
    """Layouts that are captured when they recur, within the one budget; 0: budgets are captured."""
    frame_tokens: int = 0
    """Tokens of a budget for each frame that its graph can hold; 0: it holds any."""

    @property
    def segments(self) -> Segments:
        """What each graph must be able to hold."""
        return Segments(self.items, self.frames, self.frame_tokens or 1)

    def frames_in(self, budget: int) -> int:
        """Frames that a graph of this budget holds."""
        return budget // self.frame_tokens if self.frame_tokens else self.frames

    def needed(self, tokens: int, frames: int) -> int:
        """The least budget of a path for a pack of so many tokens and frames."""
        return max(tokens, frames * self.frame_tokens)


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 x smallest, ... and `largest`, always included (vLLM: `_generate_budgets`)."""
    budgets = []
    budget = smallest
    while budget < largest:
        budgets.append(budget)
        budget *= 2
    return (*budgets, largest)


def graduated(smallest: int, largest: int, steps: int, unit: int) -> tuple[int, ...]:
    """`steps` budgets to each doubling, as far as multiples of `unit` allow, and `largest`."""
    doubled = powers_of_two(smallest, largest)
    between = {
        -(-power * (steps + step) // (steps * unit)) * unit
        for power in doubled
        for step in range(1, steps)
    }
    return tuple(sorted({*doubled, *(budget for budget in between if budget < largest)}))


def at_least(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest budget that holds so many tokens; None: no budget does."""
    index = bisect_left(budgets, tokens)
    return budgets[index] if index < len(budgets) else None


def capacity(
    options: GraphOptions,
    token_range: tuple[int, int],
    max_frames_per_video: int,
    unit: int | None = None,
) -> Capacity:
    """The capacity that the options ask for, for a model of one path.

    Budgets that are generated are multiples of `unit` tokens, of the smallest unless given.

    Automatic limits mean what they mean in vLLM: items = largest budget // smallest budget,
    frames = items x the model's frames per video, but one for each FRAME_TOKENS tokens at most. A
    list that begins above the model's smallest budget still counts items by that one: [1024] is not
    one item a pack. Raises ConfigError.
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
    budgets = given or graduated(
        smallest, largest, options.steps_per_doubling, min(unit or smallest, smallest)
    )
    graphs = {"budget": budgets, "exact": budgets[-1:], "off": ()}[options.mode]
    items = options.max_vision_items_per_batch or max(1, budgets[-1] // min(budgets[0], smallest))
    frames = options.max_frames_per_batch
    if frames and not max_frames_per_video:
        raise ConfigError(
            f"graphs.max_frames_per_batch is {frames}, but the model takes no video: leave it out"
        )
    frame_tokens = min(FRAME_TOKENS, smallest)
    frames = items * max_frames_per_video if frames is None else frames
    return Capacity(
        budgets=(graphs,),
        tokens=(budgets[-1],),
        items=items,
        frames=min(frames, budgets[-1] // frame_tokens),
        exact_graphs=options.max_exact_graphs if options.mode == "exact" else 0,
        frame_tokens=frame_tokens,
    )
