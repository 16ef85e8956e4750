"""The direction of imports, and who may know torch and Ray. encoder_service -> router -> actors."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("actors", "router", "encoder_service")  # each may import itself and those before it
WITHOUT_TORCH = ("encoder_service", "router")
TORCH_FREE_ACTORS = {
    "types", "errors", "options", "sizing", "spec", "checkpoint", "budgets", "packing", "metrics",
    "cost", "ladder", "scaling", "shared", "two_paths", "crops", "view_spec",
    "windows",
    "line_messages", "messages", "sampling", "video", "video_spec", "container", "evs", "runs",
}  # fmt: skip
MAY_IMPORT_RAY = {
    "encoder_service/app.py",
    "encoder_service/ingress.py",
    "encoder_service/cli.py",
    "encoder_service/serve_file.py",
    "encoder_service/replicas.py",
    "router/direct.py",
    "router/router.py",
    "router/serve_fleet.py",
    "router/pinned.py",
    "actors/encoder.py",
    "actors/mirror.py",
    "actors/nixl.py",
    "actors/received.py",
    "actors/shared.py",
}
WITHIN = ("embedding.py", "vllm.py", "sglang.py")
"""Files of the client that import torch inside functions which give tensors, and nowhere else."""
CLIENT_HALF = ("encoder_service/client.py", "encoder_service/wire.py")


def modules() -> list[Path]:
    return [
        path for layer in LAYERS for path in (ROOT / layer).rglob("*.py") if "_pb2" not in path.name
    ]


def imported(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(path)}


def closure(start: Path) -> set[Path]:
    """The file and everything of ours that importing it imports."""
    seen: set[Path] = set()
    todo = [start]
    while todo:
        path = todo.pop()
        if path in seen or "_pb2" in path.name:
            continue
        seen.add(path)
        for name in imported(path):
            if name.split(".")[0] in LAYERS:
                file = ROOT / (name.replace(".", "/") + ".py")
                todo.append(file if file.exists() else file.with_suffix("") / "__init__.py")
    return seen


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_keeps_to_its_layer(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    layer = LAYERS.index(name.split("/")[0])
    assert not roots(path) & set(LAYERS[layer + 1 :])
    if "ray" in roots(path):
        assert name in MAY_IMPORT_RAY or name.startswith(
            ("encoder_service/bench", "encoder_service/llm")
        )
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("name", CLIENT_HALF)
def test_the_client_half_stands_alone(name: str) -> None:
    for path in closure(ROOT / name):
        assert not roots(path) & {"torch", "ray", "router", "actors"} or path.name in WITHIN


@pytest.mark.parametrize(
    "path",
    [ROOT / "router/router.py", ROOT / "encoder_service/ingress.py"]
    + [ROOT / f"actors/{name}.py" for name in sorted(TORCH_FREE_ACTORS)],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_ingress_and_router_processes_never_load_torch(path: Path) -> None:
    for file in closure(path):
        assert not roots(file) & {"torch", "transformers"} or file.name in WITHIN, file


def test_median_file_is_short() -> None:
    lengths = sorted(len(path.read_text().splitlines()) for path in modules())
    assert lengths[len(lengths) // 2] <= 130
