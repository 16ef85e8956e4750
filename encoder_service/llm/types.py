"""The nouns of a chat: one type for each stage between the request and the words of its answer.

    ChatRequest -> Call -> Prompt -> Piece, Piece, ..., Finish

Knows nothing of Ray, torch or HTTP; everything here pickles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from actors.errors import ServiceError
from actors.telemetry.request_context import NOBODY, Origin
from actors.types import Media

Message = dict[str, Any]
"""{"role", "content"} as chat templates read it; images and videos of the
content are {"type": "image"} and {"type": "video"}."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, and when there is no next one."""

    max_tokens: int | None = None
    """None: the service's default."""
    temperature: float | None = None
    """0: always the likeliest. None: as the checkpoint's generation_config.json says."""
    top_p: float | None = None
    """None: as the checkpoint's generation_config.json says."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, admitted."""

    messages: tuple[Message, ...]
    media: tuple[Media, ...]
    """Of the images and videos, in the order of the messages."""
    sampling: Sampling
    timeout_seconds: float
    origin: Origin = NOBODY
    """Whose work it is."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    """Those of images and videos included."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that was refused or failed. A value: Serve logs what is raised."""

    error: ServiceError
    item: int | None = None
    """Position of the image or video that caused it; None: the request as a whole."""


Event = Piece | Finish
"""What an answer is made of."""
