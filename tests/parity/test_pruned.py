"""Pruned images against transformers' own towers, which see only the patches that are kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.errors import ConfigError
from actors.types import Clip, Item, ItemPlan, Size
from tests.parity.conftest import Pair
from tests.parity.table import TOLERANCE, check
from tests.parity.test_tower import (
    as_published,
    encode,
    features,
    pixel_values,
    random_packed,
    rows_of,
)
from tests.parity.test_video import cut

SIZES = [Size(320, 200), Size(64, 96), Size(480, 320), Size(96, 96), Size(640, 224)]
SHARES = [0.5, 1.0, 0.2, 0.0, 0.9]
"""Of each image's merge blocks, after the first, that are kept."""


@pytest.fixture
def pair(pair: Pair) -> Pair:
    try:
        pair.tower.spec.check_prune()
    except ConfigError:
        whole = ("qwen2_5_vl", "exaone4_5", "hunyuan_vl")
        assert pair.model_type in whole, "a family that could prune"
        pytest.skip("its windows or lines would not be whole")
    return pair


def wholes(pair: Pair) -> list[ItemPlan]:
    return [pair.tower.spec.sizing.plan(size) for size in SIZES]


def masks(plans: Sequence[ItemPlan]) -> list[Tensor]:
    """Which merge blocks are kept."""
    random, found = np.random.default_rng(0), []
    for plan, share in zip(plans, SHARES, strict=True):
        mask = random.random(plan.tokens) < share
        mask[0] = True
        found.append(torch.from_numpy(mask))
    return found


def of_patches(pair: Pair, mask: Tensor) -> Tensor:
    return mask.repeat_interleave(pair.tower.spec.sizing.merge_size**2)


@pytest.mark.parametrize("spare", [0, 1, 300], ids=["exact", "spare-1", "spare-300"])
def test_equals_transformers_on_what_is_kept(pair: Pair, spare: int) -> None:
    plans = wholes(pair)
    kept = masks(plans)
    patches = [random_packed(pair.tower, [plan]) for plan in plans]
    pruned = [
        plan.pruned(np.packbits(mask.numpy()).tobytes())
        for plan, mask in zip(plans, kept, strict=True)
    ]
    assert [plan.tokens for plan in pruned] == [int(mask.sum()) for mask in kept]
    assert pruned[1] == plans[1], "all of it is kept"
    packed = [each[of_patches(pair, mask)] for each, mask in zip(patches, kept, strict=True)]
    budget = sum(plan.tokens for plan in pruned) + spare
    ours = encode(pair.tower, pruned, torch.cat(packed), budget, segments=8)
    theirs = [theirs_of(pair, *one) for one in zip(plans, patches, kept, strict=True)]
    check(pair.model_type, ours, torch.cat(theirs))


def test_beside_a_video_in_a_graph_for_videos(pair: Pair) -> None:
    if not pair.tower.spec.video:
        pytest.skip("a family without videos")
    film, _ = cut(pair, Clip(Size(130, 200), frames=5, fps=1, chosen=True))
    whole = wholes(pair)[0]
    (kept, *_) = masks(wholes(pair))
    patches = random_packed(pair.tower, [whole])[of_patches(pair, kept)]
    image = Item(whole.pruned(np.packbits(kept.numpy()).tobytes()), patches.numpy())
    graphs = GraphSet(pair.tower, "default", (512,), Segments(4, 64, 4), Device())
    graphs.capture(lambda budget, seconds: None)
    for items in ([film, image], [image, film]):
        plans = [one.plan for one in items]
        together = pair.tower.postprocess([graphs.run(512, items)], plans)
        rows = together.split([plan.tokens for plan in plans])
        for one, found in zip(items, rows, strict=True):
            alone = pair.tower.postprocess([graphs.run(None, [one])], [one.plan])
            assert (found - alone).abs().max() < TOLERANCE


def theirs_of(pair: Pair, plan: ItemPlan, patches: Tensor, kept: Tensor) -> Tensor:
    """The rows of the merge blocks that are kept, where the tower sees no others."""
    model, grid = pair.reference.model, torch.tensor([plan.grid_thw])
    pixels = pixel_values(pair, [plan], patches)
    left = of_patches(pair, kept)
    if hasattr(model, "visual") and hasattr(model.visual, "merger"):
        with torch.no_grad(), fed_with(model.visual.blocks, left):
            found = model.visual(pixels, grid, return_dict=True)
        columns = [found.pooler_output, *getattr(found, "deepstack_features", ())]
        return torch.cat(columns, 1)
    # What follows the blocks here counts the patches of the grid: all are computed, those that are
    # kept attend to each other alone.
    left = as_published(pair, [plan], left[:, None])[:, 0]
    with torch.no_grad(), attending_to(left):
        rows = rows_of(features(pair, pixels, grid))
    return rows[kept]


@contextmanager
def fed_with(blocks: Sequence[Any], kept: Tensor) -> Iterator[None]:
    """transformers' blocks get the hidden states and rotary embeddings of these patches only."""

    def select(block: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        (hidden,) = given
        if block is blocks[0]:
            hidden = hidden[kept]
        length = len(hidden)
        return (hidden,), named | {
            "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
            "max_seqlen": length,
            "position_embeddings": tuple(each[kept] for each in named["position_embeddings"]),
        }

    with ExitStack() as stack:
        for block in blocks:
            hook = block.register_forward_pre_hook(select, with_kwargs=True)
            stack.callback(hook.remove)
        yield


@contextmanager
def attending_to(kept: Tensor) -> Iterator[None]:
    """No patch attends to those that are not kept."""
    whole, calls = F.scaled_dot_product_attention, 0

    def masked(query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        nonlocal calls
        calls += 1
        assert key.shape[-2] == len(kept)
        return whole(query, key, value, **named | {"attn_mask": kept[None]})

    F.scaled_dot_product_attention = masked
    try:
        yield
    finally:
        F.scaled_dot_product_attention = whole
    assert calls, "the tower has another attention: this test sees nothing"
