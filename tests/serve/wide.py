"""A tiny tower with rows as wide as a real one's, so that large embeddings are made quickly."""

from __future__ import annotations

import json
from pathlib import Path

from actors.options import ModelOptions
from actors.spec.checkpoint import find

WIDTH = 3 * 4096
"""Values of a row."""


def wide(folder: Path, width: int = WIDTH) -> ModelOptions:
    """Options of qwen3vl-tiny with wide rows, its configuration in `folder`; float32, random
    weights."""
    files = find(ModelOptions(id="qwen3vl-tiny", load_format="dummy"))
    config = files.read_json("config.json")
    assert config
    config["vision_config"]["out_hidden_size"] = width // 3
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(files.read_json("preprocessor_config.json"))
    )
    return ModelOptions(id=str(folder), load_format="dummy", dtype="float32")
