"""`encoder-service calibrate CONFIG IMAGES`: chooses the layers that run in FP8, by your own
images.

First the mean of each layer's inputs is measured, which makes FP8 more accurate. Then each layer is
quantised alone, in plain torch and float32, to measure the error of its output and of the final
rows. Then as many layers are quantised as the limits allow, those first that save most time for
their error in the rows. The rows are compared with those that the service returns in `model.dtype`.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from actors.engine.budgets import Segments
from actors.engine.device import Device, open_device
from actors.engine.graphs import GraphSet
from actors.errors import ConfigError, InvalidMedia, ServiceError
from actors.families.registry import read
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.layers.block import Affine, Quantisable, blocks_of, computed_by
from actors.models.load import build, check_fp8, tensors, weights_digest
from actors.models.precision import VERSION, LayerPlan, PrecisionPlan
from actors.models.tower import Tower
from actors.options import ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.types import Item
from encoder_service.commands import above_zero, add_command
from encoder_service.config import encoders, load
from encoder_service.intake.header import read_header

FEWEST_IMAGES = 6
"""With one, the errors of others were up to a third larger, with six 3 %:
docs/history/benchmarks.md, FP8 means."""
ROWS_ERROR = 4.5e-2
ROWS_COSINE = 0.998
"""Limits for the rows of every image: maximum relative error, minimum cosine similarity. The
error of images unlike the given ones may be larger, so its limit is below our target of 5e-2."""


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands, "calibrate", run, "find the layers that can run in FP8, using your own images"
    )
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="configuration, such as configs/qwen3vl.yaml"
    )
    parser.add_argument("images", nargs="+", type=Path, metavar="IMAGE", help="image file")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="output, for graphs.precision_file"
    )
    parser.add_argument(
        "--bound",
        type=above_zero,
        default=6e-2,
        metavar="ERROR",
        help="maximum relative error of a layer's output; layers above it do not run in FP8",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table and writes the plan. Raises StartError, InvalidMedia, OSError."""
    service = next(iter(encoders(load(options.config)).values()))
    spec = read(service.model)
    device = open_device(service.encoder.device)
    check_fp8(spec, device.device)
    patchifier = patchifier_of(spec)
    items = []
    for path in options.images:
        data = path.read_bytes()
        try:
            read_header(data)  # says more clearly than `decode` that a file is no image
            image = decode(data, service.preprocess.alpha)
        except ServiceError as error:
            raise InvalidMedia(f"{path}: {error}") from None
        cut, patches = patchifier.patchify(image)
        items.append(Item(cut, patches.numpy()))
    if len(items) < FEWEST_IMAGES:
        console.print(
            f"With fewer than {FEWEST_IMAGES} images, others may have larger errors than these: "
            "give more, like those that you will serve"
        )
    options.out.open("a").close()  # fails before hours of work
    calibration = Calibration(service.model, spec, device, items)
    plan = calibration.plan(options.bound)
    console.print(table(calibration.errors, plan))
    console.print(
        f"{len(plan.fp8)} of {len(calibration.errors)} layers run in FP8. Together they change the "
        f"rows of an image by a relative error of at most {plan.rows_error:.1e} (the limit is "
        f"{ROWS_ERROR:.1e}) from those in {spec.dtype}, with a cosine of at least "
        f"{plan.rows_cosine:.5f}"
    )
    options.out.write_text(plan.model_dump_json(indent=2) + "\n")
    console.print(
        f"graphs: {{precision: fp8, precision_file: {options.out.resolve()}}}", highlight=False
    )
    return 0


@dataclass(slots=True)
class LayerError:
    """Errors over all images if only this layer is in FP8."""

    operations: int = 0
    error: float = 0.0  # squares of the errors of its output
    output: float = 0.0  # squares of its output
    rows: float = 0.0  # the relative error of the final rows

    @property
    def relative(self) -> float:
        """Infinite for a layer whose outputs are all zero, so that it stays as it is."""
        return math.sqrt(self.error / self.output) if self.output else math.inf

    @property
    def price(self) -> float:
        """Error per time saved: errors add up in squares, and time saved is as the operations."""
        return self.rows**2 / self.operations


class Calibration:
    """One tower on one device, with and without FP8, on the same images."""

    def __init__(
        self, options: ModelOptions, spec: ModelSpec, device: Device, items: Sequence[Item]
    ) -> None:
        self.options = options
        self.spec = spec
        self.device = device
        self.items = items
        weights = tensors(options, spec, device.device)
        self.expected = self.encode(build(spec, weights, device.device))
        plain, form = replace(spec, dtype="float32"), blocks_of("reference")
        self.means = self.input_means(build(plain, weights, device.device, form))
        self.plain = build(plain, weights, device.device, form, self.means)
        self.errors = self.layer_errors()
        """By layer, in the order in which they run."""

    def plan(self, bound: float) -> PrecisionPlan:
        """Puts as many layers in FP8 as the limits allow. Raises ConfigError if none can be."""
        within = [name for name, each in self.errors.items() if each.relative <= bound]
        within.sort(key=lambda name: self.errors[name].price)
        best: tuple[int, Deviation] | None = None
        low, high, count = 1, len(within), len(within)
        while low <= high:
            found = self.deviation(within[:count])
            if found.fits:
                best, low = (count, found), count + 1
            else:
                high = count - 1
            count = (low + high) // 2
        if best is None:
            least = min(each.relative for each in self.errors.values())
            raise ConfigError(
                f"no layer can run in FP8: relative errors of layers start at {least:.1e} "
                f"(--bound is {bound:.1e}), and that of the rows must be below "
                f"{ROWS_ERROR:.1e}: leave graphs.precision at bf16"
            )
        count, found = best
        chosen = {
            name: LayerPlan.of(each.relative, self.means.get(name))
            for name, each in self.errors.items()
            if name in within[:count]
        }
        return PrecisionPlan(
            version=VERSION,
            model=self.options.id,
            weights=weights_digest(self.options),
            fp8=chosen,
            rows_error=found.error,
            rows_cosine=found.cosine,
            images=len(self.items),
        )

    def deviation(self, layers: Collection[str]) -> Deviation:
        """The largest error and the smallest cosine of all images with these layers in FP8."""
        pairs = list(zip(self.rows(layers), self.expected, strict=True))
        return Deviation(
            max(relative(rows, those) for rows, those in pairs),
            min(float(F.cosine_similarity(rows, those).mean()) for rows, those in pairs),
        )

    def rows(self, layers: Collection[str]) -> list[Tensor]:
        """The rows of each image, with these layers in FP8 and all else in float32."""

        def compute(layer: Quantisable, x: Tensor) -> Tensor:
            return layer.in_fp8(x) if layer.name in layers else layer.plain(x)

        with computed_by(compute):
            return self.encode(self.plain)

    def input_means(self, tower: Tower) -> dict[str, Tensor]:
        """The mean of the inputs of each linear layer, in bfloat16, as in the plan. Images of all
        sizes count the same."""
        means: defaultdict[str, list[Tensor]] = defaultdict(list)

        def note(layer: Quantisable, x: Tensor) -> Tensor:
            if isinstance(layer, Affine):
                means[layer.name].append(x.mean(0))
            return layer.plain(x)

        with computed_by(note):
            self.encode(tower)
        return {name: torch.stack(each).mean(0).bfloat16() for name, each in means.items()}

    def layer_errors(self) -> dict[str, LayerError]:
        errors: defaultdict[str, LayerError] = defaultdict(LayerError)

        def measure(layer: Quantisable, x: Tensor) -> Tensor:
            exact, rough, found = layer.plain(x), layer.in_fp8(x), errors[layer.name]
            found.error += float((rough - exact).square().sum())
            found.output += float(exact.square().sum())
            found.operations += layer.operations(x)
            return exact

        with computed_by(measure):
            exact = self.encode(self.plain)
        for name, found in errors.items():
            pairs = zip(self.rows({name}), exact, strict=True)
            found.rows = max(relative(rows, those) for rows, those in pairs)
        return errors

    def encode(self, tower: Tower) -> list[Tensor]:
        graphs = GraphSet(tower, self.spec.paths[0], (), Segments(0), self.device)
        rows = (graphs.run(None, [item]) for item in self.items)
        return [self.device.read_back(one, [len(one)])()[0].float() for one in rows]


@dataclass(frozen=True, slots=True)
class Deviation:
    error: float
    cosine: float

    @property
    def fits(self) -> bool:
        return self.error < ROWS_ERROR and self.cosine > ROWS_COSINE


def relative(rows: Tensor, expected: Tensor) -> float:
    return float((rows - expected).norm() / expected.norm())


def table(errors: Mapping[str, LayerError], plan: PrecisionPlan) -> Table:
    """Relative errors of each layer alone."""
    shown = Table("layer", "output error", "row error", "precision")
    for name, each in errors.items():
        precision = "FP8" if name in plan.fp8 else "unchanged"
        shown.add_row(name, f"{each.relative:.1e}", f"{each.rows:.1e}", precision)
    return shown
