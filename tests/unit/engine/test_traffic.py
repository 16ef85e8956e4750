"""Counting items' tokens, and budgets that a replica learns from an earlier one's file."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from actors.engine import traffic
from actors.engine.budgets import Capacity, model_capacity
from actors.engine.ladder import pack_loads, padding_ratio, planned_ladders
from actors.engine.traffic import MOST_KINDS, ItemTokens, SizesFile, learned
from actors.errors import ConfigError
from actors.families.registry import read
from actors.options import ActorOptions, GraphOptions, ModelOptions
from actors.pipeline import open_pipeline
from actors.spec.model_spec import ModelSpec
from actors.telemetry.metrics import EncoderMetrics
from actors.telemetry.tracing import open_spans
from actors.types import Item, Size
from encoder_service import cli
from encoder_service.config import parse
from tests.checkpoints_clip import write_clip_texts, write_siglip2_texts

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = "qwen3vl-tiny"


def spec_of(model: str) -> ModelSpec:
    return read(ModelOptions(id=model, load_format="dummy"))


def room_of(model: str) -> Capacity:
    return model_capacity(GraphOptions(), spec_of(model))


def counted(*items: tuple[tuple[int, ...], int]) -> ItemTokens:
    counts = ItemTokens()
    for tokens, count in items:
        counts.add(tokens, count)
    return counts


def written(path: Path, *items: tuple[tuple[int, ...], int], model: str = TINY) -> str:
    """The file that a replica leaves that encoded these."""
    SizesFile(str(path), model, counted(*items)).close()
    return str(path)


def test_items_are_counted_exactly_up_to_a_bound() -> None:
    counts = counted(*(((2 * tokens,), 1) for tokens in range(1, MOST_KINDS + 1)))
    counts.add((31,))
    counts.add((9 * MOST_KINDS,))
    counts.add((32,))
    found = counts.document()
    assert len(found) == MOST_KINDS
    assert sum(found.values()) == MOST_KINDS + 3
    assert found["30"] == 1
    assert found["32"] == 3, "31 counts as the next larger one"
    assert found[str(2 * MOST_KINDS)] == 2, "or as the largest"


def test_replicas_are_added_up() -> None:
    total = ItemTokens.sum([{"272 0": 2, "272 100": 1}, {}, {"272 100": 4}])
    assert total.document() == {"272 0": 2, "272 100": 5}


def test_a_pipeline_counts_what_clients_sent_and_leaves_it_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traffic, "LEAST_ITEMS", 3)
    path = tmp_path / "new" / "sizes.json"
    options = ActorOptions.model_validate(
        {
            "model": {
                "id": TINY,
                "load_format": "dummy",
                "dtype": "float32",
                "images_kwargs": {"max_pixels": 320 * 320},
            },
            "encoder": {"device": "cpu", "num_gpus": 0},
            "graphs": {"token_budgets": "learned", "sizes_file": str(path)},
            "packing": {"policy": "smallest_first"},
        }
    )
    budgets = []
    for _ in range(2):
        series, spans = EncoderMetrics(), open_spans(options.tracing, "encoder")
        pipeline = open_pipeline(options, series, spans, "one")
        engine = pipeline.engine
        assert engine.item_tokens.document() == {}, "items of the start count"
        plan = engine.tower.spec.sizing.plan(Size(320, 256))
        patches = np.zeros((plan.patches, 3 * 16 * 16), np.uint8)
        for _ in range(3):
            engine.submit(Item(plan, patches)).result(60)
        pipeline.close()
        assert json.loads(path.read_text()) == {"model": TINY, "item_tokens": {"80": 3}}
        assert series.registry.get_sample_value("encoder_item_tokens_sum") == 240
        budgets.append(engine.capacity.budgets[0])
    default, planned = budgets
    assert default == (64, 72, 80, 88, 96, 100)
    assert 80 in planned
    assert len(planned) < len(default)


def test_few_items_do_not_replace_what_many_said(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    written(path, ((64,), 999))
    assert not path.exists()
    written(path, ((64,), 1000))
    written(path, ((128,), 10))
    assert json.loads(path.read_text())["item_tokens"] == {"64": 1000}
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    written(tmp_path / "file" / "sizes.json", ((64,), 1000))
    assert "graphs.sizes_file was not written" in caplog.text


def test_learned_budgets_pad_less_and_are_no_more(tmp_path: Path) -> None:
    room, spec = room_of("qwen3vl-8b"), spec_of("qwen3vl-8b")
    path = written(tmp_path / "sizes", ((110,), 900), ((880,), 90), ((9000,), 10), model=spec.id)
    (budgets,) = learned(path, room, spec).budgets
    assert len(budgets) <= len(room.budgets[0])
    assert budgets[-1] == room.tokens[0]
    (loads,) = pack_loads({(110,): 900, (880,): 90, (9000,): 10}, room)
    assert padding_ratio(loads, budgets) < 0.5 * padding_ratio(loads, room.budgets[0])


def test_sizes_that_never_came_are_padded_little_too(tmp_path: Path) -> None:
    room, spec = room_of("qwen3vl-8b"), spec_of("qwen3vl-8b")
    path = written(tmp_path / "sizes", ((110,), 1000), model=spec.id)
    (budgets,) = learned(path, room, spec).budgets
    unseen = dict.fromkeys(range(64, room.tokens[0], 16), 1.0)
    assert padding_ratio(unseen, budgets) < 0.1
    (bare,) = planned_ladders(pack_loads({(110,): 1000}, room), room, spec.sizing)
    assert padding_ratio(unseen, bare) > 0.5, "nothing had to be done"


@pytest.mark.parametrize(
    ("model", "items"),
    [
        ("deepseek-ocr", [((272, 0), 500), ((272, 200), 400), ((272, 600), 300), ((301, 7), 9)]),
        ("clip-vit-l-336", [((577,), 900), ((578,), 100)]),
    ],
)
def test_budgets_of_tiles_and_views_hold_whole_ones_whatever_was_counted(
    tmp_path: Path, model: str, items: list[tuple[tuple[int, ...], int]]
) -> None:
    room, spec = room_of(model), spec_of(model)
    found = learned(written(tmp_path / "sizes", *items, model=spec.id), room, spec)
    for path, budgets in enumerate(found.budgets):
        given = room.budgets[path]
        assert len(budgets) <= len(given)
        assert (budgets[0] == 0, budgets[-1]) == (given[0] == 0, given[-1])
        unit = next(filter(None, given))
        assert all(budget % unit == 0 for budget in budgets[:-1])


@pytest.mark.parametrize("write", [write_clip_texts, write_siglip2_texts])
def test_budgets_of_images_are_learned_beside_those_of_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Any]
) -> None:
    write(tmp_path / "model")
    spec = read(ModelOptions(id=str(tmp_path / "model"), output="vector"))
    room = model_capacity(GraphOptions(), spec)
    image = next(filter(None, room.budgets[0]))
    path = written(tmp_path / "sizes", ((image, 0), 1500), ((0, 32), 100), model=spec.id)
    monkeypatch.setattr(traffic.log, "warning", lambda *words: pytest.fail(repr(words)))
    found = learned(path, room, spec)
    assert all(budgets[0] == 0 for budgets in found.budgets)
    assert all(budget % 32 == 0 for budget in found.budgets[1])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "FileNotFoundError"),
        ("", "JSONDecodeError"),
        ("[" * 10_000, "RecursionError"),
        ("[]", "it has no item_tokens"),
        ('{"model": "another", "item_tokens": {"64": 9}}', "it counts items of 'another'"),
        (f'{{"model": "{TINY}", "item_tokens": {{}}}}', "it counts no items yet"),
        (f'{{"model": "{TINY}", "item_tokens": {{"x": 9}}}}', "is not tokens and a count"),
        (f'{{"model": "{TINY}", "item_tokens": {{"64": 0.5}}}}', "is not tokens and a count"),
        (f'{{"model": "{TINY}", "item_tokens": {{"64 64": 9}}}}', "is not tokens and a count"),
        (f'{{"model": "{TINY}", "item_tokens": {{"-1": 9}}}}', "is not tokens and a count"),
        (f'{{"model": "{TINY}", "item_tokens": {{"99999": 9}}}}', "no entry fits"),
        (f'{{"model": "{TINY}", "item_tokens": 3}}', "it has no item_tokens"),
        (" " * traffic.MOST_BYTES + "{}", "JSONDecodeError"),
    ],
)
def test_a_file_that_says_nothing_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None, reason: str
) -> None:
    path = tmp_path / "sizes.json"
    if text is not None:
        path.write_text(text)
    room = room_of(TINY)
    with caplog.at_level(logging.INFO):
        assert learned(str(path), room, spec_of(TINY)) is room
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert reason in record.message


class Status(BaseHTTPRequestHandler):
    """A running service, as far as capture-plan asks it."""

    document: dict[str, Any]

    def do_GET(self) -> None:
        good = self.headers["authorization"] == "Bearer sesame"
        body = {"error": {"type": "unauthorized", "message": "ENCODER_SERVICE_TOKEN is wrong"}}
        sent = json.dumps(self.document if good else body).encode()
        self.send_response(200 if good and self.path == "/v1/status" else 401)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Status)
    Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def plan_from(url: str) -> int:
    config = str(CONFIGS / "tiny.yaml")
    return cli.main(["capture-plan", "--from", url, "--config", config, "--graphs", "3"])


def test_a_plan_from_a_running_service_is_that_of_its_sizes(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = tmp_path / "sizes"
    sizes.write_text("320x320 50\n640x640 20\n")
    Status.document = {"model": TINY, "item_tokens": {"100": 50, "400": 20}}
    monkeypatch.setenv("ENCODER_SERVICE_TOKEN", "sesame")
    assert plan_from(url) == 0
    shown = capsys.readouterr().out
    config = str(CONFIGS / "tiny.yaml")
    assert cli.main(["capture-plan", str(sizes), "--config", config, "--graphs", "3"]) == 0
    assert capsys.readouterr().out == shown
    assert "token_budgets: [" in shown


@pytest.mark.parametrize(
    ("token", "document", "reason"),
    [
        ("wrong", {}, "ENCODER_SERVICE_TOKEN"),
        ("sesame", {"model": "other", "item_tokens": {"1": 1}}, "it counts items of 'other', not"),
        ("sesame", {"model": TINY}, "it has no item_tokens"),
        ("sesame", {"model": TINY, "item_tokens": {}}, "it counts no items yet"),
        ("sesame", {"model": TINY, "item_tokens": {"x": 1}}, "is not tokens and a count"),
    ],
)
def test_what_a_running_service_cannot_say(
    url: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    document: dict[str, Any],
    reason: str,
) -> None:
    Status.document = document
    monkeypatch.setenv("ENCODER_SERVICE_TOKEN", token)
    assert plan_from(url) == 1
    told = capsys.readouterr().err
    assert url in told
    assert reason in told


def test_a_plan_is_from_a_file_or_a_service() -> None:
    for arguments in ([], ["sizes", "--from", "http://h"]):
        with pytest.raises(SystemExit):
            cli.main(["capture-plan", *arguments, "--config", "c"])


def test_a_url_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_from("h:8000") == 1
    assert "h:8000" in capsys.readouterr().err


LEARNED = {"token_budgets": "learned", "sizes_file": "/f"}


@pytest.mark.parametrize(
    ("graphs", "reason"),
    [
        ({"token_budgets": "learned"}, "set sizes_file"),
        ({"token_budgets": [64], "sizes_file": "/f"}, "only with token_budgets: learned"),
        (LEARNED | {"mode": "exact"}, "mode: budget"),
        (LEARNED | {"local_token_budgets": [100]}, "without global_token_budgets"),
        ({"token_budgets": "lerned"}, "token_budgets: Input should be a valid tuple"),
    ],
)
def test_learned_budgets_need_a_file_and_nothing_else(graphs: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse({"model": {"id": TINY}, "graphs": graphs})


def test_pools_do_not_learn() -> None:
    args: dict[str, Any] = {"model": {"id": TINY}, "graphs": LEARNED}
    assert parse(args).graphs.sizes_file == "/f"
    with pytest.raises(ConfigError, match=r"encoder\.pools cannot: list the budgets"):
        parse(args | {"encoder": {"pools": [{"name": "a"}]}})
