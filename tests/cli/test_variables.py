"""Environment variables of flags: each has the same meaning for every command that reads it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.cli.app import app
from bridle.cli.help_search import arguments_of, commands_of, variable_names
from bridle.cli.setup_probes import variables
from bridle.cli.variables import variables_of

#: Variables whose flags have other words under some commands, and the same meaning: each pair of words was compared.
SAME = frozenset(
    f"BRIDLE_{name}"
    for name in (
        *("AUDIO", "IMAGE", "VIDEO"),  # that go with a prompt, or with the first turn
        *("CONTROLLER", "CTRL", "JSON", "KEYS", "KV_STORE", "MAX_TOKENS", "POLICIES", "STATS"),
        *("DRAFT_MAX", "NUM_SPECULATIVE_TOKENS", "SPECULATE"),
        *("DTYPE", "FRONT_ENDS", "PORT", "SHARDS", "TEMPERATURE", "TOOL_PROMPT", "WARM_UP"),
    )
)


def words_of() -> dict[str, set[tuple[str, str]]]:
    """Return the types and descriptions of the flags that each variable sets, over all commands."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for name, command in commands_of(app, ()):
        done: set[str] = set()
        for argument in arguments_of(command):
            for variable in set(variables_of(name, argument)) - done:
                done.add(variable)
                text = " ".join((argument.parameter.help or "").split())
                found[variable].add((str(argument.hint), text))
    return found


def test_no_variable_has_two_meanings() -> None:
    several = {variable for variable, words in words_of().items() if len(words) > 1}
    assert several - SAME == set(), "give the flag of one command a variable of its own (bridle/cli/variables.py)"
    assert SAME - several == set(), "these have the same words everywhere now"


def test_every_variable_belongs_to_a_flag_with_a_long_name() -> None:
    for name, command in commands_of(app, ()):
        for argument in arguments_of(command):
            has_flag = any(flag.startswith("--") for flag in argument.parameter.name or ())
            assert bool(variables_of(name, argument)) == has_flag, (name, argument.names)
    assert {"BRIDLE_MODEL", "BRIDLE_PROMPT_", "BRIDLE_OUT", "BRIDLE_C", "BRIDLE_L"} & variable_names() == set()


def parsed(*words: str) -> dict[str, Any]:
    """Return the arguments that a command would get."""
    _, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    return bound.arguments


def test_a_schema_for_texts_does_not_change_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_SCHEMA", "schema.json")
    assert "schema" not in parsed("explain", "trace.jsonl")
    assert parsed("generate", "Once")["steering"].schema == Path("schema.json")
    monkeypatch.setenv("BRIDLE_EXPLAIN_SCHEMA", "true")
    assert parsed("explain", "trace.jsonl")["schema"] is True


def test_variables_of_serve_are_known_without_the_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    variable_names.cache_clear()
    with monkeypatch.context() as patched:
        patched.delattr("bridle.cli.help_search.commands_of")
        assert list(variables({"BRIDLE_PORT": "1", "BRIDLE_KV_STORE": "off", "PORT": "2"})) == []
    (found,) = variables({"BRIDLE_PORT": "1", "BRIDLE_PROT": "2"})
    assert (found.subject, found.advice) == ("BRIDLE_PROT", "is it BRIDLE_PROMPT?")  # of `generate`


def test_positional_arguments_are_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "PROMPT", "TRACE", "WASM", "OUT"):
        monkeypatch.setenv(f"BRIDLE_{name}", "elsewhere")
    assert "name" not in parsed("chat")
    assert parsed("explain").get("path") is None


def test_variables_hold_lists_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_STOP", "one two")
    monkeypatch.setenv("BRIDLE_STATS", "false")
    arguments = parsed("generate", "Once")
    assert arguments["sampling"].stop == ("one", "two") and arguments["ask"].stats is False


def test_serve_says_that_a_model_is_no_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BRIDLE_MODEL", "org/name")
    assert main(["serve", "--port", "99999"]) == 2
    assert "BRIDLE_MODEL is not a setting of bridle" in (told := capsys.readouterr().err)
    assert "name the model on the command line, as in `bridle serve MODEL`" in told


def test_help_shows_the_variable_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["explain", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "BRIDLE_EXPLAIN_SCHEMA" in shown and "BRIDLE_TRACE" not in shown and "env var: ]" not in shown
