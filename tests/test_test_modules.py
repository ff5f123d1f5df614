"""Rules for the tests themselves: what they import from each other, and how often they look inside of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.sources import PACKAGE, ROOT, tree

MODULES = sorted((ROOT / "tests").rglob("*.py"))
#: Uses of private names of the package in all tests together.
MAX_PRIVATE = 99
#: Names that the package shares with Python and its libraries.
FOREIGN = {"_exit", "_getframe", "_replace", "_scaled_mm"}
IS_NAME = re.compile(r"(bridle\.[\w.]*\.)?_\w+")


def private_names() -> set[str]:
    """Names that the package uses with an underscore in front, and that are no protocol of others (`_repr_html_`)."""
    text = " ".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    return {name for name in re.findall(r"\b_[a-zA-Z]\w*\b", text) if not name.endswith("_")} - FOREIGN


def uses(module: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Private attributes of other objects, imports of private names, and private names given to `monkeypatch`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and node.attr in known:
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bridle"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.Constant) and IS_NAME.fullmatch(value := str(node.value)):
            yield from ((node.lineno, value) for name in known if value.rpartition(".")[2] == name)


def test_few_tests_depend_on_private_names() -> None:
    known = private_names()
    found = [f"{path.relative_to(ROOT)}:{line} {name}" for path in MODULES for line, name in uses(tree(path), known)]
    assert len(found) <= MAX_PRIVATE, "\n".join([f"{len(found)} uses of private names; test what is public:", *found])


@pytest.mark.parametrize(
    "code", ["a._run", "from bridle.cli import _main", "monkeypatch.setattr(module, '_main', 1)", "f('bridle.a._main')"]
)
def test_the_count_sees_each_way_to_look_inside(code: str) -> None:
    assert len(list(uses(ast.parse(code), {"_run", "_main"}))) == 1


def test_the_count_leaves_out_what_is_a_test_s_own() -> None:
    assert not list(uses(ast.parse("self._main; os._exit(1); f('_other')"), {"_main"}))


def test_no_module_imports_from_a_test_module() -> None:
    """What several tests need lies in `tests/fakes`, in a `conftest.py` or in a support module beside them."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in MODULES
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"^\s*(from tests(\.\w+)*\.test_\w+ import|from tests[\w.]* import .*\btest_)", line)
    ]
    assert not found
