"""Graphs of exact layouts, captured when a layout recurs: no padding, but only for repeats.

A layout is the grids of a pack's items, in order. The first time it runs eagerly, the second time
it is captured and replayed. The least recently used layout is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import SKIPPED, GraphSet, Report
from actors.models.tower import Tower
from actors.types import Grid, ItemPlan

EXACT = "exact"

SIGHTS_PER_GRAPH = 16
"""Layouts remembered for each graph that is kept: most are seen once and never again."""

Layout = tuple[tuple[Grid, int, int], ...]
"""Grid, tokens and frames of each item on this path."""


class ExactGraphSet(GraphSet):
    """The graphs of one path: at most `most` layouts, each of at most the largest budget's tokens.

    The graph of the largest budget is captured at start, and not replayed afterwards: it sizes the
    shared pool, and its output takes the rows of every layout. So graphs that are captured later
    take no more device memory. GEMMs are not timed for them, because waiting items would be held
    up.
    """

    def __init__(
        self,
        tower: Tower,
        path: str,
        budgets: Sequence[int],
        segments: Segments,
        device: Device,
        most: int,
    ) -> None:
        super().__init__(tower, path, budgets, segments, device)
        self.keeps_rows = True
        self.tuned = False
        # One graph is enough to size the pool, the one with the most inputs.
        self.forms = self.forms[-1:]
        self.most = most
        self.kept: OrderedDict[Layout, Callable[[], Tensor]] = OrderedDict()
        self.seen: OrderedDict[Layout, None] = OrderedDict()

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        super().capture(report)
        with self.device.running():
            self.output = self.replays[self.budgets[-1], self.forms[-1]]()

    def captured(self) -> int:
        return len(self.kept)

    def label(self, budget: int | None, plans: Sequence[ItemPlan]) -> str | None:
        if not self.tokens(plans):
            return SKIPPED
        layout = self._layout(plans)
        known = layout in self.kept or layout in self.seen
        return EXACT if budget is not None and known else None

    @torch.inference_mode()
    def encode(
        self,
        budget: int | None,
        plans: Sequence[ItemPlan],
        patches: Sequence[Tensor],
        later: Sequence[Tensor] = (),
    ) -> Tensor:
        """A budget only says that the pack is small enough to be captured."""
        if not self.tokens(plans):
            return self._nothing()
        if self.label(budget, plans) is None:
            if budget is not None:
                self._remember(self._layout(plans))
            return super().encode(None, plans, patches, later)
        with self.device.running():
            rows = self.rows(plans, patches, later)
            self.inputs.stage(self.packed(None, tuple(plans)), rows)
            return self._replay(plans)()

    def _replay(self, plans: Sequence[ItemPlan]) -> Callable[[], Tensor]:
        layout = self._layout(plans)
        replay = self.kept.get(layout)
        if replay is None:
            # Forgotten first, so that a layout that cannot be captured is not tried every time.
            del self.seen[layout]
            replay = self.kept[layout] = self._captured(plans)
            # The device is idle after a capture, so the evicted graph is not being replayed.
            if len(self.kept) > self.most:
                self.kept.popitem(last=False)
        self.kept.move_to_end(layout)
        return replay

    def _captured(self, plans: Sequence[ItemPlan]) -> Callable[[], Tensor]:
        tokens, segments = self.room(None, plans)
        static = self.static(self._shapes(tokens, segments, self.videos(plans)))
        rows = self.output[:tokens]
        return self.device.capture(
            lambda: rows.copy_(self.tower.forward(self.path, static)), kept=True, tuned=self.tuned
        )

    def _remember(self, layout: Layout) -> None:
        self.seen[layout] = None
        if len(self.seen) > SIGHTS_PER_GRAPH * self.most:
            self.seen.popitem(last=False)

    def _layout(self, plans: Sequence[ItemPlan]) -> Layout:
        return tuple((plan.grid_thw, plan.path_tokens[self.index], plan.frames) for plan in plans)
