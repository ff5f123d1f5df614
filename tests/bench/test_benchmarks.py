"""Small runs of the benchmarks of `dev`: what they send, count and compare. Times are never asserted."""

from __future__ import annotations

import asyncio
import io
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from bridle.bench import BenchSettings
from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.run import measured
from bridle.bench.sse_client import ServerTarget
from bridle.cli.options import EngineOptions
from bridle.cli.serve import ServerOptions
from bridle.config import EngineConfig
from bridle.engine import Engine
from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepPlan
from bridle.errors import InternalError, InvalidRequest
from bridle.lmtp.server import websocket_front
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from dev.bench import agents, agents_peer, embeddings, images, prefill
from dev.bench.batching import Arrival, _find_capacity, as_they_come, in_batches, make_arrivals, variants
from dev.bench.constraints import MaskedExecutor, _answers, _p50_p99, _steps, cases, made_up_vocabulary
from dev.bench.constraints_model import beside_free
from dev.bench.grpc_echo import measure_echo
from dev.bench.lmql import lmql_python
from dev.bench.lmtp import LmtpFigure, LmtpWorkload, Load, compare
from dev.bench.prefill import POLICIES, best, choose, run_load
from dev.bench.shard import Decoding, _compare
from dev.bench.steps import NotedExecutor, fastest, run_batch
from dev.simulation.cost import StepSize
from tests.distributed.kit import hosted
from tests.engine.support import make_request
from tests.http.harness import NAME, scripted_model, served


@pytest.mark.slow
def test_parked_kv_computes_a_block_a_call_again_and_the_inside_nothing() -> None:
    console = Console(file=io.StringIO(), width=160)
    report, _ = measured(agents, BenchSettings(quick=True), console)
    twice = {(each["cache"], each["way"]): each["computed_twice"] for each in report["figures"]}
    num_calls = report["agents"] * report["calls"]
    for cache in ("large", "scarce"):
        assert twice[cache, "inside the engine"] == 0
        assert 0 <= twice[cache, "client, parked KV"] <= 16 * num_calls
        assert twice[cache, "client, no cache"] > 96 * num_calls
    if agents_peer.is_there():
        assert twice["large", agents_peer.NAME] == 0
        assert 0 < twice["scarce", agents_peer.NAME] < twice["scarce", "client, no cache"]
    assert {each["park_hits"] for each in report["figures"] if each["way"] == "client, parked KV"} == {num_calls}
    assert "3 agents of 2 calls over 96 tokens" in console.file.getvalue()  # type: ignore[attr-defined]


def arrivals_at(*times: float) -> list[Arrival]:
    return [Arrival(at, (5, 6, 7), 3) for at in times]


def target_of(url: str) -> ServerTarget:
    host, _, port = url.removeprefix("http://").partition(":")
    return ServerTarget(host, int(port))


def test_arrivals_are_mixed_in_order_and_the_same_again() -> None:
    arrivals = make_arrivals(40, 500)
    assert arrivals == make_arrivals(40, 500) != make_arrivals(40, 500, seed=1)
    assert [each.at for each in arrivals] == sorted(each.at for each in arrivals)
    lengths = [len(each.prompt) for each in arrivals]
    assert min(lengths) < 64 and max(lengths) > 256
    assert all(0 <= token < 500 for each in arrivals for token in each.prompt)


def test_batches_wait_for_their_last_member_and_for_each_other() -> None:
    with served(scripted_model(next_token=lambda prefix: 70 + len(prefix) % 20)) as url:
        target = target_of(url)
        alone = asyncio.run(as_they_come(target, arrivals_at(0.0, 0.01, 0.02)))
        batched = asyncio.run(in_batches(target, arrivals_at(0.0, 0.02, 0.02, 0.02, 0.03), size=2))
    assert all(each.is_complete and each.num_tokens == 3 for each in alone + batched)
    first, second, third = batched[:2], batched[2:4], batched[4:]
    assert first[0].event_times[0] > first[1].sent  # the first one waits for the second to arrive
    for before, after in ((first, second), (second, third)):
        assert max(each.ended for each in before) <= min(each.event_times[0] for each in after)


def test_what_can_be_borne_is_counted() -> None:
    with served(scripted_model(next_token=lambda prefix: 70)) as url:
        server = type("Server", (), {"target": target_of(url)})
        assert asyncio.run(_find_capacity(server, arrivals_at(0, 0, 0))) > 0  # type: ignore[arg-type]


def test_every_flag_exists() -> None:
    """Check that each flag of a benchmark exists: a misspelt flag would only show when the server is started."""
    known = {
        f"--{name.replace('_', '-')}" for kind in (EngineOptions, ServerOptions) for name in kind.__dataclass_fields__
    }
    known |= {"--max-batch-size", "--max-concurrent-requests", "--no-chunked-prefill"}
    found = variants(4)
    assert {flag for each in found for flag in each.flags if flag.startswith("--")} <= known
    assert isinstance(found[2].deliver, partial) and found[2].deliver.keywords == {"size": 4}


def test_vocabularies_are_as_large_as_they_should_be() -> None:
    vocabulary = made_up_vocabulary(3000)
    assert vocabulary.size == len(set(vocabulary.tokens)) == 3000
    assert vocabulary.eos == (2999,)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", cases())
def test_every_text_fits_its_constraint(kind: str) -> None:
    figures = _answers(made_up_vocabulary(3000), cases()[kind], 1)
    assert figures["tokens"] > 1
    assert 0 <= figures["forced_share"] < 1


def test_steps_are_compared_with_free_ones() -> None:
    figures = _steps(made_up_vocabulary(3000), 2, 15, 1)
    assert figures["free"]["added_share"] == 0
    assert set(figures) == {"free", "regex", "JSON schema", "Lark, C-like"}


def test_the_device_draws_what_the_mask_allows() -> None:
    executor = MaskedExecutor(2, 3000)
    executor.forward(StepPlan(1))
    rows = [SampleRow(0, i, SamplingParams(), mask=mask_of([7 * i + 5], 3000)) for i in range(2)]
    assert executor.sample(SampleBatch(1, rows)).tokens == [5, 12]
    assert executor.drawing > 0


@pytest.mark.slow
def test_requests_are_compared_on_a_model(tmp_path: Path) -> None:
    settings = BenchSettings(quick=True, batches=(2,), threads=1)
    text, records = beside_free(tmp_path, settings, made_up_vocabulary)
    assert text["requests"] == records["requests"] == 2 and text["free_tokens_per_second"] > 0
    assert text["forced_share"] == 0 and text["all_share"] == text["sampled_share"] > 0
    assert 0 < records["forced_share"] < 1 and records["ceiling"] > 1
    assert records["all_share"] > records["sampled_share"] > 0


def test_quantiles_are_in_microseconds() -> None:
    assert _p50_p99([1e-6]) == pytest.approx((1, 1))
    assert _p50_p99([1e-6 * n for n in range(101)]) == pytest.approx((50, 99))
    assert _p50_p99([]) == (0, 0)


def test_peers_give_the_same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "SHAPES", {"mini": (1, 32, 2)})
    monkeypatch.setattr(embeddings, "make_texts", lambda count: [[1_000 + n] * (3 + n % 5) for n in range(12)])
    console = Console(file=io.StringIO(), width=120)
    report, _ = measured(embeddings, BenchSettings(quick=True, batches=(5,)), console)
    figures = report["figures"]
    assert [each["peer"] for each in figures] == ["padded, 5 at once", "padded, 5 at once, sorted", "bridle"]
    assert figures[0]["padding"] > figures[1]["padding"] > figures[2]["padding"] == 0.0
    assert "BERT mini: 12 texts of 5 tokens" in console.file.getvalue()  # type: ignore[attr-defined]


def test_padding_is_what_no_text_needs() -> None:
    assert embeddings.padding([[1] * 4, [1] * 2], 2) == pytest.approx(0.25)
    assert embeddings.padding([[1] * 4, [1] * 2], 1) == 0.0
    assert embeddings.make_texts(8) == embeddings.make_texts(8)


def test_other_vectors_are_no_figure() -> None:
    with pytest.raises(InternalError, match=r"differ by up to 0\.5"):
        embeddings.check_same("x", [[0.5]], [[1.0]])


def test_peers_say_the_same_and_a_picture_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "SHAPES", {"quick": (2, 32, 2, 32, 28)})
    monkeypatch.setattr(images, "_COUNTS", (0, 2))
    console = Console(file=io.StringIO(), width=120)
    report, _ = measured(images, BenchSettings(quick=True), console)
    assert [(each["pictures"], each["peer"]) for each in report["prompts"]] == [
        (0, "bridle"),
        (0, "transformers"),
        (2, "bridle"),
        (2, "transformers"),
    ]
    assert {each["prompt_tokens"] for each in report["prompts"]} == {25, 25 + 2 * 4}
    assert report["chat"]["num_encoded"] == 1
    assert {len(times) for times in report["chat"]["first_token_seconds"].values()} == {report["chat"]["turns"]} == {3}
    neighbours = report["neighbours"]
    assert neighbours["ratio"] > 0 and neighbours["processor_ratio"] > 0 and neighbours["picture_share"] > 0
    assert neighbours["pairs"] == 12
    assert "encoded 1 time." in console.file.getvalue()  # type: ignore[attr-defined]


def test_peers_that_say_something_else_are_found() -> None:
    one, other = images.ImageRun(1, 1, 1, (5, 6)), images.ImageRun(1, 1, 1, (6, 6))
    assert images._same([one, one], [one, other]) == 0.5
    with pytest.raises(InternalError, match="begin 0% of their answers alike"):
        images._same([one], [other])


def test_both_policies_compute_the_same_tokens_and_one_is_sooner() -> None:
    config = EngineConfig(max_batch_prefill_tokens=16, enable_prefix_caching=False)
    engine = Engine(ScriptedExecutor(num_blocks=200, block_size=4), config)
    arrivals = [
        prefill.Arrival(0, make_request([1] * 320, max_tokens=1)),
        prefill.Arrival(2, make_request([2] * 8, max_tokens=2, ignore_eos=True)),
    ]
    found = {}
    for policy in POLICIES:
        choose(engine, policy)
        found[policy] = best([run_load(engine, arrivals) for _ in range(2)])
    old, new = found["oldest first"], found["shared"]
    assert (old.first_steps, new.first_steps) == (19, 1)
    assert old.tokens == new.tokens == 320 + 8 + 1
    assert 0 < old.first_seconds <= old.seconds
    engine.close()


def make_executor() -> ScriptedExecutor:
    return ScriptedExecutor(vocab_size=64, num_blocks=200, block_size=16, record=True)


@pytest.mark.parametrize("is_masked", [False, True])
def test_steps_keep_the_contract(is_masked: bool) -> None:
    executor = make_executor()
    decoding = Decoding(executor, 3, is_masked)
    for _ in range(40):
        decoding.step()
    assert not executor.violations
    assert {row.mask is not None for batch in executor.batches for row in batch.rows} == {is_masked}


def test_here_and_there_are_compared() -> None:
    there = make_executor()
    with hosted(there) as host:
        remote = host.connect()
        figures = _compare(Decoding(make_executor(), 2, True), Decoding(remote, 2, True), num_steps=3)
        remote.close()
    assert set(figures) == {"local_milliseconds", "shard_milliseconds", "overhead_milliseconds"}
    assert not there.violations


def test_grpc_is_timed_by_itself() -> None:
    assert measure_echo(3) > 0


def test_every_step_is_noted_with_its_size() -> None:
    executor = NotedExecutor(ScriptedExecutor(num_blocks=64, block_size=4))
    engine = Engine(executor)
    steps = run_batch(engine, executor, [(1, 2, 3), (4, 5)], 3)
    assert [size for size, _ in steps] == [StepSize(2, 5, 5), StepSize(2, 2, 7), StepSize(2, 2, 9)]
    assert all(seconds > 0 for _, seconds in steps)
    engine.close()


def test_what_disturbs_a_step_is_left_out() -> None:
    one, other = StepSize(1, 1, 1), StepSize(2, 2, 2)
    assert fastest([[(one, 1.0), (other, 5.0)], [(one, 2.0), (other, 3.0)]]) == [(one, 1.0), (other, 3.0)]


def figure(server: str, speed: float, scores: float, outputs: list[list[int]]) -> LmtpFigure:
    return LmtpFigure("small", server, 2, speed, 0.1, 0.2, scores, outputs)


def test_ratios_are_beside_the_real_server() -> None:
    figures = [figure("lmql", 10.0, 4.0, [[1], [2]]), figure("bridle", 50.0, 2.0, [[1], [3]])]
    compare(figures)
    assert [each.ratio for each in figures] == [1.0, 5.0]
    assert [each.score_ratio for each in figures] == [1.0, 0.5]
    assert [each.same for each in figures] == [1.0, 0.5]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(InvalidRequest, match="no virtual environment"):
        lmql_python(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


async def test_queries_use_what_they_ask_for_and_repeat_themselves() -> None:
    workload = LmtpWorkload(num_shared=16, num_rounds=3, num_bursts=1)
    with served(scripted_model(), fronts=[websocket_front()]) as url:
        checkpoint = BenchCheckpoint("small", Path(NAME), vocab_size=200, num_parameters=1, step_bytes=1, token_bytes=1)
        loads = [Load(url, checkpoint, workload, 2) for _ in range(2)]
        first, second = [await load.run("bridle") for load in loads]
    assert first.outputs == second.outputs
    assert len(first.outputs) == 2 and all(3 <= len(output) <= 24 for output in first.outputs)
    assert first.tokens_per_second > 0 and first.scores_per_second > 0 and first.first_token_p95 > 0
