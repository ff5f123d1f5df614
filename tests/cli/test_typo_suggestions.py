"""Misspelled commands and flags: what was meant is said."""

from __future__ import annotations

import pytest

from bridle.cli import main


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
