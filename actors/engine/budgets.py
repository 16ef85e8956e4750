"""Token budgets: which graphs there are, and which one a pack uses. No torch.

Models of two paths (whole images, and crops of some of them) have budgets for each path, up to a
common maximum. A pack must fit both paths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from actors.errors import ConfigError
from actors.options import GraphOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import MOST_ITEMS_A_BUDGET, BlockSizing, ViewSizing

UNIT_TOKENS = 8
"""Generated budgets are multiples of this (32 patches), or of a tile for models of tiles."""

FRAME_TOKENS = 32
"""Graphs for videos have one attention segment (a temporal group of frames) per this many tokens,
or per fewer if groups are smaller. Each segment lengthens the table that every replay reads."""

MOST_TOKENS = 13824  # default maximum of each path of a model of two paths

MOST_TEXTS = 16  # in a pack

MOST_EXACT_GRAPHS = 64  # that each path keeps with `graphs.mode: exact`


@dataclass(frozen=True, slots=True)
class Segments:
    """Attention segments that the graphs of a path can hold."""

    items: int  # one per image
    frames: int = 0  # in addition, in graphs for packs with videos. 0: there are no such graphs
    frame_tokens: int = FRAME_TOKENS

    def of(self, budget: int, *, videos: bool) -> int:
        """Segments of one graph: at most one per token, because none is empty."""
        frames = min(self.frames, budget // self.frame_tokens) if videos else 0
        return min(self.items + frames, budget)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one pack may hold. The budgets of each path ascend. Without any, packs run eagerly."""

    budgets: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]  # maximum on each path, with or without graphs
    items: int
    frames: int  # maximum attention segments of all videos of a pack
    exact_graphs: int = 0  # maximum captured layouts with `graphs.mode: exact`
    frame_tokens: int = 0  # tokens of a budget per frame that its graph holds; 0: any number

    @property
    def segments(self) -> Segments:
        return Segments(self.items, self.frames, self.frame_tokens or 1)

    def frames_in(self, budget: int) -> int:
        return budget // self.frame_tokens if self.frame_tokens else self.frames

    def needed(self, tokens: int, frames: int) -> int:
        """The smallest budget that holds these tokens and frames."""
        return max(tokens, frames * self.frame_tokens)


def powers_of_two(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 x smallest, ... and `largest`, always included (vLLM: `_generate_budgets`)."""
    return tuple(sorted({*doubled(smallest, largest), largest}))


def doubled(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 2 x smallest, ... up to `largest`."""
    budgets = [min(smallest, largest)]
    while budgets[-1] * 2 <= largest:
        budgets.append(budgets[-1] * 2)
    return tuple(budgets)


def graduated(smallest: int, largest: int, steps: int, unit: int) -> tuple[int, ...]:
    """`steps` budgets per doubling, as far as multiples of `unit` allow, and `largest`."""
    powers = powers_of_two(smallest, largest)
    between = {
        -(-power * (steps + step) // (steps * unit)) * unit
        for power in powers
        for step in range(1, steps)
    }
    return tuple(sorted({*powers, *(budget for budget in between if budget < largest)}))


def at_least(budgets: Sequence[int], tokens: int) -> int | None:
    """The smallest budget that holds these tokens. None: no budget does."""
    index = bisect_left(budgets, tokens)
    return budgets[index] if index < len(budgets) else None


def capacity(
    options: GraphOptions,
    token_range: tuple[int, int],
    max_frames_per_video: int,
    unit: int | None = None,
    own_largest: int = 0,
) -> Capacity:
    """The capacity for a model of one path. Raises ConfigError.

    Generated budgets are multiples of `unit` (default: the smallest). `own_largest`: tokens of the
    largest item according to the checkpoint, if the options change `token_range`.

    Automatic limits are those of vLLM: items = largest budget // smallest budget, frames = items x
    the model's frames per video, but at most one per FRAME_TOKENS tokens. If the list of budgets
    starts above the model's smallest budget, the latter counts: [1024] does not mean one item per
    pack.
    """
    given = options.token_budgets
    check_ascending("token_budgets", given)
    smallest, largest = token_range
    most = max(largest, own_largest)
    if given and given[-1] > MOST_ITEMS_A_BUDGET * most:
        raise ConfigError(
            f"graphs.token_budgets: {given[-1]} is over {MOST_ITEMS_A_BUDGET} times the "
            f"{most} tokens of the model's largest item: lower it"
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
        exact_graphs=MOST_EXACT_GRAPHS if options.mode == "exact" else 0,
        frame_tokens=frame_tokens,
    )


def model_capacity(options: GraphOptions, spec: ModelSpec) -> Capacity:
    """The capacity that the options ask for. Raises ConfigError if they do not suit the model."""
    if isinstance(spec.sizing, ViewSizing):
        most = spec.sizing.largest_budget(MOST_TOKENS)
        return two_path_capacity(options, spec.sizing.view_tokens, most)
    for key in ("global_token_budgets", "local_token_budgets"):
        if getattr(options, key):
            raise ConfigError(f"graphs.{key}: {spec.id} has one path: use graphs.token_budgets")
    unit = UNIT_TOKENS if isinstance(spec.sizing, BlockSizing) else None
    frames, own = spec.max_frames_per_video, spec.own_sizing or spec.sizing
    room = capacity(options, spec.sizing.token_range(), frames, unit, own.token_range()[1])
    return with_texts(room, spec.text_plan.patches) if spec.text_plan else room


def with_texts(room: Capacity, tokens: int) -> Capacity:
    """Adds a second path for texts of `tokens` each. A pack holds images, texts, or both."""
    (images,), most = room.budgets, MOST_TEXTS * tokens
    texts = (most,) if room.exact_graphs else doubled(tokens, most)
    return replace(
        room,
        budgets=((0, *images), (0, *texts)) if images else ((), ()),
        tokens=(*room.tokens, most),
        items=room.items + MOST_TEXTS,
    )


def two_path_capacity(
    options: GraphOptions, view_tokens: tuple[int, int], default: int = MOST_TOKENS
) -> Capacity:
    """The capacity for a model of two paths. Raises ConfigError.

    `view_tokens`: tokens of a whole image and of a crop. The maximum is the largest of
    `token_budgets`, or `default`. By default a pack has at most as many items as the largest global
    budget holds whole images.
    """
    image, crop = view_tokens
    most = max(options.token_budgets, default=default)
    if most < max(view_tokens):
        raise ConfigError(
            f"graphs.token_budgets: {most} is less than the {max(view_tokens)} tokens of one view: "
            "raise it"
        )
    if options.max_frames_per_batch:
        raise ConfigError("graphs.max_frames_per_batch: the model takes no video: leave it out")
    whole = options.global_token_budgets or powers_of_two(image, most)
    crops = tuple(budget for budget in options.local_token_budgets if budget)
    crops = crops or doubled(crop, most)
    for path, budgets, view in (("global", whole, image), ("local", crops, crop)):
        check_ascending(f"{path}_token_budgets", budgets)
        if budgets[0] < view:
            raise ConfigError(
                f"graphs.{path}_token_budgets: {budgets[0]} is less than one view's {view} tokens: "
                "leave it out"
            )
    ladders = (whole, (0, *crops))
    graphs = {
        "budget": ladders,
        "exact": tuple(ladder[-1:] for ladder in ladders),
        "off": ((), ()),
    }[options.mode]
    return Capacity(
        budgets=graphs,
        tokens=(whole[-1], crops[-1]),
        items=options.max_vision_items_per_batch or whole[-1] // image,
        frames=0,
        exact_graphs=MOST_EXACT_GRAPHS if options.mode == "exact" else 0,
    )


def check_ascending(key: str, budgets: Sequence[int]) -> None:
    """Raises ConfigError."""
    if list(budgets) != sorted(set(budgets)):
        raise ConfigError(f"graphs.{key} must ascend without repeats, not {list(budgets)}")
