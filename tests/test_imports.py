"""Tests of the import rule: modules import only from lower layers, in the order of docs/structures.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.sources import ROOT, import_statements, imports, modules, tree

# Top to bottom; names on one line may not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("dev",),
    ("tests.fakes",),
    ("bridle.__main__",),
    ("bridle.cli",),
    ("bridle.bench",),
    ("bridle.launch",),
    ("bridle.llm",),
    ("bridle.http", "bridle.lmtp"),
    ("bridle.chat",),
    ("bridle.serving",),
    ("bridle.distributed",),
    ("bridle.aici",),
    ("bridle.controllers",),
    ("bridle.controller_tools",),
    ("bridle.structured_output",),
    ("bridle.tokenizer",),
    ("bridle.early_start",),
    ("bridle.multimodal",),
    ("bridle.safe_http",),
    ("bridle.backends",),
    ("bridle.llamacpp",),
    ("bridle.model",),
    ("bridle.engine",),
    ("bridle.lora", "bridle.control_vectors"),
    ("bridle.gguf",),
    ("bridle.kv_store",),
    ("bridle.cpu_kernels",),
    ("bridle.demo",),
    ("bridle.config", "bridle.outputs", "bridle.constraint_usage", "bridle.sampling"),
    ("bridle.sampling_values", "bridle.watermark"),
    ("bridle.traces",),
    ("bridle.telemetry",),
    ("bridle.compat",),
    ("bridle.error_mapping",),
    (
        "bridle.errors",
        "bridle.safe_repr",
        "bridle.cgroups",
        "bridle.distribution",
        "bridle.file_cache",
        "bridle.lazy_names",
        "bridle.literals",
        "bridle.malloc",
        "bridle.os_sandbox",
        "bridle.logs",
        "bridle.load_progress",
        "bridle.threads",
    ),
    ("bridle.deprecated_names",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
# The values at the bottom know each other in one direction only.
ALLOWED_PEERS = {
    ("bridle.outputs", "bridle.constraint_usage"),
    ("bridle.outputs", "bridle.errors"),
    ("bridle.outputs", "bridle.sampling"),
    ("bridle.safe_repr", "bridle.errors"),
    ("bridle.file_cache", "bridle.errors"),
    ("bridle.os_sandbox", "bridle.errors"),
}
# The testing kit imports anything; besides tests only benchmarks drive it.
MAY_USE_TESTING = ("bridle.testing", "bridle.bench", "dev", "tests.fakes")
# Names that the package itself offers: reaching for them from below would be a hidden upward arrow.
FACADE = "bridle"

# Distributions that are imported under another name than their own.
DISTRIBUTIONS = {
    "google": "protobuf",
    "llama_cpp": "llama_cpp_python",
    "pil": "pillow",
    "griffe": "griffelib",
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry_api",
}

# Dependencies that no module of ours names: uvicorn takes the first two when they are there, two are parts of
# OpenTelemetry, whose packages share one name, `mkdocs.yml` names two, and tests start kernels with the last ones.
LOADED_BY_OTHERS = {
    "uvloop",
    "httptools",
    "opentelemetry_sdk",
    "opentelemetry_exporter_otlp_proto_http",
    "mkdocs_material",
    "mkdocstrings",
    "ipykernel",
    "jupyter_client",
}

STANDARD_ONLY = (
    "bridle.lmtp.messages",
    "bridle.lmtp.session",
    "bridle.errors",
    "bridle.sampling",
    "bridle.sampling_values",
    "bridle.outputs",
    "bridle.traces",
    "bridle.traces.highlight",
    "bridle.traces.replay_text",
    "bridle.traces.records",
)
ENGINE_FORBIDDEN = {
    "torch",
    "numpy",
    "transformers",
    "tokenizers",
    "socket",
    "ssl",
    "http",
    "urllib",
    "httpx",
}


def layer_of(name: str) -> str | None:
    """Return a module's layer: the second part of its dotted name. `dev` is one layer, and so are the fakes."""
    parts = name.split(".")
    if parts[0] == "dev":
        return "dev"
    if parts[:2] == ["tests", "fakes"]:
        return "tests.fakes"
    return ".".join(parts[:2]) if parts[0] == "bridle" and len(parts) > 1 else None


def test_every_module_has_a_layer() -> None:
    homeless = [
        name
        for name in modules()
        if name not in (FACADE, "bridle.testing") and layer_of(name) not in {*RANK, "bridle.testing"}
    ]
    assert not homeless, f"not in LAYERS: {homeless}"


def by_syntax(module: ast.Module) -> list[str]:
    found = [node for node in ast.walk(module) if isinstance(node, ast.Import | ast.ImportFrom)]
    return [f"{node.lineno} {ast.dump(node)}" for node in sorted(found, key=lambda node: node.lineno)]


def by_text(code: str) -> list[str]:
    return [f"{node.lineno} {ast.dump(node)}" for node in import_statements(code)]


def test_statements_of_imports_are_found_in_text() -> None:
    code = '''"""Text:

import nothing
"""
from __future__ import annotations

import os.path, sys as system  # noqa
from . import (
    one,  # the first (of two)
    two as other,
)

def late():
    """import nothing"""
    if True:
        from ..far.away import *
'''
    assert by_text(code) == by_syntax(ast.parse(code))
    assert len(by_text(code)) == 4


@pytest.mark.slow  # it parses all
def test_all_imports_are_found_in_text() -> None:
    for path in modules().values():
        assert by_text(path.read_text(encoding="utf-8")) == by_syntax(tree(path)), path


def test_no_module_imports_upward() -> None:
    assert not [
        f"{name}: {target} (line {line})"
        for name in modules()
        if name != FACADE
        for target, line in imports(name)
        if _points_up(layer_of(name), target)
    ]


def _points_up(own: str | None, target: str) -> bool:
    other = layer_of(target)
    if own is None or own == "bridle.testing" or other == own:
        return False
    if target == FACADE:  # `from bridle import X`: fine where everything is below anyway, or for the version
        return RANK[own] > RANK["bridle.llm"]
    if other is None or (own, other) in ALLOWED_PEERS:
        return False
    if other == "bridle.testing":
        return own not in MAY_USE_TESTING
    return RANK[other] <= RANK[own]


def test_engine_is_plain_python() -> None:
    wrong = [
        f"{name}: {target} (line {line})"
        for name in modules()
        if layer_of(name) == "bridle.engine"
        for target, line in imports(name)
        if target.split(".")[0] in ENGINE_FORBIDDEN
    ]
    assert not wrong


@pytest.mark.parametrize("name", [name for name in STANDARD_ONLY if name in modules()])
def test_standard_library_only(name: str) -> None:
    allowed = {*sys.stdlib_module_names, "bridle"}
    wrong = [f"{target} (line {line})" for target, line in imports(name) if target.split(".")[0] not in allowed]
    assert not wrong


def test_third_party_imports_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    used_by_us = (
        *("aici", "cluster", "bench", "docs", "ray", "otel", "fused", "gguf", "llamacpp", "notebook", "tools"),
        *("browser", "audio", "encryption", "video"),
    )
    wanted = [*project["dependencies"], *(text for name in used_by_us for text in extras[name])]
    declared = {re.split(r"[^\w-]", text)[0].lower().replace("-", "_") for text in wanted} - {"bridle_llm"}
    tops = {target.split(".")[0].lower() for name in modules() for target, _ in imports(name)}
    used = {DISTRIBUTIONS.get(top, top) for top in tops}
    ours = {
        *sys.stdlib_module_names,
        "bridle",
        "dev",
        "examples",
        "scripts",
        "tests",
        "pydantic_core",
    }  # the last: of pydantic
    assert used - ours - declared == set()
    assert declared - used - LOADED_BY_OTHERS == set()


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import bridle", {"dataclasses", "importlib.abc", "pathlib", "tempfile"}),
        ("import bridle.engine; from bridle import Decision, SamplingParams", {"torch", "numpy", "transformers"}),
        (
            "from bridle.cli import main; assert main(['--help']) == 0",
            {"torch", "transformers", "numpy", "tokenizers", "fastapi", "asyncio", "structlog", "bridle.cli.serve"},
        ),
        (
            "import bridle.serving, bridle.http.app, bridle.launch.launcher, bridle.llm;"
            "import bridle.serving.models.early_parts, bridle.model.pooling.settings",
            {"torch", "transformers"},
        ),
        (  # the router of replicas; and a replica, until it loads a model
            "import bridle.launch.replicas, bridle.distributed.replicas, bridle.distributed.replica_server",
            {"torch", "transformers"},
        ),
        (  # each process of the control runtime
            "import bridle.aici.runtime.main, bridle.aici.runtime.worker, bridle.aici.runtime.compiler;"
            "from bridle.demo import demo_model_path;"
            "bridle.aici.runtime.main.configure_logs_as_told();"
            "bridle.aici.runtime.main.load_vocabulary(str(demo_model_path()))",
            {"torch", "transformers", "PIL", "http.client", "asyncio", "bridle.engine", "bridle.controller_tools"}
            | {"jinja2", "bridle.gguf.reader", "structlog", "rich"},
        ),
    ],
)
def test_import_is_light(statement: str, absent: set[str]) -> None:
    code = f"import sys; {statement}; print(sorted({absent!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- circles -------------------------------------------------------------------------------------------------

#: Circles of files that are let be: two halves of one thing, within one package.
MAX_CIRCLES = 4


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the import cycles: strongly connected components of more than one node (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        path.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in number:
                visit(target)
            if target in path:
                lowest[node] = min(lowest[node], lowest[target])
        if lowest[node] == number[node]:
            start = path.index(node)
            members = path[start:]
            del path[start:]
            if len(members) > 1:
                found.append(sorted(members))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def import_graph() -> dict[str, set[str]]:
    """Return the imports of each module, at any depth of its code, including imports for types."""
    known = modules()
    return {name: {target for target, _ in imports(name) if target in known} - {name} for name in known}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": {"d"}, "f": {"a", "d"}, "g": set()}
    assert circles(graph) == [["a", "b", "c"], ["d", "e"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_few_files_import_each_other() -> None:
    found = circles(import_graph())
    assert len(found) <= MAX_CIRCLES, found
    assert all(len({layer_of(name) for name in circle}) == 1 for circle in found), found


def test_no_packages_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name, targets in import_graph().items():
        own = layer_of(name)
        if own is not None:
            others = {layer_of(target) for target in targets} - {own, None}
            graph.setdefault(own, set()).update(other for other in others if other is not None)
    assert circles(graph) == []
