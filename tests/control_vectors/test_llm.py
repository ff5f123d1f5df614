"""Control vectors of whole requests: chosen, scaled by a controller, replaced while they are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle import LLM, Branch, Controller, Decision, SamplingParams, WasmController
from bridle.config import ModelConfig
from bridle.control_vectors import write_vector
from bridle.engine.control.vector_scales import VectorScales
from bridle.errors import ControllerError, InvalidRequest, UnknownControlVector, UnsupportedFeature
from bridle.model import load_executor
from tests.aici.guests import guest2, mask, result, sample
from tests.control_vectors.kit import BLOCK, directions, step_logits
from tests.fakes import tiny_checkpoints

PROMPT = [12, 77, 90, 44, 31, 22, 198, 41, 9, 15, 16, 17]
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def settings_of_model() -> dict[str, Any]:
    path = tiny_checkpoints.cached_checkpoint("llama", head_dim=16, hidden_size=64)
    return {"model": str(path), "num_blocks": 40, "block_size": BLOCK}


@pytest.fixture(scope="module")
def vector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "a.gguf"
    write_vector(path, directions(2, 64, 1, 0.5), "llama")
    return path


@pytest.fixture(scope="module")
def llm(vector: Path) -> Iterator[LLM]:
    with LLM(**settings_of_model(), control_vectors=(f"a={vector}",), max_num_seqs=4, unnamed_ids=True) as made:
        made.model.require_control_vectors().put("b", directions(2, 64, 2, 0.5))
        yield made


@pytest.fixture(scope="module")
def oracle(vector: Path) -> Iterator[Any]:
    """Another executor with the same control vectors, which computes whole outputs in one step."""
    made = load_executor(ModelConfig(**settings_of_model()))
    made.control_vectors.add("a", vector)
    made.control_vectors.put("b", directions(2, 64, 2, 0.5))
    yield made
    made.close()


def tokens_of(llm: LLM, **given: Any) -> list[int]:
    return list(llm.generate(PROMPT, **{**GREEDY, **given}, use_tqdm=False)[0].outputs[0].token_ids)


def check(oracle: Any, tokens: list[int], scales: VectorScales, num_prompt: int) -> None:
    """Compare a greedy output with one pass over all of its tokens."""
    (logits,) = step_logits(oracle, [(tokens, scales.spans(0, len(tokens)))])
    assert logits[num_prompt - 1 : -1].argmax(-1).tolist() == tokens[num_prompt:]


def keys_of(oracle: Any) -> dict[str, str]:
    keys: dict[str, str] = oracle.control_vectors.open(["a", "b"])
    return keys


@pytest.mark.parametrize("scales", [{"a": 1.0}, {"a": -1.0}, {"a": 0.5, "b": 2.0}])
def test_a_request_is_steered(llm: LLM, oracle: Any, scales: dict[str, float]) -> None:
    plain, steered = tokens_of(llm), tokens_of(llm, control_vectors=scales)
    assert plain != steered
    check(oracle, PROMPT + plain, VectorScales.of(keys_of(oracle), {}), len(PROMPT))
    check(oracle, PROMPT + steered, VectorScales.of(keys_of(oracle), scales), len(PROMPT))


def test_cached_kv_is_that_of_the_same_scales(llm: LLM) -> None:
    """Requests with the same prompt share KV if their vectors and scales are the same, and only then."""
    long = PROMPT * 2
    ask = {**GREEDY, "max_tokens": 1, "use_tqdm": False}
    llm.generate(long, control_vectors={"a": 0.75}, **ask)

    def cached(**scales: float) -> int:
        return llm.generate(long, control_vectors=scales, **ask)[0].usage.cached_tokens

    assert cached(a=0.75) == 20
    assert cached(a=0.5) == 0
    assert cached(b=0.75) == 0
    assert cached(a=0.5) == 20
    llm.generate([*long, 3], **ask)
    assert cached(a=0.0) == 20, "scale 0 is no vector"


def test_neighbours_are_as_without_vectors(llm: LLM) -> None:
    prompts = [[30 + n, *PROMPT] for n in range(4)]
    params = SamplingParams(seed=5, temperature=1.0, max_tokens=10, ignore_eos=True, logprobs=1)
    alone = [llm.generate([p], params, use_tqdm=False)[0] for p in prompts]
    mixed = [params.with_(control_vectors=scales) for scales in ({}, {"a": 2.0}, {}, {"a": -1.0, "b": 1.0})]
    together = llm.generate(prompts, mixed, use_tqdm=False)
    for number in (0, 2):
        assert together[number].outputs[0].token_ids == alone[number].outputs[0].token_ids
        assert together[number].outputs[0].logprobs == alone[number].outputs[0].logprobs
    for number in (1, 3):
        assert together[number].outputs[0].logprobs != alone[number].outputs[0].logprobs


@dataclass
class Steps(Controller):
    """Follows a program: it sets new scales together with a sampled token, with forced tokens, or with a rollback."""

    program: list[tuple[str, dict[str, float], int]]
    at: int = 0
    log: dict[str, Any] = field(default_factory=dict)  # shared with the test

    def __deepcopy__(self, memo: Any) -> Steps:
        return Steps(self.program, self.at, self.log)

    def next(self, view: Any) -> Decision:
        kind, scales, number = self.program[self.at] if self.at < len(self.program) else ("sample", {}, 0)
        self.at += 1
        size = len(view.tokens)
        back = min(number, size - view.num_prompt) if kind == "rewind" else 0
        held: VectorScales = self.log["scales"]
        self.log["scales"] = (
            held.before(size - back).changed(size - back, scales) if scales else held.before(size - back)
        )
        changes = scales or None
        if kind == "sample":
            return Decision.sample(control_vectors=changes)
        return Decision.splice(back, [20 + number, 30 + number], control_vectors=changes)


SCALES = st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.0, 1.0, -1.5]), max_size=2)
PROGRAM = st.lists(
    st.tuples(st.sampled_from(["sample", "sample", "force", "rewind"]), SCALES, st.integers(0, 4)), max_size=10
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs=st.lists(PROGRAM, min_size=1, max_size=4), drafts=st.sampled_from([0, 3]))
def test_controllers_change_scales_at_any_token(
    llm: LLM, oracle: Any, programs: list[list[tuple[str, dict[str, float], int]]], drafts: int
) -> None:
    """Several outputs run at once, in a cache that is too small for them. The KV of each token has the scales that were
    set at its position."""
    keys, first = keys_of(oracle), {"a": 0.5, "b": 0.0}
    logs: list[dict[str, Any]] = [{"scales": VectorScales.of(keys, first)} for _ in programs]
    prompts = [[30 + n, *PROMPT] for n in range(len(programs))]
    given = {**GREEDY, "max_tokens": 24, "control_vectors": first, "speculate": drafts, "use_tqdm": False}
    controllers = [Steps(program, log=log) for program, log in zip(programs, logs, strict=True)]
    outputs = llm.generate(prompts, controller=controllers, **given)
    for prompt, output, log in zip(prompts, outputs, logs, strict=True):
        tokens = prompt + list(output.outputs[0].token_ids)
        (logits,) = step_logits(oracle, [(tokens, log["scales"].spans(0, len(tokens)))])
        best = logits[:-1].argmax(-1).tolist()
        sampled = [at for at in range(len(prompt), len(tokens)) if tokens[at] not in range(20, 36)]
        assert [best[at - 1] for at in sampled] == [tokens[at] for at in sampled]


def test_forks_have_scales_of_their_own(llm: LLM, oracle: Any) -> None:
    class Fork(Controller):
        def next(self, view: Any) -> Decision:
            if len(view.generated) == 3 and view.index == 0:
                return Decision.fork(
                    [Branch(control_vectors={"a": 2.0}), Branch(control_vectors={"b": -2.0}), Branch()]
                )
            return Decision.sample()

    (output,) = llm.generate(PROMPT, controller=Fork(), control_vectors={"a": 0.5, "b": 0.0}, **GREEDY, use_tqdm=False)
    keys, at = keys_of(oracle), len(PROMPT) + 3
    first = VectorScales.of(keys, {"a": 0.5, "b": 0.0})
    for one, scales in zip(
        output.outputs, (first.changed(at, {"a": 2.0}), first.changed(at, {"b": -2.0}), first), strict=True
    ):
        check(oracle, PROMPT + list(one.token_ids), scales, len(PROMPT))


def test_a_controller_scales_only_what_its_request_names(llm: LLM) -> None:
    class Other(Controller):
        def next(self, view: Any) -> Decision:
            return Decision.sample(control_vectors={"b": 1.0})

    (output,) = llm.generate(PROMPT, controller=Other(), control_vectors={"a": 1.0}, **GREEDY, use_tqdm=False)
    assert isinstance(output.outputs[0].error, ControllerError)
    assert "control_vectors: got 'b'; a controller scales vectors that its request names, which are 'a'" in str(
        output.outputs[0].error
    )


def test_two_controllers_agree(llm: LLM, oracle: Any) -> None:
    """Two controllers may scale the same vector, and then the outer one wins; scales of different vectors combine."""

    @dataclass
    class Scale(Controller):
        scales: Mapping[str, float]
        forces: bool = False

        def next(self, view: Any) -> Decision:
            if self.forces and len(view.generated) == 2:
                return Decision.splice(0, [20], control_vectors=self.scales)
            return Decision.sample(control_vectors=self.scales if not self.forces else None)

    crew = [Scale({"a": 1.0}), Scale({"a": 3.0, "b": 0.5}), Scale({"b": -1.0}, forces=True)]
    (output,) = llm.generate(
        PROMPT, controllers=crew[:2], control_vectors={"a": 0.0, "b": 0.0}, **GREEDY, use_tqdm=False
    )
    scales = VectorScales.of(keys_of(oracle), {}).changed(len(PROMPT), {"a": 1.0, "b": 0.5})
    check(oracle, PROMPT + list(output.outputs[0].token_ids), scales, len(PROMPT))
    given = {**GREEDY, "control_vectors": {"a": 0.0, "b": 0.0}, "use_tqdm": False}
    (output,) = llm.generate(PROMPT, controllers=[Scale({"a": 1.0}, forces=False), crew[2]], **given)
    tokens = PROMPT + list(output.outputs[0].token_ids)
    scales = VectorScales.of(keys_of(oracle), {}).changed(len(PROMPT), {"a": 1.0}).changed(len(PROMPT) + 2, {"b": -1.0})
    (logits,) = step_logits(oracle, [(tokens, scales.spans(0, len(tokens)))])
    best = logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert output.outputs[0].token_ids[2] == 20
    assert best[:2] + best[3:] == tokens[len(PROMPT) :][:2] + tokens[len(PROMPT) :][3:]


def test_a_replaced_vector_counts_for_new_requests(llm: LLM, tmp_path: Path) -> None:
    store = llm.model.require_control_vectors()
    store.put("c", directions(2, 64, 3, 0.5))
    before = tokens_of(llm, control_vectors={"c": 1.0}, max_tokens=40)

    class Replace(Controller):
        def next(self, view: Any) -> Decision:
            if len(view.generated) == 5:
                store.put("c", directions(2, 64, 4, 0.5))
            return Decision.sample()

    during = tokens_of(llm, control_vectors={"c": 1.0}, max_tokens=40, controller=Replace())
    assert during == before
    assert tokens_of(llm, control_vectors={"c": 1.0}, max_tokens=40) != before
    write_vector(tmp_path / "c.gguf", directions(2, 64, 3, 0.5), "llama")
    llm.load_control_vector("c", tmp_path / "c.gguf")
    assert tokens_of(llm, control_vectors={"c": 1.0}, max_tokens=40) == before
    llm.unload_control_vector("c")
    assert [each.name for each in llm.control_vectors] == ["a", "b"]
    assert all(not each.num_users for each in llm.control_vectors)


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({"nobody": 1.0}, "control_vectors: got 'nobody'; known are 'a', 'b'"),
        ({"a": 1e6}, "control_vectors['a'] is 1000000.0; must be at least -1000 and at most 1000"),
        ({"a": float("nan")}, "control_vectors['a'] is nan"),
        ({"a": True}, "control_vectors['a'] is True; must be a number"),
        ({"": 1.0}, "control_vectors: got ''; names must be texts"),
        ({f"v{n}": 1.0 for n in range(9)}, "control_vectors: got 9 names; at most 8"),
        (["a"], "control_vectors: got ['a']; must map names to scales"),
    ],
)
def test_what_cannot_be_is_refused(llm: LLM, scales: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tokens_of(llm, control_vectors=scales)
    assert reason in str(caught.value) and caught.value.param == "control_vectors"
    assert isinstance(caught.value, UnknownControlVector) == ("nobody" in scales)


@pytest.mark.parametrize("given", ["a", "=x", "a="])
def test_settings_are_checked(given: str) -> None:
    with pytest.raises(InvalidRequest, match="must be NAME=FILE"):
        LLM(**settings_of_model(), control_vectors=(given,))


def test_a_backend_without_them_says_so(vector: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.model.executor_builder.make_control_vectors", lambda *given: None)
    with pytest.raises(UnsupportedFeature, match="got a; this backend does not support control vectors"):
        LLM(**settings_of_model(), control_vectors=(f"a={vector}",))
    with LLM(**settings_of_model()) as llm:
        with pytest.raises(UnsupportedFeature, match="control_vectors: this model's backend applies no"):
            tokens_of(llm, control_vectors={"a": 1.0})
        with pytest.raises(UnsupportedFeature, match="accepts no control vectors at run time"):
            llm.load_control_vector("a", vector)


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_a_vector_is_made_of_pairs(llm: LLM, oracle: Any, tmp_path: Path, method: Any) -> None:
    """The vector is the mean of the differences between the hidden states of the last tokens."""
    pairs = [("a cat sat", "a dog ran"), ("the good one", "the bad one"), ("yes", "no")]
    made = llm.make_control_vector(pairs, tmp_path / "made.gguf", method=method)
    states: dict[str, torch.Tensor] = {}
    for text in {text for pair in pairs for text in pair}:
        seen: dict[int, torch.Tensor] = {}
        oracle.control_vectors.recorder = lambda layer, rows, seen=seen: seen.update({layer: rows[-1].clone()})
        prompt = llm.generate(text, max_tokens=1, use_tqdm=False)[0].prompt_token_ids
        step_logits(oracle, [(prompt, ())])
        states[text] = seen[1]
    oracle.control_vectors.recorder = None
    differences = torch.stack([states[one] - states[other] for one, other in pairs])
    assert list(made) == [1, 2]
    if method == "mean":
        assert torch.allclose(made[1], differences.mean(0), atol=1e-5)
    else:
        along = differences @ (made[1] / made[1].norm())
        assert along.mean() > 0 and torch.allclose(along.mean(), made[1].norm(), atol=1e-4)
    found = llm.load_control_vector("made", tmp_path / "made.gguf")
    assert found.layers == (1, 2)
    llm.unload_control_vector("made")
    assert llm.model.require_control_vectors().recorder is None


def test_a_wasm_controller_scales_vectors(vector: Path) -> None:
    """The scale in a branch of the module's result reaches the model, and so does the scale of forced tokens."""
    first = [result({"branches": [{"sample_mask": "#", "splices": [], "control_vectors": {"a": 2.0}}]})]
    with LLM("demo", control=True, num_blocks=256) as llm:
        size = llm.info.vocab_size
        llm.model.require_control_vectors().put("a", directions(6, 256, 1, 1.0))
        module = llm.upload(guest2([[mask(range(5, size), size), *first], sample(range(5, size), size)]))
        given = {**GREEDY, "controller": WasmController(module), "use_tqdm": False}
        (output,) = llm.generate("Once upon a time", control_vectors={"a": 0.0}, **given)

        class Same(Controller):
            def next(self, view: Any) -> Decision:
                allowed = view.mask_of(range(5, size))
                return Decision.sample(allowed, control_vectors={"a": 2.0} if not view.generated else None)

        given["controller"] = Same()
        (wanted,) = llm.generate("Once upon a time", control_vectors={"a": 0.0}, **given)
        assert output.outputs[0].error is None
        assert output.outputs[0].token_ids == wanted.outputs[0].token_ids
        (plain,) = llm.generate("Once upon a time", **GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids != plain.outputs[0].token_ids


SCRIPTS = {
    "pyctrl": """
import pyaici.server as aici

async def main():
    await aici.gen_tokens(max_tokens=2)
    aici.set_control_vectors(a=2.0)
    await aici.gen_tokens(max_tokens=6)
    print("probes", len(aici.get_probes()))

aici.start(main())
""",
    "jsctrl": """
import { genTokens, getProbes, setControlVectors } from "aici"

start(async () => {
  await genTokens({ maxTokens: 2 })
  setControlVectors({ a: 2 })
  await genTokens({ maxTokens: 6 })
  console.log("probes", getProbes().length)
})
""",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("language", SCRIPTS)
def test_a_script_scales_vectors_and_reads_probes(language: str) -> None:
    with LLM("demo", control=True, num_blocks=256, allow_probes=True) as llm:
        llm.model.require_control_vectors().put("a", directions(6, 256, 1, 1.0))
        given = {**GREEDY, "max_tokens": 8, "probes": ["a", "a@2"], "use_tqdm": False}
        script = WasmController(language, SCRIPTS[language])
        (output,) = llm.generate("Once upon a time", controller=script, control_vectors={"a": 0.0}, **given)
        assert output.outputs[0].error is None

        class Same(Controller):
            def next(self, view: Any) -> Decision:
                return Decision.sample(control_vectors={"a": 2.0} if len(view.generated) == 2 else None)

        (wanted,) = llm.generate("Once upon a time", controller=Same(), control_vectors={"a": 0.0}, **given)
        assert output.outputs[0].token_ids[:8] == wanted.outputs[0].token_ids
        assert "probes 2" in output.outputs[0].logs


def test_a_script_is_told_which_scale_is_none() -> None:
    script = 'import { setControlVectors } from "aici"\nstart(async () => setControlVectors({ a: "much" }))'
    with LLM("demo", control=True, num_blocks=256) as llm:
        (output,) = llm.generate("Once", controller=WasmController("jsctrl", script), max_tokens=4, use_tqdm=False)
    assert "setControlVectors: got a: much; scales are numbers" in str(output.outputs[0].error)
