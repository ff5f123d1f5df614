"""Tests of the llama.cpp backend where it differs from torch: slots, adapters, settings, and answers over HTTP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("llama_cpp")

from bridle import LLM, SamplingParams
from bridle.config import EngineConfig, ModelConfig
from bridle.controllers import Controller, SequenceView
from bridle.engine import Branch, Decision
from bridle.engine.scheduling.step_plan import ForkRow, PlanRow, SampleBatch, SampleRow, StepPlan
from bridle.errors import BridleError, InternalError, InvalidRequest, OutOfBlocks, ShardUnavailable, UnsupportedModel
from bridle.llamacpp import load_executor
from bridle.llamacpp.slots import Slots
from bridle.lmtp.client import Client, MemoryCarrier
from bridle.model.memory_estimate import weights_of
from bridle.serving.models.loading import load_model
from tests.gguf.kit import folder, pair
from tests.http.harness import local_client
from tests.llamacpp.kit import prompt_plan, started
from tests.lmtp.harness import running
from tests.lora.kit import ALL_LINEAR, write_adapter

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


# -- slots ---------------------------------------------------------------------------------------------------------


class Recorder:
    """A fake of llama.cpp's memory: each slot has a length, and a recurrent state is the number of its tokens."""

    num_slots = 6

    def __init__(self, is_recurrent: bool = False) -> None:
        self.is_recurrent = is_recurrent
        self.lengths: dict[int, int] = {}
        self.states: dict[int, int] = {}

    def computed(self, slot: int, length: int) -> None:
        self.lengths[slot] = self.states[slot] = length

    def cut(self, slot: int, length: int) -> None:
        assert length <= self.lengths.get(slot, 0)
        assert not (self.is_recurrent and length) or self.states[slot] == length
        self.computed(slot, length)

    def copy(self, source: int, target: int, length: int) -> None:
        assert length <= self.lengths.get(source, 0) and not self.lengths.get(target, 0)
        assert not self.is_recurrent or length == self.states.get(source, 0)
        self.computed(target, length)

    def state(self, slot: int) -> bytes:
        return self.states[slot].to_bytes(4, "big")

    def restore(self, slot: int, state: bytes) -> None:
        self.states[slot] = int.from_bytes(state, "big")


@given(st.integers(0, 1 << 32), st.booleans())
def test_slots_follow_any_plans(seed: int, is_recurrent: bool) -> None:
    """Random sequences start, grow, rewind, fork and end. Each slot and each recurrent state has as many tokens as its
    sequence, and no slot is lost."""
    rng = random.Random(seed)
    memory, size = Recorder(is_recurrent), Recorder.num_slots
    slots = Slots(memory, 50, 64)
    alive: dict[int, int] = {}  # tokens of each
    fresh = 0
    for step in range(1, 25):
        plan = StepPlan(step)
        parents = [seq for seq in alive if rng.random() < 0.3]
        for parent in parents[: max(size - len(alive) - 1, 0)]:
            fresh += 1
            plan.forks.append(ForkRow(parent, fresh, rng.randint(0, alive[parent]), 0))
        plan.freed = [seq for seq in alive if rng.random() < 0.2]
        forked = {fork.child: fork.num_tokens for fork in plan.forks}
        alive = {seq: n for seq, n in (alive | forked).items() if seq not in plan.freed}
        if len(alive) < size and rng.random() < 0.6:
            fresh += 1
            alive[fresh] = 0
        for seq in list(alive):
            held = slots.held.get(seq)
            length = min(held.length, alive[seq]) if held else 0
            if seq in forked:
                parent = next(fork.parent for fork in plan.forks if fork.child == seq)
                length = min(slots[parent].length, forked[seq])
            kept = rng.randint(0, alive[seq])
            start = rng.randint(0, min(kept, length))
            new = tuple(rng.randrange(50) for _ in range(rng.randint(1, 5)))
            end = rng.randint(start + 1, kept + len(new))
            if kept + len(new) > 60:
                kept, start, end, new = 0, 0, 1, (1,)
            plan.rows.append(PlanRow(seq, start, end - start, 1, kept, new))
            alive[seq] = kept + len(new)
        for held, row in zip(slots.apply(plan), plan.rows, strict=True):
            assert memory.lengths.get(held.slot, 0) == memory.states.get(held.slot, 0) == held.first <= row.start
            assert is_recurrent or held.first == row.start
            memory.computed(held.slot, held.length)
        assert {seq: len(slots[seq].tokens) for seq in slots} == alive
        used = [slots[seq].slot for seq in slots]
        assert len(set(used)) == len(used) <= size
        assert all(memory.lengths.get(slot, 0) == 0 for slot in range(size) if slot not in used)


@pytest.mark.parametrize(
    ("plan", "error", "reason"),
    [
        (StepPlan(1, [PlanRow(9, 3, 1, 1, 0, (1,))]), InternalError, "its row keeps 0 from 3"),
        (StepPlan(1, [PlanRow(9, 0, 2, 1, 0, (1,))]), InternalError, "ends at 2, but it has 1 tokens"),
        (StepPlan(1, [PlanRow(9, 0, 1, 2, 0, (1,))]), InternalError, "2 logits of 1 tokens"),
        (StepPlan(1, [PlanRow(9, 0, 1, 1, 0, (99,))]), InternalError, "a token id outside of 0 to 49"),
        (StepPlan(1, [PlanRow(9, 0, 1, 1, 0, (1,))] * 2), InternalError, "two rows of one sequence"),
        (StepPlan(1, forks=[ForkRow(7, 8, 0, 0)]), InternalError, "no sequence with id 7 is known"),
        (StepPlan(1, [PlanRow(n, 0, 1, 1, 0, (1,)) for n in range(7)]), OutOfBlocks, "all 6 sequence slots"),
    ],
)
def test_plans_that_fit_nothing_are_refused(plan: StepPlan, error: type[BridleError], reason: str) -> None:
    with pytest.raises(error, match=reason):
        Slots(Recorder(), 50, 64).apply(plan)


def test_a_recurrent_state_is_kept_before_drafts_and_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept copies of a recurrent state let a rewind recompute few tokens; copies dropped for lack of memory are not
    used."""
    memory = Recorder(is_recurrent=True)
    slots = Slots(memory, 50, 4_096)

    def computed(row: PlanRow) -> int:
        (held,) = slots.apply(StepPlan(1, [row]))
        memory.computed(held.slot, held.length)
        return held.first

    assert computed(PlanRow(1, 0, 100, 1, 0, (1,) * 100)) == 0
    assert computed(PlanRow(1, 100, 1, 1, 100, (1,))) == 100  # kept here: the last one is old
    assert computed(PlanRow(1, 101, 5, 5, 101, (1,) * 5)) == 101  # and here: four of these are drafts
    assert computed(PlanRow(1, 103, 1, 1, 103, (1,))) == 101
    assert computed(PlanRow(1, 100, 1, 1, 100, (1,))) == 100
    assert computed(PlanRow(1, 99, 1, 1, 99, (1,))) == 0
    monkeypatch.setattr("bridle.llamacpp.slots.MAX_COPIES", 7)
    for start in (100, 200, 300):
        assert computed(PlanRow(1, start, 100, 1, start, (1,) * 100)) == start
    assert computed(PlanRow(1, 250, 1, 1, 250, (1,))) == 0  # copies have four bytes, so one is kept


def test_a_failed_step_forgets_everything_and_leaves_the_backend_alive() -> None:
    executor = started("llama")
    executor.forward(prompt_plan(1, 0, [5, 6, 7], 1))
    with pytest.raises(InternalError, match="stale"):
        executor.forward(prompt_plan(1, 1, [5], 1))
    with pytest.raises(InternalError, match=r"step 2 .1 tokens. failed: sequence 0 has .*; its row keeps 9"):
        executor.forward(StepPlan(2, [PlanRow(0, 9, 1, 1, 9, (1,))]))
    executor.forward(prompt_plan(3, 0, [5, 6, 7], 1))
    row = SampleRow(0, 0, GREEDY)
    assert len(executor.sample(SampleBatch(3, [row])).tokens) == 1
    for batch in (SampleBatch(2, [row]), SampleBatch(3, [SampleRow(0, 5, GREEDY)])):
        with pytest.raises(InternalError):
            executor.sample(batch)
    assert executor.num_bytes > 0
    executor.close()
    executor.close()
    assert executor.num_bytes == 0
    with pytest.raises(ShardUnavailable):
        executor.forward(prompt_plan(4, 0, [5], 1))


def test_steps_larger_than_a_batch_are_computed_in_parts() -> None:
    executor, small = started("llama"), started("llama")
    small._model.max_batch = 5  # type: ignore[union-attr]
    tokens = [3 + n % 290 for n in range(64)]
    for each in (executor, small):
        each.forward(prompt_plan(1, 0, tokens, 20))
    assert executor.logits is not None and small.logits is not None
    assert float((executor.logits - small.logits).abs().max()) < 1e-3
    executor.close()
    small.close()


# -- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_say_what_they_say_on_torch(family: str, tmp_path: Path) -> None:
    """Adapters in one batch give the same tokens on the checkpoint, on its file in torch, and on its file in
    llama.cpp."""
    original, file = pair(family)
    adapters = {
        "few": write_adapter(tmp_path / "few", seed=1),
        "all": write_adapter(tmp_path / "all", seed=2, targets=ALL_LINEAR, rank=6, use_rslora=True, lora_alpha=5),
    }
    prompts, names = ["the one", "an x in", "the one", "in"], ["few", None, "all", "few"]
    texts = []
    llama: dict[str, Any] = {"backend": "llamacpp", "dtype": "float32", "num_threads": 1}
    for model, settings in ((original, {}), (file, {}), (file, llama)):
        with LLM(str(model), num_blocks=64, adapters=adapters, **settings) as llm:
            outputs = llm.generate(prompts, GREEDY, adapter=names)
            texts.append([output.outputs[0].token_ids for output in outputs])
            assert llm.generate("the one", GREEDY)[0].outputs[0].token_ids not in texts[-1][::2]
    assert texts[0] == texts[1] == texts[2]


def test_adapters_name_no_layers_that_llama_cpp_leaves_as_they_are() -> None:
    """llama.cpp ignores adapters in DeepSeek's attention without an error, so these layers are not offered."""
    executor = started("deepseek_v2")
    layers = set(executor.adapters.layers)
    executor.close()
    assert "model.layers.0.mlp.down_proj" in layers
    assert not any("self_attn" in layer for layer in layers)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "reason"),
    [
        (
            {"model": "demo"},
            UnsupportedModel,
            "reads only GGUF files, and 'demo' is not one; `bridle quantize` writes them",
        ),
        ({"quantization": "int8"}, InvalidRequest, "backend 'llamacpp' takes no quantization, got 'int8'"),
        ({"kernel": "reference"}, InvalidRequest, "does not support kernel, got 'reference'"),
        ({"draft_model": "demo"}, InvalidRequest, "takes no draft_model; use backend 'torch'"),
        ({"kv_cache_dtype": "int8"}, InvalidRequest, "does not support kv_cache_dtype, got 'int8'"),
        ({"adapter_kernel": "torch"}, InvalidRequest, "adapter_kernel, got 'torch'"),
        ({"enforce_eager": True}, InvalidRequest, "does not support enforce_eager"),
        ({"device": "cuda:1"}, InvalidRequest, "supports auto, cpu and cuda"),
        (
            {"max_model_len": 4096},
            InvalidRequest,
            "max_model_len .or max_total_tokens. is 4096; the model supports at most 512",
        ),
        ({"kv_tokens": 1 << 50}, OutOfBlocks, "a KV cache of 1125899906842624 tokens needs"),
        (
            {"step_seqs": 500},
            InvalidRequest,
            "max_num_seqs is 500; backend 'llamacpp' runs at most 128 sequences at once",
        ),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_refused(settings: dict[str, Any], error: type[BridleError], reason: str) -> None:
    fields: dict[str, Any] = {"model": str(pair("llama")[1]), "backend": "llamacpp", **settings}
    with pytest.raises(error, match=reason):
        load_executor(ModelConfig(**fields))


def test_what_llama_cpp_refuses_is_an_error_of_ours() -> None:
    from gguf import GGUFWriter

    path = folder() / "no-weights.gguf"
    writer = GGUFWriter(path, "plamo")
    writer.add_uint32("plamo.context_length", 64)
    writer.add_uint32("plamo.block_count", 1)
    writer.add_uint32("plamo.embedding_length", 32)
    writer.add_uint32("plamo.attention.head_count", 4)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("falcon")
    writer.add_token_list(["a", "b", "</s>"])
    writer.add_token_types([1, 1, 3])
    writer.add_token_merges([])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"llama\.cpp cannot load"):
        load_executor(ModelConfig(str(path), backend="llamacpp"))
    with pytest.raises(UnsupportedModel, match="has architecture 'plamo'; supported are"):
        LLM(str(path))
    # A server measures a model before it loads it, also one that no other backend could load.
    assert weights_of(ModelConfig(str(path), backend="llamacpp")) == 0


def test_the_size_of_the_cache(tmp_path: Path) -> None:
    for settings, num_tokens in (
        ({"num_blocks": 10, "block_size": 4}, 40),
        ({"kv_tokens": 100, "block_size": 16}, 112),
        ({"kv_memory": 2 * 3 * 2 * 8 * 2 * 64}, 64),  # keys and values, layers, heads, numbers, bytes, tokens
        ({}, 8 * 512),
    ):
        executor = load_executor(ModelConfig(str(pair("llama")[1]), backend="llamacpp", **settings))  # type: ignore[arg-type]
        assert executor.info.num_blocks * executor.info.block_size == num_tokens
        assert executor.info.max_model_len == min(num_tokens, 512) and executor.info.kv == "sequences"
        executor.close()


# -- over HTTP ----------------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "the one in an"}], "max_tokens": 6, "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "the", "max_tokens": 6, "temperature": 0.9, "seed": 1, "n": 2, "logprobs": 2},
    "/v1/chat/completions": {**CHAT, "response_format": {"type": "json_object"}, "max_tokens": 12},
    "/v1/responses": {"input": "the one", "max_output_tokens": 16, "temperature": 0},
    "/v1/messages": CHAT,
    "/generate": {"inputs": "the", "parameters": {"max_new_tokens": 5, "regex": "(in|on) a"}},
    "/v1/embeddings": {"input": ["the one", "in"]},
}


def _answers(config: ModelConfig, name: str) -> dict[str, Any]:
    answers = {}
    model = load_model(config, EngineConfig(), name=name)
    with local_client(model) as client:
        for route, body in BODIES.items():
            response = client.post(route, json={"model": name, **body})
            assert response.status_code == 200, (route, response.text)
            answers[route] = _bare(response.json())
    return answers


def _bare(value: Any, key: str = "") -> Any:
    """Return an answer without ids, times, seeds and counts of cached tokens, and with rounded floats."""
    if isinstance(value, dict):
        dropped = ("id", "created", "created_at", "system_fingerprint", "completed_at", "seed")
        dropped += ("input_tokens", "cache_read_input_tokens", "cached_tokens")  # no prefix cache by sequence
        return {name: _bare(item, name) for name, item in value.items() if name not in dropped}
    if isinstance(value, list):
        return [_bare(item, key) for item in value]
    return round(value, 2) + 0.0 if isinstance(value, float) else value


def test_every_api_answers_as_it_does_on_torch() -> None:
    original, file = pair("llama")
    want = _answers(ModelConfig(str(original), num_blocks=64), "m")
    assert _answers(ModelConfig(str(file), num_blocks=64), "m") == want
    llama = ModelConfig(str(file), num_blocks=64, backend="llamacpp", dtype="float32", num_threads=1)
    assert _answers(llama, "m") == want


# -- LMTP, controllers, processes -------------------------------------------------------------------------------------

TORCH: dict[str, Any] = {}
LLAMA: dict[str, Any] = {"backend": "llamacpp", "dtype": "float32", "num_threads": 1}


@pytest.mark.parametrize("settings", [TORCH, LLAMA], ids=["torch", "llamacpp"])
async def test_streams_of_lmtp_over_a_file(settings: dict[str, Any]) -> None:
    original, file = pair("llama")
    wanted = LLM(str(original), num_blocks=64)
    prompts = [wanted.tokenizer.encode(text) for text in ("the one", "in")]
    sampling = SamplingParams(max_tokens=6, temperature=0)
    expected = [output.outputs[0].token_ids for output in wanted.generate(prompts, sampling)]
    wanted.close()
    model = load_model(ModelConfig(str(file), num_blocks=64, **settings), EngineConfig(), name="m")
    async with running(model) as setup, Client(MemoryCarrier(setup.server.serve), "m") as client:
        streams = [await client.generate(prompt, max_tokens=6, temperature=0.0) for prompt in prompts]
        assert [[token.token async for token in stream] for stream in streams] == expected


class Shuttle(Controller):
    """A controller that forces, forks, rewinds and waits in turn, so that the backend gets every kind of decision."""

    def __init__(self) -> None:
        self.turn = 0

    def next(self, view: SequenceView) -> Decision:
        self.turn += 1
        verbs = {
            2: Decision.splice(0, [40, 41, 42]),
            4: Decision.fork([Branch(), Branch(mask=view.mask_of([50, 51, 52]))]),
            6: Decision.splice(2, [60]),
            7: Decision.wait(),
        }
        return verbs.get(self.turn, Decision.sample())


def test_controllers_give_the_same_on_all_three() -> None:
    original, file = pair("llama")
    sampling = SamplingParams(max_tokens=14, temperature=0.7, seed=9, ignore_eos=True)
    texts = []
    for model, settings in ((original, TORCH), (file, TORCH), (file, LLAMA)):
        with LLM(str(model), num_blocks=64, **settings) as llm:
            outputs = llm.generate(["the one", "x in"], sampling, controller=[Shuttle(), Shuttle()])
            texts.append([[one.token_ids for one in output.outputs] for output in outputs])
    assert texts[0] == texts[1] == texts[2] and len(texts[0][0]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "llamacpp"])
def test_replicas_serve_a_file(backend: str) -> None:
    from bridle.launch.replicas import load_replicated

    original, file = pair("llama")
    config = ModelConfig(str(file), num_blocks=64, backend=backend, dtype="float32", num_threads=1)  # type: ignore[arg-type]
    with LLM(str(original), num_blocks=64) as here, LLM(load_replicated(config, EngineConfig(), 2)) as there:
        want = [output.outputs[0].token_ids for output in here.generate(["the", "one", "x"], GREEDY)]
        assert [output.outputs[0].token_ids for output in there.generate(["the", "one", "x"], GREEDY)] == want
