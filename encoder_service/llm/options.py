"""What the language model's deployment can be told: the section `llm` of the configuration."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from actors.options import DeviceOptions, ModelOptions


class LlmOptions(DeviceOptions):
    """Scales apart from the encoders. A replica generates one answer at a time."""

    model: ModelOptions | None = None
    """None: the service's own `model`. Its language model alone is loaded, never its tower."""
    max_ongoing_requests: PositiveInt = 4
    """Of one replica: one generates, the others are tokenised, encoded, and wait for their turn."""
    max_queued_requests: PositiveInt = 64
    """That one ingress holds for replicas which are full; beyond it Overloaded."""
    max_model_len: PositiveInt | None = None
    """Tokens of prompt and answer together, whatever a request's `max_tokens`. None: as many as the
    model was made for."""
    default_max_tokens: PositiveInt = 512
    """Of an answer, where the request names no `max_tokens`."""
    timeout_seconds: PositiveFloat = 120
    """Of a request, from its body to its last token."""
