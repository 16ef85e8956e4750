"""What a model is, from its JSON files alone."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import CheckpointError, ServiceError
from actors.families import registry
from actors.models.load import family_of
from actors.options import ModelOptions
from actors.spec.checkpoint import Notes, Preset, preset_names
from actors.spec.sizing import PackedSizing
from tests.small_presets import write_small

CONFIG, PROCESSOR = "config.json", "preprocessor_config.json"


def write(
    folder: Path,
    config: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = None,
    *,
    name: str = "preprocessor_config.json",
) -> ModelOptions:
    """The tiny preset as a folder, changed."""
    files = Preset("qwen3vl-tiny").files
    (folder / "config.json").write_text(json.dumps(files["config.json"] | (config or {})))
    (folder / name).write_text(json.dumps(processor or {}))
    return ModelOptions(id=str(folder))


def test_the_presets_are_the_published_models() -> None:
    model = registry.read(ModelOptions(id="qwen3vl-8b", load_format="dummy"))
    assert (model.width, model.deepstack, model.weights) == (4096 * 4, 3, "dummy")
    assert model.sizing == PackedSizing(16, 2, 65536, 16777216)
    assert model.kinds == ("image", "video")
    assert model.paths == ("default",)


@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen3_vl_moe"])
def test_dense_and_moe_are_one_family(tmp_path: Path, architecture: str) -> None:
    model = registry.read(write(tmp_path, {"model_type": architecture}))
    assert (model.family, model.weights) == ("qwen3_vl", "checkpoint")


@pytest.mark.parametrize("processor", [{}, {"image_mean": None, "size": None}])
def test_defaults_without_settings(tmp_path: Path, processor: dict[str, Any]) -> None:
    model = registry.read(write(tmp_path, processor=processor))
    assert (model.mean, model.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert model.sizing == PackedSizing(16, 2, 65536, 16777216)


@pytest.mark.parametrize("nested", [False, True])
def test_the_processors_settings_are_read(tmp_path: Path, nested: bool) -> None:
    settings = {
        "size": {"shortest_edge": 1024, "longest_edge": 2048},
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": 0.25,
        "do_resize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }
    name = "processor_config.json" if nested else "preprocessor_config.json"
    processor = {"image_processor": settings} if nested else settings
    model = registry.read(write(tmp_path, processor=processor, name=name))
    assert model.sizing == PackedSizing(16, 2, 1024, 2048)
    assert (model.mean, model.std) == ((0.1, 0.2, 0.3), (0.25, 0.25, 0.25))


def test_processor_config_json_precedes_preprocessor_config_json(tmp_path: Path) -> None:
    """transformers: ImageProcessingMixin.get_image_processor_dict. Folders that are saved again may
    have both."""
    nested = {"image_processor": {"size": {"shortest_edge": 1024, "longest_edge": 2048}}}
    write(tmp_path, processor=nested, name="processor_config.json")
    older = {"size": {"shortest_edge": 4096, "longest_edge": 8192}}
    model = registry.read(write(tmp_path, processor=older))
    assert model.sizing == PackedSizing(16, 2, 1024, 2048)


@pytest.mark.parametrize(
    "setting",
    [{"do_resize": False}, {"do_normalize": False}, {"resample": 2}, {"rescale_factor": 1.0}],
)
def test_other_preprocessing_is_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(setting))} of the image processor"):
        registry.read(write(tmp_path, processor=setting))


@pytest.mark.parametrize("kind", sorted(registry.refused()))
def test_a_relative_that_is_not_served_is_refused_by_its_reason(tmp_path: Path, kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{kind}', which is not served: its") as told:
        registry.read(write(tmp_path, {"model_type": kind}))
    nearest = str(told.value).rpartition("nearest that is served is ")[2]
    assert nearest in registry.readers()
    assert kind not in registry.readers()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gemma3n", "its vision tower is MobileNetV5.*timm.*nearest that is served is gemma4$"),
        ("gemma4_unified", "without an encoder.*nearest that is served is gemma4$"),
        ("minicpmv", "resampled by queries.*nearest that is served is minicpmv4_6$"),
        ("molmo", "code of its own.*nearest that is served is molmo2$"),
        ("phi3_v", "code of its own.*nearest that is served is phi4_multimodal$"),
        (
            "NemotronH_Nano_VL_V2",
            "tiles of a fixed size.*nearest that is served is nemotron_h_omni$",
        ),
    ],
)
def test_who_is_nearest(tmp_path: Path, kind: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        registry.read(write(tmp_path, {"model_type": kind}))


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'llama' \(model_type of config.json\)") as told:
        registry.read(write(tmp_path, {"model_type": "llama"}))
    for known in registry.readers():
        assert re.search(rf"\b{known}\b", str(told.value)), known


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    options = write(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(CheckpointError, match="lacks or misstates 'vision_config'"):
        registry.read(options)


WRONG: list[Any] = [None, "x", [], [1], {}, -1, 0, 1.5, 1e308, float("inf"), 10**30, True]


class Damaged(Notes):
    def read_json(self, name: str) -> dict[str, Any] | None:
        return self.contents.get(name)


@pytest.mark.parametrize(
    ("preset", "place", "what"),
    [
        ("lfm25vl-1.6b", "processor_config.json image_processor max_tiles", "slices of an image"),
        ("minicpmv-4.6", "preprocessor_config.json max_slice_nums", "slices of an image"),
        (
            "kimik25",
            "preprocessor_config.json media_proc_cfg patch_limit_on_one_side",
            "patches on a side",
        ),
        ("janus-pro-1b", "config.json vision_config depth", "layers"),
    ],
)
def test_what_would_take_forever_is_refused(preset: str, place: str, what: str) -> None:
    files: Any = Preset(preset).files
    *folders, key = place.split()
    reduce(getitem, folders, files)[key] = 10**8
    with pytest.raises(CheckpointError, match=what):
        family_of(registry.read(ModelOptions(id=preset, load_format="dummy"), Damaged(files)))


@given(st.sampled_from(preset_names()), st.sampled_from(WRONG), st.data())
def test_a_damaged_file_is_refused_or_read(preset: str, wrong: Any, data: st.DataObject) -> None:
    files: Any = Preset(preset).files
    part = files[data.draw(st.sampled_from(sorted(files)))]
    while True:
        key = data.draw(st.sampled_from(list(part) if isinstance(part, dict) else range(len(part))))
        if not isinstance(part[key], dict | list) or not part[key] or data.draw(st.booleans()):
            break
        part = part[key]
    part[key] = wrong
    with suppress(ServiceError):
        family_of(registry.read(ModelOptions(id=preset, load_format="dummy"), Damaged(files)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "vision_config lacks or misstates num_heads: 0"),
        ({"num_heads": 5}, "num_heads: 5 does not divide hidden_size, 64"),
        ({"depth": 10**30}, "layers"),
        ({"depth": float("inf")}, "infinity"),
    ],
)
def test_a_tower_that_cannot_be(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    vision = Preset("qwen3vl-tiny").files["config.json"]["vision_config"] | {"hidden_size": 64}
    spec = registry.read(write(tmp_path, {"vision_config": vision | change}))
    with pytest.raises(CheckpointError, match=message):
        family_of(spec)


@pytest.mark.parametrize(
    "preset",
    [
        *("qwen2vl-7b", "qwen25vl-7b", "exaone45-33b", "qwen35-27b", "glm41v-9b", "glm-ocr"),
        *("glm53-flash", "minimax-m3", "ernie45vl-28b", "kimivl-a3b", "kimik25", "llama4-scout"),
        *("pixtral-12b", "mistral-small31", "lighton-ocr", "paddleocr-vl", "videollama3-7b"),
        *("gemma4-31b", "dinov3-vitb16", "mlcd-bigg-448", "step3vl-10b"),
    ],
)
def test_heads_that_cannot_be_rotated(tmp_path: Path, preset: str) -> None:
    write_small(tmp_path, preset)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    vision = config.get("vision_config", config)
    (key,) = vision.keys() & {"num_heads", "num_attention_heads", "heads", "vt_num_attention_heads"}
    vision[key] = 32
    if "head_dim" in vision:
        vision |= {"num_key_value_heads": 32, "head_dim": 2}
    file.write_text(json.dumps(config))
    spec = registry.read(ModelOptions(id=str(tmp_path), load_format="dummy"))
    named = f"{key.removeprefix('vt_')}: each of 32 heads has 2 of 64 values"
    with pytest.raises(CheckpointError, match=rf"{named}, and rotary .* needs a multiple of 4"):
        family_of(spec)


def test_a_width_that_the_heads_of_granites_projectors_do_not_divide(tmp_path: Path) -> None:
    write_small(tmp_path, "granite-vision-4.1-4b")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"]["hidden_size"] = 80
    file.write_text(json.dumps(config))
    spec = registry.read(ModelOptions(id=str(tmp_path), load_format="dummy"))
    with pytest.raises(CheckpointError, match="hidden_size: 80 is not a multiple of 64"):
        family_of(spec)


@pytest.mark.parametrize(
    ("preset", "file", "path", "wrong"),
    [
        ("qwen3vl-8b", CONFIG, "vision_config.patch_size", "x"),
        ("qwen3vl-8b", CONFIG, "vision_config", []),
        ("qwen25vl-7b", CONFIG, "vision_config.window_size", {}),
        ("qwen2vl-7b", PROCESSOR, "image_mean", [0.5]),
        ("internvl3-8b", CONFIG, "vision_config.image_size", [3, 4]),
        ("pixtral-12b", CONFIG, "text_config.hidden_size", "wide"),
        ("siglip-so400m", CONFIG, "vision_config.num_hidden_layers", "x"),
        ("gemma3-4b", PROCESSOR, "size", ["x"]),
        ("whisper-tiny", CONFIG, "d_model", []),
        ("glm-ocr", CONFIG, "vision_config.out_hidden_size", "x"),
        ("qwen3vl-8b", "vision_config", "num_heads", {}),
    ],
)
def test_a_value_of_a_wrong_type_is_named_with_its_file(
    preset: str, file: str, path: str, wrong: Any
) -> None:
    files: Any = Preset(preset).files
    *folders, key = path.split(".")
    place = files[CONFIG][file] if file == "vision_config" else files[file]
    for folder in folders:
        place = place[folder]
    place[key] = wrong
    with pytest.raises(CheckpointError) as caught:
        family_of(registry.read(ModelOptions(id=preset, load_format="dummy"), Damaged(files)))
    where = re.search(r"\((\S+) of (\S+)\)$", str(caught.value))
    assert where
    assert (where[1], where[2]) == (path, file)


def test_two_wrong_values_are_refused_too() -> None:
    files: Any = Preset("qwen3vl-8b").files
    files[CONFIG]["vision_config"] |= {"patch_size": "x", "spatial_merge_size": "y"}
    with pytest.raises(CheckpointError, match="lacks or misstates"):
        registry.read(ModelOptions(id="qwen3vl-8b", load_format="dummy"), Damaged(files))


def test_no_config_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json"):
        registry.read(ModelOptions(id=str(tmp_path)))


def test_whatever_changes_the_embeddings_changes_the_fingerprint(tmp_path: Path) -> None:
    plain = write(tmp_path)
    models = [
        plain,
        plain.model_copy(update={"dtype": "float32"}),
        plain.model_copy(update={"load_format": "dummy"}),
        ModelOptions(id="qwen3vl-tiny", load_format="dummy"),
        ModelOptions(id="qwen3vl-8b", load_format="dummy"),
    ]
    fingerprints = [registry.read(model).fingerprint for model in models]
    fingerprints.append(
        registry.read(write(tmp_path, processor={"image_mean": [0.4, 0.4, 0.4]})).fingerprint
    )
    assert len(set(fingerprints)) == len(fingerprints)
    assert registry.read(write(tmp_path)).fingerprint == fingerprints[0]
