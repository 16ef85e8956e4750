"""`encoder-service encode`: what it shows, what it writes, what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI, Request, Response
from safetensors import safe_open

from encoder_service import cli
from encoder_service.client import AsyncClient, Embedding, ServiceError
from encoder_service.client.dataset import FACTS
from encoder_service.wire.documents import parse_request
from encoder_service.wire.formats import SAFETENSORS, write_safetensors
from tests.unit.proxied import in_a_thread
from tests.waiting import until


def fake_answers(sources: list[str]) -> list[Embedding | ServiceError]:
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


def test_encode_looks_at_its_paths_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["encode", "https://a/b.jpg", "nope.jpg", "--out", "out"]) == 1
    assert capsys.readouterr().err == "failed: nope.jpg: there is no such file\n"
    assert cli.main(["encode", "", "--out", "out"]) == 1, "not all of the current folder"
    assert capsys.readouterr().err == "failed: '': there is no such file\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["http://x/y.jpg", "s3://x/y.jpg"])
def test_encode_takes_no_other_urls(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["encode", url, "--out", str(tmp_path / "out")]) == 1
    assert (
        capsys.readouterr().err
        == f"failed: {url}: only https URLs are accepted (the service's own goes into --url)\n"
    )


def test_encode_takes_fps_or_a_number_of_frames(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["encode", "a.mp4", "--out", "out", "--fps", "2", "--num-frames", "3"])
    assert "argument --num-frames: not allowed with argument --fps" in capsys.readouterr().err


@pytest.mark.usefixtures("service")
def test_encode_blames_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photo.jpg").touch()
    assert cli.main(["encode", "photo.jpg", "./photo.jpg", "--out", "out"]) == 1
    assert capsys.readouterr().err == "failed: photo.jpg is given twice\n"
    assert cli.main(["encode", "photo.jpg", "--out", "photo.jpg"]) == 1
    shown = "failed: photo.jpg is a file or is below one: use another folder\n"
    assert capsys.readouterr().err == shown


def test_encode_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["encode", str(tmp_path)])
    assert "--out" in capsys.readouterr().err


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers as `fake_answers` does."""

    async def model(self: AsyncClient) -> dict[str, str]:
        return {"model": "m", "weights": "dummy"}

    async def encode(
        self: AsyncClient, sources: list[str], dtype: str, **options: float
    ) -> list[Embedding]:
        assert options == ({"max_pixels": 65536, "fps": 0.5} if "asked" in str(sources) else {})
        (answer,) = fake_answers([str(source) for source in sources])
        if isinstance(answer, ServiceError):
            raise answer
        return [answer]

    monkeypatch.setattr(AsyncClient, "model", model)
    monkeypatch.setattr(AsyncClient, "encode", encode)


@pytest.mark.usefixtures("service")
def test_encode_writes_what_it_got(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").touch()
    assert cli.main(["encode", str(tmp_path / "in"), "--out", str(tmp_path / "none")]) == 1
    errors = capsys.readouterr().err
    assert "no file has a name that the model takes" in errors
    assert f"; 1 skipped ({tmp_path / 'none' / 'skipped.txt'})" in errors
    (tmp_path / "in" / "cat.jpg").write_bytes(b"cat")
    out = tmp_path / "out"
    skipped = f"; 1 skipped ({out / 'skipped.txt'})"
    bad = tmp_path / "bad.jpg"
    bad.touch()
    arguments = ["encode", str(tmp_path / "in"), str(bad), "--out", str(out)]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().out
    assert f"1 encoded, 1 failed{skipped}: {out / 'manifest.jsonl'}" in shown
    assert f"failed: {bad}: invalid_request: items[0] is [bold]no[/] image" in shown
    assert "random numbers" in shown
    with safe_open(out / "00000.safetensors", "pt") as file:
        expected = torch.tensor([[0, 1], [2, 3]], dtype=torch.bfloat16)
        assert torch.equal(file.get_tensor(str(tmp_path / "in" / "cat.jpg")), expected)
        assert file.metadata()["weights"] == "dummy"
    written = ["00000.safetensors", "manifest.jsonl", "skipped.txt"]
    assert sorted(path.name for path in out.iterdir()) == written
    assert cli.main(arguments) == 1
    shown = capsys.readouterr().out
    assert f"1 failed (nothing new: 2 from earlier runs){skipped}: " in shown
    (tmp_path / "new.jpg").touch()
    longer = [*arguments[:3], str(tmp_path / "new.jpg"), *arguments[3:]]
    assert cli.main(longer) == 1
    assert "2 encoded, 1 failed (2 of them from earlier runs)" in capsys.readouterr().out
    assert cli.main([*arguments, "--dtype", "float32"]) == 1
    assert "use another folder" in capsys.readouterr().err


@pytest.mark.usefixtures("service")
def test_encode_says_how_items_are_sized(tmp_path: Path) -> None:
    (tmp_path / "asked.jpg").touch()
    arguments = ["encode", str(tmp_path / "asked.jpg"), "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--max-pixels", "65536", "--fps", "0.5"]) == 0


@pytest.mark.usefixtures("service")
def test_encode_shows_names_that_are_not_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, out = (tmp_path / os.fsdecode(name) for name in (b"bad\xff.jpg", b"out\xff"))
    bad.touch()
    assert cli.main(["encode", str(bad), "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert rf"failed: {tmp_path}/bad\xff.jpg: invalid_request" in shown
    assert rf": {tmp_path}/out\xff/manifest.jsonl" in shown


def test_encode_when_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cat.jpg"
    path.write_bytes(b"x")
    arguments = ["encode", str(path), "--out", str(tmp_path / "out")]
    arguments += ["--url", "http://127.0.0.1:9", "--timeout", "0.05"]
    assert cli.main(arguments) == 1
    shown = capsys.readouterr()
    assert "unavailable" in shown.err
    assert shown.out == "", "nothing is there to go on from"
    (tmp_path / "out" / "manifest.jsonl").write_text("hello\n")
    assert cli.main(arguments) == 1
    assert "manifest.jsonl is no manifest" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "http://[::1", "http://a:b:c"])
def test_encode_to_an_address_that_is_none(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["encode", str(tmp_path), "--out", str(out), "--url", url]) == 1
    assert not out.exists()
    assert "--url" in capsys.readouterr().err


@pytest.mark.usefixtures("service")
@pytest.mark.parametrize(("bad", "more"), [(20, ""), (23, "3 more, listed in the manifest")])
def test_encode_names_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bad: int, more: str
) -> None:
    for number in range(bad):
        (tmp_path / f"bad{number:02}.jpg").touch()
    assert cli.main(["encode", str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().out
    assert all(f"bad{number:02}.jpg: invalid_request" in shown for number in range(20))
    assert ("more" in shown, more in shown) == (bool(more), True)


def slow(asked: list[str]) -> FastAPI:
    """Answers each file with itself; never those that begin with "wait"."""
    app = FastAPI()

    @app.get("/v1/model")
    async def model() -> dict[str, str]:
        return {"model": "m", "weights": "dummy"}

    @app.post("/v1/encode")
    async def encode(request: Request) -> Response:
        (item,), _ = parse_request(await request.body(), request.headers["content-type"])
        asked.append((item.data or b"").decode())
        if asked[-1].startswith("wait"):
            while not await request.is_disconnected():
                await asyncio.sleep(0.02)
        (answer,) = fake_answers([asked[-1]])
        assert isinstance(answer, Embedding)
        found = {field: getattr(answer, field) for field in ("index", "type", *FACTS, "source")}
        document = {
            "model": "m",
            "weights": "dummy",
            "timings": {},
            "items": [found | {"data": answer.data}],
        }
        return Response(b"".join(write_safetensors(document, "")), media_type=SAFETENSORS)

    return app


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_encode_writes_what_is_finished_when_it_is_interrupted(
    tmp_path: Path, number: signal.Signals
) -> None:
    files, out, asked = tmp_path / "in", tmp_path / "out", list[str]()
    files.mkdir()
    for place in range(6):
        (files / f"{place}.jpg").write_text("wait" if place == 3 else f"image {place}")
    with in_a_thread(slow(asked)) as url:
        arguments = ["encode", str(files), "--out", str(out), "--url", url, "--concurrency", "2"]
        command = [sys.executable, "-m", "encoder_service.cli", *arguments]
        with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as run:
            until(lambda: "image 4" in asked, 60)  # 0 to 2 were taken before
            run.send_signal(number)
            shown, errors = run.communicate(timeout=60)
        assert (run.returncode, errors) == (128 + number, "")
        assert shown.count("interrupted; 3 encoded, 0 failed so far: ") == 1
        assert [item["name"][-5:] for item in items(out)] == ["0.jpg", "1.jpg", "2.jpg"]
        (files / "3.jpg").write_text("image 3")
        asked.clear()
        assert cli.main(arguments) == 0
    assert sorted(asked) == ["image 3", "image 4", "image 5"]
    assert [item["name"][-5:] for item in items(out)] == [f"{place}.jpg" for place in range(6)]


def items(out: Path) -> list[Any]:
    lines = map(json.loads, (out / "manifest.jsonl").read_text().splitlines()[1:])
    return [item for line in lines for item in line["items"]]
