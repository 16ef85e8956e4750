"""The towers of the tile families against transformers' modules, through graphs and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from actors.engine.budgets import Capacity, Segments, capacity
from actors.engine.device import Device
from actors.engine.engine import Engine
from actors.engine.graphs import capture
from actors.engine.video_chunks import rows_of
from actors.errors import ConfigError
from actors.media.image import decode
from actors.media.patchify import patchifier_of
from actors.models.load import load
from actors.models.tiled import TileTower
from actors.options import GraphOptions, ModelOptions
from actors.spec.model_spec import ModelSpec
from actors.spec.tiles import TileSizing
from actors.telemetry.metrics import EncoderMetrics
from actors.types import Clip, ItemPlan, Size
from tests.checkpoints_clip import (
    write_aimv2,
    write_aya,
    write_clip,
    write_idefics3,
    write_janus,
    write_llava,
    write_mlcd,
    write_ovis2,
    write_paligemma,
    write_siglip,
)
from tests.checkpoints_dino import write_dinov2, write_dinov3
from tests.checkpoints_tiles import write_gemma3, write_internvl, write_internvl_chat, write_llama4
from tests.images import PHOTOGRAPHS, item_of, photograph
from tests.parity.graphs import captured, random_patches
from tests.parity.table import check
from tests.videos import patchify_video

PACKS = [
    [Size(84, 84)],
    [Size(300, 300), Size(80, 50), Size(640, 480)],
    [Size(40 + 50 * i, 400 - 40 * i) for i in range(9)],
]


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers' model and in our tower."""

    model: Any
    features: Callable[[Any, Tensor], Tensor]
    """transformers' model and normalised tiles [tiles, 3, side, side] to [tokens, width]."""
    tower: TileTower
    folder: Path


def internvl(model: Any, pixels: Tensor) -> Tensor:
    rows: Tensor = model.model.get_image_features(pixels, return_dict=True).pooler_output
    return rows.flatten(0, 1)


def llama4(model: Any, pixels: Tensor) -> Tensor:
    hidden: Tensor = model.vision_model(pixels, return_dict=True).last_hidden_state
    rows: Tensor = model.multi_modal_projector(hidden.flatten(0, 1))
    return rows


def hidden(model: Any, pixels: Tensor) -> Tensor:
    rows: Tensor = model.vision_model(pixels, return_dict=True).last_hidden_state
    return rows.flatten(0, 1)


def alone(model: Any, pixels: Tensor) -> Tensor:
    """A model that is a tower, with or without a classifier."""
    tower = getattr(model, "dinov2", getattr(model, "dinov2_with_registers", model))
    rows: Tensor = tower(pixels, return_dict=True).last_hidden_state
    return rows.flatten(0, 1)


def llava(model: Any, pixels: Tensor) -> Tensor:
    features = model.model.get_image_features(pixels, return_dict=True)
    return torch.cat(list(features.pooler_output))


def idefics3(model: Any, pixels: Tensor) -> Tensor:
    """A tile that is black after normalisation would count as padding: there is none."""
    side = model.config.vision_config.image_size - pixels.shape[-1]
    padded = F.pad(pixels, (0, side, 0, side), value=1.0)  # pixels that fill no whole patch
    features = model.model.get_image_features(padded[None], return_dict=True)
    return torch.cat(list(features.pooler_output))


CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], Callable[[Any, Tensor], Tensor]]] = {
    "internvl-300M": (lambda folder: write_internvl(folder, "300M"), internvl),
    "internvl-6B": (lambda folder: write_internvl(folder, "6B"), internvl),
    "internvl_chat-300M": (lambda folder: write_internvl_chat(folder, "300M"), internvl),
    "internvl_chat-6B": (lambda folder: write_internvl_chat(folder, "6B"), internvl),
    "qianfan": (lambda folder: write_internvl(folder, "300M", "QianfanOCR"), internvl),
    "llama4": (write_llama4, llama4),
    "gemma3": (write_gemma3, internvl),
    "siglip": (write_siglip, hidden),
    "clip": (write_clip, hidden),
    "dinov2": (write_dinov2, alone),
    "dinov2-whole-table": (lambda folder: write_dinov2(folder, image_size=84), alone),
    "dinov2-gated": (lambda folder: write_dinov2(folder, gated=True), alone),
    "dinov2-registers": (lambda folder: write_dinov2(folder, registers=3), alone),
    "dinov2-classifier": (
        lambda folder: write_dinov2(folder, kind="ForImageClassification"),
        alone,
    ),
    "dinov3": (write_dinov3, alone),
    "aimv2": (write_aimv2, alone),
    "aimv2-biased": (lambda folder: write_aimv2(folder, plain=False), alone),
    "mlcd": (write_mlcd, alone),
    "dinov3-gated": (lambda folder: write_dinov3(folder, gated=True), alone),
    "llava-clip": (lambda folder: write_llava(folder, "clip"), llava),
    "llava-class": (
        lambda folder: write_llava(
            folder, "clip", vision_feature_select_strategy="full", multimodal_projector_bias=False
        ),
        llava,
    ),
    "llava-siglip": (
        lambda folder: write_llava(folder, "siglip", vision_feature_select_strategy="full"),
        llava,
    ),
    "llava-layers": (
        lambda folder: write_llava(
            folder,
            "siglip",
            vision_feature_select_strategy="full",
            vision_feature_layer=[-3, -1],
        ),
        llava,
    ),
    "paligemma": (lambda folder: write_paligemma(folder, "gemma"), internvl),
    "paligemma2": (lambda folder: write_paligemma(folder, "gemma2"), internvl),
    "janus": (write_janus, internvl),
    "aya": (lambda folder: write_aya(folder, "AyaVision"), internvl),
    "cohere2": (lambda folder: write_aya(folder, "Cohere2Vision"), internvl),
    "ovis2": (write_ovis2, internvl),
    "ovis2-biased": (lambda folder: write_ovis2(folder, biased=True), internvl),
    "idefics3": (lambda folder: write_idefics3(folder, "Idefics3"), idefics3),
    "smolvlm": (lambda folder: write_idefics3(folder, "SmolVLM"), idefics3),
}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """float32 on the CPU."""
    folder = tmp_path_factory.mktemp("tiles")
    write, features = CHECKPOINTS[request.param]
    model = write(folder)
    return Pair(model, features, loaded(folder, "float32"), folder)


def loaded(folder: Path, dtype: str) -> TileTower:
    options = ModelOptions.model_validate({"id": str(folder), "dtype": dtype})
    tower = load(options, torch.device("cpu"))
    assert isinstance(tower, TileTower)
    return tower


@pytest.mark.parametrize("spare", [None, 0, 1, 8], ids=["eager", "exact", "spare-1", "spare-8"])
@pytest.mark.parametrize("sizes", PACKS, ids=["one", "three", "nine"])
def test_equals_transformers(pair: Pair, sizes: Sequence[Size], spare: int | None) -> None:
    tower = pair.tower
    plans, patches, expected = known(pair, tuple(sizes))
    tokens = sum(plan.tokens for plan in plans)
    budget = None if spare is None else tokens + spare * tower.sizing.tile_tokens
    ours = encode(tower, plans, patches, budget)
    assert ours.shape == (tokens, tower.spec.width)
    check(pair.tower.spec.family, ours, expected)


@cache
def known(pair: Pair, sizes: tuple[Size, ...]) -> tuple[list[ItemPlan], list[Tensor], Tensor]:
    """Plans, random patches and transformers' rows: the same for every budget."""
    plans = [pair.tower.sizing.plan(size) for size in sizes]
    patches = random_patches(plans, 3 * pair.tower.sizing.patch_size**2)
    return plans, patches, theirs(pair, torch.cat(patches))


def test_the_tokens_of_a_plan_are_those_of_its_tiles(pair: Pair) -> None:
    image = torch.zeros(3, 200, 300, dtype=torch.uint8)
    plan, patches = patchifier_of(pair.tower.spec).patchify(image)
    assert len(patches) == plan.patches
    assert len(theirs(pair, patches)) == plan.tokens


def test_bfloat16_is_as_near_to_float32_as_transformers_is(pair: Pair) -> None:
    """Several images, because rounding errors of the few rows of one differ by chance."""
    plans = [pair.tower.sizing.plan(Size(300, 300))] * 8
    patches = random_patches(plans, 3 * pair.tower.sizing.patch_size**2)
    exact = torch.cat([theirs(pair, each) for each in patches])
    ours = encode(loaded(pair.folder, "bfloat16"), plans, patches, None)
    model = deepcopy(pair.model).bfloat16()
    images = [pixels(pair.tower.spec, each).bfloat16() for each in patches]
    rounded = torch.cat([pair.features(model, each).detach() for each in images])
    assert (ours.float() - exact).norm() <= 1.1 * (rounded.float() - exact).norm()


@pytest.mark.parametrize(
    ("kind", "published"),
    [
        ("internvl-300M", "model.vision_tower."),
        ("gemma3", "vision_tower.vision_model."),
        ("llava-siglip", "vision_tower.vision_model."),
        ("paligemma", "vision_tower.vision_model."),
    ],
)
def test_names_that_transformers_does_not_write(kind: str, published: str, tmp_path: Path) -> None:
    """It reads them: `vision_model.` is in published checkpoints older than version 5."""
    write, features = CHECKPOINTS[kind]
    model = write(tmp_path)
    weights = {
        name.replace("model.vision_tower.", published): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    assert any(name.startswith(published) for name in weights)
    for shard in tmp_path.glob("*.safetensors*"):
        shard.unlink()
    save_file(weights, tmp_path / "model.safetensors")
    pair = Pair(model, features, loaded(tmp_path, "float32"), tmp_path)
    plan = pair.tower.sizing.plan(Size(84, 84))
    (patches,) = random_patches([plan], 3 * pair.tower.sizing.patch_size**2)
    ours = encode(pair.tower, [plan], [patches], None)
    check(pair.tower.spec.family, ours, theirs(pair, patches))


def test_photographs_through_the_engine(pair: Pair) -> None:
    tower = pair.tower
    engine, _ = running(tower, capacity(GraphOptions(), tower.spec.sizing.token_range(), 0))
    items = [item_of(patchifier_of(tower.spec), decode(photograph(name))) for name in PHOTOGRAPHS]
    answers = [engine.submit(item) for item in items]
    for item, answer in zip(items, answers, strict=True):
        encoded = answer.result(60)
        assert encoded.source == "graph"
        exact = theirs(pair, torch.as_tensor(item.patches))
        check(tower.spec.family, rows_of(encoded), exact)
    engine.close()


def test_a_frame_of_a_video_is_a_tile(pair: Pair) -> None:
    tower, clip = pair.tower, Clip(Size(120, 90), frames=12, fps=3)
    if not tower.spec.video:
        pytest.skip("this family takes no videos")
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (8, 3, 90, 120), dtype=torch.uint8, generator=generator)
    item = patchify_video(tower.spec, clip, frames)
    assert item.plan.grid_thw == (8, 6, 6)
    assert item.plan.tokens == 8 * tower.sizing.tile_tokens
    side = (tower.sizing.tile_pixels,) * 2
    tiles = F.interpolate(frames, side, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(each)[:, None, None] for each in (tower.spec.mean, tower.spec.std))
    with torch.no_grad():
        exact = pair.features(pair.model, (tiles / 255 - mean) / std)
    image = item_of(patchifier_of(tower.spec), torch.zeros(3, 90, 120, dtype=torch.uint8))
    for budget in (None, item.plan.tokens + image.plan.tokens):
        plans, patches = [item.plan, image.plan], [item.patches, image.patches]
        rows = encode(tower, plans, [torch.as_tensor(each) for each in patches], budget)
        check(tower.spec.family, rows[: item.plan.tokens], exact)
    most = 3 * tower.sizing.tile_tokens
    room = Capacity(((most,),), (most,), items=3, frames=3, frame_tokens=1)
    engine, metrics = running(tower, room)
    encoded = engine.submit(item).result(60)
    engine.close()
    assert (len(encoded.rows), encoded.source) == (3, "graph")
    assert metrics.registry.get_sample_value("encoder_video_runs_total") == 3
    check(tower.spec.family, rows_of(encoded), exact)


def running(tower: TileTower, room: Capacity) -> tuple[Engine, EncoderMetrics]:
    device, metrics = Device(), EncoderMetrics()
    return Engine(tower, capture(tower, room, device, metrics), room, device, metrics), metrics


def test_a_budget_that_is_not_whole_tiles(pair: Pair) -> None:
    tile = pair.tower.sizing.tile_tokens
    with pytest.raises(ConfigError, match=f"token_budgets: {tile + 1} is not a multiple of {tile}"):
        pair.tower.inputs("default", tile + 1, 1)


def encode(
    tower: TileTower, plans: Sequence[ItemPlan], patches: Sequence[Tensor], budget: int | None
) -> Tensor:
    """Through the graph of a budget, whose patches hold random bytes at first; None: eagerly."""
    budgets = () if budget is None else sorted({tower.sizing.tile_tokens, budget})
    graphs = captured(tower, "default", budgets, Segments(4))
    return graphs.encode(budget, plans, patches)


def pixels(spec: ModelSpec, patches: Tensor) -> Tensor:
    """Patches of whole tiles as normalised pixels: float32 [tiles, 3, side, side]."""
    sizing = spec.sizing
    assert isinstance(sizing, TileSizing)
    merge, patch = sizing.merge_size, sizing.patch_size
    blocks = sizing.side_patches // merge
    parts = patches.view(-1, blocks, blocks, merge, merge, 3, patch, patch)
    side = sizing.tile_pixels
    tiles = parts.permute(0, 5, 1, 3, 6, 2, 4, 7).reshape(-1, 3, side, side)
    mean, std = (torch.tensor(v)[:, None, None] for v in (spec.mean, spec.std))
    return (tiles / 255 - mean) / std


@torch.no_grad()
def theirs(pair: Pair, patches: Tensor) -> Tensor:
    """Rows of all tiles."""
    return pair.features(pair.model, pixels(pair.tower.spec, patches))
