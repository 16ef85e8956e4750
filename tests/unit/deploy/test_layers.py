"""The floors of the house: what each folder may import, who may know torch and Ray, no cycles.

encoder_service -> router -> actors; within each package, folders are listed from the ground up.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAYERS = ("actors", "router", "encoder_service")  # each may import itself and those before it
WITHOUT_TORCH = (
    "actors/spec",
    "actors/families/registry.py",
    *(str(path.relative_to(ROOT)) for path in (ROOT / "actors/families").glob("*/spec.py")),
    "actors/options.py",
    "actors/types.py",
    "actors/errors.py",
    "actors/autoscaling.py",
    "actors/rpc",
    "router",
    "encoder_service/client",
    "encoder_service/wire",
    "encoder_service/ingress.py",
)
"""These never load torch or transformers, so that ingress and router processes stay small."""
LAZY_TORCH = {"items.py", "vllm.py", "sglang.py"}
"""Files that import torch inside functions which return tensors, and nowhere else."""
STANDALONE = ("encoder_service/client", "encoder_service/wire")
"""What a user imports: needs neither Ray nor the other packages, but for CARRIED."""
CARRIED = {"actors/rows/protocol.py", "actors/rows/reader.py"}
"""What the client's wheel has of the others (packages/client)."""
MAY_IMPORT_RAY = (
    "encoder_service/app.py",
    "encoder_service/ingress.py",
    "encoder_service/cli.py",
    "encoder_service/commands/check.py",
    "encoder_service/llm/chat.py",
    "encoder_service/llm/embedder.py",
    "encoder_service/bench",
    "router/router.py",
    "router/replicas",
    "actors/encoder.py",
    "actors/store",
)
FRONT_DOOR = (
    ("wire",),
    ("config.py",),
    ("intake", "ops"),
    ("api", "service.py"),
    ("llm",),
    ("ingress.py",),
)
"""Floors of encoder_service from the ground up: what answers a request imports nothing above it."""
MOST_FILES = 20
"""Side by side in one folder, actors/families excepted: it has one folder per model family."""


def modules() -> list[Path]:
    return [
        path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if "_pb2" not in path.name
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def within(path: Path, places: tuple[str, ...]) -> bool:
    """Whether a file is one of these, or in one of these folders."""
    name = name_of(path)
    return any(name == place or name.startswith(place + "/") for place in places)


def files_of(places: tuple[str, ...]) -> list[Path]:
    return [path for path in modules() if within(path, places)]


@cache
def imported(path: Path) -> frozenset[str]:
    """Every module that a file names in an import, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def file_of(name: str) -> Path | None:
    """The file of a module of ours; None: not a module, or not ours."""
    if name.split(".")[0] not in LAYERS:
        return None
    stem = ROOT / name.replace(".", "/")
    for file in (stem.with_suffix(".py"), stem / "__init__.py"):
        if file.exists() and "_pb2" not in file.name:
            return file
    return None


def needs(path: Path) -> set[Path]:
    """Files of ours that a file imports, itself not among them."""
    return {file for name in imported(path) if (file := file_of(name))} - {path}


def closure(start: Path) -> set[Path]:
    """The file and everything of ours that importing it imports."""
    seen: set[Path] = set()
    todo = [start]
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += needs(path)
    return seen


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_file_keeps_to_its_layer(path: Path) -> None:
    layer = LAYERS.index(name_of(path).split("/")[0])
    assert not roots(path) & set(LAYERS[layer + 1 :])
    assert "ray" not in roots(path) or within(path, MAY_IMPORT_RAY)


@pytest.mark.parametrize("height", range(len(FRONT_DOOR)))
def test_a_floor_of_the_front_door_imports_nothing_above_it(height: int) -> None:
    floors = [tuple(f"encoder_service/{one}" for one in floor) for floor in FRONT_DOOR]
    own = files_of(floors[height])
    above = {file for floor in floors[height + 1 :] for file in files_of(floor)}
    assert own
    for file in own:
        assert not needs(file) & above, file


@pytest.mark.parametrize("path", files_of(STANDALONE), ids=name_of)
def test_the_client_stands_alone(path: Path) -> None:
    for file in closure(path):
        assert not roots(file) & {"ray", "router"}, file
        if "actors" in roots(file):
            assert {
                one for one in map(name_of, needs(file)) if one.startswith("actors/")
            } <= CARRIED, file


@pytest.mark.parametrize("path", files_of(WITHOUT_TORCH), ids=name_of)
def test_it_never_loads_torch(path: Path) -> None:
    for file in closure(path):
        assert not roots(file) & {"torch", "transformers"} or file.name in LAZY_TORCH, file


def module_level(path: Path) -> set[Path]:
    """Files of ours that a file imports when it is imported, or for type checks."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in found if file_of(name)}
            # `from package import module` needs the module, not what else the package imports.
            names |= modules | ({node.module or ""} if found - modules else set())
        todo += ast.iter_child_nodes(node)
    return {file for name in names if (file := file_of(name))} - {path}


def cycles(graph: dict[Path, set[Path]]) -> set[tuple[str, ...]]:
    """The strongly connected files, more than one each (Tarjan)."""
    index: dict[Path, int] = {}
    low: dict[Path, int] = {}
    stack: list[Path] = []
    found: set[tuple[str, ...]] = set()

    def visit(node: Path) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.add(tuple(sorted(map(name_of, group))))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_no_files_import_each_other() -> None:
    assert cycles({path: module_level(path) for path in modules()}) == set()


def test_a_cycle_is_found() -> None:
    a, b, c = (ROOT / f"{name}.py" for name in "abc")
    assert cycles({a: {b}, b: {c}, c: {b}}) == {("b.py", "c.py")}


def test_families_do_not_import_the_registry_nor_what_loads_them() -> None:
    for path in files_of(("actors/families",)):
        if path.name in ("spec.py", "tower.py"):
            names = set(map(name_of, closure(path)))
            assert not names & {"actors/families/registry.py", "actors/models/load.py"}, path


@pytest.mark.parametrize("layer", LAYERS)
def test_no_folder_has_too_many_files(layer: str) -> None:
    for folder in {path.parent for path in modules() if name_of(path).startswith(layer)}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder


def test_contributing_lists_the_way_of_a_request() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:actors|router|encoder_service|tests)/[\w/.]+\.\w+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    way = text.partition("## The way of a request")[2].partition("What a graph captured")[0]
    files = re.findall(r"`((?:actors|router|encoder_service)/[\w/]+\.py)`", way)
    assert len(files) == len(set(files)) <= 45


PUBLIC_AND_INTERNAL = {"Embedding", "ServiceError"}
"""Each is a class of the client and another one of the actors; users import the client's."""


def test_no_two_classes_share_a_name() -> None:
    names = [
        node.name
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert {name for name in names if names.count(name) > 1} == PUBLIC_AND_INTERNAL
