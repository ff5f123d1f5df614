"""Control vectors of models in other processes: their effects and the values of probes are the same as in one
process."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import pytest

from bridle import LLM, Controller, Decision
from bridle.config import EngineConfig, ModelConfig
from bridle.control_vectors import ControlVectors, write_vector
from bridle.distributed.group import GroupExecutor, Members, follow
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.replica_messages import encode, read_by_replica
from bridle.distributed.replica_vectors import PutVector, RemoveVector, ReplicatedVectors, RouterVectors, VectorMessage
from bridle.errors import UnknownControlVector, UnsupportedFeature
from bridle.launch.launcher import LaunchedShard, shard_arguments
from bridle.launch.replicas import LaunchedReplicas, load_replicated
from bridle.model import load_executor
from bridle.serving import load_model
from tests.control_vectors.kit import directions, plan_of, put, span
from tests.distributed.kit import hosted
from tests.fakes import tiny_checkpoints

DEMO = ModelConfig("demo", num_blocks=64, warm_up=False, num_threads=1)
ENGINE = EngineConfig(allow_probes=True)
PROMPT = "Once upon a time there was"


class Fade(Controller):
    """Lowers the scale with each token, and logs the values of its probes."""

    def next(self, view: Any) -> Decision:
        for name, value in view.probes.items():
            view.log(f"{name} {value!r}")
        return Decision.sample(control_vectors={"a": 2.0 / (1 + len(view.generated))})


def generate(llm: LLM, **given: Any) -> Any:
    fixed = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "use_tqdm": False}
    return llm.generate(PROMPT, **fixed, **given)[0].outputs[0]


def texts(llm: LLM) -> list[list[int]]:
    """Return outputs with vectors in several scales, and with one that was replaced."""
    store = llm.model.require_control_vectors()
    store.put("a", directions(6, 256, 1))
    store.put("b", directions(6, 256, 2))
    found = [list(generate(llm, control_vectors=each).token_ids) for each in ({}, {"a": 1.0}, {"a": -0.5, "b": 1.0})]
    store.put("a", directions(6, 256, 3))
    return [*found, list(generate(llm, control_vectors={"a": 1.0}).token_ids)]


def readings(llm: LLM) -> tuple[list[int], list[str]]:
    """Return an output whose controller changes scales, and what the controller has logged."""
    output = generate(llm, controller=Fade(), control_vectors={"a": 0.0}, probes=["a", "b@2"])
    assert output.error is None
    return list(output.token_ids), output.logs.split()


@pytest.fixture(scope="module")
def expected() -> Iterator[tuple[list[list[int]], tuple[list[int], list[str]]]]:
    with LLM(load_model(DEMO, ENGINE)) as llm:
        found = texts(llm)
        assert len({tuple(each) for each in found}) == 4
        yield found, readings(llm)


def test_a_shard_adds_and_reads_the_same(expected: Any) -> None:
    """The shard gives the same bits, also after it was lost and restarted. The shard keeps no vector that is no longer
    used."""
    behind = load_executor(DEMO)
    with hosted(behind) as host:
        there = host.connect()
        with LLM(load_model(DEMO, ENGINE, executors=lambda *_: there)) as llm:
            assert (texts(llm), readings(llm)) == expected
            store = llm.model.require_control_vectors()
            old = store.open(["a"])["a"]
            assert old in behind.control_vectors
            store.leave([old])
            assert there.link is not None
            there.link.cut("a test")
            host.wait_free()
            assert (texts(llm), readings(llm)) == expected
            store.remove("a")
            generate(llm)
            assert old not in behind.control_vectors and store.open(["b"])["b"] in behind.control_vectors
            with pytest.raises(UnknownControlVector):
                generate(llm, control_vectors={"a": 1.0})
            with pytest.raises(UnsupportedFeature, match="runs in other processes"):
                llm.make_control_vector([("a", "b")], "unused.gguf")


class Wire:
    """Fake group members that keep the messages that are sent to them."""

    def __init__(self) -> None:
        self.frames = b""
        self.kinds: list[str] = []

    def broadcast(self, request: pb.StepRequest) -> None:
        data = request.SerializeToString()
        self.frames += struct.pack(">I", len(data)) + data
        self.kinds.append(str(request.WhichOneof("kind")))

    def close(self) -> None: ...


def tiny() -> Any:
    path = tiny_checkpoints.cached_checkpoint("llama", head_dim=16, hidden_size=64)
    return load_executor(ModelConfig(str(path), num_blocks=40, block_size=4))


def test_ranks_get_the_vectors_that_plans_name() -> None:
    """Each vector is sent once, before the plan that names it; vectors that rank 0 has dropped are dropped by all
    ranks. The other rank computes the same logits from these messages."""
    first, second, wire = tiny(), tiny(), Wire()
    group = GroupExecutor(first, cast(Members, wire))
    keys = put(first, a=0.5, b=0.5)
    steered, plain = (list(range(5, 13)), [span(8, keys, a=1.0)]), (list(range(5, 13)), [])

    def compute(*rows: Any) -> list[str]:
        """Compute a step on both ranks; return the kinds of messages that the second rank was sent."""
        wire.frames, wire.kinds = b"", []
        group.reset()
        group.forward(plan_of(rows))
        assert follow(second, BytesIO(wire.frames)) == 0
        assert first.logits.equal(second.logits)
        return wire.kinds

    assert compute(steered, plain) == ["reset", "control_vector", "plan"]
    assert not first.logits[:8].equal(first.logits[8:])
    assert compute(steered) == ["reset", "plan"]
    assert keys["a"] in second.control_vectors and keys["b"] not in second.control_vectors
    first.control_vectors.leave(keys.values())
    first.control_vectors.remove("a")
    assert compute(plain) == ["reset", "control_vector", "plan"]
    assert keys["a"] not in second.control_vectors


@pytest.mark.slow
def test_two_ranks_add_and_read_the_same(expected: Any) -> None:
    """The last digits of probe values may differ, because the ranks' partial sums are added in another order."""
    command = [sys.executable, "-m", "bridle", "shard", *shard_arguments(DEMO), "--shards", "2"]
    there = LaunchedShard(command, name="group of two")
    with LLM(load_model(DEMO, ENGINE, executors=lambda *_: there)) as llm:
        assert texts(llm) == expected[0]
        tokens, logged = readings(llm)
    assert tokens == expected[1][0] and logged[::2] == expected[1][1][::2]
    assert [float(value) for value in logged[1::2]] == pytest.approx(
        [float(value) for value in expected[1][1][1::2]], rel=1e-3, abs=1e-3
    )


# -- replicas ----------------------------------------------------------------------------------------------------


class Wires:
    """Two replicas without sockets, whose messages are still encoded and decoded."""

    def __init__(self) -> None:
        self.stores = [ControlVectors(3, 8) for _ in range(2)]
        self.ends = [RouterVectors(store) for store in self.stores]
        self.router = ReplicatedVectors((3, 8), self.send)

    def send(self, number: int, message: VectorMessage) -> None:
        decoded = read_by_replica(encode(message))
        assert isinstance(decoded, PutVector | RemoveVector) and decoded == message
        self.ends[number].handle(decoded)

    def names(self) -> list[list[str]]:
        return [[info.name for info in store.list()] for store in self.stores]


def test_replicas_have_the_vectors_of_the_router() -> None:
    wires = Wires()
    wires.router.put("a", directions(3, 8, 1), "a.gguf")
    wires.router.note_up(0)
    wires.router.put("b", directions(3, 8, 2))
    assert wires.names() == [["a", "b"], []]
    wires.router.note_up(1)
    wires.router.put("a", directions(3, 8, 3), "new.gguf")
    wires.router.remove("b")
    assert wires.names() == [["a"], ["a"]]
    for store in wires.stores:
        assert store.get("a") == wires.router.get("a") and store.get("a").source == "new.gguf"
        assert all(store.directions("a")[layer].equal(directions(3, 8, 3)[layer]) for layer in (1, 2))
    wires.router.note_lost(1)
    wires.router.remove("a")
    assert wires.names() == [[], ["a"]]
    wires.ends[1].close()  # its router has left
    assert wires.names() == [[], []]


@pytest.mark.slow
def test_replicas_add_the_same(expected: Any, tmp_path: Path) -> None:
    """The vectors of the flag and later ones are on each replica, also on a replica that was started again."""
    write_vector(tmp_path / "c.gguf", directions(6, 256, 3), "llama")
    config = ModelConfig("demo", num_blocks=64, num_threads=1, control_vectors=(f"c={tmp_path / 'c.gguf'}",))
    model = load_replicated(config, ENGINE, 2)
    with LLM(model) as llm:
        assert isinstance(model.client, LaunchedReplicas)
        assert texts(llm) == expected[0]
        assert list(generate(llm, control_vectors={"c": 1.0}).token_ids) == expected[0][3]
        with pytest.raises(UnknownControlVector, match="known are 'c', 'a', 'b'"):
            generate(llm, control_vectors={"nobody": 1.0})
        assert [info.num_users for info in llm.control_vectors] == [0, 0, 0]
        for child in model.client.children:
            child.kill()
        assert list(generate(llm, control_vectors={"a": 1.0}).token_ids) == expected[0][3]
