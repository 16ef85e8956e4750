"""Captured graphs of one path, one or two a token budget, and what replays them.

Static inputs are allocated once, for the largest budget; a smaller graph reads their first rows.
All graphs share one pool, the largest captured first. Padding is data: rows that no segment covers.
A tower whose videos need inputs of their own has a second graph a budget, for packs with videos, so
that images by themselves pay neither for those inputs nor for the segments of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from actors.attention import Shapes
from actors.budgets import Segments
from actors.device import Device, Values
from actors.models.tower import Tower, VideoTower
from actors.types import Item, ItemPlan

Report = Callable[[int, float], None]
"""Called with a budget and the seconds that its capture took."""

MEASURED_REPLAYS = 5

SKIPPED = "skip"
"""The label of a path on which a pack has no tokens."""


class GraphSet:
    """The graphs of one path of a tower on one device."""

    def __init__(
        self, tower: Tower, path: str, budgets: Sequence[int], segments: Segments, device: Device
    ) -> None:
        self.tower = tower
        self.path = path
        self.index = tower.spec.paths.index(path)
        self.budgets = tuple(budget for budget in budgets if budget)
        self.segments = segments
        self.device = device
        self.replays: dict[tuple[int, bool], Callable[[], Tensor]] = {}
        """By budget, and whether it is for packs with videos."""
        videos = segments.frames and self.video_inputs(1)
        self.forms: tuple[bool, ...] = (False, True) if videos else (False,)
        if self.budgets:
            self.inputs = device.inputs(self._shapes(self.budgets[-1], self.forms[-1]))

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        """Captures every budget, largest first. Afterwards nothing is allocated any more."""
        for budget in reversed(self.budgets):
            started = perf_counter()
            for videos in reversed(self.forms):
                static = self.static(self._shapes(budget, videos))
                with self.device.running():
                    self.replays[budget, videos] = self.device.capture(
                        lambda static=static: self.tower.forward(self.path, static)  # type: ignore[misc]
                    )
            report(budget, perf_counter() - started)

    @torch.inference_mode()
    def replay_seconds(self) -> dict[int, float]:
        """Seconds of one warm replay of each budget, for images, over what the inputs hold now."""
        seconds = {}
        with self.device.running():
            for budget in reversed(self.budgets):
                replay = self.replays[budget, False]
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
        later = [
            patches[i] if item.later is None else torch.from_numpy(item.later)
            for i, item in enumerate(items)
        ]
        return self.encode(budget, [item.plan for item in items], patches, later)

    @torch.inference_mode()
    def encode(
        self,
        budget: int | None,
        plans: Sequence[ItemPlan],
        patches: Sequence[Tensor],
        later: Sequence[Tensor] = (),
    ) -> Tensor:
        """Rows [tokens of all items, width] on the device, in the order of the items.

        `patches`: uint8, one tensor an item, this path's, on the host or on the device. `later`:
        the same in the second frames of videos, for an image its patches once more; images alone
        need none. With a budget the rows lie in graph memory and last until the next replay of this
        path; None runs eagerly. Without tokens on this path nothing runs.
        """
        if not self.tokens(plans):
            return self._nothing()
        values = self.values(budget, plans, patches, later)
        with self.device.running():
            if budget is None:
                return self._eager(values)
            self.inputs.stage(values)
            return self.replays[budget, self.videos(plans)]()[: self.tokens(plans)]

    def values(
        self,
        budget: int | None,
        plans: Sequence[ItemPlan],
        patches: Sequence[Tensor],
        later: Sequence[Tensor],
    ) -> dict[str, Sequence[Tensor]]:
        """What every input is filled with."""
        metadata = {name: [value] for name, value in self.metadata(budget, plans).items()}
        return metadata | {"patches": patches} | ({"later": later} if self.videos(plans) else {})

    def videos(self, plans: Sequence[ItemPlan]) -> bool:
        """Whether these items need the inputs that are for videos."""
        return any(plan.frames for plan in plans) and bool(self.video_inputs(1))

    def video_inputs(self, tokens: int) -> Shapes:
        """See VideoTower."""
        if not isinstance(self.tower, VideoTower):
            return {}
        return self.tower.video_inputs(self.path, tokens)

    def _nothing(self) -> Tensor:
        spec = self.tower.spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return torch.empty(0, spec.width, dtype=dtype, device=self.device.device)

    def metadata(self, budget: int | None, plans: Sequence[ItemPlan]) -> dict[str, Tensor]:
        """Host values of the inputs other than the patches."""
        if budget is None:
            segments = sum(max(1, plan.frames) for plan in plans)
            return self.tower.metadata(self.path, plans, self.tokens(plans), segments)
        segments = self.segments.of(budget, videos=self.videos(plans))
        return self.tower.metadata(self.path, plans, budget, segments)

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

    def _shapes(self, budget: int, videos: bool) -> Shapes:
        segments = self.segments.of(budget, videos=videos)
        shapes = self.tower.inputs(self.path, budget, segments)
        return shapes | self.video_inputs(budget) if videos else shapes
