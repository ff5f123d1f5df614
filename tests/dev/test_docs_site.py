"""Tests of the documentation site: it has every page, its links work, and it loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import bridle
from dev import docs_site
from tests.sources import ROOT
from tests.waiting import PATIENCE

DOCS = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}


def leaves(nav: list[Any]) -> Iterator[str]:
    for each in nav:
        yield from leaves(next(iter(each.values()))) if isinstance(each, dict) else [each]


def test_every_page_is_in_the_order_once() -> None:
    places = list(leaves(docs_site.nav((ROOT / docs_site.INDEX).read_text(encoding="utf-8"))))
    assert sorted(places) == sorted({*DOCS, *docs_site.PROJECT.values(), docs_site.REFERENCE})


def test_the_order_is_that_of_the_index() -> None:
    index = "# All\n\n## One\n\n- [b](b.md): of [a](a.md), C#.\n\n## Reference\n\n- [c](c.md#at). [d](d.md) [b](b.md)\n"
    assert docs_site.nav(index) == [
        "index.md",
        "contents.md",
        {"One": ["b.md", "a.md"]},
        {"Reference": ["d.md", "b.md", docs_site.REFERENCE]},
        {"Project": ["changelog.md", "contributing.md"]},
    ]


@pytest.mark.parametrize(
    ("source", "target", "made"),
    [
        ("README.md", "docs/speed.md#results", "speed.md#results"),
        ("README.md", "docs/README.md", "contents.md"),
        ("README.md", "docs/pictures/steered.svg", "pictures/steered.svg"),
        ("docs/http.md", "tgi.md", "tgi.md"),
        ("docs/http.md", "README.md", "contents.md"),
        ("docs/policies.md", "../examples/policies.toml", "files/examples/policies.toml.md"),
        ("docs/control.md", "../bridle/aici/runtime/README.md", "files/bridle/aici/runtime/README.md"),
        ("bridle/aici/runtime/README.md", "../../../docs/control.md#x", "../../../../control.md#x"),
        ("docs/http.md", "#limits", "#limits"),
        ("docs/http.md", "https://example.org/a.md", "https://example.org/a.md"),
    ],
)
def test_links_are_those_of_the_site(source: str, target: str, made: str) -> None:
    code = f"\n```\n[a]({target})\n```\n"
    assert docs_site.rewritten(f"[a]({target}){code}", source) == f"[a]({made}){code}"


def test_what_pages_link_to_is_there() -> None:
    made = docs_site.beside()
    assert {*docs_site.PROJECT.values(), docs_site.REFERENCE} <= made.keys()
    for path in (ROOT / "docs").glob("*.md"):
        for target in docs_site.linked(path.read_text(encoding="utf-8"), f"docs/{path.name}"):
            place = docs_site.page_of(target)
            assert place in made or (ROOT / "docs" / place).is_file(), (path.name, target)
    named = re.findall(r"^::: bridle\.(\w+)$", made[docs_site.REFERENCE], re.MULTILINE)
    assert named == [name for name in bridle.__all__ if name != "__version__"]


def test_every_picture_is_shown_by_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {
        target for page in pages for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {path.name for path in (ROOT / "docs/pictures").iterdir()} <= {Path(target).name for target in shown}


#: What a browser loads by itself.
LOADED = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]+?(?:src|href)=[\"']?((?:https?:)?//[^\"'> ]+)")
STYLED = re.compile(r"(?:url\(\s*[\"']?|@import\s+[\"'])((?:https?:)?//[^\"')]+)")


@pytest.mark.slow
def test_it_is_built_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {
        path.relative_to(tmp_path).as_posix(): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")
    }
    assert {place.replace(".md", ".html") for place in DOCS} <= pages.keys()
    for name, text in pages.items():
        assert LOADED.findall(text) == [], name
    for path in tmp_path.rglob("*.css"):
        assert STYLED.findall(path.read_text(encoding="utf-8")) == [], path.name
    for name in bridle.__all__:
        assert f'id="bridle.{name}"' in pages["reference.html"] or name == "__version__", name
    assert "_param(" not in pages["reference.html"]  # defaults are those that users see
    assert "<code>--control auto|on|off</code>" in pages["controllers.html"]
    assert (tmp_path / "search/search_index.json").stat().st_size > 100_000
