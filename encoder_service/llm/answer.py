"""What is written back: chat completions, chunks and errors in OpenAI's shape. Pure."""

from __future__ import annotations

import json
from typing import Any

from encoder_service.api.errors import Fault
from encoder_service.llm.spec import LlmSpec
from encoder_service.llm.types import Finish

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"
"""The end of a stream."""


class Answers:
    """The documents of one request."""

    def __init__(self, spec: LlmSpec, request_id: str, created: int) -> None:
        self.head: Json = {
            "id": f"chatcmpl-{request_id}",
            "created": created,
            "model": spec.id,
            "weights": "dummy" if spec.dummy else "checkpoint",
        }

    def completion(self, text: str, finish: Finish) -> Json:
        """The whole answer."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish.reason,
        }
        return self.head | {
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(finish),
        }

    def chunk(self, delta: Json, finish: Finish | None = None) -> bytes:
        """One event of a stream."""
        choice = {
            "index": 0,
            "delta": delta,
            "finish_reason": finish.reason if finish else None,
        }
        return event(self.head | {"object": "chat.completion.chunk", "choices": [choice]})

    def usage_chunk(self, finish: Finish) -> bytes:
        """The event before the end of a stream, if asked for."""
        document = {"object": "chat.completion.chunk", "choices": [], "usage": usage(finish)}
        return event(self.head | document)


def usage(finish: Finish) -> Json:
    """Tokens; those of images and videos count as many as their embeddings have rows."""
    return {
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
    }


def error(problem: Fault, param: str | None = None) -> Json:
    """OpenAI's `message`, `type`, `param` and `code` beside our own `item` and `retryable`."""
    return {"error": problem.document() | {"param": param, "code": problem.row.type}}


def models(spec: LlmSpec) -> Json:
    """The answer to GET /v1/models."""
    entry = {
        "id": spec.id,
        "object": "model",
        "created": 0,
        "owned_by": "encoder-service",
        "max_model_len": spec.max_model_len,
        "weights": "dummy" if spec.dummy else "checkpoint",
    }
    return {"object": "list", "data": [entry]}


def event(document: Json) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"
