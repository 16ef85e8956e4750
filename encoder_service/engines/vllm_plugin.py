"""vLLM's plugin for the place "local": images are preprocessed by our code in vLLM's API process.

That process never loads the connector, but all of vLLM's processes load plugins. This one replaces
vLLM's renderer, which knows the configuration. Unless place is local, it changes nothing else. If
it is, threads also switch more often.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import Any

from encoder_service.engines.vllm import CONNECTOR, place_of

log = logging.getLogger("vllm.encoder_service")  # below vLLM's logger, so that it is shown

RENDERER = ("vllm.renderers.hf", "HfRenderer")

SWITCH_SECONDS = 0.0005
"""How long a thread keeps the GIL while another one waits for it. With Python's 5 ms, tokens
reached clients up to 9 ms late (docs/history/benchmarks.md, "Limits of 1.35 and 1.2")."""

loaded = False
"""Whether vLLM has loaded this plugin in this process."""


def register() -> None:
    """The entry point. May be called several times. Must not raise, because that would end vLLM."""
    global loaded
    loaded = True
    with suppress(ImportError, AttributeError):
        from vllm.renderers.registry import RENDERER_REGISTRY

        # `register` would log a warning in every vLLM that has this package.
        if RENDERER_REGISTRY.renderers.get("hf") == RENDERER:
            RENDERER_REGISTRY.renderers["hf"] = (__name__, "renderer")


def warn_unless_loaded() -> None:
    """Called in the engine's process, where vLLM loads the same plugins as in its API process."""
    if loaded:
        return
    listed = os.environ.get("VLLM_PLUGINS")
    log.warning(
        "vLLM's own code decodes JPEGs and cuts patches, which takes longer, because the plugin "
        "encoder_service is not loaded: %s",
        "install this package with pip"
        if listed is None or "encoder_service" in listed.split(",")
        else f"VLLM_PLUGINS is {listed!r}: add encoder_service to it, or unset it",
    )


def renderer(config: Any, tokenizer: Any) -> Any:
    """vLLM's own renderer. If place is local, our code preprocesses images from now on. Raises what
    place_of and local_options raise; with one API server, before vLLM's engine starts."""
    from vllm.renderers.hf import HfRenderer

    transfer = getattr(config, "ec_transfer_config", None)
    if (
        transfer is None
        or transfer.ec_connector != CONNECTOR["ec_connector"]
        or place_of(transfer) != "local"
    ):
        return HfRenderer(config, tokenizer)
    from encoder_service.engines.vllm_options import local_options

    local_options(config)
    made = HfRenderer(config, tokenizer)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        from encoder_service.engines.vllm_pixels import use

        use(made)
    except Exception as error:
        log.warning("vLLM's own code decodes JPEGs and cuts patches, because: %r", error)
    else:
        log.info("the encoder service's code decodes JPEGs, and its engine cuts patches")
    return made
