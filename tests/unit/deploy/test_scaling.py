"""How many replicas the outstanding patches ask for, and that Serve is told so."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from actors.autoscaling import WorkPolicy
from actors.errors import ConfigError
from encoder_service.app import check_resources, replicas
from encoder_service.config import parse


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
    assert (told.min_replicas, told.max_replicas) == (2, 5)
    assert isinstance(told.policy.get_policy()(target=7), WorkPolicy)
    assert told.policy.policy_kwargs == {"target": 100_000}
    # Only the least must find room at once.
    check_resources(options, {"GPU": 2, "CPU": 8})


def test_a_target_in_seconds_takes_the_place_of_patches() -> None:
    scaling = {"max_replicas": 5, "target_seconds": 0.5}
    options = parse({"model": {"id": "m"}, "encoder": {"autoscaling": scaling}})
    policy = WorkPolicy(**replicas(options.encoder)["autoscaling_config"].policy.policy_kwargs)
    reports = {"outstanding_patches": {"a": 9e9}, "outstanding_seconds": {"a": 1.0, "b": 0.6}}
    assert policy(Now(1, reports)) == (4, {})
    with pytest.raises(ConfigError, match="target_patches and target_seconds are both given"):
        parse({"model": {"id": "m"}, "encoder": {"autoscaling": scaling | {"target_patches": 1}}})
