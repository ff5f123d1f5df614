"""The kit for writing a controller of one's own: a folder that builds with one command, in a language of choice.

A template's files end in `.in`; `@NAME@`, in them and in their own names, becomes the controller's name. Languages
that compile to a module share what can be done with one, scripts likewise.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from bridle.controllers.standard import FOLDER
from bridle.errors import InvalidRequest

Language = Literal["c", "js", "python", "assemblyscript", "rust"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

_TEMPLATES = Path(__file__).parent / "templates"
_SUFFIX = ".in"
_PLACEHOLDER = "@NAME@"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}\Z")
_SCRIPTS = ("js", "python")


@dataclass(frozen=True, slots=True)
class Made:
    """A new folder. `first` is the file to open first."""

    folder: Path
    files: tuple[Path, ...]
    first: Path


def new_controller(name: str, language: Language, parent: Path) -> Made:
    """Make the folder `parent/name`. Raises `InvalidRequest` for a bad name, or if there is something already."""
    if language not in LANGUAGES:
        raise InvalidRequest(f"the language is {language!r}; must be one of {', '.join(LANGUAGES)}", "lang")
    if _NAME.match(name) is None:
        raise InvalidRequest(
            f"the name is {name[:80]!r}; must be 1 to 40 small letters, digits and dashes, a letter first", "NAME"
        )
    folder = parent / name
    if folder.exists():
        raise InvalidRequest(f"{folder} exists already; nothing was changed", "NAME")
    files = tuple(_write(source, folder / target, name) for source, target in _sources(name, language))
    return Made(folder, files, files[0])


def _sources(name: str, language: Language) -> Iterator[tuple[Path, str]]:
    """Files to copy and where to, the controller itself first."""
    common = _TEMPLATES / ("script" if language in _SCRIPTS else "module")
    found = [(path, path.relative_to(base)) for base in (_TEMPLATES / language, common) for path in base.rglob("*.in")]
    targets = [(path, str(target).removesuffix(_SUFFIX).replace(_PLACEHOLDER, name)) for path, target in found]
    yield from sorted(targets, key=lambda item: (not _is_program(item[1], name), item[1]))
    if language == "c":
        yield from ((path, f"include/{path.name}") for path in sorted((FOLDER / "include").glob("*.h")))


def _is_program(target: str, name: str) -> bool:
    return Path(target).stem in (name, "lib", "index")


def _write(source: Path, target: Path, name: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == _SUFFIX:
        text = source.read_text(encoding="utf-8").replace(_PLACEHOLDER, name)
        target.write_text(text, encoding="utf-8")
    else:
        shutil.copyfile(source, target)
    return target
