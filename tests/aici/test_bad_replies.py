"""A malformed reply becomes a `ProtocolError` where it is decoded. Any other error in a thread that reads replies ends
the runtime, so that a new runtime starts and no call waits forever."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.aici import protocol, replies
from bridle.aici.client import RuntimeConfig, RuntimePool, WasmController, supervisor
from bridle.aici.client.dialect1 import Dialect1
from bridle.aici.client.dialect2 import Dialect2, StepExchange
from bridle.aici.client.instantiate_messages import InitialOutput
from bridle.aici.client.instantiation import Instances
from bridle.aici.client.reply_reader import ReplyReader
from bridle.aici.client.side_channel import SideChannel
from bridle.aici.client.supervisor import RuntimeSupervisor
from bridle.engine import Request
from bridle.engine.interfaces import Answer, Ask
from bridle.errors import ControllerError, ControllerUnavailable, ProtocolError
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import END, guest2, sample
from tests.aici.guests import store as set_variable
from tests.aici.steering import Steered
from tests.waiting import PATIENCE, until

ASKS = [Ask(seq_id, request=Request(f"r{seq_id}", (1,))) for seq_id in (1, 2)]
MASK_BYTES = 4 * ((VOCAB_SIZE + 31) // 32)


class Peer:
    """A runtime process that sends the messages in `said`. An exception in `said` is raised."""

    def __init__(self, call_timeout: float = PATIENCE, masks: int = 4_096) -> None:
        self.said: SimpleQueue[bytes | Exception] = SimpleQueue()
        self.sent: list[Any] = []
        self.link: Any = SimpleNamespace(side=SimpleNamespace(max_message=1 << 20), masks=bytearray(masks))
        self.config = SimpleNamespace(call_timeout=call_timeout, dialect=2)
        self.extensions: frozenset[str] = frozenset()
        self.vocab_size = VOCAB_SIZE
        self.pid = 0
        self.is_killed = False

    def send(self, message: bytes, *, side: bool = False, timeout: float = 10.0) -> None:
        self.sent.append(json.loads(message))

    def receive(self, timeout: float | None, *, side: bool = False) -> bytes | None:
        try:
            said = self.said.get(timeout=timeout if side else 0.01)
        except Empty:
            return None
        if isinstance(said, Exception):
            raise said
        return said

    def kill(self) -> None:
        self.is_killed = True

    def close(self) -> None: ...


# -- the main channel ------------------------------------------------------------------------------------------


def reply(**sequence: Any) -> dict[str, Any]:
    """Return a reply for both sequences of `ASKS`. Arguments change the result of the first sequence."""
    splices = [{"when_sampled": [1], "backtrack": 0, "ff_tokens": [2]}]
    branches = [
        {"sample_mask": 0, "temperature": 0.5, "splices": splices, "sampling": {"top_k": 3}, "bias": [[1, 0.5]]}
    ]
    stored = [{"WriteVar": {"name": "a", "value": "00ff", "op": "Set", "when_version_is": None}}]
    plain = {"error": "", "result": {"branches": branches}, "storage": stored, "logs": "x", "micros": 10}
    ahead = [{"token": 5, "branches": branches, "logs": "", "storage": stored}]
    data = {"seqs": {"1": {**plain, "ahead": ahead, **sequence}, "2": plain}, "dtype": "bool", "num_masks": 1}
    places = {"first_mask_byte_offset": 0, "mask_num_bytes": MASK_BYTES, "mask_num_elts": VOCAB_SIZE}
    return {"type": "ok", "data": {**data, **places}}


def answers_to(said: bytes, masks: int = 4_096) -> dict[int, Answer]:
    peer = Peer(masks=masks)
    exchange = Dialect2(peer, VOCAB_SIZE)  # type: ignore[arg-type]
    exchange.begin(ASKS, (), 0.0)
    peer.said.put(said)
    answers = exchange.receive(0.0)
    assert answers is not None
    return answers


def test_the_reply_that_is_spoilt_below_is_good() -> None:
    answers = answers_to(json.dumps(reply()).encode())
    assert [answer.error for answer in answers.values()] == [None, None]
    assert answers[1].stored[0].value == b"\x00\xff" and answers[1].ahead


@pytest.mark.parametrize(
    ("value", "op"), [("0", "Set"), ("zz", "Set"), ("0x00", "Append"), ("\N{SNOWMAN}", "Set"), ("00", "Take")]
)
def test_a_write_that_is_none_is_no_reply(value: str, op: str) -> None:
    stored = [{"WriteVar": {"name": "a", "value": value, "op": op}}]
    with pytest.raises(ProtocolError, match="malformed reply"):
        answers_to(json.dumps(reply(storage=stored)).encode())


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a reply."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inside for place in places(part, (*path, key)))]


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4),
    st.lists(st.integers(-3, 3), max_size=3), st.just({}), st.sampled_from(["f16", "bf16", "f32", "Append", "top_k"]),
)  # fmt: skip


@given(st.sampled_from(places(reply())[1:]), JUNK)
def test_whatever_stands_in_a_reply_is_an_answer_or_a_protocol_error(place: tuple[Any, ...], junk: Any) -> None:
    spoilt = copy.deepcopy(reply())
    holder: Any = spoilt
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = junk
    try:
        answers = answers_to(json.dumps(spoilt).encode(), masks=MASK_BYTES)
    except ProtocolError:
        return
    assert answers.keys() == {1, 2}


@pytest.mark.parametrize("dtype", ["f64", "", "f32", "f16"])
def test_a_mask_of_another_type_than_its_bytes_ends_its_own_sequence(dtype: str) -> None:
    spoilt = reply()
    spoilt["data"]["dtype"] = dtype
    answers = answers_to(json.dumps(spoilt).encode())
    assert all("a mask row has" in str(answer.error) for answer in answers.values())


def test_a_mask_of_the_first_dialect_that_lies_outside() -> None:
    exchange = Dialect1(Peer(masks=4 * VOCAB_SIZE), VOCAB_SIZE)  # type: ignore[arg-type]
    assert exchange._mask(0) is None
    with pytest.raises(ProtocolError, match="outside the shared memory"):
        exchange._mask(1)


@given(st.binary(max_size=20))
def test_bytes_that_are_no_reply(said: bytes) -> None:
    with pytest.raises(ProtocolError):
        answers_to(said)


def test_an_error_that_nobody_expects_reaches_who_waits_for_the_reply() -> None:
    class Broken:
        is_open = True

        def receive(self, timeout: float) -> None:
            raise KeyError("a bug")

    exchange: StepExchange = Broken()  # type: ignore[assignment]
    listener = ReplyReader(exchange)
    listener.expect()
    with pytest.raises(ProtocolError, match="could not be read: KeyError"):
        listener.receive(PATIENCE)
    assert not listener.is_open
    listener.close()


def test_after_such_a_reply_control_recovers(tokenizer: Path, store: Path) -> None:
    config = RuntimeConfig(str(tokenizer), extra_args=("--store", str(store)), json_size=8)
    pool = RuntimePool(config, VOCAB_SIZE)
    try:
        steered = Steered(pool)
        lost = pool.keeper.wait(PATIENCE).process
        real = lost.receive

        def spoil(timeout: float | None, *, side: bool = False) -> bytes | None:
            said = real(timeout, side=side)
            return said if said is None or side else said.replace(b'"beef"', b'"no hex"')

        lost.receive = spoil  # type: ignore[method-assign]
        steered.add("a", guest2([[set_variable("v", "beef"), *sample([65], VOCAB_SIZE)], END]))
        steered.run()
        assert "malformed reply" in str(steered.end("a").error)
        steered.add("b", guest2([sample([66], VOCAB_SIZE), END]))
        steered.run()
        assert steered.tokens("b") == [66] and pool.num_restarts == 1 and lost is not pool.keeper.wait(1).process
    finally:
        pool.shutdown()


# -- the side channel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"", b"{", b'{"$rid": 5}', b"[]", b"\xff\xfe", b'{"$rid": "\xff"}', ValueError("a bug"), ProtocolError("gone")],
    ids=repr,
)
def test_a_side_channel_that_ends_says_so_and_fails_its_calls(said: bytes | Exception) -> None:
    peer, reasons = Peer(), SimpleQueue[str]()
    side = SideChannel(peer, reasons.put).start()  # type: ignore[arg-type]
    call = side.call(protocol.Ping(), replies.Pong)
    peer.said.put(said)
    with pytest.raises(ControllerUnavailable, match="ended during the call"):
        call.result(PATIENCE)
    assert reasons.get(timeout=PATIENCE)
    with pytest.raises(ControllerUnavailable, match="has ended"):
        side.call(protocol.Ping(), replies.Pong).result(0)
    side.close()


def test_a_reply_of_another_type_fails_its_call_alone() -> None:
    peer = Peer()
    side = SideChannel(peer).start()  # type: ignore[arg-type]
    calls = [side.call(protocol.Ping(), replies.Pong) for _ in range(2)]
    for data, request in zip(("no", {"pong": 1}), peer.sent, strict=True):
        peer.said.put(json.dumps({"type": "ok", "data": data, "$rid": request["$rid"]}).encode())
    with pytest.raises(ProtocolError):
        calls[0].result(PATIENCE)
    assert calls[1].result(PATIENCE).pong == 1
    side.close()


def test_a_call_without_a_reply_fails_in_time() -> None:
    peer = Peer(call_timeout=0.01)
    side = SideChannel(peer).start()  # type: ignore[arg-type]
    with pytest.raises(ControllerUnavailable, match=r"no answer within 0\.01 s"):
        side.call(protocol.Ping(), replies.Pong).result(PATIENCE)
    assert not side._pending
    side.close()


@pytest.mark.parametrize("value", ["00", "no hex"])
def test_an_instance_whose_reply_is_spoilt_fails_its_request(value: str) -> None:
    peer = Peer()
    side = SideChannel(peer).start()  # type: ignore[arg-type]
    kept: Any = SimpleNamespace(wait=lambda timeout: SimpleNamespace(side=side, process=peer))
    instances = Instances(RuntimeConfig("none"), kept, InitialOutput(), lambda: None)
    opening = instances.open(Request("a", (1,), controller=WasmController("m")))
    until(lambda: peer.sent)
    stored = [{"WriteVar": {"name": "v", "value": value, "op": "Set"}}]
    data = {"error": "", "result": {"prompt": [7]}, "storage": stored, "logs": "", "micros": 0}
    peer.said.put(json.dumps({"type": "ok", "data": data, "$rid": peer.sent[0]["$rid"]}).encode())
    if value == "00":
        assert opening.result(PATIENCE) == (7,)
    else:
        with pytest.raises(ProtocolError, match="malformed reply"):
            opening.result(PATIENCE)
    instances.close()
    side.close()


# -- the life of a runtime -------------------------------------------------------------------------------------


class Stillborn(SideChannel):
    """The reader of a runtime that dies before its start is complete."""

    def start(self) -> SideChannel:
        self._on_end("it died at once")
        return self


def test_a_runtime_that_dies_before_it_is_known_is_never_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Peer] = []

    def start(config: RuntimeConfig) -> Peer:
        made.append(Peer())
        return made[-1]

    monkeypatch.setattr(supervisor, "RuntimeProcess", start)
    monkeypatch.setattr(supervisor, "BACK_OFF", (0.0, 0.01))
    config = RuntimeConfig("none")
    kept = RuntimeSupervisor(config, VOCAB_SIZE)
    monkeypatch.setattr(supervisor, "SideChannel", Stillborn)
    with pytest.raises(ControllerUnavailable, match="it died at once"):
        RuntimeSupervisor(config, VOCAB_SIZE)
    assert made[-1].is_killed
    first = kept.current
    assert first is not None
    kept.lose(first, "a test")
    until(lambda: len(made) >= 3, "that it is started again")
    with pytest.raises(ControllerError):
        kept.wait(0.0)
    monkeypatch.setattr(supervisor, "SideChannel", SideChannel)
    assert kept.wait(PATIENCE).process is made[-1]  # type: ignore[comparison-overlap]
    kept.close()
    first.close()


def test_a_bug_at_the_start_does_not_end_the_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Peer] = []

    def start(config: RuntimeConfig) -> Peer:
        made.append(Peer())
        if len(made) == 2:
            raise KeyError("a bug")
        return made[-1]

    monkeypatch.setattr(supervisor, "RuntimeProcess", start)
    monkeypatch.setattr(supervisor, "BACK_OFF", (0.0, 0.01))
    kept = RuntimeSupervisor(RuntimeConfig("none"), VOCAB_SIZE)
    first = kept.current
    assert first is not None
    kept.lose(first, "a test")
    assert kept.wait(PATIENCE).process is made[2]  # type: ignore[comparison-overlap]
    kept.close()
    first.close()
