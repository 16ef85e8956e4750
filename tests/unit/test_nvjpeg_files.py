"""Which files nvJPEG is given, and what is said where it cannot be used."""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import simplejpeg
import torch
from pydantic import ValidationError

from actors.errors import StartError
from actors.families import registry
from actors.media import nvjpeg
from actors.media.nvjpeg import open_nvjpeg, plain
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import (
    ActorOptions,
    EncoderOptions,
    ModelOptions,
    PreprocessOptions,
)
from actors.types import Size
from tests.images import encoded, opened

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")


@pytest.fixture(scope="module")
def patchifier() -> Patchifier:
    return patchifier_of(registry.read(MODEL))


def rgb(**options: Any) -> bytes:
    return encoded(opened().resize((61, 47)), "JPEG", **options)


@pytest.mark.parametrize(
    ("data", "taken"),
    [
        (rgb(), True),
        (rgb(progressive=True), True),
        (rgb(subsampling=0), True),
        (rgb(subsampling=1), True),
        (simplejpeg.encode_jpeg(np.zeros((47, 61, 3), np.uint8), colorsubsampling="440"), False),
        (encoded(opened().resize((61, 7)), "JPEG"), False),
        (rgb(orientation=1), True),
        (rgb(orientation=9), True),  # no orientation: Pillow leaves it as it is
        (rgb(orientation=3), False),
        (rgb(keep_rgb=True), False),
        (rgb()[:-1], False),
        (rgb() + b"\0", False),
        (rgb()[:200] + b"\xff\xd9", False),
        (b"\xff\xd8\xff\xd9", False),
        (b"", False),
        (encoded(opened().convert("L"), "JPEG"), False),
        (encoded(opened().convert("CMYK"), "JPEG"), False),
        (encoded(opened(), "PNG"), False),
    ],
)
def test_which_files_are_plain(data: bytes, taken: bool) -> None:
    assert plain(data) == (Size(61, 47) if taken else None)


def test_an_mpo_is_not_plain() -> None:
    images = [opened(), opened().rotate(90)]
    data = encoded(images[0], "MPO", save_all=True, append_images=images[1:])
    assert plain(data) is None


def test_the_gpu_is_asked_for_where_there_is_none(
    patchifier: Patchifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = EncoderOptions(device="cpu", num_gpus=0)
    with pytest.raises(ValidationError, match=r"preprocess\.device is cuda"):
        ActorOptions(model=MODEL, encoder=cpu, preprocess=PreprocessOptions(device="cuda"))
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    with pytest.raises(StartError, match="needs torchvision"):
        open_nvjpeg(patchifier, torch.device("cuda", 0))


class CompilationError(Exception):
    """In the place of Triton's, which is none of Python's own either."""


@pytest.mark.parametrize(
    "error", [RuntimeError("no nvJPEG"), CompilationError("no ptxas"), ImportError("no triton")]
)
def test_whatever_is_wrong_with_the_gpus_way_is_said_at_start(
    patchifier: Patchifier, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "torchvision.io", Mock())
    monkeypatch.setattr(nvjpeg, "Nvjpeg", broken)
    with pytest.raises(StartError, match=rf"set preprocess\.device to cpu \({error}\)"):
        open_nvjpeg(patchifier, torch.device("cuda", 0))


def test_what_the_check_at_start_finds_is_said_as_it_is(
    patchifier: Patchifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = StartError("its pixels are others")

    def differing(_: object) -> None:
        raise found

    monkeypatch.setitem(sys.modules, "torchvision.io", Mock())
    monkeypatch.setattr(nvjpeg, "Nvjpeg", Mock())
    monkeypatch.setattr(nvjpeg, "check", differing)
    with pytest.raises(StartError) as raised:
        open_nvjpeg(patchifier, torch.device("cuda", 0))
    assert raised.value is found
