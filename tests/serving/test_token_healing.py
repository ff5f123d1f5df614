"""Tests of token healing: tokens are removed from a prompt, and the beginning of the output replaces them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bridle import LLM, Controller
from bridle.engine.control.decision import mask_allows
from bridle.engine.outputs.healed_text import HealedText
from bridle.errors import UnsupportedFeature
from bridle.outputs import FinishReason
from bridle.serving.requests.token_healing import MAX_HEALED_TOKENS, heal
from bridle.structured_output import Choice, Regex
from bridle.testing.text import PieceDecoder
from bridle.tokenizer import Tokenizer

CUT = "My favorite col"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_model_len=256, num_blocks=256) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("demo")


@pytest.mark.parametrize("text", [CUT, "Once upon a ti", "The na", "Hello ", '{"na'])
def test_the_masks_allow_what_spells_the_removed_text(tokenizer: Tokenizer, text: str) -> None:
    prompt = tuple(tokenizer.encode(text))
    kept, _, healing = heal(tokenizer, tokenizer.vocab_size, prompt, None)
    assert healing is not None and prompt[: len(kept)] == kept and 0 < len(prompt) - len(kept) <= MAX_HEALED_TOKENS
    removed = b"".join(map(tokenizer.token_bytes, prompt[len(kept) :]))
    assert len(removed.decode()) == healing.num_chars
    special = {*tokenizer.special_token_ids, *tokenizer.eos_token_ids}
    for start, mask in enumerate(healing.masks):
        rest = removed[start:]
        for token in set(range(tokenizer.vocab_size)) - special:
            data = tokenizer.token_bytes(token)
            is_right = bool(data) and (data.startswith(rest) or rest.startswith(data))
            assert mask_allows(mask, token) == is_right, (rest, data)


@pytest.mark.parametrize("text", ["12 + 3", "The end.<|eos|>"])
def test_nothing_is_taken_where_no_token_goes_on(tokenizer: Tokenizer, text: str) -> None:
    prompt = tuple(tokenizer.encode(text))
    if text.endswith("3"):
        assert heal(tokenizer, tokenizer.vocab_size, prompt, None) == (prompt, None, None)
    ended = (*prompt, tokenizer.eos_token_ids[0])
    assert heal(tokenizer, tokenizer.vocab_size, ended, None) == (ended, None, None)


def test_an_output_goes_on_where_the_text_of_the_prompt_ends(llm: LLM) -> None:
    plain = llm.generate(CUT, temperature=0.0, max_tokens=6)[0]
    healed = llm.generate(CUT, temperature=0.0, max_tokens=6, token_healing=True)[0]
    assert healed.text.startswith("or is") and not plain.text.startswith("or is")
    whole = llm.tokenizer.decode(healed.outputs[0].token_ids)
    assert whole.strip() == f"col{healed.text}".strip()
    tokens = [*healed.prompt_token_ids, *healed.outputs[0].token_ids]
    written = llm.tokenizer.encode(CUT + healed.text)
    assert tokens[: len(written)] == written


@pytest.mark.few(2)
@pytest.mark.parametrize("fields", [{}, {"speculate": 4}, {"banned_phrases": ["or"]}, {"n": 3}, {"logprobs": 1}])
def test_every_sample_spells_the_removed_text(llm: LLM, fields: dict[str, object]) -> None:
    for seed in range(6):
        output = llm.generate(CUT, temperature=8.0, seed=seed, max_tokens=8, token_healing=True, **fields)[0]  # type: ignore[arg-type]
        for each in output.outputs:
            assert each.error is None
            assert llm.tokenizer.decode(each.token_ids).lstrip() == "col" + each.text
            assert "or" not in each.text or "banned_phrases" not in fields


def test_a_stream_and_a_stop_string_see_only_new_text(llm: LLM) -> None:
    pieces = llm.stream(CUT, temperature=0.0, max_tokens=8, token_healing=True, stop=["ol", " is"])
    assert "".join(pieces) == "or"


@pytest.mark.parametrize("constraint", [Regex("(or|lar) is"), Choice(["or", "lar"])])
def test_a_constraint_begins_after_the_prompt(llm: LLM, constraint: Regex | Choice) -> None:
    output = llm.generate(CUT, temperature=0.0, max_tokens=8, token_healing=True, constraint=constraint)[0]
    assert output.text in ("or", "or is") and output.outputs[0].finish_reason is FinishReason.CONTROLLER
    assert llm.tokenizer.encode(" color")[-1] in output.outputs[0].token_ids


def test_a_controller_is_refused(llm: LLM) -> None:
    with pytest.raises(UnsupportedFeature, match="token_healing: not supported with a controller"):
        llm.generate(CUT, controller=Controller(), token_healing=True)


def test_a_healed_text_hides_its_beginning_in_any_order() -> None:
    decoder = PieceDecoder([b"<end>", b" ", b"col", b" color", b"or", b"\xc3", b"\xa9"])
    for tokens in itertools.permutations([1, 2, 4, 5, 6], 5):
        text, plain = HealedText(decoder.open((), False), 3), decoder.open((), False)
        shown = "".join([text.push(token) for token in tokens])
        whole = "".join([plain.push(token) for token in tokens])
        assert shown == whole[3:] and text.is_waiting == plain.is_waiting
        twin = text.copy()
        num_gone = twin.rewind(2)
        plain.rewind(2)
        rest = "".join([decoder.open((), False).push(token) for token in ()])
        assert shown[: len(shown) - num_gone] + rest == whole[: len(whole)][3 : 3 + len(shown) - num_gone]
        assert shown + text.flush() == (whole + _flushed(decoder, tokens))[3:]


def _flushed(decoder: PieceDecoder, tokens: tuple[int, ...]) -> str:
    state = decoder.open((), False)
    for token in tokens:
        state.push(token)
    return state.flush()
