"""Tests of recurrent layers over packed steps, in the CPU kernels and in plain torch. The layers equal transformers'
functions, and give the same bits however tokens are split."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.jamba.modeling_jamba import mamba_selective_scan
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from bridle.cpu_kernels.library import recurrences
from bridle.cpu_kernels.plain_recurrence import PlainRecurrences
from bridle.model import packed_mixer
from bridle.model.packed_mixer import PackedStates
from bridle.model.state_mixer import wrap_mixers
from bridle.model.state_pool import RowStates, Span
from tests.conftest import examples
from tests.covering import slow_but
from tests.fakes import tiny_checkpoints

#: Short convolutions, delta rules, scans by channels and by heads. The other families are slow.
KINDS = ("lfm2", "qwen3_5_text", "jamba", "bamba")
#: Inputs that are of no token.
STEADY = {"weight", "bias", "A", "D", "dt_bias", "delta_bias"}

#: Gives outputs [T, ...] for inputs [T, ...] and weights.
Recurrence = Callable[[PackedStates, dict[str, Tensor]], Tensor]


def convolved(states: PackedStates, inputs: dict[str, Tensor]) -> Tensor:
    rows, weight = inputs["rows"].t().unsqueeze(0), inputs["weight"]
    width = weight.shape[1]
    rows = states.update_conv_state(rows, 0, conv_kernel_size=width)
    return states.causal_conv1d(rows, weight, inputs["bias"], "silu")[0].t()


def recurred(states: PackedStates, inputs: dict[str, Tensor]) -> Tensor:
    return states.gated_delta_rule(**{name: part.unsqueeze(0) for name, part in inputs.items()})[0][0]


def scanned_by_heads(states: PackedStates, inputs: dict[str, Tensor]) -> Tensor:
    return states.state_space(**by_role(shaped(inputs)), dt_limit=(0.01, 2.0))[0][0]


def scanned(states: PackedStates, inputs: dict[str, Tensor]) -> Tensor:
    return states.scan(**by_role(in_columns(inputs)))[0][0].t()


def by_role(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Return the inputs with A, B and C renamed to rate, write and read, the parameters of bridle's functions."""
    return {{"A": "rate", "B": "write", "C": "read"}.get(name, name): part for name, part in inputs.items()}


def shaped(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part if name in STEADY else part.unsqueeze(0) for name, part in inputs.items()}


def in_columns(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return shaped({name: part if name in STEADY else part.t() for name, part in inputs.items()})


def conv_inputs(num_tokens: int, channels: int, width: int) -> dict[str, Tensor]:
    weight, bias = torch.randn(channels, width), torch.randn(channels)
    return {"rows": torch.randn(num_tokens, channels), "weight": weight, "bias": bias}


def rule_inputs(num_tokens: int, groups: int, heads: int, size: int, has_channels: bool) -> dict[str, Tensor]:
    query, key = torch.randn(2, num_tokens, groups, size).unbind()
    decay = -torch.rand(num_tokens, heads, *([size] if has_channels else []))
    value, beta = torch.randn(num_tokens, heads, size + 4), torch.rand(num_tokens, heads)
    return {"query": query, "key": key, "value": value, "g": decay, "beta": beta}


def space_inputs(num_tokens: int, groups: int, heads: int, rows: int, size: int) -> dict[str, Tensor]:
    read, write = torch.randn(2, num_tokens, groups, size).unbind()
    inputs, steps = torch.randn(num_tokens, heads, rows), torch.randn(num_tokens, heads) - 2
    rates = {"A": -torch.rand(heads), "D": torch.randn(heads), "dt_bias": torch.randn(heads)}
    return {"hidden_states": inputs, "dt": steps, "B": write, "C": read, **rates}


def scan_inputs(num_tokens: int, channels: int, size: int) -> dict[str, Tensor]:
    read, write = torch.randn(2, num_tokens, size).unbind()
    inputs, steps, gates = torch.randn(3, num_tokens, channels).unbind()
    rates = {"A": -torch.rand(channels, size), "D": torch.randn(channels), "delta_bias": torch.randn(channels)}
    return {"hidden_states": inputs, "dt": steps - 2, "B": write, "C": read, "z": gates, **rates}


def some_inputs(rng: random.Random, num_tokens: int) -> tuple[Recurrence, dict[str, Tensor]]:
    torch.manual_seed(rng.randrange(1 << 30))
    kind = rng.randrange(4)
    if kind == 0:
        return convolved, conv_inputs(num_tokens, rng.choice([1, 7, 48, 100, 300]), rng.randint(1, 5))
    groups = rng.choice([1, 2, 3])
    copies, size = rng.choice([1, 2]), rng.choice([4, 12, 64, 100])
    if kind == 1:
        return scanned_by_heads, space_inputs(num_tokens, groups, groups * copies, rng.choice([1, 8, 20]), size)
    if kind == 2:
        return scanned, scan_inputs(num_tokens, rng.choice([1, 7, 48, 100]), rng.choice([4, 16, 20]))
    return recurred, rule_inputs(num_tokens, groups, groups * copies, size, has_channels=copies == 1)


def cut(rng: random.Random, num_tokens: int) -> Iterator[slice]:
    places = sorted(rng.sample(range(1, num_tokens), rng.randint(0, num_tokens - 1)))
    yield from (slice(*ends) for ends in pairwise([0, *places, num_tokens]))


@pytest.fixture(params=["chosen", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the CPU kernels or plain torch for the test's recurrences."""
    if request.param == "plain":
        monkeypatch.setattr(packed_mixer, "recurrences", lambda *_: PlainRecurrences())
    return str(request.param)


@pytest.mark.usefixtures("form")
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 32))
def test_bits_depend_on_neither_cuts_nor_neighbors(seed: int) -> None:
    """Parts of a sequence give the same bits alone, with a second part in the step, or after a part of another
    sequence."""
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
        chosen = {n: each if n in STEADY else each[rows] for n, each in inputs.items()}
        have.append(compute(states, chosen)[neighbor:])
    assert torch.equal(torch.cat(have), want)
    assert tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(each, whole.tensors[key]) for key, each in tensors.items())


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 1 << 32))
def test_kernels_equal_plain_torch(seed: int) -> None:
    """The kernels equal plain torch for two sequences, one of which continues from a state."""
    rng = random.Random(seed)
    compute, inputs = some_inputs(rng, 12)
    found: list[Tensor] = []
    for each in (PlainRecurrences(), recurrences(torch.device("cpu"))):
        first, second = RowStates({}, is_fresh=True), RowStates({}, is_fresh=True)
        going_on = RowStates(first.tensors, is_fresh=False)
        spans = [Span(5, first), Span(4, going_on), Span(3, second)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed_mixer, "recurrences", lambda *_, each=each: each)
            found.append(compute(PackedStates(0, spans), inputs))
        found += [*first.tensors.values(), *second.tensors.values()]
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolutions_equal_the_librarys(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = {name: part.to(dtype) for name, part in conv_inputs(9, 6, 4).items()}
    states = RowStates({}, is_fresh=True)
    have = convolved(PackedStates(0, [Span(9, states)]), inputs)
    want = causal_conv1d_fn(inputs["rows"].t().unsqueeze(0), inputs["weight"], inputs["bias"], "silu")[0].t()
    assert have.dtype == dtype
    assert torch.allclose(have, want, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert torch.equal(states.tensors["conv", 0], inputs["rows"][-4:])


@pytest.mark.usefixtures("form")
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
    assert torch.allclose(states.tensors["recurrent", 0], last[0], atol=1e-5)


@pytest.mark.usefixtures("form")
def test_scans_by_heads_equal_the_librarys() -> None:
    """Recurrences computed head by head equal transformers' scan, also if time steps exceed their limits."""
    torch.manual_seed(0)
    inputs = space_inputs(9, 2, 4, 5, 12)
    states = RowStates({}, is_fresh=True)
    have = scanned_by_heads(PackedStates(0, [Span(9, states)]), inputs)
    options = {"dt_softplus": True, "dt_limit": (0.01, 2.0), "return_final_states": True}
    want, last = mamba2_chunk_scan(**shaped(inputs), chunk_size=4, **options)
    assert torch.allclose(have, want[0], atol=1e-5)
    assert torch.allclose(states.tensors["recurrent", 0], last[0], atol=1e-5)


@pytest.mark.usefixtures("form")
def test_scans_by_channels_equal_the_librarys() -> None:
    torch.manual_seed(0)
    inputs = scan_inputs(9, 21, 5)
    states = RowStates({}, is_fresh=True)
    have = scanned(PackedStates(0, [Span(9, states)]), inputs)
    want, last = mamba_selective_scan(**in_columns(inputs), delta_softplus=True, return_last_state=True)
    assert torch.allclose(have, want[0].t(), atol=1e-5)
    assert torch.allclose(states.tensors["recurrent", 0], last[0], atol=1e-5)


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


@cache
def is_mixer(kind: type) -> bool:
    """Return whether the class updates a recurrent state, judged by its source code."""
    return any(name in inspect.getsource(kind) for name in ("update_conv_state", "set_linear_cache"))


@pytest.mark.parametrize("family", slow_but(KINDS, tiny_checkpoints.HYBRID_FAMILIES))
def test_families_whose_steps_are_computed_at_once(family: str) -> None:
    fields = tiny_checkpoints.COMMON | tiny_checkpoints.HYBRID_FAMILIES[family]
    config = AutoConfig.for_model(family, **{name: value for name, value in fields.items() if value is not None})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mixers = [one for one in model.modules() if is_mixer(type(one))]
    assert wrap_mixers(model) == len(mixers) > 0
