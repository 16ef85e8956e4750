"""Bearer tokens: known by their digests alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from unittest.mock import Mock

import pytest
from starlette.testclient import TestClient

from actors.errors import ConfigError, Unauthorized
from actors.families.registry import read
from actors.options import ModelOptions
from encoder_service.api import auth
from encoder_service.api.auth import Tokens
from encoder_service.api.http import build
from encoder_service.config import AuthOptions, ServiceOptions
from encoder_service.service import Service
from tests.unit.front_door import Fleet

MODEL = ModelOptions(id="qwen3vl-tiny", load_format="dummy")


def service(*tokens: str) -> Service:
    """A front door to nobody."""
    digests = tuple(hashlib.sha256(token.encode()).hexdigest().upper() for token in tokens)
    options = ServiceOptions(model=MODEL, auth=AuthOptions(token_sha256=digests))
    return Service(options, read(MODEL), Fleet())


def test_every_token_opens() -> None:
    door = service("one", "two")
    door.authorize("Bearer one")
    door.authorize("bearer two ")
    service().authorize()


@pytest.mark.parametrize(
    "header",
    [
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
def test_nothing_else_does(header: str) -> None:
    with pytest.raises(Unauthorized):
        service("one").authorize(header)


@pytest.mark.parametrize("second", ["Bearer one", "Bearer two", ""])
def test_two_headers_are_refused_whichever_is_right(second: str) -> None:
    http = TestClient(build(service("one")))
    for values in (["Bearer one", second], [second, "Bearer one"]):
        answer = http.get("/v1/model", headers=[("authorization", one) for one in values])
        assert answer.status_code == 401
        assert "2 `Authorization` headers: send one" in answer.json()["error"]["message"]
    assert http.get("/v1/model", headers={"authorization": "Bearer one"}).status_code == 200


def test_no_token_and_another_are_told_apart() -> None:
    for given in ((), ("Bearer ",), ("Basic one",)):
        with pytest.raises(Unauthorized, match="requires a token"):
            service("one").authorize(*given)
    with pytest.raises(Unauthorized, match="is unknown to this service"):
        service("one").authorize("Bearer two")


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def test_a_file_of_tokens_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token_sha256"
    file.write_text(f"# ours\n{digest('one')}\n\n")
    tokens = Tokens(AuthOptions(token_sha256=(digest("zero"),), token_sha256_file=str(file)))
    tokens.authorize("Bearer zero")
    tokens.authorize("Bearer one")
    file.write_text(f"{digest('two').upper()}\n{digest('three')}\n")
    for good in ("zero", "two", "three"):
        tokens.authorize(f"Bearer {good}")
    with pytest.raises(Unauthorized):
        tokens.authorize("Bearer one")
    # What cannot be meant changes nothing, and lets nobody in.
    for bad in ("", "two\n"):
        file.write_text(bad)
        tokens.authorize("Bearer two")
        with pytest.raises(Unauthorized):
            tokens.authorize("Bearer one")
    file.unlink()
    tokens.authorize("Bearer two")
    with pytest.raises(Unauthorized):
        tokens.authorize()


def test_a_file_of_tokens_is_read_again_once_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token_sha256"
    file.write_text(digest("one"))
    tokens = Tokens(AuthOptions(token_sha256_file=str(file)))
    with monkeypatch.context() as patched:  # root may read every file
        patched.setattr(auth, "digests", Mock(side_effect=ConfigError("cannot be read")))
        file.write_text(digest("three") + "\n")
        for _ in range(3):
            tokens.authorize("Bearer one")
    kept = "the tokens stay as they were"
    assert caplog.text.count(kept) == 1
    tokens.authorize("Bearer three")
    for losses in (2, 3):  # lost, and lost again after it was there
        file.unlink()
        for _ in range(2):
            tokens.authorize("Bearer three")
        assert caplog.text.count(kept) == losses
        file.write_text(digest("three") + "\n")
        tokens.authorize("Bearer three")
    for losses in (4, 5):  # the same file, moved away and back
        file.rename(tmp_path / "away")
        tokens.authorize("Bearer three")
        assert caplog.text.count(kept) == losses
        (tmp_path / "away").rename(file)
        tokens.authorize("Bearer three")


@pytest.mark.parametrize("content", [None, "", "# none\n", "hunter2\n", f"{'0' * 63}\n"])
def test_a_service_without_its_tokens_does_not_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token_sha256"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="token_sha256_file") as refused:
        Tokens(AuthOptions(token_sha256_file=str(file)))
    assert "hunter2" not in refused.value.message


@pytest.mark.parametrize("tokens", [(), ("one",)])
def test_the_documentation_says_where_a_token_is_asked_for(tokens: tuple[str, ...]) -> None:
    http = TestClient(build(service(*tokens)))
    document = http.get("/openapi.json").json()
    assert document.get("security", []) == ([{"bearer": []}] if tokens else [])
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/model"]["get"]
    assert http.get("/healthz").status_code == 200
    assert http.get("/v1/model").status_code == (401 if tokens else 200)


def test_a_method_that_is_not_taken_is_told_all_that_are() -> None:
    http = TestClient(build(service()))
    answer = http.put("/v1/embeddings/a")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
    mounted = http.post("/static-offline-docs/x")
    assert mounted.status_code == 405
    assert "this path takes" not in mounted.text


def test_only_paths_of_chats_are_told_to_lack_a_language_model() -> None:
    http = TestClient(build(service()))
    for path in ("/v1/models", "/v1/models/m", "/v1/chat/completions"):
        assert "has no language model" in http.get(path).text
    for path in ("/v1/modelsx", "/v1/chat/completionsx"):
        assert "no such path" in http.get(path).text
