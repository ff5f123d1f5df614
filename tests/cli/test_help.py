"""`bridle help` finds what the help pages say, whole pages or single flags."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

import pytest
from cyclopts import App
from rich.console import Console

from bridle.cli import main
from bridle.cli.app import COMMANDS, app
from bridle.cli.help_search import arguments_of, commands_of, first_paragraph, flag_names, help_entries
from bridle.cli.short_help import ESSENTIAL, asked_for
from bridle.cli.variables import variables_of
from tests.sources import PACKAGE, tree


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["help", *words])
    return code, " ".join(capsys.readouterr().out.split())


def test_flags_are_found_by_words_of_their_description(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "kv", "memory")
    assert code == 0
    assert "--kv-memory (Model; bridle serve, shard" in text and "BRIDLE_KV_MEMORY" in text
    assert text.count("Memory for the KV cache") == 1  # though several commands have it
    assert "--port" not in text


def test_commands_come_before_flags_and_names_before_texts(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, "api", "key")
    assert text.startswith("bridle keys") and text.index("--key (Server") < text.index("--keys (Access")


@pytest.mark.parametrize("word", ["MAX_NUM_SEQS", "--max-num-seqs", "bridle_max_num_seqs", "Max num seqs"])
def test_a_flag_is_found_however_it_is_spelled(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, *word.lower().split())
    assert code == 0 and "--max-num-seqs" in text


def test_a_command_is_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "keys", "limit")
    assert code == 0 and text.startswith("Usage: bridle keys limit")
    assert shown(capsys)[1].startswith("Usage: bridle COMMAND")


def test_what_is_not_there_is_told_with_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "temprature")
    assert code == 1 and "is it one of temperature" in text
    assert "see bridle --help" in shown(capsys, "xyzzyx")[1]


def test_the_page_of_serve_has_groups(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help-all"])
    page = capsys.readouterr().out
    for heading in ("Server", "Access", "Controllers", "Processes", "Models on demand", "Model", "Batching"):
        assert f"─ {heading} ─" in page
    assert "─ Parameters ─" not in page  # nothing is left over


def test_every_flag_says_what_it_is_for() -> None:
    silent = [entry.names for entry in help_entries() if not entry.text]
    assert not silent
    assert {"port", "max-num-seqs", "allowed-host", "otlp-endpoint"} <= flag_names()["serve"]


# -- short pages ---------------------------------------------------------------------------------------------


def shown_variables(capsys: pytest.CaptureFixture[str], *words: str) -> set[str]:
    """Return the environment variables that a help page names, by which the page's flags are recognized."""
    assert main(list(words)) == 0
    named = re.findall(r"env var: ([\w, ]+)\]", " ".join(capsys.readouterr().out.replace("│", " ").split()))
    return {name for names in named for name in names.split(", ") if name.startswith("BRIDLE_")}


def variables(command: str, essential: frozenset[str] | None = None) -> set[str]:
    """Return the first variable of each flag of a command, or of its flags with an essential name."""
    arguments = [each for each in arguments_of(app[command]) if each.parameter.show is not False]
    kept = [each for each in arguments if essential is None or essential & set(each.names)]
    return {found[0] for each in kept if (found := variables_of(command, each))}


@pytest.mark.few(2)
@pytest.mark.parametrize("command", sorted(ESSENTIAL))
def test_short_page_has_the_essential_flags(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Commands keep the console of an earlier page, which may be narrow.
    monkeypatch.setattr(App, "console", property(lambda app: Console(width=400)))
    short, whole = (shown_variables(capsys, command, flag) for flag in ("--help", "--help-all"))
    assert short == variables(command, ESSENTIAL[command]) and len(short) == len(ESSENTIAL[command]) <= 26
    assert whole == variables(command) > short


def test_short_page_names_the_other_one(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    assert "bridle serve --help-all" in " ".join(capsys.readouterr().out.split())


def test_words_behind_two_dashes_are_no_flags() -> None:
    with asked_for(["generate", "--", "--help-all"]) as words:
        assert words == ["generate", "--", "--help-all"]


def test_overview_says_what_the_pages_say() -> None:
    for command in COMMANDS:
        page = first_paragraph(app[command.name].help)
        assert page.startswith(command.summary), command.name


def test_no_command_has_a_flag_twice() -> None:
    for name, command in commands_of(app, ()):
        names = [
            flag for each in arguments_of(command) for flag in each.names if flag.startswith("-") and flag != "--*"
        ]
        assert len(names) == len(set(names)), (name, sorted(flag for flag in names if names.count(flag) > 1))


def test_help_begins_with_the_outcome() -> None:
    """A help text is a sentence that starts with a verb or a noun, not with `Whether` or `How`, and is not a bare
    value."""
    for entry in help_entries():
        assert re.match(r"[A-Z\[]", entry.text) and entry.text.endswith("."), (entry.names, entry.text)
        assert not re.match(r"(What|Whether|Who|How|Where|Which|Most|The|A|An|Of|So) ", entry.text), entry.text


def is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def test_no_help_is_cut_off() -> None:
    for path in (PACKAGE / "cli").glob("*.py"):
        for node in (node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)):
            cut = [second.lineno for first, second in pairwise(node.body) if is_text(first) and is_text(second)]
            assert not cut, f"{path.name}: put the strings of line {cut[0]} and before into one pair of parentheses"


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["srve"], 'Unknown command "srve". Did you mean "serve"?'),
        (["lst"], 'Did you mean "list"?'),
        (["models"], 'Did you mean "list"?'),
        (["download", "x"], 'Did you mean "pull"?'),
        (["keys", "ad", "ann"], 'Did you mean "add"?'),
        (["zzzzzzzz"], "There are: help, serve"),
        (["serve", "--modle", "x"], "Did you mean --model? The model needs no flag: `bridle serve MODEL`"),
        (["generate", "--modle", "x", "hi"], "Did you mean --model? The model needs no flag: `bridle generate MODEL`"),
        (["chat", "--modle", "x"], "Did you mean --model? The model needs no flag: `bridle chat MODEL`"),
        (["run-batch", "f", "--modle", "x"], "Unknown option: --modle. Did you mean --model? (see"),
        (["chat", "--temprature", "1"], "Did you mean --temperature?"),
        (["check", "demo", "--quantisation", "q4_0"], "Did you mean --quantization?"),
        (["adapters", "load", "x", "--revison", "y"], "Did you mean --revision?"),
        (["serve", "--zzzzzzz"], "Unknown option: --zzzzzzz. (see: bridle serve --help)"),
    ],
    ids=" ".join,
)
def test_a_slip_is_recognized(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert told in (said := capsys.readouterr().err) and said.count("\n") == 1


def test_a_slip_of_the_runtime_is_recognized(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["runtime", "--sever-it"])
    assert "did you mean --server?" in capsys.readouterr().err
