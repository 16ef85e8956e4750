"""All the wiring, on one page. A Serve configuration names it: `encoder_service.app:build`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from actors.encoder import Encoder
from actors.errors import ConfigError, StartError
from actors.families.registry import read
from actors.options import ActorOptions, EncoderOptions
from actors.spec.model_spec import ModelSpec
from actors.store.nixl import check_transport
from actors.telemetry.tracing import check_tracing
from encoder_service.config import ServiceOptions, fit, parse, resources
from encoder_service.ingress import Ingress
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.chat import Chat
from encoder_service.llm.spec import LlmSpec
from router.router import Router

log = logging.getLogger("ray.serve")

DUMMY = """
######################################################################
#  model.load_format is dummy: THE WEIGHTS ARE RANDOM NUMBERS.       #
#  The embeddings mean nothing. Good for trying out and for tests.   #
######################################################################"""

DUMMY_LLM = """
######################################################################
#  The language model's load_format is dummy: ITS WEIGHTS ARE RANDOM #
#  NUMBERS. What it writes means nothing. Good for tests.            #
######################################################################"""


MOST_CACHED = 0.7
"""Of the object stores' memory; the rest is for what is on its way and for references."""

ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""A replica's own event loop calls and is called: by default Serve has three, in case that one is
blocked, and hands each call from thread to thread twice on its way out and once on its way in."""

ENDLESS = 100_000
"""Calls that an encoder takes at a time: the router bounds its load, in patches, not in calls."""


def build(args: dict[str, Any]) -> serve.Application:
    """The application, from `args` of the configuration. What is wrong with them is one sentence.

    Raises RayServeException, the only one that Serve reports without a traceback.
    """
    try:
        options = parse(args)
        check_resources(options, ray.cluster_resources())
        check_object_store(options, ray.cluster_resources())
        spec = read(options.model)
        # Here as a sentence, not as a traceback in every replica.
        fit(options, spec)
        check_tracing(options.tracing)
        check_transport(options.encoder.transport)
        llm = llm_spec.read(options.llm, options.model, spec) if options.llm else None
    except StartError as error:
        raise RayServeException(f"{type(error).__name__}: {error}") from None
    if spec.dummy:
        log.warning(DUMMY)
    if llm and llm.dummy:
        log.warning(DUMMY_LLM)
    return wire(options, spec, llm)


def wire(options: ServiceOptions, spec: ModelSpec, llm: LlmSpec | None) -> serve.Application:
    """Encoder <- Router <- Ingress, and Router <- Chat <- Ingress if there is a language model.

    Each gets what it reads alone: Serve restarts what changed. The ingress routes in its own
    process; the Router deployment is the same for callers in Ray.
    """
    # Serve's access log would write a line of every inner call, and wait for it.
    logs = LoggingConfig(encoding=options.logging.format.upper(), enable_access_log=False)
    actor = ActorOptions(**{name: getattr(options, name) for name in ActorOptions.model_fields})
    encoder = serve.deployment(
        Encoder,
        name="Encoder",
        **replicas(options.encoder),
        ray_actor_options={
            "num_gpus": options.encoder.num_gpus,
            "num_cpus": options.encoder.num_cpus,
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        max_ongoing_requests=ENDLESS,
        health_check_period_s=options.encoder.health_check_period_seconds,
        health_check_timeout_s=options.encoder.health_check_timeout_seconds,
        graceful_shutdown_timeout_s=options.encoder.drain_timeout_seconds,
        request_router_config=RequestRouterConfig(
            request_router_class="router.replicas.pinned:PinnedRequestRouter",
            request_routing_stats_period_s=1.0,
        ),
        logging_config=logs,
    ).bind(actor)
    router = serve.deployment(
        Router,
        name="Router",
        num_replicas=options.router.replicas,
        ray_actor_options={
            "num_cpus": options.router.num_cpus,
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        max_ongoing_requests=options.ingress.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.encoder.drain_timeout_seconds,
        logging_config=logs,
    ).bind(
        encoder,
        options.router,
        spec.fingerprint,
        options.tracing,
        options.cache.max_bytes,
        options.metrics,
    )
    chat = wire_chat(options, llm, router, logs) if llm else None
    return serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=options.ingress.replicas,
        ray_actor_options={
            "num_cpus": options.ingress.num_cpus,
            "runtime_env": {"env_vars": ONE_LOOP},
        },
        max_ongoing_requests=options.ingress.max_ongoing_requests,
        graceful_shutdown_timeout_s=options.encoder.drain_timeout_seconds,
        logging_config=logs,
    ).bind(options, spec, encoder, router, chat, llm)


def wire_chat(
    options: ServiceOptions, spec: LlmSpec, router: serve.Application, logs: LoggingConfig
) -> serve.Application:
    """The language model's deployment."""
    llm = options.llm
    assert llm is not None, "a language model that is not configured. This is a bug."
    return serve.deployment(
        Chat,
        name="Chat",
        num_replicas=llm.replicas,
        ray_actor_options={"num_gpus": llm.num_gpus, "num_cpus": llm.num_cpus},
        max_ongoing_requests=llm.max_ongoing_requests,
        max_queued_requests=llm.max_queued_requests,
        health_check_period_s=llm.health_check_period_seconds,
        health_check_timeout_s=llm.health_check_timeout_seconds,
        graceful_shutdown_timeout_s=llm.drain_timeout_seconds,
        logging_config=logs,
    ).bind(llm, llm.model or options.model, spec, router, options.encoder.transport)


def replicas(encoder: EncoderOptions) -> dict[str, Any]:
    """How many encoders, in Serve's words."""
    if (scaling := encoder.autoscaling) is None:
        return {"num_replicas": encoder.replicas}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            look_back_period_s=scaling.look_back_seconds,
            upscale_delay_s=scaling.upscale_delay_seconds,
            downscale_delay_s=scaling.downscale_delay_seconds,
            policy=AutoscalingPolicy(
                policy_function="actors.autoscaling:PatchPolicy",
                policy_kwargs={"target_patches": scaling.target_patches},
            ),
        )
    }


def check_object_store(options: ServiceOptions, cluster: Mapping[str, float]) -> None:
    """Warns where full caches would leave embeddings on their way too little shared memory."""
    cached_bytes = options.cache.max_bytes * options.encoder.most_replicas
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
    """Whether the cluster has what the replicas ask for. Raises ConfigError."""
    needed = resources(options, options.encoder.least_replicas)
    lacking = [
        f"{count:g} {name} asked for, {cluster.get(name, 0):g} there"
        for name, count in needed.items()
        if count > cluster.get(name, 0)
    ]
    if not lacking:
        return
    message = (
        f"the Ray cluster cannot hold this configuration: {'; '.join(lacking)}. "
        "Add nodes, or lower encoder.replicas, encoder.num_gpus and num_cpus; without a GPU take "
        "configs/tiny.yaml, or set encoder.device to cpu and encoder.num_gpus to 0."
    )
    # There nodes may still come up: the autoscaler answers to what is pending.
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        log.warning(message)
        return
    raise ConfigError(message)
