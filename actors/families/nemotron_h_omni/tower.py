"""The vision tower of Nemotron-H Omni: RADIO, whose learned rows precede the patches of a picture.

Computes what transformers.models.nemotron_h_omni computes in get_image_features and
get_video_features. Two frames of a video are one picture, which has a patch embedding of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.families.nemotron_h_omni import audio
from actors.kernels.attention import Attention, Shapes, Values
from actors.models.layers.block import Affine, BlocksForm, Style, layer_norm, rms_norm
from actors.models.layers.patches import (
    Positions,
    centred,
    centred_bilinear_taps,
    folded_embedding,
)
from actors.models.layers.weights import (
    BlockNames,
    Dimensions,
    Weights,
    affine,
    expected_blocks,
)
from actors.models.packed import PackedParts, PackedTower, grids_of, segments_of
from actors.models.tower import Family
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import PatchRange
from actors.spec.video import FRAMES_PER_GROUP, TargetPatches
from actors.types import ItemPlan

PREFIXES = (
    "vision_model.radio_model.model.",
    "vision_model.radio_model.",
    "vision_projector.",
    "mlp1.",
)

NAMES = BlockNames(up=("mlp.fc1",), down="mlp.fc2")

PATCHES = "patch_generator.embedder"
FRAMES = "patch_generator.video_embedder"
POSITIONS = "patch_generator.pos_embed"
LEARNED = "patch_generator.cls_token.token"
"""The rows of class tokens and registers."""
LAST_NORM = "vision_final_layernorm"
NORM, UP, DOWN = "0", "1", "3"
"""The names of the projector's layers."""

EPSILON = 1e-5  # of its norm: the configuration does not say


@dataclass(frozen=True, slots=True)
class RadioParts:
    """The parts of the tower, on its device."""

    packed: PackedParts
    learned: Tensor
    """[10, width]."""
    frames: tuple[Affine, Tensor] | None
    """The embeddings of the first and of the second frame of a group, for `uint8 - 128`; the bias
    is for both. None: the tower takes no videos."""


def family(spec: ModelSpec) -> Family[Any]:
    if spec.audio:
        return audio.family(spec)
    tower, patch = Dimensions.read(spec), 3 * spec.sizing.patch_size**2
    inner = int(spec.vision["projector_hidden_size"])
    expected = {
        f"{PATCHES}.weight": (tower.width, patch),
        POSITIONS: (1, table_side(spec) ** 2, tower.width),
        LEARNED: (learned_rows(spec), tower.width),
        **expected_blocks(NAMES, tower.depth, tower.width, tower.mlp_width),
        **affine(NORM, (tower.merged,), bias=False),
        **affine(UP, (inner, tower.merged), bias=False),
        **affine(DOWN, (spec.width, inner), bias=False),
    }
    if spec.video:
        expected[f"{FRAMES}.weight"] = (tower.width, FRAMES_PER_GROUP * patch)
    if spec.vision["final_norm"]:
        expected |= affine(LAST_NORM, (tower.width,))
    # There are no layer scales: transformers adds and saves ones.
    ones = (
        f"blocks.{layer}.layer_scale{n}.lambda1" for layer in range(tower.depth) for n in (1, 2)
    )
    unused = {f"input_conditioner.norm_{name}" for name in ("mean", "std")}
    unused |= {"summary_idxs", f"{FRAMES}.weight", *ones}
    return Family(PREFIXES, expected, tower.head_size, parts, RadioTower, frozenset(unused))


def learned_rows(spec: ModelSpec) -> int:
    return int(spec.vision["num_cls_tokens"]) + int(spec.vision["num_registers"])


def table_side(spec: ModelSpec) -> int:
    return int(spec.vision["max_img_size"]) // spec.sizing.patch_size


def parts(spec: ModelSpec, weights: Weights) -> RadioParts:
    tower, epsilon = Dimensions.read(spec), float(spec.vision["layer_norm_eps"])
    final = weights.affine(LAST_NORM) if spec.vision["final_norm"] else None
    norm, up, down = (weights.affine(name) for name in (NORM, UP, DOWN))

    def head(x: Tensor, tapped: Sequence[Tensor]) -> Tensor:
        if final:
            x = layer_norm(x, final, epsilon)
        x = up.linear(rms_norm(x.view(-1, tower.merged), norm, EPSILON))
        return down.linear(F.relu(x).square())

    packed = PackedParts(
        embedding=weights.embedding(PATCHES, spec),
        layers=weights.blocks(NAMES, tower.depth),
        style=Style(tower.heads, "gelu", epsilon),
        head=head,
        positions=Positions(weights.place(weights.tensors[POSITIONS][0]), cut_taps, taps=4),
        rotary=False,
    )
    learned = weights.place(weights.tensors[LEARNED])
    return RadioParts(packed, learned, frame_embeddings(spec, weights))


def frame_embeddings(spec: ModelSpec, weights: Weights) -> tuple[Affine, Tensor] | None:
    """In the checkpoint, the channels of a group's frames follow each other."""
    if not spec.video:
        return None
    weight, patch = weights.tensors[f"{FRAMES}.weight"], spec.sizing.patch_size
    each = weight.unflatten(1, (FRAMES_PER_GROUP, 3, 1, patch, patch)).unbind(1)
    none = torch.zeros(len(weight), device=weight.device)
    first, later = (folded_embedding(one, none, spec.mean, spec.std) for one in each)
    bias = weights.place(first.bias + later.bias)
    return Affine(weights.place(first.weight), bias), weights.place(later.weight)


class RadioTower(PackedTower):
    """A packed tower, whose segments begin with the learned rows."""

    def __init__(
        self, spec: ModelSpec, parts: RadioParts, attention: Attention, blocks: BlocksForm
    ) -> None:
        super().__init__(spec, parts.packed, attention, blocks)
        self.learned, self.frames = parts.learned, parts.frames
        assert isinstance(spec.sizing, PatchRange)
        fewest = spec.sizing.min_patches // 2
        if isinstance(spec.video, TargetPatches):
            fewest = min(fewest, spec.video.patches // 16)
        self.least_tokens = max(1, fewest // spec.sizing.merge_size**2)

    def pictures(self, tokens: int, segments: int) -> int:
        """The most segments that such a budget can have, so that there are no more learned rows
        than needed."""
        return min(segments, max(1, tokens // self.least_tokens))

    def inputs(self, path: str, tokens: int, segments: int) -> Shapes:
        patches, pictures = tokens * self.sizing.merge_size**2, self.pictures(tokens, segments)
        rows = patches + pictures * len(self.learned)
        return {
            **super().inputs(path, tokens, pictures),
            **self.attention.inputs(rows, pictures),
            "order": ((rows,), torch.int32),
            "kept": ((patches,), torch.int32),
        }

    def video_inputs(self, path: str, tokens: int) -> Shapes:
        if not self.frames:
            return {}
        patches = tokens * self.sizing.merge_size**2
        return {
            "later": ((patches, 3 * self.sizing.patch_size**2), torch.uint8),
            "filmed": ((patches, 1), torch.bool),
        }

    def metadata(
        self, path: str, plans: Sequence[ItemPlan], tokens: int, segments: int
    ) -> dict[str, Tensor]:
        """`order`: where the rows of all segments are among the learned rows and, after these, all
        patches. `kept`: where the patches are in that order."""
        patches, pictures = tokens * self.sizing.merge_size**2, self.pictures(tokens, segments)
        learned, grids = len(self.learned), [self.grid(*grid) for grid in grids_of(plans)]
        lengths = torch.tensor(list(chain.from_iterable(map(segments_of, plans))))
        used, rows = int(lengths.sum()), patches + pictures * learned
        kept = torch.arange(used)
        kept += learned * torch.arange(1, len(lengths) + 1).repeat_interleave(lengths)
        order = torch.zeros(rows, dtype=torch.int32)
        begins = lengths.cumsum(0) - lengths + learned * torch.arange(len(lengths))
        order[begins[:, None] + torch.arange(learned)] = torch.arange(learned).int()
        order[kept] = torch.arange(learned, learned + used).int()
        values = {
            **{name: torch.cat([grid[name] for grid in grids]) for name in grids[0]},
            **self.attention.metadata((lengths + learned).tolist(), rows, pictures),
            **{"order": order, "kept": F.pad(kept, (0, patches - used)).int()},
        }
        if self.frames and any(plan.frames for plan in plans):
            filmed = torch.tensor([bool(plan.frames) for plan in plans])
            counts = torch.tensor([plan.patches for plan in plans])
            values["filmed"] = filmed.repeat_interleave(counts)[:, None]
        return values

    def forward(self, path: str, values: Values) -> Tensor:
        x = torch.cat([self.learned, self.begin(values)]).index_select(0, values["order"])
        x, _ = self.blocks(x, None, None, values)
        return self.end(x.index_select(0, values["kept"]), (), values)

    def embedded(self, values: Values) -> Tensor:
        x = super().embedded(values)
        if not self.frames or "later" not in values:
            return x
        first, later = (centred(values[name], self.dtype) for name in ("patches", "later"))
        film = self.frames[0].linear(first) + F.linear(later, self.frames[1])
        return torch.where(values["filmed"], film, x)


def cut_taps(places: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Like patches.bilinear_taps, for the corner of a square as large as the longer side."""
    longer = max(rows, columns)
    return centred_bilinear_taps(places, longer, longer, side)
