"""Tool calls: from a request to the chat template, and from a parser to a completion or a stream.

Stand-ins take the place of vLLM's parsers, which tests/engines/test_vllm_chat.py runs.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from actors.errors import ConfigError, InvalidRequest
from actors.families.registry import read
from actors.options import ModelOptions
from encoder_service.config import LlmOptions
from encoder_service.llm import spec as llm_spec
from encoder_service.llm.calls import Finish, Piece, ToolUse
from encoder_service.llm.prompt import load_tokenizer, prompt
from encoder_service.llm.schema import MOST_LEVELS, InvalidKey, parse
from encoder_service.llm.tool_calls import ToolCalls, ToolParsers
from tests.unit.llm.test_chat_service import CALL, HELLO, PATH, Replicas, client, events, nested

TINY = ModelOptions(id="qwen3vl-tiny", load_format="dummy")
FUNCTION = {"name": "f", "description": None, "parameters": {"type": "object"}}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "f"}}
TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }};{% endfor %}\
{%- for message in messages %}{{ message.role }}={{ message.content }}\
{%- for call in message.tool_calls or [] %}\
{{ call.function.name }}{% for key, value in call.function.arguments.items() %}\
({{ key }}:{{ value }}){% endfor %}{% endfor %}\
{%- if message.tool_call_id %}#{{ message.tool_call_id }}{% endif %};{% endfor %}"""


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | function}


def use(**given: Any) -> ToolUse | None:
    return parse(HELLO | given, "vllm").tool_use()


@pytest.mark.parametrize(
    ("given", "choice", "parallel"),
    [
        ({}, "auto", True),
        ({"tool_choice": None, "parallel_tool_calls": None}, "auto", True),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, "auto", False),
        ({"tool_choice": "required"}, "required", True),
        ({"tool_choice": NAMED}, NAMED, True),
    ],
)
def test_tools_and_their_choice(given: dict[str, Any], choice: Any, parallel: bool) -> None:
    assert use(tools=[TOOL], **given) == ToolUse((TOOL,), choice, parallel)


def test_a_template_sees_what_it_sees_in_vllm() -> None:
    found = use(tools=[tool(), tool(strict=True, parameters={"default": None})])
    assert found
    assert [one["function"] for one in found.tools] == [
        {"name": "f", "description": None, "parameters": None},
        {"name": "f", "description": None, "parameters": {"default": None}, "strict": True},
    ]


@pytest.mark.parametrize("tools", [[], [{}], [TOOL], None])
def test_with_none_there_are_no_tools(tools: Any) -> None:
    assert use(tools=tools, tool_choice="none") is None
    assert use() is use(tools=[]) is use(tool_choice="auto") is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tools": [{}]}, r"tools\[0\]\.type: missing; add it; tools\[0\]\.function: missing"),
        ({"tools": [TOOL] * 129}, "tools: wrong value"),
        ({"tools": [tool(name='"')]}, r"tools\[0\]\.function\.name: wrong value"),
        ({"tools": [tool(parameters={"a": nested(MOST_LEVELS)})]}, "at most 48"),
        ({"tools": [tool(parameters={"pattern": "a{600}"})] * 2}, "tools: the counts in its pat"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice: wrong value; [^;]*$"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, r"tool_choice\.function: missing"),
        (
            {"tools": [TOOL], "tool_choice": tool(name="g")},
            "tool_choice: none of the tools has this name",
        ),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
    ],
)
def test_what_is_wrong_with_tools_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidKey, match=words):
        use(**given)


def test_tools_need_a_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_spec, "check_vllm", lambda *_: None)
    refused = client(Replicas(), engine="vllm").post(PATH, json=HELLO | {"tools": [TOOL]})
    assert "set llm.tool_parser, such as to hermes" in refused.json()["error"]["message"]
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    http = client(Replicas(), engine="vllm", tool_parser="hermes")
    huge = HELLO | {"tools": [tool(description="a" * 10**6)]}
    refused = http.post(PATH, json=huge)
    assert "the messages and tools are 1000" in refused.json()["error"]["message"]
    with pytest.raises(ValueError, match="tool_parser: only with engine: vllm"):
        LlmOptions(tool_parser="hermes")


def test_what_a_template_may_show_counts_as_text() -> None:
    result = {"role": "tool", "content": "abc", "tool_call_id": "12"}
    for engine in ("vllm", "transformers"):
        assert parse(HELLO | {"messages": [result] * 3}, engine).characters() == 15


@pytest.mark.parametrize("error", [TypeError("no tokens"), ImportError("needs a package")])
def test_a_parser_that_cannot_work_ends_the_start(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.parser": {"ParserManager": SimpleNamespace(get_parser=refuse)},
        "vllm.tokenizers": {},
        "vllm.tokenizers.hf": {"get_cached_tokenizer": lambda one: one},
        "vllm.tool_parsers": {"ToolParserManager": SimpleNamespace(list_registered=lambda: ["p"])},
    }
    for name, found in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**found))
    with pytest.raises(ConfigError, match=rf"llm\.tool_parser is 'p': {error}"):
        ToolParsers("p", None)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ("{", {}),
        ("[1]", {}),
        ("[" * 10**5, {}),
    ],
)
def test_arguments_are_objects_in_the_template(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]}]
    (message,) = parse(HELLO | {"messages": messages}).messages
    call["function"] = {"name": "f", "arguments": expected}
    assert message.for_template() == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_tools_calls_and_results_are_in_the_prompt() -> None:
    spec = llm_spec.read(LlmOptions(num_gpus=0, device="cpu"), TINY, read(TINY))
    tokenizer = load_tokenizer(TINY)
    tokenizer.chat_template = TEMPLATE
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    request = HELLO | {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": parts},
        ],
    }
    parsed = parse(request, "vllm")
    messages = [message.for_template() for message in parsed.messages]
    tools = parsed.tool_use()
    assert tools
    made = prompt(messages, [], 5, spec, tokenizer, tools.tools)
    expected = "user=hi;assistant=f(a:1);tool=x\ny#1;"
    assert tokenizer.decode(made.ids) == f"{json.dumps(TOOL)};{expected}"
    assert tokenizer.decode(prompt(messages, [], 5, spec, tokenizer).ids) == expected


def part(index: int, name: str | None, arguments: str | None) -> Any:
    """As the parts of vLLM's deltas."""
    function = SimpleNamespace(name=name, arguments=arguments)
    return SimpleNamespace(index=index, id=name and f"id{index}", function=function)


class Parser:
    """Finds two calls, the second one in two deltas."""

    deltas = (
        SimpleNamespace(content="a", tool_calls=[]),
        None,
        SimpleNamespace(content=None, tool_calls=[part(0, "f", None), part(0, None, "{}")]),
        SimpleNamespace(content=None, tool_calls=[part(1, "g", None)]),
        SimpleNamespace(content=None, tool_calls=[part(1, None, "[]")]),
    )

    def __init__(self) -> None:
        self.left = list(self.deltas)

    def parse_delta(self, *_: Any, finished: bool) -> Any:
        delta = self.left.pop(0)
        assert finished == (not self.left)
        return delta

    def parse(self, text: str, *_: Any, model_output_token_ids: list[int], **__: Any) -> Any:
        assert (text, model_output_token_ids) == ("01234", [0, 1, 2, 3, 4])
        names = {"f": None, "g": "own"}
        calls = [SimpleNamespace(id=names[one], name=one, arguments="{}") for one in names]
        return None, "a", calls

    def adjust_request(self, request: Any) -> Any:
        if request.structured_outputs == "wrong":
            raise ValueError("no such grammar")
        return SimpleNamespace(structured_outputs="grammar", skip_special_tokens=False)


def calls(stream: bool, choice: Any = "auto", parallel: bool = True) -> ToolCalls:
    wanted = ToolUse((TOOL,), choice, parallel)
    return ToolCalls(Parser, SimpleNamespace(), wanted, [1], stream)


def found(made: ToolCalls, index: int = 0) -> list[Any]:
    return [made.read(index, str(i), [i], finished=i == 4) for i in range(5)]


def test_a_stream_has_one_part_of_a_call_per_event() -> None:
    made = calls(stream=True)
    first = {"index": 0, "id": "id0", "type": "function"}
    second = {"index": 1, "id": "id1", "type": "function"}
    assert found(made) == [
        ("a", ()),
        ("", ()),
        ("", (first | {"function": {"name": "f", "arguments": "{}"}},)),
        ("", (second | {"function": {"name": "g", "arguments": ""}},)),
        ("", ({"index": 1, "function": {"arguments": "[]"}},)),
    ]
    assert found(made, 1) == found(calls(stream=True))  # each completion has a parser
    once = found(calls(stream=True, parallel=False))
    assert [parts for _, parts in once if parts] == [
        (first | {"function": {"name": "f", "arguments": "{}"}},)
    ]


def test_without_a_stream_calls_come_whole() -> None:
    *nothing, (content, parts) = found(calls(stream=False))
    assert nothing == [("", ())] * 4
    assert content == "a"
    assert [one["function"]["name"] for one in parts] == ["f", "g"]
    assert [one["id"][:5] for one in parts] == ["call_", "own"]
    *_, (_, parts) = found(calls(stream=False, parallel=False))
    assert [one["function"]["name"] for one in parts] == ["f"]


def test_why_a_completion_with_calls_ended() -> None:
    for choice, reason in (("auto", "tool_calls"), ("required", "tool_calls"), (NAMED, "stop")):
        made = calls(stream=False, choice=choice)
        assert made.reason(0, "stop") == "stop"
        found(made)
        assert (made.reason(0, "stop"), made.reason(0, "length")) == (reason, "length")


def test_the_grammar_of_tools_constrains_the_completion() -> None:
    expected = {"structured_outputs": "grammar", "skip_special_tokens": False}
    assert calls(stream=True).constrained(None) == expected
    with pytest.raises(InvalidRequest, match="tools: no such grammar"):
        calls(stream=True).constrained("wrong")


def test_completions_and_streams_have_openai_s_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_spec, "check_vllm", lambda *_: None)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    pieces = (Piece("a"), Piece("", tool_calls=({"index": 0} | call,)))
    done = Finish(("tool_calls",), 5, 2)
    replicas = Replicas((*pieces, done), (pieces[1], done), (*pieces, done))
    http = client(replicas, engine="vllm", tool_parser="hermes")
    request = HELLO | {"tools": [TOOL]}
    for content in ("a", None):
        (choice,) = http.post(PATH, json=request).json()["choices"]
        expected = {"role": "assistant", "content": content, "tool_calls": [call]}
        assert (choice["message"], choice["finish_reason"]) == (expected, "tool_calls")
    streamed = events(http.post(PATH, json=request | {"stream": True}).text)
    assert [event["choices"][0]["delta"] for event in streamed] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"tool_calls": [{"index": 0} | call]},
        {},
    ]
    assert streamed[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert replicas.calls[0].tool_use == ToolUse((TOOL,), "auto", True)
