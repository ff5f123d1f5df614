"""Control vectors in a forward pass: their effect on hidden states, and what they do not change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridle.config import ModelConfig
from bridle.cpu_kernels.library import kernels
from bridle.engine.scheduling.step_plan import PlanRow, StepPlan
from bridle.errors import InternalError
from bridle.model import load_executor
from tests.control_vectors.kit import BLOCK, put, span, step_logits
from tests.fakes import tiny_checkpoints

TOKENS = [12, 77, 90, 44, 31, 22, 198, 41, 9]
#: Families whose layers are one call of the kernels, lean in torch, and the library's own.
KINDS = [("llama", 16), ("gemma2", 16), ("qwen2", 8), ("gpt_neox", 8), ("mixtral", 8)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def executor(request: pytest.FixtureRequest) -> Iterator[Any]:
    family, head_dim = request.param
    path = tiny_checkpoints.cached_checkpoint(family, head_dim=head_dim, hidden_size=64)
    made = load_executor(ModelConfig(str(path), num_blocks=64, block_size=BLOCK))
    yield made
    made.close()


def test_the_kinds_are_computed_in_three_ways(executor: Any, request: pytest.FixtureRequest) -> None:
    family = request.node.callspec.params["executor"][0]
    lowered = executor.runner.lowered
    assert (lowered is not None) == (family in ("llama", "gemma2", "qwen2"))
    if family in ("llama", "gemma2") and kernels() is not None:
        assert lowered.native is not None


def test_a_vector_is_added_to_the_output_of_its_layer(executor: Any) -> None:
    """A vector of the last layer is added before the final norm; a recorder sees the states to which vectors
    are added."""
    keys, store, last = put(executor, a=1.0), executor.control_vectors, executor.control_vectors.num_layers - 1
    seen: dict[int, torch.Tensor] = {}

    def see(layer: int, rows: torch.Tensor) -> None:
        seen[layer] = rows.clone()

    store.recorder = see
    try:
        (plain,) = step_logits(executor, [(TOKENS, ())])
        before = dict(seen)
        (steered,) = step_logits(executor, [(TOKENS, (span(3, keys, 2, a=0.5),))])
    finally:
        store.recorder = None
    assert sorted(seen) == list(range(store.num_layers))
    assert torch.equal(seen[0], before[0]), "layer 0 has no direction"
    added = seen[1] - before[1]
    wanted = torch.zeros_like(added)
    wanted[2:5] = 0.5 * store.directions("a")[1]
    assert torch.allclose(added, wanted, atol=1e-5)
    assert torch.equal(seen[last][:2], before[last][:2]), "tokens before it do not change"
    assert torch.equal(steered[:2], plain[:2])
    assert not torch.allclose(steered[2:5], plain[2:5], atol=1e-3)
    assert not torch.equal(steered[5:], plain[5:]), "later tokens see its keys and values"


def test_scale_zero_and_no_vector_are_the_same_bits(executor: Any) -> None:
    put(executor, a=1.0)
    (plain,) = step_logits(executor, [(TOKENS, ())])
    (none,) = step_logits(executor, [(TOKENS, (span(4, {}),))])
    assert torch.equal(plain, none)


MIX = st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.25, -1.0, 3.0]), max_size=2)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shapes=st.lists(st.tuples(st.integers(1, 17), MIX, st.integers(0, 5)), min_size=2, max_size=6))
def test_each_row_is_as_it_is_alone(executor: Any, shapes: list[tuple[int, dict[str, float], int]]) -> None:
    """Rows with different vectors and rows without any share one step, and each gets the same bits as alone."""
    if executor.runner.lowered is None or executor.runner.lowered.native is None:
        pytest.skip("torch's own products depend on the number of rows")
    keys = put(executor, a=1.0, b=0.5)
    rows = []
    for at, (size, mix, offset) in enumerate(shapes):
        tokens = [(7 * i + 31 * at) % 240 + 12 for i in range(size)]
        offset = min(offset, size - 1)
        rows.append((tokens, (span(size - offset, keys, offset, **mix),) if mix else ()))
    mixed = step_logits(executor, rows)
    for have, (tokens, spans) in zip(mixed, rows, strict=True):
        (alone,) = step_logits(executor, [(tokens, spans)])
        assert torch.equal(have, alone)
        (plain,) = step_logits(executor, [(tokens, ())])
        assert torch.equal(have, plain) == (not spans), "a vector changes its own row, and no other"


def test_an_unknown_key_changes_nothing(executor: Any) -> None:
    executor.reset()
    row = PlanRow(0, 0, 2, 1, new_tokens=(5, 6), new_blocks=(0,), vectors=(span(2, {"x": "x#1"}, x=1.0),))
    with pytest.raises(InternalError, match="wants control vector 'x#1', which is not loaded"):
        executor.forward(StepPlan(1, [row]))
