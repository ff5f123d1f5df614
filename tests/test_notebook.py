"""Tests of output in notebooks, with a display that only records. `tests/test_jupyter.py` uses a real kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bridle import LLM, ChatSession, CompletionOutput, Controller, Decision, RequestOutput
from bridle.controllers import SequenceView
from bridle.llm import event_loop, notebook
from bridle.outputs import ChatMessage, ToolCall
from tests.http.harness import saying, scripted_model
from tests.traces.records import HOSTILE, Reader

TEXT = "good <b>day</b>"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(scripted_model(next_token=saying(TEXT))) as made:
        yield made


class Display:
    """A fake display that records the successive contents of each display."""

    def __init__(self) -> None:
        self.places: list[list[str]] = []

    def display(self, page: Any, display_id: bool) -> Any:
        assert display_id
        place = [page.data]
        self.places.append(place)
        return SimpleNamespace(update=lambda page: place.append(page.data))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Display:
    """Replace IPython by a fake kernel, and return its display."""
    display = Display()
    ipython, pages = ModuleType("IPython"), ModuleType("IPython.display")
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setattr(ipython, "get_ipython", lambda: shell, raising=False)
    monkeypatch.setattr(pages, "display", display.display, raising=False)
    monkeypatch.setattr(pages, "HTML", lambda page: SimpleNamespace(data=page), raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", pages)
    return display


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not notebook.in_notebook()
    ipython = ModuleType("IPython")
    for shell in (None, SimpleNamespace()):  # no shell at all; the shell of a terminal
        monkeypatch.setattr(ipython, "get_ipython", lambda shell=shell: shell, raising=False)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert not notebook.in_notebook()


def test_changes_that_come_too_fast_are_left_out(kernel: Display) -> None:
    times = iter([0.0, 0.0, 0.5, 0.6, 5.0, 5.0, 5.01, 5.02])
    live = notebook.Live("a", lambda: next(times))
    live.update(lambda: "b")  # takes half a second: none for four and a half more
    live.update(lambda: pytest.fail("a page was made that nobody sees"))
    live.update(lambda: "c")
    live.update(lambda: "d", is_last=True)
    assert kernel.places == [["a", "b", "c", "d"]]


class Writes(Controller):
    """A controller that forces a text, rolls its end back, and samples the rest."""

    def __init__(self, llm: LLM) -> None:
        self.waiting = [Decision.splice(2, [5]), Decision.splice(0, llm.tokenizer.encode(HOSTILE))]

    def next(self, view: SequenceView) -> Decision:
        return self.waiting.pop() if self.waiting else Decision.sample()


@pytest.mark.parametrize("show", [lambda stream: stream._ipython_display_(), lambda stream: stream.show()])
def test_a_stream_shows_itself_while_it_grows(llm: LLM, kernel: Display, show: Callable[[Any], object]) -> None:
    stream = llm.stream("say", trace=True)
    show(stream)
    (place,) = kernel.places
    assert read(place[-1]).text == stream.output.text == TEXT
    assert read(place[-1]).tags == {"div", "span"}
    assert len(place) >= 2


async def test_in_an_event_loop_too(llm: LLM, kernel: Display) -> None:
    output = await llm.stream("say").show_async()
    assert read(kernel.places[0][-1]).text == output.text == TEXT


def test_elsewhere_a_stream_is_written(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.stream("say").show()
    assert capsys.readouterr().out == TEXT + "\n"


def test_what_was_taken_back_is_left_standing_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    shown = notebook.LiveOutput()
    for text in ("one two", "one", "one three"):
        shown.update(RequestOutput("a", None, [], [CompletionOutput(0, text)]))
    shown.update(RequestOutput("a", None, [], [CompletionOutput(0, "one three")]), is_last=True)
    assert capsys.readouterr().out == "one two\none three\n"


def test_a_conversation_shows_itself_in_colours(llm: LLM) -> None:
    session = llm.session(HOSTILE, trace=True, max_tokens=40)
    session.send(HOSTILE)
    session.send([{"role": "user", "content": [{"type": "text", "text": "what is it?"}]}])
    page = session._repr_html_()
    reader = read(page)
    assert reader.tags == {"div", "span"} and reader.names <= {"style", "title"}
    said = ["system", HOSTILE, "user", HOSTILE, "assistant", TEXT, "user", "what is it?", "assistant", TEXT]
    assert reader.text.replace("\n", "") == "".join(said).replace("\n", "")
    assert page.count('title="') >= 2 * len(TEXT) // 8  # what tokens of both answers were chosen from
    session.undo()
    assert session._traces.keys() == {1}
    assert session.fork()._repr_html_() == session._repr_html_()
    session.reset()
    assert read(session._repr_html_()).text.replace("\n", "") == "system" + HOSTILE


def test_origins_have_their_colours(llm: LLM) -> None:
    from bridle.traces.highlight import ORIGINS

    session = ChatSession(llm, controller=Writes(llm), trace=True, max_tokens=60)
    session.send("say")
    page = session._repr_html_()
    for origin in ("forced", "rewound", "sampled"):
        assert f'style="{ORIGINS[origin][1]}"' in page, origin
    assert "line-through" in page and read(page).tags == {"div", "span"}


def test_calls_and_pictures_are_told_in_words() -> None:
    call = {"type": "function", "function": {"name": "<b>", "arguments": "{}"}}
    seen = [{"type": "text", "text": "1 < 2"}, {"type": "image_url", "image_url": {}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": seen}]
    page = notebook.page_of_talk(messages, {})
    assert read(page).text == "assistant\n<b>({})user\n1 < 2\n[image_url]" and "<b>" not in page


def test_a_batch_has_a_bar_that_goes(llm: LLM, kernel: Display) -> None:
    llm.generate(["say"] * 3)
    (place,) = kernel.places
    assert place[0].startswith("<progress") and "0/3" in place[0]
    assert place[-1] == ""
    llm.generate(["say"] * 3, use_tqdm=False)
    assert len(kernel.places) == 1


def test_a_bar_goes_when_a_batch_fails(kernel: Display) -> None:
    def interrupted() -> None:
        with event_loop.progress(2, True) as report:
            report(RequestOutput("a", None, [], [CompletionOutput(0, "", [1, 2, 3])]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert kernel.places[0][-1] == ""


def test_parts_show_themselves() -> None:
    page = CompletionOutput(0, HOSTILE)._repr_html_()
    assert read(page).text == HOSTILE and read(page).tags == {"div", "span"}


def test_a_message_shows_its_thoughts_and_calls() -> None:
    page = ChatMessage("so <i>", "good <b>", [ToolCall("f", "1", '{"a": "<u>"}')])._repr_html_()
    reader = Reader()
    reader.feed(page)
    assert reader.tags == {"div", "span"}
    assert reader.text == 'so <i>\ngood <b>\nf({"a": "<u>"})'
    assert "opacity" in page.partition("good")[0]
