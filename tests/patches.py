"""Patches of images under a sizing that the test chooses."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from actors.families.registry import read
from actors.media.patchify import patchifier_of
from actors.options import ModelOptions
from actors.spec.sizing import Resample, Sizing

SPEC = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))


def patches_of(image: Tensor, sizing: Sizing, resample: Resample = "bicubic") -> Tensor:
    return patchifier_of(replace(SPEC, sizing=sizing, resample=resample)).patches(image)
