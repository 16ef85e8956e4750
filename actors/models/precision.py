"""The plan for `graphs.precision: fp8` and `auto`: which layers of one checkpoint run in FP8.

`encoder-service calibrate` measures and writes it; a replica reads it when it starts.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Literal

import torch
from pydantic import Base64Bytes, Field, field_validator
from torch import Tensor

from actors.errors import ConfigError, ServiceError
from actors.kernels import attention_fp8
from actors.models.layers.block import ATTENTION
from actors.models.layers.weights import Fp8Layers
from actors.models.load import has_fp8, weights_digest
from actors.options import GraphOptions, ModelOptions, Options, validated
from actors.spec.checkpoint import parse

VERSION = 3
"""Changes with the arithmetic of FP8, which decides the errors."""


class LayerPlan(Options):
    """What a replica must know of a layer that runs in FP8."""

    error: float
    """Of its output, relative to float32."""
    mean: Base64Bytes = Field(b"", strict=False)
    """The mean of its inputs over the images: bfloat16, little-endian. Empty for attention."""

    @field_validator("mean")
    @classmethod
    def whole(cls, mean: bytes) -> bytes:
        if len(mean) % 2:
            raise ValueError("not a whole number of values")
        return mean

    @classmethod
    def of(cls, error: float, mean: Tensor | None) -> LayerPlan:
        """`mean`: in bfloat16."""
        values = b"" if mean is None else mean.cpu().view(torch.uint8).numpy().tobytes()
        return cls.model_construct(error=error, mean=values)

    @property
    def input_mean(self) -> Tensor | None:
        return torch.frombuffer(bytearray(self.mean), dtype=torch.bfloat16) if self.mean else None


class PrecisionPlan(Options):
    """Which layers of a checkpoint run in FP8, and the errors that were measured.

    A linear layer has its name in the checkpoint; if several are fused, that of the first. For the
    names of attention, see `ATTENTION` in layers/block.py.
    """

    version: int
    """Must be VERSION."""
    model: str
    weights: str
    """`weights_digest` of the checkpoint. The plan is valid for these weights only, whatever the
    checkpoint is called."""
    fp8: dict[str, LayerPlan] = Field(min_length=1)
    rows_error: float
    """The largest error of an image's rows, relative to `model.dtype`."""
    rows_cosine: float
    """The smallest cosine similarity of an image: the mean over its rows."""
    images: int

    @property
    def layers(self) -> Fp8Layers:
        return {name: layer.input_mean for name, layer in self.fp8.items()}

    @property
    def digest(self) -> str:
        """Plans with the same digest give the same rows."""
        digest = sha256(str(self.version).encode())
        for name, layer in sorted(self.fp8.items()):
            digest.update(f" {name} {sha256(layer.mean).hexdigest()}".encode())
        return digest.hexdigest()


def precision_on(graphs: GraphOptions, device: torch.device) -> Literal["bf16", "fp8"]:
    """What a replica on this device runs in."""
    if graphs.precision == "auto":
        return "fp8" if has_fp8(device) else "bf16"
    return graphs.precision


def rows_digest(graphs: GraphOptions, model: ModelOptions, device: torch.device) -> str:
    """Identifies what a model's rows depend on: its weights, and which layers run in FP8 on this
    device."""
    plan = read_plan(graphs, model, device)
    if plan is None:
        return weights_digest(model)
    attention = any(name.endswith(ATTENTION) for name in plan.fp8)
    without = " attention in 16 bits" if attention and not attention_fp8.runs_on(device) else ""
    return f"{plan.weights} fp8 {plan.digest}{without}"


def parse_plan(graphs: GraphOptions) -> PrecisionPlan | None:
    """The plan, or None if everything runs in `model.dtype` on all devices. Raises ConfigError."""
    if graphs.precision == "bf16":
        return None
    path = Path(graphs.precision_file)
    try:
        stored = parse(path.read_bytes(), str(path))
        if "fp8" in stored and stored.get("version") != VERSION:
            raise ConfigError(
                f"{path} was written by another version of `encoder-service calibrate`, which "
                "measured other errors"
            )
        return validated(PrecisionPlan, stored)
    except (OSError, ServiceError) as error:
        raise ConfigError(
            f"graphs.precision_file cannot be read: {error}: write it with `encoder-service "
            "calibrate`"
        ) from None


def read_plan(
    graphs: GraphOptions, model: ModelOptions, device: torch.device
) -> PrecisionPlan | None:
    """The plan, or None if everything runs in `model.dtype` on this device, which then needs no
    file. Like `parse_plan`, but also raises ConfigError for a plan of another checkpoint."""
    plan = parse_plan(graphs) if precision_on(graphs, device) == "fp8" else None
    if plan and plan.weights != weights_digest(model):
        raise ConfigError(
            f"graphs.precision_file {graphs.precision_file} is for other weights, those of "
            f"{plan.model}: run `encoder-service calibrate` with this model"
        )
    return plan
