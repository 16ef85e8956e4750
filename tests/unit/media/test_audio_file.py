"""Sound files: their length from packets, decoding to mono at one rate, and what is refused."""

from __future__ import annotations

import time
import wave
from io import BytesIO

import av
import numpy as np
import pytest
from PIL import Image

from actors.errors import InvalidMedia, ServiceError, TooLarge, UnsupportedMedia
from actors.families.registry import read
from actors.media.audio_file import MOST_CHANNELS, decoded, opened, read_seconds
from actors.media.decode_worker import media_of, order_of
from actors.media.image import prepare
from actors.media.patchify import patchifier_of
from actors.options import ModelOptions
from actors.types import Size
from encoder_service.config import LimitOptions
from encoder_service.intake.media import probe
from tests.checkpoints_audio import FORMATS, RATE, sound, tones
from tests.images import encoded, jpeg

MODEL = read(ModelOptions(id="whisper-tiny", load_format="dummy"))
LOSSLESS = ("wav", "flac")


@pytest.mark.parametrize("rate", [16000, 48000])
@pytest.mark.parametrize("format", FORMATS)
def test_the_length_is_that_of_what_is_decoded(format: str, rate: int) -> None:
    data = sound(tones(1.337, rate), format, rate)
    with av.open(BytesIO(data), "r") as container:
        count = sum(frame.samples for frame in container.decode(audio=0))
        own = container.streams.audio[0].rate  # of Opus always 48000
    assert read_seconds(data, 60) * own == count


@pytest.mark.parametrize("codec", ["pcm_u8", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_mulaw"])
def test_codecs_of_wav(codec: str) -> None:
    samples = tones(0.1)
    ours = decoded(sound(samples, codec=codec), RATE, len(samples))
    coarse = {"pcm_u8": 0.01, "pcm_mulaw": 0.05}.get(codec, 1e-6)
    assert np.abs(ours - samples).max() <= coarse


@pytest.mark.parametrize("format", LOSSLESS)
def test_samples_at_the_models_rate_are_as_they_were(format: str) -> None:
    samples = tones(1.01)
    assert np.array_equal(decoded(sound(samples, format), RATE, len(samples)), samples)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rate", [8000, 24000, 48000])
def test_resampled_sounds_are_in_time_and_as_loud(format: str, rate: int) -> None:
    samples = 0.4 * np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32)
    data = sound(samples, format, rate)
    count = round(read_seconds(data, 60) * RATE)
    exact = 0.4 * np.sin(2 * np.pi * 440 * np.arange(count) / RATE)
    inner = slice(800, min(count, RATE) - 800)
    assert np.abs(decoded(data, RATE, count)[inner] - exact[inner]).max() < 0.03


@pytest.mark.parametrize("format", LOSSLESS)
@pytest.mark.parametrize("channels", [2, MOST_CHANNELS])
def test_channels_are_averaged(channels: int, format: str) -> None:
    each = np.stack([tones(0.2, seed=seed) for seed in range(channels)])
    ours = decoded(sound(each, format), RATE, each.shape[1])
    assert np.allclose(ours, each.mean(0), atol=1e-6)


def test_titles_need_not_be_utf_8() -> None:
    data, samples = sound(tones(0.1)), tones(0.1)
    assert b"Lavf" in data, "the muxer's name, which it writes as metadata"
    data = data.replace(b"Lavf", b"L\xe4vf")
    assert read_seconds(data, 60) * RATE == len(samples)
    assert np.array_equal(decoded(data, RATE, len(samples)), samples)


def test_covers_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small PNG may take gigabytes."""
    cover = b"\0image/png\0\3\0" + encoded(Image.new("L", (64, 64)), "PNG")
    frame = b"APIC" + len(cover).to_bytes(4) + bytes(2) + cover
    data = b"ID3\3\0\0" + bytes((0, 0, *divmod(len(frame), 128))) + frame + sound(tones(1), "mp3")
    with opened(data) as (container, _):
        (picture,) = container.streams.video
        assert not picture.width
    assert read_seconds(data, 60) == 1


def test_front_door_and_decoder_agree() -> None:
    for seconds in (0.02, 1.0, 29.9999):
        data = sound(tones(seconds, 22050), "flac", 22050)
        media = probe(data, "audio", MODEL, LimitOptions())
        assert media.size == Size(-(-round(seconds * 22050) * RATE // 22050), 1)
        memory = bytearray(len(data) + 1)
        memory[: len(data)] = data
        again = media_of(order_of(media, 0, len(memory)), memoryview(memory))
        item = prepare(patchifier_of(MODEL), again)
        assert (item.plan, item.patches.shape) == (media.plan, (1500, 5 * 80 * 4))
        assert media.identity[:1] == ("audio",)


def test_what_is_too_long_is_refused_before_it_is_decoded() -> None:
    """Also before its packets are read to the end."""
    long = sound(np.zeros(8000 * 1200, np.float32), "mp3", 8000)
    started = time.process_time()
    with pytest.raises(
        TooLarge, match="longer than 30 s, the most that whisper-tiny takes: cut it"
    ):
        probe(long, "audio", MODEL, LimitOptions())
    assert time.process_time() - started < 0.05, "to decode it takes 0.15 s"
    with pytest.raises(TooLarge, match=r"longer than 2 s.*limits\.max_audio_seconds"):
        probe(sound(tones(2.1)), "audio", MODEL, LimitOptions(max_audio_seconds=2))


def damaged(name: str) -> bytes:
    whole, flac, silent = sound(tones(1.0)), sound(tones(1.0), "flac"), BytesIO()
    with wave.open(silent, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
    return {
        "empty": b"",
        "no samples": silent.getvalue(),
        "too short": sound(tones(0.015)),
        "cut off": whole[: len(whole) // 2],
        "cut off FLAC": flac[: len(flac) // 2],
        "only a header": whole[:50],
        "a picture": jpeg(64, 64),
        "a codec": sound(tones(0.1), codec="adpcm_ima_wav"),
        "a rate": sound(tones(0.1, 200_000), rate=200_000),
        "a low rate": sound(tones(0.1, 3999), rate=3999),
    }[name]


@pytest.mark.parametrize(
    ("name", "kind", "told"),
    [
        ("empty", UnsupportedMedia, "not in a supported audio format: send WAV, FLAC, MP3 or OGG"),
        ("no samples", InvalidMedia, "the sound lasts 0 s, too short for one token"),
        (
            "cut off",
            InvalidMedia,
            "has 16039 of the 32078 bytes that its header declares: it is trunc",
        ),
        ("cut off FLAC", InvalidMedia, r"ends after 0\.\d of the 1\.0 s that its header declares"),
        ("only a header", InvalidMedia, "has 50 of the 32078 bytes"),
        ("a picture", UnsupportedMedia, "not in a supported audio format"),
        ("a codec", UnsupportedMedia, "the codec adpcm_ima_wav is not supported: use flac, mp3"),
        ("a rate", UnsupportedMedia, "1 channels of 200000 samples a second; supported are up to"),
        ("a low rate", UnsupportedMedia, "1 channels of 3999 samples a second"),
    ],
)
def test_what_is_refused(name: str, kind: type[ServiceError], told: str) -> None:
    with pytest.raises(kind, match=told):
        probe(damaged(name), "audio", MODEL, LimitOptions())


def test_a_header_that_promises_more_than_the_decoder_finds() -> None:
    with pytest.raises(InvalidMedia, match=r"ends after 1\.0 of the 2\.0 s"):
        decoded(sound(tones(1.0)), RATE, 2 * RATE)


def test_samples_that_are_no_numbers() -> None:
    samples = tones(0.1)
    samples[100] = np.nan
    media = probe(sound(samples, codec="pcm_f32le"), "audio", MODEL, LimitOptions())
    with pytest.raises(InvalidMedia, match="not finite"):
        prepare(patchifier_of(MODEL), media)


def test_models_of_the_other_kind() -> None:
    images = read(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    with pytest.raises(UnsupportedMedia, match="takes images and videos only, not a sound"):
        probe(sound(tones(0.1)), "audio", images, LimitOptions())
    with pytest.raises(UnsupportedMedia, match="takes sounds only, not an image"):
        probe(jpeg(64, 64), "image", MODEL, LimitOptions())
    with pytest.raises(
        UnsupportedMedia, match=r"a sound \(WAV\), sent as an image: send it as aud"
    ):
        probe(sound(tones(0.1)), "image", images, LimitOptions())
