"""k8s/*.lock: the image installs what pyproject.toml asks for, and nothing without a hash."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ASKED = {
    "requirements": PROJECT["project"]["dependencies"],
    "build": PROJECT["build-system"]["requires"],
}


def pins(name: str) -> dict[str, list[str]]:
    """The version of each package, followed by its hashes."""
    text = (ROOT / "k8s" / f"{name}.lock").read_text()
    found = re.findall(
        r"^([\w.-]+)==(\S+)(( \\\n +--hash=sha256:[0-9a-f]{64})*)$", text, flags=re.M
    )
    return {package: [version, *hashes.split()[1::2]] for package, version, hashes, _ in found}


def unsatisfied(asked: Iterable[str], pinned: Mapping[str, Sequence[str]]) -> list[str]:
    """Requirements that no pin satisfies."""
    found = []
    for each in map(Requirement, asked):
        versions = pinned.get(canonicalize_name(each.name), [])[:1]
        if not any(map(each.specifier.contains, versions)):
            found.append(str(each))
    return found


@pytest.mark.parametrize("name", ASKED)
def test_the_pins_are_what_the_project_asks_for(name: str) -> None:
    assert not unsatisfied(ASKED[name], pins(name)), "run `make lock`"


@pytest.mark.parametrize("name", ASKED)
def test_every_pin_has_hashes(name: str) -> None:
    assert all(len(pin) > 1 for pin in pins(name).values())


def test_new_and_changed_requirements_are_found() -> None:
    pinned = pins("requirements")
    assert unsatisfied(["torch<2", "pillow>=12", "toolbelt"], pinned) == ["torch<2", "toolbelt"]


def test_the_image_installs_only_what_is_pinned() -> None:
    dockerfile = (ROOT / "k8s" / "Dockerfile").read_text()
    installs = re.findall(r"pip install (.*)", dockerfile.replace("\\\n", ""))
    assert len(installs) == 3
    for each in installs:
        assert "--require-hashes" in each or "--no-index --no-deps" in each
