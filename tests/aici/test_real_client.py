"""Tests with the original AICI software, if present: its controllers, its client and its command line `aici` run with
bridle.

`BRIDLE_GENUINE_CONTROLLERS` is a folder with .wasm files of AICI's releases (aici_pyctrl.wasm, aici_jsctrl.wasm,
aici_declctrl.wasm, aici_uppercase.wasm, aici_yesno.wasm, any of them, of any release). `BRIDLE_GENUINE_CLIENT` is a
folder with AICI's Python package `pyaici`: the folder `py` of its repository, because no package index has it. The
packages that `pyaici` imports are installed into separate environments.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.aici.shm_channel import remove_names
from bridle.config import ModelConfig
from bridle.controllers import standard
from bridle.outputs import FinishReason, Stored
from bridle.serving import load_model
from bridle.serving.controller_runtime import ControlSettings
from tests.aici.conftest import EOS, HE, VOCAB_SIZE
from tests.aici.guests import END, force, guest1, guest2, result, sample, say
from tests.aici.guests import mask as allow
from tests.aici.steering import Steered
from tests.http.harness import served
from tests.real_clients.environment import foreign_python, layered_python
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
CONTROLLERS = os.environ.get("BRIDLE_GENUINE_CONTROLLERS", "")
CLIENT = os.environ.get("BRIDLE_GENUINE_CLIENT", "")

_PYTHON = """
import pyaici.server as aici
async def main():
    await aici.FixedTokens("Say: ")
    await aici.gen_tokens(options=["Yes", "No"], store_var="x")
aici.start(main())
"""
_JAVASCRIPT = """
async function main() {
  await $`Say: `;
  await gen({ options: ["Yes", "No"], storeVar: "x" });
}
start(main);
"""
_STEPS: dict[str, Any] = {
    "steps": [
        {"Fixed": {"text": {"String": {"str": "Say: "}}}},
        {"Gen": {"rx": "Yes|No", "max_tokens": 10, "stmts": [{"Set": {"var": "x", "expr": {"Current": {}}}}]}},
    ]
}
#: What a controller is started with, by a part of its file's name.
ARGUMENTS = {
    "pyctrl": _PYTHON,
    "jsctrl": _JAVASCRIPT,
    "declctrl": json.dumps(_STEPS),
    "uppercase": "Tell:",
    "yesno": "Ok?",
}


def files() -> list[Path]:
    """Return the files of the controllers that are present."""
    folder = Path(CONTROLLERS)
    found = sorted(folder.glob("*.wasm")) if CONTROLLERS else []
    return [path for path in found if any(name in path.stem for name in ARGUMENTS)]


_FILES = [pytest.param(path, id=path.stem) for path in files()] or [
    pytest.param(
        None,
        id="none",
        marks=pytest.mark.skip(reason="BRIDLE_GENUINE_CONTROLLERS names no folder with controllers of the original"),
    )
]


@pytest.fixture(scope="module")
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    limits = ("--wasm-max-step-time", "5000", "--wasm-max-init-time", "20000", "--limit", "max_compile_time=300000")
    pool = RuntimePool(RuntimeConfig(str(tokenizer), extra_args=("--store", str(store), *limits)), VOCAB_SIZE)
    yield pool
    pool.shutdown()


@pytest.mark.parametrize("path", _FILES)
def test_a_real_controller_steers(pool: RuntimePool, path: Path) -> None:
    name = next(name for name in ARGUMENTS if name in path.stem)
    steered = Steered(pool, step_timeout=10.0)
    prompt = tuple(b"Once upon")
    steered.add("run", path.read_bytes(), ARGUMENTS[name], prompt=prompt, max_tokens=40)
    steered.run()
    text, logs = text_of(steered.tokens("run")), steered.logs("run")
    end = steered.end("run")
    assert end.error is None, (end.error, logs)
    if name in ("pyctrl", "jsctrl", "declctrl"):
        assert end.reason is FinishReason.CONTROLLER, logs
        assert text.startswith(b"Say: ") and text[5:].strip() in (b"Yes", b"No"), (text, logs)
        assert stored(steered) in (b"Yes", b"No")
    elif name == "yesno":
        assert text.strip()[:1] in (b"Y", b"N"), (text, logs)
    else:  # every fourth byte, counted from wherever its release begins
        letters = text.removeprefix(b"Tell:\n")
        assert any(letters[first::4].decode("latin-1").isupper() for first in range(4)), (text, logs)


def text_of(tokens: list[int]) -> bytes:
    """Return the bytes of a list of tokens."""
    return b"".join(bytes([token]) if token < 256 else {HE: b"he", HE + 1: b"ll"}.get(token, b"") for token in tokens)


def stored(steered: Steered) -> bytes:
    """Return the value of the shared variable `x`."""
    return next(
        event.value for event in reversed(steered.events["run"]) if isinstance(event, Stored) and event.name == "x"
    )


# -- the client ------------------------------------------------------------------------------------------------


needs_client = pytest.mark.skipif(
    not CLIENT, reason="BRIDLE_GENUINE_CLIENT names no folder with the original's package pyaici"
)


@needs_client
@pytest.mark.parametrize("guest", ["old", "new"])
def test_a_real_client_drives_the_runtime(tmp_path: Path, tokenizer: Path, guest: str) -> None:
    """AICI's client uploads, sets tags, and runs a controller with forced tokens, a mask, a rollback and an end."""
    runtime = tmp_path / "aicirt"
    runtime.write_text(f'#!/bin/sh\nexec {sys.executable} -m bridle.aici.runtime "$@"\n')
    runtime.chmod(runtime.stat().st_mode | stat.S_IXUSR)
    wasm = tmp_path / "guest.wasm"
    wasm.write_bytes(OLD if guest == "old" else NEW)
    command = [str(layered_python("ujson==6.1.0")), str(Path(__file__).with_name("real_client.py")), CLIENT]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    prefix = f"/g{uuid.uuid4().hex[:8]}-"
    try:
        done = subprocess.run(
            [*command, str(runtime), str(tokenizer), str(tmp_path / "store"), str(wasm), prefix],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=os.environ | {"PYTHONPATH": path},
        )
    finally:
        remove_names(prefix)  # the original's client leaves them to its next start
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["tokens"] == [1, 2, 3, 72, 105, 80, 90]
    assert said["vocab_size"] == VOCAB_SIZE and said["status"] == 0
    assert "hello" in said["logs"]["logs"] and said["logs"]["error"] == ""
    if said["tags"] is not None:
        (tag,) = said["tags"]["tags"]
        assert (tag["tag"], tag["module_id"], tag["updated_by"]) == ("genuine", said["module"], "root")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a server with the demo model and the standard controllers."""
    patient = ("--limit", "max_prepare_wait=600000")  # until they are compiled for this machine
    control = ControlSettings("on", args=patient, store=tmp_path_factory.mktemp("modules"))
    with served(load_model(ModelConfig("demo"), control=control)) as url:
        yield url


@needs_client
def test_the_real_command_line_runs_controllers(demo: str, tmp_path: Path) -> None:
    """The command line runs files of each kind, a plain prompt, an uploaded and tagged module, and a faulty file."""

    def aici(*arguments: str, status: int = 0) -> str:
        python = foreign_python("requests==2.34.2")
        variables = os.environ | {"PYTHONPATH": CLIENT, "AICI_API_BASE": demo + "/v1/"}
        command = [str(python), "-m", "pyaici.cli", *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=variables,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    for name, text in (("say.py", _PYTHON), ("say.js", _JAVASCRIPT), ("say.json", json.dumps(_STEPS))):
        (tmp_path / name).write_text(text)
        printed = aici("run", name, "--max-tokens", "20")
        assert "[Response] Say: Yes" in printed or "[Response] Say: No" in printed, printed
        assert "Storage: {'x': 'Yes'}" in printed or "Storage: {'x': 'No'}" in printed, printed
    assert "[DONE]" in aici("infer", "The capital of France is", "--max-tokens", "8")
    (tmp_path / "shout.wasm").write_bytes(standard.load("uppercase"))
    assert "TAG: shout -> " in aici("upload", "shout.wasm", "--tag", "shout")
    assert "shout -> " in aici("tags")
    printed = aici("run", "say.py", "--ctrl", "shout", "--prompt", "A dog", "--max-tokens", "9")
    text = printed.partition("[Response] ")[2].partition("\n")[0]
    assert len(text) > 8 and text[::4] == text[::4].upper(), printed
    assert "unknown controller 'nothing'" in aici("run", "say.py", "--ctrl", "nothing", status=1)


_FREE = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
_BIAS = result({"SampleWithBias": {}})
#: Forces `Hi`, draws P, takes a draw back for Z, stops.
OLD = guest1(
    [[say("hello\n"), result({"suspend": False, "num_forks": 1, "ff_tokens": [72, 105]})], _FREE],
    [
        [allow([80, 81], VOCAB_SIZE, new=False), _BIAS],
        [allow([65], VOCAB_SIZE, new=False), _BIAS],
        [result({"Splice": {"backtrack": 1, "ff_tokens": [90]}})],
        [allow([EOS], VOCAB_SIZE, new=False), _BIAS],
    ],
    [[result({"stop": False})], [result({"stop": False})], [result({"stop": False})], [result({"stop": True})]],
)
NEW = guest2(
    [
        [say("hello\n"), *force([72, 105])],
        sample([80, 81], VOCAB_SIZE),
        sample([65], VOCAB_SIZE),
        force([90], backtrack=1),
        END,
    ]
)
