"""Converts sounds to log-mel frames, and frames to patches.

transformers: WhisperFeatureExtractor, and, for conformers, Phi4MultimodalFeatureExtractor,
ParakeetFeatureExtractor and Gemma4AudioFeatureExtractor, each with a batch of one sound.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.spec.audio import (
    BEYOND,
    SEEN_FRAMES,
    STRIDE,
    AudioSizing,
    ConformerSizing,
    Features,
)

Values = npt.NDArray[np.float64]

FLOOR = 1e-10  # minimum of the power, before its logarithm
RANGE = 8.0  # decades below the loudest value, to which quieter values are raised
LINEAR_HZ, LINEAR_MELS = 1000.0, 15.0  # Slaney's scale is linear up to here, then logarithmic
MELS_PER_LOG = 27 / np.log(6.4)
BEND_HZ = 700.0  # of the mel scales of HTK and Kaldi, which differ only by a factor

PREEMPHASIS = 0.97  # of Phi-4 and Parakeet
WINDOW = 400  # samples that a frame of theirs is computed from
INT16 = 32768  # the scale of Phi-4's samples
FRAMES_TOGETHER = 4096  # of Phi-4: in float64 those of 15 minutes would take 1.2 GB
PHI4_HZ = 7690.0  # the upper end of its mel filters
GUARD = 2.0**-24  # added by Parakeet within the logarithm
EPSILON = 1e-5  # added to Parakeet's standard deviation
GEMMA4_FLOOR = 1e-3  # added within the logarithm


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
    position sees, one after the other. Frames beyond the window have the value BEYOND."""
    before = SEEN_FRAMES // 2
    around = F.pad(frames, (before, before - 1), value=BEYOND).unfold(2, SEEN_FRAMES, STRIDE)
    return around.permute(0, 2, 3, 1).flatten(2)


def conformer_frames(samples: Tensor, sizing: ConformerSizing) -> Tensor:
    """float32 [samples] to [frames, mels]."""
    return FRAMES[sizing.features](samples, sizing)[: sizing.frames(len(samples))]


def phi4_frames(samples: Tensor, sizing: ConformerSizing) -> Tensor:
    frames = samples.unfold(0, WINDOW, sizing.hop)
    return torch.cat([phi4_mels(part, sizing) for part in frames.split(FRAMES_TOGETHER)])


def phi4_mels(frames: Tensor, sizing: ConformerSizing) -> Tensor:
    """[frames, samples of a frame] to [frames, mels]."""
    before = torch.cat([frames[:, :1], frames[:, :-1]], 1)
    frames = (frames - PREEMPHASIS * before) * INT16
    window = torch.hamming_window(WINDOW, periodic=False, dtype=torch.float64)
    spectrum = torch.fft.rfft(window * frames, sizing.fft).to(torch.complex64)
    power: Tensor = spectrum.abs() ** 2
    return (power @ kaldi_filters(sizing)).clamp(min=1.0).log()


def parakeet_frames(samples: Tensor, sizing: ConformerSizing) -> Tensor:
    """Each mel is normalised over the whole sound."""
    spectrum = torch.stft(
        torch.cat([samples[:1], samples[1:] - PREEMPHASIS * samples[:-1]]),
        sizing.fft,
        sizing.hop,
        WINDOW,
        window=torch.hann_window(WINDOW, periodic=False),
        pad_mode="constant",
        return_complex=True,
    )
    power = torch.view_as_real(spectrum).pow(2).sum(-1).sqrt().pow(2)  # rounds as transformers does
    mel = mel_filters(sizing.rate, sizing.fft, sizing.mels) @ power
    found = (mel + GUARD).log().t()[: sizing.frames(len(samples))]
    # Not `mean` and `std`: of silence only rounding errors are left, which must be transformers'.
    centred = found - found.sum(0) / len(found)
    deviation = (centred.square().sum(0) / (len(found) - 1)).sqrt()
    return centred / (deviation + EPSILON)


def gemma4_frames(samples: Tensor, sizing: ConformerSizing) -> Tensor:
    """Computes in float64 from the spectrum on. The first frame starts half its length before the
    sound."""
    length = 2 * sizing.hop
    frames = F.pad(samples, (length // 2, 0)).unfold(0, length, sizing.hop)
    window = torch.hann_window(length, dtype=torch.float64).float()
    spectrum: Tensor = torch.fft.rfft((frames * window).double(), sizing.fft).abs()
    return (spectrum @ htk_filters(sizing) + GEMMA4_FLOOR).log().float()


FRAMES: dict[Features, Callable[[Tensor, ConformerSizing], Tensor]] = {
    "phi4": phi4_frames,
    "parakeet": parakeet_frames,
    "gemma4": gemma4_frames,
}


def cut_conformer(frames: Tensor, positions: int, sizing: ConformerSizing) -> Tensor:
    """[frames, mels] to [positions, seen frames x mels]: the frames that each position sees, one
    after the other. Frames before and after the sound have the value BEYOND."""
    before = sizing.stride - 1
    after = positions * sizing.stride - len(frames)
    padded = F.pad(frames, (0, 0, before, after), value=BEYOND)
    return padded.unfold(0, sizing.seen_frames, sizing.stride).transpose(1, 2).flatten(1)


@lru_cache
def kaldi_filters(sizing: ConformerSizing) -> Tensor:
    """float32 [frequencies, mels]: triangles on the mel scale."""
    edges = np.linspace(0, bent(np.array(PHI4_HZ)), sizing.mels + 2)
    return torch.from_numpy(triangles(edges, bent(frequencies(sizing))).T.astype(np.float32))


@lru_cache
def htk_filters(sizing: ConformerSizing) -> Tensor:
    """float64 [frequencies, mels]."""
    edges = np.linspace(0, bent(np.array(sizing.rate / 2)), sizing.mels + 2)
    return torch.from_numpy(triangles(BEND_HZ * np.expm1(edges), frequencies(sizing)).T.copy())


def frequencies(sizing: AudioSizing) -> Values:
    return np.linspace(0, sizing.rate / 2, 1 + sizing.fft // 2)


def bent(frequency: Values) -> Values:
    return np.log1p(frequency / BEND_HZ)


@lru_cache
def mel_filters(rate: int, fft: int, mels: int) -> Tensor:
    """float32 [mels, frequencies]: Slaney's triangles of equal area, from 0 to half the rate.
    transformers.audio_utils: mel_filter_bank."""
    edges = hertz(np.linspace(0, mels_of(rate / 2), mels + 2))
    areas = (edges[2:] - edges[:-2])[:, None] / 2
    found = triangles(edges, np.linspace(0, rate // 2, 1 + fft // 2))
    return torch.from_numpy((found / areas).astype(np.float32))


def triangles(edges: Values, places: Values) -> Values:
    """[mels, places]: triangles of height 1, each from one edge to the next but one."""
    ramps = edges[:, None] - places
    widths = np.diff(edges)[:, None]
    return np.maximum(0, np.minimum(-ramps[:-2] / widths[:-1], ramps[2:] / widths[1:]))


def mels_of(frequency: float) -> float:
    if frequency < LINEAR_HZ:
        return LINEAR_MELS * frequency / LINEAR_HZ
    return float(LINEAR_MELS + np.log(frequency / LINEAR_HZ) * MELS_PER_LOG)


def hertz(mels: Values) -> Values:
    above = LINEAR_HZ * np.exp((mels - LINEAR_MELS) / MELS_PER_LOG)
    return np.where(mels < LINEAR_MELS, mels * LINEAR_HZ / LINEAR_MELS, above)
