"""Runs the bench of one tower: every workload in every mode, each output checked.

Knows nothing of tables, files or the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actors.engine.budgets import Capacity, Segments
from actors.engine.capture import choose_packing
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, Report
from actors.engine.packing import Packing, smallest_first
from actors.engine.two_paths import model_capacity
from actors.errors import ConfigError
from actors.families.registry import read
from actors.models.compiled import CompiledBlocks
from actors.models.load import build, tensors
from actors.models.tower import Tower
from actors.options import GraphOptions, ModelOptions, PackingOptions
from actors.spec.model_spec import ModelSpec
from actors.types import Size
from encoder_service.bench.engine.calls import Batch, Call, EngineCall, ReferenceCall
from encoder_service.bench.engine.machine import device_name
from encoder_service.bench.engine.operations import operations
from encoder_service.bench.engine.reference import (
    PlainTower,
    Reference,
    Truth,
    has_reference,
    relative_error,
)
from encoder_service.bench.engine.report import (
    BudgetTime,
    Figure,
    Mode,
    ModelReport,
    Profile,
    Times,
    WorkloadReport,
)
from encoder_service.bench.engine.timing import kernels, synchronize, timed
from encoder_service.bench.engine.workloads import Workload, floor_seconds

SMALL = Size(320, 320)
"""400 patches: what is replayed in every budget."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and how often."""

    workloads: tuple[Workload, ...]
    modes: tuple[Mode, ...]
    repeats: int
    warmup: int
    every_budget: bool
    profiled: tuple[str, ...]
    """Names of workloads whose kernels are listed."""


def run(
    model: str, device: Device, settings: Settings, progress: Callable[[str], None]
) -> ModelReport:
    """Every figure of a preset with random weights in bf16. Raises ConfigError, CheckpointError."""
    options = ModelOptions(id=model, load_format="dummy")
    spec = read(options)
    if settings.every_budget and len(spec.paths) > 1:
        raise ConfigError(f"--every-budget: {model} has two paths, whose budgets go in pairs")
    progress(f"{model}: weights")
    bench = Bench(spec, tensors(options, spec, device.device), device, settings)
    if {"budget", "streams", "compile"} & {*settings.modes} or settings.every_budget:
        bench.capture(
            lambda budget, seconds: progress(f"{model}: captured {budget} in {seconds:.2f} s")
        )
    workloads, profiles = [], []
    for workload in settings.workloads:
        report, profile = bench.measure(workload)
        workloads.append(report)
        profiles += profile
        found = ", ".join(f"{each.mode} {each.times.median_ms:.2f} ms" for each in report.figures)
        progress(f"{model}: {workload.name}: {found}")
    every = bench.every_budget() if settings.every_budget else []
    return ModelReport(model, bench.truth.name, workloads, every, profiles)


class Bench:
    """One tower, and what it is compared with, with the same weights on one device."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Tensor], device: Device, settings: Settings
    ) -> None:
        self.spec = spec
        self.device = device
        self.settings = settings
        self.tower = build(spec, weights, device.device)
        self.limits = limits(spec, settings)
        self.budgeted = self.graphs(self.tower, self.limits.budgets, self.limits.segments)
        self.captured: dict[Mode, dict[str, GraphSet]] = {"budget": self.budgeted}
        ladders = self.limits.budgets, self.limits.segments
        if "compile" in settings.modes:
            tower = build(spec, weights, device.device, CompiledBlocks)
            self.captured["compile"] = self.graphs(tower, *ladders)
        if "streams" in settings.modes and len(spec.paths) > 1:
            self.captured["streams"] = self.graphs(self.tower, *ladders, beside=True)
        self.packing: Packing = smallest_first
        known = has_reference(spec)
        self.truth: Truth = (
            Reference(spec, weights, torch.float32, device.device)
            if known
            else PlainTower(spec, weights, device.device)
        )
        self.theirs = (
            Reference(spec, weights, torch.bfloat16, device.device)
            if known and "transformers" in settings.modes
            else None
        )
        left_out = {"transformers"} if not known else set()
        left_out |= {"streams"} if len(spec.paths) == 1 else set()
        self.modes = tuple(each for each in settings.modes if each not in left_out)

    def capture(self, report: Report) -> None:
        """The service's graphs that images may need, and the packing that it would choose."""
        for of_mode in self.captured.values():
            for graphs in of_mode.values():  # as packs replay them
                graphs.capture(report)
        self.packing = choose_packing(PackingOptions(), self.budgeted)

    def measure(self, workload: Workload) -> tuple[WorkloadReport, list[Profile]]:
        """The workload in every mode, and its profile if one was asked for."""
        batch = self.batch(workload.sizes)
        expected = self.truth.rows(batch.patches, batch.plans)
        figures, profiles = [], []
        for mode in self.modes:
            call = self.call(mode, batch)
            figures.append(self.figure(mode, call, expected, batch))
            if workload.name in self.settings.profiled and mode == self.modes[-1]:
                profiles.append(Profile(workload.name, mode, kernels(call, self.device)))
        total = operations(self.spec, batch.plans)
        floor = floor_seconds(total, device_name(self.device))
        report = WorkloadReport(
            name=workload.name,
            images=len(batch.plans),
            patches=sum(plan.patches for plan in batch.plans),
            tokens=batch.tokens,
            operations=total,
            floor_ms=floor * 1e3 if floor else None,
            figures=figures,
        )
        return report, profiles

    def figure(self, mode: Mode, call: Call, expected: list[Tensor], batch: Batch) -> Figure:
        """Times and error of one call."""
        times = self.timed(call)
        error = self.error(call, expected)
        if not isinstance(call, EngineCall):
            return Figure(mode, times, None, (), 0, error)
        host = timed(call.host, self.device, self.settings.warmup, self.settings.repeats)
        budgets = [budget for pack in call.packs() for budget in pack.budgets]
        replayed = tuple(budget for budget in budgets if budget)
        padding = 0 if None in budgets else 1 - sum(batch.path_tokens()) / sum(replayed)
        return Figure(mode, times, host.median_ms, replayed, padding, error)

    def every_budget(self) -> list[BudgetTime]:
        """The small image in every budget that holds it."""
        batch = self.batch([SMALL])
        expected = self.truth.rows(batch.patches, batch.plans)
        found = []
        for budget in self.limits.budgets[0]:
            if budget >= batch.path_tokens()[0]:
                call = self.engine_call(self.budgeted, only((budget,), 1), batch)
                found.append(BudgetTime(budget, self.timed(call), self.error(call, expected)))
        return found

    def call(self, mode: Mode, batch: Batch) -> Call:
        """The mode's way to encode the batch, captured if it needs that."""
        items = len(batch.plans)
        if mode == "transformers" and self.theirs:
            pixels = self.theirs.pixels(batch.patches)
            return ReferenceCall(self.theirs, batch, pixels, self.theirs.grid(batch.plans))
        tokens = batch.path_tokens()
        if mode == "exact":
            limits = only(tokens, items)
            exact = self.graphs(self.tower, limits.budgets, Segments(items))
            for graphs in exact.values():
                graphs.capture(lambda budget, seconds: None)
            return self.engine_call(exact, limits, batch)
        if mode == "eager":
            nothing: tuple[tuple[int, ...], ...] = ((),) * len(tokens)
            whole = Capacity(nothing, tokens, items, 0)
            return self.engine_call(self.graphs(self.tower, nothing, Segments(0)), whole, batch)
        return EngineCall(self.captured[mode], self.device, self.limits, self.packing, batch)

    def engine_call(
        self, graphs: Mapping[str, GraphSet], limits: Capacity, batch: Batch
    ) -> EngineCall:
        """All items in one pack."""
        return EngineCall(graphs, self.device, limits, smallest_first, batch)

    def graphs(
        self,
        tower: Tower,
        budgets: Sequence[tuple[int, ...]],
        segments: Segments,
        *,
        beside: bool = False,
    ) -> dict[str, GraphSet]:
        """Of each path. `beside`: those after the first run on streams of their own."""
        first, *_ = self.spec.paths
        return {
            path: GraphSet(
                *(tower, path, ladder, segments),
                self.device.beside() if beside and path != first else self.device,
            )
            for path, ladder in zip(self.spec.paths, budgets, strict=True)
        }

    def error(self, call: Call, expected: Sequence[Tensor]) -> float:
        """Of the worst item of one call."""
        rows = call()
        synchronize(self.device)  # the rows come from a stream of the device's own
        return relative_error(rows, expected)

    def timed(self, call: Call) -> Times:
        """As often as the settings say."""
        return timed(call, self.device, self.settings.warmup, self.settings.repeats)

    def batch(self, sizes: Sequence[Size]) -> Batch:
        """Random patches on the device, the same in every run."""
        plans = [self.spec.sizing.plan(size) for size in sizes]
        place = self.device.device
        generator = torch.Generator(place).manual_seed(len(plans))
        tokens = plans[0].path_tokens[0]  # whole tiles, whole views
        values = self.tower.inputs(self.spec.paths[0], tokens, 1)["patches"][0][1]
        patches = [
            torch.randint(
                256, (plan.patches, values), dtype=torch.uint8, device=place, generator=generator
            )
            for plan in plans
        ]
        synchronize(self.device)
        return Batch(plans, patches)


def limits(spec: ModelSpec, settings: Settings) -> Capacity:
    """The service's, for images; without the budgets that are larger than all workloads."""
    whole = model_capacity(GraphOptions(max_frames_per_batch=0), spec)
    if settings.every_budget:
        return whole
    plans = [[spec.sizing.plan(size) for size in each.sizes] for each in settings.workloads]
    budgets = []
    for path, ladder in enumerate(whole.budgets):
        most = max(sum(plan.path_tokens[path] for plan in each) for each in plans)
        smaller = sum(budget < most for budget in ladder)
        budgets.append(ladder[: smaller + 1])
    return replace(whole, budgets=tuple(budgets))


def only(budgets: tuple[int, ...], items: int) -> Capacity:
    """One budget a path, for so many images."""
    return Capacity(tuple((budget,) for budget in budgets), budgets, items, 0)
