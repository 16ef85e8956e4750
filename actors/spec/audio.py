"""What a sound costs, from its length alone: windows of log-mel frames, positions, tokens.

Sounds have sizings as images do: the Size of a sound is samples x 1, mono, at `rate`. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Literal

from actors.spec.sizing import SMALLEST_BUDGET_TOKENS, NoOptions
from actors.types import ItemPlan, Size

STRIDE = 2
"""Frames per position: the second convolution of Whisper's encoder skips every other one."""
SEEN_FRAMES = 5
"""Frames that a position sees, through two convolutions of three frames. They are one patch."""
HALVINGS = 3
"""Convolutions of Qwen3-Omni's encoder, each of which skips every other frame."""
STEP_FRAMES = 1 << HALVINGS
"""Frames from one of its positions to the next."""
BEYOND = -(2.0**14)
"""Stands for the values of a frame that is not there. Log-mel values are far above it, and every
dtype of a tower holds it exactly. Every convolution sees zeros there; with silence instead, the
first one would output other values."""
Features = Literal["phi4", "parakeet", "gemma4"]
"""Whose log-mel frames a conformer takes; see media/log_mel.py."""
MOST_WINDOWS = 64  # windows of the sounds that share a pack
BUDGET_SECONDS = 30.0
SOUNDS_PER_BUDGET = 4
"""The default largest budget holds so many sounds of BUDGET_SECONDS, or of the most seconds that a
model takes if that is less, so that sounds share a graph."""


@dataclass(frozen=True, slots=True)
class AudioSizing(NoOptions, ABC):
    """How one family makes log-mel frames of sounds and divides them into windows."""

    rate: int  # samples per second
    hop: int  # samples per frame
    fft: int  # samples that a frame is computed from
    mels: int  # values of a frame
    window_frames: int  # frames that the convolutions see together
    stack: int  # positions of the encoder per token
    most_seconds: float  # longer sounds are rejected; infinite: none is

    @property
    @abstractmethod
    def patch_size(self) -> int:
        """The step from one patch to the next, in samples."""

    @property
    @abstractmethod
    def patch_values(self) -> int:
        """The values of a patch, each float32."""

    @property
    @abstractmethod
    def window_tokens(self) -> int:
        """Tokens of a window of frames."""

    @property
    @abstractmethod
    def segment_tokens(self) -> int:
        """Tokens of a full attention segment."""

    @abstractmethod
    def padded_samples(self, samples: int) -> int:
        """The samples of a sound, with the silence that is heard after it."""

    @abstractmethod
    def frames(self, samples: int) -> int:
        """Frames that are computed for a sound. `beyond` fills its last window."""

    @abstractmethod
    def beyond(self, frames: int) -> float:
        """The value in all frames after these, up to a whole window."""

    @abstractmethod
    def plan(self, size: Size) -> ItemPlan:
        """Grid, patches and tokens of a sound. No tokens: it is too short."""

    @abstractmethod
    def token_range(self) -> tuple[int, int]:
        """The smallest and the largest budget by default."""

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
    def several(self) -> bool:
        """Whether a sound may have several windows."""
        return self.most_seconds > self.window_seconds

    @property
    def largest_budget(self) -> int:
        windows = int(min(self.most_seconds, BUDGET_SECONDS) / self.window_seconds)
        return SOUNDS_PER_BUDGET * windows * self.window_tokens


@dataclass(frozen=True, slots=True)
class WhisperSizing(AudioSizing):
    """Like WhisperFeatureExtractor and Whisper's encoder. A window is one attention segment, and a
    patch is the frames that a position sees."""

    whole: bool
    """Sounds are padded to whole windows, and all of these give rows. False: rows end with the
    sound."""
    ends: bool = False
    """Frames end with the sound, too. False: they go on with the silence after it."""

    @property
    def patch_size(self) -> int:
        return STRIDE * self.hop

    @property
    def patch_values(self) -> int:
        return SEEN_FRAMES * self.mels

    @property
    def window_tokens(self) -> int:
        return self.window_frames // (STRIDE * self.stack)

    @property
    def segment_tokens(self) -> int:
        return self.window_tokens

    def padded_samples(self, samples: int) -> int:
        if self.ends:  # transformers pads to the most seconds; only this much reaches frames
            most = self.most_seconds * self.rate
            return int(max(samples, min(samples + self.fft, most)))
        return -(-samples // self.window_samples) * self.window_samples

    def frames(self, samples: int) -> int:
        return -(-(samples if self.ends else self.padded_samples(samples)) // self.hop)

    def beyond(self, frames: int) -> float:
        return BEYOND

    def plan(self, size: Size) -> ItemPlan:
        """A last token whose positions are not all of the sound is computed, but gives no row."""
        frames = -(-size.width * size.height // self.hop)
        windows = -(-frames // self.window_frames)
        positions = windows * self.window_frames if self.whole else frames
        positions = -(-positions // STRIDE)
        computed = -(-positions // self.stack)
        patches = computed * self.stack
        return ItemPlan(
            grid_thw=(windows, 1, min(patches, self.window_frames // STRIDE)),
            patches=patches,
            tokens=positions // self.stack,
            path_tokens=(computed,),
            frames=windows if self.several else 0,
        )

    def token_range(self) -> tuple[int, int]:
        smallest = self.window_tokens
        if not self.whole:
            smallest = min(smallest, SMALLEST_BUDGET_TOKENS)
        return smallest, self.largest_budget


@dataclass(frozen=True, slots=True)
class ChunkSizing(AudioSizing):
    """Like Qwen3-Omni's encoder: convolutions see a window of frames together, and positions attend
    to those of a few windows. A position is a token. A patch is the frames that begin in its time;
    the last patch of a window is padded with frames that nothing sees."""

    attended: int  # windows per attention segment
    least_samples: int  # shorter sounds are padded with silence, which gives rows
    whole: bool
    """Convolutions see a whole window of a sound that is shorter. False: they end with it."""

    @property
    def patch_size(self) -> int:
        return STEP_FRAMES * self.hop

    @property
    def patch_values(self) -> int:
        return STEP_FRAMES * self.mels

    @property
    def window_tokens(self) -> int:
        return halved(self.window_frames)

    @property
    def segment_tokens(self) -> int:
        return self.attended * self.window_tokens

    def padded_samples(self, samples: int) -> int:
        return max(samples, self.least_samples)

    def frames(self, samples: int) -> int:
        """0 for a sound that is too short to be mirrored at its end."""
        padded = self.padded_samples(samples)
        return padded // self.hop if samples and padded > self.fft // 2 else 0

    def beyond(self, frames: int) -> float:
        return 0.0 if self.whole or frames > self.window_frames else BEYOND

    def plan(self, size: Size) -> ItemPlan:
        """The positions of the last window that are beyond the sound are computed, too."""
        frames = self.frames(size.width * size.height)
        full, rest = divmod(frames, self.window_frames)
        windows = max(1, full + bool(rest))
        segments = -(-windows // self.attended)
        computed = windows * self.window_tokens
        return ItemPlan(
            grid_thw=(segments, 1, min(computed, self.segment_tokens)),
            patches=computed,
            tokens=full * self.window_tokens + halved(rest),
            path_tokens=(computed,),
            frames=segments,
        )

    def token_range(self) -> tuple[int, int]:
        """Every budget in between is a number of whole windows."""
        smallest = SMALLEST_BUDGET_TOKENS // self.window_tokens * self.window_tokens
        return smallest, self.largest_budget


@dataclass(frozen=True, slots=True)
class ConformerSizing(AudioSizing):
    """For conformers: each of `halvings` convolutions of three frames has a stride of 2. A position
    is a token. A patch is what it sees: its own `stride` frames and, because every convolution
    looks back, the `stride` - 1 frames before them. So patches need no neighbours."""

    halvings: int
    features: Features
    less: int
    """Samples at the end of a sound that begin no frame."""
    least_frames: int = 1  # sounds with fewer frames have no tokens
    more_frames: int = 0  # frames after the sound's that count for its tokens

    @property
    def stride(self) -> int:
        """Frames from one position to the next."""
        return 1 << self.halvings

    @property
    def seen_frames(self) -> int:
        return 2 * self.stride - 1

    @property
    def patch_size(self) -> int:
        return self.stride * self.hop

    @property
    def patch_values(self) -> int:
        return self.seen_frames * self.mels

    @property
    def window_tokens(self) -> int:
        return self.window_frames // self.stride

    @property
    def segment_tokens(self) -> int:
        return self.window_tokens

    def padded_samples(self, samples: int) -> int:
        return samples

    def frames(self, samples: int) -> int:
        frames = max(0, samples - self.less) // self.hop
        return frames if frames >= self.least_frames else 0

    def beyond(self, frames: int) -> float:
        return BEYOND

    def plan(self, size: Size) -> ItemPlan:
        """If there are several windows, the last is computed whole: it attends to positions beyond
        the sound, as in transformers."""
        frames = self.frames(size.width * size.height)
        tokens = -(-(frames + self.more_frames) // self.stride) if frames else 0
        if not self.several or tokens <= self.window_tokens:
            windows, length = int(tokens > 0), tokens
        else:
            windows, length = -(-tokens // self.window_tokens), self.window_tokens
        computed = windows * length
        return ItemPlan(
            grid_thw=(windows, 1, length),
            patches=computed,
            tokens=tokens,
            path_tokens=(computed,),
            frames=windows if self.several else 0,
        )

    def token_range(self) -> tuple[int, int]:
        """A window may be longer than BUDGET_SECONDS."""
        seconds = min(self.most_seconds, BUDGET_SECONDS)
        largest = self.plan(Size(int(seconds * self.rate), 1)).tokens
        return min(SMALLEST_BUDGET_TOKENS, largest), SOUNDS_PER_BUDGET * largest


at_16_khz = partial(ConformerSizing, rate=16000, hop=160, fft=512, stack=1)
"""A frame every 10 ms, as of all families so far."""


def halved(frames: int) -> int:
    """Positions after the convolutions."""
    return -(-frames // STEP_FRAMES)
