"""Tests of `LLM` and its process: interrupts, forks, and folders that lack a part of the model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from bridle import LLM, ChatSession, Controller, Decision, SamplingParams
from bridle.controllers import SequenceView
from bridle.errors import UnsupportedModel
from bridle.outputs import RequestOutput
from tests.fakes.tiny_checkpoints import make_checkpoint
from tests.http.harness import scripted_model
from tests.waiting import PATIENCE, until

SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), sampling=LONG, num_blocks=64) as loaded:
        yield loaded


class Interrupts(Controller):
    """A controller that sends SIGINT to its own process after a number of tokens, like Ctrl-C, and then waits."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def next(self, view: SequenceView) -> Decision:
        if len(view.generated) == self.num_tokens:
            os.kill(os.getpid(), signal.SIGINT)
            self.num_tokens = -1
        return Decision.wait() if self.num_tokens < 0 else Decision.sample()


class Pauses(Controller):
    """A controller that samples one token, and then waits until the event is set."""

    def __init__(self, goes_on: threading.Event) -> None:
        self.goes_on = goes_on

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample() if not view.generated or self.goes_on.is_set() else Decision.wait()

    def __deepcopy__(self, memo: object) -> Pauses:
        return Pauses(self.goes_on)


def in_a_script(call: Callable[[], object]) -> None:
    call()


def in_a_notebook(call: Callable[[], object]) -> None:
    """Run `call` inside a running event loop, like a notebook cell that SIGINT interrupts."""

    async def cell() -> None:
        call()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(cell())
    finally:
        loop.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("run", [in_a_script, in_a_notebook])
@pytest.mark.parametrize("num_prompts", [1, 3])
def test_an_interrupt_ends_what_runs(llm: LLM, run: Callable[[Callable[[], object]], None], num_prompts: int) -> None:
    controllers = [Interrupts(5), *[Interrupts(0xFFFF)] * (num_prompts - 1)]
    with pytest.raises(KeyboardInterrupt):
        run(lambda: llm.generate(["hello"] * num_prompts, controller=controllers))
    llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=1))
    finished = llm.statistics().finished
    assert finished["cancelled"] >= 1
    assert finished["error"] == 0


class Trap:
    """Interrupt the main thread like Ctrl-C, at a given line that a call runs in `bridle.llm`, in any thread."""

    def __init__(self, line: int) -> None:
        self.num_left = line
        self.is_sent, self.is_there = threading.Event(), threading.Event()

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if f"{os.sep}bridle{os.sep}llm{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line":
            self.num_left -= 1
            if self.num_left < 0 and not self.is_sent.is_set():
                self.is_sent.set()
                try:
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                finally:
                    self.is_there.set()
        return self.trace

    def spring(self, call: Callable[[], object]) -> None:
        """Run `call` up to the interrupt, or to its end if that comes first."""
        before = sys.gettrace()
        threading.settrace(self.trace)
        sys.settrace(self.trace)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                call()
                if self.is_sent.is_set():
                    self.is_there.wait(PATIENCE)
                    time.sleep(0.001)  # the system delivers it now at the latest, if no finalizer has swallowed it
        finally:
            sys.settrace(before)
            threading.settrace(None)  # type: ignore[arg-type]


class GoesOn(Controller):
    """A controller that samples until the interrupt, and then waits until the request is cancelled."""

    def __init__(self, is_sent: threading.Event) -> None:
        self.is_sent = is_sent

    def next(self, view: SequenceView) -> Decision:
        return Decision.wait() if self.is_sent.is_set() else Decision.sample()

    def __deepcopy__(self, memo: object) -> GoesOn:
        return GoesOn(self.is_sent)


def say(llm: LLM, controller: Controller) -> object:
    return llm.session(sampling=SHORT, controller=controller).send("hello")


def generate(llm: LLM, controller: Controller) -> object:
    return llm.generate(["hello", "and", "more"], SHORT, controller=controller)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("run", [in_a_script, in_a_notebook])
@pytest.mark.parametrize("call", [generate, say])
def test_an_interrupt_at_any_line_leaves_nothing_running(
    call: Callable[[LLM, Controller], object], run: Callable[[Callable[[], object]], None]
) -> None:
    with LLM(scripted_model()) as llm:
        engine: Any = llm.model.client
        for line in range(10_000):
            trap = Trap(line)
            trap.spring(lambda trap=trap: run(lambda: call(llm, GoesOn(trap.is_sent))))  # type: ignore[misc]
            if not trap.is_sent.is_set():
                break
            until(lambda: engine.num_live == 0, f"the end of all requests after an interrupt at line {line}")
        assert line > 50


@pytest.mark.few(1)
@pytest.mark.parametrize("run", [in_a_script, in_a_notebook])
def test_an_interrupt_ends_a_turn_and_leaves_the_conversation(
    llm: LLM, run: Callable[[Callable[[], object]], None]
) -> None:
    session = llm.session(sampling=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    session.send("hello")
    turns, output = list(session.turns), session.last_output
    session.options["controller"] = Interrupts(1)
    for call in (lambda: session.send("more"), lambda: ChatSession.together([session], ["more"])):
        with pytest.raises(KeyboardInterrupt):
            run(call)
        assert (session.turns, session.last_output) == (turns, output)
    del session.options["controller"]
    session.send("more")
    assert len(session.turns) == 4


# -- forks ---------------------------------------------------------------------------------------------------


def in_a_fork(work: Callable[[], object]) -> str:
    """Return the error that `work` raises in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(round(PATIENCE))  # a fork that hangs dies
            work()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_cannot_use_the_model_of_its_parent(llm: LLM) -> None:
    goes_on = threading.Event()
    stream = iter(llm.stream("hello", controller=Pauses(goes_on)))
    works: list[Callable[[], object]] = [
        lambda: llm.generate("hello"),
        lambda: llm.generate("hello", constraint={"regex": "a+"}),
        lambda: asyncio.run(llm.generate_async(["hello"])),
        lambda: llm.stream("hello").read(),
        lambda: llm.session().send("hello"),
        lambda: llm.embed("hello"),
        lambda: llm.score("hello"),
        lambda: llm.load_adapter("x", "/nowhere"),
        lambda: "".join(stream),  # begun by the parent
        lambda: llm.model.client.submit(llm.request("hello")),
    ]
    for work in works:
        said = in_a_fork(work)
        assert said.startswith("EngineClosed: this process is a fork of the one that loaded the model"), said
    assert in_a_fork(llm.close) == "nothing"
    goes_on.set()
    assert "".join(stream)  # the parent goes on
    assert isinstance(llm.generate("hello")[0], RequestOutput)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_an_engine_tells_a_fork_of_its_process(llm: LLM) -> None:
    client, request = llm.model.client, llm.request("hello")
    assert in_a_fork(lambda: client.submit(request)).startswith("EngineClosed: this process is a fork")
    assert in_a_fork(lambda: client.cancel("x")) == "nothing"
    with client.submit(request) as stream:
        assert in_a_fork(lambda: list(stream)).startswith("EngineClosed: this process is a fork")
        assert list(stream)


# -- folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt2", "llama"])
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    with pytest.raises(UnsupportedModel, match="has no tokenizer"):
        LLM(str(tmp_path))


# -- log-probabilities ---------------------------------------------------------------------------------------


def test_log_probabilities_have_their_texts(llm: LLM) -> None:
    sampling = SamplingParams(seed=1, max_tokens=12, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = llm.generate("the quick brown fox", sampling)
    (score,) = llm.score("the quick brown fox", top=2)
    known = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or []), *score.logprobs]
    entries = [entry for entry in known if entry is not None]
    assert len(entries) == 12 + 2 * (len(output.prompt_token_ids) - 1)
    for entry in entries:
        assert entry.text == llm.tokenizer.token_text(entry.token)
        assert entry.top_texts == tuple(llm.tokenizer.token_text(token) for token, _ in entry.top)
        assert len(entry.top) >= 2
    assert any(entry.text.strip() for entry in entries)
