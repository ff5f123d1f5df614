"""Tests that use recorded traces: the same controller passes without a model, and a different controller fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle import LLM, Controller, Decision
from bridle.cli import main
from bridle.controllers import SequenceView
from bridle.engine.control.decision import Branch, mask_of
from bridle.engine.request import Request
from bridle.serving.tracing.trace_header import controller_form
from bridle.serving.tracing.trace_regression import (
    Player,
    TraceTestResult,
    changed_form,
    judge,
    program_of,
    without_model,
)
from bridle.structured_output import Regex
from bridle.traces import Trace, TraceHeader, parse, write
from bridle.traces.format import encode_trace
from tests.http.harness import scripted_model, tokenizer_folder

VOCAB = 8


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(scripted_model()) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def play(llm: LLM) -> Iterator[Player]:
    header = TraceHeader("a", engine={"vocab_size": llm.info.vocab_size, "max_model_len": 512, "eos_token_ids": []})
    roomy = [Trace(replace(header, prompt=[1] * 400))] * 2
    with without_model(roomy, str(tokenizer_folder())) as (_, player):
        yield player


def traced(llm: LLM, prompt: str = "one", **options: object) -> Trace:
    given = {"max_tokens": 8, "ignore_eos": True, **options}
    (output,) = llm.generate(prompt, trace=True, use_tqdm=False, **given)
    assert output.trace is not None
    (trace,) = parse(encode_trace(output.trace))  # as it is in a file
    return trace


def verdict(play: Player, trace: Trace, controller: object | None = None) -> TraceTestResult:
    return judge(trace, play(trace, controller))


@given(st.integers(0, 1 << 40), st.sampled_from([1, 3]), st.sampled_from([None, "[a-z ]+[.]"]), st.sampled_from([0, 2]))
def test_a_trace_passes_without_its_model(
    llm: LLM, play: Player, seed: int, n: int, regex: str | None, temperature: float
) -> None:
    form = None if regex is None else Regex(regex)
    old = traced(llm, seed=seed, n=n, temperature=temperature, constraint=form, logprobs=2)
    found = verdict(play, old)
    assert found.outcome == "same", found.sentences


class Steers(Controller):
    """A controller that rolls back, forces or forks, depending on the output's length. `allowed` is its mask."""

    def __init__(self, allowed: int = VOCAB, forced: int = 70) -> None:
        self.allowed, self.forced = allowed, forced

    def next(self, view: SequenceView) -> Decision:
        number = len(view.generated)
        if number == 2:
            return Decision.splice(1, (self.forced, self.forced + 1, self.forced + 2))
        if number == 5:
            return Decision.fork((Branch(), Branch()))
        return (
            Decision.sample(mask=mask_of(range(65, 65 + self.allowed), view.vocab_size))
            if number < 8
            else Decision.stop()
        )


def test_the_same_controller_passes_and_others_are_told_apart(llm: LLM, play: Player) -> None:
    old = traced(llm, controller=Steers(), temperature=2.0, seed=3, max_tokens=16)
    assert verdict(play, old, Steers()).outcome == "same"
    other = verdict(play, old, Steers(forced=80))
    assert other.outcome == "different"
    assert any("forced by" in sentence for sentence in other.sentences)
    wider = verdict(play, old, Steers(allowed=VOCAB + 1))
    assert wider.outcome == "different"
    assert f"{VOCAB} tokens were allowed, now {VOCAB + 1}" in wider.sentences[0]


def test_what_only_the_model_knows_is_not_passed(llm: LLM, play: Player) -> None:
    old = traced(llm, seed=1, temperature=2.0)
    longer = Trace(replace(old.header, sampling={**old.header.sampling, "max_tokens": 12}), old.records)
    made = judge(Trace(old.header, old.records), play(longer, None))
    assert made.outcome == "undecided"
    assert "a draw of which nothing was recorded" in made.sentences[0]


def test_a_trace_with_missing_records_is_not_passed(llm: LLM, play: Player) -> None:
    old = traced(llm, seed=1)
    old.records[-1] = replace(old.records[-1], num_cut=3)  # type: ignore[call-arg]
    assert verdict(play, old).outcome == "undecided"


def test_a_controller_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "hello.js").touch()
    assert program_of(tmp_path / "traces" / "hello.2.jsonl", [".js", ".py"]) == tmp_path / "hello.js"
    (tmp_path / "traces" / "hello.py").touch()
    assert program_of(tmp_path / "traces" / "hello.jsonl", [".js", ".py"]) == tmp_path / "traces" / "hello.py"
    assert program_of(tmp_path / "traces" / "other.jsonl", [".js", ".py"]) is None


def test_a_changed_controller_takes_the_place_of_the_recorded_one() -> None:
    wasm = {"wasm": {"module": "jsctrl", "argument": "old"}}
    form = {"name": "both", "composed": [{"constraint": {"regex": "a"}}, wasm]}
    other = controller_form(Request("a", (1,), controller=changed_form(form, "jsctrl", "new")))
    assert other is not None
    assert other["composed"] == [{"constraint": {"regex": "a"}}, {"wasm": {"module": "jsctrl", "argument": "new"}}]
    same = controller_form(Request("a", (1,), controller=changed_form(wasm, "0" * 64, None)))
    assert same is not None and same["wasm"] == {"module": "0" * 64, "argument": "old"}
    alone = controller_form(Request("a", (1,), controller=changed_form({"name": "mine"}, "jsctrl", "new")))
    assert alone is not None and alone["wasm"]["argument"] == "new"


def test_the_command_tests_recorded_traces(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = traced(llm, seed=4, constraint=Regex("[a-z]{3,}"))
    assert good.header.controller is not None
    bad = Trace(replace(good.header, controller={"constraint": {"regex": "[0-9]+"}}), good.records)
    (tmp_path / "deep").mkdir()
    write([good], tmp_path / "deep" / "good.jsonl")
    words = ["test", str(tmp_path), "--tokenizer", str(tokenizer_folder())]
    assert main(words) == 0
    assert "traces: 1; same: 1; different: 0; undecided: 0" in capsys.readouterr().out
    write([good, bad], tmp_path / "two.jsonl")
    report = tmp_path / "report.xml"
    assert main([*words, "--json", "--junit", str(report)]) == 1
    told = json.loads(capsys.readouterr().out)
    outcomes = {each["trace"]: each["outcome"] for each in told["traces"]}
    assert outcomes == {"deep/good.jsonl": "same", "two.jsonl": "same", "two.jsonl#2": "different"}
    assert 'tests="3" failures="1"' in report.read_text()
    (tmp_path / "none").mkdir()
    assert main(["test", str(tmp_path / "none")]) == 2
    assert "no trace of an output" in capsys.readouterr().err
