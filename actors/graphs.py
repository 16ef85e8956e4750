"""Captured graphs of one path, one a token budget, and what replays them.

Static inputs are allocated once, for the largest budget; a smaller graph reads their first rows.
All graphs share one pool, the largest captured first. Padding is data: rows that no segment covers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from actors.attention import Shapes
from actors.device import Device, Values
from actors.models.tower import Tower
from actors.types import Item, ItemPlan

Report = Callable[[int, float], None]
"""Called with a budget and the seconds that its capture took."""

MEASURED_REPLAYS = 5

SKIPPED = "skip"
"""The label of a path on which a pack has no tokens."""


class GraphSet:
    """The graphs of one path of a tower on one device."""

    def __init__(
        self, tower: Tower, path: str, budgets: Sequence[int], segments: int, device: Device
    ) -> None:
        self.tower = tower
        self.path = path
        self.index = tower.spec.paths.index(path)
        self.budgets = tuple(budget for budget in budgets if budget)
        self.segments = segments
        self.device = device
        self.replays: dict[int, Callable[[], Tensor]] = {}
        if self.budgets:
            self.inputs = device.inputs(self._shapes(self.budgets[-1]))

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        """Captures every budget, largest first. Afterwards nothing is allocated any more."""
        for budget in reversed(self.budgets):
            started = perf_counter()
            static = self.static(self._shapes(budget))
            with self.device.running():
                self.replays[budget] = self.device.capture(
                    lambda static=static: self.tower.forward(self.path, static)  # type: ignore[misc]
                )
            report(budget, perf_counter() - started)

    @torch.inference_mode()
    def replay_seconds(self) -> dict[int, float]:
        """Seconds of one warm replay of each budget over what the inputs hold now."""
        seconds = {}
        with self.device.running():
            for budget, replay in self.replays.items():
                self.device.read_back(replay()[:1]).wait()
                started = perf_counter()
                for _ in range(MEASURED_REPLAYS):
                    rows = replay()
                self.device.read_back(rows[:1]).wait()
                seconds[budget] = (perf_counter() - started) / MEASURED_REPLAYS
        return seconds

    def captured(self) -> int:
        """Graphs that can be replayed now."""
        return len(self.replays)

    def label(self, budget: int | None, plans: Sequence[ItemPlan]) -> str | None:
        """The graph that such a pack would replay now, for the metrics; None: it runs eagerly.

        SKIPPED: it has no tokens on this path, and nothing runs.
        """
        if not self.tokens(plans):
            return SKIPPED
        return None if budget is None else str(budget)

    def run(self, budget: int | None, items: Sequence[Item]) -> Tensor:
        """See encode; the patches lie in host memory."""
        patches = [torch.from_numpy(item.patches[item.plan.rows(self.index)]) for item in items]
        return self.encode(budget, [item.plan for item in items], patches)

    @torch.inference_mode()
    def encode(
        self, budget: int | None, plans: Sequence[ItemPlan], patches: Sequence[Tensor]
    ) -> Tensor:
        """Rows [tokens of all items, width] on the device, in the order of the items.

        `patches`: uint8, one tensor an item, this path's, on the host or on the device. With a
        budget the rows lie in graph memory and last until the next replay of this path; None runs
        eagerly. Without tokens on this path nothing runs.
        """
        if not self.tokens(plans):
            return self._nothing()
        values: dict[str, Sequence[Tensor]] = {
            name: [value] for name, value in self.metadata(budget, plans).items()
        }
        values["patches"] = patches
        with self.device.running():
            if budget is None:
                return self._eager(values)
            self.inputs.stage(values)
            return self.replays[budget]()[: self.tokens(plans)]

    def _nothing(self) -> Tensor:
        spec = self.tower.spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return torch.empty(0, spec.width, dtype=dtype, device=self.device.device)

    def metadata(self, budget: int | None, plans: Sequence[ItemPlan]) -> dict[str, Tensor]:
        """Host values of the inputs other than the patches."""
        if budget is None:
            segments = sum(max(1, plan.frames) for plan in plans)
            return self.tower.metadata(self.path, plans, self.tokens(plans), segments)
        return self.tower.metadata(self.path, plans, budget, min(self.segments, budget))

    def static(self, shapes: Shapes) -> dict[str, Tensor]:
        """The first rows of the static inputs, in these shapes."""
        return {name: self.inputs.tensors[name][: shape[0]] for name, (shape, _) in shapes.items()}

    def _eager(self, values: Values) -> Tensor:
        device = self.device.device
        return self.tower.forward(
            self.path, {name: torch.cat(list(parts)).to(device) for name, parts in values.items()}
        )

    def tokens(self, plans: Sequence[ItemPlan]) -> int:
        """Tokens that these items have on this path."""
        return sum(plan.path_tokens[self.index] for plan in plans)

    def _shapes(self, budget: int) -> Shapes:
        return self.tower.inputs(self.path, budget, min(self.segments, budget))
