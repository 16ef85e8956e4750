"""Which form of the blocks a model gets on a device, and what cannot be had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from actors.errors import ConfigError
from actors.families.registry import read
from actors.models.layers.block import (
    Attend,
    Blocks,
    BlockWeights,
    CompiledBlocks,
    ReferenceBlocks,
    Style,
    blocks_of,
)
from actors.models.load import build, form_of_blocks, load, tensors
from actors.options import BlockChoice, BlockForm, ModelOptions, block_form
from actors.types import ModelDtype
from encoder_service import cli
from encoder_service.api.answer import model_card
from encoder_service.config import parse
from tests.small_presets import SMALL, write_small

CPU = {"device": "cpu", "num_gpus": 0}


@pytest.mark.parametrize(
    ("asked", "on_cuda", "dtype", "fast", "form"),
    [
        ("auto", True, "bfloat16", True, "fast"),
        ("auto", True, "float16", True, "fast"),
        ("auto", True, "bfloat16", False, "compile"),
        ("auto", True, "float32", True, "reference"),
        ("auto", False, "bfloat16", True, "reference"),
        ("auto", False, "bfloat16", False, "reference"),
        ("fast", True, "float16", True, "fast"),
        ("compile", True, "bfloat16", True, "compile"),
        ("compile", True, "bfloat16", False, "compile"),
        ("reference", True, "bfloat16", True, "reference"),
        ("reference", False, "float32", False, "reference"),
        ("auto", True, "bfloat16", None, "reference"),
        ("reference", True, "bfloat16", None, "reference"),
    ],
)
def test_the_form_in_use(
    asked: BlockChoice, on_cuda: bool, dtype: ModelDtype, fast: bool | None, form: BlockForm
) -> None:
    assert block_form(asked, on_cuda=on_cuda, dtype=dtype, fast=fast) == form


@pytest.mark.parametrize("asked", ["fast", "compile"])
@pytest.mark.parametrize(("on_cuda", "dtype"), [(False, "bfloat16"), (True, "float32")])
def test_forms_for_cuda_in_16_bits(asked: BlockChoice, on_cuda: bool, dtype: ModelDtype) -> None:
    with pytest.raises(ConfigError, match=rf"graphs\.blocks is {asked}.*graphs\.blocks to auto"):
        block_form(asked, on_cuda=on_cuda, dtype=dtype, fast=True)


def test_a_family_without_the_fast_form() -> None:
    with pytest.raises(ConfigError, match=r"graphs\.blocks is fast.*auto, compile or reference"):
        block_form("fast", on_cuda=True, dtype="bfloat16", fast=False)


@pytest.mark.parametrize("asked", ["fast", "compile"])
def test_a_family_in_plain_torch_only(asked: BlockChoice) -> None:
    with pytest.raises(ConfigError, match=rf"graphs\.blocks is {asked}.*auto or reference"):
        block_form(asked, on_cuda=True, dtype="bfloat16", fast=None)


def test_each_form_has_its_class() -> None:
    assert blocks_of("reference") is ReferenceBlocks
    assert blocks_of("compile") is CompiledBlocks


@pytest.mark.parametrize("preset", [*SMALL, "qwen3vl-tiny", "deepseek-ocr-tiny"])
def test_a_spec_says_whether_its_blocks_have_the_fast_form(preset: str, tmp_path: Path) -> None:
    styles: list[Style] = []

    def noted(
        weights: Sequence[BlockWeights],
        style: Style,
        attention: Attend | Sequence[Attend],
        taps: Sequence[int],
    ) -> Blocks:
        styles.append(style)
        return ReferenceBlocks(weights, style, attention, taps)

    name = str(write_small(tmp_path, preset)) if preset in SMALL else preset
    options = ModelOptions(id=name, load_format="dummy")
    model, cpu = read(options), torch.device("cpu")
    build(model, tensors(options, model, cpu), cpu, noted)
    assert styles
    assert all(style.fast is model.fast_blocks for style in styles)


@pytest.mark.parametrize(
    ("preset", "asked", "form"),
    [
        ("step3-321b", "auto", CompiledBlocks),
        ("qwen3vl-2b", "compile", CompiledBlocks),
        ("qwen3vl-2b", "reference", ReferenceBlocks),
    ],
)
def test_a_tower_on_cuda_gets_the_form(preset: str, asked: BlockChoice, form: type) -> None:
    model = read(ModelOptions(id=preset, load_format="dummy"))
    assert form_of_blocks(model, torch.device("cuda"), asked) is form


def test_it_is_said_before_weights_are_read() -> None:
    model = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
    with pytest.raises(ConfigError, match=r"graphs\.blocks is compile"):
        load(model, torch.device("cpu"), blocks="compile")


@pytest.mark.parametrize(
    ("model", "encoder", "blocks", "shown"),
    [
        ("qwen3vl-2b", {}, "auto", "fast"),
        ("qwen3vl-2b", {}, "compile", "compile"),
        ("qwen3vl-2b", {}, "reference", "reference"),
        ("qwen3vl-2b", CPU, "auto", "reference"),
        ("step3-321b", {}, "auto", "compile"),
    ],
)
def test_the_model_card_shows_the_form_in_use(
    model: str, encoder: dict[str, object], blocks: str, shown: str
) -> None:
    options = parse(
        {
            "model": {"id": model, "load_format": "dummy"},
            "encoder": encoder,
            "graphs": {"blocks": blocks},
        }
    )
    graphs = model_card(options, read(options.model))["graphs"]
    assert isinstance(graphs, dict)
    assert graphs["blocks"] == shown
    assert graphs["precision"] == "bf16"


CONFIG = """
applications:
  - name: vision
    import_path: encoder_service.app:build
    args:
      model: {id: step3-321b, load_format: dummy}
      graphs: {blocks: %s}
"""


@pytest.mark.parametrize(("blocks", "status"), [("compile", 0), ("fast", 1)])
def test_check_knows_what_the_family_has(
    blocks: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "service.yaml"
    file.write_text(CONFIG % blocks)
    assert cli.main(["check", str(file)]) == status
    said = capsys.readouterr()
    if status:
        assert "graphs.blocks is fast, but" in said.err
    else:
        assert "compile" in said.out
