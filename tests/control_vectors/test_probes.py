"""Probes: hidden states along control vectors, as controllers read them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from bridle import LLM, Controller, Decision, SamplingParams, WasmController
from bridle.config import ModelConfig
from bridle.engine.control.vector_scales import VectorScales
from bridle.engine.scheduling.step_plan import PlanRow, SampleBatch, SampleRow, StepPlan
from bridle.errors import InvalidRequest, UnknownControlVector, UnsupportedFeature
from bridle.model import load_executor
from tests.aici.guests import SHOW_ARGUMENT, guest2, mask, result
from tests.control_vectors.kit import BLOCK, directions, step_logits
from tests.fakes import tiny_checkpoints

PROMPT = [12, 77, 90, 44, 31, 22, 198, 41, 9, 15, 16, 17]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    path = str(tiny_checkpoints.cached_checkpoint("llama", head_dim=16, hidden_size=64))
    with LLM(path, num_blocks=40, block_size=BLOCK, unnamed_ids=True, allow_probes=True) as made:
        store = made.model.require_control_vectors()
        store.put("a", directions(3, 64, 1, 0.5))
        store.put("low", directions(2, 64, 2, 0.5))
        yield made


@dataclass
class Watch(Controller):
    """Keeps the probe values that it reads, and forces a token at the third position."""

    seen: list[Any] = field(default_factory=list)

    def __deepcopy__(self, memo: Any) -> Watch:
        return self

    def next(self, view: Any) -> Decision:
        self.seen.append((view.sampled, dict(view.probes)))
        return Decision.splice(0, [20]) if len(view.generated) == 2 else Decision.sample()


@pytest.mark.parametrize("scales", [{}, {"a": 2.0}])
def test_readings_are_projections_of_the_states(llm: LLM, scales: dict[str, float]) -> None:
    """Several outputs run at once, one of them without probes. The values are those of one pass over all tokens."""
    watches = [Watch(), Watch(), Watch()]
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, control_vectors=scales)
    params = [sampling.with_(probes=probes) for probes in (("a", "a@1", "low@1"), (), "a@2")]
    prompts = [[30 + n, *PROMPT] for n in range(3)]
    outputs = llm.generate(prompts, params, controller=watches, use_tqdm=False)
    path = str(tiny_checkpoints.cached_checkpoint("llama", head_dim=16, hidden_size=64))
    oracle = load_executor(ModelConfig(path, num_blocks=40, block_size=BLOCK))
    oracle.control_vectors.put("a", directions(3, 64, 1, 0.5))
    keys = oracle.control_vectors.open(["a"])
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens, states = prompt + list(output.outputs[0].token_ids), dict[int, torch.Tensor]()
        oracle.control_vectors.recorder = lambda layer, rows, states=states: states.update({layer: rows.clone()})
        step_logits(oracle, [(tokens, VectorScales.of(keys, scales).spans(0, len(tokens)))])
        units = {name: directions(layers, 64, seed, 0.5) for name, layers, seed in (("a", 3, 1), ("low", 2, 2))}
        at, found = len(prompt), watches[number].seen[1:]
        assert watches[number].seen[0] == (None, {})
        for sampled, probes in found:
            if sampled is None:
                assert probes == {}
            else:
                wanted = {}
                for probe in params[number].probes:
                    name, _, layer = probe.partition("@")
                    unit = units[name][int(layer or 2)]
                    wanted[probe] = float(states[int(layer or 2)][at - 1] @ unit / unit.norm())
                assert probes == pytest.approx(wanted, abs=1e-4)
            at += 1
    oracle.close()
    assert len(watches[0].seen[1][1]) == 3 and not watches[1].seen[1][1]


def test_a_fork_reads_on(llm: LLM) -> None:
    watch = Watch()
    llm.generate(PROMPT, controller=watch, probes="a", n=2, **GREEDY)
    assert sum(bool(probes) for _, probes in watch.seen) == 12, "each of two outputs is asked after 6 sampled tokens"


def test_composed_controllers_read_the_same(llm: LLM) -> None:
    watches = [Watch(), Watch()]
    llm.generate(PROMPT, controllers=watches, probes=["a", "a@1"], **GREEDY)
    assert watches[0].seen == watches[1].seen
    assert sum(bool(probes) for _, probes in watches[0].seen) >= 6


def test_a_wasm_controller_reads(llm: LLM) -> None:
    with LLM("demo", control=True, num_blocks=256, allow_probes=True) as demo:
        demo.model.require_control_vectors().put("a", directions(6, 256, 1))
        size = demo.info.vocab_size
        step = [mask(range(5, size), size), result({"branches": [{"sample_mask": "#", "splices": []}]})]
        module = demo.upload(guest2([step, [SHOW_ARGUMENT, *step]]))
        given = {**GREEDY, "max_tokens": 3, "controller": WasmController(module)}
        (output,) = demo.generate("Once upon a time", probes=["a", "a@2"], **given)
        assert '"probes":[' in output.outputs[0].logs


@pytest.mark.parametrize(
    ("probes", "reason"),
    [
        ("nobody", "got 'nobody'; known are 'a', 'low'"),
        ("low", "probes: got 'low' at layer 2; the vector has directions for layers 1"),
        ("a@7", "probes: got 'a' at layer 7"),
        ("a@0", "probes: got 'a@0'; must be NAME or NAME@LAYER"),
        ("a@x", "must be NAME or NAME@LAYER"),
        (["a"] * 9, "probes has 9 entries; at most 8"),
    ],
)
def test_what_cannot_be_read_is_refused(llm: LLM, probes: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(PROMPT, controller=Watch(), probes=probes, **GREEDY)
    assert reason in str(caught.value)
    assert isinstance(caught.value, UnknownControlVector) == (probes == "nobody")


def test_operators_allow_probes() -> None:
    path = str(tiny_checkpoints.cached_checkpoint("llama", head_dim=16, hidden_size=64))
    with LLM(path, num_blocks=16, block_size=BLOCK) as closed:
        closed.model.require_control_vectors().put("a", directions(3, 64))
        with pytest.raises(UnsupportedFeature, match="The operator can allow it with --allow-probes"):
            closed.generate(PROMPT, controller=Watch(), probes="a", **GREEDY)


def test_overlapped_steps_keep_their_readings() -> None:
    """A step may be computed before the results of the previous step are read."""
    path = str(tiny_checkpoints.cached_checkpoint("llama", head_dim=16, hidden_size=64))
    executor = load_executor(ModelConfig(path, num_blocks=40, block_size=BLOCK))
    executor.control_vectors.put("a", directions(3, 64, 1, 0.5))
    (key,) = executor.control_vectors.open(["a"]).values()

    def plan(step: int, seq_id: int, token: int) -> StepPlan:
        row = PlanRow(seq_id, 0, 2, 1, new_tokens=(token, 7), new_blocks=(seq_id,), probes=((key, None),))
        return StepPlan(step, [row])

    def batch(step: int, seq_id: int) -> SampleBatch:
        return SampleBatch(step, [SampleRow(seq_id, 0, SamplingParams(temperature=0.0))])

    alone = []
    for number, token in enumerate((40, 90)):
        executor.reset()
        executor.forward(plan(1, number, token))
        alone.append(executor.sample(batch(1, number)).probes)
    executor.reset()
    executor.forward(plan(1, 0, 40))
    executor.sample_async(batch(1, 0))
    executor.forward(plan(2, 1, 90))
    first = executor.get_result().probes
    executor.sample_async(batch(2, 1))
    assert [first, executor.get_result().probes] == alone and alone[0] != alone[1]
    executor.close()
