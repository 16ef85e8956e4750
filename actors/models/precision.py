"""The plan of `graphs.precision: fp8`: which layers of one checkpoint are computed in FP8.

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


class PrecisionPlan(Options):
    """Linear layers by the checkpoint's own names, of fused ones the first, and attention: see
    `ATTENTION` in layers/block.py."""

    model: str
    weights: str
    """`weights_digest`: the plan is for these alone, whatever the checkpoint is called."""
    fp8: tuple[str, ...] = Field(strict=False, min_length=1)
    errors: dict[str, float]
    """Of every layer in FP8, relative to float32."""
    rows_error: float
    """Relative to `model.dtype`, of the image with the largest."""
    rows_cosine: float
    """Mean over the rows of an image, of the image with the least."""
    images: int

    @property
    def digest(self) -> str:
        """Rows of equal plans are equal."""
        return sha256(" ".join(sorted(self.fp8)).encode()).hexdigest()


def rows_digest(graphs: GraphOptions, model: ModelOptions) -> str:
    """Identifies the rows of a model: its weights, and which layers are in FP8."""
    plan = read_plan(graphs, model)
    return f"{plan.weights} fp8 {plan.digest}" if plan else weights_digest(model)


def parse_plan(graphs: GraphOptions) -> PrecisionPlan | None:
    """None: all is in `model.dtype`. Raises ConfigError."""
    if graphs.precision == "bf16":
        return None
    path = Path(graphs.precision_file)
    try:
        return validated(PrecisionPlan, parse(path.read_bytes(), str(path)))
    except (OSError, ServiceError) as error:
        raise ConfigError(
            f"graphs.precision_file cannot be read: {error}: write it with `encoder-service "
            "calibrate`"
        ) from None


def read_plan(graphs: GraphOptions, model: ModelOptions) -> PrecisionPlan | None:
    """As `parse_plan`. Raises ConfigError also for a plan of another checkpoint."""
    plan = parse_plan(graphs)
    if plan and plan.weights != weights_digest(model):
        raise ConfigError(
            f"graphs.precision_file {graphs.precision_file} is for other weights, those of "
            f"{plan.model}: run `encoder-service calibrate` with this model"
        )
    return plan
