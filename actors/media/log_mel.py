"""Sounds to log-mel frames, and frames to patches; transformers: WhisperFeatureExtractor."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.spec.audio import BEYOND, SEEN_FRAMES, STRIDE, AudioSizing

Values = npt.NDArray[np.float64]

FLOOR = 1e-10  # of the power, before its logarithm
RANGE = 8.0  # below the loudest value, in decades; what is quieter is raised to it
LINEAR_HZ, LINEAR_MELS = 1000.0, 15.0  # Slaney's scale is linear up to here, then logarithmic
MELS_PER_LOG = 27 / np.log(6.4)


def log_mel(samples: Tensor, sizing: AudioSizing) -> Tensor:
    """float32 [samples] to [windows, mels, frames of a window]."""
    padded = F.pad(samples, (0, sizing.padded_samples(len(samples)) - len(samples)))
    spectrum = torch.stft(
        padded,
        sizing.fft,
        sizing.hop,
        window=torch.hann_window(sizing.fft),
        return_complex=True,
    )
    power = (spectrum[:, :-1].abs() ** 2).contiguous()
    mel = mel_filters(sizing.rate, sizing.fft, sizing.mels) @ power
    found = mel.clamp(min=FLOOR).log10()
    found = (torch.maximum(found, found.max() - RANGE) + 4) / 4
    frames = sizing.frames(len(samples))
    rest = -frames % sizing.window_frames
    found = F.pad(found[:, :frames], (0, rest), value=sizing.beyond(frames))
    return found.view(sizing.mels, -1, sizing.window_frames).transpose(0, 1)


def cut_positions(frames: Tensor) -> Tensor:
    """[windows, mels, frames] to [windows, positions, SEEN_FRAMES x mels]: the frames that each
    position sees, those beyond the window BEYOND, frame after frame."""
    before = SEEN_FRAMES // 2
    around = F.pad(frames, (before, before - 1), value=BEYOND).unfold(2, SEEN_FRAMES, STRIDE)
    return around.permute(0, 2, 3, 1).flatten(2)


@lru_cache
def mel_filters(rate: int, fft: int, mels: int) -> Tensor:
    """float32 [mels, frequencies]: triangles of equal area between 0 and half the rate, by Slaney;
    transformers.audio_utils: mel_filter_bank."""
    edges = hertz(np.linspace(0, mels_of(rate / 2), mels + 2))
    ramps = edges[:, None] - np.linspace(0, rate // 2, 1 + fft // 2)
    widths = np.diff(edges)[:, None]
    triangles = np.maximum(0, np.minimum(-ramps[:-2] / widths[:-1], ramps[2:] / widths[1:]))
    areas = (edges[2:] - edges[:-2])[:, None] / 2
    return torch.from_numpy((triangles / areas).astype(np.float32))


def mels_of(frequency: float) -> float:
    if frequency < LINEAR_HZ:
        return LINEAR_MELS * frequency / LINEAR_HZ
    return float(LINEAR_MELS + np.log(frequency / LINEAR_HZ) * MELS_PER_LOG)


def hertz(mels: Values) -> Values:
    above = LINEAR_HZ * np.exp((mels - LINEAR_MELS) / MELS_PER_LOG)
    return np.where(mels < LINEAR_MELS, mels * LINEAR_HZ / LINEAR_MELS, above)
