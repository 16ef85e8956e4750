"""The captured graphs of each path, one or two per token budget: capture, replay and cost.

Static inputs are allocated once, for the largest budget. All graphs of a path share one memory
pool, so the largest is captured first. Padding consists of rows that no segment covers. If videos
need additional inputs, each budget has a second graph, so that packs of images are not slowed down.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from time import monotonic, perf_counter

import torch
from torch import Tensor

from actors.engine.budgets import Capacity, Segments
from actors.engine.device import Device, MediaRows, Places, concatenated
from actors.engine.packing import Packing, least_cost, monotone, smallest_first
from actors.errors import StartError
from actors.kernels import Shapes
from actors.models.tower import Tower
from actors.options import PackingOptions
from actors.spec.sizing import BlockSizing
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Grid, Item, ItemPlan

Report = Callable[[int, float], None]  # called with a budget and the seconds that its capture took

MEASURED_REPLAYS = 3

CACHED_LAYOUTS = 32  # packs whose metadata is cached, in pinned memory on CUDA

CACHED_PLANS = 256  # lists of waiting items whose packs are cached

SKIPPED = "skip"  # the label of a path on which a pack has no tokens
EXACT = "exact"  # the label of every graph of an exact layout

SIGHTS_PER_GRAPH = 16  # layouts remembered per exact graph; most are seen only once

Layout = tuple[tuple[Grid, int, int], ...]
"""Grid, tokens and frames of each item on this path, in the order of the pack."""

log = logging.getLogger("ray.serve")


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
        self.tuned = True  # graphs are captured before anything is served, so GEMMs may be timed
        self._packed: dict[tuple[int | None, tuple[ItemPlan, ...]], Tensor] = {}
        self.replays: dict[tuple[int, bool], Callable[[], Tensor]] = {}
        """By budget, and by whether they are for packs with videos."""
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
                    self.fill(budget, videos=videos)
                    self.replays[budget, videos] = self.device.capture(
                        lambda static=static: self.tower.forward(self.path, static),  # type: ignore[misc]
                        kept=self.keeps_rows,
                        tuned=self.tuned,
                    )
            report(budget, perf_counter() - started)

    @torch.inference_mode()
    def replay_seconds(self) -> dict[int, float]:
        """Seconds of one warm replay of each budget, for images, over whatever the inputs hold.

        Budgets that are not measured within the device's `measuring_seconds` are assumed to cost as
        much per token as the largest measured one.
        """
        seconds: dict[int, float] = {}
        began, most = perf_counter(), self.device.measuring_seconds
        with self.device.running():
            for budget in self.budgets if most else reversed(self.budgets):
                if most and seconds and perf_counter() - began > most:
                    break
                self.fill(budget, videos=False)
                replay = self.replays[budget, False]
                self.device.read_back(replay()[:1], [1])()
                started = perf_counter()
                for _ in range(MEASURED_REPLAYS):
                    rows = replay()
                self.device.read_back(rows[:1], [1])()
                seconds[budget] = (perf_counter() - started) / MEASURED_REPLAYS
        last = max(seconds, default=1)
        return {each: seconds.get(each, seconds[last] * each / last) for each in self.budgets}

    def fill(self, budget: int, *, videos: bool) -> None:
        """With a pace, stages the metadata of one item as large as the budget, so that the measured
        times of slices include its attention."""
        sizing = self.tower.spec.sizing
        if self.device.pace and isinstance(sizing, BlockSizing):
            plan = sizing.nearly_square(budget, video=videos)
            self.inputs.stage(self.packed(budget, (plan,)), {})

    def captured(self) -> int:
        """How many graphs can be replayed now."""
        return len(self.replays)

    def label(self, budget: int | None, plans: Sequence[ItemPlan]) -> str | None:
        """The graph that this pack would replay now, for the metrics. None: it would run eagerly.
        SKIPPED: it has no tokens on this path."""
        if not self.tokens(plans):
            return SKIPPED
        return None if budget is None else str(budget)

    def run(self, budget: int | None, items: Sequence[Item]) -> Tensor:
        """Calls `encode` for the items that have tokens on this path."""
        items = [item for item in items if item.plan.path_tokens[self.index]]
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
        """Rows [tokens of all items, width] on the device, in the order of the items. Models that
        give vectors return one per item instead.

        `patches`: this path's, uint8, one tensor per item, on the host or on the device. `later`:
        the patches of the second frames of videos; for an image, its patches again. Packs of images
        need none. With a budget, the rows are in graph memory and valid until the next replay of
        this path. `budget` None runs eagerly. Without tokens on this path nothing runs.
        """
        if not self.tokens(plans):
            spec = self.tower.spec
            dtype: torch.dtype = getattr(torch, spec.dtype)
            return torch.empty(0, spec.width, dtype=dtype, device=self.device.device)
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
        return self.tower.video_inputs(self.path, tokens)

    def packed(self, budget: int | None, plans: tuple[ItemPlan, ...]) -> Tensor:
        """The metadata of a pack as one host buffer. `budget` None: for an exact layout. Cached,
        because traffic of few sizes repeats packs."""
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
        """Tokens and segments of the graph for a pack. `budget` None: exactly those of the pack."""
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
    """Graphs of exact layouts: at most `most`, each with at most the largest budget's tokens.

    A layout runs eagerly the first time, and is captured and replayed from the second time on. The
    least recently used one is evicted. GEMMs are not timed, because items would have to wait.

    The graph of the largest budget is captured at start, but not replayed for packs. It sizes the
    shared pool, and the rows of every layout are copied to its output. So graphs that are captured
    later take no additional device memory.
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
        """As GraphSet.encode. A `budget` only means that the pack is small enough for a graph."""
        label = self.label(budget, plans)
        if label == EXACT:
            with self.device.running():
                rows = self.rows(plans, patches, later)
                self.inputs.stage(self.packed(None, tuple(plans)), rows)
                return self._replay(plans)()
        if label is None and budget is not None:
            self.seen[self._layout(plans)] = None
            if len(self.seen) > SIGHTS_PER_GRAPH * self.most:
                self.seen.popitem(last=False)
        return super().encode(None, plans, patches, later)

    def _replay(self, plans: Sequence[ItemPlan]) -> Callable[[], Tensor]:
        layout = self._layout(plans)
        replay = self.kept.get(layout)
        if replay is None:
            # Forgotten first, so that a layout whose capture fails is not tried every time.
            del self.seen[layout]
            tokens, segments = self.room(None, plans)
            static = self.static(self._shapes(tokens, segments, self.videos(plans)))

            def forward() -> Tensor:
                rows = self.tower.forward(self.path, static)
                return self.output[: len(rows)].copy_(rows)

            replay = self.device.capture(forward, kept=True, tuned=self.tuned)
            self.kept[layout] = replay
            # The device is idle after a capture, so the evicted graph is not being replayed.
            if len(self.kept) > self.most:
                self.kept.popitem(last=False)
        self.kept.move_to_end(layout)
        return replay

    def _layout(self, plans: Sequence[ItemPlan]) -> Layout:
        on_path = ((plan, plan.path_tokens[self.index]) for plan in plans)
        return tuple((plan.grid_thw, tokens, plan.frames) for plan, tokens in on_path if tokens)


def capture(
    tower: Tower, capacity: Capacity, device: Device, metrics: EncoderMetrics
) -> dict[str, GraphSet]:
    """Captures a GraphSet for each path, on separate streams, so that the paths of a pack are
    replayed at the same time. Also sets the metrics. Raises StartError."""
    started, before, used_before = monotonic(), device.memory_bytes(), device.used_bytes()
    total = sum(budget > 0 for budgets in capacity.budgets for budget in budgets)
    done = 0
    graphs = {}
    for path, budgets in zip(tower.spec.paths, capacity.budgets, strict=True):

        def report(budget: int, seconds: float, path: str = path) -> None:
            nonlocal done
            done += 1
            passed = monotonic() - started
            log.info(
                "captured %s/%d in %.2f s (%d of %d, about %.0f s left)",
                *(path, budget, seconds, done, total, passed / done * (total - done)),
            )

        where = device if path == tower.spec.paths[0] else device.beside()
        place = (tower, path, budgets, capacity.segments, where)
        most = capacity.exact_graphs
        try:
            graphs[path] = ExactGraphSet(*place, most) if most else GraphSet(*place)
            graphs[path].capture(report)
        except torch.OutOfMemoryError as error:
            raise StartError(
                f"out of device memory after {done} of {total} graphs while capturing path "
                f"{path}: lower the largest of graphs.token_budgets, or {more(device)}. "
                f"torch said: {error}"
            ) from error
        metrics.captured_graphs.labels(path).set(graphs[path].captured())
    ours = device.memory_bytes() - before
    metrics.graph_memory_bytes.set(ours)
    log.info(
        "captured %d budgets in %.1f s: %.2f GB of tensors, %.3f GB held by CUDA for the graphs",
        *(total, monotonic() - started, ours / 1e9),
        (device.used_bytes() - used_before - ours) / 1e9,
    )
    return graphs


def more(device: Device) -> str:
    """How a replica gets more device memory, for error messages."""
    if device.limit_bytes:
        return f"raise encoder.gpu_memory_bytes, which is {device.limit_bytes}"
    return "give the replica a GPU of its own (encoder.num_gpus: 1)"


def choose_packing(options: PackingOptions, graphs: Mapping[str, GraphSet]) -> Packing:
    """The packing policy. For `least_cost`, each budget is measured here, before anything has been
    staged. Without a choice of budgets (modes `exact` and `off`) both policies are the same."""
    choice = any(len(path.budgets) > 1 for path in graphs.values())
    if options.policy == "smallest_first" or not choice:
        return smallest_first
    costs = [monotone(path.replay_seconds()) for path in graphs.values()]
    for path, seconds in zip(graphs, costs, strict=True):
        shown = ", ".join(f"{budget} {each * 1000:.2f}" for budget, each in seconds.items())
        log.info("replay times in milliseconds, %s: %s", path, shown)
    # Traffic of few sizes repeats lists of items.
    cut = lru_cache(CACHED_PLANS)(partial(least_cost, costs=costs))
    return lambda plans, capacity: cut(tuple(plans), capacity)
