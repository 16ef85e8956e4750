"""The registry of model families: it lists the folders beside this file and imports their spec.py.

A family is served because its folder is here: there is no list to edit. No torch: towers are
imported by models/load.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from actors.errors import CheckpointError
from actors.options import ModelOptions
from actors.spec.checkpoint import Files, find
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, Reader
from actors.spec.video import VideoStyle


@cache
def specs() -> list[ModuleType]:
    """The spec.py of each folder."""
    folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/spec.py"))
    return [import_module(f"actors.families.{name}.spec") for name in folders]


@cache
def readers() -> Mapping[str, Reader]:
    """`model_type` of config.json -> the function that makes a spec of it."""
    return {kind: read for spec in specs() for kind, read in spec.MODEL_TYPES.items()}


@cache
def video_styles() -> Mapping[str, VideoStyle]:
    """`model_type` of a language model -> how it writes videos, if it is supported here."""
    found = [getattr(spec, "VIDEO_STYLES", {}) for spec in specs()]
    return {kind: style for styles in found for kind, style in styles.items()}


def read(options: ModelOptions, files: Files | None = None) -> ModelSpec:
    """The spec of `model.id`, or of these files. Reads JSON files only. Raises CheckpointError."""
    files = files or find(options)
    config = files.read_json("config.json")
    if config is None:
        raise CheckpointError(f"model.id {options.id!r} has no config.json: not a model's folder?")
    model_type = str(config.get("model_type"))
    if model_type not in readers():
        raise CheckpointError(
            f"model.id {options.id!r} is of the architecture {model_type!r}; "
            f"supported are {', '.join(sorted(readers()))}"
        )
    try:
        return readers()[model_type](ModelSource(options, files, config))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"model.id {options.id!r}: its configuration lacks or misstates {error}"
        ) from error
