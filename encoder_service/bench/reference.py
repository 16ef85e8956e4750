"""The expected rows: transformers' own tower with the same weights, or ours in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actors.models.load import build
from actors.spec.model_spec import ModelSpec
from actors.types import ItemPlan


class PlainTower:
    """Our own tower in float32: ReferenceBlocks and SegmentAttention, without graphs or kernels.

    Comparing with it checks graphs, kernels and bf16. tests/parity checks that the tower is the
    published one.
    """

    name = "our own plain torch"

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self.tower = build(replace(spec, dtype="float32"), weights, device)
        self.device = device

    @torch.inference_mode()
    def rows(self, patches: Sequence[Tensor], plans: Sequence[ItemPlan]) -> list[Tensor]:
        """Each item's rows, one item at a time to bound memory."""
        return [self.encode(each, plan) for each, plan in zip(patches, plans, strict=True)]

    def encode(self, patches: Tensor, plan: ItemPlan) -> Tensor:
        outputs = []
        for index, path in enumerate(self.tower.spec.paths):
            tokens = plan.path_tokens[index]
            if not tokens:
                outputs.append(torch.empty(0, self.tower.spec.width, device=self.device))
                continue
            host = self.tower.metadata(path, [plan], tokens, 1)
            values = {name: value.to(self.device) for name, value in host.items()}
            part = {"patches": patches[plan.rows(index)]}
            outputs.append(self.tower.forward(path, values | part))
        return self.tower.postprocess(outputs, [plan])


class Reference:
    """transformers.Qwen3VLVisionModel, sdpa, run eagerly."""

    name = "transformers"
    family = "qwen3_vl"

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from transformers import Qwen3VLVisionConfig, Qwen3VLVisionModel  # seconds to import

        self.spec = spec
        self.dtype = dtype
        self.device = device
        with device:
            model = Qwen3VLVisionModel(Qwen3VLVisionConfig.from_dict(dict(spec.vision)))
        model.set_attn_implementation("sdpa")
        model.load_state_dict(weights)
        # Parameters only: from_pretrained leaves rotary frequencies in float32 too.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        self.model: Any = model.eval()

    def pixels(self, patches: Sequence[Tensor]) -> Tensor:
        """As from transformers' processor: normalised, with every frame, [patches, values]."""
        mean, std = (
            torch.tensor(values, device=self.device)[:, None]
            for values in (self.spec.mean, self.spec.std)
        )
        pixels = torch.cat(list(patches)).unflatten(1, (3, -1)) / 255
        frames = int(self.spec.vision["temporal_patch_size"])
        normalised: Tensor = ((pixels - mean) / std)[:, :, None].expand(-1, -1, frames, -1)
        return normalised.flatten(1).to(self.dtype)

    def grid(self, plans: Sequence[ItemPlan]) -> Tensor:
        """int64 [items, 3]."""
        return torch.tensor([plan.grid_thw for plan in plans], device=self.device)

    @torch.inference_mode()
    def encode(self, pixels: Tensor, grid: Tensor) -> Tensor:
        """[tokens of all items, width]: main features and deepstack's, concatenated."""
        features = self.model(pixels, grid, return_dict=True)
        return torch.cat([features.pooler_output, *features.deepstack_features], dim=1)

    def rows(self, patches: Sequence[Tensor], plans: Sequence[ItemPlan]) -> list[Tensor]:
        """Each item's rows, one item at a time to bound memory."""
        return [
            self.encode(self.pixels([each]), self.grid([plan]))
            for each, plan in zip(patches, plans, strict=True)
        ]

    def call(
        self, patches: Sequence[Tensor], plans: Sequence[ItemPlan]
    ) -> Callable[[], list[Tensor]]:
        """Encodes all items at once, from pixels normalised beforehand."""
        pixels, grid = self.pixels(patches), self.grid(plans)
        tokens = [plan.tokens for plan in plans]
        return lambda: list(self.encode(pixels, grid).split(tokens))


def relative_error(rows: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The error of the worst item; NaN if any value is NaN."""
    errors = [
        (ours.float() - theirs).norm() / theirs.norm()
        for ours, theirs in zip(rows, expected, strict=True)
    ]
    return float(torch.stack(errors).max())
