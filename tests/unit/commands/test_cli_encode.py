"""`encoder-service encode`: what it shows, what it writes, what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from encoder_service import cli
from encoder_service.client import AsyncClient, Client, Embedding, ServiceError


def fake_answers(self: Client, sources: list[str], **_: Any) -> list[Embedding | ServiceError]:
    """An embedding for all but the files named bad."""
    rows = torch.arange(4, dtype=torch.float32).to(torch.bfloat16)
    data = rows.view(torch.uint8).numpy().tobytes()
    return [
        ServiceError("invalid_request", "items[0] is [bold]no[/] image", item=index)
        if "bad" in source
        else Embedding(
            index, "image", (1, 4, 2), 2, "bfloat16", (2, 2), data, "ab", "graph", 0, "m", "dummy"
        )
        for index, source in enumerate(sources)
    ]


def test_encode_shows_what_it_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "encode", fake_answers)
    cat, bad = tmp_path / "cat.jpg", tmp_path / "bad.jpg"
    cat.touch()
    bad.touch()
    assert cli.main(["encode", str(cat), str(bad)]) == 1
    shown = capsys.readouterr().out
    assert "random numbers" in shown
    assert "[bold]no[/] image" in shown
    assert "1 of 2" in shown
    assert cli.main(["encode", str(cat)]) == 0


@pytest.mark.parametrize("out", [[], ["--out", "out"]])
def test_encode_looks_at_its_paths_before_it_begins(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    out: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["encode", "https://a/b.jpg", "nope.jpg", *out]) == 1
    assert capsys.readouterr().err == "failed: nope.jpg: there is no such file\n"
    assert not list(tmp_path.iterdir())


def test_encode_of_a_folder_needs_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["encode", str(tmp_path)]) == 1
    assert f"{tmp_path} is a folder: --out DIR is needed" in capsys.readouterr().err


def test_encode_writes_what_it_got(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def model(self: AsyncClient) -> dict[str, str]:
        return {"model": "m", "weights": "dummy"}

    async def encode(self: AsyncClient, sources: list[str], dtype: str) -> list[Embedding]:
        (answer,) = fake_answers(Client.__new__(Client), [str(source) for source in sources])
        if isinstance(answer, ServiceError):
            raise answer
        return [answer]

    monkeypatch.setattr(AsyncClient, "model", model)
    monkeypatch.setattr(AsyncClient, "encode", encode)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").touch()
    assert cli.main(["encode", str(tmp_path / "in"), "--out", str(tmp_path / "none")]) == 1
    assert "there is no image and no video" in capsys.readouterr().err
    (tmp_path / "in" / "cat.jpg").write_bytes(b"cat")
    out = tmp_path / "out"
    bad = tmp_path / "bad.jpg"
    bad.touch()
    arguments = ["encode", str(tmp_path / "in"), str(bad), "--out", str(out)]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().out
    assert f"1 encoded, 1 failed: {out / 'manifest.jsonl'}" in shown
    assert f"failed: {bad}: invalid_request: items[0] is [bold]no[/] image" in shown
    assert "random numbers" in shown
    with safe_open(out / "00000.safetensors", "pt") as file:
        expected = torch.tensor([[0, 1], [2, 3]], dtype=torch.bfloat16)
        assert torch.equal(file.get_tensor(str(tmp_path / "in" / "cat.jpg")), expected)
        assert file.metadata()["weights"] == "dummy"
    assert sorted(path.name for path in out.iterdir()) == ["00000.safetensors", "manifest.jsonl"]
    assert cli.main(arguments) == 1
    assert "1 failed (nothing new: 2 were done by earlier runs)" in capsys.readouterr().out
    (tmp_path / "new.jpg").touch()
    longer = [*arguments[:3], str(tmp_path / "new.jpg"), *arguments[3:]]
    assert cli.main(longer) == 1
    assert "2 encoded, 1 failed (2 of them by earlier runs)" in capsys.readouterr().out
    assert cli.main([*arguments, "--dtype", "float32"]) == 1
    assert "use another folder" in capsys.readouterr().err


def test_encode_when_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cat.jpg"
    path.write_bytes(b"x")
    arguments = ["encode", str(path), "--url", "http://127.0.0.1:9", "--timeout", "0.05"]
    assert cli.main(arguments) == 1
    assert "unavailable" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "http://[::1", "http://a:b:c"])
def test_encode_to_an_address_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["encode", "cat.jpg", "--url", url]) == 1
    assert "--url" in capsys.readouterr().err
