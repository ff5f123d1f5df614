"""Recipe of `jsctrl`: QuickJS and the shim in C, the library in JavaScript, saved as they are after they started."""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from bridle.errors import InvalidRequest
from dev.controllers.sources.jsctrl.bake import bake
from dev.controllers.toolchain import INCLUDE, ZIG, download, zig_cc

QUICKJS = "quickjs-ng==0.17.0.2"
SOURCES = {QUICKJS: "43d2e48272208721a7aaea8e3f02d4b9318f12ef20cc4f5421b59d9a470706ef"}
TOOLS = {"ziglang": ZIG, "wasmtime": "50.0.1"}
HERE = Path(__file__).parent
#: The files that every interpreter has, by the names of their modules.
COMMON = {
    f"aici/{path}": HERE / "lib" / f"{path}.js"
    for path in ("constraints", "driver", "gen", "level", "results", "steps", "text", "tokens")
}
_SCRIPTS = {
    "aici": "aici.js",
    "_aici": "native.js",
    "aici/chat": "chat.js",
    "aici/globals": "globals.js",
    "aici/main": "main.js",
    "aici/tools": "tools.js",
    "aici/vectors": "vectors.js",
}
#: So that an interrupted loop knows its line: every statement has an entry in the table of lines, not calls alone, and
#: the place of a jump is where it leads to, which the table takes for the byte before. What to look for in `quickjs.c`,
#: how often, and what it becomes.
_CHANGES = (
    (
        "    switch(tok = s->token.val) {\n    case '{':\n        if (js_parse_block(s))",
        1,
        "    emit_source_loc(s);\n    switch(tok = s->token.val) {\n    case '{':\n        if (js_parse_block(s))",
    ),
    (
        "if (unlikely(js_poll_interrupts(ctx)))\n",
        7,
        "if (unlikely(js_poll_interrupts(ctx)) && ++pc)\n",
    ),
)
_ENGINE = ("dtoa.c", "libregexp.c", "libunicode.c", "quickjs.c")
_FLAGS = (
    "--target=wasm32-wasi",
    "-mexec-model=reactor",
    "-mcpu=mvp+bulk_memory+sign_ext+nontrapping_fptoint+mutable_globals",
    "-O2",
    "-g0",
    "-DNDEBUG",
    "-D_GNU_SOURCE",
    "-Dclock_gettime=no_clock",  # both are in the shim
    "-Dgettimeofday=no_time",
    "-fno-sanitize=undefined",  # else it traps where QuickJS relies on two's complement
    "-Wl,--strip-all",
    "-Wl,-z,stack-size=524288",
    "-Wno-everything",
)


def build(out: Path) -> None:
    """Compile, start and save."""
    make(out, COMMON | {name: HERE / "lib" / file for name, file in _SCRIPTS.items()})


def make(out: Path, library: dict[str, Path]) -> None:
    """An interpreter with these modules built in; it begins with `aici/main`."""
    with tempfile.TemporaryDirectory(prefix="bridle-quickjs-") as name:
        folder = Path(name)
        engine = unpack(folder)
        (folder / "library.h").write_text(embedded(library))
        raw = folder / "raw.wasm"
        sources = [HERE / "shim.c", *(engine / file for file in _ENGINE)]
        zig_cc([*_FLAGS, f"-I{INCLUDE}", f"-I{engine}", f"-I{folder}", *sources, "-o", raw])
        out.write_bytes(bake(raw.read_bytes()))


def unpack(folder: Path) -> Path:
    """QuickJS's own sources out of the package that carries them, with our changes."""
    archive = folder / "archive"
    archive.mkdir()
    path = download(QUICKJS, SOURCES[QUICKJS], archive)
    engine = folder / "engine"
    engine.mkdir()
    with tarfile.open(path) as tar:
        for member in tar.getmembers():
            place = PurePosixPath(member.name)
            if place.parent.name == "upstream-quickjs" and (file := tar.extractfile(member)) is not None:
                (engine / place.name).write_bytes(file.read())
    _change(engine / "quickjs.c")
    return engine


def _change(path: Path) -> None:
    text = path.read_text()
    for found, count, becomes in _CHANGES:
        if text.count(found) != count:
            raise InvalidRequest(f"{path.name} of {QUICKJS} has {text.count(found)} times, not {count}: {found}")
        text = text.replace(found, becomes)
    path.write_text(text)


def embedded(library: dict[str, Path]) -> str:
    """The library as a C header."""
    files = "".join(f"  {{{json.dumps(name)}, {_literal(path.read_text())}}},\n" for name, path in library.items())
    return f"static const struct library_file {{ const char *name, *text; }} library[] = {{\n{files}  {{0, 0}}}};\n"


def _literal(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "\n    ".join(json.dumps(line, ensure_ascii=True).replace("?", "\\?") for line in lines)
