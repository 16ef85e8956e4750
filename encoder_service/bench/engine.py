"""Benchmarks one tower on one device, without Ray: every workload in every mode, rows checked.

Packing, metadata, staging and replays are those of the engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Literal, get_args

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils.flop_counter import FlopCounterMode

from actors.engine.budgets import Capacity, Segments, model_capacity
from actors.engine.device import Device
from actors.engine.graphs import GraphSet, choose_packing
from actors.engine.packing import Packing, smallest_first
from actors.errors import ConfigError
from actors.families.registry import read
from actors.models.layers.block import blocks_of
from actors.models.layers.weights import NO_FP8, Fp8Layers
from actors.models.load import build, check_fp8, tensors
from actors.models.precision import read_plan
from actors.models.tower import Tower
from actors.options import BlockForm, GraphOptions, ModelOptions, PackingOptions, block_form
from actors.spec.model_spec import ModelSpec
from actors.types import PLURALS, ItemPlan, Pack, Size
from encoder_service.bench.reference import PlainTower, Reference, relative_error
from encoder_service.bench.report import (
    DEFAULT,
    SHORT,
    SOUNDS,
    Mode,
    ModeFigures,
    ModelReport,
    Workload,
    WorkloadReport,
    floor_ms,
)

SMALL = Workload("1x320", (Size(320, 320),))
"""The image of --every-budget: 400 patches."""
FORMS: tuple[BlockForm, ...] = get_args(BlockForm)
"""Modes that set `graphs.blocks`."""
WARM_UPS = 10
"""Untimed calls before the timed ones, but at most as many as those."""
PACKAGES = ("torch", "triton", "transformers")
PROFILED_CALLS = 5
MOST_KERNELS, NAME_CHARACTERS = 25, 72

Rows = list[Tensor]
"""Each item's rows on the device, in memory that later calls do not overwrite."""


@dataclass(frozen=True, slots=True)
class Settings:
    workloads: tuple[Workload, ...]
    """Empty: the model's default ones."""
    short: bool
    """Whether the default image workloads are those for runs over all families."""
    modes: tuple[Mode, ...]
    repeats: int
    every_budget: bool
    profiled: tuple[str, ...]
    """Workloads whose kernels are listed, by name."""
    precision_file: str
    """The plan of mode `fp8`, if that is measured."""
    tower: Literal["vision", "audio"] | None
    """Which tower to measure of a model that has both."""


@dataclass(frozen=True, slots=True)
class Batch:
    plans: Sequence[ItemPlan]
    patches: Sequence[Tensor]
    """uint8 [patches, values] per item."""
    path_patches: Sequence[Sequence[Tensor]]
    """The same for each path of the model: the part of each item's patches that belongs to it."""

    def path_tokens(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(plan.path_tokens for plan in self.plans), strict=True)))


@dataclass(frozen=True, slots=True)
class EngineCall:
    """Packing, metadata, staging, replays, and a copy of the rows out of graph memory."""

    graphs: Sequence[GraphSet]
    """Of each path, in the model's order."""
    device: Device
    capacity: Capacity
    batch: Batch
    packing: Packing = smallest_first

    @torch.inference_mode()
    def __call__(self) -> Rows:
        rows: dict[int, Tensor] = {}
        for pack in self.packs():
            plans = [self.batch.plans[index] for index in pack.items]
            self.device.fork()
            outputs = [
                graphs.encode(budget, plans, [patches[index] for index in pack.items])
                for graphs, budget, patches in zip(
                    self.graphs, pack.budgets, self.batch.path_patches, strict=True
                )
            ]
            self.device.join()
            with self.device.running():
                packed = self.graphs[0].tower.postprocess(outputs, plans)
                # With two paths, postprocess has already made a copy.
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
            for graphs, budget in zip(self.graphs, pack.budgets, strict=True):
                if graphs.tokens(plans):
                    graphs.packed(budget, tuple(plans))

    def packs(self) -> list[Pack]:
        """The packs that the engine would form if nothing else were waiting."""
        return self.packing(self.batch.plans, self.capacity)


def run(model: str, device: Device, settings: Settings, console: Console) -> ModelReport:
    """Measures a preset with random weights in bf16. Raises ConfigError, CheckpointError."""
    options = ModelOptions(id=model, load_format="dummy", tower=settings.tower)
    spec = read(options)
    if not settings.workloads:
        of_images = SHORT if settings.short else DEFAULT
        settings = replace(settings, workloads=SOUNDS if spec.audio else of_images)
    known = [each.name for each in settings.workloads]
    if unknown := [name for name in settings.profiled if name not in known]:
        raise ConfigError(f"--profile {unknown[0]}: the workloads are {', '.join(known)}")
    if settings.every_budget and spec.audio:
        raise ConfigError(f"--every-budget times an image, and {model} takes sounds")
    if settings.every_budget and len(spec.paths) > 1:
        raise ConfigError(
            f"--every-budget: {model} has two paths, whose budgets are replayed in pairs"
        )
    console.print(f"{model}: loading weights")
    fp8 = NO_FP8
    if settings.precision_file:
        graphs = GraphOptions(precision="fp8", precision_file=settings.precision_file)
        if plan := read_plan(graphs, options, device.device):
            fp8 = plan.layers
            check_fp8(spec, device.device, fp8)
    bench = Bench(spec, tensors(options, spec, device.device), device, settings, fp8)
    if {"budget", "fp8", *FORMS} & {*settings.modes} or settings.every_budget:
        bench.capture(
            lambda budget, seconds: console.print(f"{model}: captured {budget} in {seconds:.2f} s")
        )
    workloads = []
    for workload in settings.workloads:
        batch = bench.batch(workload)
        calls: dict[str, Callable[[], Rows]] = {
            mode: bench.call(mode, batch) for mode in bench.modes
        }
        workloads.append(bench.measure(workload.name, calls, batch))
        found = (f"{each.mode} {each.median_ms:.2f} ms" for each in workloads[-1].figures)
        console.print(f"{model}: {workload.name}: {', '.join(found)}")
        if workload.name in settings.profiled:
            for mode, call in calls.items():
                console.print(f"{model}: {workload.name}, {mode}, {PROFILED_CALLS} calls:")
                console.out(kernels(call, device), highlight=False)
    every = [bench.every_budget()] if settings.every_budget else []
    return ModelReport(model, bench.truth.name, workloads, every)


class Bench:
    """One tower and the towers that it is compared with, with the same weights on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Tensor],
        device: Device,
        settings: Settings,
        fp8: Fp8Layers = NO_FP8,
    ) -> None:
        """`fp8`: the layers that mode `fp8` computes in FP8."""
        self.spec = spec
        self.device = device
        self.settings = settings
        self.tower = build(spec, weights, device.device)
        self.limits = limits(spec, settings)
        self.beside = device.beside() if len(spec.paths) > 1 else device
        self.budgeted = self.graphs(self.tower, self.limits.budgets, self.limits.segments)
        self.captured: dict[Mode, list[GraphSet]] = {"budget": self.budgeted}
        for form in FORMS:
            if form in settings.modes:
                on_cuda = device.backend == "cuda" or form == "compile"  # the CPU compiles too
                block_form(form, on_cuda=on_cuda, dtype=spec.dtype, fast=spec.fast_blocks)
                tower = build(spec, weights, device.device, blocks_of(form))
                self.captured[form] = self.graphs(tower, self.limits.budgets, self.limits.segments)
        if fp8:
            tower = build(spec, weights, device.device, fp8=fp8)
            self.captured["fp8"] = self.graphs(tower, self.limits.budgets, self.limits.segments)
        self.packing: Packing = smallest_first
        whole = all(each.kept == 1 for each in settings.workloads)
        known = whole and spec.family == Reference.family
        self.truth: Reference | PlainTower = (
            Reference(spec, weights, torch.float32, device.device)
            if known
            else PlainTower(spec, weights, device.device)
        )
        self.modes = tuple(each for each in settings.modes if known or each != "transformers")
        if "transformers" in self.modes:
            self.theirs = Reference(spec, weights, torch.bfloat16, device.device)

    def capture(self, report: Callable[[int, float], None]) -> None:
        """Captures the graphs and chooses the packing, as the service does."""
        for of_mode in self.captured.values():
            for graphs in of_mode:  # in the order in which packs replay them
                graphs.capture(report)
        by_path = dict(zip(self.spec.paths, self.budgeted, strict=True))
        self.packing = choose_packing(PackingOptions(), by_path)

    def measure(
        self, name: str, calls: Mapping[str, Callable[[], Rows]], batch: Batch
    ) -> WorkloadReport:
        """Measures each call on the batch."""
        with FlopCounterMode(display=False) as counter:
            expected = self.truth.rows(batch.patches, batch.plans)
        return WorkloadReport(
            name=name,
            items=len(batch.plans),
            patches=sum(plan.patches for plan in batch.plans),
            tokens=sum(plan.tokens for plan in batch.plans),
            floor_ms=floor_ms(counter.get_total_flops(), device_name(self.device)),
            figures=[self.figures(mode, call, expected) for mode, call in calls.items()],
        )

    def figures(self, mode: str, call: Callable[[], Rows], expected: Rows) -> ModeFigures:
        repeats = self.settings.repeats
        median_ms, p99_ms = timed(call, self.device, repeats)
        rows = call()
        synchronize(self.device)  # the device computes the rows on a stream of its own
        error = relative_error(rows, expected)
        if not isinstance(call, EngineCall):
            return ModeFigures(mode, median_ms, p99_ms, error)
        host_ms, _ = timed(call.host, self.device, repeats)
        budgets = [budget for pack in call.packs() for budget in pack.budgets]
        replayed = tuple(budget for budget in budgets if budget)
        padding = 0 if None in budgets else 1 - sum(call.batch.path_tokens()) / sum(replayed)
        return ModeFigures(mode, median_ms, p99_ms, error, host_ms, replayed, padding)

    def every_budget(self) -> WorkloadReport:
        batch = self.batch(SMALL)
        calls = {
            f"budget {budget}": EngineCall(self.budgeted, self.device, only((budget,), 1), batch)
            for budget in self.limits.budgets[0]
            if budget >= batch.path_tokens()[0]
        }
        return self.measure(SMALL.name, calls, batch)

    def call(self, mode: Mode, batch: Batch) -> Callable[[], Rows]:
        """The mode's call for the batch. Captures a graph for mode `exact`."""
        if mode == "transformers":
            return self.theirs.call(batch.patches, batch.plans)
        items, tokens = len(batch.plans), batch.path_tokens()
        frames = sum(plan.frames for plan in batch.plans)
        if mode == "exact":
            limits = replace(only(tokens, items), frames=frames)
            exact = self.graphs(self.tower, limits.budgets, Segments(items))
            for graphs in exact:
                graphs.capture(lambda budget, seconds: None)
            return EngineCall(exact, self.device, limits, batch)
        if mode == "eager":
            nothing: tuple[tuple[int, ...], ...] = ((),) * len(tokens)
            whole = Capacity(nothing, tokens, items, frames)
            eager = self.graphs(self.tower, nothing, Segments(0))
            return EngineCall(eager, self.device, whole, batch)
        return EngineCall(self.captured[mode], self.device, self.limits, batch, self.packing)

    def graphs(
        self, tower: Tower, budgets: Sequence[tuple[int, ...]], segments: Segments
    ) -> list[GraphSet]:
        """The graphs of each path, not captured yet. The second has a stream of its own."""
        devices = (self.device, self.beside)
        return [
            GraphSet(tower, path, ladder, segments, device)
            for path, ladder, device in zip(self.spec.paths, budgets, devices, strict=False)
        ]

    def batch(self, workload: Workload) -> Batch:
        """Random patches on the device, the same in every run."""
        plans = plans_of(self.spec, workload)
        place = self.device.device
        generator = torch.Generator(place).manual_seed(len(plans))
        tokens = plans[0].path_tokens[0]  # whole tiles or views
        values = self.tower.inputs(self.spec.paths[0], tokens, 1)["patches"][0][1]
        patches = []
        for plan in plans:
            if self.spec.audio:
                frames = plan.patches, values // torch.float32.itemsize
                made = torch.randn(frames, device=place, generator=generator).view(torch.uint8)
            else:
                shape = plan.patches, values
                made = torch.randint(
                    256, shape, dtype=torch.uint8, device=place, generator=generator
                )
            patches.append(made)
        synchronize(self.device)
        path_patches = [
            [each[plan.rows(path)] for each, plan in zip(patches, plans, strict=True)]
            for path in range(len(self.spec.paths))
        ]
        return Batch(plans, patches, path_patches)


def plans_of(spec: ModelSpec, workload: Workload) -> list[ItemPlan]:
    """Raises ConfigError for sounds if the model takes images and vice versa, for sounds that are
    too long or have no sample, and for pruned images if the model cannot prune."""
    if bool(spec.audio) != bool(workload.seconds):
        raise ConfigError(f"--workload {workload.name}: {spec.id} takes {PLURALS[spec.kinds[0]]}")
    sizes = workload.sizes
    if spec.audio:
        most = spec.audio.most_seconds
        if max(workload.seconds) > most:
            raise ConfigError(f"--workload {workload.name}: {spec.id} takes at most {most:g} s")
        sizes = tuple(Size(round(each * spec.audio.rate), 1) for each in workload.seconds)
        if min(size.width for size in sizes) < 1:
            raise ConfigError(f"--workload {workload.name}: a sound has no sample")
    plans = [spec.sizing.plan(size) for size in sizes]
    if workload.kept == 1:
        return plans
    spec.check_prune()
    random = np.random.default_rng(0)
    kept = [random.permutation(plan.tokens) < workload.kept * plan.tokens for plan in plans]
    return [
        plan.pruned(np.packbits(each).tobytes()) for plan, each in zip(plans, kept, strict=True)
    ]


def limits(spec: ModelSpec, settings: Settings) -> Capacity:
    """The service's limits for images and sounds, with no budget larger than the workloads need."""
    whole = model_capacity(GraphOptions(max_frames_per_batch=None if spec.audio else 0), spec)
    if settings.every_budget:
        return whole
    plans = [plans_of(spec, each) for each in settings.workloads]
    budgets = []
    for path, ladder in enumerate(whole.budgets):
        most = max(sum(plan.path_tokens[path] for plan in each) for each in plans)
        smaller = sum(budget < most for budget in ladder)
        budgets.append(ladder[: smaller + 1])
    return replace(whole, budgets=tuple(budgets))


def only(budgets: tuple[int, ...], items: int) -> Capacity:
    """One budget per path, for this many images."""
    return Capacity(tuple((budget,) for budget in budgets), budgets, items, 0)


def release(device: Device) -> None:
    """Frees the memory of a finished model, whose graphs refer to each other in cycles."""
    gc.collect()
    torch.compiler.reset()  # compiled blocks of one model count towards the next one's limit
    if device.backend == "cuda":
        torch.cuda.empty_cache()


def device_name(device: Device) -> str:
    return torch.cuda.get_device_name(device.device) if device.backend == "cuda" else "CPU"


def versions() -> dict[str, str]:
    """Versions of the packages that compute; those not installed are left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def synchronize(device: Device) -> None:
    if device.backend == "cuda":
        torch.cuda.synchronize(device.device)


def timed(call: Callable[[], object], device: Device, repeats: int) -> tuple[float, float]:
    """Median and 99th percentile in ms. The device is idle before and after each call."""
    seconds = []
    for _ in range(min(WARM_UPS, repeats)):
        call()
    for _ in range(repeats):
        synchronize(device)
        started = perf_counter()
        call()
        synchronize(device)
        seconds.append(perf_counter() - started)
    median, p99 = np.percentile(seconds, [50, 99]).tolist()
    return median * 1e3, p99 * 1e3


def kernels(call: Callable[[], object], device: Device) -> str:
    """torch's table of the slowest kernels and copies, or of the slowest operators on a CPU."""
    cuda = device.backend == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    call()
    synchronize(device)
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        for _ in range(PROFILED_CALLS):
            call()
        synchronize(device)
    table: str = profile.key_averages().table(
        sort_by=f"self_{'cuda' if cuda else 'cpu'}_time_total",
        row_limit=MOST_KERNELS,
        max_name_column_width=NAME_CHARACTERS,
    )
    return table
