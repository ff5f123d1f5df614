"""Tests of clones of Wasm guests, which run on draft tokens. Tokens, logs and variables stay the same, with fewer
steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.aici.replies import BranchReply
from bridle.aici.runtime import lookahead as lookahead_module
from bridle.aici.runtime.guest_sequence import GuestSequence
from bridle.aici.runtime.instance import Instance
from bridle.aici.runtime.limits import DEFAULT_LIMITS
from bridle.aici.runtime.lookahead import Lookahead
from bridle.aici.runtime.module_loader import Sandbox
from bridle.aici.runtime.wasm import Ticker
from bridle.engine.control import controller_output
from bridle.outputs import FinishReason, Log, Rewind, Stored, TokenEvent
from bridle.sampling import AUTO_DRAFTS
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import END, LOOP, NOOP, TRAP, Step, force, guest2, load, sample, say, store
from tests.aici.instances import VOCABULARY
from tests.aici.instances import load as load_instance
from tests.aici.pool_kit import check, guest_request, make_engine, members, reference, run, workers
from tests.aici.steering import Steered
from tests.engine.random_labs import guess
from tests.waiting import until


@pytest.fixture(scope="module")
def pool(tokenizer: Path, store: Path) -> Iterator[RuntimePool]:
    pool = RuntimePool(
        RuntimeConfig(str(tokenizer), extra_args=("--store", str(store), "--wasm-max-step-time", "60000")), VOCAB_SIZE
    )
    yield pool
    group = pool.runtime_pid
    pool.shutdown()
    until(lambda: group is None or not members(group))


@pytest.fixture(autouse=True)
def _waits_for_last_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host wait for the last logs, even on a busy machine."""
    monkeypatch.setattr(controller_output, "LAST_WORDS", 60.0)


def steer(pool: RuntimePool) -> Steered:
    """Return an engine that waits for answers, even on a busy machine."""
    return Steered(pool, step_timeout=60.0)


# -- the same as without ------------------------------------------------------------------------------------------


@settings(max_examples=max(settings().max_examples // 8, 3))
@given(seed=st.integers(0, 1 << 40))
def test_programs_are_drafted_for_and_nothing_changes(pool: RuntimePool, seed: int) -> None:
    random = Random(seed)
    engine = make_engine(pool, random)
    requests, roots = [], {}
    for number in range(random.randint(1, 3)):
        request, root = guest_request(pool, random, number)
        outputs = reference(engine, request, root).values()
        truth = max((output.tokens for output in outputs), key=len)
        drafted = {"speculate": random.choice([AUTO_DRAFTS, 2, 8]), "prediction_ids": guess(random, truth)}
        requests.append(replace(request, sampling=request.sampling.with_(**drafted)))
        roots[request.id] = root
    replays = run(engine, requests, random)
    pool.settle()
    for request in requests:
        check(engine, request, roots[request.id], replays[request.id])


def random_step(random: Random, number: int, draft: tuple[int, ...] = ()) -> Step:
    """Return a random step that prints, often uses variables, often samples, and may propose draft tokens."""
    actions = [say(f"{number} ")]
    for _ in range(random.choice([0, 0, 1, 2])):
        name = random.choice("ab")
        value = f"{random.randrange(256):02x}"
        when = random.choice([None, None, random.randrange(4)])
        actions.append(random.choice([load(name), store(name, value, random.choice(["Set", "Append"]), when)]))
    tokens = random.sample(range(200), random.randint(1, 60))
    more = {"draft": list(draft)} if draft else {}
    return [*actions, *random.choice([sample(tokens, VOCAB_SIZE, **more)] * 6 + [force(tokens[:3]), NOOP])]


def say_all(pool: RuntimePool, wasm: bytes, **sampling: object) -> tuple[Steered, tuple[object, ...]]:
    steered = steer(pool)
    steered.add("a", wasm, temperature=1.0, seed=3, **sampling)
    steered.run()
    heard = [event for event in map(tuple_of, steered.events["a"]) if event[0] in (TokenEvent, Rewind, Log, Stored)]
    return steered, (steered.tokens("a"), heard, steered.end("a").reason)


def tuple_of(event: object) -> tuple[object, ...]:
    return type(event), *(getattr(event, name) for name in getattr(event, "__dataclass_fields__", ()))


@settings(max_examples=max(settings().max_examples // 8, 3))
@given(seed=st.integers(0, 1 << 40))
def test_logs_and_variables_are_those_without_drafts(pool: RuntimePool, seed: int) -> None:
    random = Random(seed)
    wasm = guest2([*(random_step(random, number) for number in range(12)), END])
    _, plain = say_all(pool, wasm, max_tokens=40)
    tokens = plain[0]
    assert isinstance(tokens, list)
    told = guess(random, tokens)
    _, drafted = say_all(pool, wasm, max_tokens=40, speculate=random.choice([2, 6]), prediction_ids=told)
    assert drafted == plain


@settings(max_examples=max(settings().max_examples // 8, 3))
@given(seed=st.integers(0, 1 << 40))
def test_what_guests_propose_changes_nothing(pool: RuntimePool, seed: int) -> None:
    random = Random(seed)

    def program(truth: list[int]) -> bytes:
        steps = []
        for number in range(12):
            draft = guess(random, truth[number:]) if random.random() < 0.7 else ()
            steps.append(random_step(Random(f"{seed} {number}"), number, draft))
        return guest2([*steps, END])

    _, plain = say_all(pool, program([]), max_tokens=40)
    tokens = plain[0]
    assert isinstance(tokens, list)
    speculate = random.choice([None, AUTO_DRAFTS, 2, 6])
    assert say_all(pool, program(tokens), max_tokens=40, speculate=speculate)[1] == plain


CHATTY = guest2([[say(f"call {number}\n"), *sample(range(number, 200), VOCAB_SIZE)] for number in range(20)])


def proposing(draft: list[int]) -> bytes:
    """Return a guest that also proposes draft tokens, in its first step only."""
    first, *others = [
        [say(f"call {number}\n"), *sample(range(number, 200), VOCAB_SIZE, **({} if number else {"draft": draft}))]
        for number in range(20)
    ]
    return guest2([first, *others])


def test_what_a_guest_proposes_is_drafted_as_long_as_it_comes_true(pool: RuntimePool) -> None:
    assert pool.life is not None and "draft" in pool.life.process.extensions
    steered, plain = say_all(pool, CHATTY, max_tokens=16)
    tokens = plain[0]
    assert isinstance(tokens, list)
    num_steps = steered.engine.statistics().num_steps
    steered, drafted = say_all(pool, proposing(tokens), max_tokens=16, speculate=4)
    assert drafted == plain
    assert steered.end("a").usage.accepted_tokens > 0
    assert steered.engine.statistics().num_steps < num_steps
    steered, drafted = say_all(pool, proposing([(tokens[0] + 1) % 200, *tokens[1:]]), max_tokens=16, speculate=4)
    assert drafted == plain
    assert steered.end("a").usage.accepted_tokens == 0  # the rest is forgotten with the first that is wrong
    steered, drafted = say_all(pool, proposing(tokens), max_tokens=16, speculate=0)
    assert drafted == plain
    assert steered.end("a").usage.drafted_tokens == 0


@pytest.mark.parametrize(
    ("draft", "error"),
    [
        ([1, VOCAB_SIZE], f"token {VOCAB_SIZE} in draft is outside the vocabulary of {VOCAB_SIZE}"),
        ([1] * 4097, "a draft of 4097 tokens exceeds the limit of 4096"),
        ([-1], "malformed result"),
    ],
    ids=["vocabulary", "length", "sign"],
)
def test_a_proposal_that_cannot_be_ends_the_output_with_its_reason(
    pool: RuntimePool, draft: list[int], error: str
) -> None:
    steered = steer(pool)
    steered.add("a", proposing(draft), speculate=4)
    steered.run()
    assert error in str(steered.end("a").error)
    assert not steered.tokens("a")


def test_an_engine_that_knows_no_proposals_steers_as_before(sandbox: Sandbox, tmp_path: Path) -> None:
    """A guest's draft is a separate field of its branch, and the rest of the answer is unchanged."""
    plain, wordy = (
        host(sandbox, [sample([2, 3], VOCABULARY.size, **more)], tmp_path).step(0, [5], 5, [0], None, 5000)
        for more in ({}, {"draft": [2, 3]})
    )
    assert wordy.branches[0].draft == [2, 3]
    assert (replace_draft(wordy.branches[0]), wordy.masks) == (plain.branches[0], plain.masks)


def replace_draft(branch: BranchReply) -> BranchReply:
    branch.draft = UNSET
    return branch


def test_right_drafts_save_steps_and_wrong_ones_none(pool: RuntimePool) -> None:
    steered, plain = say_all(pool, CHATTY, max_tokens=16)
    tokens = plain[0]
    assert isinstance(tokens, list)
    num_steps = steered.engine.statistics().num_steps
    steered, drafted = say_all(pool, CHATTY, max_tokens=16, speculate=4, prediction_ids=tuple(tokens))
    assert drafted == plain
    assert steered.end("a").usage.accepted_tokens > 0
    assert steered.engine.statistics().num_steps < num_steps
    wrong = tuple((token + 1) % 200 for token in tokens)
    steered, drafted = say_all(pool, CHATTY, max_tokens=16, speculate=4, prediction_ids=wrong)
    assert drafted == plain
    assert steered.end("a").usage.accepted_tokens == 0


def test_a_runtime_that_does_not_know_of_clones_steers_as_before(pool: RuntimePool) -> None:
    _, plain = say_all(pool, CHATTY, max_tokens=9)
    tokens = plain[0]
    assert isinstance(tokens, list)
    assert pool.life is not None
    process = pool.life.process
    known = process.extensions
    process.extensions = known - {"ahead"}
    try:
        steered, drafted = say_all(pool, CHATTY, max_tokens=9, speculate=4, prediction_ids=tuple(tokens))
    finally:
        process.extensions = known
    assert drafted == plain
    assert steered.end("a").usage.drafted_tokens == 0


def test_a_worker_that_is_killed_takes_its_clones_along(pool: RuntimePool) -> None:
    """The sequences of the killed worker end with the reason. The runtime then steers new sequences."""
    steered = steer(pool)
    truth = say_all(pool, CHATTY, max_tokens=120)[1][0]
    assert isinstance(truth, list)
    for name in ("a", "b"):
        steered.add(name, CHATTY, max_tokens=120, temperature=1.0, seed=3, speculate=4, prediction_ids=tuple(truth))
    steered.run(lambda: all(map(steered.tokens, ("a", "b"))))  # before that a guest may not be there to be killed
    steered.run(lambda: steered.engine.statistics().num_accepted_tokens > 0)
    assert pool.runtime_pid is not None
    for pid in workers(pool):
        os.kill(pid, signal.SIGKILL)
    steered.run()
    for name in ("a", "b"):
        assert steered.end(name).reason is FinishReason.ERROR
        assert "the process died" in str(steered.end(name).error)
        assert steered.tokens(name) == truth[: len(steered.tokens(name))]
    assert say_all(pool, CHATTY, max_tokens=120, speculate=4, prediction_ids=tuple(truth))[1][0] == truth


# -- clones in this process ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Yield a sandbox with a running clock, so that guests can be interrupted."""
    sandbox = Sandbox(DEFAULT_LIMITS)
    ticker = Ticker(sandbox.engine, lambda: None)
    ticker.start()
    ticker.awake()
    yield sandbox
    ticker.stop()


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool keep a clone even if its first answer was slow."""
    monkeypatch.setattr(lookahead_module, "ENOUGH", 60.0)
    monkeypatch.setattr(lookahead_module, "BUDGET_MS", 500.0)


def host(sandbox: Sandbox, steps: list[Step], folder: Path) -> GuestSequence:
    """Return a host with a guest that has answered once."""
    hosted = GuestSequence(1, load_instance(sandbox, guest2([sample([1], VOCABULARY.size), *steps]), folder))
    hosted.start([7], 5000)
    hosted.step(0, [], None, [0], None, 5000)
    return hosted


def drawing(*texts: str) -> list[Step]:
    return [[say(text), *sample([2, 3], VOCABULARY.size)] for text in texts]


def test_what_a_clone_says_is_held_until_its_token_is_drawn(sandbox: Sandbox, tmp_path: Path) -> None:
    writing = [store("a", "01"), store("a", "02", "Append"), *sample([2], VOCABULARY.size)]
    hosted = host(sandbox, [*drawing("x"), writing, *drawing("y")], tmp_path)
    variables = hosted.instance.variables
    lookahead = Lookahead()
    known = lookahead.tell(hosted, [5, 6, 7], is_alone=True)
    assert [each.token for each in known] == [5, 6, 7][: len(known)]
    assert not hosted.instance.log.drain()
    assert variables.version("a") == 0
    assert [each.logs[:1] for each in known[:1]] == ["x"]
    assert [write.value for each in known[:2] for write in each.storage] == ["01", "02"]
    went_on = lookahead.accept(hosted, [5, 6], 5000)
    assert variables.version("a") == 2
    assert went_on.instance.variables is variables
    assert went_on.length == 3
    went_on.step(0, [7], 7, [0], None, 5000)
    assert went_on.instance.log.drain().endswith("y")
    lookahead.close()


@pytest.mark.parametrize("step", [NOOP, END, force([4]), [TRAP], [LOOP]], ids=["wait", "stop", "force", "trap", "loop"])
def test_a_draft_ends_where_a_guest_does_not_draw(sandbox: Sandbox, tmp_path: Path, step: Step) -> None:
    hosted = host(sandbox, [*drawing("x"), step], tmp_path)
    lookahead = Lookahead()
    assert len(lookahead.tell(hosted, [5, 6, 7], is_alone=True)) == 1
    assert hosted.instance.broken is None
    assert len(lookahead.told) == 1
    lookahead.close()


def test_variables_that_others_may_change_end_a_draft(sandbox: Sandbox, tmp_path: Path) -> None:
    reading = [load("a"), *sample([2], VOCABULARY.size)]
    hosted = host(sandbox, [*drawing("x"), reading], tmp_path)
    lookahead = Lookahead()
    assert len(lookahead.tell(hosted, [5, 6], is_alone=False)) == 1
    lookahead.forget()
    assert hosted.instance.broken is None
    lookahead.close()


def test_clones_take_no_more_memory_than_a_guest_may(sandbox: Sandbox, tmp_path: Path) -> None:
    hosted = host(sandbox, drawing("x"), tmp_path)
    most = 3 * hosted.instance.memory.size
    limits = replace(DEFAULT_LIMITS, max_memory=most)
    hosted.instance.surroundings = replace(hosted.instance.surroundings, limits=limits)
    lookahead = Lookahead()
    assert len(lookahead.tell(hosted, [5] * 9, is_alone=True)) == 3
    lookahead.close()


def test_clones_serve_again_and_are_closed_at_the_end(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Instance] = []
    was_open = Instance._open
    monkeypatch.setattr(Instance, "_open", lambda self: (opened.append(self), was_open(self))[1])
    hosted = host(sandbox, drawing("x"), tmp_path)
    opened.clear()
    lookahead = Lookahead()
    for number in range(5):
        assert len(lookahead.tell(hosted, [5, 6, 7], is_alone=True)) == 3
        hosted = lookahead.accept(hosted, [5] * (number > 2), 5000)
        lookahead.forget()
    assert len(opened) <= 4  # three clones, and one in the place of the guest
    spare = list(lookahead.spare)
    lookahead.close()
    assert all(instance.broken for instance in spare)
    assert hosted.instance.broken is None
