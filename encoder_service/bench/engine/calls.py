"""The calls that are timed: packs, metadata, staging and replays are those of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.engine.budgets import Capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.engine.packing import Packing
from actors.types import ItemPlan, Pack
from encoder_service.bench.engine.reference import Reference


@dataclass(frozen=True, slots=True)
class Batch:
    plans: Sequence[ItemPlan]
    patches: Sequence[Tensor]
    """uint8 [patches, values] per item."""

    @property
    def tokens(self) -> int:
        return sum(plan.tokens for plan in self.plans)

    def path_tokens(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(plan.path_tokens for plan in self.plans), strict=True)))


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Packing, metadata, staging, replays, and a copy of the rows out of graph memory.

    Returns each item's rows on the device, in memory that later calls do not overwrite.
    """

    graphs: Mapping[str, GraphSet]
    """Of each path, in the model's order."""
    device: Device
    capacity: Capacity
    packing: Packing
    batch: Batch

    @torch.inference_mode()
    def __call__(self) -> list[Tensor]:
        tower = next(iter(self.graphs.values())).tower
        rows: dict[int, Tensor] = {}
        for pack in self.packs():
            plans = [self.batch.plans[index] for index in pack.items]
            patches = [self.batch.patches[index] for index in pack.items]
            self.device.fork()
            outputs = [
                graphs.encode(
                    budget,
                    plans,
                    patches if len(self.graphs) == 1 else of_path(patches, plans, path),
                )
                for path, (graphs, budget) in enumerate(
                    zip(self.graphs.values(), pack.budgets, strict=True)
                )
            ]
            self.device.join()
            with self.device.running():
                packed = tower.postprocess(outputs, plans)
                # With two paths, postprocess has made a copy.
                if len(outputs) == 1 and pack.budgets[0] is not None:
                    packed = packed.clone()
            parts = packed.split([plan.tokens for plan in plans])
            rows.update(zip(pack.items, parts, strict=True))
        return [rows[index] for index in range(len(rows))]

    def host(self) -> None:
        """The part of a call that runs on the CPU alone: packing and metadata.

        As in the call itself, both come from the caches that earlier calls have filled.
        """
        for pack in self.packs():
            plans = [self.batch.plans[index] for index in pack.items]
            for graphs, budget in zip(self.graphs.values(), pack.budgets, strict=True):
                if graphs.tokens(plans):
                    graphs.packed(budget, tuple(plans))

    def packs(self) -> list[Pack]:
        """The packs that the engine would form if nothing else were waiting."""
        return self.packing(self.batch.plans, self.capacity)


def of_path(patches: Sequence[Tensor], plans: Sequence[ItemPlan], path: int) -> list[Tensor]:
    """The patches of each item that belong to one path, by the path's index in the model."""
    return [each[plan.rows(path)] for each, plan in zip(patches, plans, strict=True)]


@dataclass(frozen=True, slots=True)
class ReferenceCall:
    """transformers' tower on all items at once, from pixels normalised beforehand."""

    reference: Reference
    batch: Batch
    pixels: Tensor
    grid: Tensor

    def __call__(self) -> list[Tensor]:
        rows = self.reference.encode(self.pixels, self.grid)
        return list(rows.split([plan.tokens for plan in self.batch.plans]))


TowerCall = EngineCall | ReferenceCall
