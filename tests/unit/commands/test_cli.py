"""The command line: exit codes, the offending key, what is shown. `encode`: test_cli_encode.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import yaml
from ray._common.utils import try_to_create_directory
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema

from actors.spec.checkpoint import Preset
from encoder_service import __version__, cli
from encoder_service.commands import check, simulate
from encoder_service.commands.check import rollout
from encoder_service.commands.simulate import ROWS

CONFIGS = Path(__file__).parents[3] / "configs"


COUNTED = (CONFIGS / "tiny.yaml").read_text().partition("encoder: {")[2]
"""What follows, to the end."""
OLD_GRPC = """grpc_options:
  grpc_servicer_functions:
    - encoder_service.wire.encoder_grpc.add_EncoderServicer_to_server
applications:"""


def changed(tmp_path: Path, old: str, new: str) -> str:
    """tiny.yaml with one change."""
    text = (CONFIGS / "tiny.yaml").read_text()
    assert old in text
    path = tmp_path / "changed.yaml"
    path.write_text(text.replace(old, new))
    return str(path)


def test_check_shows_what_would_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(CONFIGS / "tiny.yaml")]) == 0
    shown = capsys.readouterr().out
    for word in ("qwen3vl-tiny", "64 72 80 88", "largest_first", "random numbers"):
        assert word in shown
    rows = {row[0]: row[1] for row in map(cells, shown.splitlines()) if len(row) == 2}
    assert rows["bearer tokens"] == "none (no authentication)"
    assert rows["listens on"] == "HTTP 127.0.0.1:8000, gRPC 127.0.0.1:9000"
    assert rows["cache per encoder"] == "off"
    assert rows["references per encoder"] == "1,073,741,824 bytes"
    assert rows["limits.max_items"] == "64"
    assert rows["limits.timeout_seconds"] == "60"
    assert rows["options for images"] == "min_pixels: default 4,096, at most 1,048,576"
    assert "max_pixels: default 1,048,576, at most 1,048,576" in shown
    assert rows["options for videos"] == "min_pixels: no default, at most 1,048,576"
    assert "fps: default 2.0, at most 240.0" in shown
    assert "limits.max_video_pixels" in rows
    assert "limits.max_audio_seconds" not in rows


def test_check_shows_what_autoscaling_aims_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = "autoscaling: {max_replicas: 4, target_seconds: 0.5}, num_gpus: 0, device: cpu}"
    assert cli.main(["check", changed(tmp_path, COUNTED, scaling)]) == 0
    assert "1 to 4, for 0.5 s of work each: 0 GPU" in capsys.readouterr().out
    llm = "llm: {autoscaling: {max_replicas: 4}, num_gpus: 0, device: cpu}\n      router: {"
    assert cli.main(["check", changed(tmp_path, "router: {", llm)]) == 0
    assert "1 to 4, for 2 ongoing requests each: transformers" in capsys.readouterr().out


def test_check_shows_the_limits_of_the_models_kind_of_item(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", changed(tmp_path, "id: qwen3vl-tiny", "id: whisper-tiny")]) == 0
    rows = [cells(line) for line in capsys.readouterr().out.splitlines()]
    found = {row[0]: row[1] for row in rows if len(row) == 2}
    assert found["limits.max_audio_seconds"] == "900, but this model takes 30"
    assert not [name for name in found if "pixels" in name or "video" in name or "image" in name]
    assert "video" not in found["pack"]
    assert "options for sounds" in found


def test_check_shows_what_a_change_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = str(CONFIGS / "tiny.yaml")
    for new, words in (
        (old, ["nothing changes"]),
        (changed(tmp_path, "num_replicas: 3", "num_replicas: 2"), ["live", "3 -> 2", "1 of 3"]),
    ):
        assert cli.main(["check", new, "--against", old]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)
    broken = changed(tmp_path, "name: Encoder", "name: Encoders")
    assert cli.main(["check", broken, "--against", old]) == 1
    assert "no deployment is named 'Encoders'" in capsys.readouterr().err
    unknown = changed(tmp_path, "id: qwen3vl-tiny", "id: qwen3vl-tinny")
    assert cli.main(["check", unknown, "--against", old]) == 1, "all that `check` finds"
    odd = tmp_path / "odd.yaml"
    for wrong in ("args: 3", "deployments: [Encoder]"):
        odd.write_text(f"applications: [{{name: a, import_path: x:y, {wrong}}}]")
        assert cli.main(["check", old, "--against", str(odd)]) == 1
    for sparse in (
        "args: {encoder: null, cache: null}",
        "deployments: [{name: Encoder, num_replicas: auto}]",
    ):
        odd.write_text(f"applications: [{{name: a, import_path: x:y, {sparse}}}]")
        assert cli.main(["check", old, "--against", str(odd)]) == 0


OLD = """
http_options: {port: 8000}
applications:
  - name: encoder
    route_prefix: /
    import_path: encoder_service.app:build
    args: {model: {id: m}, encoder: {num_cpus: 4}}
    deployments: [{name: Encoder, num_replicas: 3}, {name: Ingress, num_replicas: 2}]
"""


def test_removing_a_user_config_changes_nothing() -> None:
    with_it = OLD.replace("replicas: 2", "replicas: 2, user_config: {limits: {max_items: 3}}")
    ((kind, what),) = rollout(yaml.safe_load(with_it), yaml.safe_load(OLD))
    assert (kind, what.split(":")[0]) == ("ignored", "Ingress")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", []),
        ("replicas: 3", "replicas: 5", ["live: Encoder: num_replicas 3 -> 5"]),
        (
            "replicas: 3",
            "replicas: 1",
            ["live: Encoder: num_replicas 3 -> 1", "lost: the ids kept by 2 of 3 encoders"],
        ),
        ("replicas: 2", "replicas: 1", ["live: Ingress: num_replicas 2 -> 1"]),
        (
            "replicas: 2",
            "replicas: 2, user_config: {limits: {max_items: 3}}",
            ["live: Ingress: user_config.limits.max_items"],
        ),
        (
            "args: {",
            "args: {cache: {}, ",
            [
                "captured again: the graphs of every encoder",
                "lost: the ids kept by all 3 encoders",
                "restarts: every replica, because of args.cache",
            ],
        ),
        (
            "{num_cpus: 4}",
            "{num_cpus: 4, replicas: 2}",
            [
                "avoidable: args.encoder.replicas: set num_replicas in `deployments` instead",
                "captured again: the graphs of every encoder",
                "lost: the ids kept by all 3 encoders",
                "restarts: every replica, because of args.encoder.replicas",
            ],
        ),
        (
            "{num_cpus: 4}",
            "{num_cpus: 5}, cache: {max_bytes: 9}",
            [
                "captured again: the graphs of every encoder",
                "lost: the ids kept by all 3 encoders",
                "restarts: every replica, because of args.cache.max_bytes, args.encoder.num_cpus",
            ],
        ),
        (
            "name: Encoder, ",
            "name: Encoder, ray_actor_options: {num_gpus: 1}, ",
            [
                "captured again: the graphs of every encoder",
                "lost: the ids kept by all 3 encoders",
                "restarts: every Encoder, because of deployments.ray_actor_options.num_gpus",
            ],
        ),
        (
            "name: Ingress, ",
            "name: Ingress, logging_config: {log_level: DEBUG}, ",
            ["live: Ingress: logging_config.log_level"],
        ),
        (
            "name: Ingress, num_replicas: 2",
            "name: Ingress, autoscaling_config: {policy: {name: p}}",
            [
                "captured again: the graphs of every encoder",
                "live: Ingress: autoscaling_config.policy.name",
                "live: Ingress: num_replicas 2 -> default",
                "lost: the ids kept by all 3 encoders",
                "restarts: every replica, because of deployments.autoscaling_config",
            ],
        ),
        (
            "num_cpus: 4",
            "num_cpus: 4.0",
            [
                "captured again: the graphs of every encoder",
                "lost: the ids kept by all 3 encoders",
                "restarts: every replica, because of args.encoder.num_cpus",
            ],
        ),
        ("prefix: /", "prefix: /v", ["live: route_prefix"]),
        ("port: 8000", "port: 8001", ["ignored: http_options.port"]),
        (
            "name: encoder",
            "name: other",
            [
                "lost: the ids kept by all 3 encoders",
                "removed: application encoder",
                "started: application other",
            ],
        ),
    ],
)
def test_what_a_change_does(old: str, new: str, found: list[str]) -> None:
    assert old in OLD
    before, after = yaml.safe_load(OLD), yaml.safe_load(OLD.replace(old, new, 1))
    shown = rollout(before, after)
    assert [f"{kind}: {what}".split(": read only")[0] for kind, what in shown] == found
    versions = {
        get_app_code_version(ServeApplicationSchema(**one))
        for (one,) in (before["applications"], after["applications"])
    }
    told = any(one.startswith("restarts: every replica") for one in found)
    assert told == (len(versions) == 2), "as Serve itself decides"


POOLS = OLD.replace(
    "{num_cpus: 4}", "{pools: [{name: a, num_cpus: 4}, {name: b, replicas: 2}]}"
).replace("name: Encoder,", "name: Encoder-a,")


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        (
            "replicas: 3",
            "replicas: 1",
            ["live: Encoder-a: num_replicas 3 -> 1", "lost: the ids kept by 2 of 3 Encoder-as"],
        ),
        (
            "name: Encoder-a, ",
            "name: Encoder-a, ray_actor_options: {num_gpus: 1}, ",
            [
                "captured again: the graphs of every Encoder-a",
                "lost: the ids kept by all 3 Encoder-as",
                "restarts: every Encoder-a, because of deployments.ray_actor_options.num_gpus",
            ],
        ),
        (
            "{name: b, replicas: 2}",
            "{name: b, replicas: 3}",
            [
                "avoidable: args.encoder.pools.b.replicas: set num_replicas in `deployments` "
                "instead",
                "captured again: the graphs of every Encoder-a",
                "captured again: the graphs of every Encoder-b",
                "lost: the ids kept by all 2 Encoder-bs",
                "lost: the ids kept by all 3 Encoder-as",
                "restarts: every replica, because of args.encoder.pools.b.replicas",
            ],
        ),
        (
            "{name: a, num_cpus: 4}, {name: b, replicas: 2}",
            "{name: b, replicas: 2}, {name: a, num_cpus: 4}",
            [
                "captured again: the graphs of every Encoder-a",
                "captured again: the graphs of every Encoder-b",
                "lost: the ids kept by all 2 Encoder-bs",
                "lost: the ids kept by all 3 Encoder-as",
                "restarts: every replica, because of args.encoder.pools",
            ],
        ),
        (
            "{name: a, num_cpus: 4}, {name: b, replicas: 2}",
            "{name: b, replicas: 2}, {name: c}",
            [
                "captured again: the graphs of every Encoder-b",
                "lost: the ids kept by all 2 Encoder-bs",
                "lost: the ids kept by all 3 Encoder-as",
                "removed: deployment Encoder-a",
                "restarts: every replica, because of args.encoder.pools.a, args.encoder.pools.c",
                "started: deployment Encoder-c",
            ],
        ),
        (
            "{model: {id: m},",
            "{model: {id: m}, llm: {max_model_len: 9},",
            [
                "captured again: the graphs of every Encoder-a",
                "captured again: the graphs of every Encoder-b",
                "lost: the ids kept by all 2 Encoder-bs",
                "lost: the ids kept by all 3 Encoder-as",
                "restarts: every replica, because of args.llm.max_model_len",
                "started: deployment Chat",
            ],
        ),
    ],
)
def test_what_a_change_of_pools_does(old: str, new: str, found: list[str]) -> None:
    assert POOLS.count(old) == 1
    after = POOLS.replace(old, new)
    if "{name: c}" in new:
        after = after.replace("name: Encoder-a", "name: Encoder-c")
    shown = rollout(yaml.safe_load(POOLS), yaml.safe_load(after))
    assert [f"{kind}: {what}" for kind, what in shown] == found


def test_check_shows_each_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "{name: small, replicas: 2, resources: {rack: 1}, graphs: {token_budgets: [64, 256]}}"
    pooled = changed(tmp_path, "device: cpu", f"device: cpu, pools: [{small}, {{name: big}}]")
    path = Path(pooled)
    path.write_text(path.read_text().replace("name: Encoder,", "name: Encoder-small,"))
    assert cli.main(["check", str(path)]) == 0
    rows = [tuple(cells(line)) for line in capsys.readouterr().out.splitlines() if "│" in line]
    for row in (
        ("pool", "small"),
        ("budgets, default", "64 256"),
        ("encoders", "3: 0 GPU, 0.1 CPU each, on cpu, 1 rack"),
        ("encoders", "1: 0 GPU, 0.1 CPU each, on cpu"),
        ("options for images", "min_pixels: default 4,096, at most 1,048,576"),
    ):
        assert row in rows
    assert cli.main(["bench", "serve", "--config", str(path), "--alone"]) == 1
    assert "without encoder.pools" in capsys.readouterr().err


def test_caches_are_lost_with_their_encoders() -> None:
    one = yaml.safe_load(OLD.replace("{num_cpus: 4}", "{autoscaling: {max_replicas: 4}}"))
    one["applications"][0]["args"]["cache"] = {"max_bytes": 9}
    lost = "the ids kept by, and the caches of, all 1 to 4 encoders"
    assert ("lost", lost) in rollout(one, yaml.safe_load(OLD))


def test_check_follows_the_size_of_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = "images_kwargs: {max_pixels: 262144}, videos_kwargs: {fps: 1}, id: qwen3vl-tiny"
    config = changed(tmp_path, "id: qwen3vl-tiny", kwargs)
    assert cli.main(["check", config]) == 0
    shown = capsys.readouterr().out
    assert "224 240 256 " in shown
    assert "max_pixels: default 262,144, at most 262,144" in shown
    assert "fps: default 1.0, at most 240.0" in shown
    text = (
        Path(config)
        .read_text()
        .replace("router:", "graphs: {token_budgets: [64, 1024]}\n      router:")
    )
    Path(config).write_text(text)
    assert cli.main(["check", config]) == 0
    assert "max_pixels: default 262,144, at most 1,048,576" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("graphs", "says"),
    [
        ("", "max_pixels: default 100,001, at most 100,001"),
        (", token_budgets: [32, 64]", "max_pixels: default 100,001, at most"),
    ],
)
def test_check_of_pixels_that_are_no_whole_number_of_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], graphs: str, says: str
) -> None:
    kwargs = "images_kwargs: {max_pixels: 100001}, id: qwen3vl-tiny"
    config = changed(tmp_path, "id: qwen3vl-tiny", kwargs)
    graphs = f"graphs: {{mode: budget{graphs}}}\n      router:"
    Path(config).write_text(Path(config).read_text().replace("router:", graphs))
    assert cli.main(["check", config]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.parametrize("texts", [False, True])
def test_check_shows_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], texts: bool
) -> None:
    files = Preset("clip-vit-l-336").files
    if texts:
        files["config.json"]["text_config"] = {"max_position_embeddings": 70}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    config = changed(tmp_path, "id: qwen3vl-tiny", f"output: vector, id: {tmp_path}")
    assert cli.main(["check", config]) == 0
    shown = capsys.readouterr().out
    rows = {row[0]: row[1] for row in map(cells, shown.splitlines()) if len(row) == 2}
    assert rows["input"] == ("images and texts" if texts else "images")
    assert rows["output"] == "vectors of 768 values"
    assert rows.get("budgets, text") == ("0 70 140 280 560 1120" if texts else None)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_check_shows_tokens_and_cache_but_no_digest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = "ab" * 32
    change = (
        f"auth: {{token_sha256: ['{digest}']}}\n      cache: {{max_bytes: 1000}}\n      router:"
    )
    assert cli.main(["check", changed(tmp_path, "router:", change)]) == 0
    shown = capsys.readouterr().out
    assert "1 in the configuration" in shown
    assert "1,000 bytes of embeddings" in shown
    assert digest not in shown


def test_check_shows_the_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", str(CONFIGS / "tiny-chat.yaml")]) == 0
    shown = capsys.readouterr().out
    for word in ("chat model", "meaningless", "8192 tokens (prompt and completion)"):
        assert word in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_model_len: 9000", "llm.max_model_len is 9000"),
        ("timeout_seconds: 121", "llm.timeout_seconds is 121"),
        ("maximum: 1", "llm.maximum: no such key; known are accelerator_type"),
        ("model: {id: kimivl-a3b, load_format: dummy}", "does not take embeddings of qwen3_vl"),
    ],
)
def test_check_names_what_is_wrong_with_the_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    text = (CONFIGS / "tiny-chat.yaml").read_text()
    path = tmp_path / "changed.yaml"
    path.write_text(text.replace("llm: {", f"llm: {{{change}, "))
    assert cli.main(["check", str(path)]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("encoder: {", "encoder: {replica: 3, ", "Did you mean replicas?"),
        ("router: {", "router: {precision: auto, ", "Did you mean graphs.precision or"),
        ("model: {", "model: {precision: auto, ", "mean revision or graphs.precision or"),
        ("router: {", "router: {dtype: float32, ", "mean model.dtype or llm.model.dtype?"),
        ("num_replicas", "replicas", "deployments[0]: replicas: Serve knows no such key"),
        ("id: qwen3vl-tiny", "id: ./nowhere", "there is no such folder"),
        ("applications:", OLD_GRPC, "ingresses serve gRPC themselves: remove this section"),
        ("app:build", "app:built", "applications[0].import_path"),
        ("http_options:", "http_option:", "http_option: Serve knows no such key"),
        ("applications:", "application:", "needs `applications:`"),
        ("- {name: Encoder, num_replicas: 3}", "- Encoder", "applications[0].deployments: needs"),
        ("num_replicas: 3", "num_replicas: two", "deployments.0: `num_replicas` must be an int"),
        ("{name: Encoder, num", "{name: [Encoder], num", "applications[0].deployments: needs"),
        ("proxy_location: HeadOnly", "{", "changed.yaml"),
        ("port: 8000", "prt: 8000", "http_options: prt: Serve knows no such key"),
        ("applications:", "grpc_options: {reflect: 1}\napplications:", "grpc_options: reflect: "),
        ("http_options: {", "http_options: [1] #", "http_options: Input should be"),
        ("route_prefix: /", "route_prefx: /", "applications[0]: route_prefx: Serve knows"),
        ("encoder_service.app:build", "os:path", "no application has `import_path"),
        ("id: qwen3vl-tiny", "revision: abc, id: qwen3vl-tiny", "model.revision is 'abc'"),
        ("router: {", "limits: {timeout_seconds: 121}\n      router: {", "request_timeout_s, 120"),
        ("router: {", "router: {max_outstanding_patches: 4095, ", "4096 patches of one largest"),
        ("num_gpus: 0, ", "", "device is cpu: set num_gpus to 0"),
        (
            COUNTED,
            "autoscaling: {max_replicas: 11}, num_gpus: 0, device: cpu}",
            "the ingresses admit",
        ),
        ("port: 8000", "port: 9000", "ingress.grpc_port are both 9000: they must differ"),
        (
            "id: qwen3vl-tiny",
            "images_kwargs: {max_patches: 4}, id: qwen3vl-tiny",
            "model.images_kwargs.max_patches: qwen3vl-tiny (qwen3_vl) does not take it for images",
        ),
        (
            "id: qwen3vl-tiny",
            "videos_kwargs: {frames: 4}, id: qwen3vl-tiny",
            "model.videos_kwargs.frames: no such key; known are fps, max_patches",
        ),
        ("router: {", "auth: {token_sha256: [me]}\n      router: {", "printf %s TOKEN | sha256sum"),
        (
            "router: {",
            "auth: {token_sha256_file: /dev/null}\n      router: {",
            "auth.token_sha256_file: /dev/null has no token",
        ),
        ("num_gpus: 0, ", "num_gpus: 0, resources: {CPU: 1}, ", "encoder: resources: CPU: only"),
        (
            "id: qwen3vl-tiny",
            "output: vector, id: qwen3vl-tiny",
            "model.output is vector, but the family qwen3_vl has no pooled output",
        ),
    ],
)
def test_check_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, message: str
) -> None:
    assert cli.main(["check", changed(tmp_path, old, new)]) == 1
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err + printed.out


def test_check_names_a_tower_that_cannot_be_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Preset("qwen3vl-tiny").files["config.json"]
    config["vision_config"]["num_heads"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["check", changed(tmp_path, "id: qwen3vl-tiny", f"id: {tmp_path}")]) == 1
    assert "vision_config lacks or misstates num_heads: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_gpus: 0, ", "num_gpus: 0, transport: nixl, ", "nixl is not installed here; every"),
        ("num_gpus: 0, ", "num_gpus: 0, gpu_memory_bytes: 9, ", "has no effect: encoder.device is"),
        (
            "router: {",
            "auth: {token_sha256_file: /nowhere}\n      router: {",
            "auth.token_sha256_file /nowhere is not on this machine; every ingress needs it",
        ),
        (
            "router: {",
            "graphs: {token_budgets: [512, 1023]}\n      router: {",
            "items of up to 1024 tokens exceed every budget of graphs.token_budgets and run",
        ),
    ],
)
def test_check_warns_of_what_may_be_meant(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    message: str,
) -> None:
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert cli.main(["check", str(CONFIGS / "tiny.yaml")]) == 0
    assert message not in capsys.readouterr().out
    path = Path(changed(tmp_path, old, new))
    if "cuda" in new:
        path.write_text(path.read_text().replace("num_gpus: 0, num_cpus: 0.1, device: cpu", ""))
    assert cli.main(["check", str(path)]) == 0
    assert message in capsys.readouterr().out


def test_check_warns_of_a_checkpoint_without_its_processor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = Preset("qwen3vl-tiny").files
    (tmp_path / "config.json").write_text(json.dumps(preset["config.json"]))
    path = changed(tmp_path, "id: qwen3vl-tiny", f"id: {tmp_path}")
    assert cli.main(["check", path]) == 0
    assert "has no preprocessor_config.json or processor_config.json" in capsys.readouterr().out
    processor = preset["preprocessor_config.json"]
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    assert cli.main(["check", path]) == 0
    assert "preprocessor_config.json" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0?password=secret", "redis"),
        ("redis://:secret/9@h/0?x=a@b", "redis"),
        ("file:///var/cache/encoder", "file:///var/cache/encoder"),
    ],
)
def test_check_shows_no_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, shown: str
) -> None:
    new = f"cache: {{shared: {{url: '{url}'}}}}\n      router: {{"
    assert cli.main(["check", changed(tmp_path, "router: {", new)]) == 0
    out = capsys.readouterr().out
    rows = {row[0]: row[1] for row in map(cells, out.splitlines()) if len(row) == 2}
    assert rows["shared cache"] == shown
    assert "secret" not in out


def test_check_warns_of_a_cluster_that_others_can_run_code_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "auth_token"
    token.write_text("secret")
    token.chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    tmp_path.chmod(0o700)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for mode, rights, said in (
        ("token", 0o600, None),
        ("disabled", 0o600, "RAY_AUTH_MODE is not token"),
        ("token", 0o644, "other users may read Ray's token"),
    ):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        token.chmod(rights)
        assert cli.main(["check", str(CONFIGS / "tiny.yaml")]) == 0
        shown = capsys.readouterr().out
        assert said in shown if said else "other users" not in shown


def test_check_warns_of_a_folder_of_ray_that_others_may_enter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warned() -> bool:
        assert cli.main(["check", str(CONFIGS / "tiny.yaml")]) == 0
        return f"may enter Ray's folder {home}/ray," in capsys.readouterr().out

    with TemporaryDirectory(dir="/tmp") as home:  # pytest's own keep others out
        monkeypatch.setenv("RAY_TMPDIR", home)
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        assert not warned()
        try_to_create_directory(f"{home}/ray")
        assert not warned(), "the folder above it is for this user only"
        os.chmod(home, 0o711)
        assert warned()
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        assert not warned()


def test_check_looks_at_every_application_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (CONFIGS / "tiny.yaml").read_text()
    head, application = text.split("applications:\n")
    other = "  - {name: other, route_prefix: /other, import_path: somewhere.else:app}\n"
    second = application.replace("name: encoder", "name: second").replace("prefix: /", "prefix: /2")
    path = tmp_path / "several.yaml"
    path.write_text(f"{head}applications:\n{other}{application}{second}")
    assert cli.main(["check", str(path)]) == 1
    assert "several applications have ingress.grpc_port 9000" in capsys.readouterr().err
    second = second.replace("ingress: {", "ingress: {grpc_port: 9001, ")
    path.write_text(f"{head}applications:\n{other}{application}{second}")
    assert cli.main(["check", str(path)]) == 0
    assert capsys.readouterr().out.count("largest_first") == 2
    wrong = second.replace("encoder: {", "encoder: {replica: 3, ")
    path.write_text(f"{head}applications:\n{other}{application}{wrong}")
    assert cli.main(["check", str(path)]) == 1
    assert "applications[2].args: encoder.replica: no such key" in capsys.readouterr().err


def test_check_of_a_file_that_is_no_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9\n")
    assert cli.main(["check", str(tmp_path / "latin.yaml")]) == 1
    assert "latin.yaml" in capsys.readouterr().err


def test_check_of_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "nowhere.yaml"]) == 1
    assert capsys.readouterr().err == "failed: nowhere.yaml: No such file or directory\n"


def test_capture_plan_compares_with_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = tmp_path / "sizes.txt"
    sizes.write_text("336x336 3\n640x480 1\n")
    config = changed(tmp_path, "router: {", "graphs: {token_budgets: [512, 1024]}\n      router: {")
    assert cli.main(["capture-plan", str(sizes), "--config", config]) == 0
    shown = capsys.readouterr().out
    assert "512 1024" in next(line for line in shown.splitlines() if "configured" in line)
    assert "fewer tokens than the configured budgets" in shown


def test_capture_plan_reads_the_status_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "tiny.yaml")
    assert cli.main(["capture-plan", "--from", "grpc://127.0.0.1:9000", "--config", config]) == 1
    assert "over HTTP: give http://HOST:PORT" in capsys.readouterr().err


def test_the_table_of_simulate_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["simulate", "--replicas", "4", "--requests", "16"]) == 0
    shown, told = capsys.readouterr()
    assert told == f"simulating {len(ROWS)} policies on fleets of 4 replicas ...\n"
    (head,) = (line.split() for line in shown.splitlines() if "policy" in line)
    assert " ".join(head) == "replicas policy p50 ms p99 ms imbalance burst ms of optimum"
    assert max(map(len, shown.splitlines())) <= 80


def test_a_command_that_is_interrupted_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "measure", interrupted)
    assert cli.main(["simulate", "--replicas", "1"]) == 130


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bench"],
        ["bench", "serve", "--config", "x", "--mix", "336"],
        ["bench", "serve", "--config", "x", "--policy", "best"],
        ["simulate", "--replicas", "1", "--requests", "1", "--json", "nowhere/x.json"],
        ["simulate", "--replicas", "1", "--requests", "1", "--json", "."],
    ],
)
def test_wrong_command_lines(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(arguments)
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0.7"], "--steady needs --seconds"),
        (["1", "--seconds", "5"], "--steady 1 is not between 0 and 1"),
        (["nan", "--seconds", "5"], "--steady nan is not between 0 and 1"),
    ],
)
def test_a_steady_load_is_a_part_of_what_seconds_have_shown(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(CONFIGS / "tiny.yaml")
    assert cli.main(["bench", "serve", "--config", config, "--steady", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("kind", ["preprocess", "engine"])
def test_a_bench_without_a_gpu_says_what_works(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", kind, "--model", "qwen3vl-tiny"]) == 1
    assert "--device" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"encoder-service {__version__}\n"


def test_every_subcommand_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in cli.COMMANDS)
    wanted = [[command] for command in cli.COMMANDS if command != "bench"]
    wanted += [["bench", kind] for kind in ("serve", "engine", "preprocess", "dataplane")]
    for command in wanted:
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, "--help"])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert " ".join(command) in shown
        assert not re.search(r"default: (None|False|==|\[|\()", shown)
        # Every option says what it is for.
        options = re.findall(r"^  (-.*)$", shown, re.MULTILINE)
        assert options
        assert command[-1] != "engine" or "timed calls (default: 50)" in shown
        bare = [line for line in options if re.fullmatch(r"-\S+( [A-Z{][^ ]*)?", line)]
        following = shown.splitlines()
        for line in bare:
            assert following[following.index(f"  {line}") + 1].startswith("          "), line


@pytest.mark.extended
def test_the_bench_of_the_engine_needs_neither_ray_nor_a_web_server() -> None:
    blocked = "'ray', 'fastapi', 'starlette', 'uvicorn', 'httpx', 'grpc', 'msgpack'"
    program = (
        f"import sys\nfor name in ({blocked}):\n    sys.modules[name] = None\n"
        "from encoder_service import cli\n"
        "sys.exit(cli.main('bench engine --model qwen3vl-tiny --device cpu --workload 64x64 '"
        "'--modes eager --repeats 1'.split()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "64x64" in done.stdout.splitlines()[-3]


@pytest.mark.parametrize(
    "wrong",
    [
        "bench serve --config x --requests 0",
        "bench serve --config x --seconds 0",
        "bench serve --config x --seconds nan",
        "bench serve --config x --concurrency 0",
        "bench serve --config x --callers 0",
        "bench serve --config x --burst -1",
        "bench preprocess --threads 0",
        "bench preprocess --seconds x",
        "proxy --upstream http://x --timeout 0",
        "encode x.jpg --concurrency 0",
        "encode x.jpg --timeout -1",
        "simulate --replicas 0",
        "simulate --load 0",
    ],
)
def test_a_count_or_a_time_of_nothing_is_refused(
    capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(wrong.split())
    assert ended.value.code == 2
    assert f"{wrong.split()[-1]!r} is not a" in capsys.readouterr().err


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "encoder_service", "--version"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (0, f"encoder-service {__version__}\n")
