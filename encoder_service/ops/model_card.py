"""What GET /v1/model tells: the model, what it takes and gives, its budgets and limits."""

from __future__ import annotations

from importlib.metadata import version

from actors.engine.budgets import model_capacity
from actors.spec.model_spec import ModelSpec
from encoder_service import __version__
from encoder_service.api.answer import Json, head
from encoder_service.config import ServiceOptions

DEPENDENCIES = ("ray", "torch", "transformers")


def card(options: ServiceOptions, spec: ModelSpec) -> Json:
    """The document; it does not change while the service runs."""
    holds = model_capacity(options.graphs, spec)
    smallest, largest = spec.sizing.token_range()
    return head(spec) | {
        "revision": spec.revision,
        "dtype": spec.dtype,
        "kinds": list(spec.kinds),
        "width": spec.width,
        "deepstack": spec.deepstack,
        "tokens_per_item": {"smallest_budget": smallest, "largest": largest},
        "graphs": {
            "mode": options.graphs.mode,
            "blocks": options.block_form(fast=spec.fast_blocks),
            "token_budgets": dict(
                zip(spec.paths, (list(budgets) for budgets in holds.budgets), strict=True)
            ),
            "max_vision_items_per_batch": holds.items,
            "max_frames_per_batch": holds.frames,
        },
        "limits": options.limits.model_dump(),
        "fetch_hosts": list(options.fetch.allow_hosts),
        "versions": {"encoder-service": __version__}
        | {name: version(name) for name in DEPENDENCIES},
    }
