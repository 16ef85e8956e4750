"""What a sound costs, from its length alone: windows of log-mel frames, positions, tokens.

A sound is to its sizing what an image is to an image's: its Size is samples x 1, mono, at `rate`.
No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from actors.spec.sizing import SMALLEST_BUDGET_TOKENS, Defaults, Largest
from actors.types import ItemPlan, ProcessorKwargs, Size

STRIDE = 2
"""Frames per position: the second convolution of Whisper's encoder skips every other one."""
SEEN_FRAMES = 5
"""Frames that a position sees, through two convolutions of three. They are one patch."""
MOST_WINDOWS = 64  # of sounds that share a pack
WINDOWS_PER_BUDGET = 4
"""Default of the largest budget, so that sounds share a graph."""


@dataclass(frozen=True, slots=True)
class AudioSizing:
    """How one family divides sounds, as WhisperFeatureExtractor and Whisper's encoder do.

    A window is one attention segment. `patches` of a plan are positions of the encoder.
    """

    rate: int  # samples per second
    hop: int  # samples per frame
    fft: int  # samples that a frame is computed from
    mels: int  # values of a frame
    window_frames: int
    stack: int  # positions per token
    whole: bool
    """Sounds are padded to whole windows, which give all rows. False: rows end with the sound."""
    several: bool
    """Longer sounds are several windows. False: they are refused."""

    @property
    def patch_size(self) -> int:
        """In samples."""
        return STRIDE * self.hop

    @property
    def merge_size(self) -> int:
        return 1

    @property
    def window_samples(self) -> int:
        return self.window_frames * self.hop

    @property
    def window_seconds(self) -> float:
        return self.window_samples / self.rate

    @property
    def window_tokens(self) -> int:
        return self.window_frames // (STRIDE * self.stack)

    @property
    def patch_values(self) -> int:
        """float32 each."""
        return SEEN_FRAMES * self.mels

    def plan(self, size: Size) -> ItemPlan:
        """A last token whose positions are not all of the sound is computed, but gives no row."""
        frames = -(-size.width * size.height // self.hop)
        windows = -(-frames // self.window_frames)
        positions = windows * self.window_frames if self.whole else frames
        positions = -(-positions // STRIDE)
        computed = -(-positions // self.stack)
        patches = computed * self.stack
        return ItemPlan(
            grid_thw=(windows, 1, patches // max(1, windows)),
            patches=patches,
            tokens=positions // self.stack,
            path_tokens=(computed,),
            frames=windows if self.several else 0,
        )

    def token_range(self) -> tuple[int, int]:
        smallest = self.window_tokens
        if not self.whole:
            smallest = min(smallest, SMALLEST_BUDGET_TOKENS)
        return smallest, WINDOWS_PER_BUDGET * self.window_tokens

    def defaults(self) -> Defaults:
        return {}

    def largest(self, tokens: int) -> Largest:
        return {}

    def asked(self, kwargs: ProcessorKwargs) -> Self:
        return self
