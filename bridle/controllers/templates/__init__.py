"""Templates for a new controller: a folder that builds with one command, in one of several languages.

Files of a template end in `.in`; `@NAME@`, in files and in their names, is replaced by the controller's name. Languages
that compile to a module share common files, and so do scripts.
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

_TEMPLATES = Path(__file__).parent / "files"
_SUFFIX = ".in"
_PLACEHOLDER = "@NAME@"
_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}\Z")
_SCRIPTS = ("js", "python")
_TRACES = "traces/"
#: The file with the interface against which components are built.
_WIT = FOLDER.parents[1] / "aici" / "runtime" / "wit" / "controller.wit"


@dataclass(frozen=True, slots=True)
class CreatedProject:
    """The folder that was created. `first` is the file that the user should open first."""

    folder: Path
    files: tuple[Path, ...]
    first: Path


def new_controller(name: str, language: Language, parent: Path, *, as_module: bool = False) -> CreatedProject:
    """Create the folder `parent/name`. With `as_module`, a Python controller becomes a module of its own instead of a
    script. Raises `InvalidRequest` for an invalid name, or if the folder exists."""
    if language not in LANGUAGES:
        raise InvalidRequest(f"the language is {language!r}; must be one of {', '.join(LANGUAGES)}", "lang")
    if as_module and language == "js":
        raise InvalidRequest("a JavaScript controller is a script; for a module, set lang to assemblyscript", "lang")
    if _NAME.match(name) is None:
        raise InvalidRequest(
            f"the name is {name[:80]!r}; must be 1 to 40 lower-case letters, digits and dashes, a letter first", "NAME"
        )
    folder = parent / name
    if folder.exists():
        raise InvalidRequest(f"{folder} exists already; nothing was changed", "NAME")
    template = f"{language}-module" if as_module and language in _SCRIPTS else language
    files = tuple(_write(source, folder / target, name) for source, target in _sources(name, template))
    return CreatedProject(folder, files, files[0])


def _sources(name: str, template: str) -> Iterator[tuple[Path, str]]:
    """Yield the files to copy, with their targets, the controller itself first. A template's own files come before
    common files."""
    common = _TEMPLATES / ("script" if template in _SCRIPTS else "module")
    found: dict[str, Path] = {}
    for base in (common, _TEMPLATES / template):
        for path in base.rglob(f"*{_SUFFIX}"):
            target = path.relative_to(base).as_posix().removesuffix(_SUFFIX).replace(_PLACEHOLDER, name)
            if target.startswith(_TRACES) and template == "python-module":
                continue  # compiling it takes longer than a test of traces waits
            found[target] = path
    for target in sorted(found, key=lambda target: (not _is_program(target, name), target)):
        yield found[target], target
    if template == "c":
        yield from ((path, f"include/{path.name}") for path in sorted((FOLDER / "include").glob("*.h")))
    if template == "python-module":
        yield _WIT, _WIT.name


def _is_program(target: str, name: str) -> bool:
    return Path(target).stem in (name, "lib", "index", "app") and not target.startswith(_TRACES)


def _write(source: Path, target: Path, name: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == _SUFFIX:
        text = source.read_text(encoding="utf-8").replace(_PLACEHOLDER, name)
        target.write_text(text, encoding="utf-8")
    else:
        shutil.copyfile(source, target)
    return target
