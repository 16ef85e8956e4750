"""Reading a tower out of a checkpoint: what is opened, and what every fault is called."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from actors.errors import CheckpointError
from actors.families.registry import read
from actors.models import load as towers
from actors.models.tensors import INDEX, POOL, SINGLE, Dummy, load
from actors.options import ModelOptions
from actors.spec.checkpoint import Folder, Preset
from tests.small_presets import SMALL, write_small

CPU = torch.device("cpu")
PREFIXES = ("visual.",)
EXPECTED = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (4,)}


def tower(prefix: str = "model.visual.") -> dict[str, Tensor]:
    """The expected tensors under the names of a checkpoint."""
    return {prefix + name: torch.randn(shape) for name, shape in EXPECTED.items()}


def write(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> Folder:
    """A sharded checkpoint with its index."""
    for name, tensors in shards.items():
        save_file(dict(tensors), folder / name)
    weight_map = {key: shard for shard, tensors in shards.items() for key in tensors}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return Folder(folder)


@pytest.mark.parametrize("prefix", ["model.visual.", "visual."])
def test_only_shards_with_the_tower_are_needed(tmp_path: Path, prefix: str) -> None:
    tensors = tower(prefix)
    language = {"model.language_model.w": torch.zeros(5), "lm_head.weight": torch.zeros(5)}
    first = {name: tensors[name] for name in list(tensors)[:1]} | {"model.norm": torch.zeros(1)}
    second = {name: tensors[name] for name in list(tensors)[1:]}
    files = write(tmp_path, {"1.safetensors": first, "2.safetensors": second, "3": language})
    (tmp_path / "3").unlink()
    weights = load(files, PREFIXES, EXPECTED)
    assert weights.keys() == EXPECTED.keys()
    assert all(torch.equal(weights[name], tensors[prefix + name]) for name in EXPECTED)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    tensors = tower("visual.")
    save_file(tensors | {"lm_head.weight": torch.zeros(5)}, tmp_path / SINGLE)
    weights = load(Folder(tmp_path), PREFIXES, EXPECTED)
    assert all(torch.equal(weights[name], tensors["visual." + name]) for name in EXPECTED)


def test_precision_stays_the_checkpoints_own(tmp_path: Path) -> None:
    save_file({name: values.bfloat16() for name, values in tower().items()}, tmp_path / SINGLE)
    weights = load(Folder(tmp_path), PREFIXES, EXPECTED)
    assert {values.dtype for values in weights.values()} == {torch.bfloat16}


def faulty(tensors: dict[str, Tensor], change: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """With tensors added or replaced; None takes one away."""
    changed = {**tensors, **change}
    return {name: values for name, values in changed.items() if values is not None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.visual.b.weight": None}, r"1 tensors are missing \(b.weight\)"),
        ({"model.visual.c": torch.zeros(1)}, r"1 are left over \(c\)"),
        ({"model.visual.b.weight": torch.zeros(5)}, r"b.weight \[5\] instead of \[4\]"),
        ({"visual.b.weight": torch.zeros(4)}, "b.weight twice"),
        ({"model.visual.a.per_dim_scale": torch.ones(1)}, "1 are left over .a.per_dim_scale"),
        ({"model.visual.a.weight_scale_inv": torch.ones(1)}, "quantised.*a.weight_scale_inv"),
        (
            {"model.visual.a.weight": torch.zeros(2, 3).to(torch.float8_e4m3fn)},
            "quantised.*a.weight F8_E4M3",
        ),
        ({"model.visual.a.weight": torch.zeros(2, 3, dtype=torch.int8)}, "quantised.*a.weight I8"),
    ],
    ids=["missing", "left-over", "misshapen", "twice", "a-scale", "scales", "float8", "int8"],
)
def test_faults_are_named(
    tmp_path: Path, change: Mapping[str, Tensor | None], message: str
) -> None:
    save_file(faulty(tower(), change), tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=message):
        load(Folder(tmp_path), PREFIXES, EXPECTED)


def test_a_quantised_language_model_beside_a_plain_tower(tmp_path: Path) -> None:
    quantised = torch.zeros(2, 3).to(torch.float8_e4m3fn)
    language = {"model.language_model.a.weight": quantised}
    language["model.language_model.a.weight_scale_inv"] = torch.ones(1)
    save_file(tower() | language, tmp_path / SINGLE)
    assert load(Folder(tmp_path), PREFIXES, EXPECTED).keys() == EXPECTED.keys()


WIDE = {"a.weight": (200, 300), "a.bias": (200,)}


def fp8_blocks(scale: Tensor) -> Tensor:
    """Scales of blocks for each value of a matrix of 200 x 300."""
    return torch.stack([scale[row // 128, torch.arange(300) // 128] for row in range(200)])


@pytest.mark.parametrize(
    ("suffix", "scale", "scales"),
    [
        ("weight_scale", torch.tensor(0.25), lambda scale: scale),
        ("weight_scale", torch.tensor([0.25]), lambda scale: scale),
        ("weight_scale", torch.rand(200, 1), lambda scale: scale),
        ("weight_scale", torch.rand(200), lambda scale: scale[:, None]),
        ("weight_scale_inv", torch.rand(2, 3), fp8_blocks),
        ("weight_scale", torch.rand(2, 3).bfloat16(), fp8_blocks),
    ],
    ids=["tensor", "tensor of one", "channels", "channels flat", "blocks", "blocks in bfloat16"],
)
def test_a_tower_in_fp8_is_read_in_bfloat16(
    suffix: str, scale: Tensor, scales: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    values = torch.randn(200, 300).to(torch.float8_e4m3fn)
    stored = {"visual.a.weight": values, "visual.a.bias": torch.randn(200)}
    first = stored | {"visual.a.input_scale": torch.ones(1)}
    # The scale is in another shard than what it is of.
    files = write(
        tmp_path, {"1.safetensors": first, "2.safetensors": {f"visual.a.{suffix}": scale}}
    )
    weights = load(files, PREFIXES, WIDE)
    assert weights.keys() == WIDE.keys()
    assert torch.equal(weights["a.weight"], (values.float() * scales(scale).float()).bfloat16())
    assert torch.equal(weights["a.bias"], stored["visual.a.bias"])


QWEN_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "modules_to_not_convert": [
        "model.visual.blocks.0.attn.qkv",
        "model.visual.blocks.0.attn.proj",
        "mtp.pre_fc_norm_hidden",
    ],
    "weight_block_size": [128, 128],
}
"""`quantization_config` of Qwen/Qwen3.8-27B-FP8, with 3 of its about 512 modules: as quoted by the
tests of vLLM's Neuron plugin (vllm_neuron.model.qwen3_5.quantization)."""

MODEL_OPTIMIZER_FP8 = {
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["model.language_model*"],
    }
}
"""`hf_quant_config.json` of Qwen3-VL from NVIDIA's Model Optimizer, recipe qwen3_vl/ptq/
fp8_vision-kv_none, as far as its repository shows it: the recipe, and NVIDIA/Model-Optimizer,
tests/examples/hf_ptq/test_hf_ptq_vision_quantization.py at 80cc5b20. All linear layers of the tower
have a `weight_scale` and an `input_scale`, the patch embedding has none."""


def written_tower(folder: Path, **changes: object) -> tuple[ModelOptions, dict[str, Tensor]]:
    """Options for a checkpoint without weights, whose JSON files are written. And weights for its
    tower, by their full names."""
    files = Preset("qwen3vl-tiny").files
    files["config.json"] |= changes
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    model = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
    weights = towers.tensors(model, read(model), CPU)
    stored = {f"model.visual.{name}": weight.bfloat16() for name, weight in weights.items()}
    return ModelOptions(id=str(folder)), stored


def test_a_tower_that_qwen_left_in_bfloat16_is_read_as_it_is(tmp_path: Path) -> None:
    options, stored = written_tower(tmp_path, quantization_config=QWEN_FP8)
    layer = "model.language_model.layers.3.mlp.gate_proj"
    language = {
        f"{layer}.weight": torch.zeros(256, 128).to(torch.float8_e4m3fn),
        f"{layer}.weight_scale_inv": torch.ones(2, 1).bfloat16(),
    }
    save_file(stored | language, tmp_path / SINGLE)
    found = towers.tensors(options, read(options), CPU)
    assert {f"model.visual.{name}" for name in found} == stored.keys()
    for name, weight in found.items():
        assert torch.equal(weight, stored[f"model.visual.{name}"])


def test_a_tower_from_model_optimizer_becomes_bfloat16(tmp_path: Path) -> None:
    options, stored = written_tower(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODEL_OPTIMIZER_FP8))
    expected = {}
    for name, weight in list(stored.items()):
        expected[name] = weight
        layer, _, what = name.rpartition(".")
        if what != "weight" or weight.dim() != 2 or "pos_embed" in name:
            continue
        scale = weight.float().abs().amax() / 448
        stored[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        stored[f"{layer}.weight_scale"] = scale
        stored[f"{layer}.input_scale"] = torch.tensor(0.5)
        expected[name] = (stored[name].float() * scale).bfloat16()
    for layer in ("blocks.0.attn.qkv", "merger.linear_fc1", "deepstack_merger_list.0.linear_fc1"):
        assert f"model.visual.{layer}.weight_scale" in stored
    assert "model.visual.patch_embed.proj.weight_scale" not in stored
    save_file(stored, tmp_path / SINGLE)
    found = towers.tensors(options, read(options), CPU)
    assert {f"model.visual.{name}" for name in found} == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[f"model.visual.{name}"])


def test_a_scale_of_another_shape_is_named(tmp_path: Path) -> None:
    values = torch.randn(200, 300).to(torch.float8_e4m3fn)
    stored = {"visual.a.weight": values, "visual.a.bias": torch.randn(200)}
    save_file(stored | {"visual.a.weight_scale": torch.ones(3, 3)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"scale of a.weight .*\[3, 3\].*one for each row"):
        load(Folder(tmp_path), PREFIXES, WIDE)


def test_a_shard_that_is_not_there(tmp_path: Path) -> None:
    files = write(tmp_path, {"1.safetensors": tower()})
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 1.safetensors, which is not there"):
        load(files, PREFIXES, EXPECTED)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    tensors = tower()
    files = write(tmp_path, {"1.safetensors": tensors})
    save_file(faulty(tensors, {"model.visual.b.weight": None}), tmp_path / "1.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks model.visual.b.weight"):
        load(files, PREFIXES, EXPECTED)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(Folder(tmp_path), PREFIXES, EXPECTED)


def test_no_safetensors_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="only safetensors"):
        load(Folder(tmp_path), PREFIXES, EXPECTED)


def test_dummy_weights_are_the_same_in_every_process() -> None:
    once, again, other = (Dummy(EXPECTED, seed, CPU) for seed in (0, 0, 1))
    assert once.keys() == EXPECTED.keys()
    assert all(torch.equal(once[name], again[name]) for name in EXPECTED)
    assert not torch.equal(once["a.weight"], other["a.weight"])
    total = float(sum(values.sum() for values in once.values()))
    assert total == pytest.approx(2.83458, abs=1e-4)  # as another process computed it


def test_dummy_bounds_leave_most_values_as_they_are() -> None:
    """Gemma 4's, of what linear layers take and give."""
    bounds = Dummy({"q_proj.input_min": (), "q_proj.output_max": ()}, 0, CPU)
    assert bounds["q_proj.input_min"] < -3
    assert bounds["q_proj.output_max"] > 3


def test_dummy_weights_larger_than_their_pool_vary_and_no_two_are_equal() -> None:
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"{layer}.weight": (2, POOL - 7) for layer in range(3)}
    weights = Dummy(shapes, 0, CPU)
    rows = torch.cat(list(weights.values()))
    assert rows.std(1) == pytest.approx([(POOL - 7) ** -0.5] * 6, rel=1e-3)
    assert (torch.corrcoef(rows) - torch.eye(6)).abs().max() < 5e-3
    weights["1.weight"].zero_()  # nobody else's
    assert weights["1.weight"].any()


@pytest.mark.parametrize("preset", [*SMALL, "qwen3vl-tiny", "deepseek-ocr-tiny"])
def test_every_tower_is_built_of_dummy_weights_on_its_own_device(
    preset: str, tmp_path: Path
) -> None:
    folder = write_small(tmp_path, preset) if preset in SMALL else preset
    options = ModelOptions(id=str(folder), load_format="dummy")
    meta = torch.device("meta")  # refuses to compute with tensors of the CPU, as a GPU does
    model = read(options)
    weights = towers.tensors(options, model, meta)
    assert {values.device for values in weights.values()} == {meta}
    assert towers.build(model, weights, meta).spec.width == model.width


def test_faint_ones_are_a_tenth_of_themselves() -> None:
    shapes = {"norm.weight": (64,), "norm.bias": (64,), "mlp.weight": (8, 8)}
    plain, faint = Dummy(shapes, 0, CPU), Dummy(shapes, 0, CPU, ("norm.",))
    assert torch.equal(faint["mlp.weight"], plain["mlp.weight"])
    for name in ("norm.weight", "norm.bias"):
        torch.testing.assert_close(faint[name], plain[name] / 10)
