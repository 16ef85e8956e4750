"""Wall-clock times of calls, and what the device does in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from actors.engine.device import Device
from encoder_service.bench.engine.report import Kernel, Times

PROFILED_CALLS = 5
NAME_CHARACTERS = 72


def synchronize(device: Device) -> None:
    """Waits for everything that was launched."""
    if device.backend == "cuda":
        torch.cuda.synchronize(device.device)


def timed(call: Callable[[], object], device: Device, warmup: int, repeats: int) -> Times:
    """Median and 99th percentile of `repeats` calls, the device idle before and after each."""
    seconds = []
    for _ in range(warmup):
        call()
    for _ in range(repeats):
        synchronize(device)
        started = perf_counter()
        call()
        synchronize(device)
        seconds.append(perf_counter() - started)
    median, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return Times(float(median), float(p99))


def kernels(call: Callable[[], object], device: Device) -> list[Kernel]:
    """Kernels and copies of one call by the time that they take; torch's operators on a CPU."""
    cuda = device.backend == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    call()
    synchronize(device)
    with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
        for _ in range(PROFILED_CALLS):
            call()
        synchronize(device)
    spent = [
        (each.key, each.count, each.self_device_time_total if cuda else each.self_cpu_time_total)
        for each in profile.key_averages()
        if each.device_type.name == ("CUDA" if cuda else "CPU")
    ]
    total = sum(microseconds for _, _, microseconds in spent)
    return [
        Kernel(shortened(name), count / PROFILED_CALLS, us / PROFILED_CALLS, us / total)
        for name, count, us in sorted(spent, key=lambda each: -each[2])
        if us
    ]


def shortened(name: str) -> str:
    """A C++ signature without return type, namespaces and arguments, cut to one line."""
    name = re.sub(r"^void |\bat::native::|\(anonymous namespace\)::|\bcutlass::", "", name)
    name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= NAME_CHARACTERS else name[: NAME_CHARACTERS - 3] + "..."
