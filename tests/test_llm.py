"""Tests of `LLM` with a tiny real checkpoint: batches, streams, scores, refusals, and the end of its resources."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from bridle import LLM, Controller, Decision, EngineConfig, ModelConfig, SamplingParams
from bridle.controllers import SequenceView
from bridle.engine.request import Request
from bridle.errors import (
    ContextOverflow,
    ControllerError,
    EngineClosed,
    InvalidRequest,
    UnsupportedFeature,
    UnsupportedModel,
)
from bridle.llm.streams import TextStream
from bridle.outputs import Event, FinishReason, TokenEvent
from bridle.serving.lifecycle import request_handle
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.waiting import until_async

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["the quick brown fox", "jumps", "over the lazy dog, and sleeps"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=4) as loaded:
        yield loaded


class Only(Controller):
    """A controller that allows a few tokens."""

    max_rewind = 0

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(view.mask_of(self.tokens))


class Holds(Controller):
    """A controller that samples one token, and then waits until the request is cancelled."""

    max_rewind = 0

    def next(self, view: SequenceView) -> Decision:
        return Decision.wait() if view.generated else Decision.sample()


class Broken(Controller):
    def next(self, view: SequenceView) -> Decision:
        raise RuntimeError("out of ideas")


# -- generating ----------------------------------------------------------------------------------------------


def test_a_batch_equals_its_prompts_one_by_one(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in together] == PROMPTS
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.text == output.text == llm.tokenizer.decode(output.outputs[0].token_ids)
        assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_prompts_may_be_texts_or_tokens(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(PROMPTS[0])
    (expected,) = llm.generate(PROMPTS[0], GREEDY)
    forms: list[Any] = [
        tokens,
        tuple(tokens),
        [tokens],
        {"prompt": PROMPTS[0]},
        [{"prompt_token_ids": tokens}],
    ]
    for form in forms:
        (output,) = llm.generate(form, GREEDY)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.prompt_token_ids == tokens
    assert llm.generate([], GREEDY) == []


def test_sampling_is_one_for_all_or_one_for_each(llm: LLM) -> None:
    lengths = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)]
    outputs = llm.generate(PROMPTS, sampling_params=lengths)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="sampling has 2 entries for 3 prompts"):
        llm.generate(PROMPTS, lengths[:2])
    with pytest.raises(InvalidRequest, match="sampling and sampling_params name the same thing"):
        llm.generate(PROMPTS, GREEDY, sampling_params=GREEDY)
    with pytest.raises(InvalidRequest, match="must be a SamplingParams"):
        llm.generate(PROMPTS, {"max_tokens": 3})  # type: ignore[arg-type]


def test_several_outputs_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8, temperature=3.0, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params)
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert len({tuple(each.token_ids) for each in output.outputs}) == 3
    (again,) = llm.generate(PROMPTS[0], params)
    assert [each.token_ids for each in again.outputs] == [each.token_ids for each in output.outputs]


def test_controllers_steer_and_criteria_stop(llm: LLM) -> None:
    a, b = (llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")
    (output,) = llm.generate("x", GREEDY, controller=Only([a]))
    assert output.text == "a" * 12
    outputs = llm.generate(["x", "y"], GREEDY, controller=[Only([a]), Only([b])])
    assert [output.text for output in outputs] == ["a" * 12, "b" * 12]

    def three(tokens: Sequence[int], num_prompt: int) -> str | None:
        return "enough" if len(tokens) - num_prompt == 3 else None

    for criteria in (three, [three], [lambda tokens, num_prompt: None, three]):
        (output,) = llm.generate("x", GREEDY, controller=Only([a]), stopping_criteria=criteria)
        assert (output.text, output.outputs[0].stop_reason) == ("aaa", "enough")


def test_one_failing_output_leaves_the_others_alone(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    outputs = llm.generate(["x", "y"], GREEDY, controller=[Broken(), None])
    assert outputs[0].outputs[0].finish_reason is FinishReason.ERROR
    assert isinstance(outputs[0].outputs[0].error, ControllerError)
    assert outputs[1].outputs[0].finish_reason is FinishReason.LENGTH
    assert "1 outputs of 2 requests failed" in caplog.text


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ("x" * 600, ContextOverflow, "512"),
        ([1, 10**6], InvalidRequest, "ids go from 0 to"),
        ([1, True], InvalidRequest, "True"),
        (3.5, InvalidRequest, r"prompts\[1\] is 3.5"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, UnsupportedFeature, "reads only text"),
        ([], InvalidRequest, "empty"),
        ("\ud800", InvalidRequest, "Unicode"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, bad: Any, error: type[Exception], message: str) -> None:
    before = llm.statistics().num_requests
    with pytest.raises(error, match=message):
        llm.generate([PROMPTS[0], bad], GREEDY)
    assert llm.statistics().num_requests == before


def test_what_the_engine_refuses_cancels_the_rest(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no controller pool"):
        llm.generate(["x", "y"], GREEDY, controller=[None, object()])
    with pytest.raises(UnsupportedFeature):
        llm.generate("x", GREEDY, multi_modal_data={"image": "cat.png"})
    with pytest.raises(InvalidRequest, match="adapter"):
        llm.generate("x", GREEDY, adapter="french")
    with pytest.raises(InvalidRequest, match="callable"):
        llm.generate("x", GREEDY, stopping_criteria=[3])  # type: ignore[list-item]
    assert llm.generate("x", GREEDY)[0].outputs[0].finish_reason is FinishReason.LENGTH


def test_more_prompts_than_may_wait_are_fed_in(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handle, "RETRY_SECONDS", 0.0)
    with LLM(folder, max_waiting=2, max_num_seqs=2) as small:
        outputs = small.generate([f"prompt {i}" for i in range(9)], GREEDY)
    assert len({output.request_id for output in outputs}) == 9
    assert all(output.outputs[0].finish_reason is FinishReason.LENGTH for output in outputs)
    assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(9)]


def test_generate_works_inside_a_running_loop(llm: LLM) -> None:
    async def notebook() -> str:
        return llm.generate("x", GREEDY)[0].text

    assert asyncio.run(notebook()) == llm.generate("x", GREEDY)[0].text


def test_generate_async_shares_the_batch(llm: LLM) -> None:
    async def both() -> list[str]:
        calls = [llm.generate_async(prompt, GREEDY) for prompt in PROMPTS]
        return [outputs[0].text for outputs in await asyncio.gather(*calls)]

    assert asyncio.run(both()) == [output.text for output in llm.generate(PROMPTS, GREEDY)]


def test_cancelling_the_task_cancels_the_requests(llm: LLM) -> None:
    before = llm.statistics().finished["cancelled"]

    def held() -> int:
        return llm.statistics().num_running + llm.statistics().num_suspended

    async def give_up() -> None:
        task = asyncio.ensure_future(llm.generate_async(PROMPTS, GREEDY, controller=Holds()))
        async with llm.stream("x", GREEDY, controller=Holds()) as later:
            async for _ in later:
                break
            await until_async(lambda: held() > len(PROMPTS))  # a busy machine may admit them later
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    llm.generate("x", GREEDY)
    assert llm.statistics().finished["cancelled"] == before + len(PROMPTS) + 1


def test_a_deadline_ends_outputs(llm: LLM) -> None:
    (output,) = llm.generate("x", SamplingParams(max_tokens=None, ignore_eos=True), timeout=1e-9)
    assert output.outputs[0].finish_reason is FinishReason.DEADLINE


def test_the_bar_shows_on_terminals_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().err == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for wanted in (True, False):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        llm.generate(PROMPTS, GREEDY, use_tqdm=wanted)
        assert ("Generating" in terminal.getvalue()) == wanted


# -- streaming -----------------------------------------------------------------------------------------------


def test_streams_give_the_text_in_pieces(llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], GREEDY)[0]
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert "".join(stream) == expected.text == stream.output.text
    assert stream.output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert stream.output.prompt == PROMPTS[0]
    assert llm.stream(PROMPTS[0], GREEDY).read() == expected.text


class OneByOne:
    """An engine client whose streams repeat the events of a finished run, one at a time."""

    def __init__(self, llm: LLM) -> None:
        self._client = llm.model.client
        self.events: list[Event] = []

    def submit(self, request: Request) -> Any:
        with self._client.submit(request) as stream:
            self.events = [event for events in stream for event in events]
        return self

    def __iter__(self) -> Iterator[list[Event]]:
        return ([event] for event in self.events)

    def cancel(self, request_id: str = "") -> None:
        """Do nothing, because the run has ended."""


def test_a_reader_in_time_gets_a_piece_for_each_token(llm: LLM) -> None:
    """Received text is shown at once. Only the number of events that are read together depends on timing."""
    client: Any = OneByOne(llm)
    stream = TextStream(client, llm.request(PROMPTS[0], GREEDY))
    shown = [(piece, len(stream.output.outputs[0].token_ids)) for piece in stream]
    texts = [event.text for event in client.events if isinstance(event, TokenEvent)]
    assert len(texts) == GREEDY.max_tokens and sum(map(bool, texts)) > 1
    assert shown == [(text, number) for number, text in enumerate(texts, 1) if text]


def test_streams_are_asynchronous_too(llm: LLM) -> None:
    expected = [output.text for output in llm.generate(PROMPTS, GREEDY)]

    async def read(prompt: str) -> str:
        return "".join([piece async for piece in llm.stream(prompt, GREEDY)])

    async def all_at_once() -> list[str]:
        return await asyncio.gather(*(read(prompt) for prompt in PROMPTS))

    assert asyncio.run(all_at_once()) == expected
    assert asyncio.run(llm.stream(PROMPTS[0], GREEDY).read_async()) == expected[0]


def test_leaving_a_stream_cancels_it(llm: LLM) -> None:
    before = llm.statistics().finished["cancelled"]
    for _ in llm.stream("x", GREEDY, controller=Holds()):
        break
    with llm.stream("x", GREEDY, controller=Holds()):
        pass

    async def leave() -> None:
        async with llm.stream("x", GREEDY, controller=Holds()) as stream:
            async for _ in stream:
                break

    asyncio.run(leave())
    llm.generate("x", GREEDY)
    assert llm.statistics().finished["cancelled"] == before + 3


def test_deltas_tell_what_is_taken_back(llm: LLM) -> None:
    a, b = (llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab")

    class Regret(Controller):
        """A controller that writes `aaa`, rolls two tokens back, and writes `b`."""

        def next(self, view: SequenceView) -> Decision:
            written = view.generated
            if written == [a] * 3:
                return Decision.splice(2, [b])
            return Decision.stop() if written[-1:] == [b] else Decision.sample(view.mask_of([a]))

    assert list(llm.stream("x", GREEDY, controller=Regret())) == ["ab"]  # held until it is final
    text = ""
    for delta in llm.stream("x", GREEDY, controller=Regret()).deltas():
        text = text[: len(text) - delta.taken_chars] + delta.text
    assert text == "ab"
    stream = llm.stream("x", GREEDY, controller=Regret())
    assert [output.text for output in stream.outputs()][-1] == "ab"
    assert stream.output.usage.rewound_tokens == 2


def test_a_stream_raises_what_went_wrong(llm: LLM) -> None:
    with pytest.raises(ControllerError, match="out of ideas"):
        list(llm.stream("x", GREEDY, controller=Broken()))
    with pytest.raises(InvalidRequest):
        llm.stream([], GREEDY)


# -- scoring -------------------------------------------------------------------------------------------------


def test_scores_are_the_models_own(llm: LLM, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, score in zip(PROMPTS, llm.score(PROMPTS, top=2), strict=True):
        tokens = torch.tensor([llm.tokenizer.encode(prompt)])
        with torch.no_grad():
            logits = reference(tokens).logits[0, :, : llm.info.num_drawable]  # others stand for no token
            expected = logits.log_softmax(-1)[:-1].gather(1, tokens[0, 1:, None])[:, 0]
        found = [each.logprob for each in score.logprobs[1:] if each is not None]
        assert found == pytest.approx(expected.tolist(), abs=1e-3)
        assert score.logprobs[0] is None
        assert score.total == pytest.approx(sum(found))
        assert score.mean == pytest.approx(sum(found) / len(found))
        assert score.perplexity > 1
        assert all(each is None or len(each.top) == 2 for each in score.logprobs)


# -- life ----------------------------------------------------------------------------------------------------


def test_parameters_first_then_the_backend(folder: str) -> None:
    with LLM.with_params(GREEDY.with_(max_tokens=2)).from_backend(folder, max_num_seqs=2) as llm:
        assert len(llm.generate("x")[0].outputs[0].token_ids) == 2
        assert len(llm.generate("x", GREEDY)[0].outputs[0].token_ids) == 12
        assert llm.info.max_model_len == 512
        second = LLM(llm.model)  # a loaded model is a backend, too
        assert second.generate("x", GREEDY)[0].text == llm.generate("x", GREEDY)[0].text
        assert repr(second) == f"LLM({llm.name!r})"


def test_settings_are_checked_by_name(folder: str) -> None:
    with pytest.raises(InvalidRequest, match="no setting 'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(folder, max_num_seq=3)
    with pytest.raises(InvalidRequest, match="'dtype' was given together with a ModelConfig"):
        LLM(ModelConfig(folder), dtype="float32")
    with pytest.raises(InvalidRequest, match="'max_waiting' was given together with an EngineConfig"):
        LLM(folder, engine_config=EngineConfig(), max_waiting=3)
    with pytest.raises(InvalidRequest, match="max_num_seqs is 0"):
        LLM(folder, max_num_seqs=0)
    with pytest.raises((InvalidRequest, UnsupportedModel)):
        LLM(folder + "-not-there")


def test_a_closed_model_refuses(folder: str) -> None:
    llm = LLM(folder)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed):
        llm.generate("x", GREEDY)
    with pytest.raises(EngineClosed):
        llm.stream("x", GREEDY)
