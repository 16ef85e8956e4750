"""Benchmarks one tower: every workload in every mode, each output checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from actors.engine.budgets import Capacity, Segments, model_capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, Report, choose_packing
from actors.engine.packing import Packing, smallest_first
from actors.errors import ConfigError
from actors.families.registry import read
from actors.models.layers.block import blocks_of
from actors.models.load import build, tensors
from actors.models.tower import Tower
from actors.options import BlockForm, GraphOptions, ModelOptions, PackingOptions, block_form
from actors.spec.model_spec import ModelSpec
from actors.types import Size
from encoder_service.bench.engine.calls import Batch, EngineCall, ReferenceCall, TowerCall
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
    Mode,
    ModeFigures,
    ModelReport,
    Profile,
    Times,
    Workload,
    WorkloadReport,
    floor_seconds,
)
from encoder_service.bench.engine.timing import device_name, kernels, synchronize, timed

SMALL = Size(320, 320)
"""400 patches: the image of --every-budget."""
FORMS: tuple[BlockForm, ...] = get_args(BlockForm)
"""Modes that set `graphs.blocks`."""


@dataclass(frozen=True, slots=True)
class Settings:
    workloads: tuple[Workload, ...]
    modes: tuple[Mode, ...]
    repeats: int
    warmup: int
    every_budget: bool
    profiled: tuple[str, ...]
    """Workloads whose kernels are listed, by name."""


def run(
    model: str, device: Device, settings: Settings, progress: Callable[[str], None]
) -> ModelReport:
    """Measures a preset with random weights in bf16. Raises ConfigError, CheckpointError."""
    options = ModelOptions(id=model, load_format="dummy")
    spec = read(options)
    if settings.every_budget and len(spec.paths) > 1:
        raise ConfigError(f"--every-budget: {model} has two paths, whose budgets go in pairs")
    progress(f"{model}: weights")
    bench = Bench(spec, tensors(options, spec, device.device), device, settings)
    if {"budget", *FORMS} & {*settings.modes} or settings.every_budget:
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
    """One tower and the towers it is compared with, with the same weights on one device."""

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Tensor], device: Device, settings: Settings
    ) -> None:
        self.spec = spec
        self.device = device
        self.settings = settings
        self.tower = build(spec, weights, device.device)
        self.limits = limits(spec, settings)
        self.beside = device.beside() if len(spec.paths) > 1 else device
        self.budgeted = self.graphs(self.tower, self.limits.budgets, self.limits.segments)
        self.captured: dict[Mode, dict[str, GraphSet]] = {"budget": self.budgeted}
        ladders = self.limits.budgets, self.limits.segments
        for form in FORMS:
            if form in settings.modes:
                on_cuda = device.backend == "cuda" or form == "compile"  # the CPU compiles, too
                block_form(form, on_cuda=on_cuda, dtype=spec.dtype, fast=spec.fast_blocks)
                tower = build(spec, weights, device.device, blocks_of(form))
                self.captured[form] = self.graphs(tower, *ladders)
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
        self.modes = tuple(each for each in settings.modes if known or each != "transformers")

    def capture(self, report: Report) -> None:
        """Captures the graphs for images and chooses the packing, as the service does."""
        for of_mode in self.captured.values():
            for graphs in of_mode.values():  # in the order in which packs replay them
                graphs.capture(report)
        self.packing = choose_packing(PackingOptions(), self.budgeted)

    def measure(self, workload: Workload) -> tuple[WorkloadReport, list[Profile]]:
        """The workload in every mode, and its profile if --profile names it."""
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

    def figure(
        self, mode: Mode, call: TowerCall, expected: list[Tensor], batch: Batch
    ) -> ModeFigures:
        times = self.timed(call)
        error = self.error(call, expected)
        if not isinstance(call, EngineCall):
            return ModeFigures(mode, times, None, (), 0, error)
        host = timed(call.host, self.device, self.settings.warmup, self.settings.repeats)
        budgets = [budget for pack in call.packs() for budget in pack.budgets]
        replayed = tuple(budget for budget in budgets if budget)
        padding = 0 if None in budgets else 1 - sum(batch.path_tokens()) / sum(replayed)
        return ModeFigures(mode, times, host.median_ms, replayed, padding, error)

    def every_budget(self) -> list[BudgetTime]:
        batch = self.batch([SMALL])
        expected = self.truth.rows(batch.patches, batch.plans)
        found = []
        for budget in self.limits.budgets[0]:
            if budget >= batch.path_tokens()[0]:
                call = self.engine_call(self.budgeted, only((budget,), 1), batch)
                found.append(BudgetTime(budget, self.timed(call), self.error(call, expected)))
        return found

    def call(self, mode: Mode, batch: Batch) -> TowerCall:
        """The mode's call for the batch. Captures a graph for mode `exact`."""
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
        return EngineCall(graphs, self.device, limits, smallest_first, batch)

    def graphs(
        self, tower: Tower, budgets: Sequence[tuple[int, ...]], segments: Segments
    ) -> dict[str, GraphSet]:
        """The graphs of each path, not captured yet. The second has a stream of its own."""
        first, *_ = self.spec.paths
        return {
            path: GraphSet(
                tower, path, ladder, segments, self.device if path == first else self.beside
            )
            for path, ladder in zip(self.spec.paths, budgets, strict=True)
        }

    def error(self, call: TowerCall, expected: Sequence[Tensor]) -> float:
        rows = call()
        synchronize(self.device)  # the device computes the rows on a stream of its own
        return relative_error(rows, expected)

    def timed(self, call: TowerCall) -> Times:
        return timed(call, self.device, self.settings.warmup, self.settings.repeats)

    def batch(self, sizes: Sequence[Size]) -> Batch:
        """Random patches on the device, the same in every run."""
        plans = [self.spec.sizing.plan(size) for size in sizes]
        place = self.device.device
        generator = torch.Generator(place).manual_seed(len(plans))
        tokens = plans[0].path_tokens[0]  # whole tiles or views
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
    """The service's limits for images, without budgets larger than every workload needs."""
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
    """One budget per path, for this many images."""
    return Capacity(tuple((budget,) for budget in budgets), budgets, items, 0)
