"""What the figures depend on beside our code: the device and the packages."""

from __future__ import annotations

import gc
from importlib.metadata import PackageNotFoundError, version

import torch

from actors.engine.device import CpuDevice, Device
from actors.errors import ConfigError

PACKAGES = ("torch", "triton", "transformers")


def open_device(name: str) -> Device:
    """ "cuda" or "cpu". Raises ConfigError if there is no such device."""
    if name == "cpu":
        return CpuDevice()
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; --device cpu works")
    from actors.engine.cuda import CudaDevice

    return CudaDevice()


def release(device: Device) -> None:
    """Gives back what a model has left: graphs hold one another in cycles."""
    gc.collect()
    torch.compiler.reset()  # compiled blocks of one model count against the next one's limit
    if device.backend == "cuda":
        torch.cuda.empty_cache()


def device_name(device: Device) -> str:
    """As its maker calls it."""
    return torch.cuda.get_device_name(device.device) if device.backend == "cuda" else "CPU"


def versions() -> dict[str, str]:
    """Of packages that compute; one that is not installed is left out."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
