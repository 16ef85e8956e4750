"""Wires the deployments together. Serve configurations import `encoder_service.app:build`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from actors.autoscaling import OUTSTANDING_SECONDS
from actors.encoder import Encoder
from actors.errors import ConfigError, StartError
from actors.families.registry import read
from actors.options import ActorOptions, DeviceOptions, EncoderAutoscalingOptions, EncoderOptions
from actors.spec.model_spec import ModelSpec
from actors.store.nixl import check_transport
from actors.store.shared_cache import open_store
from actors.telemetry.tracing import LOG, check_tracing
from encoder_service.config import (
    OPEN_CLUSTER,
    OPEN_FOLDER,
    POOL,
    LlmOptions,
    ServiceOptions,
    check_scaling,
    encoders,
    fitted,
    is_open,
    parse,
    resources,
)
from encoder_service.ingress import Ingress
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.chat import Chat
from encoder_service.llm.spec import LlmSpec
from router.router import Router

log = logging.getLogger(LOG)

DUMMY = """
######################################################################
#  {key} is dummy: THE WEIGHTS ARE RANDOM NUMBERS.
#  The {results} mean nothing. Use it for trials and tests only.
######################################################################"""

MOST_CACHED = 0.7
"""Share of the object stores' memory that caches may fill before a warning is logged. The rest is
for embeddings in transit and references."""

ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Environment for one event loop per replica. By default Serve runs three, so that a blocked loop
does not stop the others, but each call then crosses threads twice on its way out and once on its
way in."""

KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}
"""Environment of the ingresses that makes glibc keep large freed blocks. By default it returns them
to the system at once, and faulting them in again takes longer than copying the rows that are
sent. In processes that are not ours, client/transports.py sets the same."""

REPORT_SECONDS = 1.0
"""How often Serve's autoscaler gets the load. Ray 2.60 does not read the environment variables that
its warning names instead."""

UNBOUNDED = 100_000
"""Concurrent calls per encoder, in effect unlimited because the router limits load in patches."""


def build(args: dict[str, Any]) -> serve.Application:
    """Builds the application from the `args` of a configuration.

    Raises RayServeException if they are invalid, because it is the only exception that Serve logs
    without a traceback.
    """
    try:
        options = parse(args)
        cluster = ray.cluster_resources()
        check_resources(options, cluster)
        check_object_store(options, cluster)
        spec = read(options.model)
        # Checked here as well, so that the error is one sentence, not a traceback per replica.
        fitted(options, spec)
        if "replicas" in options.ingress.model_fields_set:  # else `deployments` may set it
            check_scaling(options)
        check_tracing(options.tracing)
        check_transport(options.encoder.transport)
        if options.cache.shared:
            open_store(options.cache.shared)
        llm = llm_spec.read(options.llm, options.model, spec) if options.llm else None
    except StartError as error:
        raise RayServeException(f"{type(error).__name__}: {error}") from None
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":  # Ray's processes inherit it
        log.warning(OPEN_CLUSTER)
    if is_open(folder := ray_folder()):
        log.warning(OPEN_FOLDER.format(folder=folder))
    if spec.dummy:
        log.warning(DUMMY.format(key="model.load_format", results="embeddings"))
    if llm and llm.dummy:
        log.warning(DUMMY.format(key="llm.model.load_format", results="answers"))
    return wire(options, spec, llm)


def wire(options: ServiceOptions, spec: ModelSpec, llm: LlmSpec | None) -> serve.Application:
    """Encoder <- Router <- Ingress, and Router <- Chat <- Ingress if there is a language model.
    With pools, there is one Encoder deployment per pool.

    Changing any option restarts every replica, because Serve derives the version of all deployments
    of an application from its `args`. The `deployments` of a configuration can override the values
    given here, and some options through `user_config`, without a restart. The ingress has a router
    in its own process; the Router deployment is for callers in Ray.
    """
    # Serve's access log would write a line per internal call, and block meanwhile.
    logs = LoggingConfig(encoding=options.logging.format.upper(), enable_access_log=False)
    one_loop = {"env_vars": ONE_LOOP}
    pools = fitted(options, spec)
    # The pool with the largest budgets decides how large an item may be.
    (largest, room), *_ = pools.values()
    pooled = [
        serve.deployment(
            Encoder,
            name=name,
            **replicas(one.encoder),
            ray_actor_options=place(one.encoder) | {"runtime_env": one_loop},
            max_ongoing_requests=UNBOUNDED,
            health_check_period_s=one.encoder.health_check_period_seconds,
            health_check_timeout_s=one.encoder.health_check_timeout_seconds,
            graceful_shutdown_timeout_s=one.encoder.shutdown_seconds,
            request_router_config=RequestRouterConfig(
                request_router_class="router.replicas.pinned:PinnedRequestRouter",
                request_routing_stats_period_s=1.0,
            ),
            logging_config=logs,
        ).bind(
            ActorOptions(
                **{key: getattr(one, key) for key in ActorOptions.model_fields}
                | {"references": options.lasting_references}
            ),
            name.removeprefix(POOL) if options.encoder.pools else "",
            own.tokens if own.tokens < room.tokens else None,
        )
        for name, (one, own) in pools.items()
    ]
    front: dict[str, Any] = {
        "max_ongoing_requests": options.ingress.max_ongoing_requests,
        "graceful_shutdown_timeout_s": options.encoder.drain_timeout_seconds,
        "logging_config": logs,
    }
    router = serve.deployment(
        Router,
        name="Router",
        num_replicas=options.router.replicas,
        ray_actor_options={"num_cpus": options.router.num_cpus, "runtime_env": one_loop},
        **front,
    ).bind(pooled, options.router, spec.fingerprint, options.tracing, options.cache.max_bytes)
    chat = None
    if llm and (own := options.llm):
        chat = serve.deployment(
            Chat,
            name="Chat",
            **replicas(own),
            ray_actor_options=place(own),
            max_ongoing_requests=own.ongoing_requests,
            max_queued_requests=own.max_queued_requests,
            health_check_period_s=own.health_check_period_seconds,
            health_check_timeout_s=own.health_check_timeout_seconds,
            graceful_shutdown_timeout_s=own.drain_timeout_seconds,
            logging_config=logs,
        ).bind(
            own,
            own.model or options.model,
            llm,
            router,
            options.encoder.transport,
            options.references.max_bytes > 0,
            options.model,
            options.preprocess,
        )
    return serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=options.ingress.replicas,
        ray_actor_options={
            "num_cpus": options.ingress.num_cpus,
            "runtime_env": {"env_vars": ONE_LOOP | KEPT_MEMORY},
        },
        **front,
    ).bind(largest, spec, pooled, router, chat, llm)


def ray_folder() -> Path:
    """Ray's temp folder on this node."""
    here = ray.get_runtime_context().get_node_id()
    sockets = {node["NodeID"]: node["RayletSocketName"] for node in ray.nodes()}
    return Path(sockets[here]).parents[2]  # FOLDER/session_*/sockets/raylet


def place(device: DeviceOptions) -> dict[str, Any]:
    """The resources that each replica requests from Ray."""
    given: dict[str, Any] = {"num_gpus": device.reserved_gpus, "num_cpus": device.num_cpus}
    if device.accelerator_type:
        given["accelerator_type"] = device.accelerator_type
    return given | ({"resources": device.resources} if device.resources else {})


def replicas(section: EncoderOptions | LlmOptions) -> dict[str, Any]:
    if section.autoscaling is None:
        return {"num_replicas": section.replicas}
    target: dict[str, Any]
    if isinstance(section, LlmOptions):
        target = {"target_ongoing_requests": section.target_ongoing_requests}
    else:
        target = {"policy": work_policy(section.autoscaling)}
    scaling = section.autoscaling
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            look_back_period_s=scaling.look_back_seconds,
            metrics_interval_s=min(REPORT_SECONDS, scaling.look_back_seconds / 2),
            upscale_delay_s=scaling.upscale_delay_seconds,
            downscale_delay_s=scaling.downscale_delay_seconds,
            **target,
        )
    }


def work_policy(scaling: EncoderAutoscalingOptions) -> AutoscalingPolicy:
    return AutoscalingPolicy(
        policy_function="actors.autoscaling:WorkPolicy",
        policy_kwargs={"target": scaling.target_seconds, "metric": OUTSTANDING_SECONDS}
        if scaling.target_seconds
        else {"target": scaling.target_patches},
    )


def check_object_store(options: ServiceOptions, cluster: Mapping[str, float]) -> None:
    """Warns if full caches would leave too little shared memory for embeddings in transit."""
    most = sum(one.encoder.most_replicas for one in encoders(options).values())
    cached_bytes = options.cache.max_bytes * most
    there = cluster.get("object_store_memory", 0)
    if cached_bytes > MOST_CACHED * there:
        log.warning(
            "cache.max_bytes over all encoders is %d bytes and the object stores of the cluster "
            "have %d: Ray will spill embeddings to disk. Lower it, or give `ray start` more "
            "--object-store-memory",
            cached_bytes,
            there,
        )


def check_resources(options: ServiceOptions, cluster: Mapping[str, float]) -> None:
    """Raises ConfigError if the cluster lacks resources that the replicas request."""
    lacking = [
        f"{count:g} {name} asked for, {cluster.get(name, 0):g} there"
        for name, count in resources(options).items()
        if count > cluster.get(name, 0)
    ]
    if not lacking:
        return
    message = (
        f"the Ray cluster cannot hold this configuration: {'; '.join(lacking)}. "
        "Add nodes, or lower encoder.replicas, encoder.num_gpus and num_cpus; without a GPU take "
        "configs/tiny.yaml, or set encoder.device to cpu and encoder.num_gpus to 0."
    )
    # On Kubernetes nodes may still be added: the autoscaler acts on pending requests.
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        raise ConfigError(message)
    log.warning(message)
