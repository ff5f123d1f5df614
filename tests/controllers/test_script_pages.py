"""Tests that the pages about scripts and programs name every function and option, and that their examples run."""

from __future__ import annotations

import json
import re

from bridle.aici.client import RuntimePool
from dev.controllers import SOURCES
from tests.controllers.conftest import Run, runner
from tests.sources import ROOT

SCRIPTS = (ROOT / "docs" / "scripts-javascript.md").read_text(encoding="utf-8")
PROGRAMS = (ROOT / "docs" / "declarative.md").read_text(encoding="utf-8")
TYPES = (SOURCES / "jsctrl" / "aici.d.ts").read_text(encoding="utf-8")


def test_every_name_that_can_be_imported_is_on_the_page(js: Run) -> None:
    source = """
        import * as aici from "aici"
        const globals = ["$", "assert", "console", "fixed", "fork", "gen", "genTokens", "start", "waitVars"]
        start(() => console.log([...Object.keys(aici), ...globals.filter((name) => name in globalThis)].join()))
    """
    (line,) = [line for line in js(source).logs("a").splitlines() if "," in line]
    names = line.split(",")
    assert len(names) > 55 and names.count("waitVars") == 2
    words = set(re.findall(r"[\w$]+", SCRIPTS))
    assert set(names) - words - {"helpers", "logLevel"} == set()
    typed = set(re.findall(r"export (?:function|class|const) ([\w$]+)", TYPES))
    assert typed == {name for name in names if name != "console"}


def test_every_option_of_gen_is_on_the_page(js: Run) -> None:
    error = js("start(() => gen({ no: 1 }))").error()
    options = error.split("there are ")[1].split("\n")[0].split(", ")
    assert len(options) > 20
    assert set(options) - set(re.findall(r"`(\w+)`", SCRIPTS)) == set()


def test_the_scripts_run(js: Run) -> None:
    scripts = re.findall(r"```js\n(.*?)```", SCRIPTS, re.DOTALL)
    first, steps = (js(script, "19 + 23 = 42", prompt="x") for script in scripts)
    assert first.text().endswith("19 + 23 = 42") and "the model says 42\n" in first.logs("a")
    assert steps.text() == "a" and "drawn: [97]\n" in steps.logs("a")


def test_the_program_runs(script_pool: RuntimePool) -> None:
    program, choice = re.findall(r"```json\n(.*?)```", PROGRAMS, re.DOTALL)
    chosen = runner(script_pool, "declctrl")(json.dumps(json.loads(choice)), "no")
    assert chosen.text() == "no"
    ran = runner(script_pool, "declctrl")(json.dumps(json.loads(program)), "12 + 13 = 25, so")
    assert ran.text() == "12 + 13 = 25, so half of it is not 25"
    assert ran.variables() == {"sum": b"25"}
