"""Tests that the commands and flags on the page about controllers exist."""

from __future__ import annotations

import re

from bridle.cli.app import app
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "controllers.md").read_text(encoding="utf-8")


def test_commands_and_flags_exist() -> None:
    lines = re.findall(r"^bridle (.+?)(?:  +#.*)?$", PAGE, re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        words = re.sub(r'"[^"]*"', "TEXT", line).split("<")[0].split()
        app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_table_of_flags_is_true() -> None:
    table = PAGE.split("| Flag | Meaning |")[1].split("\n\n")[0]
    known = set().union(*(argument.names for argument in app["serve"].assemble_argument_collection()))
    flags = set(
        re.findall(r"--[a-z][a-z-]+(?=[ `|])", table.replace("-A --wasm-max-memory", "").replace("runtime --help", ""))
    )
    assert flags and flags <= known
