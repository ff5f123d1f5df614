"""Convolutions and delta rules over packed steps: equal to the library's functions, and the same bits however cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from bridle.model.packed_mixer import PackedStates, packed_forward
from bridle.model.state_mixer import _keeps_states
from bridle.model.state_pool import RowStates, Span
from tests.fakes import tiny_checkpoints

PACKED = {"lfm2", "lfm2_moe", "lfm3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"}
PACKED |= {"kimi_linear", "bailing_hybrid"}

#: Gives outputs [T, ...] for inputs [T, ...] and weights.
Recurrence = Callable[[PackedStates, dict[str, Tensor]], Tensor]


def convolved(states: PackedStates, inputs: dict[str, Tensor]) -> Tensor:
    rows, weight = inputs["rows"].t().unsqueeze(0), inputs["weight"]
    width = weight.shape[1]
    rows = states.update_conv_state(rows, 0, conv_kernel_size=width)
    return states.causal_conv1d(rows, weight, inputs["bias"], "silu")[0].t()


def recurred(states: PackedStates, inputs: dict[str, Tensor]) -> Tensor:
    return states.gated_delta_rule(**{name: part.unsqueeze(0) for name, part in inputs.items()})[0][0]


def conv_inputs(num_tokens: int, channels: int, width: int) -> dict[str, Tensor]:
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    return {"rows": torch.randn(num_tokens, channels), "weight": weight, "bias": bias}


def rule_inputs(num_tokens: int, groups: int, heads: int, size: int, has_channels: bool) -> dict[str, Tensor]:
    query, key = torch.randn(2, num_tokens, groups, size).unbind()
    decay = -torch.rand(num_tokens, heads, *([size] if has_channels else []))
    value, beta = torch.randn(num_tokens, heads, size + 4), torch.rand(num_tokens, heads)
    return {"query": query, "key": key, "value": value, "g": decay, "beta": beta}


def some_inputs(rng: random.Random, num_tokens: int) -> tuple[Recurrence, dict[str, Tensor]]:
    torch.manual_seed(rng.randrange(1 << 30))
    if rng.random() < 0.5:
        return convolved, conv_inputs(num_tokens, rng.choice([1, 7, 48, 100]), rng.randint(1, 5))
    groups = rng.choice([1, 2, 3])
    copies, size = rng.choice([1, 2]), rng.choice([4, 12, 64])
    return recurred, rule_inputs(num_tokens, groups, groups * copies, size, has_channels=copies == 1)


def cut(rng: random.Random, num_tokens: int) -> Iterator[slice]:
    places = sorted(rng.sample(range(1, num_tokens), rng.randint(0, num_tokens - 1)))
    yield from (slice(*ends) for ends in pairwise([0, *places, num_tokens]))


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32))
def test_bits_depend_on_neither_cuts_nor_neighbors(seed: int) -> None:
    """Spans of one sequence, each alone or with another of it in a step, and with one of another sequence before it."""
    rng = random.Random(seed)
    compute, inputs = some_inputs(rng, 24)
    whole = RowStates({}, is_fresh=True)
    want = compute(PackedStates(0, [Span(24, whole)]), inputs)
    tensors: dict[tuple[str, int], Tensor] = {}
    have = []
    for tokens in cut(rng, 24):
        middle = rng.randint(tokens.start, tokens.stop - 1)
        neighbor = rng.randint(1, 3)
        ends = [each for each in pairwise([tokens.start, middle, tokens.stop]) if each[0] < each[1]]
        spans = [Span(end - begin, RowStates(tensors, is_fresh=begin == 0)) for begin, end in ends]
        states = PackedStates(0, [Span(neighbor, RowStates({}, is_fresh=True)), *spans])
        rows = list(range(neighbor)) + list(range(tokens.start, tokens.stop))
        chosen = {n: each if n in ("weight", "bias") else each[rows] for n, each in inputs.items()}
        have.append(compute(states, chosen)[neighbor:])
    assert torch.equal(torch.cat(have), want)
    assert tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(each, whole.tensors[key]) for key, each in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_equal_the_librarys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = {name: part.to(dtype) for name, part in conv_inputs(9, 6, 4).items()}
    states = RowStates({}, is_fresh=True)
    have = convolved(PackedStates(0, [Span(9, states)]), inputs)
    want = causal_conv1d_fn(inputs["rows"].t().unsqueeze(0), inputs["weight"], inputs["bias"], "silu")[0].t()
    assert have.dtype == dtype
    assert torch.allclose(have, want, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert torch.equal(states.tensors["conv", 0][0], inputs["rows"][-4:].t())


@pytest.mark.parametrize("has_channels", [False, True])
def test_delta_rules_equal_the_librarys(has_channels: bool) -> None:
    torch.manual_seed(0)
    inputs = rule_inputs(9, 4 if has_channels else 2, 4, 12, has_channels)
    states = RowStates({}, is_fresh=True)
    have = recurred(PackedStates(0, [Span(9, states)]), inputs)
    library = recurrent_kimi_delta_attention if has_channels else torch_recurrent_gated_delta_rule
    options = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want, last = library(**{name: part.unsqueeze(0) for name, part in inputs.items()}, **options)
    assert torch.allclose(have, want[0], atol=1e-5)
    assert torch.allclose(states.tensors["recurrent", 0], last, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4, 17, 33])
def test_gates_do_not_depend_on_the_place_of_a_number(size: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(1, 37, size) * 8
    with PackedStates(0, []):
        for gate in (torch.sigmoid, Tensor.sigmoid, nn.functional.softplus):
            whole = gate(rows)
            assert torch.equal(whole, torch.cat([gate(part) for part in rows.split(1, 1)], 1))
            with torch._C.DisableTorchFunction():
                assert torch.allclose(whole, gate(rows), atol=1e-6)


@pytest.mark.parametrize("family", tiny_checkpoints.HYBRID_FAMILIES)
def test_families_whose_steps_are_computed_at_once(family: str) -> None:
    fields = tiny_checkpoints.COMMON | tiny_checkpoints.HYBRID_FAMILIES[family]
    config = AutoConfig.for_model(family, **{name: value for name, value in fields.items() if value is not None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mixers = [module for module in model.modules() if _keeps_states(module)]
    assert mixers
    assert all((packed_forward(module) is not None) == (family in PACKED) for module in mixers)
