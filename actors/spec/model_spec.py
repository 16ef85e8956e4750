"""What a model is: all that the front door, the router and the decoders need to know of it.

Each family's spec.py makes one from a model's JSON files (families.registry.read). No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from actors.spec.sizing import Resample, Sizing
from actors.spec.video import VideoSizing
from actors.types import Dtype, Kind


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One encoder: what it takes, what it gives, how its work is divided into paths."""

    id: str
    revision: str | None
    family: str
    """As clients see it."""
    folder: str
    """The folder in actors/families that has its tower."""
    dtype: Dtype
    dummy: bool
    """Random weights: nobody may take the embeddings for real."""
    sizing: Sizing
    resample: Resample
    width: int
    """Values in a row of the embedding, deepstack included."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    vision: Mapping[str, Any]
    """`vision_config` of config.json, with the family's defaults."""
    deepstack: int = 0
    """How many deepstack features follow the main ones in a row."""
    paths: tuple[str, ...] = ("default",)
    video: VideoSizing | None = None
    """How videos are divided. None: the family, or this checkpoint of it, takes no videos."""
    fast_blocks: bool = True
    """Whether the fast form of the blocks has all that these blocks do: see options.block_form."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return ("image", "video") if self.video else ("image",)

    @property
    def max_frames_per_video(self) -> int:
        """The most attention segments of one video; 0: it takes no videos."""
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
