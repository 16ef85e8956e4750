"""Datasets into shards: streamed, in order, and resumed after the process was killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Unpack

import pytest
import torch
from PIL import Image
from pyarrow import parquet
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

from encoder_service.client import dataset
from encoder_service.client.dataset import (
    DatasetOptions,
    Samples,
    Written,
    count,
    encode_dataset,
    write_shard,
)
from encoder_service.client.items import (
    Embedding,
    ProcessorOptions,
    ServiceError,
    Source,
    request_item,
)

ROW_BYTES = 8
"""Of one item's data: a shard of 3 rows is full with the third."""


class Caller:
    """Rows made of an item's bytes. Refuses b"bad"; does not come back from call `last`."""

    precision = "bf16"

    def __init__(
        self, log: Path, last: int | None = None, kill: bool = False, bad: str = "invalid_request"
    ) -> None:
        self.log, self.last, self.kill, self.bad = log, last, kill, bad
        self.calls = 0

    async def model(self) -> dict[str, Any]:
        graphs = {"precision": self.precision}
        return {"model": "m", "revision": None, "weights": "checkpoint", "graphs": graphs}

    async def encode(
        self,
        sources: Sequence[Source],
        dtype: str = "bfloat16",
        **options: Unpack[ProcessorOptions],
    ) -> list[Embedding]:
        (source,) = sources
        self.options = options
        data = request_item(source).data or b""
        self.calls += 1
        await asyncio.sleep(0)
        if self.last is not None and self.calls > self.last:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ServiceError("unavailable", "gone", retryable=True)
        digest = hashlib.sha256(data).hexdigest()
        with self.log.open("a") as file:
            file.write(f"{digest}\n")
        if data == b"bad":
            raise ServiceError(self.bad, "no image", item=0)
        rows = torch.frombuffer(bytearray(bytes.fromhex(digest)[:ROW_BYTES]), dtype=torch.uint8)
        return [
            Embedding(
                0, "image", (1, 2, 2), 1, "bfloat16", (1, 4), rows.numpy().tobytes(), digest,
                "graph", 0, "m", "checkpoint",
            )
        ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten files, the fifth of which is no image, and six that are skipped: pipes, links, others."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number in range(10):
        path = folder / ("more" if number % 3 == 0 else "") / f"{number}.jpg"
        path.write_bytes(b"bad" if number == 4 else f"image {number}".encode())
    (folder / "notes.txt").write_text("not an image")
    (folder / "logo.svg").write_text("<svg/>")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "piped.jpg").symlink_to(folder / "pipe.jpg")
    (folder / "gone.jpg").symlink_to(folder / "nothing.jpg")
    (folder / "linked").symlink_to(folder / "more")
    return folder


OPTIONS = DatasetOptions(shard_bytes=3 * ROW_BYTES, concurrency=2)


def write(caller: Caller, given: Samples, out: Path, options: DatasetOptions = OPTIONS) -> Written:
    return asyncio.run(encode_dataset(caller, given, out, options, None))


def files(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def test_a_folder_gives_what_the_model_takes(tmp_path: Path) -> None:
    for name in ("a.wav", "b.jpg", "c.mp4", "d.OGG"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"")

    class Hears(Caller):
        async def model(self) -> dict[str, Any]:
            return await super().model() | {"kinds": ["audio"]}

    for caller, taken, left in (
        (Caller, ["b.jpg", "c.mp4"], "a.wav\tno image and no video by its name"),
        (Hears, ["a.wav", "d.OGG"], "b.jpg\tno audio by its name"),
    ):
        out = tmp_path / caller.__name__
        write(caller(tmp_path / "log"), tmp_path / "in", out)
        assert [Path(item["name"]).name for item in items(out)] == taken
        assert left in (out / "skipped.txt").read_text()


def test_a_folder_in_order(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    written = write(Caller(tmp_path / "log"), folder, out)
    failure = f"{folder / '4.jpg'}: invalid_request: no image"
    reasons = {
        "gone.jpg": "a broken link",
        "linked": "a link to a folder",
        "logo.svg": "no image and no video by its name",
        "notes.txt": "no image and no video by its name",
        "pipe.jpg": "not a regular file",
        "piped.jpg": "not a regular file",
    }
    skipped = tuple(str(folder / name) for name in reasons)
    assert written == Written(9, 1, 0, "checkpoint", 0, (failure,), skipped)
    lines = [f"{folder / name}\t{reason}" for name, reason in reasons.items()]
    assert (out / "skipped.txt").read_text().splitlines() == lines
    settings, *shards = map(json.loads, (out / "manifest.jsonl").read_text().splitlines())
    assert settings["settings"]["model"] == "m"
    items = [item for shard in shards for item in shard["items"]]
    found = sorted(map(str, {*folder.rglob("*.jpg")} - {folder / name for name in reasons}))
    assert [item["name"] for item in items] == found
    assert [Path(item["name"]).name for item in items if "error" in item] == ["4.jpg"]
    assert [len(shard["items"]) for shard in shards] == [4, 3, 3], "the bad one weighs nothing"
    for shard in shards:
        with safe_open(out / shard["file"], "pt") as file:
            encoded = [item for item in shard["items"] if "error" not in item]
            assert json.loads(file.metadata()["items"]) == encoded
            for item in encoded:
                rows = file.get_tensor(item["name"])
                assert (rows.dtype, rows.shape) == (torch.bfloat16, (1, 4))
                assert rows.view(torch.uint8).numpy().tobytes().hex() == item["digest"][:16]


def test_folders_that_may_not_be_read_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    for name in ("closed", "listed", "open"):
        (folder / name).mkdir(parents=True)
        (folder / name / "1.jpg").write_bytes(b"image")
    (folder / "closed" / "1.jpg").unlink()  # root, who may run this, would see it
    denied = {(folder / "closed", os.R_OK), (folder / "listed", os.X_OK)}
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) not in denied)
    isfile = os.path.isfile
    monkeypatch.setattr(os.path, "isfile", lambda path: "listed" not in str(path) and isfile(path))
    assert write(Caller(tmp_path / "log"), folder, out).encoded == 1
    assert (out / "skipped.txt").read_text().splitlines() == [
        f"{folder / 'closed'}\ta folder that may not be read",
        f"{folder / 'listed' / '1.jpg'}\tin a folder that may not be entered",
    ]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_given_folder_that_may_not_be_read_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir(mode=0)
    with pytest.raises(PermissionError, match="in"):
        write(Caller(tmp_path / "log"), tmp_path / "in", tmp_path / "out")


def items(out: Path) -> list[Any]:
    lines = (out / "manifest.jsonl").read_text().splitlines()
    return [item for line in lines[1:] for item in json.loads(line)["items"]]


def rows_of(out: Path) -> dict[str, bytes]:
    tensors = [load_file(path) for path in sorted(out.glob("*.safetensors"))]
    return {k: v.view(torch.uint8).numpy().tobytes() for one in tensors for k, v in one.items()}


@pytest.mark.parametrize("last", [0, 1, 3, 5, 8])
def test_a_run_that_failed_keeps_what_it_finished(folder: Path, tmp_path: Path, last: int) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    write(Caller(tmp_path / "log"), folder, whole)
    with pytest.raises(ServiceError, match="gone"):
        write(Caller(tmp_path / "log1", last), folder, halved)
    kept = len(items(halved))
    assert max(0, last - 2) <= kept <= last  # two are in flight, and kept in order
    second = Caller(tmp_path / "log2")
    written = write(second, folder, halved)
    assert (second.calls, written.resumed) == (10 - kept, kept)
    assert items(halved) == items(whole)
    assert rows_of(halved) == rows_of(whole)
    again = Caller(tmp_path / "log3")
    third = write(again, folder, halved)
    assert (third.resumed, len(third.skipped)) == (10, 6)
    assert again.calls == 0


class Stuck(Caller):
    """Does not answer after call `last`."""

    async def encode(
        self,
        sources: Sequence[Source],
        dtype: str = "bfloat16",
        **options: Unpack[ProcessorOptions],
    ) -> list[Embedding]:
        if self.calls == self.last:
            await asyncio.sleep(600)
        return await super().encode(sources, dtype)


def test_finished_items_do_not_wait_long_for_a_shard(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "FLUSH_SECONDS", 1.0)
    out = tmp_path / "out"

    async def run() -> None:
        caller, large = Stuck(tmp_path / "log", 2), DatasetOptions(concurrency=1)
        task = asyncio.create_task(encode_dataset(caller, folder, out, large, None))
        async with asyncio.timeout(60):
            while not (out / "manifest.jsonl").exists() or not items(out):
                await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(run())
    assert len(items(out)) == 2
    assert list(rows_of(out)) == [item["name"] for item in items(out)]
    assert write(Caller(tmp_path / "log1"), folder, out, DatasetOptions(concurrency=1)).resumed == 2


def test_a_run_that_is_cancelled_writes_each_finished_item_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, began, end = tmp_path / "out", threading.Event(), threading.Event()

    def held(*args: Any) -> None:
        began.set()
        assert end.wait(60)
        write_shard(*args)

    monkeypatch.setattr(dataset, "write_shard", held)

    async def run() -> None:
        task = asyncio.create_task(
            encode_dataset(Caller(tmp_path / "log"), folder, out, OPTIONS, None)
        )
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        await asyncio.sleep(0.1)
        assert not task.done(), "the shard that is being written is finished first"
        end.set()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(run())
    assert len(items(out)) == 4, "three, and the bad one"
    assert len(rows_of(out)) == 3


def test_what_may_work_the_next_time_is_tried_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (folder / "5.jpg").unlink()
    given = [str(folder / f"{number}.jpg") for number in (1, 4, 5, 2)]
    late = write(Caller(tmp_path / "log", bad="deadline_exceeded"), given, out)
    assert (late.encoded, late.failed, late.resumed, late.retryable) == (2, 2, 0, 2)
    assert [one.split(": ")[1] for one in late.failures] == ["deadline_exceeded", "unreadable"]
    (folder / "5.jpg").write_bytes(b"here now")
    again = Caller(tmp_path / "log2")
    written = write(again, given, out)
    assert (again.calls, written.resumed) == (2, 2)
    assert (written.encoded, written.failed, written.retryable) == (3, 1, 0)
    with safe_open(out / "00001.safetensors", "pt") as file:
        assert list(file.keys()) == [given[2]]
    last = Caller(tmp_path / "log3")
    assert write(last, given, out).resumed == 4
    assert last.calls == 0, "what the service refused is refused for good"


@pytest.mark.parametrize("kind", ["overloaded", "unavailable"])
def test_what_is_nobody_s_fault_ends_the_run_and_counts_as_nothing(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    with pytest.raises(ServiceError, match=kind):
        write(Caller(tmp_path / "log", bad=kind), [folder / "4.jpg"], tmp_path / "out")
    assert write(Caller(tmp_path / "log"), [folder / "4.jpg"], tmp_path / "out").resumed == 0


def test_a_second_run_into_a_folder_ends_at_once(folder: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    write(Caller(tmp_path / "log"), folder, whole)

    class Meets(Caller):
        """While it encodes, another process and another task begin."""

        async def model(self) -> dict[str, Any]:
            with pytest.raises(ValueError, match=f"{out}: another run is writing into it"):
                await encode_dataset(second, folder, out, OPTIONS, None)
            command = [sys.executable, "-m", "encoder_service.cli", "encode", str(folder)]
            command += ["--out", str(out), "--url", "http://127.0.0.1:9"]
            ran = subprocess.run(command, timeout=100, capture_output=True, text=True, check=False)
            assert ran.returncode == 1
            assert f"failed: {out}: another run is writing" in ran.stderr
            return await super().model()

    second = Caller(tmp_path / "log2")
    write(Meets(tmp_path / "log1"), folder, out)
    assert second.calls == 0
    assert files(out) == files(whole)
    assert write(second, folder, out).resumed == 10, "the lock ends with the run"


def test_a_folder_has_rows_of_one_precision(folder: Path, tmp_path: Path) -> None:
    out, caller = tmp_path / "out", Caller(tmp_path / "log")
    write(caller, folder, out)
    caller.precision = "fp8"
    with pytest.raises(ValueError, match="started with precision 'bf16', now it is 'fp8': use"):
        write(caller, folder, out)
    caller.precision = "auto"  # no encoder has said yet
    assert write(caller, folder, out).resumed == 10


def test_a_run_that_was_killed_goes_on_and_encodes_no_finished_shard_twice(
    folder: Path, tmp_path: Path
) -> None:
    whole, killed, log = tmp_path / "whole", tmp_path / "killed", tmp_path / "log"
    write(Caller(tmp_path / "other"), folder, whole)
    code = (
        "import sys; from pathlib import Path; from tests.unit.client.test_dataset import *\n"
        "write(Caller(Path(sys.argv[3]), 7, kill=True), sys.argv[1], Path(sys.argv[2]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(killed), str(log)], timeout=100, check=False
    )
    assert ran.returncode == -signal.SIGKILL
    shards = [json.loads(x) for x in (killed / "manifest.jsonl").read_text().splitlines()[1:]]
    finished = [item["digest"] for shard in shards for item in shard["items"] if "digest" in item]
    assert finished
    with (killed / "manifest.jsonl").open("a") as file:
        file.write('{"file": "00009.safe')  # it was writing a line
    before = len(log.read_text().splitlines())
    written = write(Caller(log), folder, killed)
    assert files(killed) == files(whole)
    assert written.resumed == sum(len(shard["items"]) for shard in shards)
    assert not set(log.read_text().splitlines()[before:]) & set(finished)


class Pairs(Caller):
    """Answers no call before there are two, and counts them."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.under_way = self.most_under_way = 0
        self.two = asyncio.Event()

    async def encode(
        self,
        sources: Sequence[Source],
        dtype: str = "bfloat16",
        **options: Unpack[ProcessorOptions],
    ) -> list[Embedding]:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self.under_way == 2:
            self.two.set()
        await asyncio.wait_for(self.two.wait(), 60)
        try:
            return await super().encode(sources, dtype)
        finally:
            self.under_way -= 1


def test_as_many_are_under_way_as_was_asked_for(folder: Path, tmp_path: Path) -> None:
    caller = Pairs(tmp_path / "log")
    write(caller, folder, tmp_path / "out")
    assert (caller.calls, caller.most_under_way) == (10, 2)


def rows(bad: bool = False) -> Iterator[dict[str, Any]]:
    """As `datasets` gives them: decoded, or encoded with a path."""
    yield {"image": Image.new("RGB", (4, 4)), "label": 1}
    yield {"image": {"bytes": b"as a file", "path": None}}
    if bad:
        yield {"picture": b""}


def test_rows_with_images_to_parquet(tmp_path: Path) -> None:
    options = DatasetOptions(format="parquet")
    assert write(Caller(tmp_path / "log"), rows(), tmp_path / "out", options).encoded == 2
    table = parquet.read_table(tmp_path / "out" / "00000.parquet").to_pylist()
    assert [row["name"] for row in table] == ["000000000", "000000001"]
    assert table[1]["digest"] == hashlib.sha256(b"as a file").hexdigest()
    assert table[1]["data"].hex() == table[1]["digest"][:16]
    assert (table[0]["shape"], table[0]["dtype"]) == ([1, 4], "bfloat16")


@pytest.mark.parametrize("format", ["safetensors", "parquet"])
def test_the_manifest_has_what_an_answer_says(
    tmp_path: Path, format: Literal["safetensors", "parquet"]
) -> None:
    remarks: dict[str, Any] = {
        "timestamps": (0.25, 0.75),
        "second_per_grid_ts": 0.5,
        "notice": "16-bit",
        "kept_rows": (0, 2),
    }

    class Film(Caller):
        async def encode(self, *args: Any, **options: Any) -> list[Embedding]:
            (found,) = await super().encode(*args, **options)
            film = replace(found, type="video", family="f", **remarks)
            return [film if self.calls == 2 else found]

    out, options = tmp_path / "out", replace(OPTIONS, format=format)
    write(Film(tmp_path / "log"), rows(), out, options)
    photo, film = items(out)
    assert not remarks.keys() & photo.keys()
    shown = json.loads(json.dumps(remarks))
    assert {name: film[name] for name in remarks} == shown
    if format == "parquet":
        (first, second) = parquet.read_table(out / "00000.parquet").to_pylist()
        assert {name: second[name] for name in remarks} == shown
        assert [first[name] for name in remarks] == [None] * len(remarks)
    write(Caller(tmp_path / "log"), rows(), tmp_path / "photos", options)
    if format == "parquet":  # files of one dataset have one schema
        schemas = [
            parquet.read_schema(tmp_path / name / "00000.parquet") for name in ("out", "photos")
        ]
        assert schemas[0] == schemas[1]


def test_a_run_without_any_item_binds_no_other(folder: Path, tmp_path: Path) -> None:
    """A mistyped option is corrected and the same folder is used."""
    out = tmp_path / "out"
    with pytest.raises(ServiceError, match="invalid_option"):
        write(Caller(tmp_path / "log", bad="invalid_option"), [folder / "4.jpg"], out)
    corrected = replace(OPTIONS, processor={"max_pixels": 65536})
    assert write(Caller(tmp_path / "log"), [folder / "1.jpg"], out, corrected).encoded == 1
    settings, _ = (out / "manifest.jsonl").read_text().splitlines()
    # Killed after the settings, before the first shard was named.
    (out / "manifest.jsonl").write_text(settings + "\n")
    assert write(Caller(tmp_path / "log"), [folder / "1.jpg"], out).encoded == 1


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        write(Caller(tmp_path / "log"), [], tmp_path, DatasetOptions(format="parquet"))


def test_what_is_not_the_same_dataset_is_refused(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(Caller(tmp_path / "log"), folder, out)
    (folder / "00.jpg").write_bytes(b"new, and first")
    with pytest.raises(ValueError, match=r"item 0 was .*1\.jpg.*00\.jpg.* another folder"):
        write(Caller(tmp_path / "log"), folder, out)
    with pytest.raises(ValueError, match="dtype 'bfloat16', now it is 'float32'"):
        write(Caller(tmp_path / "log"), folder, out, DatasetOptions("float32"))
    smaller = replace(OPTIONS, processor={"max_pixels": 65536})
    with pytest.raises(ValueError, match=r"processor None, now it is .'max_pixels': 65536.: use"):
        write(Caller(tmp_path / "log"), folder, out, smaller)
    caller = Caller(tmp_path / "log")
    write(caller, folder, tmp_path / "smaller", smaller)
    assert caller.options == {"max_pixels": 65536}
    (out / "manifest.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match="is no manifest"):
        write(Caller(tmp_path / "log"), folder, out)


def test_what_cannot_be_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^a\.jpg is given twice$"):
        write(Caller(tmp_path / "log"), ["a.jpg", "./a.jpg"], tmp_path / "1")
    with pytest.raises(ValueError, match=r"row 2: column 'image' holds no image .*picture"):
        write(Caller(tmp_path / "log"), rows(bad=True), tmp_path / "2")
    small = DatasetOptions("float8_e4m3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'float8_e4m3': datasets have bfloat16, float16, float32"):
        write(Caller(tmp_path / "log"), [], tmp_path / "3", small)
    with pytest.raises(ValueError, match="at least 1"):
        write(Caller(tmp_path / "log"), [], tmp_path / "3", DatasetOptions(concurrency=0))


def test_files_that_cannot_be_read_are_recorded(tmp_path: Path) -> None:
    written = write(Caller(tmp_path / "log"), [tmp_path / "none.jpg"], tmp_path / "out")
    assert (written.encoded, written.failed) == (0, 1)
    text = (tmp_path / "out" / "manifest.jsonl").read_text()
    assert '"file": null' in text
    assert "No such file" in text


def test_a_source_that_is_no_path_or_url_does_not_end_the_run(tmp_path: Path) -> None:
    given: list[str | Path] = ["https://[", "nul\0.jpg"]
    written = write(Caller(tmp_path / "log"), given, tmp_path / "out")
    assert (written.encoded, written.failed, written.retryable) == (0, 2, 2)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.jpg"
    os.mkfifo(pipe)
    written = write(Caller(tmp_path / "log"), [pipe], tmp_path / "out")
    assert written.failures == (f"{pipe}: unreadable: {pipe}: not a regular file",)


@pytest.mark.parametrize("format", ["safetensors", "parquet"])
def test_names_that_are_not_utf_8(
    tmp_path: Path, format: Literal["safetensors", "parquet"]
) -> None:
    folder, out, options = tmp_path / "in", tmp_path / "out", replace(OPTIONS, format=format)
    folder.mkdir()
    names = [os.fsdecode(name) for name in (b"\xff.jpg", b"\xfe.jpg", b"\xff.txt")]
    for name in names:
        (folder / name).write_bytes(b"image")
    given = [folder, tmp_path / names[0]]
    written = write(Caller(tmp_path / "log"), given, out, options)
    assert (written.encoded, written.failed) == (2, 1)
    assert written.skipped == (rf"{folder}/\xff.txt",)
    assert (out / "skipped.txt").read_text().startswith(rf"{folder}/\xff.txt")
    shown = [rf"{folder}/\xfe.jpg", rf"{folder}/\xff.jpg", rf"{tmp_path}/\xff.jpg"]
    assert [item["name"] for item in items(out)] == shown
    if format == "parquet":
        table = parquet.read_table(out / "00000.parquet").to_pylist()
        assert [row["name"] for row in table] == shown[:2]
    else:
        assert sorted(rows_of(out)) == shown[:2]
    (tmp_path / names[0]).write_bytes(b"here now")
    again = Caller(tmp_path / "log")
    assert write(again, given, out, options).encoded == 3
    assert again.calls == 1


def test_an_output_folder_inside_of_the_dataset_skips_none_of_its_own_files(
    folder: Path,
) -> None:
    (folder / "manifest.jsonl").write_text("of another run")
    out = folder / "out"
    first = write(Caller(folder.parent / "log"), folder, out)
    assert write(Caller(folder.parent / "log"), folder, out).skipped == first.skipped
    assert str(folder / "manifest.jsonl") in first.skipped
    for path in first.skipped:
        Path(path).unlink()
    assert not write(Caller(folder.parent / "log"), folder, out).skipped
    assert not (out / "skipped.txt").exists()


@pytest.mark.parametrize("below", ["", "more"])
def test_an_output_folder_that_is_a_file(folder: Path, below: str) -> None:
    with pytest.raises(ValueError, match=r"1\.jpg.* is a file or is below one: use another"):
        write(Caller(folder.parent / "log"), folder, folder / "1.jpg" / below)


def test_how_many_there_are(folder: Path) -> None:
    assert count(folder, "image") == 10
    assert count([str(folder / "1.jpg"), "https://example.org/2.jpg"], "image") == 2
    assert count(list(rows()), "image") == 2
    assert count(rows(), "image") is None


def test_a_progress_bar(folder: Path, tmp_path: Path) -> None:
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    call = encode_dataset(Caller(tmp_path / "log"), folder, tmp_path / "out", OPTIONS, console)
    asyncio.run(call)
    assert "10/10" in text.getvalue()
