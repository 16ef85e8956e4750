"""Every reader against the metadata of published checkpoints: tests/data/published.

A fixture is accepted, or refused for the reason named here. Of an accepted one the tensors are
exactly those that the tower expects, and images and videos are divided by its published settings
as transformers divides them.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoImageProcessor
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
)

from actors.errors import CheckpointError
from actors.families.registry import processors, read, vision_defaults
from actors.models import load
from actors.models.load import family_of
from actors.models.tensors import INDEX, located
from actors.options import ModelOptions
from actors.spec.checkpoint import Folder, Preset
from actors.spec.model_spec import ModelSpec
from actors.spec.sampling import Evenly, Middles, Spread, Strided, Thinned, Thinning, Timed, UpToFps
from actors.spec.settings import PIL_RESAMPLING
from actors.types import Size
from encoder_service.config import LlmOptions
from encoder_service.llm import spec as llm_spec
from tests.parity.table import FAMILIES, rows

PUBLISHED = Path(__file__).parents[1] / "data" / "published"
FACTS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(PUBLISHED.glob("*.json"))
}
REFUSED = {
    "LiquidAI--LFM2-VL-450M": "of the architecture 'lfm2-vl', .* first release",
    "lmms-lab--LLaVA-OneVision-1.5-8B": "of the architecture .*LLaVAOneVision1_5_",
    "nvidia--LocateAnything-3B": "of the architecture 'locateanything'",
}
ACCEPTED = sorted(FACTS.keys() - REFUSED)

SMALL = (Size(336, 336), Size(97, 640))
LARGE = (Size(1920, 1080), Size(1654, 2339), Size(4031, 3023))

WITHOUT_PROCESSOR = {
    *("internvl_chat", "kimi_vl", "kimi_k25", "deepseek_ocr", "deepseek_ocr2", "llama4", "step3p7"),
    *("phi4mm", "molmo2", "lfm2_vl", "dinov3_vit"),
}
"""Families whose fixtures have none that transformers reads without other people's code, or without
torchvision."""

SAMPLINGS = {
    "Qwen3VL": Spread,
    "Qwen2VL": Strided,
    "Glm4v": Timed,
    "Glm46V": Thinning,
    "Glm5Next": Thinned,
    "InternVL": Middles,
    "LlavaOnevision": Evenly,
    "Molmo2": UpToFps,
}
"""Our rule for each of transformers' video processors, which need torchvision."""


def write(folder: Path, facts: dict[str, Any], **changes: Any) -> ModelOptions:
    """The JSON files of a fixture, and an index of its tensors. `changes`: of config.json."""
    files = Preset(facts["config_from_preset"]).files if "config_from_preset" in facts else {}
    files |= facts["files"]
    files["config.json"] = files["config.json"] | changes
    if "tensors" in facts:
        files[INDEX] = {"weight_map": dict.fromkeys(tensors(facts), "1.safetensors")}
        (folder / "1.safetensors").touch()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return ModelOptions(id=str(folder))


def tensors(facts: dict[str, Any]) -> dict[str, list[int] | None]:
    """Names and shapes; `blocks.0-2.norm` of a fixture stands for three tensors."""
    found: dict[str, list[int] | None] = {}
    for name, shape in facts["tensors"].items():
        span = re.search(r"\.(\d+)-(\d+)\.", name)
        if span is None:
            found[name] = shape
            continue
        before, after = name[: span.start()], name[span.end() :]
        for layer in range(int(span[1]), int(span[2]) + 1):
            found[f"{before}.{layer}.{after}"] = shape
    return found


@pytest.mark.parametrize("name", REFUSED)
def test_another_model_is_refused_by_its_reason(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        read(write(tmp_path, FACTS[name]))


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_tensors_are_those_that_the_tower_expects(name: str, tmp_path: Path) -> None:
    facts = FACTS[name]
    family = family_of(read(write(tmp_path, facts)))
    if "tensors" not in facts:
        return
    unused = family.unused - family.expected.keys()
    (stored,) = located(Folder(tmp_path), family.prefixes, family.expected, unused).values()
    assert stored.keys() == family.expected.keys()
    shapes = tensors(facts)
    for ours, theirs in stored.items():
        assert tuple(shapes[theirs] or family.expected[ours]) == family.expected[ours], theirs


@pytest.mark.parametrize("name", [name for name in ACCEPTED if "tensors" in FACTS[name]])
def test_a_layer_too_many_is_told_with_its_key(name: str, tmp_path: Path) -> None:
    facts = FACTS[name]
    prefixes = family_of(read(write(tmp_path, facts))).prefixes
    span = re.compile(r"\.(0)-(\d\d)\.")
    longer = {
        span.sub(lambda layers: f".{layers[1]}-{int(layers[2]) + 1}.", tensor): shape
        for tensor, shape in facts["tensors"].items()
        if tensor.removeprefix("model.").startswith(prefixes)
    }
    options = write(tmp_path, facts | {"tensors": longer})
    key = r"vision_config\.\S*(layers|depth|deepstack_visual_indexes)"
    told = rf"are left over \(.*\. Whether \S+ exists depends on {key}, which is "
    with pytest.raises(CheckpointError, match=told):
        load.tensors(options, read(options), torch.device("cpu"))


@pytest.mark.parametrize("name", ACCEPTED)
def test_images_are_divided_as_transformers_does(name: str, tmp_path: Path) -> None:
    model = read(write(tmp_path, FACTS[name]))
    if model.family in WITHOUT_PROCESSOR:
        return
    if not {"preprocessor_config.json", "processor_config.json"} & FACTS[name]["files"].keys():
        return
    kind = PaddleOCRVLImageProcessorPil if model.family == "paddleocr_vl" else AutoImageProcessor
    processor = kind.from_pretrained(tmp_path)
    assert (tuple(processor.image_mean), tuple(processor.image_std)) == (model.mean, model.std)
    if model.family != "hunyuan_vl":  # which ignores it
        assert processor.resample == PIL_RESAMPLING[model.resample]
    counts: Any = getattr(processor, "get_number_of_image_patches", None)
    for size in SMALL if counts else (*SMALL, LARGE[0]):
        assert processed(processor, model, size) == planned(model, size)
    for size in LARGE if counts else ():
        counted = counts(size.height, size.width, {})  # of Hunyuan-VL rows and columns
        assert np.prod(counted) == model.sizing.plan(size).patches


def processed(processor: Any, model: ModelSpec, size: Size) -> tuple[int, ...]:
    """The grid, or the pixels, of an image as transformers' processor divides it."""
    image, options = Image.new("RGB", (size.width, size.height)), {}
    if model.family == "mistral3":  # its processor hands the image processor whole blocks
        block = model.sizing.patch_size * model.sizing.merge_size
        options = {"patch_size": {"height": block, "width": block}}
    out = processor(images=image, return_tensors="np", **options)
    if "image_grid_thw" in out:
        return tuple(int(count) for count in np.asarray(out["image_grid_thw"])[0])
    if "spatial_shapes" in out:
        return 1, *(int(count) for count in np.asarray(out["spatial_shapes"])[0])
    if model.family in ("pixtral", "mistral3"):
        return tuple(int(pixels) for pixels in np.asarray(out["image_sizes"])[0])
    shape = np.asarray(out["pixel_values"]).shape
    return math.prod(shape[:-3]), *shape[-3:]


def planned(model: ModelSpec, size: Size) -> tuple[int, ...]:
    sizing: Any = model.sizing
    grid: tuple[int, ...] = sizing.plan(size).grid_thw
    if model.family in ("pixtral", "mistral3"):
        return grid[1] * sizing.patch_size, grid[2] * sizing.patch_size
    if hasattr(sizing, "tile_pixels"):
        pixels = getattr(sizing, "picture_pixels", sizing.tile_pixels)
        tiles = sizing.plan(size).patches // (pixels // sizing.patch_size) ** 2
        return tiles, 3, pixels, pixels
    return grid


@pytest.mark.parametrize("name", ACCEPTED)
def test_videos_are_sampled_by_the_published_processors_rule(name: str, tmp_path: Path) -> None:
    files = FACTS[name]["files"]
    video: Any = read(write(tmp_path, FACTS[name])).video
    settings = files.get("processor_config.json", {}).get("video_processor")
    settings = settings or files.get("video_preprocessor_config.json") or {}
    older = files.get("preprocessor_config.json", {})
    kind = settings.get("video_processor_type") or older.get("image_processor_type")
    if video is None or kind is None:
        return
    rule = SAMPLINGS[re.split("(Video|Image)Processor", kind)[0]]
    assert type(video.sampling) is rule
    if settings.get("size"):
        limits = {"shortest_edge": video.min_pixels, "longest_edge": video.max_pixels}
        assert limits.items() <= settings["size"].items()


VIDEO = {"video_processor_type": "Glm46VVideoProcessor"}
IMAGE = {"image_processor_type": "Glm46VImageProcessor"}
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("video_preprocessor_config.json", VIDEO),
    ("processor_config.json", {"video_processor": VIDEO, "processor_class": "Glm4vProcessor"}),
    ("processor_config.json", {"image_processor": IMAGE}),
    ("preprocessor_config.json", {"image_processor_type": "Glm46VImageProcessorFast"}),
    ("processor_config.json", {"processor_class": "Glm46VProcessor"}),
]
TEXTS = {"text_config": {"hidden_size": 4096}, "image_token_id": 5, "video_token_id": 6}


@pytest.mark.parametrize(("file", "settings"), PLACES)
@pytest.mark.parametrize("model_type", ["glm4v", "glm4v_moe"])
def test_glm_46v_is_known_by_its_processor(
    model_type: str, file: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    facts = FACTS["zai-org--GLM-4.6V-Flash"] | {"files": {"config.json": {}, file: settings}}
    config = FACTS["zai-org--GLM-4.6V-Flash"]["files"]["config.json"]
    options = write(tmp_path, facts, **(config | TEXTS | {"model_type": model_type}))
    model = read(options)
    assert model.video is not None
    assert len(model.video.sampling.indices(900, 30.0)) == 180
    style = llm_spec.read(LlmOptions(num_gpus=0, device="cpu"), options, model).video_style
    assert style.after.format(seconds=1.5, whole=1) == "<|end_of_image|>1.5 seconds"


def test_glm_41v_keeps_its_own_rule_and_texts(tmp_path: Path) -> None:
    options = write(tmp_path, FACTS["zai-org--GLM-4.1V-9B-Thinking"], **TEXTS)
    model = read(options)
    assert model.video is not None
    assert len(model.video.sampling.indices(900, 30.0)) == 60
    style = llm_spec.read(LlmOptions(num_gpus=0, device="cpu"), options, model).video_style
    assert style.after.format(seconds=1.5, whole=1) == "<|end_of_image|>1"


def test_a_processor_decides_only_within_its_family() -> None:
    chosen = {kind for kind, names in processors().items() if names}
    assert chosen == {"glm4v", "glm4v_moe", "glm46v"}


SIGLIP = "siglip_vision_model"
TOWERS = dict.fromkeys(("gemma3", "llava_onevision", "aya_vision", "cohere2_vision"), SIGLIP) | {
    "mistral3": "pixtral"
}


@pytest.mark.parametrize("kind", sorted(vision_defaults().keys() & CONFIG_MAPPING.keys()))
def test_what_vision_config_lacks_is_as_transformers_fills_it(kind: str) -> None:
    given: dict[str, Any] = {"model_type": TOWERS[kind]} if kind in TOWERS else {}
    if kind == "nemotron_h_omni":  # the default of its parent
        given = {"video_temporal_patch_size": 2}
    alone = kind.startswith(("aimv2", "dino", "mlcd"))  # its config.json is that of its tower
    whole = CONFIG_MAPPING[kind](**({} if alone else {"vision_config": given}))
    theirs = whole if alone else getattr(whole, "thinker_config", whole).vision_config
    for key, value in vision_defaults()[kind].items():
        if key == "deepstack_visual_indexes" and kind.startswith("qwen3_5"):
            continue  # Qwen3.5 has none
        filled = getattr(theirs, key)
        alike = ([value] * 2, value) if isinstance(value, int) else (value,)
        assert (list(filled) if isinstance(filled, tuple) else filled) in alike, key


def test_the_readme_says_what_each_family_was_held_against(tmp_path: Path) -> None:
    held: dict[str, list[str]] = {row: [] for row in rows()}
    for name in ACCEPTED:
        (folder := tmp_path / name).mkdir()
        options = write(folder, FACTS[name])
        kind = json.loads((folder / "config.json").read_text())["model_type"]
        family = read(options).family
        held[FAMILIES.get(family) or FAMILIES[kind]].append(label(name))
    assert {row: told.published for row, told in rows().items()} == held


def label(name: str) -> str:
    """As the README marks what is known of a checkpoint."""
    facts, short = FACTS[name], name.partition("--")[2]
    mark = "" if facts["evidence"].startswith("files of the model folder") else "†"
    if "tensors" not in facts:
        return f"*{short}*{mark}"
    return (f"**{short}**" if all(facts["tensors"].values()) else short) + mark
