"""The language model on our towers' rows against the whole model of transformers on the pixels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.video_utils import VideoMetadata

from actors.engine.budgets import Segments
from actors.engine.device import Device
from actors.engine.graphs import GraphSet
from actors.errors import CheckpointError
from actors.families.registry import video_styles
from actors.options import ModelOptions
from actors.types import Clip, ItemPlan, Media, Size
from encoder_service.config import LlmOptions
from encoder_service.llm import model as language_model
from encoder_service.llm.calls import Finish, SamplingParams
from encoder_service.llm.model import Generator
from encoder_service.llm.prompt import (
    Placed,
    Prompt,
    byte_tokenizer,
    expand,
    place,
)
from encoder_service.llm.spec import LlmSpec, read
from tests.checkpoints import write
from tests.parity.conftest import Pair, made
from tests.parity.test_tower import encode, pixel_values, random_packed
from tests.parity.test_video import cut

pytestmark = pytest.mark.extended

TOLERANCE = 1e-4
"""float32; logits are about 1."""
TOKENIZER = byte_tokenizer()
SEEN: dict[str, list[Size | Clip]] = {
    "text only": [],
    "one image": [Size(224, 160)],
    "a video": [Clip(Size(130, 200), frames=5, fps=1, chosen=True)],
    "images and videos": [
        Clip(Size(84, 56), frames=4, fps=3),
        Size(96, 64),
        Clip(Size(300, 120), frames=40, fps=25),
        Size(64, 64),
    ],
    "many": [Size(96, 64), Size(320, 64), Size(64, 64), Size(200, 300)],
}


@dataclass(frozen=True)
class Chat:
    """The same weights twice: whole in transformers, and without a tower."""

    pair: Pair
    spec: LlmSpec
    model: Any


@pytest.fixture(scope="module", params=sorted(video_styles()))
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    pair = made(request.param, tmp_path_factory)
    options = ModelOptions(id=str(pair.folder), dtype="float32")
    spec = read(LlmOptions(num_gpus=0, device="cpu"), options, pair.tower.spec)
    return Chat(pair, spec, language_model.load(options, "cpu"))


@pytest.mark.parametrize("seen", sorted(SEEN))
def test_logits_equal_those_of_the_whole_model(chat: Chat, seen: str) -> None:
    ours, theirs = both(chat, SEEN[seen])
    with torch.inference_mode():
        expected = chat.pair.reference(**theirs).logits
        found = chat.model(**ours).logits
    assert found.shape == expected.shape
    assert expected.std() > 0.05
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("seen", sorted(SEEN))
def test_greedy_tokens_equal_those_of_the_whole_model(chat: Chat, seen: str) -> None:
    ours, theirs = both(chat, SEEN[seen])
    expected = chat.pair.reference.generate(**theirs, max_new_tokens=12, do_sample=False)
    length = ours["input_ids"].shape[1]
    tokenizer = byte_tokenizer()
    text: list[str] = []
    finish = Generator(chat.model, tokenizer).generate(
        ours, SamplingParams(temperature=0), 12, text.append, Event()
    )
    tokens = expected[0, length:].tolist()
    assert finish == Finish(("stop" if tokens[-1] == 2 else "length",), length, len(tokens))
    assert "".join(text) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_no_tower_is_loaded(chat: Chat) -> None:
    names = [name for name, _ in chat.model.named_parameters()]
    assert names
    assert not [name for name in names if "visual" in name]
    whole = sum(value.numel() for value in chat.pair.reference.parameters())
    tower = sum(value.numel() for value in chat.pair.reference.model.visual.parameters())
    assert sum(value.numel() for value in chat.model.parameters()) == whole - tower
    assert {value.device.type for value in chat.model.parameters()} == {"cpu"}


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_vl", max_shard_size="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.language_model.layers.1.mlp.gate_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="gate_proj"):
        language_model.load(ModelOptions(id=str(tmp_path), dtype="float32"), "cpu")


def test_dummy_weights_are_the_same_in_every_process() -> None:
    options = ModelOptions(id="qwen3vl-tiny", load_format="dummy", dtype="float32")
    one, other = (language_model.load(options, "cpu") for _ in range(2))
    ids = torch.tensor([[1, 2, 3]])
    assert one.model.visual is None
    assert torch.equal(one(ids).logits, other(ids).logits)
    assert one(ids).logits.isfinite().all()


@pytest.mark.parametrize("what", ["video", "image"])
def test_what_is_pruned_is_read_as_if_the_rest_were_masked(chat: Chat, what: str) -> None:
    """A video, or the image after it."""
    if chat.pair.model_type.startswith("qwen3_5"):
        pytest.skip("masked tokens still move its linear attention along")
    ours, _ = both(chat, [Size(64, 64), Clip(Size(84, 56), frames=8, fps=3), Size(96, 64)])
    spec = chat.spec
    outputs = ours["mm_encoder_outputs"]
    as_images, video = spec.video_style.as_images, what == "video"
    kind = "video" if video and not as_images else "image"
    place = as_images if video else 1 + as_images
    count = len(outputs[kind].pooler_output[place])
    kept = [row for row in range(count) if row % 3 != 2]
    asked = {name: one for name, one in ours.items() if name != "mm_encoder_outputs"}
    positions, _ = chat.model.model.get_rope_index(**asked)
    kinds = ours["mm_token_type_ids"][0]
    runs = (kinds == (2 if video else 1)).nonzero()[-count:, 0]
    hidden = runs[[row for row in range(count) if row % 3 == 2]]
    mask = ours["attention_mask"].clone()
    mask[0, hidden] = 0
    order = torch.arange(len(kinds)).view(1, 1, -1)
    whole = ours | {"attention_mask": mask, "position_ids": torch.cat([order, positions])}
    placed = [Placed("image", (1, 1, 1), 0)] * 3
    placed = [replace(one, tokens=n) for one, n in zip(placed, tokens_of(ours), strict=True)]
    every = [(), kept, ()] if video else [(), (), kept]
    pruned = language_model.pruned(chat.model, ours, placed, every)
    left = copy.deepcopy(outputs)
    for level in (left[kind].pooler_output, *(left[kind].get("deepstack_features") or ())):
        level[place] = level[place][kept]
    with torch.inference_mode():
        expected = chat.model(**whole).logits[:, mask[0].bool()]
        found = chat.model(**pruned | {"mm_encoder_outputs": left}).logits
    assert (found - expected).abs().max() < TOLERANCE


def tokens_of(made: dict[str, Any]) -> list[int]:
    """Placeholders of an image, a video and an image."""
    kinds = made["mm_token_type_ids"][0].tolist()
    first = kinds.index(2)
    images = [kinds[:first].count(1), kinds[first:].count(1)]
    return [images[0], kinds.count(2), images[1]]


def both(chat: Chat, seen: Sequence[Size | Clip]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ours from the tower's rows, theirs from the same pixels."""
    pair, spec = chat.pair, chat.spec
    made = [video(pair, one) if isinstance(one, Clip) else image(pair, one) for one in seen]
    ids = list(range(10, 20))
    for number, one in enumerate(made):
        token = spec.video_token_id if one.placed.kind == "video" else spec.image_token_id
        ids += [2002, token, 2003, 30 + number]
    placed = tuple(one.placed for one in made)
    prompt = Prompt(*expand([*ids, 5, 6, 7], placed, spec, TOKENIZER), placed, 12)
    ours = language_model.inputs(prompt, [one.rows for one in made], spec)
    theirs = {name: ours[name] for name in ("input_ids", "attention_mask", "mm_token_type_ids")}
    if spec.video_style.as_images and {one.placed.kind for one in made} == {"image", "video"}:
        return ours, theirs | from_features(chat, made)
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        ones = [one for one in made if one.placed.kind == kind]
        if ones:
            theirs[pixels] = torch.cat([one.pixels for one in ones])
            theirs[f"{kind}_grid_thw"] = torch.tensor([one.placed.grid_thw for one in ones])
    if pair.model_type == "qwen2_5_vl" and "video_grid_thw" in theirs:
        theirs["second_per_grid_ts"] = [
            2 / metadata(pair, one).sampled_fps for one in seen if isinstance(one, Clip)
        ]
    return ours, theirs


def from_features(chat: Chat, made: Sequence[Seen]) -> dict[str, Any]:
    """GLM-V of transformers takes no pixels of images and videos at once: its own rows of each."""
    model, rows = chat.pair.reference.model, []
    grids: dict[str, list[Any]] = {"image_grid_thw": [], "video_grid_thw": []}
    for one in made:
        grid = torch.tensor([one.placed.grid_thw])
        grids[f"{one.placed.kind}_grid_thw"].append(grid)
        features = getattr(model, f"get_{one.placed.kind}_features")
        with torch.inference_mode():
            rows += features(one.pixels, grid, return_dict=True).pooler_output
    outputs = {"image": BaseModelOutputWithPooling(pooler_output=rows)}
    return {name: torch.cat(each) for name, each in grids.items()} | {"mm_encoder_outputs": outputs}


@dataclass(frozen=True)
class Seen:
    """An image or a video: for our language model, and for the whole one."""

    placed: Placed
    rows: Tensor
    pixels: Tensor


def image(pair: Pair, size: Size) -> Seen:
    plan = pair.tower.spec.sizing.plan(size)
    patches = random_packed(pair.tower, [plan])
    rows = encode(pair.tower, [plan], patches, plan.tokens + 3, segments=8)
    return Seen(place(media(plan), None), rows, pixel_values(pair, [plan], patches))


def video(pair: Pair, clip: Clip) -> Seen:
    item, pixels = cut(pair, clip)
    graphs = GraphSet(pair.tower, "default", (256,), Segments(4, 64, 4), Device())
    rows = graphs.run(None, [item])
    return Seen(place(media(item.plan, clip), pair.tower.spec.video), rows, pixels)


def media(plan: ItemPlan, clip: Clip | None = None) -> Media:
    return Media("video" if clip else "image", b"", plan, "", clip=clip)


def metadata(pair: Pair, clip: Clip) -> VideoMetadata:
    """What the family's own processor knows of the video."""
    sizing = pair.tower.spec.video
    assert sizing
    indices = sizing.indices(clip)
    return VideoMetadata(total_num_frames=clip.frames, fps=clip.fps, frames_indices=indices)
