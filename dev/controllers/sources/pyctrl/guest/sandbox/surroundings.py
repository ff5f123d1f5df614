"""What a script finds around it: the modules of the standard library that make sense without files, network and
threads, and clear words about the rest.

A component is a picture of the interpreter's memory, taken while it was built; so what is imported here is there,
and nothing else can be.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import importlib.abc
import os
import random
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from sandbox import output

#: What scripts may import.
MODULES = (
    "abc",
    "array",
    "base64",
    "binascii",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "collections.abc",
    "colorsys",
    "contextlib",
    "copy",
    "copyreg",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "enum",
    "errno",
    "fnmatch",
    "fractions",
    "functools",
    "gc",
    "genericpath",
    "graphlib",
    "hashlib",
    "heapq",
    "html",
    "inspect",
    "io",
    "itertools",
    "json",
    "keyword",
    "locale",
    "math",
    "numbers",
    "operator",
    "os",
    "os.path",
    "pprint",
    "random",
    "re",
    "reprlib",
    "shlex",
    "stat",
    "statistics",
    "string",
    "struct",
    "sys",
    "textwrap",
    "time",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "warnings",
    "weakref",
    "zlib",
)
_CODECS = (
    "ascii",
    "cp1252",
    "hex_codec",
    "idna",
    "latin_1",
    "unicode_escape",
    "utf_16",
    "utf_32",
    "utf_8",
    "utf_8_sig",
)


def close() -> None:
    """While the component is built: load what will be there, and shut the door."""
    for name in (*MODULES, *(f"encodings.{codec}" for codec in _CODECS)):
        importlib.import_module(name)
    builtins.open = _no_files
    time.sleep = _no_sleep  # type: ignore[assignment]
    sys.path.clear()
    sys.path_importer_cache.clear()
    sys.meta_path.append(_Hint())
    importlib.import_module("pyaici.server")
    importlib.import_module("pyaici.server_native")
    gc.collect()
    gc.freeze()  # collections need not look at all this, nor copy its pages after a fork


def enter() -> None:
    """When an instance begins."""
    output.connect()
    random.seed(int.from_bytes(os.urandom(16)))  # by itself it would ask for 2,500 bytes, one by one


def _no_files(*arguments: Any, **options: Any) -> NoReturn:
    raise PermissionError("a script has no files; what it needs goes into its text, its prompt or shared variables")


def _no_sleep(seconds: float) -> NoReturn:
    raise RuntimeError(f"a script must not keep others waiting: use `await aici.sleep({seconds!r})`")


class _Hint(importlib.abc.MetaPathFinder):
    """Asked last: says what there is."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        why = "the sandbox of a script has no files, network or threads, but a good part of the standard library"
        raise ModuleNotFoundError(f"No module named {name!r}: {why}", name=name)
