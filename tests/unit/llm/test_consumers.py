"""Embeddings for vLLM, by its own rules (tests/vllm_rules.py), and for SGLang."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from actors.kernels.gemm.fp8 import quantised
from actors.spec.video import retention_mask
from actors.types import ItemPlan
from encoder_service.client.items import Embedding
from encoder_service.engines import vllm
from encoder_service.engines.sglang import expanded, processor_output
from tests import vllm_rules
from tests.responses import octets

HIDDEN = 8


def embedding(
    grid: tuple[int, int, int] = (1, 4, 6), family: str = "qwen3_vl", seed: int = 0
) -> Embedding:
    """Random rows; of Qwen3-VL with two deepstack features."""
    deepstack = 2 if family == "qwen3_vl" else 0
    tokens = grid[0] * grid[1] * grid[2] // 4
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(tokens, HIDDEN * (1 + deepstack), generator=generator).to(torch.bfloat16)
    return Embedding(
        index=0,
        type="image",
        grid_thw=grid,
        tokens=tokens,
        dtype="bfloat16",
        shape=tuple(rows.shape),
        data=rows.view(torch.uint8).numpy().tobytes(),
        digest="ab",
        source="graph",
        deepstack=deepstack,
        model="m",
        weights="checkpoint",
        family=family,
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("grids", [[(1, 4, 6)], [(1, 4, 6)] * 2, [(1, 4, 6), (1, 2, 2)]])
def test_rows_with_a_grid_arrive_in_vllm(family: str, grids: list[tuple[int, int, int]]) -> None:
    given = [embedding(grid, family, seed) for seed, grid in enumerate(grids)]
    width = HIDDEN * (3 if family == "qwen3_vl" else 1)
    arrived = vllm_rules.embeddings([one.to_vllm() for one in given], width)
    for one, rows in zip(given, arrived, strict=True):
        assert rows.dtype is torch.bfloat16
        assert torch.equal(rows, one.torch())


def test_rows_in_float8_arrive_as_bfloat16() -> None:
    given = embedding()
    made = quantised(given.torch())
    small = replace(
        given, dtype="float8_e4m3", data=octets(made.values), scales=octets(made.scales)
    )
    (arrived,) = vllm_rules.embeddings([small.to_vllm()], HIDDEN * 3)
    rows = small.to_sglang()["precomputed_embeddings"]
    assert arrived.dtype is rows.dtype is torch.bfloat16
    assert torch.equal(arrived, made.float().bfloat16())
    assert torch.equal(rows, arrived)


@pytest.mark.parametrize("family", vllm.ROWS)
def test_plain_rows_arrive_in_vllm(family: str) -> None:
    one = embedding((1, 8, 8), family)
    (arrived,) = vllm_rules.embeddings([one.to_vllm()], HIDDEN)
    assert torch.equal(arrived, one.torch())


def test_videos_of_qwen3_vl_bring_their_times() -> None:
    video = replace(embedding((3, 4, 4)), type="video", timestamps=(0.25, 0.75, 1.25))
    part = video.to_vllm()
    assert torch.equal(vllm_rules.embeddings([part], 3 * HIDDEN)[0], video.torch())
    times = vllm_rules.decoded(part["video_embeds"]["timestamps"])
    assert times.tolist() == [0.25, 0.75, 1.25]
    with pytest.raises(ValueError, match="2 timestamps for 3 temporal groups"):
        replace(video, timestamps=(0.25, 0.75)).to_vllm()
    other = replace(video, family="qwen2_vl", deepstack=0, second_per_grid_ts=0.5)
    assert set(other.to_vllm()["video_embeds"]) == {"video_embeds", "video_grid_thw"}
    spaced = replace(other, family="qwen2_5_vl").to_vllm()
    assert torch.equal(vllm_rules.embeddings([spaced], 3 * HIDDEN)[0], video.torch())
    assert vllm_rules.decoded(spaced["video_embeds"]["second_per_grid_ts"]) == 0.5


def film(family: str, rate: float, change: float, seed: int) -> tuple[Embedding, Embedding]:
    """A video in which each place changes as much as it likes, whole and pruned by our encoder."""
    grid, hidden = (6, 8, 8), 64
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(6, 16, hidden, generator=generator)
    steps[1:] *= change * (0.2 + torch.rand(5, 16, 1, generator=generator))
    rows = steps.cumsum(0).view(-1, hidden).to(torch.bfloat16)
    plan = ItemPlan(grid, 384, 96, (96,), frames=6)
    mask = retention_mask(rows.float().numpy(), plan, rate)
    whole = replace(
        embedding(grid, family),
        type="video",
        shape=tuple(rows.shape),
        data=octets(rows),
        deepstack=0,
        timestamps=tuple(range(6)),
        second_per_grid_ts=1.0,
    )
    left = rows[torch.from_numpy(mask)]
    return whole, replace(
        whole,
        tokens=len(left),
        shape=tuple(left.shape),
        data=octets(left),
        kept_rows=tuple(mask.nonzero()[0].tolist()),
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("seed", range(4))
def test_vllm_drops_the_rows_that_were_dropped_before(family: str, rate: float, seed: int) -> None:
    whole, left = film(family, rate, 2.0, seed)
    assert len(left.kept_rows) == int(96 * (1 - rate))
    (arrived,) = vllm_rules.embeddings([left.to_vllm()], 64)
    kept = vllm_rules.pruned(arrived, left.grid_thw, rate)
    assert kept.tolist() == list(left.kept_rows)
    assert torch.equal(arrived[kept], left.torch())
    assert torch.equal(arrived[kept], whole.torch()[kept])


def test_what_vllm_would_drop_otherwise_is_refused() -> None:
    still = film("qwen3_vl", 0.5, 0.02, 0)[1]  # bfloat16 does not tell its rows apart
    with pytest.raises(ValueError, match="vLLM's --video-pruning-rate drops rows itself"):
        still.to_vllm()
    left = film("qwen3_vl", 0.5, 2.0, 0)[1]
    for wrong in (
        replace(left, family="qwen2_vl"),
        replace(left, reference="r1.abc", data=b""),
        replace(left, kept_rows=left.kept_rows[1:]),
    ):
        with pytest.raises(ValueError, match=r"evs_rate|kept_rows"):
            wrong.to_vllm()


def test_a_reference_travels_as_its_id_and_grid() -> None:
    kept = replace(embedding(), reference="r1.abc", data=b"")
    part = kept.to_vllm()
    assert part["uuid"] == "r1.abc"
    owned = replace(kept, reference="r1.abc.def")
    assert owned.to_vllm()["uuid"] == "r1.abc", "vLLM knows an image by it, and cannot release it"
    assert set(part["image_embeds"]) == {"image_grid_thw"}
    assert vllm_rules.decoded(part["image_embeds"]["image_grid_thw"]).tolist() == [1, 4, 6]
    with pytest.raises(ValueError, match="fetch the reference"):
        replace(kept, family="internvl").to_vllm()


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (embedding(family="llama4"), "no embeddings of images of the family 'llama4'"),
        (embedding(family="kimi_vl"), "send it the image itself"),
        (embedding(family="deepseek_ocr"), "no embeddings"),
        (embedding(family="glm4v"), "no embeddings"),
        (embedding(family=""), "no embeddings"),
        (replace(embedding(family="internvl"), type="video"), "no embeddings of videos"),
        (replace(embedding(family="llava_onevision"), type="video"), "no embeddings of videos"),
        (embedding(family="pixtral"), "no embeddings of images"),
        (replace(embedding(), grid_thw=(1, 4, 4)), "gives 4 rows, not 6"),
        (replace(embedding(), tokens=5), "is not 5 tokens"),
        (replace(embedding(), deepstack=6), "6 deepstack features"),
    ],
)
def test_what_vllm_does_not_take_is_refused_here(one: Embedding, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one.to_vllm()


def test_one_dict_for_all_images_of_a_request_to_sglang() -> None:
    given = [embedding((1, 4, 6)), embedding((1, 2, 2), seed=1)]
    output = processor_output(given)
    assert output["format"] == "processor_output"
    assert output["modality"] == "IMAGE"
    assert output["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 2]]
    # SGLang splits the rows by each item's grid, in order.
    parts = output["precomputed_embeddings"].split([6, 1])
    assert all(torch.equal(rows, one.torch()) for rows, one in zip(parts, given, strict=True))
    assert torch.equal(given[0].to_sglang()["precomputed_embeddings"], given[0].torch())


def test_a_prompt_for_sglang_has_a_placeholder_for_each_row() -> None:
    given = [embedding((1, 4, 6)), embedding((1, 2, 2), seed=1)]
    assert expanded([5, 9, 6, 9, 7], given, 9) == [5, *[9] * 6, 6, 9, 7]
    with pytest.raises(ValueError, match="1 placeholders in the prompt for 2 images"):
        expanded([5, 9], given, 9)


def test_sglang_gets_a_grid_where_positions_come_from_one() -> None:
    assert set(embedding(family="llama4").to_sglang()) == {
        "format", "modality", "precomputed_embeddings", "hash",
    }  # fmt: skip
    video = replace(embedding((3, 4, 4)), type="video").to_sglang()
    assert (video["modality"], video["video_grid_thw"].tolist()) == ("VIDEO", [[3, 4, 4]])
    assert "second_per_grid_ts" not in video


def test_sglang_gets_the_pace_of_videos_of_qwen2_5_vl() -> None:
    image = embedding((3, 4, 4), "qwen2_5_vl")
    video = replace(image, type="video", second_per_grid_ts=0.5)
    other = replace(video, second_per_grid_ts=0.25)
    found = processor_output([video, other])["second_per_grid_ts"]
    assert torch.equal(found, torch.tensor([0.5, 0.25]))
    assert "second_per_grid_ts" not in image.to_sglang()


def test_sglang_knows_rows_by_their_hash() -> None:
    one = embedding()
    name = one.to_sglang()["hash"]
    assert name == replace(one, index=3, source="cache").to_sglang()["hash"]
    assert 0 < name < 2**64, "SGLang writes it in 8 bytes"
    others = [
        replace(one, digest="cd"),
        replace(one, model="n"),
        replace(one, frame_tokens=(6,)),
        embedding((1, 6, 4)),
    ]
    names = {name, processor_output([one, one])["hash"]}
    assert len(names | {other.to_sglang()["hash"] for other in others}) == 6


def test_what_does_not_belong_together_is_not_joined_for_sglang() -> None:
    for other in (
        replace(embedding(), type="video"),
        replace(embedding(), dtype="float16"),
        embedding(family="qwen3_5"),
    ):
        with pytest.raises(ValueError, match="differ in"):
            processor_output([embedding(), other])
    with pytest.raises(ValueError, match="no embeddings"):
        processor_output([])
    with pytest.raises(ValueError, match="fetch"):
        replace(embedding(), reference="r1.abc").to_sglang()
    with pytest.raises(ValueError, match="Encode without evs_rate"):
        replace(embedding(), kept_rows=(0, 2)).to_sglang()


@pytest.mark.parametrize("family", vllm.GRIDS)
def test_no_engine_is_given_a_pruned_image(family: str) -> None:
    pruned = replace(embedding(family=family), kept_rows=(0, 1, 2, 3, 4, 5))
    with pytest.raises(ValueError, match=r"a pruned image: set preprocess\.prune"):
        pruned.to_vllm()
    with pytest.raises(ValueError, match=r"no pruned images: .*preprocess\.prune"):
        pruned.to_sglang()
