"""Counts the operations of a tower's GEMMs and attention, from shapes alone.

Counts the published tower: patch embeddings of every frame, SAM's windows with their padding. A
multiply-add is two operations; softmax, norms and activations are not counted.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.families.deepseek_ocr.tower import WINDOW, OcrSizes
from actors.families.step3_vl.tower import CLASS_TOKENS
from actors.models.load import family_of
from actors.spec.model_spec import ModelSpec
from actors.spec.tiles import TileSizing
from actors.spec.views import CropSizing, WindowSizing
from actors.types import ItemPlan

Unit = Literal["patch", "sam", "row", "quarter", "token"]
"""What a weight is applied to: each patch; each of SAM's patches; each row of the blocks, class
tokens included; each position after the first of two convolutions with stride 2; each token."""

CLASS = r"class_embedding|cls_token"
TABLES = rf"pos_|position|{CLASS}"
"""Weights that are looked up or added, not multiplied."""
BLOCK = r"(?:blocks|layers?)\.(\d+)\."


@dataclass(frozen=True, slots=True)
class Segment:
    patches: int
    rows: int
    """Including class tokens."""
    tokens: int


def operations(spec: ModelSpec, plans: Sequence[ItemPlan]) -> int:
    shapes = family_of(spec).expected
    views = Counter(view for plan in plans for view in views_of(spec, plan, shapes))
    weights = multiplied(spec, shapes)
    gemms = sum(count * linear(weights, view) for view, count in views.items())
    if spec.family == "deepseek_ocr":
        seen = sum(count * ocr_attention(spec, view) for view, count in views.items())
        return 2 * (gemms + seen)
    width = next(s[0] for name, s in shapes.items() if unit(spec, name, s) == "patch")
    layers = {int(found[1]) for name in shapes if (found := re.search(BLOCK, name))}
    narrow = layers - set(spec.vision.get("fullatt_block_indexes", layers))
    pairs = sum(count * view.rows**2 for view, count in views.items()) * len(layers - narrow)
    pairs += sum(window_pairs(spec, plan) for plan in plans) * len(narrow) if narrow else 0
    return 2 * (gemms + 2 * width * pairs)


def unit(spec: ModelSpec, name: str, shape: Sequence[int]) -> Unit | None:
    """What a weight is applied to; None if it is not a matrix."""
    if len(shape) < 2 or re.search(TABLES, name):
        return None
    if re.search(r"patch_embed|patch_conv|conv1\.|neck\.", name):
        return "patch"
    if re.search(BLOCK, name):
        return "sam" if spec.family == "deepseek_ocr" and name.startswith("blocks.") else "row"
    return "quarter" if re.search(r"downsampler1?\.|net_2\.", name) else "token"


def multiplied(spec: ModelSpec, shapes: Mapping[str, Sequence[int]]) -> Counter[Unit]:
    """The number of values of all weights, by what they are applied to."""
    total: Counter[Unit] = Counter()
    for name, shape in shapes.items():
        if applied := unit(spec, name, shape):
            total[applied] += math.prod(shape)
    return total


def linear(weights: Counter[Unit], view: Segment) -> int:
    # Both halvings round up: four positions per token.
    sizes: dict[Unit, int] = {"patch": view.patches, "sam": view.patches, "row": view.rows}
    sizes |= {"quarter": 4 * view.tokens, "token": view.tokens}
    return sum(count * sizes[applied] for applied, count in weights.items())


def views_of(spec: ModelSpec, plan: ItemPlan, shapes: Mapping[str, Sequence[int]]) -> list[Segment]:
    sizing = spec.sizing
    if isinstance(sizing, TileSizing):
        patches, tokens = sizing.side_patches**2, sizing.tile_tokens
        classes = int(any(re.search(CLASS, name) for name in shapes))
        return [Segment(patches, patches + classes, tokens)] * (plan.path_tokens[0] // tokens)
    if isinstance(sizing, WindowSizing):
        sides, classes = sizing.side_patches, CLASS_TOKENS * (spec.family == "step3_vl")
    elif isinstance(sizing, CropSizing):
        # CLIP's rows: SAM's features, a fourth of the rows and columns of patches, and a class.
        sides = sizing.side_patches
        counts = [all_ // side**2 for all_, side in zip(plan.path_patches, sides, strict=True)]
        ocr = [Segment(side**2, side**2 // 16 + 1, side**2 // 16) for side in sides]
        return [ocr[0]] * counts[0] + [ocr[1]] * counts[1]
    else:
        groups, rows, columns = plan.grid_thw
        patches = rows * columns
        return [Segment(patches, patches, plan.tokens // groups)] * groups
    found = []
    for all_, side in zip(plan.path_patches, sides, strict=True):
        view = Segment(side**2, side**2 + classes, (side // sizing.merge_size) ** 2)
        found += [view] * (all_ // side**2)
    return found


def window_pairs(spec: ModelSpec, plan: ItemPlan) -> int:
    """Pairs of patches in the same window (Qwen2.5-VL), over all temporal groups."""
    side = int(spec.vision["window_size"]) // int(spec.vision["patch_size"])
    groups, *lengths = plan.grid_thw
    rows, columns = (length // side * side**2 + (length % side) ** 2 for length in lengths)
    return groups * rows * columns


def ocr_attention(spec: ModelSpec, view: Segment) -> int:
    """Multiply-adds of both towers' attention and of the padding of SAM's windows."""
    sizes = OcrSizes.of(spec)
    side = math.isqrt(view.patches)
    windows = math.ceil(side / WINDOW) ** 2
    total = sizes.clip.depth * 2 * sizes.clip.width * view.rows**2
    for layer in range(sizes.sam.depth):
        whole = layer in sizes.whole_view
        count, square = (1, side) if whole else (windows, WINDOW)
        # Queries with keys, scores with values, and queries with both axes' relative positions.
        total += count * sizes.sam.width * (2 * square**4 + 2 * square**3)
        # qkv and the projection of the padding.
        total += (count * square**2 - view.patches) * 4 * sizes.sam.width**2
    return total
