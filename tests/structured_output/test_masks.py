"""Tests of masks against brute force: a token is allowed exactly if some matching text continues with it."""

from __future__ import annotations

import itertools
import random
import re
import string

import pytest

from bridle.errors import ControllerError, InvalidRequest
from bridle.structured_output import (
    After,
    Choice,
    Concat,
    Constraint,
    GrammarVocabulary,
    JsonObject,
    JsonSchema,
    Lark,
    OneOf,
    Regex,
    Substring,
    Yacc,
)
from bridle.structured_output import matcher as matchers
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from tests.structured_output.kit import EOS, generate, matcher, spell, text_vocabulary, tokens_of, vocabulary

PIECES = ("a", "b", "aa", "ab", "ba", "abb", "bab")
LONGEST = 13  # prefixes of up to 4, tokens of up to 3, and the 6 that complete any of our patterns
TEXTS = ["".join(text) for n in range(LONGEST + 1) for text in itertools.product("ab", repeat=n)]


def random_pattern(rng: random.Random, num_letters: int, repeats: bool = True) -> str:
    """Return a pattern whose every prefix can be completed within `num_letters` letters. Nested repetitions are left
    out, because Python's regexes take exponential time for them."""
    if num_letters == 1:
        return rng.choice(("a", "b", "[ab]", "."))
    kind = rng.choice(("cat", "cat", "or", "star", "plus", "option") if repeats else ("cat", "or"))
    if kind in ("cat", "or"):
        left = rng.randint(1, num_letters - 1)
        parts = random_pattern(rng, left, repeats), random_pattern(rng, num_letters - left, repeats)
        return f"{parts[0]}{parts[1]}" if kind == "cat" else f"({parts[0]}|{parts[1]})"
    inner = random_pattern(rng, num_letters - 1, False)
    return f"({inner}){ {'star': '*', 'plus': '+', 'option': '?'}[kind] }"


class Oracle:
    """A reference that uses Python's own regexes."""

    def __init__(self, pattern: str) -> None:
        self.words = {text for text in TEXTS if re.fullmatch(pattern, text)}
        self.prefixes = {word[:n] for word in self.words for n in range(len(word) + 1)}

    def allowed(self, vocab: GrammarVocabulary, text: str) -> set[int]:
        tokens = {token for token in range(1, vocab.size) if text + spell(vocab, [token]) in self.prefixes}
        return tokens | ({EOS} if text in self.words else set())


@pytest.mark.parametrize("seed", range(30))
def test_a_regex_allows_what_brute_force_allows(seed: int) -> None:
    rng = random.Random(seed)
    vocab = vocabulary(PIECES)
    pattern = random_pattern(rng, rng.randint(2, 6))
    oracle = Oracle(pattern)
    free = matcher(vocab, Lark(f'%llguidance {{"no_forcing": true}}\nstart: /{pattern}/'))
    spelled = matcher(vocab, Regex(pattern))
    text = ""
    while len(text) < 4:
        wanted = oracle.allowed(vocab, text)
        if free.is_complete:
            assert wanted == {EOS}, (pattern, text)
            break
        assert tokens_of(free.mask()) == wanted, (pattern, text)
        check_spelled(vocab, spelled, wanted, (pattern, text))
        token = rng.choice(sorted(tokens_of(spelled.mask())))
        if token == EOS:
            break
        free.commit([token])
        spelled.commit([token])
        text += spell(vocab, [token])


def check_spelled(vocab: GrammarVocabulary, spelled: Matcher, wanted: set[int], where: object) -> None:
    """Check that forced text is tokenized canonically: the mask leaves out only tokens that begin the forced text."""
    if spelled.is_complete:
        assert wanted == {EOS}, where
        return
    allowed = tokens_of(spelled.mask())
    assert allowed, where
    assert allowed <= wanted, where
    forced = spelled.backend.compute_ff_bytes().decode()
    for token in wanted - allowed:
        piece = spell(vocab, [token])
        assert token != EOS
        assert forced.startswith(piece) or spelled.forced(), where


@pytest.mark.parametrize(
    ("constraint", "yes", "no"),
    [
        (Regex("a/b[0-9]"), ["a/b1"], ["a/b", "b"]),
        (Regex(r"^\d$"), ["1"], ["٣", ""]),
        (Regex(""), [""], ["a"]),
        (JsonSchema({"type": "integer"}), ["12", "-3"], ["1.5", '"a"']),
        (JsonSchema({"type": "array", "items": {"type": "integer"}}), ["[1, 2]", "[]"], ["[1,2]", "[1 ,2]"]),
        (JsonSchema({"type": "array"}, whitespace="flexible"), ["[1,2]", "[ 1 , 2]"], ["[1"]),
        (JsonObject(), ['{"a": [1, {}]}'], ["[1]", "{a: 1}"]),
        (Choice(["yes", "no", "yesterday", "/", '"\n']), ["yes", "yesterday", "/", '"\n'], ["ye", "x", ""]),
        (Substring("to be or  not"), ["be or  not", "to"], ["e or", "be ", "", "or not"]),
        (Substring("to be", end='"'), ['be"'], ["be", '"']),
        (Substring("héllo", unit="char"), ["éll", "o"], ["eo", ""]),
        (Concat("A: ", Choice(["x", "y"]), Regex("[0-9]+"), "."), ["A: x12."], ["A: x.", "A: z1."]),
        (OneOf("none", JsonSchema({"type": "integer"})), ["none", "7"], ["non", "x"]),
        (After("</t>", JsonObject()), ["hm</t>{}", "</t>{}"], ["{}", "hm{}"]),
        (Lark('start: "a" b*\nb: /[xy]/ "."'), ["a", "ax.y."], ["ax", "x."]),
        (Concat(Lark("start: /a+/"), Lark("start: /b+/")), ["aab"], ["aa", "ba"]),
    ],
)
def test_each_kind_accepts_its_texts_and_no_others(constraint: Constraint, yes: list[str], no: list[str]) -> None:
    vocab = GrammarVocabulary(
        [b"<end>", *(bytes([i]) for i in range(256))], (0,), (0,), lambda t: [1 + b for b in t.encode()]
    )

    def accepts(text: str) -> bool:
        walk = matcher(vocab, constraint)
        try:
            walk.commit([1 + byte for byte in text.encode()])
        except ControllerError:
            return False
        return walk.is_complete or EOS in tokens_of(walk.mask())

    assert [text for text in yes if not accepts(text)] == []
    assert [text for text in no if accepts(text)] == []


C_LIKE = """
// a small part of a language
%start unit
%token NUMBER
%left '+' '-'
%%
SKIP: "/[ \\t\\n]+/" | "/\\/\\*[^*]*\\*\\//" ;
unit: statement | unit statement ;
statement: "int" NAME '=' sum ";" /* an inner comment */
    | "{" block "}"
    | 'return' sum ';' ;
block: | block statement ;
sum: term | sum "+" term | sum '-' term %prec '+' ;
term: NAME | NUMBER | "(" sum ")" | STRING ;
NAME: "/[a-z_]+/" ;
NUMBER: "/[0-9]+/" ;
STRING: '/"(\\\\.|[^\\\\"])*"/' ;
%%
int main() { this is not read }
"""


def test_yacc_grammars_mean_what_they_meant() -> None:
    vocab = vocabulary(map(chr, range(1, 128)))
    start = matcher(vocab, Yacc(C_LIKE))
    for text in ("int x = 12 + y;", "{ }", '{return (a - 3);/* so */ }\nint s="a\\"b";', "return 1;return 2;"):
        walk = start.copy()
        walk.commit(vocab.encode(text.encode()))
        assert EOS in tokens_of(walk.mask()), text
    for text in ("int x 12", "{;", "return ;", "x"):
        with pytest.raises(ControllerError):
            start.copy().commit(vocab.encode(text.encode()))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("a: b;", "line 1 of the yacc grammar: unexpected 'a' before %%"),
        ("%start a", "the yacc grammar has no line %%"),
        ("%start a\n%%\nb: 'x';", "the yacc grammar has no rule for its start 'a'"),
        ("%%\na: b;", "the yacc grammar has no rule for 'b'"),
        ("%%\na 'x';", "line 2 of the yacc grammar: no ':' follows the name 'a'"),
        ("%%\na: 'x'", "line 2 of the yacc grammar: no ';' ends the rule of 'a'"),
        ("%%\na: {;", "line 2 of the yacc grammar: unexpected text '{;'"),
        ("%union\n%%\na: 'x';", "line 1 of the yacc grammar: unknown declaration '%union'"),
        ("%%\na: 'x'; SKIP: a;", "SKIP holds 'a'; each must be one terminal"),
    ],
)
def test_what_is_wrong_with_a_yacc_grammar(grammar: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        matcher(vocabulary("ab"), Yacc(grammar))
    assert message in str(refusal.value)


def test_masks_are_as_long_as_the_models_logits() -> None:
    for size in (128, 129, 159, 160, 161):
        vocab = vocabulary(map(chr, range(1, 128)), size)
        mask = matcher(vocab, Regex("(?s:.)*")).mask()
        assert len(mask) == 4 * ((size + 31) // 32)
        assert tokens_of(mask) == set(range(128))  # what no token spells is never allowed


def test_a_vocabulary_may_be_longer_than_the_models_logits() -> None:
    vocab = vocabulary("abcd", size=3)
    assert tokens_of(matcher(vocab, Regex("[a-d]")).mask()) == {1, 2}


def test_every_end_token_ends_and_only_they() -> None:
    vocab = GrammarVocabulary([b"<1>", b"a", b"<2>", b"<x>"], (0, 2), (0, 2, 3), lambda text: [1] * len(text))
    walk = matcher(vocab, Regex("a*"))
    assert tokens_of(walk.mask()) == {0, 1, 2}
    assert tokens_of(vocab.end_row) == {0, 2}


def test_a_model_without_an_end_stops_by_its_grammar() -> None:
    vocab = GrammarVocabulary([b"a", b"b"], (), (), lambda text: ["ab".index(char) for char in text])
    walk = matcher(vocab, Regex("a?b"))
    walk.commit([0])
    assert walk.forced() == (1,)
    walk.commit([1])
    assert walk.is_complete


def test_taking_back_and_copying_are_exact() -> None:
    vocab = text_vocabulary()
    rng = random.Random(5)
    schema = JsonSchema({"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]})
    walk, trail = matcher(vocab, schema), []
    masks = [walk.mask()]
    for _ in range(25):
        token = rng.choice(sorted(tokens_of(masks[-1]) - {EOS}))
        walk.commit([token])
        if walk.is_complete:
            walk.rollback(1)
            break
        trail.append(token)
        masks.append(walk.mask())
    for keep in (len(trail), len(trail) // 2, 3, 0):
        twin = walk.copy()
        twin.rollback(len(trail) - keep)
        assert twin.mask() == masks[keep]
        twin.commit(trail[keep:])
        assert twin.mask() == walk.mask() == masks[-1]
    with pytest.raises(ControllerError, match="tokens cannot be rolled back; the constraint has read"):
        walk.rollback(len(trail) + 1)


def test_the_end_can_be_taken_back() -> None:
    walk = matcher(vocabulary("ab"), Regex("ab?"))
    walk.commit([1, EOS])
    assert walk.is_complete
    walk.rollback(1)
    assert tokens_of(walk.mask()) == {EOS, 2}


def test_a_dead_end_explains_itself() -> None:
    vocab = vocabulary("ab")
    walk = matcher(vocab, Regex("ab[c-e1]"))
    walk.commit([1, 2])
    with pytest.raises(ControllerError) as dead_end:
        walk.mask()
    assert str(dead_end.value) == (
        "no token can continue the constrained text: after 'ab' the grammar allows '1', 'c'-'e'"
    )
    assert walk.is_failed


@pytest.mark.parametrize(
    ("constraint", "text", "ran_out"),
    [
        (JsonSchema({"enum": [{"a": n} for n in range(2_001)]}), '{"a": 7}', "Current row has 2001 items; max is 2000"),
        (Regex("(a?){3000}a{3000}"), "aa", "too many expressions"),
    ],
    ids=["alternatives that are alike", "counts"],
)
def test_a_grammar_beyond_the_limits_of_a_step_is_told_which(constraint: Constraint, text: str, ran_out: str) -> None:
    """The grammar could continue, so the error does not blame the sampled token or report that no token is allowed."""
    vocab = vocabulary(string.printable)
    walk = matcher(vocab, constraint)

    def follow() -> None:
        for token in vocab.encode(text.encode()):
            walk.mask()
            walk.commit([token])

    with pytest.raises(ControllerError, match=f"exceeds its limits after '.*': .*{ran_out}.*; use alternatives"):
        follow()


def test_as_many_alternatives_as_the_limits_let_through_are_followed_to_the_end() -> None:
    vocab = vocabulary(string.printable)
    walk = matcher(vocab, JsonSchema({"enum": [{"a": n} for n in range(1_900)]}))
    for token in vocab.encode(b'{"a": 1899}'):
        assert token in tokens_of(walk.mask())
        walk.commit([token])
    assert walk.is_accepting


@pytest.mark.parametrize(
    ("pattern", "text", "allows"), [("é[ab]", "", "0xC3"), ("(aé|b)b", "a", "0xC3"), ("a(é|à)[ab]", "a", "0xC3")]
)
def test_bytes_that_no_token_spells_are_dead_ends(pattern: str, text: str, allows: str) -> None:
    vocab = vocabulary(["a", "b", "ab", "ba"])
    walk = matcher(vocab, Regex(pattern))
    for token in vocab.encode(text.encode()):
        assert token in tokens_of(walk.mask())
        walk.commit([token])
    with pytest.raises(ControllerError, match=f"after '{text}' the grammar allows {allows}"):
        walk.mask()


def test_what_a_mask_allows_is_taken_though_some_bytes_have_no_token() -> None:
    vocab = vocabulary(["a", "b", "ab", "ba"])
    walk = matcher(vocab, Regex("aé?b(é|a)b"))
    while not walk.is_complete:
        allowed = tokens_of(walk.mask())
        for token in allowed - {EOS}:
            walk.copy().commit([token])
        walk.commit([min(allowed)])


def test_a_wrong_token_is_named() -> None:
    walk = matcher(vocabulary("ab"), Regex("ab"))
    with pytest.raises(ControllerError, match=r"token 1 \('a'\) does not continue the constrained text 'a'"):
        walk.commit([1, 1])


def test_random_texts_of_a_substring_are_in_it() -> None:
    vocab, source = text_vocabulary(), "the name of the yes and the no is abc 12 true"
    start = matcher(vocab, Substring(source))
    for seed in range(30):
        text = generate(vocab, start, random.Random(seed))
        assert text is not None and f" {text} " in f" {source} "


def test_remembered_masks_are_those_that_are_computed() -> None:
    vocab, rng = text_vocabulary(), random.Random(3)
    starts = [matcher(vocab, each) for each in (Regex("(ab|abc|the)+1?"), Substring("the abc the ab"), JsonObject())]
    for _ in range(60):
        walk = rng.choice(starts).copy()
        for _ in range(6):
            mask = walk.mask()
            assert walk.copy().mask() is mask == walk.copy().compute_mask()
            allowed = sorted(tokens_of(mask) - {EOS})
            if not allowed:
                break
            walk.commit([rng.choice(allowed)])
            if rng.random() < 0.3:
                walk.rollback(1)


def test_few_masks_are_remembered() -> None:
    vocab = text_vocabulary()
    start = matcher(vocab, Regex("[a-z]{3}"))
    for text in itertools.islice(itertools.product(string.ascii_lowercase, repeat=2), 600):
        walk = start.copy()
        walk.take("".join(text).encode())
        walk.mask()
    assert 0 < len(vocab.masks) <= 256


def test_the_masks_of_a_large_grammar_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are not cached for large grammars, because cached masks keep the grammar's text, which a client chooses."""
    vocab, small, large = vocabulary(PIECES), Choice(("ab",)), Choice(("ab" * 40,))
    monkeypatch.setattr(matchers, "MAX_GRAMMAR", len(grammar_of(small)))
    for constraint in (small, large):
        matcher(vocab, constraint).mask()
    assert len(vocab.masks) == 1
