"""The package's source files and their imports, for tests that inspect code without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "bridle"
#: Texts in triple quotes, and import statements. To parse all modules takes seconds.
_TEXTS = re.compile(r"""("{3}|'{3})(?:\\.|[^\\])*?\1""", re.S)
_IMPORTS = re.compile(r"^[ \t]*((?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(?:\((?:#[^\n]*|[^)#])*\)|[^\n(]+))", re.M)
#: What stands beside the package for those who work on it.
DEV = ROOT / "dev"
#: Fakes of what is around the engine, for tests and benchmarks.
FAKES = ROOT / "tests" / "fakes"


#: Sources of standard controllers. All but their recipes run inside the sandbox and are no modules of ours.
GUESTS = DEV / "controllers" / "sources"


@cache
def modules() -> dict[str, Path]:
    """Return all modules of the package, of `dev/` and of the fakes by dotted name."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *DEV.rglob("*.py"), *FAKES.rglob("*.py")]):
        if GUESTS in path.parents and path.name != "build.py":
            continue
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def imports(name: str) -> tuple[tuple[str, int], ...]:
    """Return (dotted name, line) of every import in module `name`, with relative imports resolved.

    `from a import b` gives `a.b` if that is a module of this project, else `a`. `import bridle` is reported only for
    uses of its attributes. Imports of the version are left out.
    """
    return tuple(_imports(name))


def _imports(name: str) -> Iterator[tuple[str, int]]:
    path = modules()[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in import_statements(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name != "bridle")
            if any(alias.name.split(".")[0] == "bridle" and not alias.asname for alias in node.names):
                yield from _taken_by_attribute(tree(path))
        else:
            base = _absolute(node, package)
            for alias in node.names:
                if alias.name == "__version__":
                    continue
                full = f"{base}.{alias.name}"
                yield (full if full in modules() else base), node.lineno


def import_statements(code: str) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements of a module, at any depth."""
    plain = _TEXTS.sub(lambda text: "\n" * text[0].count("\n"), code)
    for found in _IMPORTS.finditer(plain):
        (node,) = ast.parse(found[1]).body
        assert isinstance(node, ast.Import | ast.ImportFrom)
        yield ast.increment_lineno(node, plain.count("\n", 0, found.start(1)))


def _taken_by_attribute(module: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(module):
        match node:
            case ast.Attribute(value=ast.Name(id="bridle"), attr=name) if name != "__version__":
                yield "bridle", node.lineno


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


#: Where the pages expect a server.
SERVED_AT = "http://127.0.0.1:8080"
#: The model of `make serve`, which has to be downloaded. `demo` stands for it; `test_readme.py` takes the real one.
DEFAULT_MODEL = "smollm2"
