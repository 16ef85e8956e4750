"""Where `model.id` leads: a folder, a preset, the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.errors import CheckpointError
from actors.options import ModelOptions
from actors.spec.checkpoint import Folder, Hub, Preset, find, preset_names


def test_a_folder_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3vl-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert isinstance(find(ModelOptions(id="qwen3vl-tiny")), Folder)


def test_a_preset_has_no_weights() -> None:
    files = find(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    assert isinstance(files, Preset)
    assert files.path("model.safetensors") is None
    with pytest.raises(CheckpointError, match="load_format to dummy"):
        find(ModelOptions(id="qwen3vl-tiny"))


def test_what_has_no_revisions_refuses_one(tmp_path: Path) -> None:
    for name, what in ((str(tmp_path), "a folder"), ("qwen3vl-tiny", "a preset")):
        with pytest.raises(CheckpointError, match=f"model.revision is 'abc'.*{what}"):
            find(ModelOptions(id=name, revision="abc", load_format="dummy"))


def test_every_preset_is_found() -> None:
    assert {"qwen3vl-2b", "qwen3vl-8b", "qwen3vl-tiny"} <= set(preset_names())


def test_a_path_that_is_not_there_is_no_repository() -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        find(ModelOptions(id="./nowhere"))


def test_any_other_name_is_the_hubs() -> None:
    files = find(ModelOptions(id="Qwen/Qwen3-VL-8B-Instruct", revision="main"))
    assert isinstance(files, Hub)
    assert (files.repository, files.revision) == ("Qwen/Qwen3-VL-8B-Instruct", "main")


def test_the_hub_out_of_reach_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"Instruct': cannot get config.json.*load_format: dummy"
    ):
        Hub("Qwen/Qwen3-VL-8B-Instruct", None).read_json("config.json")
    with pytest.raises(CheckpointError, match=r"^model.id 'qwen3-vl-tiny': did you mean qwen3vl-t"):
        Hub("qwen3-vl-tiny", None).read_json("config.json")


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "not a JSON object")])
def test_bad_json_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json {message}|config.json is {message}"):
        Folder(tmp_path).read_json("config.json")


def test_a_folders_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    assert Folder(tmp_path).read_json("config.json") == {"a": 1}
    assert Folder(tmp_path).read_json("other.json") is None
