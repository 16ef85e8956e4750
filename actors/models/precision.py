"""The plan for `graphs.precision: fp8`: which layers of one checkpoint run in FP8.

`encoder-service calibrate` measures and writes it; a replica reads it when it starts.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from pydantic import Field

from actors.errors import ConfigError, ServiceError
from actors.models.load import weights_digest
from actors.options import GraphOptions, ModelOptions, Options, validated
from actors.spec.checkpoint import parse

VERSION = 2
"""Changes with the arithmetic of FP8, which decides the errors."""


class PrecisionPlan(Options):
    """Which layers of a checkpoint run in FP8, and the errors that were measured.

    A linear layer has its name in the checkpoint; if several are fused, that of the first. For the
    names of attention, see `ATTENTION` in layers/block.py.
    """

    version: int = 1
    """Must be VERSION. The first plans have none."""
    model: str
    weights: str
    """`weights_digest` of the checkpoint. The plan is valid for these weights only, whatever the
    checkpoint is called."""
    fp8: tuple[str, ...] = Field(strict=False, min_length=1)
    errors: dict[str, float]
    """The error of each layer in FP8, relative to float32."""
    rows_error: float
    """The largest error of an image's rows, relative to `model.dtype`."""
    rows_cosine: float
    """The smallest cosine similarity of an image: the mean over its rows."""
    images: int

    @property
    def digest(self) -> str:
        """Plans with the same digest give the same rows."""
        return sha256(" ".join([str(self.version), *sorted(self.fp8)]).encode()).hexdigest()


def rows_digest(graphs: GraphOptions, model: ModelOptions) -> str:
    """Identifies what a model's rows depend on: its weights, and which layers run in FP8."""
    plan = read_plan(graphs, model)
    return f"{plan.weights} fp8 {plan.digest}" if plan else weights_digest(model)


def parse_plan(graphs: GraphOptions) -> PrecisionPlan | None:
    """The plan, or None if everything runs in `model.dtype`. Raises ConfigError."""
    if graphs.precision == "bf16":
        return None
    path = Path(graphs.precision_file)
    try:
        plan = validated(PrecisionPlan, parse(path.read_bytes(), str(path)))
    except (OSError, ServiceError) as error:
        raise ConfigError(
            f"graphs.precision_file cannot be read: {error}: write it with `encoder-service "
            "calibrate`"
        ) from None
    if plan.version != VERSION:
        raise ConfigError(
            f"graphs.precision_file {path} was written by another version of `encoder-service "
            "calibrate`, which measured other errors: run it again"
        )
    return plan


def read_plan(graphs: GraphOptions, model: ModelOptions) -> PrecisionPlan | None:
    """Like `parse_plan`, but also raises ConfigError for a plan of another checkpoint."""
    plan = parse_plan(graphs)
    if plan and plan.weights != weights_digest(model):
        raise ConfigError(
            f"graphs.precision_file {graphs.precision_file} is for other weights, those of "
            f"{plan.model}: run `encoder-service calibrate` with this model"
        )
    return plan
