"""Tests that the code has no forbidden content: ways to run code from data, and paths of a developer's machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import PACKAGE, ROOT, imports, modules, tree

# Reading any of these formats can run code, or (multiprocessing) sends pickles between processes.
FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "imp",
}
PICKLING_PARTS = {
    "multiprocessing",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "multiprocessing.pool",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "__import__",
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "os.system",
    "os.popen",
}
FORBIDDEN_ARGUMENTS = {
    ("trust_remote_code", True),
    ("allow_pickle", True),
    ("shell", True),
    ("weights_only", False),
}
# What is forbidden has one of these words in it; to parse all takes seconds.
SUSPICIOUS = re.compile(
    "|".join(
        rf"\b{re.escape(name)}\b"
        for name in (*FORBIDDEN_MODULES, *PICKLING_PARTS, *FORBIDDEN_CALLS, *(word for word, _ in FORBIDDEN_ARGUMENTS))
    )
)
# Each with one letter in brackets, so that this file does not match itself.
MACHINE_PATHS = re.compile("/wor[k]/|/roo[t]/|/User[s]/|/tmp/brie[f]|/opt/wheel[s]")
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".cfg",
    ".yaml",
    ".yml",
    ".json",
    ".sh",
    ".jinja",
    ".ts",
    ".tsx",
    ".mjs",
    ".css",
    ".js",
    "",
}
TEXT_FOLDERS = ("bridle", "tests", "docs", "examples", "dev", "scripts", "web", ".ci")


def test_no_module_makes_code_from_data() -> None:
    assert not [
        f"{name}: {wrong}"
        for name, path in modules().items()
        if SUSPICIOUS.search(path.read_text(encoding="utf-8"))
        for wrong in (*_bad_imports(name), *_bad_calls(tree(path)))
    ]


def _bad_imports(name: str) -> Iterator[str]:
    for target, line in imports(name):
        if target.split(".")[0] in FORBIDDEN_MODULES or target in PICKLING_PARTS:
            yield f"import {target} (line {line})"


def _bad_calls(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        called = _dotted(node.func)
        if called in FORBIDDEN_CALLS or called.removeprefix("builtins.") in FORBIDDEN_CALLS:
            yield f"{called}() (line {node.lineno})"
        for keyword in node.keywords:
            value = keyword.value
            if isinstance(value, ast.Constant) and (keyword.arg, value.value) in FORBIDDEN_ARGUMENTS:
                yield f"{keyword.arg}={value.value} (line {node.lineno})"


def _dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression, such as `a.b.c`; empty for expressions that are not such names."""
    if isinstance(node, ast.Name):
        return node.id
    before = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{before}.{node.attr}" if before else ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "import builtins; builtins.exec('1')",
        "torch.load('x')",
        "f(trust_remote_code=True)",
        "subprocess.run('x', shell=True)",
    ],
)
def test_gate_sees_what_it_should(code: str) -> None:
    assert list(_bad_calls(ast.parse(code)))


def test_gate_lets_ordinary_code_pass() -> None:
    assert not list(_bad_calls(ast.parse("model.eval(); re.compile('x'); safetensors.torch.load_file('x')")))


def test_no_machine_paths() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if MACHINE_PATHS.search(line)
    ]
    assert not wrong


def _text_files() -> Iterator[Path]:
    # In a second working tree `.git` is a file that says where the first one is.
    yield from (
        path for path in ROOT.iterdir() if path.is_file() and path.name != ".git" and path.suffix in TEXT_SUFFIXES
    )
    for folder in TEXT_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            hidden = {"__pycache__", "node_modules"} & set(path.parts)
            if path.is_file() and not hidden and path.suffix in TEXT_SUFFIXES and path.stat().st_size < 1 << 20:
                yield path


def test_package_carries_no_unsafe_weights() -> None:
    unsafe = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy"}
    assert not [str(path) for path in PACKAGE.rglob("*") if path.suffix in unsafe]


def test_the_page_for_newcomers_is_up_to_date() -> None:
    """The page equals the output of `python -m dev.coming_from --write`."""
    from dev.coming_from import PAGE, written

    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "python -m dev.coming_from --write"
