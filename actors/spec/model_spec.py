"""What a model is, read from its JSON files alone: enough for ingress, router and tower.

Knows nothing of torch. What each family's config.json means: packed_spec.py, tile_spec.py,
clip_spec.py, view_spec.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from actors.errors import CheckpointError
from actors.options import ModelOptions
from actors.spec.checkpoint import Files, Json, find
from actors.spec.sizing import Sizing
from actors.spec.video import VideoSizing
from actors.types import Dtype, Kind

BILINEAR, BICUBIC = 2, 3
"""PIL.Image.Resampling, as processors' JSON says it."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One encoder: what it takes, what it gives, how it is cut into paths."""

    id: str
    revision: str | None
    family: str
    dtype: Dtype
    dummy: bool
    """Random weights: nobody may take the embeddings for real."""
    sizing: Sizing
    width: int
    """Values in a row of the embedding, deepstack included."""
    deepstack: int
    """How many deepstack features follow the main ones in a row."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    vision: Mapping[str, Any]
    """`vision_config` of config.json, as it stands."""
    paths: tuple[str, ...] = ("default",)
    video: VideoSizing | None = None
    """How videos are cut up; None: the family, or this checkpoint of it, takes none."""
    fast_blocks: bool = True
    """Whether the fast form of the blocks has all that these blocks do: see options.block_form."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What it takes."""
        return ("image", "video") if self.video else ("image",)

    @property
    def max_frames_per_video(self) -> int:
        """The most attention segments of one video; 0: it takes none."""
        return self.video.most_groups if self.video else 0

    @property
    def weights(self) -> str:
        """`checkpoint`, or `dummy` for random numbers."""
        return "dummy" if self.dummy else "checkpoint"

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the model, the same in every process."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read(options: ModelOptions, files: Files | None = None) -> ModelSpec:
    """The spec of `model.id`, or of its files. Reads a few of JSON. Raises CheckpointError."""
    files = files or find(options)
    config = files.read_json("config.json")
    if config is None:
        raise CheckpointError(f"model.id {options.id!r} has no config.json: not a model's folder?")
    # They build upon this module.
    from actors.spec import clip_spec, packed_spec, tile_spec, view_spec

    families = packed_spec.FAMILIES | tile_spec.FAMILIES | view_spec.FAMILIES | clip_spec.FAMILIES
    architecture = str(config.get("model_type"))
    family = families.get(architecture)
    if family is None:
        raise CheckpointError(
            f"model.id {options.id!r} is of the architecture {architecture!r}; "
            f"supported are {', '.join(sorted(families))}"
        )
    try:
        return family(options, files, config)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"model.id {options.id!r}: its configuration lacks or misstates {error}"
        ) from error


def image_processor(files: Files, resample: int = BICUBIC) -> Json:
    """The image processor's settings; transformers 5 saves them inside processor_config.json.

    Raises ValueError for steps that preprocessing here has fixed.
    """
    settings = files.read_json("preprocessor_config.json")
    if settings is None:
        settings = (files.read_json("processor_config.json") or {}).get("image_processor", {})
    fixed = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": resample}
    only(settings, fixed, "the image processor")
    if abs((settings.get("rescale_factor") or 1 / 255) * 255 - 1) > 1e-6:
        raise ValueError("rescale_factor of the image processor: only 1/255 is supported")
    return dict(settings)


def video_processor(files: Files) -> Json:
    """The video processor's settings, found where transformers finds them, in its order.

    Checkpoints older than video processors have those of the image processor.
    """
    together = (files.read_json("processor_config.json") or {}).get("video_processor")
    for settings in (
        together,
        files.read_json("video_preprocessor_config.json"),
        files.read_json("preprocessor_config.json"),
    ):
        if settings is not None:
            return dict(settings)
    return {}


def only(settings: Json, fixed: Json, whose: str) -> None:
    """Raises ValueError for a setting that is there and says something else."""
    for key, value in fixed.items():
        if settings.get(key) not in (None, value):
            raise ValueError(f"{key} of {whose}: only {value} is supported")


def image_spec(
    family: str, options: ModelOptions, processor: Json, vision: Json, sizing: Sizing, width: int
) -> ModelSpec:
    """The spec of a family for images, one path, without deepstack."""
    return ModelSpec(
        id=options.id,
        revision=options.revision,
        family=family,
        dtype=options.dtype,
        dummy=options.load_format == "dummy",
        sizing=sizing,
        width=int(width),
        deepstack=0,
        mean=rgb(processor["image_mean"]),
        std=rgb(processor["image_std"]),
        vision=vision,
    )


def rgb(value: float | list[float]) -> tuple[float, float, float]:
    """A value for each channel."""
    red, green, blue = [value] * 3 if isinstance(value, int | float) else value
    return float(red), float(green), float(blue)


def side(value: int | list[int] | dict[str, int]) -> int:
    """Of a square, in whichever of its ways JSON says it."""
    if isinstance(value, int):
        return value
    one, *others = value.values() if isinstance(value, dict) else value
    if others != [one]:
        raise ValueError(f"a size of {value}: only squares are supported")
    return int(one)
