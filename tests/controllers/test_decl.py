"""Tests of JSON programs, with every step and expression, over a fake model that has memorized some lines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bridle.aici.client import RuntimePool
from tests.controllers.conftest import Run, runner
from tests.controllers.pykit import Scripts

Node = dict[str, Any]


@pytest.fixture(scope="session")
def decl(script_pool: RuntimePool) -> Run:
    run = runner(script_pool, "declctrl")
    return lambda steps, *lines, **more: run(json.dumps({"steps": steps}), *lines, **more)


def s(text: str) -> Node:
    return {"String": {"str": text}}


def var(name: str) -> Node:
    return {"Var": {"var": name}}


def concat(*parts: Node, **more: Any) -> Node:
    return {"Concat": {"parts": list(parts), **more}}


def options(*texts: str) -> Node:
    return concat(*map(s, texts), list=True)


CURRENT: Node = {"Current": {}}


def store(name: str, expr: Node = CURRENT) -> Node:
    return {"Set": {"var": name, "expr": expr}}


def fixed(text: str | Node, **more: Any) -> Node:
    return {"Fixed": {"text": s(text) if isinstance(text, str) else text, **more}}


def gen(**fields: Any) -> Node:
    return {"Gen": fields}


def choose(*texts: str, **more: Any) -> Node:
    return {"Choose": {"options": options(*texts), **more}}


# -- steps --------------------------------------------------------------------------------------------------


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("steps", "lines", "text"),
    [
        ([fixed("Hello"), gen(max_tokens=3)], ["Hello, my name"], "Hello, m"),
        ([fixed("x = "), gen(rx="[0-9]+"), fixed(".")], ["x = 42."], "x = 42."),
        ([fixed("x = "), gen(rx="[0-9]+"), fixed(".")], ["x = 42"], "x = 42."),
        ([fixed("x = "), gen(rx="[0-9]+"), fixed("0.")], ["x = 1200"], "x = 12000."),
        ([fixed("="), gen(rx="[0-9]{2}"), fixed(" end")], ["=12"], "=12 end"),
        ([fixed("Q "), gen(rx="ab|ac"), gen(rx="[0-9]+"), fixed("!")], ["Q ac17!"], "Q ac17!"),
        ([fixed("A "), choose("Yes", "No"), fixed(".")], ["A No."], "A No."),
        ([fixed("A "), choose("Yes", "Yesterday"), fixed(" it")], ["A Yesterday it"], "A Yesterday it"),
        ([fixed("A "), choose("Yes", "Yesterday"), fixed(" it")], ["A Yes it"], "A Yes it"),
        ([fixed("A "), gen(stop_at="."), fixed("B")], ["A one. two"], "A one.B"),
        ([fixed("A "), gen(max_words=2), fixed("!")], ["A one two three"], "A one two!"),
        ([fixed("A "), gen(max_bytes=3), fixed("!")], ["A a hello"], "A a h!"),
        ([fixed("A "), gen(max_tokens=0), fixed("!")], ["A one"], "A !"),
        ([fixed("A "), gen(), fixed("!")], ["A one"], "A one!"),
        ([fixed("A "), gen(yacc='%start s\n%%\ns : "1" | s "+" "1" ;'), fixed("=")], ["A 1+1=2"], "A 1+1="),
        ([fixed("A"), {"Stop": {}}, fixed("B")], [], "A"),
        ([fixed("A"), fixed(""), fixed("B", tag="t", label=None)], [], "AB"),
    ],
)
def test_steps_write_their_text(decl: Run, steps: list[Node], lines: list[str], text: str) -> None:
    ran = decl(steps, *lines)
    assert ran.error() == "" and ran.text() == text


def test_a_template_is_filled_in_as_json(decl: Run) -> None:
    steps = [
        fixed('{"name": "'),
        gen(rx="[A-Z][a-z]+", stmts=[store("name")]),
        fixed('", "age": '),
        gen(rx="[0-9]+", max_tokens=3),
        fixed(', "member": '),
        choose("true", "false"),
        fixed("}"),
    ]
    text = '{"name": "Ann", "age": 42, "member": false}'
    ran = decl(steps, text)
    assert ran.text() == text and json.loads(ran.text())["age"] == 42
    assert ran.variables() == {"name": b"Ann"}
    assert 'GEN "42"\n' in ran.logs("a") and ran.logs("a").endswith('CHOOSE "false"\nFIXED "}"\nDeclCtrl: done\n')


def test_what_is_no_choice_costs_no_draw(decl: Run) -> None:
    ran = decl(
        [fixed("A "), choose("positive", "negative"), gen(rx=" because [ab]"), fixed(".")], "A negative because b."
    )
    assert ran.text() == "A negative because b."
    assert ran.end("a").usage.sampled_tokens <= 4


def test_a_label_is_followed(decl: Run) -> None:
    steps = [
        fixed("The word 'hello' in", label="lang"),
        fixed(" French is '", following="lang"),
        gen(rx="[a-z]+'", stmts=[store("french")]),
        fixed(" German is '", following="lang"),
        gen(rx="[a-z]+'", stmts=[store("german")]),
        fixed(concat(s("Hello: "), var("french"), s(" "), var("german")), following="prompt"),
    ]
    ran = decl(steps, "French is 'salut' it", "German is 'hallo' it", prompt="P: ")
    assert ran.text() == "Hello: salut' hallo'"
    assert ran.end("a").usage.rewound_tokens > 20


def test_an_unknown_label_is_told(decl: Run) -> None:
    error = decl([fixed("a"), fixed("b", following="nowhere")]).error()
    assert "program.steps[1]" in error and "no step with the label nowhere has run" in error


def test_forks_run_what_follows_and_wait_for_each_other(decl: Run) -> None:
    def language(name: str) -> list[Node]:
        return [fixed(f" {name} is '"), gen(rx="[a-z]+'", stmts=[store(name)])]

    judge = [
        {"Wait": {"vars": ["French", "German"]}},
        fixed(concat(s(" both: "), var("French"), s(" "), var("German"))),
    ]
    steps = [fixed("'hello' in"), {"Fork": {"branches": [language("French"), language("German"), judge]}}, fixed(".")]
    ran = decl(steps, "French is 'salut' it", "German is 'hallo' it")
    texts = [ran.text("a", index) for index in range(3)]
    assert texts == [
        "'hello' in French is 'salut'.",
        "'hello' in German is 'hallo'.",
        "'hello' in both: salut' hallo'.",
    ]


def test_an_inner_constraint_holds_after_its_marker(decl: Run) -> None:
    rule = {"after": "<", "options": options("cat", "cow", "caterpillar")}
    steps = [fixed("S: "), gen(inner=[rule], stop_at=".")]
    assert decl(steps, "S: a <cow and <cat too.").text() == "S: a <cow and <cat too."
    assert decl(steps, "S: a <dog.").text().startswith("S: a <c")
    second = {"after": "he", "options": options("ll!", "n!")}
    assert decl([fixed("S: "), gen(inner=[second], stop_at="!")], "S: then").text() == "S: then!"


# -- expressions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (s("a"), "a"),
        (var("unset"), ""),
        (concat(s("a"), s("b")), "ab"),
        (options("a", "b"), "a\uff0cb"),
        ({"IfEq": {"a": s("x"), "b": s("x"), "eq": s("same"), "neq": s("not")}}, "same"),
        ({"IfEq": {"a": s("x"), "b": s("y"), "eq": s("same"), "neq": s("not")}}, "not"),
        ({"Extract": {"from": s("a1b22"), "rx": "[a-z]([0-9]+)"}}, "1"),
        ({"Extract": {"from": s("a1b2"), "rx": "[a-z](.)", "template": "$0=${1}", "list": True}}, "a1=1\uff0cb2=2"),
        ({"Extract": {"from": s("k=v"), "rx": "(?P<key>.)=(.)", "template": "$2$$${key}"}}, "v$k"),
        ({"Extract": {"from": s("nothing"), "rx": "([0-9])"}}, ""),
    ],
)  # fmt: skip
def test_an_expression_has_its_value(decl: Run, expr: Node, text: str) -> None:
    assert decl([fixed(expr)], prompt="x").text() == text


def test_what_was_generated_decides_what_follows(decl: Run) -> None:
    steps = [
        fixed("A "),
        gen(rx="[a-z]+", stmts=[store("word"), store("loud", concat(var("word"), s("!")))]),
        fixed(concat(s(" "), var("loud"))),
        fixed({"IfEq": {"a": var("word"), "b": s("cat"), "eq": s(" meow"), "neq": s(" ?")}}),
        {"Choose": {"options": {"Extract": {"from": s("x1 y2"), "rx": "([a-z][0-9])", "list": True}}}},
    ]
    ran = decl(steps, "A cat cat!", "meowy2")
    assert ran.text() == "A cat cat! meowy2"
    assert ran.variables() == {"word": b"cat", "loud": b"cat!"}


# -- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("{oops", "the program is not JSON"),
        ("[]", "program is []; must be an object"),
        ("{}", "program needs a field steps"),
        ('{"steps": [{"Foxed": {}}]}', "program.steps[0] is {Foxed: {}}; must be an object with one of Fixed, Choose"),
        ('{"steps": [{"Fixed": {}}]}', "program.steps[0].Fixed needs a field text"),
        ('{"steps": [{"Fixed": {"text": "a"}}]}', 'steps[0].Fixed.text is "a"; must be an object with one of String'),
        ('{"steps": [{"Gen": {"rx": 1}}]}', "program.steps[0].Gen.rx is 1; must be a text"),
        ('{"steps": [{"Gen": {"max_tokens": -1}}]}', "max_tokens is -1; must be a whole number from 0"),
        ('{"steps": [{"Gen": {"rx": "a", "yacc": "b"}}]}', "program.steps[0]: rx and yacc exclude each other"),
        ('{"steps": [{"Gen": {"regex": "a"}}]}', "program.steps[0].Gen has a field regex; there are rx, yacc"),
        ('{"steps": [{"Fork": {"branches": [[{"Stop": {}}]]}}]}', "branches is"),
        ('{"steps": [{"Gen": {"rx": "("}}]}', "unclosed group"),
        ('{"steps": [{"Fixed": {"text": {"Extract": {"from": {"String": {"str": ""}}, "rx": "("}}}}]}', "Extract.rx: "),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_place(script_pool: RuntimePool, decl: Run, program: str, error: str) -> None:
    ran: Scripts = runner(script_pool, "declctrl")(program)
    assert error in ran.error(), ran.error()
