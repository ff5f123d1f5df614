"""Tests of every function of AICI's Python interface, in the sandbox, over a fake model whose preferred text is
known."""

from __future__ import annotations

import pytest

from tests.aici.conftest import BOS, EOS, HE, LL, VOCAB_SIZE
from tests.controllers.conftest import Run
from tests.controllers.pykit import script


def test_a_script_tokenizes_and_detokenizes(py: Run) -> None:
    ran = py(
        script(
            f"""
assert aici.tokenize("hello") == [{HE}, {LL}, 111]
assert native.tokenize(b"h\\xff") == [104, 255], native.tokenize(b"h\\xff")
assert aici.detokenize([{HE}, {LL}, 111, {EOS}]) == b"hello"
assert aici.eos_token() == {EOS}
assert aici.token_repr({HE}) == "'he'" and aici.token_repr({EOS}) == "<eos>"
assert aici.tokens_repr([65, {BOS}]) == "['A', <{BOS}>]"
assert native.is_server_side() and aici.is_server_side()
assert native.self_seq_id() >= 0
assert [aici.get_config(name) for name in ("fork", "backtrack", "ff_tokens", "flying")] == [1, 1, 1, 0]
assert aici.fork_supported() and aici.backtrack_supported()
for wrong in (lambda: aici.detokenize([{VOCAB_SIZE}]), lambda: aici.tokenize(3)):
    try:
        wrong()
    except (TypeError, ValueError) as error:
        print(error)
""",
            call="test",
        )
    )
    assert ran.error() == ""
    assert ran.logs("a").splitlines() == [
        f"token {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}",
        "tokenize wants text or bytes, not int",
        "TEST OK",
    ]


def test_a_token_set_adds_and_removes_tokens(py: Run) -> None:
    ran = py(
        script(
            f"""
one = aici.TokenSet()
assert len(one) == {VOCAB_SIZE} and one.num_set() == 0 and not any(one)
one[65] = True
one[-1] = True
assert one[65] and one[{VOCAB_SIZE - 1}] and not one[66] and list(one).count(True) == 2
assert repr(one) == "{{'A', <{VOCAB_SIZE - 1}>}}", one
one[65] = False
assert one.num_set() == 1
one.set_all(True)
assert one.num_set() == {VOCAB_SIZE} and repr(one) == "{{all}}" and one[0]
one[0] = False
assert one.num_set() == {VOCAB_SIZE - 1} and not one[0]
one.set_all(False)
assert one.num_set() == 0
assert aici.all_tokens().num_set() == {VOCAB_SIZE}
try:
    one[{VOCAB_SIZE}]
except IndexError as error:
    print(error)
"""
        )
    )
    assert (ran.error(), ran.logs("a")) == ("", f"token {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}\n")


def test_variables_are_read_and_written(py: Run) -> None:
    ran = py(
        script(
            """
assert aici.get_var("x") is None
aici.set_var("x", "one")
aici.append_var("x", b", two")
aici.append_var("y", "new")
assert native.get_var("x") == b"one, two"
aici.check_var("x", "one, two")
aici.check_vars({"x": "one, two", "y": "new"})
for name, value in (("x", "three"), ("z", "")):
    try:
        aici.check_var(name, value)
    except AssertionError as error:
        print(error)
"""
        )
    )
    assert ran.error() == "" and ran.variables() == {"x": b"one, two", "y": b"new"}
    assert ran.logs("a").splitlines() == [
        "variable 'x' is 'one, two'; expected 'three'",
        "variable 'z' is not set; expected ''",
    ]


def test_what_happens_before_the_first_step_is_told(py: Run) -> None:
    """Logs and variables of a script's top level and first lines are reported, although they run before the first
    step."""
    ran = py(
        "print('top')\naici = __import__('pyaici.server').server\n"
        + "aici.set_var('x', 'y')\n"
        + script("print('main')")
    )
    assert (ran.error(), ran.logs("a"), ran.variables()) == ("", "top\nmain\n", {"x": b"y"})


def test_each_kind_of_constraint_can_be_drawn_from_by_hand(py: Run) -> None:
    """A script reads the allowed tokens of each kind of constraint through the constraint's own methods."""
    ran = py(
        script(
            """
def allowed(constraint):
    tokens = aici.TokenSet()
    tokens[3] = True  # is overwritten
    constraint.allow_tokens(tokens)
    return "".join(sorted(aici.detokenize([t]).decode(errors="replace") or "^" for t in tokens.tokens()))

def feed(constraint, text):
    for token in text.encode():
        constraint.append_token(token)
    return allowed(constraint), constraint.eos_allowed(), constraint.eos_forced()

anything = aici.Constraint()
assert anything.eos_allowed() and not anything.eos_forced() and anything.token_allowed(7)
regex = aici.RegexConstraint("^[ab]{2}c?$")
assert feed(regex, "") == ("ab", False, False), allowed(regex)
assert feed(regex, "ab") == ("^c", True, False)
assert regex.token_allowed(99) and not regex.token_allowed(97)
assert feed(regex, "c") == ("^", True, True)
assert feed(aici.RegexConstraint(r"x\\$"), "x") == ("$", False, False), "a dollar that is meant"
choose = aici.ChooseConstraint(["ab", "a", "xy"])
assert choose.token_allowed(97) and not choose.token_allowed(98)
assert feed(choose, "") == ("ax", False, False)
assert feed(choose, "a") == ("^b", True, False)
assert feed(choose, "b") == ("^", True, True)
cfg = aici.CfgConstraint('''%start sum
%%
sum : NUM | sum "+" NUM ;
NUM : "/[1-3]/" ;''')
assert feed(cfg, "1")[:2] == ("+^", True)
assert feed(cfg, "+") == ("123", False, False)
part = aici.SubStrConstraint("one two", '"')
assert feed(part, "") == ("ot", False, False)
assert feed(part, "two") == ('"', False, False)
assert feed(part, '"') == ("^", True, True)
lexer = aici.DynamicLexer("$")
lexer.add("foo")
lexer.add("b$")
names = lexer.constraint()
assert feed(names, "(1+")[1] and "f" in allowed(names) and "c" not in allowed(names)
assert feed(names, "f")[0] == "o"
assert feed(aici.JsonConstraint({"type": "boolean"}), "t") == ("r", False, False)
assert feed(aici.LarkConstraint('start: "a" | "b"'), "") == ("ab", False, False)
for wrong in (
    lambda: aici.RegexConstraint("("),
    lambda: aici.CfgConstraint("nonsense"),
    lambda: aici.ChooseConstraint("ab"),
    lambda: lexer.add("a-b"),
    lambda: aici.RegexConstraint("a").append_token(98),
):
    try:
        wrong()
    except ValueError as error:
        print(str(error).splitlines()[0])
"""
        )
    )
    assert ran.error() == ""
    problems = ran.logs("a").splitlines()
    assert len(problems) == 5 and "regex" in problems[0] and "does not continue" in problems[4]


def test_the_prompt_and_places_in_the_text(py: Run) -> None:
    ran = py(
        script(
            """
begin = aici.Label()
prompt = await aici.GetPrompt()
assert prompt == aici.get_tokens() and len(prompt) == aici.get_prompt_len() == begin.ptr == 4, prompt
written = await aici.FixedTokens(" a")
assert written == [32, 97] and begin.tokens_since() == [32, 97]
here = aici.Label()
await aici.FixedTokens(b" b\\xff")
assert here.text_since() == " b\\ufffd" and begin.text_since() == " a b\\ufffd"
await aici.FixedTokens("!", following=here)
assert here.text_since() == "!"
await aici.FixedTokens("?", following=begin)
assert begin.text_since() == "?" and here.ptr > len(aici.get_tokens())
"""
        ),
        prompt="one",
    )
    assert (ran.error(), ran.text()) == ("", "?")
    assert "FIXED ' a'" in ran.logs("a") and "BACKTRACK 3 [' ', 'b', '\\\\xff']" in ran.logs("a")
    assert ran.end("a").usage.forced_tokens == 1, "the script was ahead of the model: only the last text was sent"


@pytest.mark.parametrize(
    ("arguments", "line", "expected"),
    [
        ("regex='[0-9]+x'", "Q: 12x34", "12x"),
        ("regex='^[a-c]{2}$'", "Q: xyz", "aa"),
        ("options=['Yes', 'No']", "Q: No!", "No"),
        ("options=['Yes', 'Yesterday']", "Q: Yesterday", "Yesterday"),
        ("substring='the quick brown fox', max_tokens=30", 'Q: quick brown" and', 'quick brown"'),
        ("substring='the quick fox', substring_end='.'", "Q: fox. Yes", "fox."),
        ('yacc=\'%start s\\n%%\\ns : N | s "+" N ;\\nN : "/[0-9]/" ;\', max_tokens=3', "Q: 1+2+3", "1+2"),
        ("stop_at='ne'", "Q: one more", "one"),
        ("max_tokens=3", "Q: abcdef", "abc"),
        ("", "Q: done", "done"),
        ("", "Q: 0123456789012345678901234567890", "01234567890123456789"),
        ("lark='start: \"a\" /[0-9]/'", "Q: a7", "a7"),
        ("json_schema={'type': 'integer', 'minimum': 10, 'maximum': 99}", "Q: 123", "12"),
        ("constraint=lambda: aici.RegexConstraint('z{3}'), max_tokens=2", "Q: a", "zz"),
    ],
)
def test_generation_ends_where_it_should(py: Run, arguments: str, line: str, expected: str) -> None:
    call = f"aici.gen_text({arguments}{', ' * bool(arguments)}store_var='t')"
    ran = py(script(f"text = await {call}\nassert text == {expected!r}, text"), line, prompt="Q: ")
    assert (ran.error(), ran.text(), ran.variables()) == ("", expected, {"t": expected.encode()})
    assert ran.logs("a") == f"GEN {expected!r}\n"


def test_tokens_of_a_generation_and_one_constraint_at_most(py: Run) -> None:
    ran = py(
        script(
            f"""
tokens = await aici.gen_tokens(options=["hello"])
assert tokens == [{HE}, {LL}, 111], tokens
try:
    await aici.gen_text(regex="a", options=["b"])
except AssertionError as error:
    print(error)
"""
        ),
        "hello",
    )
    assert ran.error() == "" and "at most one constraint" in ran.logs("a")


def test_what_is_no_choice_needs_no_model(py: Run) -> None:
    text = '{"name": "Bob", "age": 42}'
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    ran = py(script(f"await aici.gen_text(json_schema={schema!r}, max_tokens=60)"), "Q: " + text, prompt="Q: ")
    assert (ran.error(), ran.text()) == ("", text)
    assert ran.end("a").usage.sampled_tokens <= 4
    ran = py(script(f"assert await aici.gen_text(json_schema={schema!r}, max_tokens=5) == '{{\"nam'"), prompt="Q: ")
    assert ran.error() == ""
    ran = py(script(f"assert (await aici.gen_text(json_schema={schema!r}, stop_at='name')).endswith('name')"))
    assert ran.error() == ""


def test_sampling_for_some_draws_only(py: Run) -> None:
    """Text generated at a high temperature under a mask differs from the model's preferred text; text around it does
    not."""
    body = """
first = await aici.gen_text(max_tokens=2)
hot = await aici.gen_text(regex="[a-z]{20}", temperature=99.0, top_k=0)
last = await aici.gen_text(regex="[a-z]{3}", top_p=0.5)
aici.set_var("hot", hot)
"""
    ran = py(script(body), "Q: " + "ab" * 20, prompt="Q: ")
    hot = ran.variables()["hot"].decode()
    assert ran.error() == "" and len(set(hot)) > 4
    assert ran.text().startswith("ab")
    again = py(script(body), "Q: " + "ab" * 20, prompt="Q: ", seed=7)
    assert again.variables()["hot"].decode() != hot


def test_choosing_a_long_text(py: Run) -> None:
    ran = py(script("assert await aici.choose(['x' * 30, 'y' * 30]) == 'y' * 30"), "Q: yy", prompt="Q: ")
    assert ran.error() == "" and ran.end("a").usage.forced_tokens == 30  # it is scored as a whole


def test_biases_and_candidates_reach_the_draw(py: Run) -> None:
    ran = py(
        script(
            """
seen = await aici.candidates(2)
assert len(seen) == 2 and seen[0].text == "y" and -0.01 < seen[0].logprob <= 0 and seen[0].probability > 0.99, seen
some = await aici.candidates(3, among=aici.tokenize("abc"))
assert sorted(c.text for c in some) == ["a", "b", "c"] and all(-1.2 < c.logprob < -1.0 for c in some), some
made = await aici.gen(max_tokens=2, top_logprobs=2)
assert made.text == "ye" and made.reason == "max_tokens" and len(made.candidates) == 2, made
assert [c.text for c in made.candidates[0]][0] == "y" and len(made.candidates[0]) == 2, made
biased = await aici.gen_text(max_tokens=1, bias={ord("Z"): 100.0})
assert biased == "Z", biased
"""
        ),
        "Q: yes",
        prompt="Q: ",
    )
    assert (ran.error(), ran.text()) == ("", "yeZ")


def test_the_models_end_is_not_kept(py: Run) -> None:
    ran = py(
        script(
            """
made = await aici.gen()
assert (made.text, made.reason) == ("ab", "end"), made
await aici.FixedTokens("|")
"""
        ),
        "Q: ab",
        prompt="Q: ",
    )
    assert (ran.error(), ran.tokens("a")) == ("", [*b"ab|"])


def test_the_level_of_the_log_decides_what_is_logged(py: Run) -> None:
    body = "aici.log_level = {}\nawait aici.FixedTokens('x')\nawait aici.gen_text(options=['ab', 'cd'])"
    assert py(script(body.format(0))).logs("a") == ""
    lines = py(script(body.format(2))).logs("a").splitlines()
    assert lines[0] == "FIXED 'x'" and lines[1] == "ALLOW: {'a', 'c'}" and lines[-1] == "GEN 'ab'"
