"""What a configuration may say, and that its errors do not repeat secrets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from actors.errors import ConfigError
from actors.options import LEAST_RESERVED
from encoder_service.app import check_object_store, check_resources
from encoder_service.config import ServiceOptions, counted, encoders, parse, resources

DIGEST = "Ab" * 32


def options(text: str) -> dict[str, Any]:
    """`args` of an otherwise good configuration."""
    changed: dict[str, Any] = yaml.safe_load(text)
    return {"model": {"id": "m"}} | changed


def test_the_documentation_has_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    quoted = " ".join(re.findall(r"`([^`\n]+)`", page))
    schema = ServiceOptions.model_json_schema()
    sections = [schema, *schema["$defs"].values()]
    keys = {key for section in sections for key in section["properties"]}
    assert keys >= {"drain_timeout_seconds", "engine_args", "max_items"}
    assert not sorted(keys - set(re.findall(r"\w+", quoted)))


def test_a_bare_off_in_yaml_is_a_word() -> None:
    assert parse(options("graphs: {mode: off}")).graphs.mode == "off"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[{name: Encoder, num_replicas: 3}, {name: Router, num_replicas: 2}]", None),
        ("[{name: Ingress, max_ongoing_requests: 9}]", None),
        ("[{name: Encoder, num_replicas: auto}]", "'auto': give a number from 1"),
        ("[{name: Encoder, num_replicas: 0}]", "0: give a number from 1"),
        ("[{name: Encoders, num_replicas: 2}]", "there are Encoder, Router, Ingress$"),
        ("[{name: Chat, num_replicas: 2}]", "no deployment is named 'Chat'"),
    ],
)
def test_counts_in_deployments_take_the_place_of_those_in_args(text: str, told: str | None) -> None:
    application = {"deployments": yaml.safe_load(text)}
    given = parse(options("{encoder: {replicas: 5}, router: {policy: random}}"))
    if told:
        with pytest.raises(ConfigError, match=told):
            counted(given, application)
        return
    found = counted(given, application)
    (name, count), *_ = (list(one.values()) for one in application["deployments"])
    assert found.encoder.replicas == (3 if name == "Encoder" else 5)
    assert found.router.replicas == (2 if count == 3 else 1)
    assert (found.router.policy, found.ingress) == ("random", given.ingress)


def test_the_options_are_those_of_ingress_after_its_user_config() -> None:
    given = parse(options("{limits: {max_items: 5, max_pixels: 1000}, router: {replicas: 2}}"))
    live = """[{name: Ingress, num_replicas: 3, user_config: {limits: {max_items: 7},
        router: {policy: random}, auth: {token_sha256: [%s]}, fetch: {allow_hosts: [a.de]},
        logging: {access_log: false}}}, {name: Router, user_config: {router: {coalesce: false}}}]"""
    found = counted(given, {"deployments": yaml.safe_load(live % DIGEST)})
    assert (found.limits.max_items, found.limits.max_pixels) == (7, 1000)
    assert (found.router.policy, found.router.replicas, found.router.coalesce) == (
        "random",
        2,
        True,
    )
    assert (found.auth.token_sha256, found.fetch.allow_hosts) == ((DIGEST.lower(),), ("a.de",))
    assert (found.logging.access_log, found.ingress.replicas) == (False, 3)


@pytest.mark.parametrize(
    ("name", "user_config", "told"),
    [
        (
            "Ingress",
            "{limits: {max_itemz: 3}}",
            r"limits\.max_itemz: not a key that",
        ),
        ("Ingress", "{limits: {max_items: many}}", r"limits\.max_items: .*\(got 'many'\)"),
        ("Ingress", "{limits: {max_body_bytes: 1}}", r"limits\.max_body_bytes: not a key that"),
        ("Ingress", "{limits: {max_response_bytes: 2000000000}, router: 3}", "router: "),
        ("Ingress", "{model: {id: other}}", "Ingress: user_config: model: not a key that can"),
        ("Ingress", "{llm: {replicas: 2}}", "Ingress: user_config: llm: not a key that can"),
        ("Ingress", "3", "user_config is not a mapping"),
        ("Router", "{limits: {max_items: 3}}", r"those are router\.cache_affinity"),
        ("Encoder", "{references: {ttl_seconds: 3}}", "those are none here"),
    ],
)
def test_what_needs_a_restart_is_no_user_config(name: str, user_config: str, told: str) -> None:
    deployment = {"name": name, "user_config": yaml.safe_load(user_config)}
    with pytest.raises(ConfigError, match=told):
        counted(parse(options("llm: null")), {"deployments": [deployment]})


@pytest.mark.parametrize(("name", "section"), [("Encoder", "encoder"), ("Chat", "llm")])
def test_a_count_and_autoscaling_exclude_each_other(name: str, section: str) -> None:
    application = {"deployments": [{"name": name, "num_replicas": 2}]}
    with pytest.raises(ConfigError, match=rf"^{section}\.autoscaling and .* keep one of them"):
        counted(parse(options(f"{section}: {{autoscaling: {{max_replicas: 3}}}}")), application)


def test_resources_of_language_models_follow_autoscaling() -> None:
    given = parse(options("llm: {engine: vllm, autoscaling: {min_replicas: 2, max_replicas: 5}}"))
    assert resources(given)["GPU"] == 1 + 2
    assert resources(given, most=True)["GPU"] == 1 + 5


POOLS = """
encoder:
  num_cpus: 4
  max_stall_seconds: 7
  pools:
    - {name: small, accelerator_type: L4, replicas: 3, graphs: {token_budgets: [64, 256]}}
    - {name: big, num_cpus: 8, resources: {rack: 1}, autoscaling: {max_replicas: 2}}
graphs: {max_frames_per_batch: 0, token_budgets: [64, 1024]}
"""


def test_a_pool_has_what_it_gives_and_else_what_the_sections_say() -> None:
    found = encoders(parse(options(POOLS)))
    assert list(found) == ["Encoder-small", "Encoder-big"]
    small, big = found.values()
    assert (small.encoder.replicas, small.encoder.num_cpus) == (3, 4)
    assert (small.encoder.accelerator_type, big.encoder.accelerator_type) == ("L4", None)
    assert (big.encoder.most_replicas, big.encoder.num_cpus) == (2, 8)
    assert (small.encoder.resources, big.encoder.resources) == ({}, {"rack": 1})
    assert small.encoder.max_stall_seconds == big.encoder.max_stall_seconds == 7
    assert (small.graphs.token_budgets, big.graphs.token_budgets) == ((64, 256), (64, 1024))
    assert small.graphs.max_frames_per_batch == big.graphs.max_frames_per_batch == 0
    assert not small.encoder.pools
    single = parse(options("{}"))
    assert encoders(single) == {"Encoder": single}


def test_a_device_is_that_of_each_pool() -> None:
    """Not that of the section, which would be cuda here."""
    cpu = "device: cpu, num_gpus: 0"
    model = "{id: m, dtype: float32}"
    parse(options(f"{{model: {model}, encoder: {{pools: [{{name: a, {cpu}}}]}}}}"))
    mixed = f"{{model: {model}, encoder: {{pools: [{{name: a, {cpu}}}, {{name: b}}]}}}}"
    with pytest.raises(ConfigError, match=r"pool b: model.dtype is float32"):
        parse(options(mixed))


def test_resources_of_all_pools_are_added_up() -> None:
    given = parse(options(POOLS))
    few = {"GPU": 4, "CPU": 21, "accelerator_type:L4": 0.003, "rack": 1}
    assert resources(given) == few
    assert resources(given, most=True) == few | {"GPU": 5, "CPU": 29, "rack": 2}
    with pytest.raises(ConfigError, match=r"0\.003 accelerator_type:L4 asked for, 0 there"):
        check_resources(given, {"GPU": 4, "CPU": 21, "rack": 1})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[{name: Encoder-small, num_replicas: 5}]", None),
        ("[{name: Encoder, num_replicas: 5}]", "there are Encoder-small, Encoder-big, Router"),
        ("[{name: Encoder-big, num_replicas: 5}]", "deployment Encoder-big are both given"),
    ],
)
def test_each_pool_has_a_count(text: str, told: str | None) -> None:
    application = {"deployments": yaml.safe_load(text)}
    given = parse(options(POOLS))
    if told:
        with pytest.raises(ConfigError, match=told):
            counted(given, application)
        return
    found = encoders(counted(given, application))
    assert [one.encoder.least_replicas for one in found.values()] == [5, 1]


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ("{name: a}, {name: a}", "^encoder: pools: a: give each pool its own name"),
        ("{replicas: 1}", "encoder.pools.0.name"),
        ("{name: L_4}", "encoder.pools.0.name"),
        ("{name: a-}", "encoder.pools.0.name"),
        ("{name: a, transport: nixl}", "encoder.pools.0.transport: no such key; known are acc"),
        ("{name: a, graphs: {mode: off}}", "encoder.pools.0.graphs.mode: no such key; known are"),
        ("{name: a}, {name: b, device: cpu}", "^pool b: encoder: device is cpu: set num_gpus to 0"),
        (
            "{name: a, replicas: 1, autoscaling: {max_replicas: 2}}",
            "^pool a: encoder: replicas and",
        ),
        ("{name: a, resources: {rack: 0}}", "encoder.pools.0.resources.rack"),
    ],
)
def test_pools_that_cannot_be_meant_are_refused(pools: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(options(f"encoder: {{pools: [{pools}]}}"))


@pytest.mark.parametrize(
    "text",
    [
        *(f"{name}: {{num_cpus: %s}}" for name in ("encoder", "router", "ingress", "llm")),
        "encoder: {num_gpus: %s}",
        "encoder: {resources: {rack: %s}}",
        "encoder: {pools: [{name: a, num_gpus: %s}]}",
        "encoder: {pools: [{name: a, num_cpus: %s}]}",
        "encoder: {pools: [{name: a, resources: {rack: %s}}]}",
    ],
)
def test_less_of_a_resource_than_ray_can_reserve_is_refused(text: str) -> None:
    told = r"(num_cpus|num_gpus|rack): 1e-05 is less than Ray can reserve: use at least 0\.0001$"
    with pytest.raises(ConfigError, match=told):
        parse(options(text % "0.00001"))
    parse(options(text % LEAST_RESERVED))


def test_the_least_is_what_ray_takes() -> None:
    ray.remote(num_cpus=LEAST_RESERVED)(object)
    with pytest.raises(ValueError, match="precision"):
        ray.remote(num_cpus=LEAST_RESERVED / 2)(object)


def test_lists_and_digests_are_taken() -> None:
    made = parse(
        options(
            f"graphs: {{token_budgets: [64, 128]}}\n"
            f"auth: {{token_sha256: [{DIGEST}]}}\n"
            f"fetch: {{allow_hosts: [images.example.com]}}"
        )
    )
    assert made.graphs.token_budgets == (64, 128)
    assert made.auth.token_sha256 == (DIGEST.lower(),)
    assert made.fetch.allow_hosts == ("images.example.com",)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("graphs: {mode: on}", "graphs.mode"),
        ("graphs: {token_budgets: [true]}", "graphs.token_budgets.0"),
        ("encoder: {replicas: true}", "encoder.replicas"),
        ("encoder: {replicas: '2'}", "encoder.replicas"),
        ("encoder: {drain_timeout_seconds: .inf}", "encoder.drain_timeout_seconds"),
        ("graphs: {compile: true}", "graphs.compile: no such key"),
        ("preprocess: {device: cuda}", "preprocess.device: no such key"),
        ("{graphs: {blocks: fast}, encoder: {device: cpu, num_gpus: 0}}", "graphs.blocks is fast"),
        ("{graphs: {blocks: compile, mode: off}, model: {id: m, dtype: float32}}", "is compile"),
        ("preprocess: {processes: -1}", "preprocess.processes"),
        ("preprocess: {processes: true}", "preprocess.processes"),
        ("preprocess: {shared_bytes: 1000}", "preprocess.shared_bytes"),
        ("graphs: {blocks: fastest}", "graphs.blocks"),
        ("graphs: {path_streams: true}", "graphs.path_streams: no such key"),
        ("graphs: {steps_per_doubling: 3}", "graphs.steps_per_doubling"),
        ("limits: {timeout_seconds: .nan}", "limits.timeout_seconds"),
        ("encoder: {device: cpu}", "^encoder: device is cpu: set num_gpus to 0"),
        ("encoder: {num_gpus: 0}", "set num_gpus to 1, or device to cpu"),
        ("encoder: {num_gpus: 2}", "encoder.num_gpus"),
        ("encoder: {replicas: 2, autoscaling: {max_replicas: 3}}", "keep one of them"),
        ("encoder: {autoscaling: {min_replicas: 3, max_replicas: 2}}", "min_replicas is more"),
        ("llm: {replicas: 2, autoscaling: {max_replicas: 3}}", "^llm: replicas and auto"),
        ("llm: {autoscaling: {min_replicas: 3, max_replicas: 2}}", "min_replicas is more"),
        ("llm: {autoscaling: {max_replicas: 3, target_patches: 9}}", "no such key; .* target_ongo"),
        (
            "llm: {autoscaling: {max_replicas: 3, target_ongoing_requests: 5}}",
            "is 5, more than the 4 of max_ongoing_requests: lower it",
        ),
        ("encoder: {autoscaling: {}}", "encoder.autoscaling.max_replicas"),
        ("encoder: {autoscaling: {most: 3}}", "no such key; known are downscale_delay_seconds"),
        ("auth: {token_sha256: [abc]}", "auth.token_sha256.0"),
        ("fetch: {allow_hosts: ['https://example.com']}", "fetch.allow_hosts.0"),
        ("fetch: {allow_hosts: ['example.com/images']}", "fetch.allow_hosts.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        parse(options(text))


@pytest.mark.parametrize(
    "text",
    [
        "auth: {token: hunter2}",
        "auth: {token_sha256: [hunter2]}",
        "auth: {token_sha256: hunter2}",
        "auth: hunter2",
        "token: hunter2",
    ],
)
def test_errors_do_not_repeat_secrets(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(options(text))
    assert "hunter2" not in refused.value.message


@pytest.mark.parametrize(("max_bytes", "warned"), [(0, False), (700, False), (701, True)])
def test_a_cache_that_would_make_ray_spill_is_warned_of(
    max_bytes: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"id": "qwen3vl-tiny", "load_format": "dummy"}
    options = parse({"model": model, "encoder": {"replicas": 2}, "cache": {"max_bytes": max_bytes}})
    with caplog.at_level("WARNING", "ray.serve"):
        check_object_store(options, {"object_store_memory": 2000.0})
    assert ("object stores" in caplog.text) == warned
