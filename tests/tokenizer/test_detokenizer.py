"""Property tests of incremental detokenization, with every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bridle.tokenizer import Detokenizer, Tokenizer
from tests.tokenizer.kit import MAKERS, SENTENCES, WITH_TABLE, WITHOUT_TABLE, make

kinds = st.sampled_from(sorted(MAKERS))


def tokens_of(tokenizer: Tokenizer, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Generate ids of real texts and arbitrary ids, including special tokens and ids that do not exist."""
    wild = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=max_size)
    real = st.sampled_from(SENTENCES).map(lambda text: tokenizer.encode(text, False)[:max_size])
    return st.one_of(wild, real, st.tuples(wild, real).map(lambda two: two[0] + two[1]))


def spelled(tokenizer: Tokenizer, tokens: list[int], skip: bool) -> bytes:
    """Return the whole text as bytes, computed from the byte table."""
    table = tokenizer.table
    assert table is not None
    visible = [t for t in tokens if not (skip and t in tokenizer.special_token_ids)]
    lead = table.initial_lead
    parts = []
    for i, token in enumerate(visible):
        parts.append(table.first_bytes(token) if lead and table.drops_in_first and i == 0 else table.bytes_of(token))
    data = b"".join(parts)
    if lead and not table.drops_in_first:
        data = data[1:] if data.startswith(b" ") else data
    return data


def finished_part(data: bytes) -> bytes:
    """Return the bytes without an incomplete character at the end."""
    for size in range(min(3, len(data)), 0, -1):
        try:
            data[-size:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return data[:-size]
    return data


def pushed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int], skip: bool) -> str:
    state = Detokenizer(tokenizer).open(prompt, skip)
    return "".join([*(state.push(token) for token in tokens), state.flush()])


@given(st.data(), st.sampled_from(WITH_TABLE), st.booleans())
def test_pushed_text_is_the_decoded_text_after_the_prompt(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = make(kind)
    prompt, tokens = data.draw(tokens_of(tokenizer)), data.draw(tokens_of(tokenizer))
    before = finished_part(spelled(tokenizer, prompt, skip))
    whole = spelled(tokenizer, prompt + tokens, skip)
    assert whole.startswith(before)
    assert pushed(tokenizer, prompt, tokens, skip) == whole[len(before) :].decode("utf-8", "replace")
    assert tokenizer.decode(prompt + tokens, skip) == whole.decode("utf-8", "replace")


@given(st.data(), st.sampled_from(WITHOUT_TABLE), st.booleans())
def test_pushed_text_is_what_decoding_adds_to_the_prompt(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = make(kind)
    prompt, tokens = data.draw(tokens_of(tokenizer)), data.draw(tokens_of(tokenizer))
    tokens = [t for t in tokens if t < tokenizer.vocab_size]
    prompt = [t for t in prompt if t < tokenizer.vocab_size]
    before = tokenizer.decode(prompt, skip)
    assert before + pushed(tokenizer, prompt, tokens, skip) == tokenizer.decode(prompt + tokens, skip)


@given(st.data(), kinds, st.booleans())
def test_rewinding_leaves_what_the_other_tokens_give(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = make(kind)
    prompt = data.draw(tokens_of(tokenizer, 6))
    state = Detokenizer(tokenizer).open(prompt, skip)
    tokens: list[int] = []
    text = ""
    for _ in range(data.draw(st.integers(1, 5))):
        for token in data.draw(tokens_of(tokenizer, 8)):
            text += state.push(token)
            tokens.append(token)
        num = data.draw(st.integers(0, len(tokens)))
        gone = state.rewind(num)
        text = text[: len(text) - gone]
        del tokens[len(tokens) - num :]
        twin = state.copy()
        assert text + twin.flush() == pushed(tokenizer, prompt, tokens, skip)
    assert text + state.flush() == pushed(tokenizer, prompt, tokens, skip)


@given(st.data(), kinds, st.booleans())
def test_rewinding_into_the_prompt_shortens_it(data: st.DataObject, kind: str, skip: bool) -> None:
    tokenizer = make(kind)
    prompt = data.draw(tokens_of(tokenizer, 10).filter(bool))
    state = Detokenizer(tokenizer).open(prompt, skip)
    first = data.draw(tokens_of(tokenizer, 5))
    given_out = "".join(state.push(token) for token in first)
    depth = data.draw(st.integers(1, len(prompt)))
    assert state.rewind(len(first) + depth) == len(given_out)
    then = data.draw(tokens_of(tokenizer, 8))
    text = "".join([*(state.push(token) for token in then), state.flush()])
    assert text == pushed(tokenizer, prompt[:-depth], then, skip)


@given(st.data(), kinds)
def test_copies_are_independent(data: st.DataObject, kind: str) -> None:
    tokenizer = make(kind)
    shared, left, right = (data.draw(tokens_of(tokenizer, 8)) for _ in range(3))
    state = Detokenizer(tokenizer).open([], True)
    start = "".join(state.push(token) for token in shared)
    twin = state.copy()
    texts = ["", ""]
    for i, (one, tokens) in enumerate(((state, left), (twin, right))):
        texts[i] = start + "".join([*(one.push(token) for token in tokens), one.flush()])
    assert texts == [pushed(tokenizer, [], shared + side, True) for side in (left, right)]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma_like"])
@given(text=st.text(max_size=40))
@example(text="a\u2581b")
def test_text_that_is_encoded_comes_back_character_by_character(kind: str, text: str) -> None:
    tokenizer = make(kind)
    prompt = tokenizer.encode("the dog", add_special_tokens=True)
    tokens = tokenizer.encode("the dog" + text)[len(prompt) :]
    if tokenizer.encode("the dog" + text)[: len(prompt)] != prompt:
        return  # the text joined the prompt's last token
    state = Detokenizer(tokenizer).open(prompt, False)
    pieces = [state.push(token) for token in tokens]
    # SentencePiece spells a space as U+2581, so that its vocabularies read U+2581 itself as a space.
    assert "".join(pieces) + state.flush() == (text if kind == "byte_level" else text.replace("\u2581", " "))
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_a_character_in_several_tokens_arrives_whole() -> None:
    tokenizer = make("byte_fallback")
    state = Detokenizer(tokenizer).open(tokenizer.encode("dog"), True)
    tokens = tokenizer.encode("dog😀")[len(tokenizer.encode("dog")) :]
    assert len(tokens) == 4
    assert [state.push(token) for token in tokens] == ["", "", "", "😀"]


def test_an_unfinished_character_is_replaced_at_the_end() -> None:
    tokenizer = make("byte_fallback")
    state = Detokenizer(tokenizer).open([], True)
    tokens = tokenizer.encode("x😀", False)[-4:-1]
    assert [state.push(token) for token in tokens] == ["", "", ""]
    assert state.flush() == "\ufffd"
    assert state.flush() == ""


def test_a_character_begun_in_the_prompt_ends_in_the_output() -> None:
    tokenizer = make("byte_level")
    tokens = tokenizer.encode("中", add_special_tokens=False)
    assert len(tokens) > 1
    state = Detokenizer(tokenizer).open(tokens[:-1], True)
    assert state.push(tokens[-1]) == "中"


def test_the_first_word_loses_its_space_only_at_the_beginning() -> None:
    for kind in ("byte_fallback", "unigram"):
        tokenizer = make(kind)
        dog = tokenizer.encode("dog", add_special_tokens=False)
        bos = tokenizer.bos_token_id
        assert bos is not None
        for prompt, skip, expected in (([], True, "dog"), ([bos], True, "dog"), (dog, True, " dog")):
            assert pushed(tokenizer, prompt, dog, skip) == expected
        assert pushed(tokenizer, [bos], dog, False) == " dog"


def test_special_tokens_leave_text_only_if_asked() -> None:
    tokenizer = make("byte_level")
    system = tokenizer.encode("<|sys|>", add_special_tokens=False)
    think = tokenizer.encode("<think>", add_special_tokens=False)
    assert len(system) == len(think) == 1
    assert pushed(tokenizer, [], system + think, True) == "<think>"
    assert pushed(tokenizer, [], system + think, False) == "<|sys|><think>"
