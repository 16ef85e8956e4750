"""The registry of model families: imports the spec.py of each folder next to this file.

To add a family, add its folder; there is no list to edit. No torch: models/load.py imports the
towers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from actors.errors import CheckpointError, ConfigError, InvalidOption, TooLarge
from actors.options import ImagesKwargs, ModelOptions
from actors.spec.checkpoint import (
    DAMAGED,
    PROCESSOR_FILES,
    VIDEO_PROCESSOR_FILE,
    Files,
    Json,
    Noted,
    Notes,
    Preset,
    find,
    misstated,
    preset_names,
)
from actors.spec.model_spec import ModelSpec
from actors.spec.settings import ModelSource, Reader, processor_name
from actors.spec.video import VideoStyle
from actors.types import Kind, ProcessorKwargs, Size

EXAMPLES = Size(1, 1), Size(1024, 1024)


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
def refused() -> Mapping[str, str]:
    """`model_type` of a model that is not served -> why, and which related model is."""
    found = [(spec, getattr(spec, "REFUSED", {})) for spec in specs()]
    return {
        kind: f"{reason}. The nearest that is served is {next(iter(spec.MODEL_TYPES))}"
        for spec, reasons in found
        for kind, reason in reasons.items()
    }


@cache
def vision_defaults() -> Mapping[str, Json]:
    """`model_type` -> the defaults of keys that `vision_config` may lack."""
    found = [getattr(spec, "VISION_DEFAULTS", {}) for spec in specs()]
    return {kind: defaults for families in found for kind, defaults in families.items()}


@cache
def processors() -> Mapping[str, Mapping[str, str]]:
    """`model_type` -> the `model_type` to read it as, by the name of its processor."""
    return {kind: getattr(spec, "PROCESSORS", {}) for spec in specs() for kind in spec.MODEL_TYPES}


def model_type_of(files: Files, config: Json) -> str:
    """`model_type` of config.json, unless the processor shows that the model is another one."""
    kind = str(config.get("model_type") or config.get("architectures"))
    others = processors().get(kind)
    return others.get(processor_name(files), kind) if others else kind


@cache
def video_styles() -> Mapping[str, VideoStyle]:
    """`model_type` of a language model -> how it writes videos, if it is supported here."""
    found = [getattr(spec, "VIDEO_STYLES", {}) for spec in specs()]
    return {kind: style for styles in found for kind, style in styles.items()}


def read(options: ModelOptions, files: Files | None = None) -> ModelSpec:
    """The spec of `model.id`, or of these files. Reads JSON files only. Raises CheckpointError."""
    files = Noted(files or find(options))
    config = files.read_json("config.json")
    if config is None:
        raise CheckpointError(f"model.id {options.id!r} has no config.json: not a model's folder?")
    model_type = model_type_of(files, config)
    if model_type in refused():
        raise CheckpointError(
            f"model.id {options.id!r} is of the architecture {model_type!r}, which is not served: "
            f"{refused()[model_type]}"
        )
    if model_type not in readers():
        raise CheckpointError(
            f"model.id {options.id!r} is of the architecture {model_type!r} (model_type of "
            f"config.json); supported are {', '.join(sorted(readers()))}"
        )
    reader, defaults = readers()[model_type], vision_defaults().get(model_type, {})

    def made(files: Files, config: Json) -> ModelSpec:
        spec = reader(ModelSource(options, files, config, defaults))
        check_sizes(spec)
        return spec

    try:
        spec = made(files, config)
    except DAMAGED as error:
        # With other keys, the reader may read files that it has not read so far.
        for name in (*PROCESSOR_FILES, VIDEO_PROCESSOR_FILE):
            with suppress(CheckpointError):
                files.read_json(name)
        examples = [Preset(name).files for name in preset_names()]
        where = misstated(
            files.contents,
            [one for one in examples if one["config.json"].get("model_type") == model_type],
            lambda contents: made(Notes(contents), contents["config.json"]),
        )
        raise CheckpointError(
            f"model.id {options.id!r}: its configuration lacks or misstates {error}{where}"
        ) from error
    if options.output == "vector" and not spec.vector:
        raise CheckpointError(
            f"model.output is vector, but the family {spec.family} has no pooled output: leave it "
            "out, and the service gives rows"
        )
    only_tower = "audio" if spec.audio else "vision"
    if options.tower not in (None, only_tower):
        raise CheckpointError(
            f"model.tower is {options.tower}, but the family {spec.family} has only the "
            f"{only_tower} tower: leave it out"
        )
    spec = with_kwargs(spec, "image", options.images_kwargs)
    return with_kwargs(spec, "video", options.videos_kwargs)


def check_sizes(spec: ModelSpec) -> None:
    """Raises ValueError for sizes by which an image cannot be divided."""
    if spec.audio:
        return
    sizing, (least, most) = spec.sizing, spec.sizing.token_range()
    sizing.largest(most)
    found = [sizing.patch_size, sizing.merge_size, least]
    for size in EXAMPLES:
        with suppress(TooLarge):
            plan = sizing.plan(size)
            found += [plan.patches, plan.tokens, *plan.grid_thw]
    if min(found) < 1:
        raise ValueError(f"sizes that leave nothing of an image: {sizing}")


def with_kwargs(spec: ModelSpec, kind: Kind, kwargs: ImagesKwargs) -> ModelSpec:
    """The spec with these options in place of the checkpoint's own. Raises ConfigError."""
    try:
        asked = spec.asked(kind, ProcessorKwargs(**kwargs.model_dump()))
    except InvalidOption as error:
        raise ConfigError(f"model.{kind}s_kwargs.{error}") from None
    changed = asked.sizing != spec.sizing
    return replace(asked, own_sizing=spec.sizing) if changed else asked
