"""Tests that `bridle new-controller` makes a complete folder for each language, which builds into a controller that
runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from bridle.aici.runtime.compiler import compile_module
from bridle.aici.runtime.limits import RuntimeLimits
from bridle.cli import main
from bridle.controller_tools import ToolExecutor, function_tools
from bridle.controllers.templates import LANGUAGES, Language, new_controller
from bridle.errors import InvalidRequest
from tests.http.controlled import Client, controlled_model, ids, last_fork, lent, text_of
from tests.http.harness import served, tokenizer
from tests.waiting import PATIENCE

MODULES: tuple[Language, ...] = ("c", "rust", "assemblyscript")
SCRIPTS: tuple[Language, ...] = ("js", "python")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    def prefers(prefix: list[int]) -> list[float]:
        """Return logits that prefer letters to digits, and the first letters most."""
        row = [0.0] * tokenizer().vocab_size
        for rank, token in enumerate(ids("zab42")):
            row[token] = 9.0 - rank
        return row

    store, patient = tmp_path_factory.mktemp("store"), ("--limit", "max_prepare_wait=600000")
    desk = ToolExecutor(function_tools({"add": lambda a, b: a + b, 'say "x"\\n': lambda: "said"}))
    with (
        closing(desk),
        controlled_model(store, *patient, next_token=prefers) as model,
        served(lent(model)) as url,
    ):
        assert model.control is not None
        model.control.tools.desk = desk
        desk.watch(model.client.wake)
        client = Client(url)
        yield client
        client.close()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_folder_has_everything(language: Language, tmp_path: Path) -> None:
    made = new_controller("my-own", language, tmp_path)
    names = {str(path.relative_to(made.folder)) for path in made.files}
    assert {"README.md", "Makefile", "common.mk", "test_controller.py"} <= names
    assert made.first in made.files and made.first.suffix in (".c", ".js", ".py", ".ts", ".rs")
    for path in made.files:
        text = path.read_text(encoding="utf-8")
        assert "@NAME@" not in text and ".in" not in path.suffix and text.endswith("\n")
    assert "my-own" in (made.folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow  # an interpreter compiles for it
@pytest.mark.parametrize("language", SCRIPTS)
def test_a_script_passes_its_first_recorded_test(
    language: Language, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    made = new_controller("zed", language, tmp_path)
    assert made.first.stem == "zed" and made.first.parent == made.folder
    assert main(["test", str(made.folder)]) == 0
    assert "traces: 1; same: 1;" in capsys.readouterr().out
    made.first.write_text(made.first.read_text(encoding="utf-8").replace("ultimate", "last"), encoding="utf-8")
    assert main(["test", str(made.folder)]) == 1
    assert "forced by" in capsys.readouterr().out


def test_python_may_be_a_module_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-controller", "mine", "--lang", "python", "--module", "--into", str(tmp_path)]) == 0
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        *("app.py", "controller.wit", "common.mk", "Makefile", "README.md", "test_controller.py"),
    }
    assert "max_compile_time" in (tmp_path / "mine" / "test_controller.py").read_text()
    compile((tmp_path / "mine" / "app.py").read_text(), "app.py", "exec")
    assert main(["new-controller", "other", "--lang", "js", "--module", "--into", str(tmp_path)]) == 2
    assert "for a module, set lang to assemblyscript" in capsys.readouterr().err


@pytest.mark.slow
def test_a_python_module_builds_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("componentize_py", reason="the tool that makes components is not installed")
    made = new_controller("mine", "python", tmp_path, as_module=True)
    _make(made.folder, f"COMPONENTIZE={Path(sysconfig.get_path('scripts')) / 'componentize-py'}")
    patient = ("--limit", "max_compile_time=300000")
    with controlled_model(tmp_path / "store", *patient) as model, served(lent(model)) as url:
        client = Client(url)
        module = client.upload(made.folder.joinpath("mine.wasm").read_bytes())
        assert text_of(client.run(module, "only this", prompt="Some")) == "only this"
        items = client.run(module, prompt="Some")
        assert text_of(items).isdigit() and "the text is complete" in str(items)
        client.close()


def test_the_command_tells_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-controller", "mine", "--lang", "c", "--into", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert str(tmp_path / "mine" / "include" / "bridle_controller.h") in out
    assert f"cd {tmp_path / 'mine'} && make" in out
    assert main(["new-controller", "mine", "--lang", "c", "--into", str(tmp_path)]) == 2
    assert "exists already; nothing was changed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "Mine", "1st", "a b", "../up", "a" * 41, "näh", "-x"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="lower-case letters, digits and dashes"):
        new_controller(name, "c", tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_language_lists_the_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidRequest, match="c, js, python, assemblyscript, rust"):
        new_controller("mine", "cobol", tmp_path)  # type: ignore[arg-type]
    assert main(["new-controller", "mine", "--lang", "cobol", "--into", str(tmp_path)]) == 2
    assert "cobol" in capsys.readouterr().err


# -- building ----------------------------------------------------------------------------------------------


def _rustc() -> str | None:
    """Return a Rust compiler that has the WebAssembly target; None if there is none."""
    for name in (os.environ.get("RUSTC", "rustc"), "/usr/bin/rustc"):
        found = shutil.which(name)
        if found is None:
            continue
        words = [found, "--target", "wasm32-unknown-unknown", "--print", "target-libdir"]
        folder = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
        if folder and list(Path(folder).glob("libstd-*")):
            return found
    return None


def _settings(language: Language) -> list[str]:
    """Return the settings of `make` for a language; skip the test if a tool is missing."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    settings = [f"PYTHON={sys.executable}"]
    if language == "c":
        pytest.importorskip("ziglang", reason="the C compiler is not installed: pip install ziglang")
    if language == "rust":
        rustc = _rustc()
        if rustc is None:
            pytest.skip("no rustc with the target wasm32-unknown-unknown is installed")
        settings.append(f"RUSTC={rustc}")
    if language == "assemblyscript" and shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    return settings


def _make(folder: Path, *words: str) -> None:
    done = subprocess.run(["make", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE)
    if done.returncode and "ENOTFOUND" in done.stderr + done.stdout:
        pytest.skip("the package registry of npm cannot be reached")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "language",
    ["js", pytest.param("python", marks=pytest.mark.slow)],  # its interpreter compiles for long
)
def test_a_script_runs(language: Language, client: Client, tmp_path: Path) -> None:
    made = new_controller("mine", language, tmp_path)
    name = {"js": "jsctrl", "python": "pyctrl"}[language]
    items = client.run(name, made.first.read_text(encoding="utf-8"), prompt="")
    assert text_of(items) == "The ultimate answer is 44, or so it seems.", last_fork(items)
    assert last_fork(items)["finish_reason"] == "aici-stop" and "the model says 44" in str(items)


@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=[] if name == "c" else [pytest.mark.slow]) for name in MODULES]
)
def test_a_module_builds_and_runs(
    language: Language, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = new_controller("mine", language, tmp_path)
    _make(made.folder, *_settings(language))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert main(["test", str(made.folder)]) == 0  # as it was recorded
    wasm = (made.folder / "mine.wasm").read_bytes()
    _, facts = compile_module(wasm, RuntimeLimits())
    assert not facts.problem and facts.is_copyable  # so a fork costs a copy, not a process
    module = client.upload(wasm)

    items = client.run(module, prompt="Some")
    assert text_of(items) == "44" and last_fork(items)["finish_reason"] == "aici-stop"
    assert last_fork(items)["error"] == "" and "the text is complete" in str(items)
    assert text_of(client.run(module, "[ab]{3}é", prompt="Some")) == "aaaé"
    forced = client.run(module, "only this", prompt="Some")
    assert text_of(forced) == "only this" and forced[-2]["usage"]["sampled_tokens"] < len("only this")
    wrong = client.run(module, "(", prompt="Some")
    assert last_fork(wrong)["finish_reason"] == "fail" and "regex" in last_fork(wrong)["error"]


C_FEATURES = """
#include "bridle_steps.h"

/* Uses what the small ones do not: variables, a fork, sampling of one draw, splices after a draw, waiting. */
static uint32_t step_number;

void aici_init(void) {}
uint32_t aici_create(void) { return 1; }
void aici_init_prompt(uint32_t handle) { (void)handle; bridle_keep_prompt(); }

static struct bridle_set all;

static void check(int holds, const char *what) { if (!holds) bridle_fail(what, bridle_length(what)); }

void aici_mid_process(uint32_t handle) {
  check(handle == 1, "handle");
  struct bridle_step step = bridle_read_step();
  struct bridle_text value = {0};
  switch (step_number++) {
    case 0:
      check(step.num_tokens == 0 && step.sampled == BRIDLE_NONE && step.backtrack == 0, "first step");
      check(bridle_get_variable("v", &value) == 0, "no variable yet");
      bridle_set_variable("v", "\\0\\377x", 3);
      bridle_append_variable("v", "yz", 2);
      check(bridle_get_variable("v", &value) == 2 && value.length == 5, "variable");
      check(value.data[0] == 0 && (uint8_t)value.data[1] == 255 && value.data[4] == 'z', "bytes");
      bridle_wait(1);
      break;
    case 1:
      bridle_noop();
      break;
    case 2: {
      struct bridle_tokens word = bridle_tokenize("-");
      bridle_begin();
      for (int i = 0; i < 2; i++) {
        bridle_open(BRIDLE_NONE);
        bridle_splice(0, word.data, word.count);
        bridle_close();
      }
      bridle_end();
      break;
    }
    case 3: {
      check(step.fork_group_size == 2 && step.num_tokens == 1, "fork");
      all = bridle_new_set();
      const char *letters = bridle_branch_number(&step) ? "b" : "a";
      bridle_token drawn = *bridle_tokenize(letters).data;
      bridle_allow(&all, drawn);
      struct bridle_tokens more = bridle_tokenize("!?");
      bridle_begin();
      bridle_open(bridle_mask_of(&all));
      bridle_number("temperature", 0.75);
      bridle_number("top_logprobs", 2);
      bridle_sampling("top_p", 0.5);
      bridle_sampling("min_p", 0.125);
      bridle_splice_when(&drawn, 1, 0, more.data, more.count);
      bridle_close();
      bridle_end();
      break;
    }
    case 4: {
      check(step.num_tokens == 3 && step.sampled == step.tokens[0], "splice after a draw");
      struct bridle_vocabulary vocabulary = bridle_read_vocabulary();
      uint32_t size;
      const uint8_t *bytes = bridle_token_bytes(&vocabulary, step.tokens[1], &size);
      check(size == 1 && *bytes == '!', "bytes of a token");
      check(bridle_has_token(&step, step.tokens[2]) && !bridle_has_token(&step, vocabulary.eos), "has token");
      check(vocabulary.size == bridle_vocab_size(), "size");
      bridle_append(1, step.tokens, 1);
      break;
    }
    default:
      check(step.backtrack == 1, "backtrack");
      bridle_stop();
  }
}
"""


def run_c(client: Client, source: str, folder: Path) -> Any:
    """Compile a C source with warnings as errors; return the result of running it with the prompt `Some`."""
    made = new_controller("mine", "c", folder)
    made.first.write_text(source)
    makefile = made.folder / "Makefile"
    makefile.write_text(makefile.read_text().replace("-Wextra", "-Wextra -Werror"))
    _make(made.folder, *_settings("c"))
    return client.run(client.upload((made.folder / "mine.wasm").read_bytes()), prompt="Some")


def test_the_c_helpers_do_what_they_say(client: Client, tmp_path: Path) -> None:
    items = run_c(client, C_FEATURES, tmp_path)
    for index, letter in enumerate("ab"):
        assert last_fork(items, index)["error"] == "", last_fork(items, index)
        assert text_of(items, index).endswith(f"{letter}!? ↩ {letter}"), text_of(items, index)
    assert '"value": "00ff78"' in str(items).replace("'", '"')


C_TOOLS = """
#include "bridle_steps.h"

/* Three calls at once: an answer, one of a tool with an odd name, and one that has none. */
static struct bridle_call calls[3];
static uint32_t step_number;
static struct bridle_text text;

void aici_init(void) {}
uint32_t aici_create(void) { return 0; }
void aici_init_prompt(uint32_t handle) { (void)handle; bridle_keep_prompt(); }

static void write_text(void) {
  struct bridle_tokens tokens = bridle_tokens_of(aici_host_tokenize(text.data, text.length));
  bridle_append(0, tokens.data, tokens.count);
}

void aici_mid_process(uint32_t handle) {
  (void)handle;
  if (!step_number++) {
    calls[0] = bridle_tool("add", "{\\"a\\": 20, \\"b\\": 22}", 0);
    calls[1] = bridle_tool("say \\"x\\"\\\\n", 0, 60000);
    calls[2] = bridle_tool("absent", 0, 0);
  }
  for (int i = 0; i < 3; i++)
    if (!bridle_call_is_done(&calls[i])) {
      bridle_wait_for(&calls[i]);
      return;
    }
  if (text.length) {
    bridle_stop();
    return;
  }
  struct bridle_text found = {0};
  for (int i = 0; i < 3; i++) {
    bridle_add(&text, bridle_call_text(&calls[i], &found) ? "<" : "!");
    bridle_add(&text, found.data);
  }
  bridle_cancel(&calls[0]); /* of no effect: it is over */
  write_text();
}
"""


def test_a_module_in_c_calls_tools(client: Client, tmp_path: Path) -> None:
    items = run_c(client, C_TOOLS, tmp_path)
    assert last_fork(items)["error"] == "", last_fork(items)
    expected = '<42<said!unknown tool; available tools: add, say "x"\\n'
    assert text_of(items) == expected
