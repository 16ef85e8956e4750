"""The connector's options for the place "local", and the settings of vLLM that it needs.

Checked in vLLM's API process, so that it ends at once and says why, and again in its engine's
process, because vLLM may run without our plugin.
"""

from __future__ import annotations

from typing import Any

from actors.errors import ConfigError
from actors.options import validated
from encoder_service.config import LocalEncoderOptions
from encoder_service.engines.vllm_rows import check_multimodal


class LocalOptions(LocalEncoderOptions):
    """`ec_connector_extra_config`."""

    place: str = "local"


def local_options(vllm_config: Any) -> LocalOptions:
    """Raises ConfigError for wrong options, and ValueError for vLLM's settings that cannot work."""
    from vllm.v1.core.sched.scheduler import Scheduler

    steps = vllm_config.scheduler_config
    try:
        options = validated(LocalOptions, vllm_config.ec_transfer_config.ec_connector_extra_config)
        tokens = options.decode_step_tokens
        if tokens and not steps.max_num_seqs <= tokens <= steps.max_num_batched_tokens:
            raise ConfigError(
                f"decode_step_tokens is {tokens}, but must be from {steps.max_num_seqs} "
                f"(--max-num-seqs) to {steps.max_num_batched_tokens} (--max-num-batched-tokens)"
            )
    except ConfigError as error:
        raise ConfigError(f"ec_connector_extra_config: {error}") from None
    cards = vllm_config.parallel_config.world_size_across_dp
    if cards > 1:
        raise ValueError(
            f"place is local, which is for one GPU, not {cards}: leave out the options "
            "--*-parallel-size, or use an encoder service (url)"
        )
    scheduler = steps.get_scheduler_cls()
    if not issubclass(scheduler, Scheduler):
        raise ValueError(
            f"--scheduler-cls is {scheduler.__qualname__}, but place is local, so it must be "
            "derived from vLLM's Scheduler"
        )
    check_multimodal(vllm_config)
    return options
