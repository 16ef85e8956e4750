"""How many replicas the outstanding patches ask for, and that Serve is told so."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.constants import DEFAULT_GRACEFUL_SHUTDOWN_WAIT_LOOP_S
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from actors.autoscaling import WorkPolicy
from actors.engine.budgets import model_capacity
from actors.errors import ConfigError
from actors.families.registry import read
from actors.options import EncoderOptions
from actors.rpc.server import END_SECONDS
from encoder_service import app
from encoder_service.app import check_resources, replicas
from encoder_service.config import check_scaling, parse


@dataclass(frozen=True)
class Now:
    """A situation."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]] | None


@pytest.mark.parametrize(
    ("reports", "wanted"),
    [
        ({"a": 0.0, "b": 0.0}, 1),
        ({"a": 1000.0}, 1),
        ({"a": 1001.0}, 2),
        ({"a": 4000.0, "b": 1.0}, 5),
        ({}, 3),
    ],
)
def test_replicas_follow_the_sum_of_patches(reports: dict[Any, float], wanted: int) -> None:
    policy = WorkPolicy(1000)
    assert policy(Now(3, {"outstanding_patches": reports})) == (wanted, {})


def test_without_reports_nothing_changes() -> None:
    assert WorkPolicy(1000)(Now(4, None)) == (4, {})
    assert WorkPolicy(1000)(Now(4, {"other": {"a": 9e9}})) == (4, {})


def test_serve_gives_what_the_policy_reads() -> None:
    fields = dict.fromkeys(list(signature(AutoscalingContext).parameters))
    known = {"target_num_replicas": 1, "aggregated_metrics": {"outstanding_patches": {"a": 2500}}}
    assert fields.keys() >= known.keys()
    assert WorkPolicy(1000)(AutoscalingContext(**fields | known)) == (3, {})


def test_serve_is_told_bounds_delays_and_policy() -> None:
    options = parse(
        {
            "model": {"id": "m"},
            "encoder": {"autoscaling": {"min_replicas": 2, "max_replicas": 5}},
        }
    )
    told = replicas(options.encoder)["autoscaling_config"]
    assert isinstance(told, AutoscalingConfig)
    assert (told.min_replicas, told.max_replicas, told.metrics_interval_s) == (2, 5, 1)
    assert isinstance(told.policy.get_policy()(target=7), WorkPolicy)
    assert told.policy.policy_kwargs == {"target": 100_000}
    # Only the least must find room at once.
    check_resources(options, {"GPU": 2, "CPU": 8})


def test_each_pool_is_a_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {}

    def deployment(_: type, name: str, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(bind=lambda *args: made.update({name: (given, args)}) or name)

    monkeypatch.setattr(app, "serve", SimpleNamespace(deployment=deployment))
    args: dict[str, Any] = {
        "model": {"id": "qwen3vl-tiny", "load_format": "dummy"},
        "encoder": {"replicas": 2, "accelerator_type": "H200"},
    }

    def wired(pools: list[dict[str, Any]]) -> list[str]:
        made.clear()
        options = parse(args | {"encoder": args["encoder"] | {"pools": pools}})
        app.wire(options, read(options.model), None)
        names = [name for name in made if name.startswith("Encoder")]
        assert made["Router"][1][0] == made["Ingress"][1][2] == names
        return names

    assert wired([]) == ["Encoder"]
    assert made["Encoder"][1][1:] == ("", None)
    needed = DEFAULT_GRACEFUL_SHUTDOWN_WAIT_LOOP_S + EncoderOptions().drain_timeout_seconds
    killed = made["Encoder"][0]["graceful_shutdown_timeout_s"]
    assert killed >= needed + END_SECONDS + 2, "after Encoder.stop, which also waits for tickets"
    small = {"name": "small", "replicas": 3, "accelerator_type": "L4", "resources": {"rack": 0.5}}
    budgets = {"graphs": {"token_budgets": [64, 256]}}
    assert wired([small | budgets, {"name": "big"}]) == ["Encoder-big", "Encoder-small"]
    (big_given, big), (small_given, little) = made["Encoder-big"], made["Encoder-small"]
    assert (big_given["num_replicas"], small_given["num_replicas"]) == (2, 3)
    assert big_given["ray_actor_options"]["accelerator_type"] == "H200"
    assert "resources" not in big_given["ray_actor_options"]
    assert small_given["ray_actor_options"]["accelerator_type"] == "L4"
    assert small_given["ray_actor_options"]["resources"] == {"rack": 0.5}
    assert (big[1:], little[1:]) == (("big", None), ("small", (256,)))
    assert little[0].graphs.token_budgets == (64, 256)
    # The front door takes what the largest budgets hold.
    front = made["Ingress"][1][0]
    assert model_capacity(front.graphs, read(front.model)).tokens == (1024,)
    descending = {"name": "odd", "graphs": {"token_budgets": [64, 8]}}
    with pytest.raises(ConfigError, match=r"^pool odd: graphs.token_budgets must ascend"):
        wired([small, descending])


def test_a_target_in_seconds_takes_the_place_of_patches() -> None:
    scaling = {"max_replicas": 5, "target_seconds": 0.5}
    options = parse({"model": {"id": "m"}, "encoder": {"autoscaling": scaling}})
    policy = WorkPolicy(**replicas(options.encoder)["autoscaling_config"].policy.policy_kwargs)
    reports = {"outstanding_patches": {"a": 9e9}, "outstanding_seconds": {"a": 1.0, "b": 0.6}}
    assert policy(Now(1, reports)) == (4, {})
    with pytest.raises(ConfigError, match="target_patches and target_seconds are both given"):
        parse({"model": {"id": "m"}, "encoder": {"autoscaling": scaling | {"target_patches": 1}}})


@pytest.mark.parametrize(
    ("section", "target"),
    [
        ({"engine": "vllm"}, 128),
        ({"engine": "vllm", "max_ongoing_requests": 40}, 20),
        ({"engine": "transformers"}, 2),
        ({"autoscaling": {"max_replicas": 5, "target_ongoing_requests": 3}}, 3),
    ],
)
def test_language_models_follow_ongoing_requests(section: dict[str, Any], target: float) -> None:
    llm = {"autoscaling": {"min_replicas": 2, "max_replicas": 5}} | section
    options = parse({"model": {"id": "m"}, "llm": llm})
    assert options.llm
    told = replicas(options.llm)["autoscaling_config"]
    assert told.target_ongoing_requests == target
    assert told.policy.is_default_policy_function()
    assert (told.upscale_delay_s, told.downscale_delay_s) == (10, 600)


def test_ingresses_must_admit_what_adds_language_models() -> None:
    scaling = {"max_replicas": 9}
    args = {"model": {"id": "m"}, "llm": {"engine": "vllm", "autoscaling": scaling}}
    with pytest.raises(ConfigError, match=r"9 replicas beyond 1024 requests, .* admit 1000"):
        check_scaling(parse(args))
    check_scaling(parse(args | {"ingress": {"max_ongoing_requests": 1025}}))
