"""Tests that another engine can use the control runtime with `Runner`, and that a recorded exchange can be replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bridle.aici import Runner, RuntimeConfig
from bridle.aici.client.replay import ReplyDifference, replay
from bridle.engine import Request
from bridle.engine.interfaces import Ask
from bridle.errors import ControllerError, InvalidRequest
from bridle.traces import EndRecord, ExchangeRecord, Record, TraceHeader, encode_record, read
from examples.aici_transformers import TinyEngine
from tests.aici.guests import (
    END,
    LOOP,
    NOOP,
    TRAP,
    by_branch,
    force,
    guest1,
    guest2,
    mask,
    result,
    sample,
    say,
    splice,
)
from tests.aici.guests import store as store_variable
from tests.fakes.tiny_checkpoints import make_checkpoint

VOCAB_SIZE = 300


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint)


def config(checkpoint: Path, store: Path, **options: Any) -> RuntimeConfig:
    args = ("--store", str(store), "--wasm-max-step-time", "20000", "--wasm-max-pre-step-time", "20000")
    num_logits = VOCAB_SIZE if options.get("dialect", 2) == 2 else None
    return RuntimeConfig(str(checkpoint), num_logits=num_logits, extra_args=args, json_size=8, **options)


@pytest.fixture(scope="module")
def runner(checkpoint: Path, store: Path) -> Iterator[Runner]:
    with Runner(config(checkpoint, store), VOCAB_SIZE) as runner:
        yield runner


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return the model's greedy continuation, computed from the whole token list each time."""
    tokens = list(tokens)
    for _ in range(count):
        with torch.inference_mode():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(tokens) - count :]


PROMPT = [10, 20, 30]
FREE = sample(range(VOCAB_SIZE), VOCAB_SIZE)


def test_every_verb_over_transformers(runner: Runner, model: Any) -> None:
    """After forced tokens, a rollback, a fork and a wait, the model continues as if the sequence always had its current
    tokens."""
    branches = result({"branches": [splice([50, 51]), splice([60], backtrack=1), splice([])]})
    steps = [FREE, force([40, 41, 42]), FREE, force([43], backtrack=3), NOOP, FREE, [branches], FREE, FREE, END]
    first, second, third = TinyEngine(model, runner).run(PROMPT, runner.upload(guest2(steps)))
    one = greedy(model, PROMPT, 1)
    kept = [*PROMPT, *one, 40, 43]
    kept += greedy(model, kept, 1)
    for output, start in ((first, [*kept, 50, 51]), (second, [*kept[:-1], 60]), (third, kept)):
        assert output.error is None
        assert output.tokens == start + greedy(model, start, 2)


def test_masks_and_conditional_splices_over_transformers(runner: Runner, model: Any) -> None:
    replaced = {"when_sampled": [66], "backtrack": 2, "ff_tokens": [70, 71]}
    other = {"when_sampled": [67], "backtrack": 0, "ff_tokens": [99]}
    steps = [
        sample([65], VOCAB_SIZE),
        [mask([66], VOCAB_SIZE), result({"branches": [{"sample_mask": "#", "splices": [other, replaced]}]})],
        sample([80, 81], VOCAB_SIZE),
        END,
    ]
    (output,) = TinyEngine(model, runner).run(PROMPT, runner.upload(guest2(steps)))
    assert output.tokens[:5] == [*PROMPT, 70, 71] and output.tokens[5] in (80, 81) and len(output.tokens) == 6


def test_forks_share_nothing_afterwards(runner: Runner, model: Any) -> None:
    branches = result({"branches": [splice([50]), splice([60])]})
    steps = [[branches], [by_branch(sample([70], VOCAB_SIZE), sample([71], VOCAB_SIZE))], FREE, END]
    first, second = TinyEngine(model, runner).run(PROMPT, runner.upload(guest2(steps)))
    for output, start in ((first, [*PROMPT, 50, 70]), (second, [*PROMPT, 60, 71])):
        assert output.tokens == start + greedy(model, start, 1)


def test_a_trap_and_a_limit_end_one_request(runner: Runner, model: Any) -> None:
    engine = TinyEngine(model, runner, max_tokens=5)
    (bad,) = engine.run(PROMPT, runner.upload(guest2([FREE, [say("on my way\n"), TRAP]])))
    assert "unreachable" in str(bad.error)
    (long,) = engine.run(PROMPT, runner.upload(guest2([FREE])))
    assert long.error is None and len(long.tokens) == len(PROMPT) + 5


def test_what_is_wrong_is_told(runner: Runner) -> None:
    with pytest.raises(InvalidRequest, match="module"):
        runner.upload(b"no wasm at all")
    with pytest.raises(InvalidRequest, match="f" * 64):
        runner.start("r", PROMPT, "f" * 64)


def test_tags_name_modules(runner: Runner) -> None:
    module = runner.upload(guest2([END]))
    runner.set_tags(module, ["ender-1"])
    assert runner.start("tagged", PROMPT, "ender-1") == PROMPT


def test_a_dead_runtime_is_told(checkpoint: Path, store: Path) -> None:
    with Runner(config(checkpoint, store), VOCAB_SIZE) as runner:
        module = runner.upload(guest2([END]))
        runner.start("r", PROMPT, module)
        runner._process.kill()
        with pytest.raises(ControllerError, match="runtime"):
            _step(runner)
        with pytest.raises(ControllerError, match="runtime"):
            runner.start("s", PROMPT, module)


def _step(runner: Runner) -> None:
    runner.begin([Ask(0, request=Request("r", tuple(PROMPT)))])
    runner.finish()


def test_dialect_1_by_the_runner(checkpoint: Path, store: Path) -> None:
    go = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
    among = [mask([65], VOCAB_SIZE, new=False), result({"SampleWithBias": {}})]
    with Runner(config(checkpoint, store, dialect=1), VOCAB_SIZE) as runner:
        runner.start("r", PROMPT, runner.upload(guest1([go], [among], [[result({"stop": True})]])))
        runner.begin([Ask(0, request=Request("r", tuple(PROMPT)))])
        decision = runner.finish()[0].decision
        assert decision is not None and decision.branches[0].mask is not None
        assert runner.allowed(decision.branches[0].mask).nonzero()[0].tolist() == [65]
        runner.begin([Ask(0, tokens=(65,), sampled=65)])
        decision = runner.finish()[0].decision
        assert decision is not None and decision.is_stop


# -- recording and replay --------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("futex", [False, True])
def test_a_trace_replays(checkpoint: Path, store: Path, tmp_path: Path, model: Any, futex: bool) -> None:
    trace = tmp_path / "trace.jsonl"
    branches = result({"branches": [splice([50]), splice([60])]})
    wasm = guest2([FREE, [branches], [say("hello\n"), *FREE], [TRAP]])
    with Runner(config(checkpoint, store, futex=futex, trace=trace), VOCAB_SIZE) as runner:
        TinyEngine(model, runner).run(PROMPT, runner.upload(wasm))
    (told,) = read(trace)
    exchanges = [record for record in told.records if isinstance(record, ExchangeRecord)]
    assert [each.request["op"] for each in exchanges[:4]] == ["ping", "tokens", "mk_module", "instantiate"]
    assert {each.side for each in exchanges} == {False, True}
    assert all(each.at > 1_600_000_000 and each.reply["type"] in ("ok", "error") for each in exchanges)
    assert [each.step for each in exchanges] == list(range(len(exchanges)))
    assert told.header.runtime == {"dialect": 2, "num_logits": VOCAB_SIZE, "is_ours": True}
    assert told.records[len(exchanges) :] == [EndRecord(0, len(exchanges), "closed")]
    found = list(replay(trace, config(checkpoint, store, futex=futex)))
    assert found == [None] * len(exchanges)
    with trace.open("ab") as file:  # as if the runtime had been started again meanwhile
        file.write(trace.read_bytes())
    assert list(replay(trace, config(checkpoint, store, futex=futex))) == found * 2


SPIN = """(local.set $i (i32.const 60000000)) (loop $spin (local.set $i (i32.sub (local.get $i) (i32.const 1)))
  (br_if $spin (local.get $i)))"""
TIMED = [result({"branches": [], "wait": {"ms": 40}})]


@pytest.mark.slow
def test_a_trace_with_late_and_waiting_controllers_replays(checkpoint: Path, store: Path, tmp_path: Path) -> None:
    """In the recording, one controller is late for several steps, one waits for a time, a third continues, and one
    never answers."""
    trace = tmp_path / "trace.jsonl"
    slow = guest2(
        [[say("slow\n"), "(call $spin)", *sample([70], VOCAB_SIZE)], END], raw=f"(func $spin (local $i i32) {SPIN})"
    )
    timed = guest2([[say("wait\n"), *TIMED], [store_variable("x", "61"), *sample([71], VOCAB_SIZE)], END])
    steady = guest2([sample([72], VOCAB_SIZE)])
    never = guest2([sample([73], VOCAB_SIZE), [say("last\n"), LOOP]])
    args = ("--store", str(store), "--wasm-max-step-time", "4", "--wasm-max-timeout-steps", "60")
    options = RuntimeConfig(str(checkpoint), num_logits=VOCAB_SIZE, extra_args=args, json_size=8, trace=trace)
    with Runner(options, VOCAB_SIZE) as runner:
        asks = []
        for number, wasm in enumerate((slow, timed, steady, never)):
            runner.start(f"r{number}", [1], runner.upload(wasm))
            asks.append(Ask(number, request=Request(f"r{number}", (1,))))
        tokens: dict[int, list[int]] = {number: [] for number in range(4)}
        errors: dict[int, str] = {}
        while not ({0, 1} <= {n for n, got in tokens.items() if got} and 3 in errors):
            runner.begin(asks)
            asks = []
            for number, answer in runner.finish().items():
                if answer.error is not None:
                    errors[number] = str(answer.error)
                    runner.free(number)
                elif answer.decision is not None and answer.decision.is_wait:
                    asks.append(Ask(number))
                elif answer.decision is not None and not answer.decision.is_stop:
                    tokens[number].append(70 + number)
                    asks.append(Ask(number, (70 + number,), sampled=70 + number))
    text = trace.read_text()
    assert '"wait":true' in text and "\N{HOURGLASS WITH FLOWING SAND}" in text and "steps in a row" in errors[3]
    found = list(replay(trace, config(checkpoint, store), step_ms=500))
    assert found == [None] * (len(text.splitlines()) - 2)  # without header and end
    tampered = text.replace("slow\\n", "fast\\n")
    trace.write_text(tampered)
    found = list(replay(trace, config(checkpoint, store), step_ms=500))
    assert [each.operation for each in found if each] == ["mid_process"]


def test_a_trace_of_another_runtime_differs(checkpoint: Path, store: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with Runner(config(checkpoint, store, trace=trace), VOCAB_SIZE):
        pass
    trace.write_text(trace.read_text().replace('"vocab_size":300', '"vocab_size":301'))
    same, other = replay(trace, config(checkpoint, store))
    assert same is None and isinstance(other, ReplyDifference)
    assert (other.line, other.operation) == (3, "tokens")
    assert (other.expected["data"]["vocab_size"], other.got["data"]["vocab_size"]) == (301, 300)


def lines_of(*values: TraceHeader | Record) -> bytes:
    return b"".join(encode_record(value) + b"\n" for value in values)


TOLD = TraceHeader("runtime-1", runtime={"dialect": 2})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (b"no json\n", "line 1: not a trace record"),
        (lines_of(ExchangeRecord(0, 0)), "line 1 must be the header of the trace, but is a record"),
        (lines_of(TraceHeader("one")), "line 1 is the trace of an output"),
        (
            lines_of(replace(TOLD, runtime={"dialect": 1})),
            "line 1: the trace has exchanges of dialect 1;",
        ),
        (lines_of(TOLD, ExchangeRecord(0, 0, request=1, reply={})), "line 2 of the trace is not an exchange"),
        (lines_of(TOLD, EndRecord(0, 0, "closed", num_cut=3)), "3 exchanges are missing, because the file was full"),
    ],
)
def test_what_is_no_trace_is_refused(checkpoint: Path, store: Path, tmp_path: Path, lines: bytes, why: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(lines)
    with pytest.raises(InvalidRequest, match=why):
        list(replay(trace, config(checkpoint, store)))
