"""Tests that requests are checked once, before the engine, and every error names field, value and limit."""

from __future__ import annotations

import threading

import pytest

from bridle.errors import ContextOverflow, InvalidRequest, UnknownAdapter
from bridle.sampling import SamplingParams
from bridle.serving import build_request, encode_prompt, tokenize
from bridle.serving.models.loading import MAX_CHARS_PER_TOKEN
from bridle.serving.requests.prompts import MAX_INLINE_CHARS, tokenize_all
from bridle.serving.requests.request_limits import RequestLimits
from tests.serving.fakes import VOCAB_SIZE, fake_model


def test_text_and_ids_give_the_same_request() -> None:
    model = fake_model()
    text = build_request(model, "abc", SamplingParams(seed=1), request_id="r")
    ids = build_request(model, [97, 98, 99], SamplingParams(seed=1), request_id="r")
    assert text == ids
    assert text.prompt == (97, 98, 99)


def test_a_request_without_a_seed_gets_its_own() -> None:
    model = fake_model()
    seeds = {build_request(model, "a", SamplingParams()).sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert all(isinstance(seed, int) and 0 <= seed < 1 << 53 for seed in seeds)
    assert build_request(model, "a", SamplingParams(seed=7)).sampling.seed == 7


def test_ids_are_unique_and_options_are_passed_on() -> None:
    model = fake_model()
    controller, criterion = object(), lambda tokens, num_prompt: None
    request = build_request(
        model,
        "a",
        SamplingParams(),
        controller=controller,
        stopping=[criterion],
        tenant="t",
        terms=RequestLimits(priority=3),
        detokenize=False,
    )
    assert request.controller is controller
    assert request.stopping == (criterion,)
    assert (request.tenant, request.priority, request.detokenize) == ("t", 3, False)
    assert request.deadline is None
    assert build_request(model, "a", SamplingParams(), timeout=5).deadline is not None
    assert request.id != build_request(model, "a", SamplingParams()).id


@pytest.mark.parametrize("prompt", ["abc" * 500, list(b"abc" * 500), "abc" * 20_000, "ab"])
async def test_what_is_cut_is_measured_afterwards(prompt: str | list[int]) -> None:
    """A prompt of any length is truncated first. No tokenizer reads more of it than the context could hold."""
    model = fake_model(max_model_len=100)
    read: list[int] = []
    encode = model.tokenizer.encode
    model.tokenizer.encode = lambda text, special=True: read.append(len(text)) or encode(text, special)  # type: ignore
    given = prompt.encode() if isinstance(prompt, str) else prompt
    (tokens,) = await tokenize_all(model, [prompt], truncate=7)
    assert tokens == tuple(given[-7:])
    assert all(num_chars <= 100 * MAX_CHARS_PER_TOKEN for num_chars in read)
    assert build_request(model, tokens, SamplingParams(max_tokens=93)).prompt == tokens
    if len(prompt) > 100:
        with pytest.raises(ContextOverflow):
            await tokenize_all(model, [prompt], truncate=101)


async def test_many_prompts_are_read_together_beside_the_loop() -> None:
    """A few short prompts are tokenized at once, and others in groups in a thread. The prompts keep their order."""
    model = fake_model(max_model_len=1_000)
    read: list[tuple[int, int]] = []
    encode = model.tokenizer.encode

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        read.append((threading.get_ident(), len(text)))
        return encode(text, add_special_tokens)

    model.tokenizer.encode = watched  # type: ignore[method-assign]
    few: list[str | list[int]] = ["a", [98, 99], "d"]
    assert await tokenize_all(model, few) == [(97,), (98, 99), (100,)]
    assert {thread for thread, _ in read} == {threading.get_ident()}
    read.clear()
    many: list[str | list[int]] = [[5] * (number % 3) + [number % 256] for number in range(300)]
    many += ["ab" * (1 + number) for number in range(300)]
    found = await tokenize_all(model, many)
    assert found == [tuple(each.encode()) if isinstance(each, str) else tuple(each) for each in many]
    assert len(read) == 300 and threading.get_ident() not in {thread for thread, _ in read}


async def test_of_many_prompts_one_that_is_too_long_is_refused_before_any_is_read() -> None:
    model = fake_model(max_model_len=10)
    model.tokenizer.encode = lambda text, special=True: pytest.fail("read")  # type: ignore[method-assign, assignment]
    with pytest.raises(ContextOverflow, match="5000 characters"):
        await tokenize_all(model, ["a" * 1_000] * 50 + ["a" * 5_000])


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ("", "prompt", "the prompt is empty; it must have at least one token"),
        ([], "prompt", "the prompt is empty; it must have at least one token"),
        ([1, VOCAB_SIZE], "prompt", "prompt holds token 260; ids go from 0 to 259"),
        ([-1], "prompt", "prompt holds token -1; ids go from 0 to 259"),
        ([True], "prompt", "prompt holds True; token ids are integers"),
        ([1.5], "prompt", "prompt holds 1.5; token ids are integers"),
        ("a\ud800b", "prompt", "prompt is not valid Unicode: lone surrogate U+D800 at character 1"),
    ],
)
def test_bad_prompts_are_refused(prompt: str | list[int], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        build_request(fake_model(), prompt, SamplingParams())
    assert str(refusal.value) == message
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        (
            SamplingParams(logit_bias={260: 1.0}),
            "logit_bias",
            "logit_bias holds token 260; ids go from 0 to 259",
        ),
        (
            SamplingParams(stop_token_ids=(999,)),
            "stop_token_ids",
            "stop_token_ids holds token 999; ids go from 0 to 259",
        ),
        (
            SamplingParams(stop=("\udfff",)),
            "stop",
            "stop is not valid Unicode: lone surrogate U+DFFF at character 0",
        ),
    ],
)
def test_sampling_is_checked_against_the_model(sampling: SamplingParams, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        build_request(fake_model(), "a", sampling)
    assert (str(refusal.value), refusal.value.param) == (message, param)


def test_context_overflow_names_prompt_max_tokens_and_limit() -> None:
    model = fake_model(max_model_len=16)
    build_request(model, "a" * 10, SamplingParams(max_tokens=6))
    with pytest.raises(ContextOverflow) as refusal:
        build_request(model, "a" * 10, SamplingParams(max_tokens=7))
    assert str(refusal.value) == (
        "This model's maximum context length is 16 tokens; "
        "the prompt has 10 tokens, and with max_tokens of 7 that is 17: max_tokens can be 6 at most"
    )
    assert refusal.value.param == "max_tokens"


def test_a_prompt_must_leave_room_for_a_token() -> None:
    model = fake_model(max_model_len=16)
    build_request(model, "a" * 15, SamplingParams(max_tokens=None))
    with pytest.raises(ContextOverflow, match="at least 1 new token that is 17: send a shorter prompt") as refusal:
        build_request(model, "a" * 16, SamplingParams(max_tokens=None))
    assert refusal.value.param == "prompt"


def test_the_kv_cache_is_a_limit_too() -> None:
    model = fake_model(max_model_len=100_000)  # 64 blocks of 16
    with pytest.raises(ContextOverflow, match="context length is 1024 tokens"):
        build_request(model, "a" * 1020, SamplingParams(max_tokens=10))


def test_long_text_is_refused_before_it_is_tokenized() -> None:
    model = fake_model(max_model_len=16)
    model.tokenizer.encode = None  # type: ignore[method-assign, assignment]
    with pytest.raises(ContextOverflow, match="prompt has 2049 characters"):
        encode_prompt(model, "a" * (16 * MAX_CHARS_PER_TOKEN + 1))


def test_many_ids_are_refused_before_they_are_read() -> None:
    class Unread(list[int]):
        def __iter__(self) -> None:  # type: ignore[override]
            raise AssertionError("read")

    with pytest.raises(ContextOverflow, match="is 16 tokens; the prompt has 17 tokens"):
        encode_prompt(fake_model(max_model_len=16), Unread([1] * 17))


def test_the_empty_text_begins_a_document_where_a_token_says_so() -> None:
    model = fake_model()
    model.tokenizer.bos_token_id = 257  # type: ignore[misc]
    assert encode_prompt(model, "") == (257,)
    with pytest.raises(InvalidRequest, match="empty"):
        encode_prompt(model, [])


def test_unknown_adapters_are_refused() -> None:
    model = fake_model()
    with pytest.raises(UnknownAdapter, match="'fake' has no adapter 'x'; known: none"):
        build_request(model, "a", SamplingParams(), adapter="x")
    for name in (None, "", "fake", "tgi", "dummy"):
        assert build_request(model, "a", SamplingParams(), adapter=name).adapter is None


@pytest.mark.parametrize("num_chars", [3, MAX_INLINE_CHARS, MAX_INLINE_CHARS + 1])
async def test_tokenizing_beside_the_event_loop_gives_the_same(num_chars: int) -> None:
    model = fake_model(max_model_len=10_000, num_blocks=1_000)
    assert await tokenize(model, "a" * num_chars) == encode_prompt(model, "a" * num_chars)
    model.close()


async def test_refusals_cross_the_thread() -> None:
    model = fake_model()
    with pytest.raises(ContextOverflow, match="is 256 tokens; the prompt has 5000 tokens"):
        await tokenize(model, "a" * 5_000)
    model.close()
