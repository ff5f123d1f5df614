"""Tests of grammar compilation: it is bounded, runs in its own thread, is shared and cached, and survives hostile
grammars."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest

from bridle.errors import InvalidRequest, Overloaded
from bridle.structured_output import (
    Choice,
    Constraint,
    ConstraintLimits,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Substring,
    Yacc,
    compile_sandbox,
)
from bridle.structured_output.compile_sandbox import CompileSandbox
from bridle.structured_output.compile_worker import allocated, first_line
from bridle.structured_output.compiler import Compiler
from bridle.structured_output.validation import check_usable
from tests.structured_output.kit import text_vocabulary, tokens_of
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_sandbox, "_PATIENCE", PATIENCE)  # what is late on a busy machine is no refusal
        made = Compiler(text_vocabulary)
        yield made
        made.close()


PLACES: list[tuple[Constraint, str]] = [
    (Lark('start: a\na: "x" | b'), 'the grammar is not usable: line 2, column 4: unknown name: "b"'),
    (Regex("(("), 'the regex is not usable: invalid regex "((" (in regex)'),
    (JsonSchema({"type": "objct"}), "the schema is not usable: Invalid type: objct"),
    (OneOf(Regex("(("), Regex("a")), "the constraint's grammar is not usable: invalid regex"),
]


@pytest.mark.parametrize(("constraint", "told"), PLACES, ids=["lark", "regex", "schema", "several"])
def test_a_refusal_is_in_the_words_of_the_constraint(constraint: Constraint, told: str) -> None:
    """Errors name positions in the author's grammar."""
    with pytest.raises(InvalidRequest) as refusal:
        check_usable(constraint)
    assert str(refusal.value).startswith(told) and refusal.value.param == "constraint"
    check_usable(Regex("a"))


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"name": {"type": "string"}, "age": {"type": "strin"}}}, "properties.age.type"),
    ({"properties": {"a.b": {"items": {"minLength": -1, "type": "string"}}}}, "properties['a.b'].items.minLength"),
    ({"properties": {f"p{i}": {"type": "x" if i == 77 else "null"} for i in range(100)}}, "properties.p77.type"),
    ({"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": {}}]}, "anyOf[1].prefixItems"),
    ({"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"pattern": "("}}}, "$defs.x.pattern"),
    ({"properties": {"a": {"$ref": "#/$defs/y"}}}, "properties.a.$ref"),
    ({"properties": {"a": {"type": "array", "contains": {"type": "null"}}}}, "properties.a.contains"),
    ({"type": "object", "required": [3]}, "required"),
]


@pytest.mark.parametrize(("schema", "path"), FAULTS)
def test_a_refused_schema_is_refused_with_the_place_of_the_fault(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        check_usable(JsonSchema(schema))
    assert str(refusal.value).endswith(f", at {path}")


def test_a_fault_is_looked_for_no_longer_than_one_schema_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    ask = compile_sandbox.CompileSandbox.refusal_of

    def slow(self: compile_sandbox.CompileSandbox, grammar: str) -> tuple[str, float]:
        tried.append(grammar)
        return ask(self, grammar)[0], self.limits.seconds / 2

    monkeypatch.setattr(compile_sandbox.CompileSandbox, "refusal_of", slow)
    nested: dict[str, Any] = {"type": "strin"}
    for _ in range(20):
        nested = {"properties": {"a": nested}}
    with pytest.raises(InvalidRequest, match=r"Invalid type: strin, at properties\.a\.properties"):
        check_usable(JsonSchema(nested))
    assert len(tried) == 3


def items(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


DEFS = {f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"minLength": i}]}] * 2} for i in range(40)}
LADDER = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000))
HOPELESS: dict[str, tuple[Constraint, str]] = {
    "malformed": (Regex("(a"), "unclosed group"),
    "number": (Regex("x{1,1e9}"), "unclosed counted repetition"),
    "classes": (Regex("[" * 60_000), "not usable"),
    "optional": (Regex("a?" * 50_000 + "a" * 50_000), "it takes more than"),
    "lookahead": (Regex("(?=a)b"), "look-around"),
    "references": (Regex(r"(a)\1"), "backreferences"),
    "loop": (JsonSchema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "it allows no text at all"),
    "remote": (JsonSchema({"$ref": "http://example.com/schema"}), "does not fetch resources"),
    "explosion": (JsonSchema({"$ref": "#/$defs/d0", "$defs": {**DEFS, "d40": {"type": "string"}}}), "too large"),
    "unknown type": (JsonSchema({"type": "color"}), "not usable"),
    "contradiction": (JsonSchema({"type": "integer", "minimum": 5, "maximum": 4}), "not usable"),
    "cycle": (Lark("start: a\na: b\nb: a"), "it allows no text at all"),
    "terminal cycle": (Lark("start: A\nA: B\nB: A"), "circular reference"),
    "ladder": (Lark(f'start: r0\n{LADDER}\nr3000: "x"'), "too many parts, or parts within parts"),
    "empty meet": (Lark("start: A\nA: /ab/ & /cd/"), "it allows no text at all"),
    "malformed after valid": (Lark("start: a b c\na: /x+/\nb: /[0-9]/\nc: (((/y/"), "not usable"),
    "malformed in a branch": (JsonSchema({"anyOf": [{"type": "string"}, {"pattern": "("}]}), "not usable"),
    "no rule": (Yacc("%start a\n%%\na: b;"), "no rule for 'b'"),
}
HARMLESS: dict[str, Constraint] = {
    "repetition": Regex("x{1,1000000000}"),
    "nested repetition": Regex("((x{1,1000}){1,1000}y){1,1000}"),
    "star tower": Regex("(" * 100 + "a*" + ")*" * 100),
    "brackets": Regex("(" * 200 + "a" + ")" * 200),
    "blow-up": Regex("(a|b)*a(a|b){30}"),
    "recursion": JsonSchema({"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}),
    "deep": JsonSchema(items(90)),
    "enum": JsonSchema({"enum": [f"v{i}" for i in range(10_000)]}),
    "choice": Choice([f"v{i}" for i in range(10_000)]),
    "quotation": Substring("to be or not to be " * 1000),
    "ambiguous": Lark('start: a\na: a a | a a a | "x" | "xx" |'),
}


@pytest.mark.parametrize("name", HOPELESS)
def test_a_hopeless_grammar_is_a_clear_refusal(compiler: Compiler, name: str) -> None:
    constraint, message = HOPELESS[name]
    errors = []
    for _ in range(2):  # the second time it is remembered
        with pytest.raises(InvalidRequest) as refusal:
            compiler.compile(constraint).result()
        errors.append(refusal.value)
        assert message in str(refusal.value)
        assert len(str(refusal.value)) < 700
        assert refusal.value.param == "constraint"
    assert errors[0] is not errors[1]
    assert compiler.compile(constraint).done()


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_hostile_but_is_not_compiles(compiler: Compiler, name: str) -> None:
    walk = compiler.compile(HARMLESS[name]).result().copy()
    for _ in range(20):
        if walk.is_complete:
            break
        walk.commit([max(tokens_of(walk.mask()))])


def test_a_good_constraint_compiles_after_bad_ones(compiler: Compiler) -> None:
    for i in range(5):
        with pytest.raises(InvalidRequest):
            compiler.compile(Regex(f"({i}")).result()
        assert not compiler.compile(Regex(f"{i}")).result().is_failed


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ConstraintLimits(seconds=0.05), "it takes more than 0.05 s of processor time"),
        (ConstraintLimits(memory=24 << 20), "it takes more than 24 MB of memory"),
    ],
)
def test_a_grammar_beyond_the_limits_costs_its_process_only(limits: ConstraintLimits, message: str) -> None:
    trials = CompileSandbox(replace(limits, num_compilers=1))
    heavy = json.dumps({"grammars": [{"lark_grammar": f"start: /{'a?' * 50_000}{'a' * 50_000}/"}]})
    light = json.dumps({"grammars": [{"lark_grammar": "start: /a/"}]})
    try:
        for _ in range(2):
            with pytest.raises(InvalidRequest) as refusal:
                trials.try_grammar(heavy)
            assert message in str(refusal.value)
            assert trials.try_grammar(light) >= 0
    finally:
        trials.close()


def test_equal_constraints_are_compiled_once() -> None:
    compiler = Compiler(text_vocabulary)
    try:
        futures = [compiler.compile(Regex("[a-z]{3}")) for _ in range(10)]
        assert len({id(future.result()) for future in futures}) == 1
        assert compiler.compile(Regex("[a-z]{3}")).result() is futures[0].result()
        assert compiler.num_cached == 1
    finally:
        compiler.close()


@pytest.mark.slow
def test_a_flood_of_schemas_leaves_the_newest_only() -> None:
    """Schemas that are requested once do not fill the memory. BRIDLE_FLOOD sets the number of schemas."""
    count = int(os.environ.get("BRIDLE_FLOOD", "10000"))
    limits = ConstraintLimits()
    compiler = Compiler(text_vocabulary, limits)
    process = psutil.Process()
    grown: list[int] = []
    try:
        for begin in range(0, count, 500):
            futures = [compiler.compile(_numbered_schema(number)) for number in range(begin, begin + 500)]
            assert not any(future.result().is_failed for future in futures)
            assert compiler.num_cached <= limits.cache_entries and compiler.cached_bytes <= limits.cache_bytes
            grown.append(process.memory_info().rss)
    finally:
        compiler.close()
    early, late = max(grown[: len(grown) // 2]), max(grown[len(grown) // 2 :])
    assert late - early < 64 << 20, [size >> 20 for size in grown]


def _numbered_schema(number: int) -> JsonSchema:
    properties = {f"field{number}": {"type": "integer"}, "other": {"enum": [f"a{number}", "b"]}}
    return JsonSchema({"type": "object", "properties": properties, "required": list(properties)})


def test_what_is_kept_is_bounded_and_the_latest() -> None:
    limits = ConstraintLimits(cache_entries=10, cache_bytes=5 * 200_000)
    compiler = Compiler(text_vocabulary, limits)
    try:
        for i in range(40):
            compiler.compile(Regex(f"a{{{i + 1}}}")).result()
            assert compiler.num_cached <= 10
            assert compiler.cached_bytes <= limits.cache_bytes
        latest = compiler.compile(Regex("a{40}"))
        assert latest.done()
        assert not compiler.compile(Regex("a{1}")).done()
    finally:
        compiler.close()


def test_what_hostile_grammars_leave_behind_is_bounded_in_bytes_of_the_process() -> None:
    """After many large grammars, only the cache uses memory, and other memory is returned to the system."""
    limits = ConstraintLimits(cache_bytes=24 << 20, seconds=10)
    compiler = Compiler(text_vocabulary, limits)
    try:
        compiler.compile(Regex("a")).result()
        before, resident = allocated(), psutil.Process().memory_info().rss
        for number in range(24):
            compiler.compile(_many_objects(number)).result()
            assert compiler.cached_bytes <= limits.cache_bytes
        assert allocated() - before <= 1.5 * limits.cache_bytes
        assert compiler.num_cached > 1
        assert psutil.Process().memory_info().rss - resident <= 3 * limits.cache_bytes
    finally:
        compiler.close()
    assert allocated() - before <= limits.cache_bytes // 4


def test_a_grammar_drives_out_no_more_than_its_share() -> None:
    compiler = Compiler(text_vocabulary, ConstraintLimits(cache_bytes=1 << 20, seconds=10))
    try:
        kept = compiler.compile(Regex("a"))
        kept.result()
        large = _many_objects(0)
        assert not compiler.compile(large).result().is_failed
        assert compiler.compile(Regex("a")).result() is kept.result()
        assert compiler.num_cached == 1
    finally:
        compiler.close()


def _many_objects(number: int) -> JsonSchema:
    return JsonSchema({"enum": [{"a": index, "b": f"v{index}-{number}"} for index in range(600)]})


def test_after_the_end_nothing_is_compiled() -> None:
    compiler = Compiler(text_vocabulary)
    compiler.compile(Regex("a")).result()
    compiler.close()
    compiler.close()
    with pytest.raises(Overloaded, match="shut down"):
        compiler.compile(Regex("b")).result()


def test_messages_are_for_people() -> None:
    assert first_line("bad thing\nmore\nerror: unclosed group\n<state>\nlots") == "bad thing unclosed group"
    assert len(first_line("x" * 10_000)) == 300
    assert first_line("") == "unknown error"
