"""The device, and the wall-clock time of calls on it and of the kernels inside them."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter

import numpy as np
import torch
from torch.profiler import ProfilerActivity

from actors.engine.device import Device
from actors.errors import ConfigError
from encoder_service.bench.engine.report import KernelTime, Times

PACKAGES = ("torch", "triton", "transformers")
PROFILED_CALLS = 5
NAME_CHARACTERS = 72


def open_device(name: str) -> Device:
    """ "cuda" or "cpu". Raises ConfigError if there is no such device."""
    if name == "cpu":
        return Device()
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; --device cpu works")
    from actors.engine.cuda import CudaDevice

    return CudaDevice()


def release(device: Device) -> None:
    """Frees the memory of a finished model, whose graphs refer to each other in cycles."""
    gc.collect()
    torch.compiler.reset()  # compiled blocks of one model count against the next one's limit
    if device.backend == "cuda":
        torch.cuda.empty_cache()


def device_name(device: Device) -> str:
    return torch.cuda.get_device_name(device.device) if device.backend == "cuda" else "CPU"


def versions() -> dict[str, str]:
    """Of the packages that compute; those not installed are left out."""
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


def kernels(call: Callable[[], object], device: Device) -> list[KernelTime]:
    """Kernels and copies of one call, the longest first; torch's operators on a CPU."""
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
        KernelTime(shortened(name), count / PROFILED_CALLS, us / PROFILED_CALLS, us / total)
        for name, count, us in sorted(spent, key=lambda each: -each[2])
        if us
    ]


def shortened(name: str) -> str:
    """A C++ signature without return type, namespaces and arguments, cut to one line."""
    name = re.sub(r"^void |\bat::native::|\(anonymous namespace\)::|\bcutlass::", "", name)
    name = re.sub(r"\(.*\)$", "", name)
    return name if len(name) <= NAME_CHARACTERS else name[: NAME_CHARACTERS - 3] + "..."
