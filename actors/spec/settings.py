"""What the families' spec.py share: reading processors' settings and keys of config.json.

Settings that preprocessing does not support raise ValueError with the key. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from actors.errors import CheckpointError
from actors.options import ModelOptions
from actors.spec.checkpoint import VIDEO_PROCESSOR_FILE, Files, Json
from actors.spec.model_spec import ModelSpec
from actors.spec.sizing import Resample, Sizing
from actors.spec.video import VideoSizing

PIL_RESAMPLING: dict[Resample, int] = {"lanczos": 1, "bilinear": 2, "bicubic": 3}
"""PIL.Image.Resampling, as in processors' JSON."""

CLIP_PIXELS: Json = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALVES: Json = {"image_mean": 0.5, "image_std": 0.5}
IMAGENET_PIXELS: Json = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
"""The mean and standard deviation of pixels, if the image processor does not say."""

TEXT_WIDTHS: Mapping[str, int] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), 4096),
    "cohere2": 8192,
}
"""transformers' default of `hidden_size` of `text_config`, by its `model_type`."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a spec is made from: a model's options and its files."""

    options: ModelOptions
    files: Files
    config: Json
    """config.json."""
    vision_defaults: Json
    """The defaults of the configuration class of `vision_config`."""

    @property
    def vision(self) -> Json:
        """`vision_config`. transformers may have saved only what differs from the defaults."""
        return {**self.vision_defaults, **self.config["vision_config"]}

    @property
    def tower(self) -> Json:
        """The same keys, if config.json is that of a tower on its own."""
        return {key: self.config.get(key, usual) for key, usual in self.vision_defaults.items()}

    @property
    def text_width(self) -> int:
        """The width of the language model that reads the embeddings. Older versions of transformers
        saved only what differs from the defaults."""
        text = self.config["text_config"]
        if "hidden_size" not in text and text.get("model_type") in TEXT_WIDTHS:
            return TEXT_WIDTHS[text["model_type"]]
        return int(text["hidden_size"])

    def image_processor(
        self,
        defaults: Json,
        resample: Resample | None = "bicubic",
        *,
        normalized: bool = True,
        always_resized: bool = False,
    ) -> Json:
        """The image processor's settings, in transformers' order of precedence; transformers 5
        saves them in processor_config.json. Null means the default, as in transformers.

        `resample`: the only one that is supported; None: any of PIL_RESAMPLING. `always_resized`:
        the processor ignores `do_resize`.
        """
        settings = (self.files.read_json("processor_config.json") or {}).get("image_processor")
        if settings is None:
            settings = self.files.read_json("preprocessor_config.json") or {}
        fixed = fixed_steps(resample) | {"do_normalize": normalized}
        if always_resized:
            del fixed["do_resize"]
        only(settings, fixed, "the image processor")
        if abs((settings.get("rescale_factor") or 1 / 255) * 255 - 1) > 1e-6:
            raise ValueError("rescale_factor of the image processor: only 1/255 is supported")
        return defaults | {key: value for key, value in settings.items() if value is not None}

    def feature_extractor(self, mels: int, fixed: Json) -> Json:
        """The settings for sounds; transformers 5 saves them in processor_config.json. `fixed`:
        those that may be absent but must not differ. Raises ValueError."""
        together = self.files.read_json("processor_config.json") or {}
        settings = together.get("feature_extractor", together.get("audio_processor"))
        if settings is None:
            settings = self.files.read_json("preprocessor_config.json") or {}
        fixed = fixed | {"feature_size": mels, "padding_side": "right", "padding_value": 0.0}
        only(settings, fixed, "the feature extractor")
        return dict(settings)

    def video_processor(self) -> Json:
        """The video processor's settings, in transformers' order of precedence.

        Checkpoints that are older than video processors use those of the image processor.
        """
        together = self.files.read_json("processor_config.json") or {}
        for settings in (
            together.get("video_processor"),
            self.files.read_json(VIDEO_PROCESSOR_FILE),
            self.files.read_json("preprocessor_config.json"),
        ):
            if settings is not None:
                return dict(settings)
        return {}

    def spec(
        self,
        family: str,
        processor: Json,
        vision: Json,
        sizing: Sizing,
        width: int,
        *,
        folder: str = "",
        resample: Resample = "bicubic",
        paths: tuple[str, ...] = ("default",),
    ) -> ModelSpec:
        """The spec of a family that takes images. `folder` defaults to the name of the family."""
        rope_theta(vision)  # raises ValueError for what no tower supports
        return ModelSpec(
            id=self.options.id,
            revision=self.options.revision,
            family=family,
            folder=folder or family,
            dtype=self.options.dtype,
            dummy=self.options.load_format == "dummy",
            sizing=sizing,
            resample=resample,
            width=int(width),
            mean=rgb(processor["image_mean"]),
            std=rgb(processor["image_std"]),
            vision=vision,
            paths=paths,
        )

    def with_video(
        self, model: ModelSpec, video: VideoSizing, resample: Resample = "bicubic"
    ) -> ModelSpec:
        """The spec with videos, if the tower's temporal groups are those of `video`. Raises
        ValueError for settings of the video processor that are not supported."""
        settings = self.video_processor()
        only(settings, fixed_steps(resample), "the video processor")
        for key, value in (("image_mean", model.mean), ("image_std", model.std)):
            if settings.get(key) is not None and rgb(settings[key]) != value:
                raise ValueError(
                    f"{key} of the video processor: only the image processor's {value}"
                )
        groups = int(model.vision.get("temporal_patch_size", video.group))
        return replace(model, video=video) if groups == video.group else model


def chosen_tower(source: ModelSource, vision: Reader, audio: Reader) -> ModelSpec:
    """The spec of the tower that `model.tower` names, for a model that has both. The readers get
    the thinker's configuration. Raises CheckpointError if `model.tower` is not set."""
    if source.options.tower is None:
        raise CheckpointError(
            f"model.id {source.options.id!r} has a vision tower and an audio tower, and a service "
            "serves one: set model.tower to vision or audio"
        )
    read = vision if source.options.tower == "vision" else audio
    return read(replace(source, config=source.config["thinker_config"]))


ProcessorSize = int | list[int] | dict[str, int] | None
"""`size` of an image processor, in whichever form JSON has it."""

Reader = Callable[[ModelSource], ModelSpec]
"""How a family's spec.py makes a spec."""


def processor_name(files: Files) -> str:
    """`Glm46V` of Glm46VVideoProcessor, else of Glm46VImageProcessor, else of Glm46VProcessor.

    In transformers' order of precedence. Empty if no file says.
    """
    together = files.read_json("processor_config.json") or {}
    places = [
        together.get("video_processor") or {},
        files.read_json(VIDEO_PROCESSOR_FILE) or {},
        together.get("image_processor") or {},
        files.read_json("preprocessor_config.json") or {},
        together,
    ]
    for key, kind in (
        ("video_processor_type", "VideoProcessor"),
        ("image_processor_type", "ImageProcessor"),
        ("processor_class", "Processor"),
    ):
        for settings in places:
            if name := settings.get(key):
                return str(name).partition(kind)[0]
    return ""


def fixed_steps(resample: Resample | None) -> Json:
    """Settings of a processor that may be absent but must not differ."""
    steps: Json = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
    return steps | ({"resample": PIL_RESAMPLING[resample]} if resample else {})


def resampling(processor: Json) -> Resample:
    """The `resample` of an image processor; bicubic if it does not say."""
    names = {number: name for name, number in PIL_RESAMPLING.items()}
    found = processor.get("resample")
    if found is None:
        return "bicubic"
    if found not in names:
        raise ValueError(f"resample of the image processor: {found!r} is none of {list(names)}")
    return names[found]


def only(settings: Json, fixed: Json, whose: str) -> None:
    """Raises ValueError for a setting that is present and different."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"{whose}: {settings!r} is not a JSON object")
    for key, value in fixed.items():
        if settings.get(key) not in (None, value):
            raise ValueError(f"{key} of {whose}: only {value} is supported")


def layers_run(given: int | list[int], depth: int, key: str) -> list[int]:
    """How many layers run for each hidden state that `given` names: -1 is the output of the last of
    `depth` layers, 0 the embedding of patches. Raises ValueError, with `key`, for states that no
    layer outputs."""
    stated = given if isinstance(given, list) else [given]
    layers = [layer + (depth + 1 if layer < 0 else 0) for layer in stated]
    if not layers or not 0 < min(layers) <= max(layers) <= depth:
        raise ValueError(f"{key}: {given} is not supported, as there are {depth} layers")
    return layers


def frame_settings(settings: Json) -> tuple[float, int, int]:
    """Frames per second, the fewest and the most frames."""
    return (
        float(settings.get("fps") or 2),
        int(settings.get("min_frames") or 4),
        int(settings.get("max_frames") or 768),
    )


def total_pixels(settings: Json, smallest: int, largest: int) -> tuple[int, int]:
    """A range of pixels, which transformers calls `size`."""
    size = {"shortest_edge": smallest, "longest_edge": largest} | (settings.get("size") or {})
    return int(size["shortest_edge"]), int(size["longest_edge"])


def pixel_range(processor: Json, smallest: int, largest: int) -> tuple[int, int]:
    """The image processor's range of pixels, under today's keys or those of 2024; otherwise the
    defaults."""
    shortest, longest = total_pixels(processor, smallest, largest)
    return (
        int(processor.get("min_pixels") or shortest),
        int(processor.get("max_pixels") or longest),
    )


def rope_theta(vision: Mapping[str, Any]) -> float:
    """Under today's key or that of 2024; otherwise transformers' default. Raises ValueError for
    other kinds of rotary embedding."""
    today = vision.get("rope_parameters") or {}
    if (kind := today.get("rope_type")) not in (None, "default", "axial"):
        raise ValueError(f"rope_type of rope_parameters: {kind} is not supported")
    return float(today.get("rope_theta") or vision.get("rope_theta") or 10000.0)


def tile_sides(vision: Json, processor: Json) -> dict[str, int]:
    """`tile_pixels` and `patch_size` of a TileSizing."""
    return {
        "tile_pixels": tower_pixels(vision, processor.get("size")),
        "patch_size": side(vision["patch_size"]),
    }


def tower_pixels(vision: Json, size: ProcessorSize) -> int:
    """The side of the tower's images, which must be the image processor's `size`."""
    pixels = side(vision["image_size"])
    if side(size or pixels) != pixels:
        raise ValueError(f"size of the image processor: only the tower's {pixels} is supported")
    return pixels


def shorter_side(size: ProcessorSize) -> ProcessorSize:
    """`size` of a processor that crops a square: {"shortest_edge": 336} as 336. Raises ValueError
    for one that stretches images to a square."""
    if isinstance(size, dict) and size.keys() != {"shortest_edge"}:
        raise ValueError(f"size of a processor: {size}, where only a shortest_edge is supported")
    return size["shortest_edge"] if isinstance(size, dict) else size


def rgb(value: float | list[float]) -> tuple[float, float, float]:
    """One value per channel."""
    red, green, blue = [value] * 3 if isinstance(value, int | float) else value
    return float(red), float(green), float(blue)


def side(value: int | list[int] | dict[str, int]) -> int:
    """The side of a square, in whichever form JSON has it."""
    if not isinstance(value, list | dict):
        return int(value)
    if isinstance(value, dict) and value.keys() != {"height", "width"}:
        raise ValueError(f"a size of {value}: only height and width are supported")
    one, *others = value.values() if isinstance(value, dict) else value
    if others != [one]:
        raise ValueError(f"a size of {value}: only squares are supported")
    return int(one)
