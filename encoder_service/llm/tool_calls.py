"""Tool calls (function calling) with vLLM's parsers, used as vLLM's own chat server uses them.

vLLM makes a grammar of the tools that must be called, in the model's own form of a call. Its parser
finds the calls in the text. Follows vLLM 0.32: vllm/entrypoints/openai/chat_completion/serving.py
and vllm/parser/abstract_parser.py.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from actors.errors import ConfigError, InvalidRequest
from encoder_service.llm.calls import Reason, ToolUse
from encoder_service.wire.formats import Document


class ToolParsers:
    """Makes vLLM's parser named `llm.tool_parser`. Raises ConfigError."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        from vllm.parser import ParserManager
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        if name not in (known := ToolParserManager.list_registered()):
            raise ConfigError(
                f"llm.tool_parser is {name!r}, which vLLM does not know, only {', '.join(known)}"
            )
        self.tokenizer = get_cached_tokenizer(tokenizer)
        try:
            self.parser = ParserManager.get_parser(
                name, enable_auto_tools=True, tokenizer=self.tokenizer
            )
        except (TypeError, ImportError) as error:  # it needs another tokenizer, or a package
            raise ConfigError(f"llm.tool_parser is {name!r}: {error}") from error

    def begin(self, use: ToolUse, prompt: Sequence[int], *, stream: bool) -> ToolCalls:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(
            messages=[],
            tools=list(use.tools),
            tool_choice=use.choice,
            parallel_tool_calls=use.parallel,
        )
        return ToolCalls(
            lambda: self.parser(self.tokenizer, request.tools), request, use, prompt, stream
        )


class ToolCalls:
    """Separates the tool calls of a request's completions from their texts."""

    def __init__(
        self,
        make: Callable[[], Any],
        request: Any,
        use: ToolUse,
        prompt: Sequence[int],
        stream: bool,
    ) -> None:
        """`make`: a new vllm.parser.Parser. `request`: vLLM's ChatCompletionRequest."""
        self.make = make
        self.request = request
        self.use = use
        self.prompt = list(prompt)
        self.stream = stream
        self.parsers: dict[int, Any] = {}
        self.whole: dict[int, tuple[str, list[int]]] = {}
        self.called: set[int] = set()

    def constrained(self, structured_outputs: Any) -> dict[str, Any]:
        """Arguments of vLLM's SamplingParams. `structured_outputs`: those of `response_format`.
        Raises InvalidRequest, or vLLM's errors of clients."""
        self.request.structured_outputs = structured_outputs
        try:
            self.request = self.make().adjust_request(self.request)
        except ValueError as error:
            raise InvalidRequest(f"tools: {error}") from error
        return {
            "structured_outputs": self.request.structured_outputs,
            "skip_special_tokens": self.request.skip_special_tokens,
        }

    def read(
        self, index: int, text: str, tokens: Sequence[int], *, finished: bool
    ) -> tuple[str, tuple[Document, ...]]:
        """Takes the next text of a completion. Returns the next content and parts of calls. If not
        streamed, both come whole at the end."""
        if index not in self.parsers:
            self.parsers[index] = self.make()
        parser = self.parsers[index]
        if self.stream:
            delta = parser.parse_delta(
                text, list(tokens), self.request, self.prompt, finished=finished
            )
            content = delta.content if delta else None
            calls = joined(delta.tool_calls if delta else ())
        else:
            before, earlier = self.whole.get(index, ("", []))
            text, given = before + text, earlier + list(tokens)
            if not finished:
                self.whole[index] = text, given
                return "", ()
            _, content, found = parser.parse(
                text, self.request, enable_auto_tools=True, model_output_token_ids=given
            )
            calls = tuple(whole(place, one) for place, one in enumerate(found or ()))
        if not self.use.parallel:
            calls = tuple(one for one in calls if one["index"] == 0)
        if calls:
            self.called.add(index)
        return content or "", calls

    def reason(self, index: int, reason: Reason) -> Reason:
        """Why a completion has ended. As in OpenAI's API, a call of a named function is no reason,
        and what the end of the completion cuts off is not complete."""
        called = index in self.called and isinstance(self.use.choice, str)
        return "tool_calls" if called and reason == "stop" else reason


def whole(index: int, call: Any) -> Document:
    return {
        "index": index,
        "id": call.id or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def joined(deltas: Iterable[Any]) -> tuple[Document, ...]:
    """One part for each call, always with arguments: clients add them up, and OpenAI's takes only
    one part of a call per event."""
    found: dict[int, Document] = {}
    for one in deltas:
        part = found.setdefault(one.index, {"index": one.index, "function": {"arguments": ""}})
        if one.id:
            part |= {"id": one.id, "type": "function"}
        if one.function and one.function.name:
            part["function"]["name"] = one.function.name
        if one.function and one.function.arguments:
            part["function"]["arguments"] += one.function.arguments
    return tuple(found.values())
