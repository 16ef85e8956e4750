"""How vLLM starts with the place "local": what is refused, and what the log says."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from actors.errors import ConfigError
from actors.models.precision import VERSION, LayerPlan, PrecisionPlan
from encoder_service.engines import vllm_plugin
from tests.unit.vllm_half import ECConnectorRole, configured


def started(module: ModuleType, model: str = "qwen3vl-tiny", **options: Any) -> Any:
    """The worker's half of the connector."""
    return module.EncoderServiceConnector(configured(model, **options), ECConnectorRole.WORKER)


def test_what_cannot_work_is_refused_at_start(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(model: str, **options: Any) -> None:
        started(connector_module, model, **options)

    with pytest.raises(ValueError, match="for one GPU, not 2"):
        start("qwen3vl-tiny", cards=2)
    with pytest.raises(ValueError, match="is shm"):
        start("qwen3vl-tiny", cache="shm")
    with pytest.raises(ConfigError, match=r"ec_connector_extra_config: graphs\.mode: .*'exact'"):
        start("qwen3vl-tiny", graphs={"mode": "exact"})
    with pytest.raises(ValueError, match="not pixtral"):
        start("pixtral-12b")
    with pytest.raises(ConfigError, match=r"extra_config: chunk: no such key; .* chunk_ms"):
        start("qwen3vl-tiny", chunk=1)
    for tokens in (7, 2049):
        with pytest.raises(ConfigError, match=r"decode_step_tokens .* from 8 .* to 2048"):
            start("qwen3vl-tiny", decode_step_tokens=tokens)
    with pytest.raises(ValueError, match=r"--scheduler-cls is Other, .* from vLLM's Scheduler"):
        start("qwen3vl-tiny", scheduler=type("Other", (), {}))
    from encoder_service.engines.vllm_local import LocalConnector

    with pytest.raises(ValueError, match="in another process"):
        LocalConnector(configured("qwen3vl-tiny"), ECConnectorRole.SCHEDULER)
    monkeypatch.setitem(sys.modules, "encoder_service.engines.vllm_local", None)
    with pytest.raises(ValueError, match=r"pip install --no-deps \. in the repository"):
        start("qwen3vl-tiny")


def test_a_plan_for_other_weights_is_refused_at_start(
    connector_module: ModuleType, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    layers = {"blocks.0.mlp.linear_fc1": LayerPlan.of(0.03, torch.zeros(64, dtype=torch.bfloat16))}
    plan = PrecisionPlan(
        version=VERSION,
        model="another",
        weights="others",
        fp8=layers,
        rows_error=0.04,
        rows_cosine=0.999,
        images=7,
    )
    file.write_text(plan.model_dump_json())
    graphs = {"precision": "fp8", "precision_file": str(file)}
    with pytest.raises(ConfigError, match="is for other weights, those of another"):
        started(connector_module, graphs=graphs)


@pytest.mark.parametrize(
    ("listed", "advice"),
    [
        (None, "install this package with pip"),
        ("a,encoder_service", "install this package with pip"),
        ("", "VLLM_PLUGINS is '': add encoder_service"),
        ("a,b", "VLLM_PLUGINS is 'a,b': add encoder_service"),
    ],
)
@pytest.mark.parametrize("loaded", [False, True])
def test_a_vllm_that_has_not_loaded_the_plugin_says_so(
    connector_module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    listed: str | None,
    advice: str,
    *,
    loaded: bool,
) -> None:
    monkeypatch.setattr(vllm_plugin, "loaded", False)
    if listed is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", listed)
    if loaded:
        vllm_plugin.register()
    started(connector_module).shutdown()
    assert caplog.text.count("the plugin encoder_service is not loaded") == (not loaded)
    assert caplog.text.count(advice) == (not loaded)


def test_the_engine_logs_as_vllm_does(
    connector_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_local = import_module("encoder_service.engines.vllm_local")
    theirs, engine = logging.getLogger("vllm"), logging.getLogger("ray.serve")
    for one in (theirs, engine):  # restored after the test
        monkeypatch.setattr(one, "handlers", [])
        monkeypatch.setattr(one, "propagate", True)
        monkeypatch.setattr(one, "level", logging.NOTSET)
    theirs.setLevel(logging.INFO)
    vllm_local.log_like_vllm()
    assert engine.propagate, "vLLM's logger was not configured"
    theirs.addHandler(handler := logging.NullHandler())
    vllm_local.log_like_vllm()
    vllm_local.log_like_vllm()
    assert engine.handlers == [handler]
    assert (engine.propagate, engine.level) == (False, logging.INFO)
