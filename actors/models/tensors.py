"""Reads a tower's tensors from a safetensors checkpoint, or makes random ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.errors import CheckpointError
from actors.models.layers.weights import Expected
from actors.spec.checkpoint import Files

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = ("F64", "F32", "F16", "BF16")
"""safetensors' names for the types of weights that are not quantised."""

FP8 = "F8_E4M3"

POOL = 2**22 - 3
"""Size of the pool of normally distributed numbers that random weights are cut from. A prime, so
that no two rows of a matrix, or layers of a tower, start at the same number."""

SCALES = (".weight_scale", ".weight_scale_inv")
"""Suffixes of the scales of FP8 weights. compressed-tensors and NVIDIA's checkpoints use the first;
Qwen's, which have a scale per block, use the second."""
BLOCK = 128
"""Rows and columns of a block that shares a scale."""
UNREAD = (".input_scale",)
"""Suffix of scales for activations. They are not read, because ours follow from the weights; see
kernels/gemm/fp8.py."""

QUANTISED = (*SCALES, "scales", "qweight", "qzeros", "g_idx", "absmax", "quant_map")
"""Suffixes of the tensors that accompany quantised weights."""


def load(
    files: Files,
    prefixes: Sequence[str],
    expected: Expected,
    unused: Collection[str] = (),
    reason: Callable[[str], str] = lambda name: "",
) -> dict[str, Tensor]:
    """Reads the tensors whose names start with a prefix, keyed without it, to the CPU.

    They keep the checkpoint's precision, but FP8 becomes bfloat16. `model.` may precede any prefix.
    `unused` tensors may be present and are not read. Raises CheckpointError that names tensors
    which are missing, unexpected, misshapen or quantised in another way, and the `reason` why the
    first is or is not expected.
    """
    weights: dict[str, Tensor] = {}
    shards = located(files, prefixes, expected, unused, reason)
    stored = [name for names in shards.values() for name in names]
    scales = {weight: name for name in stored if (weight := weight_of(name, SCALES))}
    for shard, names in shards.items():
        try:
            with safe_open(shard, framework="pt") as tensors:
                check(tensors, names, expected, scales, shard)
                weights |= {name: tensors.get_tensor(stored) for name, stored in names.items()}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard} cannot be read: {error}. Fetch it again") from error
    for name, scale in scales.items():
        weights[name] = dequantised(name, weights[name], weights.pop(scale))
    return weights


def weight_of(name: str, suffixes: Sequence[str]) -> str:
    """The weight that a tensor with one of these suffixes belongs to; empty if it has none."""
    suffix = next((suffix for suffix in suffixes if name.endswith(suffix)), None)
    return name.removesuffix(suffix) + ".weight" if suffix else ""


def dequantised(name: str, weight: Tensor, scale: Tensor) -> Tensor:
    """The weight in bfloat16. `scale` has one number in all, one per row, or one per block."""
    rows, columns = weight.flatten(1).shape
    scale = scale.float()
    if tuple(scale.shape) == (-(-rows // BLOCK), -(-columns // BLOCK)):
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    elif tuple(scale.shape) in ((rows,), (rows, 1)):
        scale = scale.view(rows, 1)
    elif scale.numel() != 1:
        raise CheckpointError(
            f"the scale of {name} {[rows, columns]} has the shape {list(scale.shape)}: it must be "
            f"one number, one for each row, or one for each block of {BLOCK} x {BLOCK}"
        )
    return (weight.flatten(1).float() * scale).bfloat16().view(weight.shape)


def located(
    files: Files,
    prefixes: Sequence[str],
    expected: Expected,
    unused: Collection[str],
    reason: Callable[[str], str] = lambda name: "",
) -> dict[Path, dict[str, str]]:
    """Maps each shard to the tower's tensors that it holds, and those to their names in it."""
    index = files.read_json(INDEX)
    shards: dict[str, str] = index.get("weight_map", {}) if index else single(files)
    found: dict[str, str] = {}
    for stored in sorted(shards):
        name = stored.removeprefix("model.")
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is None:
            continue
        name = name.removeprefix(prefix)
        if name in unused or weight_of(name, UNREAD) in expected:
            continue
        if name in found:
            raise CheckpointError(f"the checkpoint has {name} twice: {found[name]} and {stored}")
        found[name] = stored
    reconcile(found, expected, prefixes, reason)
    located: dict[Path, dict[str, str]] = {}
    for shard in sorted({shards[stored] for stored in found.values()}):
        path = files.path(shard)
        if path is None:
            raise CheckpointError(f"the checkpoint's index names {shard}, which is not there")
        located[path] = {name: stored for name, stored in found.items() if shards[stored] == shard}
    return located


def single(files: Files) -> dict[str, str]:
    """The `weight_map` of a checkpoint that is a single file."""
    path = files.path(SINGLE)
    if path is None:
        raise CheckpointError(
            f"the model has neither {INDEX} nor {SINGLE}: only safetensors checkpoints are read"
        )
    try:
        with safe_open(path, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), SINGLE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Fetch it again") from error


def reconcile(
    found: Iterable[str],
    expected: Expected,
    prefixes: Sequence[str],
    reason: Callable[[str], str],
) -> None:
    """Raises CheckpointError unless exactly the expected tensors were found."""
    read = set(expected) | {name for name in found if weight_of(name, SCALES) in expected}
    left_over = set(found) - read
    refuse_quantised(name for name in left_over if name.endswith(QUANTISED))
    missing = set(expected) - set(found)
    if missing or left_over:
        raise CheckpointError(
            f"the checkpoint does not fit its config.json: under {' or '.join(prefixes)} "
            f"{len(missing)} tensors are missing ({some(missing)}) "
            f"and {len(left_over)} are left over ({some(left_over)})"
            f"{reason(min(missing or left_over, key=natural))}"
        )


def check(
    tensors: Any,
    names: Mapping[str, str],
    expected: Expected,
    scales: Mapping[str, str],
    shard: Path,
) -> None:
    """Raises CheckpointError if a shape or type in a shard's header is wrong.

    `scales`: maps FP8 weights to the names of their scales.
    """
    if absent := set(names.values()) - set(tensors.keys()):
        raise CheckpointError(f"{shard} lacks {some(absent)}, which the index says it holds")
    headers = {name: tensors.get_slice(stored) for name, stored in names.items()}
    refuse_quantised(
        f"{name} {header.get_dtype()}" + (f" with {scales[name]}" if name in scales else "")
        for name, header in headers.items()
        if header.get_dtype() not in ((FP8,) if name in scales else DTYPES)
    )
    misshapen = [
        f"{name} {header.get_shape()} instead of {list(expected[name])}"
        for name, header in headers.items()
        if name in expected and tuple(header.get_shape()) != expected[name]
    ]
    if misshapen:
        raise CheckpointError(f"tensors do not fit config.json: {some(misshapen)}")


def refuse_quantised(names: Iterable[str]) -> None:
    if found := list(names):
        raise CheckpointError(
            f"the tower is quantised: it has {some(found)}. Only FP8 (e4m3) with a "
            "weight_scale is read: take such a checkpoint, or the one in bfloat16"
        )


def some(names: Iterable[str]) -> str:
    ordered = sorted(names, key=natural)
    rest = f" and {len(ordered) - 4} more" if len(ordered) > 4 else ""
    return (", ".join(ordered[:4]) or "none") + rest


def natural(name: str) -> list[str | int]:
    """Sorts blocks.9 before blocks.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Dummy(Mapping[str, Tensor]):
    """Random float32 weights, the same in every process and on any device.

    Matrices keep the variance of their inputs, scales are about 1, and biases are small, so that
    outputs are finite and differ. Tensors whose names contain a part in `faint` are a tenth as
    large. A tensor is made anew on every access and not kept, so that billions of parameters need
    neither the time to draw them nor the memory to hold them.
    """

    def __init__(
        self, expected: Expected, seed: int, device: torch.device, faint: Sequence[str] = ()
    ) -> None:
        self.expected = expected
        self.faint = faint
        drawn = torch.randn(POOL, generator=torch.Generator().manual_seed(seed))
        self.pool = drawn.to(device)
        counts = (prod(expected[name]) for name in sorted(expected))
        self.starts = dict(zip(sorted(expected), accumulate(counts, initial=0), strict=False))

    def __getitem__(self, name: str) -> Tensor:
        """Takes the numbers that follow the previous tensor's in the pool, wrapping around."""
        shape = self.expected[name]
        values = self.pool[self.starts[name] % POOL :][: prod(shape)]
        rounds, rest = divmod(prod(shape) - len(values), POOL)
        values = torch.cat([values, *[self.pool] * rounds, self.pool[:rest]]).view(shape)
        if len(shape) > 1:
            values.mul_(values[0].numel() ** -0.5)
        elif not shape:  # a bound of activations (Gemma 4), which few of them reach
            values.fill_(-4 if name.endswith("_min") else 4)
        else:
            values.mul_(0.1).add_(float(name.endswith(("weight", "running_var"))))
        return values.mul_(0.1) if any(part in name for part in self.faint) else values

    def __iter__(self) -> Iterator[str]:
        return iter(self.expected)

    def __len__(self) -> int:
        return len(self.expected)
