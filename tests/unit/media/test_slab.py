"""What comes back through shared memory is what the actor itself would have made, bit for bit."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from actors.errors import EncodeFailed, InvalidMedia
from actors.families import registry
from actors.media.decode_worker import (
    Slab,
    answer_of,
    decode_in_place,
    error_of,
    model_message,
    order_of,
    packed,
    size_of,
    spec_of,
    unpacked,
)
from actors.media.image import prepare
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import ModelOptions
from actors.spec.checkpoint import Noted, find, preset_names
from actors.types import Alpha, Item, Kind, Media, ProcessorKwargs
from encoder_service.config import LimitOptions
from encoder_service.intake.media import probe, probe_frames
from tests.checkpoints_audio import sound, tones
from tests.images import encoded, jpeg, opened
from tests.videos import video

LIMITS = LimitOptions()
SLAB_BYTES = 2**26


def patchifier(preset: str) -> Patchifier:
    """As another process knows it: by what is told."""
    options = ModelOptions(id=preset, load_format="dummy")
    files = Noted(find(options))
    here = registry.read(options, files)
    there = spec_of(model_message(options, files.contents))
    assert there.fingerprint == here.fingerprint
    return patchifier_of(there)


def travelled(patchifier: Patchifier, media: Media, slab: Slab) -> Item | Exception:
    """There and back, as between processes."""
    size = size_of(media, patchifier.shape(media.plan))
    offset = slab.take(size)
    assert offset is not None
    slab.write(offset, size, media)
    assert not slab.begun(offset, size)
    (sent,) = unpacked(packed([order_of(media, offset, size)]))
    _, name, text, blocks = decode_in_place(patchifier, sent, slab.bytes)
    assert slab.begun(offset, size)
    if error := error_of(name, text):
        slab.give_back(offset)
        return error
    plan = media.plan.pruned(blocks)
    return slab.item(offset, plan, patchifier.shape(plan))


def check(found: Item | Exception, expected: Item) -> None:
    assert isinstance(found, Item), found
    assert found.plan == expected.plan
    for ours, theirs in [(found.patches, expected.patches), (found.later, expected.later)]:
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert np.array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("preset", preset_names())
def test_patches_of_every_family(preset: str) -> None:
    family, slab = patchifier(preset), Slab(SLAB_BYTES)
    files = [jpeg(301, 207), encoded(opened().resize((64, 900)), "PNG")]
    kind: Kind = "image"
    if family.spec.audio:
        files, kind = [sound(tones(0.5)), sound(tones(1.5, 24000), "flac", 24000)], "audio"
    sent = [probe(data, kind, family.spec, LIMITS) for data in files]
    if family.spec.video:
        sent.append(probe(video(9), "video", family.spec, LIMITS))
        sent.append(probe_frames([jpeg(64, 48)] * 3, 2.0, family.spec, LIMITS))
    files_of_kinds: dict[Kind, bytes] = {"image": jpeg(901, 607), "video": video(40)}
    for kind in family.spec.kinds:
        for name in family.spec.defaults(kind):
            most = 2048 if preset.startswith("nemotron") else 3  # its images have 1024 or more
            values = {"min_pixels": 400_000, "max_patches": most}
            kwargs = ProcessorKwargs(**{name: values.get(name, 3)})
            data = files_of_kinds[kind]
            sent.append(probe(data, kind, family.spec, LIMITS, kwargs=kwargs))
            assert sent[-1].kwargs == kwargs
    for media in sent:
        check(travelled(family, media, slab), prepare(family, media))
    slab.close()


@pytest.mark.parametrize("format", ["PNG", "HEIF", "AVIF"])
def test_processes_composite_transparency_as_the_service_says(format: str) -> None:
    family, slab = patchifier("qwen3vl-tiny"), Slab(SLAB_BYTES)
    image = opened().resize((301, 207))
    image.putalpha(99)
    data, found = encoded(image, format), []
    choices: list[Alpha] = ["white", "black", "drop"]
    for alpha in choices:
        media = probe(data, "image", family.spec, LIMITS, alpha)
        one = travelled(family, media, slab)
        check(one, prepare(family, media))
        assert isinstance(one, Item)
        found.append(one.patches.mean())
    white, black, drop = found
    assert black < drop < white
    frames = probe_frames([data] * 2, 2.0, family.spec, LIMITS)
    check(travelled(family, frames, slab), prepare(family, frames))
    assert prepare(family, frames).patches.mean() == pytest.approx(white, abs=1)
    slab.close()


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab(SLAB_BYTES)
    yield slab
    slab.close()


def test_errors_come_back_as_themselves(slab: Slab) -> None:
    family = patchifier("qwen3vl-tiny")
    good = probe(jpeg(64, 64), "image", family.spec, LIMITS)
    bad = Media("image", good.data[:-300], good.plan, digest="")
    found, expected = travelled(family, bad, slab), None
    with pytest.raises(InvalidMedia) as raised:
        prepare(family, bad)
    expected = raised.value
    assert (type(found), str(found)) == (InvalidMedia, str(expected))
    assert isinstance(error_of("MemoryError", "no more"), EncodeFailed)
    assert slab.take(SLAB_BYTES) == 0, "its block came back"


def test_a_block_is_free_when_no_view_of_it_is_left(slab: Slab) -> None:
    family = patchifier("qwen3vl-tiny")
    media = probe(jpeg(64, 64), "image", family.spec, LIMITS)
    assert slab.take(SLAB_BYTES) == 0
    slab.write(0, SLAB_BYTES, media)
    item = slab.item(0, media.plan, family.shape(media.plan))
    part: Any = item.patches[1:3]
    del item
    gc.collect()
    assert slab.take(1) is None
    del part
    assert slab.take(SLAB_BYTES) == 0


def test_nobody_truncates_the_slab(slab: Slab) -> None:
    with pytest.raises(PermissionError):
        os.truncate(slab.file, 0)


def test_words_that_are_no_unicode_are_said_as_far_as_they_are() -> None:
    said = unpacked(packed([answer_of(1.0, InvalidMedia("no \udcff"))]))
    assert said == ((1.0, "InvalidMedia", "no ?", b""),)
