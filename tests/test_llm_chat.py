"""Tests of chats: conversations, sessions, forks and files, with a tiny real checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle import LLM, ChatSession, Controller, Decision, SamplingParams
from bridle.controllers import SequenceView
from bridle.errors import ContextOverflow, ControllerError, InvalidRequest
from bridle.llm import chat_session
from tests.fakes.tiny_checkpoints import make_checkpoint

SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))
    with LLM(str(folder), sampling=SHORT, num_blocks=256) as loaded:
        yield loaded


def answer(llm: LLM, messages: list[dict[str, str]]) -> str:
    return llm.chat(messages)[0].text


def test_chat_continues_the_rendered_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(messages)
    rendered = llm.tokenizer.render_chat(messages)
    tokens = llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert output.prompt_token_ids == tokens
    assert output.text == llm.generate(tokens)[0].text


def test_several_conversations_are_one_batch(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "goodbye")]
    outputs = llm.chat(conversations)
    assert [output.text for output in outputs] == [answer(llm, one) for one in conversations]


def test_templates_and_their_variables_can_be_given(llm: LLM) -> None:
    template = "{{ tools[0].name if tools }}{{ mood }}:{{ messages[0].content }}"
    messages = [{"role": "user", "content": "hi"}]
    options: dict[str, Any] = {"chat_template": template, "chat_template_kwargs": {"mood": "glad"}}
    (output,) = llm.chat(messages, tools=[{"name": "f"}], **options)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "fglad:hi"


def test_messages_are_unlimited_by_default_and_bounded_by_the_context(llm: LLM) -> None:
    other = LLM(llm.model)
    assert other.chat_sampling.max_tokens is None
    assert llm.chat_sampling is SHORT
    with pytest.raises(InvalidRequest, match="messages is empty"):
        llm.chat([])
    with pytest.raises(ContextOverflow):
        llm.chat([{"role": "user", "content": "x" * 600}])


# -- sessions ------------------------------------------------------------------------------------------------


def test_a_session_remembers(llm: LLM) -> None:
    session = llm.session("Be kind.")
    first = session.send("hello")
    second = session.send("and now?")
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and now?"},
    ]
    assert session.messages == [*messages, {"role": "assistant", "content": second}]
    assert second == answer(llm, messages)
    assert session.last_output is not None
    assert session.last_output.num_cached_tokens > 0  # the first turn was not computed again
    session.undo()
    assert session.messages == messages[:3]
    session.reset()
    assert session.messages == messages[:1]
    session.undo()
    assert session.turns == []


def test_streaming_counts_once_it_was_read(llm: LLM) -> None:
    session = llm.session()
    stream = session.stream("hello")
    assert session.turns == []
    text = "".join(stream)
    assert [turn["content"] for turn in session.turns] == ["hello", text]
    for _ in session.stream("again"):
        break
    assert len(session.turns) == 2


def test_sessions_run_side_by_side(llm: LLM) -> None:
    texts = ["one", "two", "three"]
    alone = [llm.session("Count.").send(text) for text in texts]
    sessions = [llm.session("Count.") for _ in texts]
    assert ChatSession.together(sessions, texts) == alone
    assert [session.turns[0]["content"] for session in sessions] == texts

    async def tasks() -> list[str]:
        fresh = [llm.session("Count.") for _ in texts]
        return await asyncio.gather(*(s.send_async(text) for s, text in zip(fresh, texts, strict=True)))

    assert asyncio.run(tasks()) == alone
    assert ChatSession.together([], []) == []


def test_sessions_that_cannot_run_side_by_side(llm: LLM) -> None:
    session = llm.session()
    with pytest.raises(InvalidRequest, match="fork it"):
        ChatSession.together([session, session], ["a", "b"])
    with pytest.raises(InvalidRequest, match="2 texts for 1 sessions"):
        ChatSession.together([session], ["a", "b"])


def test_one_failing_turn_leaves_the_others(llm: LLM) -> None:
    class Broken(Controller):
        def next(self, view: SequenceView) -> Decision:
            raise RuntimeError("no")

    good, bad = llm.session(), llm.session(controller=Broken())
    with pytest.raises(ControllerError):
        ChatSession.together([good, bad], ["a", "b"])
    assert (len(good.turns), len(bad.turns)) == (2, 0)
    with pytest.raises(ControllerError):
        bad.send("c")
    assert bad.turns == []


def test_forks_part_ways(llm: LLM) -> None:
    session = llm.session("Be kind.", SHORT)
    session.send("hello")
    twin = session.fork()
    session.send("left")
    twin.send("right")
    assert session.turns[:2] == twin.turns[:2]
    assert [s.turns[2]["content"] for s in (session, twin)] == ["left", "right"]
    twin.turns[0]["content"] = "changed"
    assert session.turns[0]["content"] == "hello"


# -- files ---------------------------------------------------------------------------------------------------


def test_a_loaded_session_finds_its_kv_in_the_store(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kv_store": str(tmp_path / "kv"), "sampling": SHORT, "num_blocks": 256}
    with LLM("demo", **settings) as first:
        session = first.session(system="You answer questions about the weather. " * 6)
        session.send("Will it rain?")
        session.send("And snow?")
        session.save(tmp_path / "talk.json")
        assert session.last_output is not None
        length = session.last_output.usage.prompt_tokens
    with LLM("demo", **settings) as again:
        session = ChatSession.load(again, tmp_path / "talk.json")
        session.send("And hail?")
        assert session.last_output is not None
        assert session.last_output.usage.cached_tokens >= length // 16 * 16 > 0


def test_a_saved_session_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    sampling = SHORT.with_(logit_bias={5: -1.0}, stop=("zzz",))
    session = llm.session("Sei nett — 你好.", sampling, chat_template_kwargs={"x": 1})
    session.send("hello")
    session.save(tmp_path / "talk.json")
    again = ChatSession.load(llm, tmp_path / "talk.json")
    assert again.to_dict() == session.to_dict()
    assert again.sampling == sampling
    assert again.send("and now?") == session.send("and now?")
    assert list(tmp_path.iterdir()) == [tmp_path / "talk.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 99},
        {"turns": [{"role": 3}]},
        {"turns": "hello"},
        {"system": 5},
        {"sampling": {"temperature": -1}},
        {"sampling": {"no_such_field": 1}},
        {"sampling": "hot"},
        {"options": {"controller": "x"}},
    ],
)
def test_other_content_is_refused(llm: LLM, change: dict[str, Any]) -> None:
    data = json.loads(json.dumps(llm.session().to_dict()))
    ChatSession.from_dict(llm, data)
    with pytest.raises(InvalidRequest):
        ChatSession.from_dict(llm, {**data, **change})


def test_files_that_are_no_conversation(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text("{oops")
    with pytest.raises(InvalidRequest, match="not JSON"):
        ChatSession.load(llm, path)
    path.write_text("[1]")
    with pytest.raises(InvalidRequest, match="not a saved conversation"):
        ChatSession.load(llm, path)
    monkeypatch.setattr(chat_session, "MAX_FILE_BYTES", 2)
    with pytest.raises(InvalidRequest, match="at most 2"):
        ChatSession.load(llm, path)
