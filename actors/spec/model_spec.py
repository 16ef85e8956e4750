"""What a model is: all that the front door, the router and the decoders need to know about it.

Each family's spec.py makes one from a model's JSON files (families.registry.read). No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from actors.errors import ConfigError, InvalidOption
from actors.spec.audio import MOST_WINDOWS, AudioSizing
from actors.spec.sizing import (
    BlockSizing,
    CappedSizing,
    Defaults,
    Largest,
    LinedSizing,
    PackedSizing,
    Resample,
    Sizing,
    WindowedSizing,
)
from actors.spec.video import VideoSizing
from actors.types import NO_KWARGS, PLURALS, ItemPlan, Kind, ModelDtype, ProcessorKwargs


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One encoder: what it takes, what it gives, how its work is divided into paths."""

    id: str
    revision: str | None
    family: str
    """As clients see it."""
    folder: str
    """The folder in actors/families that has its tower."""
    dtype: ModelDtype
    dummy: bool
    """The weights are random, so the embeddings are meaningless."""
    sizing: Sizing
    resample: Resample
    width: int
    """Values in a row of the embedding, deepstack included."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    vision: Mapping[str, Any]
    """`vision_config` of config.json, with the family's defaults. For models that take audio, the
    configuration of their audio encoder."""
    deepstack: int = 0
    """How many deepstack features follow the main ones in a row."""
    paths: tuple[str, ...] = ("default",)
    video: VideoSizing | None = None
    """How videos are divided. None: the family, or this checkpoint of it, takes no videos."""
    fast_blocks: bool | None = True
    """Whether the fast form of the blocks supports this tower's; see options.block_form. None: the
    tower has blocks of another kind, which have one form, plain torch."""
    own_sizing: Sizing | None = None
    """The checkpoint's own sizing, if `model.images_kwargs` changes it."""
    vector: bool = False
    """An image gives one vector, pooled and projected, instead of rows."""
    text: Mapping[str, Any] | None = None
    """`text_config` of config.json, with the family's defaults, if the model also gives vectors of
    texts. Texts have a path of their own, the last."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        if self.audio:
            return ("audio",)
        return ("image", "video") if self.video else ("image",)

    @property
    def audio(self) -> AudioSizing | None:
        """How sounds are divided. None: the model takes no sounds."""
        return self.sizing if isinstance(self.sizing, AudioSizing) else None

    @property
    def text_plan(self) -> ItemPlan | None:
        """The plan of every text, because all are padded to the maximum length. None: the model
        takes no texts."""
        if self.text is None:
            return None
        tokens = int(self.text["max_position_embeddings"])
        return ItemPlan((1, 1, tokens), tokens, 1, (0, tokens))

    @property
    def image_path(self) -> int:
        """The index of the last path that images take. In a model with two views, that of crops."""
        return len(self.paths) - (1 if self.text is None else 2)

    @property
    def max_frames_per_video(self) -> int:
        """The most attention segments of one video or sound. 0: none has several."""
        if self.audio:
            return MOST_WINDOWS if self.audio.several else 0
        return self.video.most_groups if self.video else 0

    def defaults(self, kind: Kind) -> Defaults:
        """The options that a request may set for an item of this kind, and their defaults."""
        sizing = self.sizing if kind == "image" else self.video
        return sizing.defaults() if sizing else {}

    def largest(self, kind: Kind, tokens: int) -> Largest:
        """The largest values of these options, for images or groups of frames of up to so many
        tokens."""
        sizing = self.sizing if kind == "image" else self.video
        return sizing.largest(tokens) if sizing else {}

    def asked(self, kind: Kind, kwargs: ProcessorKwargs) -> Self:
        """The spec for an item of this kind with a request's options. Raises InvalidOption."""
        if kwargs == NO_KWARGS:
            return self
        self.check_taken(kwargs, kind)
        if kind == "image":
            return replace(self, sizing=self.sizing.asked(kwargs))
        return replace(self, video=self.video.asked(kwargs)) if self.video else self

    def check_taken(self, kwargs: ProcessorKwargs, *kinds: Kind) -> None:
        """Raises InvalidOption for options that no item of these kinds takes, and for options that
        exclude each other."""
        taken = {name: None for kind in kinds for name in self.defaults(kind)}
        for name in kwargs.given():
            if name not in taken:
                of = " and ".join(PLURALS[kind] for kind in kinds)
                raise InvalidOption(
                    f"{name}: {self.id} ({self.family}) does not take it for {of}; "
                    f"it takes {', '.join(taken) or 'none of these options'}"
                )
        if kwargs.fps and kwargs.num_frames:
            raise InvalidOption("fps and num_frames exclude each other: give one of them")

    def check_fp8(self) -> None:
        """Raises ConfigError if there are no FP8 kernels for the tower."""
        if not isinstance(self.sizing, BlockSizing) or not self.fast_blocks:
            raise ConfigError(
                f"graphs.precision needs FP8, which the family {self.family} does not have: only "
                "towers of one path for images of any size have it, except Gemma 4; set it to bf16"
            )

    def check_prune(self) -> None:
        """Raises ConfigError if the tower cannot omit merge blocks of an image."""
        whole = isinstance(self.sizing, WindowedSizing | LinedSizing)
        if whole or not isinstance(self.sizing, PackedSizing | CappedSizing):
            raise ConfigError(
                f"preprocess.prune is exact, which the family {self.family} does not have: only "
                "Qwen2-VL, Qwen3-VL, GLM-V, Kimi-VL and others whose images are one grid, without "
                "attention windows, tiles or line breaks, have it; set it to off"
            )

    @property
    def weights(self) -> str:
        """`checkpoint`, or `dummy` for random numbers."""
        return "dummy" if self.dummy else "checkpoint"

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that identify the model, the same in every process."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def nameless(self) -> Self:
        """The spec without name and revision, so that a copy of the model at another path is
        equal."""
        return replace(self, id="", revision=None)
