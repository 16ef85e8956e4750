"""The wheel of packages/client needs no module and no dependency that it does not bring."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from tests.unit.deploy.test_layers import LAYERS, ROOT, file_of, imported

FOLDER = ROOT / "packages" / "client"
OPTIONAL = {"torch", "cuda", "pyarrow", "vllm", "prometheus_client", "pydantic"}
"""Imported where they are needed, by whoever has them."""
MODULES = {
    "PIL": "pillow",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "google": "protobuf",
}
"""Names of packages that are not those of their modules."""

WHOLE_PACKAGE = {"encoder_service.engines.vllm_local"}
"""Imported where it is there: without it, the connector says what to install."""


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def needed(folder: Path) -> dict[str, str]:
    """Dependencies by name, with their versions."""
    named = (
        re.fullmatch(r"([\w-]+)(.*)", one) for one in project(folder)["project"]["dependencies"]
    )
    return {one[1]: one[2] for one in named if one}


def shipped() -> set[Path]:
    wheel = project(FOLDER)["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in wheel.items():
        assert source == f"../../{target}"
    places = [ROOT / target for target in wheel.values()]
    assert all(place.exists() for place in places)
    found = [place.rglob("*.py") if place.is_dir() else [place] for place in places]
    return {path for paths in found for path in paths}


def test_every_module_that_is_imported_is_in_the_wheel() -> None:
    files = shipped()
    assert ROOT / "encoder_service/client/client.py" in files
    for path in files:
        for name in imported(path):
            file = file_of(name)
            whole = name in WHOLE_PACKAGE
            assert file is None or file in files or whole, f"{path} imports {name}"


def test_every_dependency_is_named_and_used() -> None:
    roots = {name.split(".")[0] for path in shipped() for name in imported(path)}
    others = roots - set(LAYERS) - OPTIONAL - sys.stdlib_module_names
    assert {MODULES.get(name, name) for name in others} == set(needed(FOLDER))


def test_the_whole_package_needs_the_same_versions() -> None:
    whole = needed(ROOT)
    for name, version in needed(FOLDER).items():
        assert whole[name] == version
