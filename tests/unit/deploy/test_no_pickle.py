"""Nothing of ours turns bytes into code: no pickle, no eval, no loader that would run one.

Ray pickles between its own processes, behind its token and the network policy; what clients send
reaches it as bytes inside of our own types.
"""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.errors import InvalidMedia
from actors.media.image import decode
from encoder_service.intake.header import read_header
from tests.unit.deploy.test_layers import modules
from tests.unit.front_door import Fleet, client

MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle", "code"}
WRITERS = {"dumps"}
"""Of these modules: what Serve reads in our calls is ours."""
CALLS = {"eval", "exec", "compile", "__import__"}
LOADERS = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("yaml", "load"), ("jit", "load")}


def offences(path: Path) -> list[str]:
    """Lines that could run what they read."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} - WRITERS:
            names = [node.module or ""]
        bad = {name.split(".")[-1] for name in names} & MODULES
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                bad |= {called.id} & CALLS
            if isinstance(called, ast.Attribute):
                owner = getattr(called.value, "id", getattr(called.value, "attr", ""))
                bad |= {called.attr} if (owner, called.attr) in LOADERS else set()
        found += [f"{path.name}:{getattr(node, 'lineno', 0)}: {name}" for name in bad]
    return found


def test_no_module_of_ours_unpickles() -> None:
    assert not [line for path in modules() for line in offences(path)]


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import dumps, loads",
        "from ray.cloudpickle import loads",
        "torch.load(f)",
        "yaml.load(f, L)",
        "eval(x)",
    ],
)
def test_the_search_finds_them(tmp_path: Path, text: str) -> None:
    file = tmp_path / "found.py"
    file.write_text(text)
    assert offences(file)
    file.write_text("from pickle import dumps")
    assert not offences(file)


class Trap:
    """Unpickling it raises what nobody expects."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exit, ("a pickle was read",))


@pytest.mark.parametrize(
    "content_type",
    [
        "application/octet-stream",
        "application/x-pickle",
        "application/python-pickle",
        "application/x-python-serialize",
        "image/x-pickle",
        "application/msgpack",
        "application/json",
    ],
)
def test_a_pickle_is_only_bytes(content_type: str) -> None:
    headers = {"content-type": content_type, "accept": "application/json"}
    answer = client(Fleet()).post("/v1/encode", content=pickle.dumps(Trap()), headers=headers)
    assert answer.status_code in (400, 415)


def test_files_that_hold_a_pickle_are_no_images(tmp_path: Path) -> None:
    torch.save({"a": Trap()}, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    for name in ("a.pt", "a.npy"):
        data = (tmp_path / name).read_bytes()
        with pytest.raises(InvalidMedia):
            read_header(data)
        with pytest.raises(InvalidMedia):
            decode(data)
