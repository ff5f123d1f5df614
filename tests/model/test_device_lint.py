"""Tests of a step's launches, uploads and waits, counted without a device.

A launch costs the host microseconds. An upload from pageable memory and a wait last until the device has done all
earlier work. A failure names the lines that caused too many operations."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bridle.engine.control.decision import mask_of
from bridle.engine.interfaces import ExecutorInfo
from bridle.engine.scheduling.step_plan import (
    BlockCopy,
    PlanRow,
    SampleBatch,
    SampleRow,
    ScoreRun,
    StepPlan,
    placeholder_for_row,
)
from bridle.engine.warm_up import run_largest_step
from bridle.load_progress import silent
from bridle.lora.adapter_kernel import TriedKernel
from bridle.lora.fused import FusedKernel
from bridle.lora.layout import make_layout
from bridle.lora.peft_config import LoraShape
from bridle.lora.weights import PlacedAdapter
from bridle.model import dense_layer, dense_model, rope, support_checks
from bridle.model.adapters import ModelAdapters
from bridle.model.attention import PagedAttention
from bridle.model.block_copies import BlockCopier, find_problem
from bridle.model.checkpoint import inspect_checkpoint
from bridle.model.device_sampler import DeviceSampler
from bridle.model.executor import LocalExecutor
from bridle.model.float8 import Float8Linear
from bridle.model.fused_step import FusedStep
from bridle.model.geometry import discover_geometry
from bridle.model.graph_kinds import GraphKind
from bridle.model.graphs import StepGraphs
from bridle.model.kernels.paged import PagedKernel
from bridle.model.kv_cache import KVCache
from bridle.model.linear import replace_linears
from bridle.model.loader import lower_model, read_model
from bridle.model.lora_layers import Sites
from bridle.model.recorder import Work
from bridle.model.runner import ModelRunner
from bridle.model.sampler import StandardSampler
from bridle.model.sampler_self_test import trial_rows
from bridle.model.sequence_state import CachedRequestState
from bridle.sampling import SamplingParams
from tests.fakes import tiny_checkpoints
from tests.model.device_trace import META, Counted, DeviceTrace, LaunchKeys, traced
from tests.sources import ROOT

CPU = torch.device("cpu")
MODEL = ROOT / "bridle" / "model"
BLOCK = 4
VOCAB = 300


def _agree(want: torch.Tensor, have: torch.Tensor) -> bool:
    """Return whether shapes are equal, since meta tensors have no values; other tests compare the values of layers."""
    return want.shape == have.shape


class Trial:
    """An executor over a model on torch's device `meta`, whose layers and sampler are fused or plain torch."""

    def __init__(
        self,
        family: str,
        dtype: torch.dtype = torch.bfloat16,
        *,
        is_fused: bool = True,
        is_plain: bool = False,
        is_float8: bool = False,
    ) -> None:
        checkpoint = inspect_checkpoint(tiny_checkpoints.cached_checkpoint(family))
        settings = support_checks.read_config(checkpoint)
        model = read_model(checkpoint, settings, dtype, CPU)
        geometry = discover_geometry(model, settings.num_hidden_layers, CPU)
        self.num_layers, self.geometry = len(geometry.layers), geometry
        self.kernel, self.copier = PagedKernel(META), BlockCopier(META)
        model = model.to(META)
        if is_float8:
            head = model.get_output_embeddings()
            replace_linears(model, lambda linear: linear is not head, Float8Linear.from_float)
        with patch.object(dense_layer, "is_close", _agree), patch.object(dense_model, "is_close", _agree):
            lower_model(model, geometry)
            cache = KVCache(geometry, 64, BLOCK, dtype, META)
            runner = ModelRunner(model, PagedAttention(cache, self.kernel))
        short = runner.lowered
        assert short is not None
        self.fused = FusedStep(short.layers, short.norm, META)
        if is_fused:
            short.fused = self.fused
            with patch.object(rope, "are_halved", lambda turns: True):  # there are no numbers to compare
                runner.keep_angles(200)
        info = ExecutorInfo(family, geometry.vocab_size, 200, 64, BLOCK)
        self.sampler = DeviceSampler(META)
        sampler = StandardSampler() if is_plain else self.sampler
        self.executor = LocalExecutor(info, runner, sampler, geometry.vocab_size, META)
        self._step = 0
        self.keys: LaunchKeys | None = None  # of what is launched

    def forward(self, rows: list[PlanRow], copies: list[BlockCopy] | None = None) -> DeviceTrace:
        self._step += 1
        with self.traced() as trace:
            self.executor.forward(StepPlan(self._step, rows, copies=copies or []))
        return trace

    def sample(self, rows: list[SampleRow]) -> DeviceTrace:
        with self.traced() as trace:
            self.executor.sample(SampleBatch(self._step, rows))
        return trace

    def draw(self, rows: list[SampleRow]) -> DeviceTrace:
        """Sample for rows without reading the result; return the trace."""
        logits = self.executor.logits
        with self.traced() as trace:
            self.sampler.draw(logits, SampleBatch(self._step, rows), self.executor.history)
        return trace

    @contextmanager
    def traced(self) -> Iterator[DeviceTrace]:
        with traced() as trace:
            self.trace, counted = trace, Counted(trace, self.keys)
            for each in (self.kernel, self.fused, self.sampler.drawer, self.copier):
                each.__dict__["kernels"] = counted
            yield trace


def prompt(seq_id: int, length: int, first_block: int = 0) -> PlanRow:
    blocks = tuple(range(first_block, first_block - (-length // BLOCK)))
    return PlanRow(seq_id, 0, length, new_tokens=(5,) * length, new_blocks=blocks, num_prompt=length)


def decoded(trial: Trial, num_seqs: int) -> DeviceTrace:
    """Return the trace of a decode step after the prompts of `num_seqs` sequences."""
    trial.forward([prompt(n, 3, n) for n in range(num_seqs)])
    rows = [
        PlanRow(n, 3, 1, num_kept=3, new_tokens=(7,), num_kept_blocks=1, num_prompt=3, num_logits=1)
        for n in range(num_seqs)
    ]
    return trial.forward(rows)


# -- a step ------------------------------------------------------------------------------------------------------

#: Launches of a decode step: of each layer, and around the layers.
FORWARD = {"llama": (10, 4), "qwen3": (10, 4), "mistral": (10, 4), "gemma2": (10, 8)}
#: Without the kernels of lean layers.
PLAIN = {"llama": (33, 16), "qwen3": (40, 19), "mistral": (33, 16), "gemma2": (68, 20)}


@pytest.mark.parametrize("family", sorted(FORWARD))
def test_a_decode_step_is_one_upload_and_no_wait(family: str) -> None:
    trial = Trial(family)
    per_layer, fixed = FORWARD[family]
    decoded(trial, 5).check(launches=per_layer * trial.num_layers + fixed, quick=1)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", sorted(PLAIN))
def test_a_decode_step_in_plain_torch_is_one_upload_and_no_wait(family: str) -> None:
    trial = Trial(family, is_fused=False)
    per_layer, fixed = PLAIN[family]
    decoded(trial, 5).check(launches=per_layer * trial.num_layers + fixed, quick=1)


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_in_float8_attention_alone_is_rounded_by_a_launch_of_its_own(family: str) -> None:
    """In float8, norms and gates round their own results; only attention's result needs a separate launch for
    rounding."""
    trial = Trial(family, is_float8=True)
    per_layer, fixed = FORWARD[family]
    trace = decoded(trial, 5)
    assert sum(count for (what, _), count in trace.launches.items() if what == "_scaled_mm") == 4 * trial.num_layers
    trace.check(launches=(per_layer + 1) * trial.num_layers + fixed, quick=1)


def test_more_sequences_ask_for_no_more() -> None:
    few, many = decoded(Trial("llama"), 2), decoded(Trial("llama"), 16)
    assert few.launches.total() == many.launches.total()
    assert many.uploads.total() == 1


def test_a_new_page_is_one_more_launch() -> None:
    trial = Trial("llama")
    trial.forward([prompt(0, BLOCK)])
    news = {"new_tokens": (7,), "new_blocks": (9,), "num_kept": BLOCK, "num_kept_blocks": 1}
    per_layer, fixed = FORWARD["llama"]
    trace = trial.forward([PlanRow(0, BLOCK, 1, num_prompt=BLOCK, num_logits=1, **news)])  # type: ignore[arg-type]
    trace.check(launches=per_layer * trial.num_layers + fixed + 1)
    assert trace.launches.total() == per_layer * trial.num_layers + fixed + 1


def test_a_step_with_prompts_of_any_length_beside_decodes() -> None:
    """A step with a prompt beside decodes also launches the kernels of long chunks, and one kernel for new pages."""
    trial = Trial("llama")
    trial.forward([prompt(0, 3)])
    decode = PlanRow(0, 3, 1, num_kept=3, new_tokens=(7,), num_kept_blocks=1, num_prompt=3, num_logits=1)
    per_layer, fixed = FORWARD["llama"]
    trace = trial.forward([decode, prompt(1, 50, 4), prompt(2, 9, 20)])
    trace.check(launches=(per_layer + 1) * trial.num_layers + fixed + 1, quick=1)


# -- graphs ------------------------------------------------------------------------------------------------------


def graphed(family: str, keys: LaunchKeys | None = None, *, with_long: bool = False) -> Trial:
    """Return an executor whose short steps have graphs of one launch each; `with_long` adds graphs with long chunks."""
    trial = Trial(family)
    trial.keys = keys

    class Recorder:
        def record(self, work: Work) -> Work:
            work()
            return lambda: trial.trace.launch("replay")

        def close(self) -> None: ...

    runner, info = trial.executor.runner, trial.executor.info
    with trial.traced():
        cache = KVCache(trial.geometry, info.num_blocks + 1, BLOCK, torch.bfloat16, META, trial.copier)
        runner.attention.cache = cache
        runner.graphs = StepGraphs(runner, trial.kernel, trial.geometry, info, Recorder())
        runner.graphs.capture(GraphKind(), (4, 8, 96) if with_long else (4, 8), silent)
        if with_long:
            runner.graphs.capture(GraphKind(has_long=True), (64, 96), silent)
    return trial


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_step_with_a_graph_is_its_upload_and_its_replay(family: str) -> None:
    """A step in a graph is one upload and one replay, for single tokens, forced tokens, short chunks and new pages."""
    trial = graphed(family)
    decode = PlanRow(0, 3, 1, num_kept=3, new_tokens=(7,), num_kept_blocks=1, num_prompt=3, num_logits=1)
    forced = PlanRow(1, 2, 3, 1, 2, (5, 6, 7), 1, (20,), 2)
    for rows in ([prompt(0, 3, 0), prompt(1, 2, 1)], [decode, forced], [prompt(2, 8, 30)], [prompt(3, 1, 40)]):
        trace = trial.forward(rows)
        trace.check(launches=1, quick=1)
        assert trace.launches.total() == trace.uploads.total() == 1


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_a_step_with_a_long_chunk_is_its_upload_and_its_replay(family: str) -> None:
    """A long chunk in a graph is one upload and one replay: alone, among decodes, or with other chunks of any
    length."""
    trial = graphed(family, with_long=True)
    decode = PlanRow(0, 3, 1, num_kept=3, new_tokens=(7,), num_kept_blocks=1, num_prompt=3, num_logits=1)
    trial.forward([prompt(0, 3)])
    for rows in (
        [decode, prompt(1, 33, 1)],
        [prompt(2, 64, 20)],
        [prompt(3, 40, 1), prompt(4, 9, 30), prompt(5, 34, 40)],
    ):
        trace = trial.forward(rows)
        trace.check(launches=1, quick=1)
        assert trace.launches.total() == trace.uploads.total() == 1
    assert trial.forward([prompt(6, 97, 1)]).launches.total() > 1


def test_a_step_with_adapters_is_one_upload_more() -> None:
    """A step with adapters has one more upload, which has the adapters' tiles, and as many launches of layers."""
    trial = graphed("llama", with_long=True)
    graphs = trial.executor.runner.graphs
    assert isinstance(graphs, StepGraphs)
    fused = FusedKernel(META)
    adapters = ModelAdapters(
        Sites(trial.executor.runner.model), torch.bfloat16, META, TriedKernel(fused, META, torch.bfloat16, None)
    )
    trial.executor.adapters = graphs._adapters = adapters
    for key, rank in (("a", 8), ("b", 64), ("large", 72)):
        layout = adapters._layout_of_all(rank)
        adapters.on_device[key] = PlacedAdapter(
            layout, torch.empty(layout.num_values, dtype=torch.bfloat16, device=META)
        )
        fused.prepare(adapters.on_device[key])
    with trial.traced() as trace:
        fused.machine.__dict__["kernels"] = Counted(trace)
        graphs.capture(GraphKind(has_adapters=True), (4, 8), silent)
        graphs.capture(GraphKind(has_long=True, has_adapters=True), (64,), silent)
    rows = [prompt(0, 3, 0), replace(prompt(1, 2, 1), adapter="a"), replace(prompt(2, 2, 2), adapter="b")]
    with patch.object(adapters, "applied", side_effect=AssertionError("layers were replaced")):
        trace = trial.forward(rows)
        trace.check(launches=1, quick=2)
        assert trace.launches.total() == 1
        trial.forward([prompt(3, 3, 10)]).check(launches=1, quick=1)
    rows = [replace(prompt(4, 40, 20), adapter="a"), replace(prompt(5, 3, 31), adapter="b")]
    with patch.object(adapters, "applied", side_effect=AssertionError("layers were replaced")):
        assert trial.forward(rows).launches.total() == 1, "with a long chunk"
    rows = [replace(prompt(4, 2, 20), adapter="large")]
    fused.machine.__dict__["kernels"] = Counted(trial.trace)
    assert all(what != "replay" for what, _ in trial.forward(rows).launches)


def test_blocks_are_copied_before_the_replay() -> None:
    trial = graphed("llama")
    trace = trial.forward([prompt(0, 3)], [BlockCopy(7, 8)])
    assert sum(count for (what, _), count in trace.launches.items() if what == "replay") == 1
    assert list(trace.launches)[-1][0] == "replay"
    trace.check(launches=2, quick=2)


def test_a_copy_of_what_is_written_in_the_same_step_reads_it_before() -> None:
    """If one block is both source and target of copies, torch copies the blocks, since it reads all sources first."""
    trial = graphed("llama")
    trace = trial.forward([prompt(0, 3)], [BlockCopy(7, 8), BlockCopy(8, 9)])
    trace.check(launches=1 + 4 * trial.num_layers, quick=2)


def test_spans_are_for_the_kernels_of_cpus() -> None:
    """A step on a GPU does not build the spans of blocks, which only CPU kernels need and which cost time."""
    for trial in (Trial("llama"), graphed("llama")):
        with patch.object(CachedRequestState, "spans", side_effect=AssertionError("spans of a GPU's step")):
            scattered = PlanRow(
                0, 0, 40, new_tokens=(5,) * 40, new_blocks=tuple(range(30, 10, -2)), num_prompt=40, num_logits=1
            )
            trial.forward([scattered])
            last = PlanRow(0, 40, 1, num_kept=40, new_tokens=(7,), new_blocks=(3,), num_kept_blocks=10, num_logits=1)
            trial.forward([last])


#: Where a device's number may be made from the host's by a copy that waits: while loading, and in the oracle.
_AT_LEISURE = {
    *("kernels/reference.py", "parity.py", "pooling/self_test.py", "quality.py", "quantization/weights.py"),
    "tensor_parallel.py",
}


def test_no_step_uploads_from_ordinary_memory() -> None:
    """No module calls `torch.tensor(numbers, device=...)`, which waits until the GPU has done all earlier work."""
    slow = [
        f"{path.relative_to(MODEL)}:{call.lineno}"
        for path in sorted(MODEL.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("torch.tensor", "torch.as_tensor")
        and any(keyword.arg == "device" for keyword in call.keywords)
    ]
    assert [each for each in slow if each.split(":")[0] not in _AT_LEISURE] == []


def test_tokens_that_are_being_drawn_are_put_into_a_graphs_memory() -> None:
    trial = graphed("llama")
    trial.forward([prompt(0, 3)])
    with trial.traced():
        trial.executor.sample_async(SampleBatch(trial._step, [SampleRow(0, 0, SamplingParams(temperature=0.0))]))
    row = PlanRow(
        0, 3, 1, num_kept=3, new_tokens=(placeholder_for_row(0),), num_kept_blocks=1, num_prompt=3, num_logits=1
    )
    trace = trial.forward([row])
    trace.check(launches=9, quick=1)
    assert list(trace.launches)[-1][0] == "replay"


def test_what_has_no_graph_is_launched_as_ever() -> None:
    trial = graphed("llama")
    per_layer, fixed = FORWARD["llama"]
    for rows in ([prompt(0, 9)], [prompt(1, 40, 20)]):
        trial.forward(rows).check(launches=per_layer * trial.num_layers + fixed + 1)


# -- compiled kernels ----------------------------------------------------------------------------------------------


#: Parameters that kernels draw with, one at a time and together.
SAMPLED: tuple[dict[str, Any], ...] = (
    *({"temperature": 0.0}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.1}),
    *({"repetition_penalty": 1.1}, {"logit_bias": {5: 1.0, 9: 2.0}}, {"logprobs": 3}, {"top_p": 0.5, "logprobs": 1}),
)


def test_serving_launches_no_kernel_that_loading_did_not_compile() -> None:
    """Loading compiles each kernel for all kinds of arguments that occur with any numbers of rows, tokens and new
    pages. Otherwise Triton would compile a kernel while requests wait."""
    modules = (
        "model.kernels.paged_decode",
        "model.kernels.paged_join",
        "model.kernels.paged_prefill",
        "model.kernels.paged_reads",
        "model.kernels.paged_kernels",
        "model.kernels.layer_kernels",
        "model.kernels.block_copy_kernels",
        "model.sampling.draw_kernels",
    )
    keys = LaunchKeys(*modules)
    trial = graphed("llama", keys, with_long=True)
    with trial.traced():
        find_problem(trial.copier, META)
        with patch.object(trial.executor.runner, "graphs", None):  # which come later
            run_largest_step(trial.executor, 48, 16, 60)
        logits = torch.empty(4, VOCAB, dtype=torch.bfloat16, device=META)
        trial.sampler.draw(logits, SampleBatch(0, trial_rows(VOCAB)), lambda row: ([1, 2, 2, 3], 2))
    compiled = set(keys.found)
    assert len({name for name, *_ in compiled}) > 10
    rng = random.Random(3)
    for turn in range(30):
        lengths = [rng.choice((1, 1, 2, 3, 9, 33, 40)) for _ in range(rng.randint(1, 4))]
        plans = [prompt(10 * turn + n, length, 12 * n) for n, length in enumerate(lengths)]
        trial.forward([replace(plan, num_logits=1) for plan in plans])
        drawn = [SampleRow(p.seq_id, n, SamplingParams(**rng.choice(SAMPLED))) for n, p in enumerate(plans)]
        trial.draw(drawn)
        trial.forward([next_token(plan) for plan in plans], [BlockCopy(60, 61), BlockCopy(60, 62)][: turn % 3])
        assert not set(keys.found) - compiled, f"step {turn} of {lengths} tokens"


def test_steps_with_adapters_launch_no_kernel_that_placing_them_did_not_compile() -> None:
    """Placing an adapter compiles each kernel for any mix of adapters and rows. Placing runs in a separate thread, so
    it delays no request."""
    trial, keys = Trial("llama"), LaunchKeys("lora.fused_kernels")
    sites, fused = Sites(trial.executor.runner.model), FusedKernel(META)
    kernel = TriedKernel(fused, META, torch.bfloat16, None)
    trial.executor.adapters = adapters = ModelAdapters(sites, torch.bfloat16, META, kernel)
    ranks = {"a": 4, "b": 16, "c": 40, "d": 64, "e": 72, "f": 8}
    with traced() as trace:
        fused.machine.__dict__["kernels"] = Counted(trace, keys)
        for number, (key, rank) in enumerate(ranks.items()):
            shapes = {
                name: LoraShape(rank, shape.in_features, shape.out_features, 1.0)
                for name, shape in adapters.layers.items()
                if number == 0 or number % 3 != len(name) % 3
            }
            layout = make_layout(shapes, sites.places)
            flat = torch.empty(layout.num_values, dtype=torch.bfloat16, device=META)
            adapters.on_device[key] = PlacedAdapter(layout, flat)
            kernel.prepare(adapters.on_device[key])
    compiled = set(keys.found)
    assert {name for name, *_ in compiled} == {"shrink", "expand"}
    rng = random.Random(5)
    for turn in range(40):
        keys.found.clear()
        chosen = rng.choices([*ranks, None], k=rng.randint(1, 4))
        lengths = [rng.choice((1, 2, 3, 9, 33, 40)) for _ in chosen]
        rows = [prompt(10 * turn + n, length, 12 * n) for n, length in enumerate(lengths)]
        trial.forward([replace(row, adapter=key) for row, key in zip(rows, chosen, strict=True)])
        assert bool(keys.found) == any(chosen)
        assert not set(keys.found) - compiled, f"step {turn}: {chosen}, {lengths} tokens"


def next_token(plan: PlanRow) -> PlanRow:
    """Return the decode row after a prompt, with a new block if the row's token begins one."""
    length = plan.num_scheduled
    new = (63,) if length % BLOCK == 0 else ()
    held = len(plan.new_blocks)
    return PlanRow(plan.seq_id, length, 1, 1, length, (7,), held, new, length)


# -- drawing -----------------------------------------------------------------------------------------------------

MASK = mask_of([1, 2, 3], VOCAB)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("settings", "launches"),
    [
        ({"temperature": 0.0}, 2),
        ({"temperature": 0.7}, 3),
        ({"temperature": 0.7, "min_p": 0.1}, 3),
        ({"temperature": 0.7, "top_p": 0.9}, 6),
        ({"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1}, 6),
        ({"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.1}, 5),
        ({"temperature": 0.7, "logit_bias": {5: 1.0}}, 5),
        ({"temperature": 0.0, "logprobs": 5}, 5),
    ],
)
def test_a_draw_is_one_upload_one_download_and_the_wait_for_it(settings: dict[str, Any], launches: int) -> None:
    trial = Trial("llama")
    decoded(trial, 5)
    rows = [SampleRow(n, n, SamplingParams(**settings)) for n in range(5)]
    trial.sample(rows).check(launches=launches, quick=1, waits=1, downloads=1)
    trial.draw(rows).check(launches=launches, quick=1, waits=0, downloads=1)


def test_all_at_once_asks_for_no_more_than_each_needs() -> None:
    trial = Trial("llama")
    decoded(trial, 8)
    usual = SamplingParams(top_p=0.9, presence_penalty=1.0, logit_bias={5: 1.0}, logprobs=5)
    rows = [SampleRow(n, n, usual if n % 2 else SamplingParams(), mask=MASK) for n in range(8)]
    trial.draw(rows).check(launches=13, quick=2, waits=0, downloads=1)


def test_masks_are_one_upload_that_nobody_waits_for() -> None:
    """New masks are one more upload without a wait; masks that are already on the device need no upload."""
    trial = Trial("llama")
    decoded(trial, 5)
    others = [mask_of([n], VOCAB) for n in range(4)]
    rows = [SampleRow(n, n, SamplingParams(temperature=0.0), mask=mask) for n, mask in enumerate([None, *others])]
    trial.sample(rows).check(launches=2, quick=2, waits=1, downloads=1)
    trial.sample(rows).check(launches=2, quick=1, waits=1, downloads=1)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("settings", "launches", "quick", "waits"),
    [
        ({"temperature": 0.0}, 7, 0, 1),
        ({"temperature": 0.7}, 39, 3, 1),
        ({"temperature": 0.7, "top_p": 0.9}, 81, 6, 2),
        ({"temperature": 0.7, "top_k": 20}, 76, 6, 2),
        ({"temperature": 0.7, "min_p": 0.1, "typical_p": 0.9}, 72, 5, 1),
        ({"temperature": 0.7, "repetition_penalty": 1.1, "frequency_penalty": 0.1}, 59, 9, 1),
        ({"temperature": 0.0, "logprobs": 5}, 34, 1, 2),
    ],
)
def test_without_kernels_a_draw_waits_for_its_tokens_alone(
    settings: dict[str, Any], launches: int, quick: int, waits: int
) -> None:
    """The sampler waits once more if top-p keeps an unknown number of tokens, or if log-probabilities are requested."""
    trial = Trial("llama", is_plain=True)
    decoded(trial, 5)
    rows = [SampleRow(n, n, SamplingParams(**settings)) for n in range(5)]
    trial.sample(rows).check(launches=launches, quick=quick, waits=waits)


def test_without_kernels_masks_are_one_upload_that_nobody_waits_for() -> None:
    trial = Trial("llama", is_plain=True)
    decoded(trial, 5)
    all_masked = [SampleRow(n, n, SamplingParams(temperature=0.0), mask=MASK) for n in range(5)]
    trial.sample(all_masked).check(launches=16, quick=1, waits=1)
    some_masked = [SampleRow(n, n, SamplingParams(temperature=0.0), mask=MASK if n else None) for n in range(5)]
    trial.sample(some_masked).check(launches=18, quick=2, waits=1)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_scores_of_prompts_come_in_one_download_and_are_waited_for_with_the_tokens(num_parts: int) -> None:
    trial = Trial("llama")
    whole = PlanRow(0, 0, 6, num_logits=6, new_tokens=(5,) * 6, new_blocks=(0, 1), num_prompt=6)
    trial.forward([whole])
    trial.sampler._max_elements = 6 * VOCAB // num_parts
    rows, scores = [SampleRow(0, 5, SamplingParams(temperature=0.0))], [ScoreRun(0, 0, (5,) * 5, 3)]
    logits, batch = trial.executor.logits, SampleBatch(trial._step, rows, scores)
    with trial.traced() as trace:
        drawing = trial.sampler.draw(logits, batch, trial.executor.history)
        assert drawing.tokens is not None, "the next step may name them"
    trace.check(launches=2 + 31 * num_parts + 1, quick=1 + 2 * num_parts, waits=0, downloads=2)
    with trial.traced() as trace:
        drawing.take()
    trace.check(launches=0, quick=0, waits=2)


def test_rows_of_rare_kinds_cost_the_others_no_launch() -> None:
    trial = Trial("llama")
    decoded(trial, 5)
    rows = [SampleRow(n, n, SamplingParams(typical_p=0.5 if n == 3 else 1.0)) for n in range(5)]
    trace = trial.draw(rows)
    own = ("find_peaks", "weigh_parts", "pick")
    assert sum(count for (what, _), count in trace.launches.items() if what in own) == len(own)
    trace.check(launches=70, quick=4, waits=1, downloads=1)


# -- the lint itself ---------------------------------------------------------------------------------------------


def spendthrift(tensor: torch.Tensor) -> None:
    """Cause one operation of each kind that the trace must find."""
    rows = torch.tensor([0, 1], device=tensor.device)
    tensor.index_select(0, rows)
    tensor += torch.ones(4).to(tensor.device)
    tensor[tensor > 1]
    if bool((tensor > 2).any()):
        raise AssertionError
    tensor.sum().item()
    tensor.tolist()
    tensor.cpu()


def test_what_is_slow_is_found_and_named() -> None:
    with traced() as trace:
        spendthrift(torch.empty(4, device=META))
    assert sorted(what for what, _ in trace.uploads.elements()) == ["slow", "slow"]
    waits = sorted(what for what, _ in trace.waits.elements())
    assert waits == ["__bool__", "cpu", "index by booleans", "item", "tolist"]
    with pytest.raises(AssertionError, match="2 slow uploads, 0 are allowed"):
        trace.check(launches=100, waits=100)
    with pytest.raises(AssertionError, match=r"launches, 1 are allowed"):
        trace.check(launches=1, slow=2, waits=100)


def test_a_line_that_asks_for_too_much_is_named() -> None:
    trial = Trial("llama")
    with pytest.raises(AssertionError, match=r"\d+ mm +bridle/model/fused_step\.py:\d+"):
        decoded(trial, 2).check(launches=0)
