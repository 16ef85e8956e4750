"""The commands, links and metrics that README.md and docs/ name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_links_exist(page: Path) -> None:
    for target in re.findall(r"make ([\w-]+)", PAGES[page]):
        assert f"\n{target}:" in (ROOT / "Makefile").read_text()
    for path, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", PAGES[page]):
        assert (page.parent / path).exists(), path
        assert not anchor or anchor in anchors((page.parent / path if path else page).read_text())


def anchors(page: str) -> list[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_series_in_the_pages_exists() -> None:
    packages = ("actors", "router", "encoder_service")
    code = "".join(path.read_text() for p in packages for path in (ROOT / p).rglob("*.py"))
    for name in re.findall(r"`encoder_(?:chat_)?(\w+)`", "".join(PAGES.values())):
        assert name in code
