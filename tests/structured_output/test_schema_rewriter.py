"""Tests of rewritten schemas: an independent validator finds them equivalent, and generated texts are valid under the
original schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator

from bridle.errors import InvalidRequest
from bridle.structured_output import ConstraintLimits, JsonSchema
from bridle.structured_output.compiler import Compiler
from bridle.structured_output.complement import NoEquivalent, complement, other_than
from bridle.structured_output.exclusion import exclude
from bridle.structured_output.schema_rewriter import equivalent, equivalent_text
from bridle.structured_output.work_budget import MAX_WORK, WorkBudget
from tests.structured_output.kit import text_vocabulary

NAMES = ("a", "b", "ab")
TEXTS = ("", "a", "b", "ab", "abc")
NUMBERS = (-1, 0, 1, 2, 0.5)
KINDS = ("object", "array", "string", "number", "boolean", "null")

values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS)
counts = st.integers(0, 4)
names = st.lists(st.sampled_from(NAMES), max_size=2, unique=True)


def optional(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


#: What has a complement.
plain = st.recursive(
    st.booleans()
    | optional(type=st.sampled_from(KINDS) | st.lists(st.sampled_from(KINDS), min_size=1, unique=True))
    | optional(const=scalars)
    | optional(enum=st.lists(scalars, min_size=1, max_size=4))
    | optional(minimum=st.sampled_from(NUMBERS), exclusiveMaximum=st.sampled_from(NUMBERS))
    | optional(maximum=st.sampled_from(NUMBERS), exclusiveMinimum=st.sampled_from(NUMBERS))
    | optional(minLength=counts, maxLength=counts, required=names)
    | optional(minItems=counts, maxItems=counts, minProperties=counts, maxProperties=counts),
    lambda inner: (
        optional(
            properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=2),
            required=names,
            type=st.sampled_from(KINDS),
        )
        | optional(anyOf=st.lists(inner, min_size=1, max_size=3))
        | optional(allOf=st.lists(inner, min_size=1, max_size=3))
        | st.builds(lambda schema: {"not": schema}, inner)
    ),
    max_leaves=5,
)
named = (
    optional(pattern=st.sampled_from(("^a", "b$", "^[ab]$")), type=st.just("string"))
    | optional(enum=st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    | optional(minLength=counts, maxLength=counts)
)
properties = st.dictionaries(st.sampled_from(NAMES), plain, max_size=2)
#: Keywords that are rewritten, beside others that they meet.
written = (
    optional(**{"not": plain, "type": st.sampled_from(KINDS)})
    | optional(**{"if": plain, "then": plain, "else": plain, "properties": properties})
    | optional(oneOf=st.lists(plain, min_size=2, max_size=3), properties=properties, type=st.just("object"))
    | optional(dependentRequired=st.dictionaries(st.sampled_from(NAMES), names, max_size=2), properties=properties)
    | optional(dependentSchemas=st.dictionaries(st.sampled_from(NAMES), plain, max_size=2), minProperties=counts)
    | optional(propertyNames=named, properties=properties, additionalProperties=st.booleans() | plain)
    | optional(unevaluatedProperties=plain, properties=properties, patternProperties=st.just({"^b": True}))
    | optional(unevaluatedItems=plain, prefixItems=st.lists(plain, min_size=1, max_size=2), items=plain)
    | optional(contains=plain, minContains=st.integers(0, 2), maxItems=counts, minItems=counts, items=plain)
    | optional(
        uniqueItems=st.booleans(),
        items=optional(enum=st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4)),
        maxItems=counts,
        minItems=counts,
        type=st.sampled_from(("array", "string")),
    )
)
#: Schemas that refer to others, which may refer to one another, and then may never end.
referring = st.builds(
    lambda branches, ways, wrong, here: {
        "$defs": {"a": branches[0], "b": {"anyOf": ways}},
        "oneOf": [*branches[1:], {"$ref": "#/$defs/a"}, *ways],
        **({"not": wrong} if here else {"if": wrong, "then": {"$ref": "#/$defs/b"}}),
    },
    st.lists(plain, min_size=2, max_size=3),
    st.lists(plain | st.just({"$ref": "#/$defs/a"}), min_size=1, max_size=2),
    plain | st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"items": {"$ref": "#"}}]),
    st.booleans(),
)
nested = written | referring | st.builds(lambda schema: {"properties": {"a": schema}, "items": schema}, written)


@given(nested, st.lists(values, min_size=1, max_size=20))
def test_an_equivalent_allows_the_same(schema: Any, instances: list[Any]) -> None:
    made = equivalent(schema)
    for instance in instances:
        before, after = (Draft202012Validator(each).is_valid(instance) for each in (schema, made))
        assert before is after, (schema, made, instance)


@given(
    optional(
        dependencies=st.dictionaries(st.sampled_from(NAMES), names | plain, max_size=2),
        contains=plain,
        maxItems=counts,
        items=plain,
        oneOf=st.lists(plain, min_size=2, max_size=2),
    ),
    st.lists(values, min_size=1, max_size=20),
)
@example({"oneOf": [True, True]}, [None])
def test_in_older_drafts_too(schema: Any, instances: list[Any]) -> None:
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    made = equivalent(schema)
    for instance in instances:
        assert Draft7Validator(schema).is_valid(instance) is Draft7Validator(made).is_valid(instance), (schema, made)


@given(plain, st.lists(values, min_size=1, max_size=20))
def test_a_complement_allows_everything_else(schema: Any, instances: list[Any]) -> None:
    try:
        other = complement(schema)
    except NoEquivalent:
        assume(False)
    for instance in instances:
        allowed = [Draft202012Validator(each).is_valid(instance) for each in (schema, other)]
        assert sorted(allowed) == [False, True], (schema, other, instance)


telling = optional(
    type=st.sampled_from(KINDS) | st.lists(st.sampled_from((*KINDS, "integer")), min_size=1, unique=True),
    properties=st.dictionaries(st.sampled_from(NAMES), plain, max_size=2),
    additionalProperties=st.booleans() | plain,
    required=names,
    pattern=st.sampled_from(("^a", "b$")),
    maximum=st.sampled_from(NUMBERS),
    minProperties=counts,
    allOf=st.lists(plain, max_size=2),
    anyOf=st.lists(plain, min_size=1, max_size=2),
)


@given(telling | plain, telling | plain, st.booleans(), st.lists(values, min_size=1, max_size=30))
def test_what_excludes_another_shares_no_value(one: Any, other: Any, refers: bool, instances: list[Any]) -> None:
    is_apart = exclude({"$ref": "#/$defs/one"} if refers else one, other, lambda _: one, WorkBudget())
    for instance in instances if is_apart else ():
        allowed = [Draft202012Validator(each).is_valid(instance) for each in (one, other)]
        assert not all(allowed), (one, other, instance)


NAMES_OF_MANY = [f"v{number}" for number in range(4_000)]
EVIL = "(x+x+)+y"  # a backtracking matcher takes years for a few dozen letters


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"enum": ["x" * 60]}, {"type": "string", "pattern": EVIL}]},
        {"type": "object", "properties": {"x" * 60: {}}, "propertyNames": {"pattern": EVIL}},
        {"oneOf": [{"enum": [*NAMES_OF_MANY, number]} for number in range(24)]},
        {"oneOf": [{"allOf": [{"required": [f"{n} {m}"], "type": "object"} for m in range(40)]} for n in range(24)]},
        {
            "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 8} for n in range(20)} | {"d20": {}},
            "not": {"$ref": "#/$defs/d0"},
        },
        {"oneOf": [{"minimum": 10**400}, {"maximum": 5}]},
        {"anyOf": [{"$dynamicAnchor": name} for name in NAMES_OF_MANY * 4]},
    ],
    ids=["pattern", "names", "lists", "parts", "references", "large numbers", "anchors"],
)
def test_no_schema_takes_long(schema: Any) -> None:
    """The rewriter gives up on schemas that take too long, and leaves them unchanged."""
    json.loads(equivalent_text(json.dumps(schema)))


def test_the_work_for_a_document_is_bounded() -> None:
    work = WorkBudget(150)
    assert work.matches("^a", "ab") is True
    assert work.matches("^a", "ab") is None  # too little is left
    assert not work.spend()
    assert WorkBudget(MAX_WORK).spend(MAX_WORK)


@pytest.mark.parametrize("pattern", [EVIL, "(a|a)+", "(a+)+", "a*a*a*", "(?=a)", "(a?b)?", "((x{9}){9}){9}", "(", "["])
def test_a_pattern_that_may_take_long_is_not_tried(pattern: str) -> None:
    assert WorkBudget().matches(pattern, "a" * 40) is None


@pytest.mark.parametrize(
    "pattern", ["^[a-z_][a-z0-9_]*$", r"^\d{4}-x?", "^(?:ab|cd)$", "(ab)+", r"[+*?{(|]\(", "x{9999}"]
)
def test_ordinary_patterns_are_tried(pattern: str) -> None:
    for text in ("ab", "1234-x", "cd", "+(", "x" * 200):
        assert WorkBudget().matches(pattern, text) is (re.search(pattern, text) is not None)


def test_how_far_exclusion_sees() -> None:
    found = {"#/text": {"type": "string"}, "#/loop": {"anyOf": [{"$ref": "#/loop"}, {"$ref": "#/loop"}]}}
    kinds = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "ab"]
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    apart = [
        ({"$ref": "#/text"}, {"type": "array"}),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/text"}]}, {"enum": [1, [2], True]}),
        (kinds[0], kinds[1]),
        (closed, {"required": ["b"]}),
        ({"enum": ["x", "y"]}, {"pattern": "^z"}),
        ({"type": "string", "maxLength": 3}, {"minLength": 4}),
    ]
    together = [
        ({"$ref": "#/elsewhere"}, {"type": "array"}),
        ({"$ref": "#/loop"}, {"$ref": "#/loop"}),
        ({"$ref": "#/text", "type": "array"}, {"type": "string"}),  # old drafts do not read what stands beside it
        ({"enum": [True]}, {"enum": [True, 1]}),
        (closed | {"patternProperties": {"b": {}}}, {"required": ["b"]}),
        ({"properties": {"a": False}}, {"required": ["a"]}),  # no object has it, and a number fits both
    ]
    assert [exclude(one, other, found.get, WorkBudget()) for one, other in (*apart, *together)] == [True] * 6 + [
        False
    ] * 6


@given(st.lists(st.text("ab]^-\\.(", max_size=4), max_size=5), st.text("ab]^-\\.(x", max_size=5))
def test_a_regex_of_other_texts(texts: list[str], text: str) -> None:
    found = Draft202012Validator({"pattern": f"^(?:{other_than(texts)})$"}).is_valid(text)
    assert found is (text not in texts)


@given(values.filter(lambda value: isinstance(value, dict)))
def test_what_is_no_schema_stays_as_it_is_or_is_a_schema_still(schema: Any) -> None:
    """Arbitrary values in place of schemas cause no error, and the result is valid JSON."""
    for keyword in ("not", "if", "oneOf", "dependencies", "propertyNames", "contains", "uniqueItems", "format", "type"):
        for value in (schema, [schema], 3, None, "x"):
            json.loads(equivalent_text(json.dumps({keyword: value, "maxItems": schema, "then": value})))


def test_an_equivalent_is_bounded() -> None:
    branch: Any = {"enum": [f"v{number}" for number in range(50)]}
    for _ in range(8):
        branch = {"oneOf": [branch, {"properties": {"a": branch}}, {"required": ["a"]}]}
    text = json.dumps(branch)
    assert equivalent_text(text) == text


# -- what llguidance makes of it -----------------------------------------------------------------------------

ANY_CASE = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "null"}},
    "additionalProperties": False,
}
SERVED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "dependentRequired": (ANY_CASE | {"dependentRequired": {"a": ["b"]}}, [{}, {"a": "x", "b": None}], [{"a": "x"}]),
    "dependencies": (ANY_CASE | {"dependencies": {"a": ["b"]}}, [{"b": None}], [{"a": "y"}]),
    "dependentSchemas": (ANY_CASE | {"dependentSchemas": {"a": {"required": ["b"]}}}, [{}], [{"a": "x"}]),
    "if": (
        ANY_CASE | {"required": ["a"], "if": {"properties": {"a": {"const": "x"}}}, "then": {"required": ["b"]}},
        [{"a": "y"}, {"a": "x", "b": None}],
        [{"a": "x"}],
    ),
    "not": (
        {"type": "string", "maxLength": 4, "not": {"enum": ["no", "none"]}},
        ["", "n", "noo", "yes"],
        ["no", "none"],
    ),
    "not required": (ANY_CASE | {"not": {"required": ["b"]}}, [{}, {"a": "x"}], [{"b": None}]),
    "oneOf": ({"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number", "maximum": 2}]}, [3, 1.5], [2.5]),
    "oneOf of properties": (
        ANY_CASE | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": "x"}],
        [{}, {"a": "x", "b": None}],
    ),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^[ab]$"}}, [{"a": 1}, {}], [{"c": 1}]),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True},
        [[], ["y", "x"]],
        [["x", "x"]],
    ),
    "contains": (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 3, "contains": {"const": 7}},
        [[7], [1, 7]],
        [[], [1]],
    ),
    "unevaluatedProperties": (
        {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
        [{"a": 1}],
        [{"b": 1}],
    ),
    "recursive reference": (
        {
            "$recursiveAnchor": True,
            "type": "object",
            "properties": {"a": {"$recursiveRef": "#"}},
            "additionalProperties": False,
        },
        [{"a": {"a": {}}}],
        [{"a": 1}],
    ),
    "dynamic reference": (
        {
            "$dynamicAnchor": "n",
            "type": "object",
            "properties": {"a": {"$dynamicRef": "#n"}},
            "additionalProperties": False,
        },
        [{"a": {}}],
        [{"a": 1}],
    ),
    "uri-reference": (
        {"type": "string", "format": "uri-reference"},
        ["a/b?c#d", "http://x/y", "", "../a", "//h/p"],
        [" ", "a b", "1:2"],
    ),
    "oneOf of references": (
        {
            "$defs": {"word": {"type": "string", "minLength": 1}, "list": {"type": "array", "items": {"$ref": "#"}}},
            "oneOf": [{"$ref": "#/$defs/word"}, {"$ref": "#/$defs/list"}],
        },
        ["a", [], ["a", ["b"]]],
        ["", 1, [1]],
    ),
    "not a reference": (
        {"$defs": {"bad": {"enum": ["no"]}}, "type": "string", "maxLength": 3, "not": {"$ref": "#/$defs/bad"}},
        ["", "yes"],
        ["no"],
    ),
    "a format that no draft has": ({"type": "string", "format": "semver", "maxLength": 3}, ["", "1.0"], ["1.0.0"]),
    "byte": ({"type": "string", "format": "byte"}, ["", "YWI=", "YWJj"], ["YWI", "!"]),
    "json-pointer": ({"type": "string", "format": "json-pointer"}, ["", "/a~0b/c"], ["a", "/~2"]),
}


@pytest.fixture(scope="module")
def compiler() -> Any:
    made = Compiler(text_vocabulary, ConstraintLimits(seconds=10))
    yield made
    made.close()


@pytest.mark.parametrize("name", SERVED)
def test_what_was_refused_is_served_exactly(compiler: Compiler, name: str) -> None:
    schema, good, bad = SERVED[name]
    matcher = compiler.compile(JsonSchema(schema)).result()
    for fits, instances in ((True, good), (False, bad)):
        for instance in instances:
            walk = matcher.copy()
            tokens = [ord(char) for char in json.dumps(instance)]
            assert (walk.backend.try_consume_tokens(tokens) == len(tokens) and walk.is_accepting) is fits, instance


@given(nested, st.lists(values, min_size=1, max_size=10))
def test_what_is_accepted_is_valid(compiler: Compiler, schema: Any, instances: list[Any]) -> None:
    """A document that the compiled schema accepts is valid under the given schema."""
    try:
        matcher = compiler.compile(JsonSchema({"type": ["object", "array", "string", "number"], **schema})).result()
    except InvalidRequest:
        return
    for instance in instances:
        walk = matcher.copy()
        tokens = [ord(char) for char in json.dumps(instance)]
        if walk.backend.try_consume_tokens(tokens) == len(tokens) and walk.is_accepting:
            assert Draft202012Validator(schema).is_valid(instance), (schema, instance)


@pytest.mark.parametrize(
    "name",
    [
        "https://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft-04/schema#",
        "http://json-schema.org/draft/2019-09/schema#",
        "http://json-schema.org/draft/2020-12/schema",
    ],
)
def test_a_draft_is_known_however_its_name_is_written(compiler: Compiler, name: str) -> None:
    matcher = compiler.compile(JsonSchema({"$schema": name, "type": "boolean"})).result()
    assert not matcher.is_failed
    with pytest.raises(InvalidRequest, match="does not fetch"):
        compiler.compile(JsonSchema({"$schema": name.replace("json-schema", "example"), "type": "null"})).result()


def test_only_a_client_can_say_that_a_keyword_is_not_to_be_enforced(compiler: Compiler) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiler.compile(JsonSchema(schema)).result()
    matcher = compiler.compile(JsonSchema({**schema, "x-guidance": {"lenient": True}})).result()
    assert matcher.backend.try_consume_tokens([ord(char) for char in "[1, 1]"]) == 6


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"pattern": "^a"}},
        {"type": "string", "format": "regex"},
        {"type": "array", "contains": {"type": "integer"}},
        {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
    ],
)
def test_what_has_no_equivalent_is_refused_in_its_own_words(compiler: Compiler, schema: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"Unimplemented keys|Unknown format"):
        compiler.compile(JsonSchema(schema)).result()
