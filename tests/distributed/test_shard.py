"""Tests that a shard answers its router, and refuses invalid requests with a clear error."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from opentelemetry import trace

from bridle.distributed.address import Tls, check_address, listen, open_channel
from bridle.distributed.link import ShardLink, Timings
from bridle.distributed.proto import shard_pb2 as pb
from bridle.distributed.remote_executor import ShardExecutor
from bridle.distributed.shard import SERVICE, Shard, start_shard
from bridle.distributed.trace_context import incoming_context, outgoing_context
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan, StepResult
from bridle.engine.warm_up import warm_up
from bridle.errors import InternalError, InvalidRequest, ProtocolError, ShardUnavailable, UnsupportedFeature
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.distributed.kit import PATIENT, Host, ask, channel_to, hosted
from tests.http.certificates import make_certificate
from tests.waiting import PATIENCE

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def host() -> Iterator[Host]:
    with hosted(ScriptedExecutor(num_blocks=8, block_size=4)) as made:
        yield made


def plan(step: int, **more: Any) -> StepPlan:
    return StepPlan(step, [PlanRow(step, 0, 3, new_tokens=(1, 2, 3), new_blocks=(step,), num_prompt=3)], **more)


def batch(step: int) -> SampleBatch:
    return SampleBatch(step, [SampleRow(step, 0, GREEDY)])


# -- questions ---------------------------------------------------------------------------------------------------


def test_discovery_names_the_shards_of_the_model(host: Host) -> None:
    assert list(ask(host, "Discover", pb.DiscoverRequest(), pb.DiscoverReply).addresses) == [host.address]


def test_info_is_that_of_the_executor(host: Host) -> None:
    executor = host.connect()
    assert executor.info == host.shard.executor.info
    executor.close()


def test_health_is_answered_while_a_step_runs(host: Host) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def stuck(plan: StepPlan) -> None:
        begun.set()
        go_on.wait()

    executor = host.connect(ScriptedExecutor(num_blocks=8, on_forward=stuck))
    executor.forward(plan(1))
    begun.wait()
    health = ask(host, "Health", pb.HealthRequest(), pb.HealthReply)
    assert health.is_taken
    assert health.step_seconds > 0
    go_on.set()
    assert len(executor.sample(batch(1)).tokens) == 1
    executor.close()


def test_warm_up_runs_the_largest_step_and_leaves_nothing(host: Host) -> None:
    found = ask(host, "WarmUp", pb.WarmUpRequest(), pb.WarmUpReply)
    assert (found.num_tokens, found.num_seqs) == (32, 8)  # eight blocks of four tokens
    assert found.seconds >= 0
    assert host.shard.executor.num_mirrors == 0  # type: ignore[attr-defined]


def test_warm_up_waits_for_no_router(host: Host) -> None:
    executor = host.connect()
    with pytest.raises(grpc.RpcError, match="a router is connected"):
        ask(host, "WarmUp", pb.WarmUpRequest(), pb.WarmUpReply)
    executor.close()


@pytest.mark.parametrize("num_blocks", [1, 3, 50])
def test_warm_up_keeps_the_contract(num_blocks: int) -> None:
    executor = ScriptedExecutor(num_blocks=num_blocks, max_num_batched_tokens=40, max_num_seqs=7)
    warm_up(executor)
    assert not executor.violations


# -- the stream --------------------------------------------------------------------------------------------------


def test_a_second_router_is_turned_away(host: Host) -> None:
    executor = host.connect()
    with pytest.raises(ShardUnavailable, match="it serves one at a time"):
        host.connect(start_timeout=0.0)
    executor.close()
    host.wait_free()
    host.connect().close()


def test_what_a_router_leaves_is_forgotten(host: Host) -> None:
    executor = host.connect()
    executor.forward(plan(1))
    executor.sample(batch(1))
    assert host.shard.executor.num_mirrors == 1  # type: ignore[attr-defined]
    executor.close()
    host.wait_free()
    assert host.shard.executor.num_mirrors == 0  # type: ignore[attr-defined]


def test_a_fault_of_a_step_keeps_its_kind_and_the_stream(host: Host) -> None:
    fault = UnsupportedFeature("no adapters", "adapter")
    executor = host.connect(ScriptedExecutor(num_blocks=8, faults={0: fault}))
    executor.forward(plan(1))
    with pytest.raises(UnsupportedFeature, match="no adapters"):
        executor.sample(batch(1))
    executor.reset()
    executor.forward(plan(2))
    assert executor.sample(batch(2)).step == 2
    assert executor.num_losses == 0
    executor.close()


def test_replies_that_nobody_waits_for_are_dropped(host: Host) -> None:
    executor = host.connect()
    executor.forward(plan(1))
    link = executor.used
    assert link is not None
    link.send(pb.StepRequest(batch=pb.Batch(step=1)))  # asked, and then given up
    executor.reset()
    executor.forward(plan(2))
    assert executor.sample(batch(2)).step == 2
    executor.close()


def test_a_message_over_the_limit_fails_its_step_only(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = host.connect()
    monkeypatch.setattr("bridle.distributed.link.MAX_MESSAGE_BYTES", 30)
    with pytest.raises(InternalError, match="bytes; at most 30"):
        executor.forward(plan(1))
    monkeypatch.undo()
    executor.reset()
    executor.forward(plan(2))
    assert executor.sample(batch(2)).step == 2
    executor.close()


@pytest.mark.parametrize("data", [b"\xff\xff", b""])
def test_garbage_ends_the_stream_with_a_sentence(host: Host, data: bytes) -> None:
    with channel_to(host) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Steps")(iter([data]))
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_columns_that_do_not_fit_fail_the_step(host: Host) -> None:
    executor = host.connect()
    executor.forward(plan(1))
    link = executor.used
    assert link is not None
    link.send(pb.StepRequest(plan=pb.Plan(step=2, seq_ids=[1])))
    with pytest.raises(ProtocolError, match="a list in the message has 0 entries"):
        executor.sample(SampleBatch(2))
    executor.close()


def test_an_answer_that_does_not_fit_fails_its_step_only(host: Host) -> None:
    class Silent(ScriptedExecutor):
        def sample(self, batch: SampleBatch) -> StepResult:
            result = super().sample(batch)
            return StepResult(batch.step) if batch.step == 1 else result

    executor = host.connect(Silent(num_blocks=8))
    executor.forward(plan(1))
    with pytest.raises(ProtocolError, match="has 0 entries for 1 batch rows"):
        executor.sample(batch(1))
    executor.reset()
    executor.forward(plan(2))
    assert len(executor.sample(batch(2)).tokens) == 1
    executor.close()


def test_a_shard_that_does_not_come_back_is_told_of_again(host: Host) -> None:
    told: SimpleQueue[tuple[int | None, str]] = SimpleQueue()
    executor = host.connect(start_timeout=0.05, on_loss=lambda pid, reason: told.put((pid, reason)))
    host.stop()
    assert told.get(timeout=PATIENCE)[0] == os.getpid()
    for _ in range(2):
        pid, reason = told.get(timeout=PATIENCE)
        assert pid is None
        assert "has not come back for" in reason
    executor.close()


# -- vectors -----------------------------------------------------------------------------------------------------


def embedding_host() -> contextlib.AbstractContextManager[Host]:
    return hosted(ScriptedExecutor(num_blocks=8, embedding_size=5))


def test_vectors_come_in_as_many_messages_as_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with embedding_host() as host:
        executor = host.connect()
        executor.forward(three_rows(1))
        executor.sample(SampleBatch(1))
        whole = executor.embed(1, [0, 1, 2])
        monkeypatch.setattr("bridle.distributed.remote_executor.MAX_NUMBERS", 10)
        assert executor.embed(1, [0, 1, 2]) == whole
        assert executor.embed(1, [2]) == whole[2:] and len({tuple(vector) for vector in whole}) == 3
        assert host.shard.num_steps == 1
        executor.close()


def three_rows(step: int) -> StepPlan:
    return StepPlan(step, [PlanRow(step, 0, 3, 3, new_tokens=(1, 2, 3), new_blocks=(step,), num_prompt=3)])


def test_more_vectors_than_a_message_holds_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.distributed.codec.embeddings.MAX_NUMBERS", 10)
    with embedding_host() as host:
        executor = host.connect()
        executor.forward(plan(1))
        executor.sample(batch(1))
        with pytest.raises(ProtocolError, match="3 embeddings of 5 values; at most 10 values"):
            executor.embed(1, [0, 0, 0])
        assert len(executor.embed(1, [0])) == 1  # the stream goes on
        executor.close()


def test_what_cannot_be_embedded_is_told() -> None:
    with embedding_host() as host:
        executor = host.connect()
        with pytest.raises(InternalError, match="had no forward pass"):
            executor.embed(1, [0])
        executor.forward(plan(1))
        executor.sample(batch(1))
        with pytest.raises(InternalError, match="logits row 7 of 1"):
            executor.embed(1, [7])
        executor.close()


def test_a_shard_that_gives_no_vectors_says_so(host: Host) -> None:
    """The shard refuses a request for embeddings, and reports an embedding size of 0."""
    executor = host.connect()
    assert executor.info.embedding_size == 0
    executor.forward(plan(1))
    with pytest.raises(UnsupportedFeature, match="computes no embeddings"):
        executor.embed(1, [0])
    executor.close()


def test_a_lost_device_is_told_to_the_process() -> None:
    losses: list[ShardUnavailable] = []
    with hosted(ScriptedExecutor(num_blocks=8, faults={0: ShardUnavailable("sticky error")})) as host:
        host.shard.on_device_lost = losses.append
        executor = host.connect()
        executor.forward(plan(1))
        with pytest.raises(ShardUnavailable, match="sticky error"):
            executor.sample(batch(1))
        executor.close()
    assert [str(loss) for loss in losses] == ["sticky error"]


def test_a_shard_without_its_device_is_used_no_more() -> None:
    """If a router used the ending process, each step would fail, and a request that runs alone in three failures in a
    row would end."""
    with hosted(ScriptedExecutor(num_blocks=8, faults={0: ShardUnavailable("sticky error")})) as host:
        host.shard.on_device_lost = lambda error: None
        executor = host.connect()
        executor.forward(plan(1))
        with pytest.raises(ShardUnavailable, match="sticky error"):
            executor.sample(batch(1))
        assert not executor.is_up
        executor.reset()
        with pytest.raises(ShardUnavailable):
            executor.forward(plan(2))
        executor.close()
        host.wait_free()
        with pytest.raises(ShardUnavailable, match="has lost its device"):
            host.connect(start_timeout=0.0)


def test_a_shard_of_another_protocol_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.distributed.shard.PROTOCOL", 77)
    with pytest.raises(ProtocolError, match="speaks protocol 77"):
        host.connect()


# -- where it listens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["", "unix:", "localhost", "localhost:", ":1", "host:70000", "host:x"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(InvalidRequest, match="must be unix:"):
        check_address(address)


def test_only_loopback_without_tls() -> None:
    with pytest.raises(InvalidRequest, match="other machines can reach"):
        listen(grpc.server(None), "0.0.0.0:0")


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InvalidRequest, match="cannot listen on"):
            start_shard(Shard(ScriptedExecutor()), address)


def test_the_socket_is_the_owners_alone(host: Host) -> None:
    assert Path(host.address.removeprefix("unix:")).stat().st_mode & 0o077 == 0


def test_tls_on_both_sides(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    both = Tls(certificate, key, certificate)
    server, address = start_shard(Shard(ScriptedExecutor()), "localhost:0", both)
    try:
        ShardExecutor(address, tls=both, timings=PATIENT).close()
        with pytest.raises(ShardUnavailable):
            ShardLink(address, Tls(authority=certificate), Timings(connect=5.0))  # shows no certificate of its own
        with pytest.raises(ShardUnavailable):
            ShardLink(address, None, Timings(connect=5.0))
    finally:
        server.stop(0).wait()


# -- traces ------------------------------------------------------------------------------------------------------


def test_trace_context_crosses_the_stream(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    parent = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(parent)), caplog.at_level("INFO", "bridle.distributed.shard"):
        assert dict(outgoing_context())["traceparent"].startswith(f"00-{0xABC:032x}-{0xDEF:016x}")
        executor = host.connect()
        executor.close()
        host.wait_free()
    assert f"{0xABC:032x}" in caplog.text


def test_malformed_trace_context_is_ignored() -> None:
    assert incoming_context([("traceparent", "no"), ("tracestate", "a=b")]) == {}
    good = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    assert incoming_context([("traceparent", good), ("x", "y")]) == {"traceparent": good}
    assert outgoing_context() == ()


def test_channels_refuse_no_addresses() -> None:
    with pytest.raises(InvalidRequest):
        open_channel("nowhere")
