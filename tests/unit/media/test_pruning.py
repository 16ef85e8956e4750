"""Images without the merge blocks that repeat a neighbour, from bytes to rows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from actors.errors import ConfigError
from actors.families.registry import read
from actors.media.image import prepare
from actors.media.patchify import patchifier_of, unrepeated
from actors.options import (
    ActorOptions,
    CacheOptions,
    EncoderOptions,
    GraphOptions,
    ModelOptions,
    PreprocessOptions,
)
from actors.pipeline import Pipeline, open_pipeline
from actors.spec.checkpoint import preset_names
from actors.store.kept import PendingWrite
from actors.store.writer import tensor
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import open_spans
from actors.types import Embedding, ItemPlan, Media
from encoder_service.config import LimitOptions, fit, parse
from encoder_service.intake.media import probe
from tests.images import encoded, jpeg

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
SPEC = read(MODEL)
PATCHIFIER = patchifier_of(SPEC)


def pixel_prune(colours: list[list[int]]) -> list[list[bool]]:
    """As published, block by block (OPPO-Mente-Lab/PixelPrune, pred_2d.py, threshold 0): what is
    dropped takes the value that predicts it."""
    kept = [[True] * len(row) for row in colours]
    known = [list(row) for row in colours]
    for r, row in enumerate(colours):
        for c, colour in enumerate(row):
            if (r, c) == (0, 0):
                continue
            if not r:
                guess = known[r][c - 1]
            elif not c:
                guess = known[r - 1][c]
            else:
                left, above, corner = known[r][c - 1], known[r - 1][c], known[r - 1][c - 1]
                guess = above if corner == left != above else left
            kept[r][c] = colour != guess
            known[r][c] = colour if kept[r][c] else guess
    assert known == colours, "what is kept tells the rest"
    return kept


COLOURS = st.tuples(st.integers(1, 9), st.integers(1, 9)).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(0, 2), min_size=size[1], max_size=size[1]),
        min_size=size[0],
        max_size=size[0],
    )
)


@given(COLOURS, st.integers(0, 12 * 14**2 - 1))
def test_the_rule_is_that_of_pixel_prune(colours: list[list[int]], place: int) -> None:
    """Blocks of 2 x 2 patches that differ in one byte."""
    rows, columns = len(colours), len(colours[0])
    blocks = np.zeros((rows, columns, 12 * 14**2), np.uint8)
    blocks[..., place] = colours
    kept = unrepeated(blocks.reshape(4 * rows * columns, -1), (1, 2 * rows, 2 * columns), 2)
    assert kept.reshape(rows, columns).tolist() == pixel_prune(colours)


@pytest.mark.parametrize("patch_size", [14, 15])
def test_blocks_of_a_single_patch(patch_size: int) -> None:
    """VideoLLaMA 3: 588 bytes, or an odd number."""
    patches = np.repeat(np.array([[1], [1], [2], [1]], np.uint8), 3 * patch_size**2, 1)
    assert unrepeated(patches, (1, 2, 2), 1).tolist() == [True, False, True, True]


@given(st.integers(1, 300), st.data())
def test_a_plan_counts_what_is_kept(tokens: int, data: st.DataObject) -> None:
    whole = ItemPlan((1, 2, 2 * tokens), 4 * tokens, tokens, (tokens,))
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    plan = whole.pruned(np.packbits(kept).tobytes())
    if kept.all() or not kept.any():
        assert plan is whole
        return
    assert plan.kept_rows.tolist() == kept.nonzero()[0].tolist()
    assert (plan.tokens, plan.path_tokens, plan.patches) == (
        kept.sum(),
        (kept.sum(),),
        4 * kept.sum(),
    )
    assert plan.grid_thw == whole.grid_thw


@given(st.binary(max_size=40))
def test_what_a_decoder_process_answers_gives_a_plan_within_the_grid(said: bytes) -> None:
    whole = ItemPlan((1, 6, 14), 84, 21, (21,))
    plan = whole.pruned(said)
    assert 0 < plan.tokens <= 21
    assert plan.patches == 4 * plan.tokens
    assert plan is whole or plan.kept_rows.max() < 21


def page() -> bytes:
    image = Image.new("RGB", (352, 224), "white")
    draw = ImageDraw.Draw(image)
    for line in range(40, 160, 30):
        draw.text((40, line), "The quick brown fox jumps over it.", "black")
    return encoded(image, "PNG")


WHITE = encoded(Image.new("RGB", (320, 192), "white"), "PNG")
PHOTO = jpeg(320, 192)


def media(data: bytes, *, prune: bool = True) -> Media:
    return replace(probe(data, "image", SPEC, LimitOptions()), prune=prune)


@pytest.fixture(params=[0, 1], ids=["threads", "process"])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    options = ActorOptions(
        model=MODEL,
        encoder=EncoderOptions(device="cpu", num_gpus=0),
        graphs=GraphOptions(token_budgets=(64, 256), max_frames_per_batch=0),
        cache=CacheOptions(max_bytes=10**7),
        preprocess=PreprocessOptions(processes=request.param),
    )
    spans = open_spans(options.tracing, "encoder")
    opened = open_pipeline(options, EncoderMetrics(), spans, "one")
    yield opened
    opened.close()


def encode(pipeline: Pipeline, *sent: Media) -> list[Embedding]:
    by_place: dict[int, Any] = asyncio.run(pipeline.encode(sent, "float32", 60))
    answers = [by_place[place] for place in range(len(sent))]
    assert [one for one in answers if not isinstance(one, Embedding)] == []
    return answers


def count(pipeline: Pipeline, name: str) -> float:
    return pipeline.series.registry.get_sample_value(f"encoder_{name}_total") or 0


def test_what_is_kept_is_encoded_and_named(pipeline: Pipeline) -> None:
    sent = [media(page()), media(WHITE), media(PHOTO), media(page(), prune=False)]
    text, white, photo, whole = encode(pipeline, *sent)
    plan = sent[0].plan
    assert [one.grid_thw for one in (text, whole)] == [plan.grid_thw] * 2
    assert whole.kept_rows == photo.kept_rows == ()
    assert 1 < text.shape[0] == len(text.kept_rows) < plan.tokens / 2
    assert (white.shape[0], white.kept_rows) == (1, (0,))
    assert {one.source for one in (text, white, photo)} == {"graph"}
    item = prepare(PATCHIFIER, sent[0])
    assert item.plan.kept_rows.tolist() == list(text.kept_rows)
    alone = pipeline.engine.submit(item).result().rows
    assert (tensor(text) - alone).abs().max() < 1e-4
    left = [one.shape[0] for one in (text, white, photo, whole)]
    dropped = sum(one.plan.tokens for one in sent) - sum(left)
    assert count(pipeline, "pruned_patches") == 4 * dropped
    assert count(pipeline, "patches") == 4 * (sum(left) + left[0])


def test_an_image_without_repeats_gives_the_same_bits(pipeline: Pipeline) -> None:
    (pruned,) = encode(pipeline, media(PHOTO))
    (whole,) = encode(pipeline, media(PHOTO, prune=False))
    assert (pruned.source, whole.source) == ("graph", "graph"), "they share no entry of the cache"
    assert tensor(pruned).equal(tensor(whole))
    assert (pruned.shape, pruned.kept_rows) == (whole.shape, ())


def test_pruned_and_whole_are_different_items(pipeline: Pipeline) -> None:
    first = encode(pipeline, media(page()))[0]
    again, whole = encode(pipeline, media(page()), media(page(), prune=False))
    assert (again.source, whole.source) == ("cache", "graph")
    assert again.kept_rows == first.kept_rows
    assert tensor(again).equal(tensor(first))
    assert media(page()).identity != media(page(), prune=False).identity
    writer = pipeline.writer
    assert writer.shared_key(media(page())) != writer.shared_key(media(page(), prune=False))


def test_its_rows_may_be_written_after_the_answer(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.pipeline.INLINE_BYTES", 0)

    async def run() -> None:
        answer = (await pipeline.encode([media(page())], "float32", 60, keep=True))[0]
        assert isinstance(answer, Embedding)
        name = answer.reference.partition(".")[2]
        unwritten = pipeline.references.get(name, 0)
        assert unwritten is not None
        assert isinstance(unwritten.shared_object, PendingWrite)
        kept = await pipeline.fetch(name)
        assert kept is not None
        assert answer.shape == kept.embedding.shape == tensor(kept.embedding).shape
        assert answer.kept_rows == kept.embedding.kept_rows
        assert answer.shape[0] == len(answer.kept_rows) < kept.media.plan.tokens

    asyncio.run(run())


PRUNED = {"qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm_ocr", "ernie4_5_vl_moe"}
PRUNED |= {"kimi_vl", "kimi_k25", "paddleocr_vl", "video_llama_3", "glm5_next", "minimax_m3"}


@pytest.mark.parametrize("preset", preset_names())
def test_other_families_refuse_at_start(preset: str) -> None:
    args = {"model": {"id": preset, "load_format": "dummy"}, "preprocess": {"prune": "exact"}}
    options = parse(args)
    spec = read(options.model)
    if spec.family in PRUNED:
        fit(options, spec)
        return
    with pytest.raises(ConfigError, match=f"the family {spec.family} does not have"):
        fit(options, spec)


def test_vllm_for_chats_is_refused() -> None:
    args: dict[str, Any] = {"model": {"id": "m"}, "preprocess": {"prune": "exact"}}
    parse(args | {"llm": {}})
    with pytest.raises(ConfigError, match=r"preprocess\.prune is exact, and llm\.engine vllm"):
        parse(args | {"llm": {"engine": "vllm"}})
