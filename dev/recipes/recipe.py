"""The data types for measuring recipes: a recipe, its cases, and the answers to them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bridle import LLM

#: The folder of the scripts, which readers can copy unchanged.
FOLDER = Path(__file__).parents[2] / "examples" / "recipes"

Tool = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and the right answer in `known`. `form` is a constraint as plain data: a GBNF grammar or a JSON
    schema, so that bridle and llama-server use the same one. `constants` replace the constants at the beginning of the
    recipe's script."""

    id: str
    messages: Sequence[Mapping[str, Any]]
    known: Any
    form: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """The text of one answer, with its cost. `tokens` is the number of tokens that were computed: sampled, forced and
    rolled back."""

    text: str
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe. `cases(count, seed)` returns the recipe's cases, the same ones for the same seed. `is_right(case,
    text)` says whether an answer is right. `steer` replaces the script if the recipe is a Python program instead."""

    file: str
    max_tokens: int
    cases: Callable[[int, int], list[Case]]
    is_right: Callable[[Case, str], bool]
    tools: Mapping[str, Tool] = field(default_factory=dict)
    steer: Callable[[LLM, Sequence[Case]], list[Answer]] | None = None

    def script(self, case: Case) -> str:
        """Return the recipe's script with the constants of a case."""
        text = (FOLDER / self.file).read_text(encoding="utf-8")
        put = _put_python if self.file.endswith(".py") else _put_javascript
        for name, value in case.constants.items():
            text = put(text, name, value)
        return text


def _put_python(text: str, name: str, value: Any) -> str:
    """Replace the assignment to a constant in a Python script. Raises `StopIteration` if the script has no such
    constant."""
    found = (each for each in ast.parse(text).body if isinstance(each, ast.Assign))
    old = next(each for each in found if ast.unparse(each.targets[0]) == name)
    lines = text.splitlines(keepends=True)
    return "".join([*lines[: old.lineno - 1], f"{name} = {value!r}\n", *lines[old.end_lineno :]])


def _put_javascript(text: str, name: str, value: Any) -> str:
    """Replace a constant in a JavaScript script, which must define it on one line."""
    made, count = re.subn(rf"(?m)^const {name} = .*$", lambda _: f"const {name} = {json.dumps(value)}", text)
    assert count == 1, f"no line of the script defines {name}"
    return made
