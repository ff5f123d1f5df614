"""Tests of rules for the tests: their imports from each other, and their uses of the package's private names."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.sources import PACKAGE, ROOT

MODULES = sorted((ROOT / "tests").rglob("*.py"))
#: Uses of private names of the package in all tests together.
MAX_PRIVATE = 99
#: Names that the package shares with Python and its libraries.
FOREIGN = {"_C", "_cuda_endAllocateToPool", "_cuda_releasePool", "_exit", "_getframe", "_replace", "_scaled_mm"}
FOREIGN |= {"_is_expert_parallel", "_parameters", "_proj"}


def private_names() -> set[str]:
    """Return the package's names with a leading underscore, except those of other protocols, such as `_repr_html_`."""
    text = " ".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    return {name for name in re.findall(r"\b_[a-zA-Z]\w*\b", text) if not name.endswith("_")} - FOREIGN


#: A private attribute of another object, a private name among quotes, and what is imported from the package.
USE = re.compile(
    r"""(?<!\bself)(?<!\bcls)(?<=[\w)\]])\.(?P<attribute>_[a-zA-Z]\w*)|"(?:bridle\.[\w.]*\.)?(?P<text>_[a-zA-Z]\w*)\""""
    r"""|^from bridle[\w.]* import (?P<names>\([^)]*\)|.*)""",
    re.MULTILINE,
)


def uses(source: str, known: set[str]) -> Iterator[str]:
    """Yield the private names of the package that a module uses, as attributes, imports, and arguments of
    `monkeypatch`."""
    for match in USE.finditer(source):
        names = [match["attribute"] or match["text"]] if match["names"] is None else re.findall(r"\w+", match["names"])
        yield from (name for name in names if name in known and name.startswith("_"))


def test_few_tests_depend_on_private_names() -> None:
    known = private_names()
    found = [f"{path.relative_to(ROOT)} {name}" for path in MODULES for name in uses(path.read_text("utf-8"), known)]
    assert len(found) <= MAX_PRIVATE, "\n".join([f"{len(found)} uses of private names; test what is public:", *found])


@pytest.mark.parametrize(
    "code", ["a()._run", "from bridle.cli import (\n    _run,\n)", 'setattr(module, "_run", 1)', 'f("bridle.a._run")']
)
def test_the_count_sees_each_way_to_look_inside(code: str) -> None:
    assert list(uses(code, {"_run"})) == ["_run"]


def test_the_count_leaves_out_what_is_a_test_s_own() -> None:
    assert not list(uses('self._run; os._exit(1); f("_other"); x = _run', {"_run"}))


def test_no_module_imports_from_a_test_module() -> None:
    """Code that several tests need is in `tests/fakes`, in a `conftest.py` or in a support module."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in MODULES
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"^\s*(from tests(\.\w+)*\.test_\w+ import|from tests[\w.]* import .*\btest_)", line)
    ]
    assert not found
