"""Create instances of AICI guests in this process."""

from __future__ import annotations

from pathlib import Path

from bridle.aici.runtime.compiler import compile_module
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.limits import DEFAULT_LIMITS, RuntimeLimits
from bridle.aici.runtime.loaded_module import GuestEnvironment
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.storage import SharedVariables
from bridle.aici.runtime.vocabulary import RuntimeVocabulary

VOCABULARY = RuntimeVocabulary(
    [bytes([i]) for i in range(256)] + [b""], 256, lambda text: list(text.encode()), frozenset({256})
)


def load(sandbox: Sandbox, wasm: bytes, folder: Path, limits: RuntimeLimits = DEFAULT_LIMITS) -> Instance:
    code, facts = compile_module(wasm, limits)
    file = folder / f"code{len(list(folder.iterdir()))}"  # code in use must not be overwritten
    file.write_bytes(code)
    program = sandbox.load(str(file), facts)
    instance = Instance(program, GuestEnvironment(VOCABULARY, limits), b"", SharedVariables(limits))
    instance.create(1000)
    return instance
