"""The calls that are timed: the same packs, metadata, staging and replays as the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.bench.reference import Reference
from actors.budgets import Capacity
from actors.graphs import GraphSet
from actors.packing import Packing
from actors.types import ItemPlan, Pack


class Call(Protocol):
    """One way to encode the same items."""

    def __call__(self) -> list[Tensor]:
        """Each item's rows on the device, in memory that no later call writes to."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Items whose patches lie on the device."""

    plans: Sequence[ItemPlan]
    patches: Sequence[Tensor]
    """uint8 [patches, values], one an item."""

    @property
    def tokens(self) -> int:
        """Of all items."""
        return sum(plan.tokens for plan in self.plans)


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Packing, metadata, staging, replay, and a copy of the rows out of graph memory."""

    graphs: GraphSet
    capacity: Capacity
    packing: Packing
    batch: Batch

    @torch.inference_mode()
    def __call__(self) -> list[Tensor]:
        """See Call."""
        tower, device = self.graphs.tower, self.graphs.device
        rows: dict[int, Tensor] = {}
        for pack in self.packs():
            plans = [self.batch.plans[index] for index in pack.items]
            patches = [self.batch.patches[index] for index in pack.items]
            output = self.graphs.encode(pack.budgets[0], plans, patches)
            packed = tower.postprocess([output], plans)
            if pack.budgets[0] is not None:
                with device.running():
                    packed = packed.clone()
            parts = packed.split([plan.tokens for plan in plans])
            rows.update(zip(pack.items, parts, strict=True))
        return [rows[index] for index in range(len(rows))]

    def host(self) -> None:
        """The part of the call that is the processor's alone: packing and metadata."""
        for pack in self.packs():
            plans = [self.batch.plans[index] for index in pack.items]
            self.graphs.metadata(pack.budgets[0], plans)

    def packs(self) -> list[Pack]:
        """What the service would make of these items if nothing else waited."""
        return self.packing(self.batch.plans, self.capacity)


@dataclass(frozen=True, slots=True)
class ReferenceCall:
    """transformers' tower on all items at once, from pixels that were normalised beforehand."""

    reference: Reference
    batch: Batch
    pixels: Tensor
    grid: Tensor

    def __call__(self) -> list[Tensor]:
        """See Call."""
        rows = self.reference.encode(self.pixels, self.grid)
        return list(rows.split([plan.tokens for plan in self.batch.plans]))
