"""The captured graphs of one path, one or two per token budget, and their replay.

Static inputs are allocated once, for the largest budget. All graphs share one memory pool, so the
largest is captured first. Padding is data: rows that no segment covers.
A tower whose videos need inputs of their own has a second graph per budget, for packs with videos,
so that packs of images pay neither for those inputs nor for the segments of frames.
ExactGraphSet has graphs of exact layouts instead: no padding, but only for layouts that recur.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.device import Device, MediaRows, Places, concatenated
from actors.kernels import Shapes
from actors.models.tower import Tower, VideoTower
from actors.types import Grid, Item, ItemPlan

Report = Callable[[int, float], None]
"""Called with a budget and the seconds that its capture took."""

MEASURED_REPLAYS = 3

CACHED_LAYOUTS = 32
"""Packs of the same plans in the same order whose metadata is cached, in pinned memory on CUDA."""

SKIPPED = "skip"  # the label of a path on which a pack has no tokens
EXACT = "exact"  # the label of every graph of an exact layout

SIGHTS_PER_GRAPH = 16
"""Layouts remembered for each exact graph that is kept: most are seen once and never again."""

Layout = tuple[tuple[Grid, int, int], ...]
"""Grid, tokens and frames of each item on this path, in the order of the pack."""


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
        self.keeps_rows = path != tower.spec.paths[-1]
        """Rows of all paths are read together: replays of other paths must not overwrite them."""
        self.tuned = True
        """Graphs are captured before anything is served, so GEMMs may be timed."""
        self._packed: dict[tuple[int | None, tuple[ItemPlan, ...]], Tensor] = {}
        self.replays: dict[tuple[int, bool], Callable[[], Tensor]] = {}
        """By budget, and whether for packs with videos."""
        videos = segments.frames and self.video_inputs(1)
        self.forms: tuple[bool, ...] = (False, True) if videos else (False,)
        if self.budgets:
            self.inputs = device.inputs(self.budget_shapes(self.budgets[-1], videos=self.forms[-1]))

    @torch.inference_mode()
    def capture(self, report: Report) -> None:
        for budget in reversed(self.budgets):
            started = perf_counter()
            for videos in reversed(self.forms):
                static = self.static(self.budget_shapes(budget, videos=videos))
                with self.device.running():
                    self.replays[budget, videos] = self.device.capture(
                        lambda static=static: self.tower.forward(self.path, static),  # type: ignore[misc]
                        kept=self.keeps_rows,
                        tuned=self.tuned,
                    )
            report(budget, perf_counter() - started)

    @torch.inference_mode()
    def replay_seconds(self) -> dict[int, float]:
        """Seconds of one warm replay of each budget, for images, over whatever the inputs hold."""
        seconds = {}
        with self.device.running():
            for budget in reversed(self.budgets):
                replay = self.replays[budget, False]
                self.device.read_back(replay()[:1])()
                started = perf_counter()
                for _ in range(MEASURED_REPLAYS):
                    rows = replay()
                self.device.read_back(rows[:1])()
                seconds[budget] = (perf_counter() - started) / MEASURED_REPLAYS
        return seconds

    def captured(self) -> int:
        """How many graphs can be replayed now."""
        return len(self.replays)

    def label(self, budget: int | None, plans: Sequence[ItemPlan]) -> str | None:
        """The graph that such a pack would replay now, for the metrics.

        None: it would run eagerly. SKIPPED: it has no tokens on this path.
        """
        if not self.tokens(plans):
            return SKIPPED
        return None if budget is None else str(budget)

    def run(self, budget: int | None, items: Sequence[Item]) -> Tensor:
        """As `encode`, for items."""
        patches = [torch.as_tensor(item.patches[item.plan.rows(self.index)]) for item in items]
        later = [
            patches[i] if item.later is None else torch.as_tensor(item.later)
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

        `patches`: this path's, uint8, one tensor per item, on the host or on the device. `later`:
        the patches of the second frames of videos; an image's are its patches once more. Packs of
        images need none. With a budget the rows lie in graph memory and are valid until the next
        replay of this path; None runs eagerly. Without tokens on this path nothing runs.
        """
        if not self.tokens(plans):
            return self._nothing()
        rows = self.rows(plans, patches, later)
        with self.device.running():
            if budget is None:
                return self._eager(plans, rows)
            self.inputs.stage(self.packed(budget, tuple(plans)), rows)
            return self.replays[budget, self.videos(plans)]()[: self.tokens(plans)]

    def rows(
        self, plans: Sequence[ItemPlan], patches: Sequence[Tensor], later: Sequence[Tensor]
    ) -> MediaRows:
        if self.videos(plans) and "later" in self.video_inputs(1):
            return {"patches": patches, "later": later}
        return {"patches": patches}

    def videos(self, plans: Sequence[ItemPlan]) -> bool:
        """Whether these items need the graph with inputs for videos."""
        return any(plan.frames for plan in plans) and bool(self.video_inputs(1))

    def video_inputs(self, tokens: int) -> Shapes:
        if not isinstance(self.tower, VideoTower):
            return {}
        return self.tower.video_inputs(self.path, tokens)

    def _nothing(self) -> Tensor:
        spec = self.tower.spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return torch.empty(0, spec.width, dtype=dtype, device=self.device.device)

    def packed(self, budget: int | None, plans: tuple[ItemPlan, ...]) -> Tensor:
        """The metadata of a pack as one piece of host memory; None: of an exact layout.

        Cached, because traffic of few sizes brings the same packs again.
        """
        key = budget, plans
        found = self._packed.pop(key, None)
        if found is None:
            tokens, segments = self.room(budget, plans)
            places = Places(self._shapes(tokens, segments, self.videos(plans)))
            values = self.tower.metadata(self.path, plans, tokens, segments)
            found = places.packed(values, self.device.host_buffer(places.size_bytes))
            if len(self._packed) == CACHED_LAYOUTS:
                del self._packed[next(iter(self._packed))]  # the least recently used
        self._packed[key] = found
        return found

    def room(self, budget: int | None, plans: Sequence[ItemPlan]) -> tuple[int, int]:
        """Tokens and segments of a budget's graph for such a pack; None: exactly those it has."""
        if budget is None:
            return self.tokens(plans), sum(max(1, plan.frames) for plan in plans)
        return budget, self.segments.of(budget, videos=self.videos(plans))

    def static(self, shapes: Shapes) -> dict[str, Tensor]:
        media = {
            name: tensor[: shapes[name][0][0]]
            for name, tensor in self.inputs.tensors.items()
            if name in shapes
        }
        return media | Places(shapes).views(self.inputs.metadata)

    def _eager(self, plans: Sequence[ItemPlan], rows: MediaRows) -> Tensor:
        device = self.device.device
        values = self.tower.metadata(self.path, plans, *self.room(None, plans)) | {
            name: concatenated(parts, device) for name, parts in rows.items()
        }
        return self.tower.forward(
            self.path, {name: value.to(device) for name, value in values.items()}
        )

    def tokens(self, plans: Sequence[ItemPlan]) -> int:
        return sum(plan.path_tokens[self.index] for plan in plans)

    def budget_shapes(self, budget: int, *, videos: bool) -> Shapes:
        return self._shapes(budget, self.segments.of(budget, videos=videos), videos)

    def _shapes(self, tokens: int, segments: int, videos: bool) -> Shapes:
        shapes = self.tower.inputs(self.path, tokens, segments)
        return shapes | self.video_inputs(tokens) if videos else shapes


class ExactGraphSet(GraphSet):
    """Graphs of exact layouts: at most `most`, each of at most the largest budget's tokens.

    A layout runs eagerly the first time, and is captured and replayed from the second time on. The
    least recently used one is evicted.

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
