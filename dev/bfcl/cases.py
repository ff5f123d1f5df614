"""Cases of the package `bfcl-eval`, and the package's verdict on a server's answers.

The package is read from the folder where it was installed without its requirements. The package's checker needs one
property of the model from a table of all models: whether its function names replace dots by underscores. A fake
replaces this table, so that the clients of thirty services need not be imported.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

CATEGORIES = ("simple", "multiple", "parallel", "irrelevance")
_FILES = {"simple": "simple_python"}
#: JSON Schema's names of the data's types, as translated by the package.
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "list": "array", "bool": "boolean", "any": "string"}


@dataclass(frozen=True, slots=True)
class Case:
    """A question with functions and the accepted calls; `answers` is empty if no call is right."""

    id: str
    category: str
    messages: list[dict[str, Any]]
    functions: list[dict[str, Any]]
    answers: list[dict[str, Any]]

    def tools(self, is_strict: bool) -> list[dict[str, Any]]:
        """Return the functions as tools in OpenAI's format, without further request fields."""
        return [{"type": "function", "function": _function(each, is_strict)} for each in self.functions]


def cases_of(package: Path, category: str, count: int) -> list[Case]:
    """Return the first `count` cases of one category. `package` is the folder that contains `bfcl_eval`."""
    name = f"BFCL_v4_{_FILES.get(category, category)}.json"
    data = package / "bfcl_eval" / "data"
    answers = data / "possible_answer" / name
    known = {each["id"]: each["ground_truth"] for each in _lines(answers)} if answers.exists() else {}
    found = _lines(data / name)[:count]
    return [Case(e["id"], category, e["question"][0], e["function"], known.get(e["id"], [])) for e in found]


def is_right(package: Path, case: Case, calls: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the package's checker accepts the calls. A call whose arguments are not a JSON object is wrong."""
    if case.category == "irrelevance":
        return not calls
    try:
        made = [{call["name"]: json.loads(call["arguments"])} for call in calls]
    except json.JSONDecodeError:
        return False
    if not all(isinstance(value, dict) for each in made for value in each.values()):
        return False
    check, languages = _checker(package)
    verdict = check(case.functions, made, case.answers, languages.PYTHON, case.category, "any")
    return bool(verdict["valid"])


def _checker(package: Path) -> tuple[Any, Any]:
    if str(package) not in sys.path:
        sys.path.append(str(package))
        models: Any = ModuleType("bfcl_eval.constants.model_config")
        models.MODEL_CONFIG_MAPPING = {"any": SimpleNamespace(underscore_to_dot=True)}
        sys.modules[models.__name__] = models
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    return checker.ast_checker, importlib.import_module("bfcl_eval.constants.enums").Language


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _function(given: Mapping[str, Any], is_strict: bool) -> dict[str, Any]:
    name = given["name"].replace(".", "_")
    made = {"name": name, "description": given["description"], "parameters": _schema(given["parameters"])}
    return made | ({"strict": True} if is_strict else {})


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    made = {key: value for key, value in given.items() if key != "optional"}
    if "type" in made:
        made["type"] = _TYPES.get(made["type"], made["type"])
    if "items" in made:
        made["items"] = _schema(made["items"])
    if "properties" in made:
        made["properties"] = {name: _schema(each) for name, each in made["properties"].items()}
        made["additionalProperties"] = False
    return made
