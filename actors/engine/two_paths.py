"""Models of two paths: each image as a whole (`global`), and crops of some (`local`). Pure.

Each path has budgets of its own, in whole images or whole crops, up to one maximum for both: what
one pack holds is bound by the two at once. Budgets as vLLM generates them for such models.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.engine.budgets import UNIT_TOKENS, Capacity, capacity, powers_of_two
from actors.errors import ConfigError
from actors.options import GraphOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import BlockSizing, ViewSizing

MOST_TOKENS = 13824
"""The maximum of both paths unless the options name another, or the model asks for less."""


def model_capacity(options: GraphOptions, spec: ModelSpec) -> Capacity:
    """The capacity that the options ask for, whether the model has one path or two.

    Raises ConfigError for options that do not suit the model.
    """
    if isinstance(spec.sizing, ViewSizing):
        most = spec.sizing.largest_budget(MOST_TOKENS)
        return two_path_capacity(options, spec.sizing.view_tokens, most)
    for key in ("global_token_budgets", "local_token_budgets"):
        if getattr(options, key):
            raise ConfigError(f"graphs.{key}: {spec.id} has one path: use graphs.token_budgets")
    unit = UNIT_TOKENS if isinstance(spec.sizing, BlockSizing) else None
    return capacity(options, spec.sizing.token_range(), spec.max_frames_per_video, unit)


def two_path_capacity(
    options: GraphOptions, view_tokens: tuple[int, int], default: int = MOST_TOKENS
) -> Capacity:
    """See model_capacity. `view_tokens`: of one whole image, and of one crop.

    The maximum is the largest of `token_budgets`, or the default. Items: as many as the largest
    global budget holds images. Raises ConfigError for a list out of order, or with less than one
    image or crop.
    """
    image, crop = view_tokens
    most = max(options.token_budgets, default=default)
    if most < max(view_tokens):
        raise ConfigError(
            f"graphs.token_budgets: {most} is less than the {max(view_tokens)} tokens of one view"
        )
    if options.max_frames_per_batch:
        raise ConfigError("graphs.max_frames_per_batch: the model takes no video: leave it out")
    whole = options.global_token_budgets or powers_of_two(image, most)
    crops = tuple(budget for budget in options.local_token_budgets if budget)
    crops = crops or doubled(crop, most)
    checked("global", whole, image)
    checked("local", crops, crop)
    ladders = (whole, (0, *crops))
    tokens = (whole[-1], crops[-1])
    graphs = {
        "budget": ladders,
        "exact": tuple(ladder[-1:] for ladder in ladders),
        "off": ((), ()),
    }[options.mode]
    return Capacity(
        budgets=graphs,
        tokens=tokens,
        items=options.max_vision_items_per_batch or whole[-1] // image,
        frames=0,
        exact_graphs=options.max_exact_graphs if options.mode == "exact" else 0,
    )


def doubled(crop: int, most: int) -> tuple[int, ...]:
    """crop, 2 x crop, ... as far as `most` holds them."""
    budgets = [crop]
    while budgets[-1] * 2 <= most:
        budgets.append(budgets[-1] * 2)
    return tuple(budgets)


def checked(path: str, budgets: Sequence[int], view: int) -> None:
    """Raises ConfigError for a list that does not ascend from at least one view."""
    if list(budgets) != sorted(set(budgets)):
        raise ConfigError(
            f"graphs.{path}_token_budgets must ascend without repeats, not {list(budgets)}"
        )
    if budgets[0] < view:
        raise ConfigError(
            f"graphs.{path}_token_budgets: {budgets[0]} is less than one view's {view} tokens"
        )
