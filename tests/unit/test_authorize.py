"""Bearer tokens: known by their digests alone."""

from __future__ import annotations

import hashlib
from typing import cast

import pytest

from actors.errors import Unauthorized
from actors.options import ModelOptions
from actors.spec import read
from encoder_service.config import AuthOptions, ServiceOptions
from encoder_service.service import Backend, Service

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy")


def service(*tokens: str) -> Service:
    """A front door without a fleet."""
    digests = tuple(hashlib.sha256(token.encode()).hexdigest().upper() for token in tokens)
    options = ServiceOptions(model=MODEL, auth=AuthOptions(token_sha256=digests))
    return Service(options, read(MODEL), cast(Backend, None))


def test_every_token_opens() -> None:
    door = service("one", "two")
    door.authorize("Bearer one")
    door.authorize("bearer two ")
    service().authorize(None)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer three",
        "Basic one",
        "one",
        "Bearer ключ",
        "Bearer \udcff",
        "\xff",
    ],
)
def test_nothing_else_does(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        service("one").authorize(header)
