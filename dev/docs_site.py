"""The documentation as a website: the settings of the site that depend on the pages themselves, in addition to
`mkdocs.yml`.

    make docs

The pages have the order of the index, `docs/README.md`. The README is the first page, and files outside `docs/` that a
page links to become pages, too. The reference of the Python API consists of the docstrings of all names that `bridle`
exports, and exists only on the site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bridle

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INDEX = "docs/README.md"
#: Files outside `docs/` that have a page of their own name.
PROJECT = {
    "README.md": "index.md",
    INDEX: "contents.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
REFERENCE = "reference.md"
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def nav(index: str) -> list[Any]:
    """Return the order of the site: the sections of the index with the pages to which they link, and then all other
    pages."""
    sections: list[Any] = ["index.md", "contents.md"]
    for title, body in re.findall(r"^## (.+)\n([^#]*(?:#(?!# )[^#]*)*)", index, re.MULTILINE):
        pages = list(dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)\)", body)))
        sections.append({title: [*pages, *([REFERENCE] if title == "Reference" else [])]})
    return [*sections, {"Project": ["changelog.md", "contributing.md"]}]


def page_of(source: str) -> str:
    """Return the path on the site of a file in the repository."""
    if source in PROJECT:
        return PROJECT[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"files/{source}" if source.endswith(".md") else f"files/{source}.md"


def linked(text: str, source: str) -> set[str]:
    """Return the files of the repository that a page links to."""
    return {_file_of(target, source) for target in _LINK.findall(_FENCE.sub("", text))}


def rewritten(text: str, source: str) -> str:
    """Return a page's text with its links to files converted to links within the site."""
    here = posixpath.dirname(page_of(source))

    def site(found: re.Match[str]) -> str:
        return posixpath.relpath(page_of(_file_of(found[1], source)), here or ".")

    return _outside_code(text, lambda part: _LINK.sub(site, part))


def _file_of(target: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    made, end = [], 0
    for block in _FENCE.finditer(text):
        made += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*made, change(text[end:])])


def beside() -> dict[str, str]:
    """Return the texts of all pages that are not files in `docs/`, by path on the site."""
    made = {REFERENCE: reference()}
    waiting = [*PROJECT, *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md")))]
    seen: set[str] = set()
    while waiting:
        source = waiting.pop()
        if source in seen or not (ROOT / source).is_file():  # a broken link fails the build
            continue
        seen.add(source)
        is_page, is_own = source.endswith(".md"), source.startswith("docs/") and source != INDEX
        text = (ROOT / source).read_text(encoding="utf-8") if is_page or not is_own else ""
        if not is_own:
            made[page_of(source)] = rewritten(text, source) if is_page else _listing(source, text)
        if is_page:
            waiting += linked(text, source)
    return made


def _listing(source: str, text: str) -> str:
    return f"# {posixpath.basename(source)}\n\n`{source}`\n\n```{source.rpartition('.')[2]}\n{text}```\n"


def reference() -> str:
    """Return the page of the Python API, with every name that the package exports."""
    intro = "What `from bridle import ...` gives, from its docstrings. [How to use it](python-api.md).\n"
    names = [name for name in bridle.__all__ if not name.startswith("_")]
    return "\n".join(["# Reference of the Python API\n", intro, *(f"::: bridle.{name}\n" for name in names)])


# -- what mkdocs calls -----------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the order of the pages, and make the anchors of headings like those of code hosting sites."""
    config.nav = nav((ROOT / INDEX).read_text(encoding="utf-8"))
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slug}
    return config


def slug(heading: str, separator: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not files in `docs/`."""
    from mkdocs.structure.files import File, InclusionLevel

    index = files.get_file_from_path("README.md")
    if index is not None:
        files.remove(index)
    files.append(File.generated(config, "icon.svg", abs_src_path=str(ROOT / "web/icon.svg")))
    for place, text in beside().items():
        rank = InclusionLevel.NOT_IN_NAV if place.startswith("files/") else InclusionLevel.INCLUDED
        files.append(File.generated(config, place, content=text, inclusion=rank))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Convert the links in a page of `docs/`."""
    return markdown if page.file.generated_by is not None else rewritten(markdown, f"docs/{page.file.src_uri}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the backslash before a bar from table cells. In Markdown, the backslash keeps a bar in code from ending
    the table cell."""
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)
