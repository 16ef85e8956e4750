"""Chat requests as a client sends them, and the effects that can be seen in a service."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

from tests.images import jpeg

PATH = "/v1/chat/completions"
MODEL = "qwen3vl-tiny"
LONG = 4000
"""Tokens of an answer that takes seconds: the preset's model never stops by itself."""


def data_url(data: bytes) -> str:
    return "data:image/jpeg;base64," + b64encode(data).decode()


def asked(*images: bytes, text: str = "What is it?", **options: Any) -> dict[str, Any]:
    """A greedy request with images before its text."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": data_url(image)}} for image in images
    ]
    content = [*parts, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0} | options


@contextmanager
def begun(http: httpx.Client) -> Iterator[Iterator[str]]:
    """Starts a long answer; yields its remaining lines once its first text has come."""
    request = asked(jpeg(64, 64), max_tokens=LONG, stream=True)
    with http.stream("POST", PATH, json=request) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def text_of(http: httpx.Client, request: dict[str, Any]) -> str:
    answer = http.post(PATH, json=request)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def read_events(body: str) -> list[dict[str, Any]]:
    """The events of a stream that has come to its end."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def count(http: httpx.Client, name: str, **labels: str) -> float:
    """Sum over all replicas."""
    page = http.get("/metrics").text
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def actors(deployment: str, application: str = "chat") -> list[Any]:
    """The actors of a deployment's replicas."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [one["name"] for one in named if f"{application}#{deployment}#" in one["name"]]
    return [ray.get_actor(name, namespace="serve") for name in names]
