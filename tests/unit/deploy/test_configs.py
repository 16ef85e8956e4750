"""Every file of configs/ can be served: its keys are known and what it names can be imported."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from actors.errors import ConfigError
from actors.families.registry import read
from actors.options import ModelOptions
from actors.spec.checkpoint import preset_names
from encoder_service.commands.check import check_serve, eager
from encoder_service.config import ServiceOptions, fit, load

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_parses_and_its_serve_part_is_sound(path: Path) -> None:
    service = load(path)
    check_serve(yaml.safe_load(path.read_text()), str(path))
    # A preset has no weights: beside the one that says so, a config names a repository.
    assert service.model.id in preset_names() or service.model.id.count("/") == 1
    if service.model.load_format == "dummy":
        assert read(service.model).dummy


@pytest.mark.parametrize("name", preset_names())
def test_the_defaults_suit_every_preset(name: str) -> None:
    options = ServiceOptions(model=ModelOptions(id=name, load_format="dummy"))
    model = read(options.model)
    room = fit(options, model)
    assert room.items > 0
    assert not list(eager(options, model, room))


@pytest.mark.parametrize("name", preset_names())
def test_the_smallest_limit_leaves_images_that_can_be_planned(name: str) -> None:
    values = {"model": {"id": name, "load_format": "dummy"}, "limits": {"max_pixels": 1}}
    options = ServiceOptions.model_validate(values)
    model = read(options.model)
    assert not list(eager(options, model, fit(options, model)))


def test_images_beyond_the_budgets_of_a_path_are_told() -> None:
    values = {
        "model": {"id": "deepseek-ocr", "load_format": "dummy"},
        "graphs": {"local_token_budgets": [200, 800]},
    }
    options = ServiceOptions.model_validate(values)
    model = read(options.model)
    (told,) = eager(options, model, fit(options, model))
    assert "up to 900 tokens exceed every budget of graphs.local_token_budgets" in told


@pytest.mark.parametrize(("seconds", "told"), [(900, ["items of up to 5001 tokens"]), (30, [])])
def test_sounds_beyond_the_budgets_are_told_if_the_limit_lets_them_in(
    seconds: float, told: list[str]
) -> None:
    model = {"id": "nemotron-3-nano-omni", "load_format": "dummy", "tower": "audio"}
    values = {"model": model, "limits": {"max_audio_seconds": seconds}}
    options = ServiceOptions.model_validate(values)
    spec = read(options.model)
    assert [one[:26] for one in eager(options, spec, fit(options, spec))] == told


def test_the_largest_image_is_counted_in_what_is_computed_of_it() -> None:
    model = read(ModelOptions(id="llava-onevision-7b", load_format="dummy"))
    patches = model.sizing.token_range()[1]  # as many as tokens, of which not all give rows
    for most in (patches, patches - 1):
        options = ServiceOptions.model_validate(
            {"model": {"id": model.id}, "router": {"max_outstanding_patches": most}}
        )
        with nullcontext() if most == patches else pytest.raises(ConfigError, match=f" {patches} "):
            fit(options, model)


def test_there_are_configs() -> None:
    assert {"qwen3vl", "tiny", "qwen3vl-chat", "tiny-chat"} <= {path.stem for path in CONFIGS}
