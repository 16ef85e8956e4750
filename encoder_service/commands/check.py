"""`encoder-service check CONFIG`: validates a configuration and shows what it would serve.

`serve run` keeps retrying a configuration that cannot work; this reports the error at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.engine.budgets import Capacity
from actors.errors import ConfigError, how_to_install
from actors.families.registry import read
from actors.models.load import check_fp8, family_of
from actors.models.precision import parse_plan
from actors.options import EncoderOptions
from actors.spec.checkpoint import PROCESSOR_FILES
from actors.spec.model_spec import ModelSpec
from actors.store.shared_cache import open_store
from actors.telemetry.tracing import check_tracing
from actors.types import PLURALS, Kind, Size
from encoder_service.api.answer import kwargs_card
from encoder_service.api.auth import digests
from encoder_service.commands import add_command
from encoder_service.config import (
    OPEN_CLUSTER,
    OPEN_FOLDER,
    POOL,
    IngressOptions,
    LlmOptions,
    ServiceOptions,
    check_scaling,
    fitted,
    is_open,
    load_all,
    read_document,
)
from encoder_service.intake.media import longest_seconds
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.spec import LlmSpec

ONLY_AT_START = {
    "proxy_location", "http_options", "grpc_options", "controller_options", "tracing_config",
}  # fmt: skip
"""Keys of a Serve configuration that are ignored while Serve runs."""
VERSIONED = ("import_path", "runtime_env", "args", "autoscaling_policy")
"""Keys of an application whose change restarts all its replicas."""
RESTARTING = {
    "ray_actor_options", "placement_group_bundles", "placement_group_strategy",
    "placement_group_bundle_label_selector", "placement_group_fallback_strategy",
    "max_replicas_per_node", "gang_scheduling_config",
}  # fmt: skip
"""Options in `deployments` whose change restarts the replicas of that deployment."""

NOUN = {"Encoder": "encoder"}
"""What a replica of a deployment is called, if not by the deployment's name."""

LIMITED: dict[str, set[Kind]] = {
    "max_pixels": {"image", "video"},
    "max_image_tokens": {"image"},
    "max_video_frames": {"video"},
    "max_video_pixels": {"video"},
    "max_video_seconds": {"video"},
    "max_video_tokens": {"video"},
    "max_audio_seconds": {"audio"},
}
"""Limits that apply only to items of some kinds."""

SIDES = range(1, 5)
"""Numerators and denominators of the aspect ratios tried to find the image with most tokens."""


def add(subcommands: Any) -> None:
    parser = add_command(
        subcommands, "check", run, "validate a configuration and show what it would serve"
    )
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", help="configuration, such as configs/tiny.yaml"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OLD",
        help="configuration that is being served: show what replacing it with CONFIG would "
        "restart, capture again and lose",
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Prints a table for each of our applications. Raises StartError, naming the offending key."""
    document = read_document(options.config)
    tables, warnings = described(document, options.config)
    if options.against:
        tables = [Table(show_header=False)]
        old = read_document(options.against)
        check_schema(old, str(options.against))
        for kind, what in rollout(old, document):
            tables[0].add_row(kind, escape(what))
        if not tables[0].rows:
            console.print("nothing changes")
    for shown in tables:
        if shown.rows:
            console.print(shown)
    for warning in (*warnings, *exposed()):
        console.print(f"[bold yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    return 0


def described(document: dict[str, Any], path: Path) -> tuple[list[Table], list[str]]:
    """Returns tables of what our applications would serve, and warnings. Raises StartError."""
    tables, warnings = list[Table](), list[str]()
    check_serve(document, str(path))
    services = load_all(path)
    check_ports([one.ingress.grpc_port for one in services], str(path))
    for service in services:
        check_timeouts(document, service.limits.timeout_seconds, str(path))
        spec = read(service.model)
        family_of(spec)
        pools = fitted(service, spec)
        largest, room = next(iter(pools.values()))
        check_scaling(service)
        tables.append(table(spec, pools))
        tables[-1].add_row("listens on", ports(document, service.ingress, str(path)))
        found = [warning for one, _ in pools.values() for warning in missing(one)]
        warnings += [*dict.fromkeys(found), *eager(largest, spec, room)]
        if service.llm:
            check_timeouts(document, service.llm.timeout_seconds, str(path), "llm")
            llm = llm_spec.read(service.llm, service.model, spec)
            tables.append(llm_table(service.llm, llm))
        if spec.dummy:
            warnings.append("dummy weights: the embeddings will be random numbers")
    return tables, warnings


def exposed() -> Iterator[str]:
    """Warns about settings that let other users run code in a cluster started from here."""
    # If it is unset, a cluster that `serve run` starts itself gets a token.
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        yield OPEN_CLUSTER
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    with suppress(OSError):
        if token.stat().st_mode & 0o077:
            yield f"{token}: other users may read Ray's token: chmod 600 it, and set umask 077"
    folder = Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")
    if is_open(folder):
        yield OPEN_FOLDER.format(folder=folder)


def rollout(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What changing a Serve configuration does: pairs of kind and effect; none if nothing changes.

    Compares only the documents, as Ray 2.60 does (`get_app_code_version` and `DeploymentVersion`).
    `args` are compared as written, so that spelling out a default counts as a change.
    """
    found = []
    for key in differences(old, new):
        if (section := key.split(".")[0]) in ONLY_AT_START:
            remedy = "restart Serve, or start a second cluster"
            found.append(("ignored", f"{key}: read only when Serve starts: {remedy}"))
        elif section != "applications":
            found.append(("live", key))
    before, after = named(old, "applications"), named(new, "applications")
    for name in before.keys() - after.keys():
        found.append(("removed", f"application {name}"))
        found += [("lost", losses(before[name], "all", one)) for one in encoders(before[name])]
    found += [("started", f"application {name}") for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        found += rollout_of(before[name], after[name])
    return sorted(found)


def rollout_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for one application."""
    there, restarted = encoders(old), set()
    were, are = deployed(old), deployed(new)
    for name in are - were:
        yield "started", f"deployment {name}"
    for name in were - are:
        yield "removed", f"deployment {name}"
    if changed := differences(versioned(old), versioned(new)):
        restarted = set(there)
        yield "restarts", f"every replica, because of {', '.join(changed)}"
        if counts := [key for key in changed if key.endswith(".replicas")]:
            yield "avoidable", f"{', '.join(counts)}: set num_replicas in `deployments` instead"
    for key in differences(old, new):
        if key.split(".")[0] not in (*VERSIONED, "deployments"):
            yield "live", key
    before, after = named(old, "deployments"), named(new, "deployments")
    for name in (before.keys() | after.keys()) - (were ^ are):
        was, now = before.get(name, {}), after.get(name, {})
        for key in differences(was, now):
            if (option := key.split(".")[0]) in RESTARTING:
                restarted |= {name} & there.keys()
                yield "restarts", f"every {name}, because of deployments.{key}"
            elif option == "num_replicas":
                before_it, after_it = (one.get(option, "default") for one in (was, now))
                yield "live", f"{name}: {option} {before_it} -> {after_it}"
            elif option == "user_config" and now.get(option) is None:
                yield (
                    "ignored",
                    f"{name}: Serve ignores a removed user_config: write `user_config: {{}}`",
                )
            elif option != "name":
                yield "live", f"{name}: {key}"
    for name, (least, most) in there.items():
        if name in restarted:
            if name in are:
                yield "captured again", f"the graphs of every {NOUN.get(name, name)}"
            yield "lost", losses(old, "all", name)
        elif least == most > (left := encoders(new)[name][1]):
            yield "lost", losses(old, f"{most - left} of", name)


def section(parent: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        found = parent.get(key)
        parent = found if isinstance(found, Mapping) else {}
    return parent


def named(parent: Mapping[str, Any], key: str) -> dict[str, Mapping[str, Any]]:
    """The elements of a list by name."""
    return {str(one.get("name")): one for one in parent.get(key) or [] if isinstance(one, Mapping)}


def versioned(application: Mapping[str, Any]) -> dict[str, Any]:
    """What Serve derives the version of all deployments of an application from."""
    found: dict[str, Any] = {key: application.get(key) for key in VERSIONED}
    deployments = application.get("deployments") or []
    for key in ("autoscaling_config", "request_router_config", "deployment_actors"):
        given = [one[key] for one in deployments if one.get(key)]
        if key == "autoscaling_config":
            given = [one.get("policy") for one in given]
        found[f"deployments.{key}"] = given
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ as JSON (1 and 1.0 do): the innermost ones, as dotted paths."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        if written(was) == written(now):
            continue
        inner = []
        if key == "pools":
            was, now = named(old, key), named(new, key)
            inner = [f"{key}.{one}" for one in sorted(was.keys() ^ now.keys())]
            both = was.keys() & now.keys()
            was, now = ({one: each[one] for one in both} for each in (was, now))
        if isinstance(was or {}, Mapping) and isinstance(now or {}, Mapping):
            inner += [f"{key}.{one}" for one in differences(was or {}, now or {})]
        found += inner or [key]
    return found


written = partial(json.dumps, sort_keys=True, default=str)


def encoders(application: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """The minimum and maximum number of replicas of each deployment of encoders. Does not use
    `parse`, which may reject an OLD of another release."""
    encoder = section(application, "args", "encoder")
    pools: dict[str, Mapping[str, Any]] = {
        POOL + name: {**encoder, **one} for name, one in named(encoder, "pools").items()
    }
    counts = {}
    for deployment, own in (pools or {"Encoder": encoder}).items():
        options = named(application, "deployments").get(deployment, {})
        least = most = options.get("num_replicas") or own.get("replicas") or 1
        if scaling := section(own, "autoscaling"):
            least, most = scaling.get("min_replicas", 1), scaling.get("max_replicas")
        found = [one if isinstance(one, int) else 1 for one in (least, most)]
        counts[deployment] = found[0], max(found)
    return counts


def deployed(application: Mapping[str, Any]) -> set[str]:
    """An application's deployments of encoders, and that of its language model."""
    chat = {"Chat"} if section(application, "args", "llm") else set()
    return encoders(application).keys() | chat


def losses(application: Mapping[str, Any], which: str, deployment: str) -> str:
    caches = section(application, "args", "cache").get("max_bytes")
    what = "the ids kept by, and the caches of," if caches else "the ids kept by"
    counts = " to ".join(map(str, sorted({*encoders(application)[deployment]})))
    return f"{what} {which} {counts} {NOUN.get(deployment, deployment)}s"


def missing(service: ServiceOptions) -> Iterator[str]:
    """Warns about packages and files that are missing here, although this need not be a node of the
    cluster; options without effect; and settings that a checkpoint lacks. Raises ConfigError for a
    file that is here but cannot be used."""
    folder = Path(service.model.id)
    if folder.is_dir() and not any((folder / name).is_file() for name in PROCESSOR_FILES):
        yield (
            f"{folder} has no {' or '.join(PROCESSOR_FILES)}: items are preprocessed with the "
            "family's defaults, which may differ from those used in training. Save the processor "
            "too, or copy its files from the original checkpoint"
        )
    if service.encoder.gpu_memory_bytes and service.encoder.device == "cpu":
        yield "encoder.gpu_memory_bytes has no effect: encoder.device is cpu"
    if service.cache.shared:
        try:
            open_store(service.cache.shared)
        except ConfigError as error:
            yield f"{error}; every encoder node needs it"
    try:
        check_tracing(service.tracing)
    except ConfigError as error:
        yield f"{error}; every node needs it"
    if tokens := service.auth.token_sha256_file:
        if os.path.exists(tokens):
            digests(Path(tokens))
        else:
            yield f"auth.token_sha256_file {tokens} is not on this machine; every ingress needs it"
    plan = service.graphs.precision_file
    if plan and not os.path.exists(plan):  # also if its folder may not be entered
        nodes = "every encoder node"
        if service.graphs.precision == "auto":
            nodes += " whose GPU has FP8"
        yield f"graphs.precision_file {plan} is not on this machine; {nodes} needs it"
    elif found := parse_plan(service.graphs):
        check_fp8(read(service.model), torch.device("cpu"), found.layers)
    if service.encoder.transport == "nixl" and find_spec("nixl") is None:
        yield (
            "encoder.transport is nixl, but the package nixl is not installed here; every encoder "
            f"node needs it: {how_to_install('nixl')}"
        )


def eager(service: ServiceOptions, spec: ModelSpec, room: Capacity) -> Iterator[str]:
    """Warns about paths whose graphs are too small for the largest images or an audio window."""
    pixels = service.limits.max_pixels
    sizes = [
        Size(*(max(1, math.isqrt(pixels * a // b)) for a, b in ((across, down), (down, across))))
        for across, down in product(SIDES, SIDES)
    ]
    if audio := spec.audio:
        seconds = min(audio.window_seconds, longest_seconds(spec, service.limits))
        sizes = [Size(round(seconds * audio.rate), 1)]
    most = map(max, zip(*(spec.sizing.plan(size).path_tokens for size in sizes), strict=True))
    for tokens, path, budgets in zip(most, spec.paths, room.budgets, strict=True):
        if budgets and tokens > budgets[-1]:
            named = "" if len(spec.paths) == 1 else f"{path}_"
            yield (
                f"items of up to {tokens} tokens exceed every budget of "
                f"graphs.{named}token_budgets and run without a graph: add a larger budget"
            )


def table(spec: ModelSpec, pools: Mapping[str, tuple[ServiceOptions, Capacity]]) -> Table:
    """`pools`: from `fitted`."""
    service, room = next(iter(pools.values()))
    shown = Table(show_header=False)
    shown.add_row("model", spec.id + (f" at {spec.revision}" if spec.revision else ""))
    shown.add_row("family", f"{spec.family}, {spec.dtype}, {spec.weights} weights")
    taken = [*spec.kinds, "text"] if spec.text else spec.kinds
    shown.add_row("input", " and ".join(PLURALS[kind] for kind in taken))
    shown.add_row("output", f"{'vectors' if spec.vector else 'rows'} of {spec.width} values")
    for name, (one, own) in pools.items():
        if name.startswith(POOL):
            shown.add_section()
            shown.add_row("pool", name.removeprefix(POOL))
        for path, budgets in zip(spec.paths, own.budgets, strict=True):
            shown.add_row(
                f"budgets, {path}", " ".join(map(str, budgets)) or "none (runs without graphs)"
            )
        fp8 = ""
        if one.graphs.precision == "fp8":
            fp8 = ", FP8"
        elif one.graphs.precision == "auto" and one.encoder.device == "cuda":
            fp8 = ", FP8 if the GPU has it"
        shown.add_row("blocks", one.block_form(fast=spec.fast_blocks) + fp8)
        frames = f", {own.frames} video frames" if "video" in spec.kinds else ""
        shown.add_row("pack", f"up to {own.items} items{frames}")
        shown.add_row(
            "encoders", f"{count(one.encoder)}: {each(one.encoder)}", end_section=name != "Encoder"
        )
    shown.add_row("routers", f"{service.router.replicas}: {service.router.policy}")
    shown.add_row("ingresses", f"{service.ingress.replicas}")
    auth = service.auth
    tokens = [f"{len(auth.token_sha256)} in the configuration"] if auth.token_sha256 else []
    tokens += [f"those in {auth.token_sha256_file}"] if auth.token_sha256_file else []
    shown.add_row("bearer tokens", escape(" and ".join(tokens)) or "none (no authentication)")
    cached = (
        f"{service.cache.max_bytes:,} bytes of embeddings" if service.cache.max_bytes else "off"
    )
    shown.add_row("cache per encoder", cached)
    if shared := service.cache.shared:
        kind = shared.url.partition("://")[0]  # what follows may contain a password
        shown.add_row("shared cache", escape(shared.url) if kind == "file" else kind)
    shown.add_row("references per encoder", f"{service.references.max_bytes:,} bytes")
    for name, most in service.limits:
        if LIMITED.get(name, set(spec.kinds)).isdisjoint(spec.kinds):
            continue
        said = "not set" if most is None else f"{most:,}"
        if name == "max_audio_seconds" and (least := longest_seconds(spec, service.limits)) < most:
            said += f", but this model takes {least:g}"
        shown.add_row(f"limits.{name}", said)
    for kind, options in kwargs_card(service, spec, room).items():
        values = [f"{name}: {value(one)}" for name, one in options.items()]
        said = "\n".join(values) or "none"
        shown.add_row(f"options for {PLURALS[kind]}", said)
    return shown


def value(shown: dict[str, float | None]) -> str:
    """The default and the largest value of an option."""
    default, largest = shown["default"], shown["largest"]
    said = "no default" if default is None else f"default {default:,}"
    if default and largest and default > largest:  # a budget or limits.max_image_tokens is smaller
        return f"{said}, at most {largest:,} if given"
    return f"{said}, at most {largest:,}"


def ports(document: dict[str, Any], ingress: IngressOptions, path: str) -> str:
    """Where Serve and the ingresses will listen, defaults included. Raises ConfigError."""
    from ray.serve.schema import HTTPOptionsSchema

    http = HTTPOptionsSchema.model_validate(document.get("http_options", {}))
    if http.port == ingress.grpc_port:
        raise ConfigError(
            f"{path}: http_options.port and ingress.grpc_port are both {http.port}: "
            "they must differ"
        )
    grpc = f"{ingress.grpc_host}:{ingress.grpc_port}" if ingress.grpc_port else "off"
    return f"HTTP {http.host}:{http.port}, gRPC {grpc}"


def each(encoder: EncoderOptions) -> str:
    """The resources of a replica."""
    said = f"{encoder.num_gpus:g} GPU, {encoder.num_cpus:g} CPU each, on {encoder.device}"
    if encoder.accelerator_type:
        said += f" {encoder.accelerator_type}"
    said += "".join(f", {amount:g} {name}" for name, amount in encoder.resources.items())
    if encoder.gpu_memory_bytes:
        said += f", {encoder.gpu_memory_bytes:,} bytes of GPU memory"
    return said


def count(section: EncoderOptions | LlmOptions) -> str:
    if section.autoscaling is None:
        return f"{section.replicas}"
    if isinstance(section, LlmOptions):
        target = f"{section.target_ongoing_requests:g} ongoing requests"
    elif section.autoscaling.target_seconds:
        target = f"{section.autoscaling.target_seconds:g} s of work"
    else:
        target = f"{section.autoscaling.target_patches} outstanding patches"
    return f"{section.least_replicas} to {section.most_replicas}, for {target} each"


def llm_table(llm: LlmOptions, spec: LlmSpec) -> Table:
    shown = Table(show_header=False)
    weights = "dummy: completions will be meaningless" if spec.dummy else "checkpoint"
    shown.add_row("chat model", spec.id + (f" at {spec.revision}" if spec.revision else ""))
    shown.add_row("weights", f"{weights}, {spec.dtype}")
    shown.add_row("context length", f"{spec.max_model_len} tokens (prompt and completion)")
    each = f"{llm.reserved_gpus:g} GPU, {llm.num_cpus:g} CPU each, on {llm.device}"
    shown.add_row("language models", f"{count(llm)}: {llm.engine}, {each}")
    if llm.local_encoder:
        shown.add_row("images of chats", "encoded inside vLLM (llm.local_encoder)")
    return shown


def check_schema(document: dict[str, Any], path: str) -> None:
    """Raises ConfigError if Ray would reject the document."""
    from ray.serve.schema import ServeDeploySchema

    check_keys(document, ServeDeploySchema, path)
    try:
        ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        said = "; ".join(problems).replace("Value error, ", "")  # added by pydantic
        raise ConfigError(f"{path}: {said}") from None
    except (AttributeError, TypeError) as error:  # from Ray's own validators
        raise ConfigError(f"{path}: not a Serve configuration: {error}") from None


def check_serve(document: dict[str, Any], path: str) -> None:
    """Checks what Serve reads itself: keys, types, and that our names can be imported.

    Serve ignores unknown keys. Raises ConfigError.
    """
    # Ray takes seconds to import.
    from ray.serve.schema import (
        DeploymentSchema,
        HTTPOptionsSchema,
        ServeApplicationSchema,
        gRPCOptionsSchema,
    )

    check_schema(document, path)
    http, grpc = document.get("http_options", {}), document.get("grpc_options", {})
    check_keys(http, HTTPOptionsSchema, f"{path}: http_options")
    check_keys(grpc, gRPCOptionsSchema, f"{path}: grpc_options")
    if any("encoder_service." in name for name in grpc.get("grpc_servicer_functions", [])):
        raise ConfigError(
            f"{path}: grpc_options: ingresses serve gRPC themselves: remove this section, and set "
            "ingress.grpc_host and ingress.grpc_port"
        )
    for index, application in enumerate(document["applications"]):
        where = f"{path}: applications[{index}]"
        check_keys(application, ServeApplicationSchema, where)
        for place, options in enumerate(application.get("deployments") or []):
            check_keys(options, DeploymentSchema, f"{where}.deployments[{place}]")
        # Importing code that is not ours may have any effect.
        if application["import_path"].startswith("encoder_service."):
            check_import(application["import_path"].replace(":", "."), f"{where}.import_path")


def check_keys(given: Iterable[str], schema: type[BaseModel], where: str) -> None:
    """Raises ConfigError for a key that Serve would silently ignore."""
    unknown = sorted(str(key) for key in set(given) - schema.model_fields.keys())
    if unknown:
        raise ConfigError(
            f"{where}: {', '.join(unknown)}: Serve knows no such key; there are "
            f"{', '.join(sorted(schema.model_fields))}"
        )


def check_ports(ports: Sequence[int | None], path: str) -> None:
    """Raises ConfigError if two applications would listen on one port: see grpc.claim."""
    for port in filter(None, ports):
        if ports.count(port) > 1:
            raise ConfigError(
                f"{path}: several applications have ingress.grpc_port {port}: give each its own"
            )


def check_timeouts(
    document: dict[str, Any], seconds: float, path: str, own: str = "limits"
) -> None:
    """Raises ConfigError if Serve would abort a request before its own timeout."""
    limit = document.get("http_options", {}).get("request_timeout_s")
    if limit and float(limit) < seconds:
        raise ConfigError(
            f"{path}: {own}.timeout_seconds is {seconds:g}, but Serve times out after "
            f"http_options.request_timeout_s, {limit}: raise that, or lower the limit"
        )


def check_import(name: str, where: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: {name!r} cannot be imported: {error}") from None
