"""What comes back through shared memory is what the actor itself would have made, bit for bit."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest

from actors.errors import EncodeFailed, InvalidMedia
from actors.families import registry
from actors.media.decode_messages import (
    answer,
    error_of,
    model_of,
    model_told,
    order,
    packed,
    unpacked,
)
from actors.media.decode_worker import made
from actors.media.image import prepare
from actors.media.patch_memory import PatchMemory
from actors.media.patchify import Patchifier, patchifier_of
from actors.options import ModelOptions
from actors.spec.checkpoint import Noted, find, preset_names
from actors.types import Item, Media
from encoder_service.config import LimitOptions
from encoder_service.intake.media import probe, probe_frames
from tests.images import encoded, jpeg, opened
from tests.videos import video

LIMITS = LimitOptions()
MEMORY_BYTES = 2**26


def patchifier(preset: str) -> Patchifier:
    """As another process knows it: by what is told."""
    options = ModelOptions(id=preset, load_format="dummy")
    files = Noted(find(options))
    here = registry.read(options, files)
    told = model_of(model_told(options, files.contents))
    assert told.fingerprint == here.fingerprint
    return patchifier_of(told)


def travelled(patchifier: Patchifier, media: Media, memory: PatchMemory) -> Item | Exception:
    """There and back, as between processes."""
    place = memory.take(MEMORY_BYTES // 2)
    assert place
    memory.write(place, media)
    (sent,) = unpacked(packed([order(place, media)]))
    _, name, text = made(patchifier, sent, memory._bytes)
    if error := error_of(name, text):
        memory.give_back(place)
        return error
    return memory.item(place, media.plan, patchifier.shape(media.plan))


def check(found: Item | Exception, expected: Item) -> None:
    assert isinstance(found, Item), found
    assert found.plan == expected.plan
    for ours, theirs in [(found.patches, expected.patches), (found.later, expected.later)]:
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert np.array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("preset", preset_names())
def test_patches_of_every_family(preset: str) -> None:
    family, memory = patchifier(preset), PatchMemory(MEMORY_BYTES, lambda: None)
    files = [jpeg(301, 207), encoded(opened().resize((64, 900)), "PNG")]
    sent = [probe(data, "image", family.spec, LIMITS) for data in files]
    if family.spec.video:
        sent.append(probe(video(9), "video", family.spec, LIMITS))
        sent.append(probe_frames([jpeg(64, 48)] * 3, 2.0, family.spec, LIMITS))
    for media in sent:
        check(travelled(family, media, memory), prepare(family, media))
    memory.close()


@pytest.fixture
def memory() -> Any:
    made = PatchMemory(MEMORY_BYTES, lambda: None)
    yield made
    made.close()


def test_errors_come_back_as_themselves(memory: PatchMemory) -> None:
    family = patchifier("qwen3vl-tiny")
    good = probe(jpeg(64, 64), "image", family.spec, LIMITS)
    bad = Media("image", good.data[:-300], good.plan, digest="")
    found, expected = travelled(family, bad, memory), None
    with pytest.raises(InvalidMedia) as raised:
        prepare(family, bad)
    expected = raised.value
    assert (type(found), str(found)) == (InvalidMedia, str(expected))
    assert isinstance(error_of("MemoryError", "no more"), EncodeFailed)
    assert memory.take(MEMORY_BYTES), "its place came back"


def test_a_place_is_free_when_no_view_of_it_is_left(memory: PatchMemory) -> None:
    family, woken = patchifier("qwen3vl-tiny"), []
    memory = PatchMemory(2**20, lambda: woken.append(1))
    media = probe(jpeg(64, 64), "image", family.spec, LIMITS)
    place = memory.take(2**20)
    assert place
    memory.write(place, media)
    item = memory.item(place, media.plan, family.shape(media.plan))
    part: Any = item.patches[1:3]
    del item
    gc.collect()
    assert memory.take(1) is None
    assert not woken
    del part
    assert woken, "who found no room is told"
    assert memory.take(2**20)
    memory.close()


def test_nobody_cuts_the_memory_off(memory: PatchMemory) -> None:
    with pytest.raises(PermissionError):
        os.truncate(memory.file, 0)


def test_words_that_are_no_unicode_are_said_as_far_as_they_are() -> None:
    said = unpacked(packed([answer(1.0, InvalidMedia("no \udcff"))]))
    assert said == ((1.0, "InvalidMedia", "no ?"),)
