"""Tests of the GPU sampler: the input of its kernels, the ring of masks, and when it is chosen.

If Triton is installed, the kernels run in its interpreter and are compiled for GPUs that the machine may lack."""

from __future__ import annotations

import math
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridle.engine.control.decision import mask_of
from bridle.engine.interfaces import AsyncSampler
from bridle.engine.scheduling.step_plan import SampleRow, ScoreRun
from bridle.lora import adapter_kernel
from bridle.model.device_sampler import DeviceSampler
from bridle.model.sampler import StandardSampler
from bridle.model.sampler_self_test import find_problem, tried_sampler
from bridle.model.sampling.columns import FLOATS, INTS, SPAN, Columns, FixedTable, Section, columns_of
from bridle.model.sampling.gpu_token_history import DeviceTokenHistory
from bridle.model.sampling.mask_ring import MaskRing
from bridle.model.sampling.penalties import Histories
from bridle.sampling import SamplingParams
from bridle.sampling_values import LogitBias
from tests.kernels import check_properties, needs_triton
from tests.model.sampling_kit import random_logits, row, run

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCAB = 300


# -- the choice --------------------------------------------------------------------------------------------------


def test_a_gpu_without_triton_draws_in_plain_torch_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter_kernel, "find_spec", lambda name: None)
    assert isinstance(tried_sampler(CUDA, torch.bfloat16, VOCAB), StandardSampler)
    assert "sampling on cuda runs in plain torch, not in kernels: that needs Triton" in caplog.text


@pytest.mark.parametrize("max_elements", [1, 4 * VOCAB, 1 << 20])
def test_scores_are_those_of_the_standard_sampler_in_parts_of_any_size(max_elements: int) -> None:
    logits = random_logits(14, VOCAB).bfloat16()
    logits[5, ::2] = -torch.inf
    logits[6], logits[7] = -torch.inf, torch.nan
    runs = [ScoreRun(1, 2, tuple(range(50, 60)), 4), ScoreRun(2, 0, (7, VOCAB + 5)), ScoreRun(3, 1, (), 2)]
    runs.append(ScoreRun(4, 13, (-1,), VOCAB + 9))
    want = run(logits, scores=runs).scores
    have = run(logits, scores=runs, sampler=DeviceSampler(CPU, max_elements)).scores
    assert [len(each) for each in have] == [10, 2, 0, 1]
    for wanted, found in zip(chain(*want), chain(*have), strict=True):
        assert (found.token, found.rank) == (wanted.token, wanted.rank)
        assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-5)


def test_the_trial_tells_samplers_that_fail_or_differ() -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no such instruction")

    def greedy(logits: torch.Tensor, batch: Any, history: Any) -> Any:
        result = StandardSampler()(logits, batch, history)
        result.tokens = [int(logits[each.logits_index].argmax()) for each in batch.rows]
        return result

    def silent(*given: Any) -> Any:
        result = StandardSampler()(*given)
        result.logprobs = [None] * len(result.tokens)
        return result

    assert find_problem(StandardSampler(), CPU, torch.bfloat16, VOCAB) is None
    assert find_problem(broken, CPU, torch.float32, VOCAB) == "RuntimeError: no such instruction"
    assert "was drawn in place of" in str(find_problem(greedy, CPU, torch.float32, VOCAB))
    assert "None is reported instead of Logprob" in str(find_problem(silent, CPU, torch.float32, VOCAB))


def test_it_need_not_be_waited_for() -> None:
    assert isinstance(DeviceSampler(CPU), AsyncSampler)
    assert not isinstance(StandardSampler(), AsyncSampler)


@pytest.mark.parametrize(
    ("fields", "is_rare"),
    [
        ({"temperature": 0.5, "top_k": 128, "top_p": 0.9, "min_p": 0.1, "logprobs": 5}, False),
        ({"repetition_penalty": 1.1, "logit_bias": {1: 2.0}}, False),
        ({"top_k": 129}, True),
        ({"top_k": VOCAB}, False),  # keeps everything
        ({"top_k": 129, "temperature": 0.0}, False),
        ({"typical_p": 0.9}, True),
        ({"typical_p": 0.9, "mirostat": 2, "temperature": 0.0}, False),  # of what is greedy these mean nothing
        ({"mirostat": 2}, True),
        ({"dry_multiplier": 0.8, "temperature": 0.0}, True),
        ({"logit_bias": LogitBias.of(dict.fromkeys(range(290), 1.0))}, True),
    ],
)
def test_which_rows_the_kernels_draw(fields: dict[str, Any], is_rare: bool) -> None:
    table = FixedTable()
    assert table.is_rare(row(**fields), VOCAB) is is_rare
    assert table.is_rare(SampleRow(0, 0, SamplingParams(**fields), num_traced=1), VOCAB)


# -- what kernels are told ---------------------------------------------------------------------------------------


def described(rows: list[SampleRow], slots: list[int], histories: dict[int, tuple[list[int], int]]) -> Columns:
    table = FixedTable()
    fixed = [table.of(each.sampling) for each in rows]
    return columns_of(
        rows, fixed, slots, VOCAB, Histories(), DeviceTokenHistory(CPU), lambda each: histories[each.seq_id]
    )


def numbers(columns: Columns, section: Section, dtype: Any, width: int = 1) -> list[list[Any]]:
    found: list[list[Any]] = columns.words[section.start : section.stop].view(dtype).reshape(-1, width).tolist()
    return found


def test_columns_say_what_rows_ask_for() -> None:
    rows = [
        row(4, key=-1, draw=2**63 + 5, temperature=0.0, top_p=0.5, logprobs=3),
        row(7, key=9, temperature=1e-40, top_k=20, min_p=0.25, bias=((5, 1.5), (5, 1.0), (2**40, 1.0))),
        row(2, top_k=5000, repetition_penalty=1.5, logit_bias={3: -math.inf}, logprobs=0, logprobs_mode="processed"),
        row(2, presence_penalty=0.5, frequency_penalty=-0.5, top_p=0.75),
    ]
    columns = described(rows, [-1, 6, 0, -1], {2: ([1, 2, 3], 2)})
    assert numbers(columns, columns.doubles, np.float64) == [[0.5], [1.0], [1.0], [0.75]]
    assert numbers(columns, columns.longs, np.uint64, 2) == [[2**64 - 1, 2**63 + 5], [9, 0], [0, 0], [0, 0]]
    ints = [each[:7] for each in numbers(columns, columns.ints, np.int32, INTS)]
    assert ints == [
        [4, -1, -1, -1, -1, 0, -1],
        [7, 6, -1, -1, 0, 20, 0],
        [2, 0, 0, 1, -1, 0, -1],
        [2, -1, 1, -1, -1, 0, 1],
    ]
    floats = np.array(numbers(columns, columns.floats, np.float32, FLOATS))
    assert floats[:, 0] == pytest.approx([0.0, 1e-30, 1.0, 1.0])
    assert floats[:, 1] == pytest.approx([-math.inf, math.log(0.25), -math.inf, -math.inf])
    assert floats[:, 2:] == pytest.approx(np.array([[1, 0, 0], [1, 0, 0], [1.5, 0, 0], [1, 0.5, -0.5]]))
    for start, num_prompt, length, num_kept, _ in numbers(columns, columns.histories, np.int32, SPAN):
        assert num_kept == 0
        assert (columns.words[start : start + length].tolist(), num_prompt) == ([1, 2, 3], 2)
    assert columns.longest_history == 3
    biases = numbers(columns, columns.biases, np.int32, SPAN)
    told = [columns.words[start : start + 2 * length] for start, length, *_ in biases]
    assert [words[: len(words) // 2].tolist() for words in told] == [[5, -1], [3]]
    assert [words[len(words) // 2 :].view(np.float32).tolist() for words in told] == [[2.5, 1.0], [-math.inf]]
    assert numbers(columns, columns.cut_rows, np.int32) == [[1], [3]]
    assert numbers(columns, columns.told_rows, np.int32, 2) == [[0, 0], [2, 1]]
    assert (columns.cut, columns.told, columns.num_best) == ([1, 3], [0, 2], 3)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans()), min_size=1, max_size=9))
def test_sections_begin_where_kernels_load_most_at_once(kinds: list[tuple[int, bool, bool]]) -> None:
    rows = [
        row(n, frequency_penalty=0.5 if length else 0.0, top_p=0.5 if cut else 1.0, logprobs=1 if tells else None)
        for n, (length, cut, tells) in enumerate(kinds)
    ]
    columns = described(rows, [-1] * len(rows), {n: ([5] * length, 0) for n, (length, _, _) in enumerate(kinds)})
    sections = [columns.doubles, columns.longs, columns.ints, columns.floats, columns.histories, columns.biases]
    sections += [columns.cut_rows, columns.told_rows]
    sections += [Section(span[0], span[0] + span[2]) for span in numbers(columns, columns.histories, np.int32, SPAN)]
    assert all(section.start % 4 == 0 for section in sections)
    used = sorted(section for section in sections if section.stop > section.start)
    assert all(one.stop <= other.start for one, other in pairwise(used))


# -- kept histories ----------------------------------------------------------------------------------------------

#: A sequence, what it does to its tokens, and by how many.
CHANGES = st.tuples(st.integers(0, 5), st.sampled_from(["grow", "rewind", "other"]), st.integers(1, 9))


class Device:
    """A fake device that keeps token histories as the kernel does, and counts the tokens that it received."""

    def __init__(self, max_words: int) -> None:
        self.kept, self.histories = DeviceTokenHistory(CPU, max_words), Histories()
        self.num_told = 0

    def read(self, tokens: dict[int, list[int]]) -> dict[int, list[int]]:
        """Return the token histories that the device has for these sequences after the step."""
        rows = [row(seq_id=each, presence_penalty=1.0) for each in tokens]
        fixed = [FixedTable().of(each.sampling) for each in rows]
        columns = columns_of(
            rows, fixed, [-1] * len(rows), VOCAB, self.histories, self.kept, lambda each: (tokens[each.seq_id], 0)
        )
        found = {}
        for each, span in zip(rows, numbers(columns, columns.histories, np.int32, SPAN), strict=True):
            start, _, length, num_kept, base = span
            old = self.kept.words[base : base + num_kept].tolist() if num_kept else []
            found[each.seq_id] = old + columns.words[start : start + length - num_kept].tolist()
            if base >= 0:
                assert base + length <= self.kept.words.numel()
                self.kept.words[base : base + length] = torch.tensor(found[each.seq_id], dtype=torch.int32)
            self.num_told += length - num_kept
        self.kept.keep()
        return found


@given(st.lists(st.lists(CHANGES, min_size=1, max_size=6), max_size=12), st.sampled_from([300, 1100, 1 << 14]))
def test_kept_histories_are_the_sequences_own_whatever_happens_to_them(steps: list[Any], max_words: int) -> None:
    """Token histories on the device are right, also if its memory holds only few of them, or none."""
    device = Device(max_words)
    tokens: dict[int, list[int]] = {number: [number] * (200 + 20 * number) for number in range(6)}
    for step in steps:
        for seq_id, change, count in step:
            if change == "rewind":
                del tokens[seq_id][-count:]
            elif change == "other":
                tokens[seq_id] = [50 + count] * 7
            tokens[seq_id] += [100 + count] * count
        asked = {seq_id: tokens[seq_id] for seq_id, _, _ in step}
        assert device.read(asked) == asked


def test_only_new_tokens_are_told() -> None:
    device = Device(1 << 14)
    tokens = {3: list(range(40)), 4: [7] * 250}
    device.read(tokens)
    device.num_told = 0
    for number in range(5):
        for each in tokens.values():
            each.append(number)
        assert device.read(tokens) == tokens
    assert device.num_told == 10


def test_a_draw_that_failed_has_kept_nothing() -> None:
    kept, histories = DeviceTokenHistory(CPU), Histories()
    histories.array(1, [5, 6, 7])
    for _ in range(2):
        assert kept.place([histories.known(1)], [3])[0].num_kept == 0
    kept.keep()
    assert kept.place([histories.known(1)], [3])[0].num_kept == 3


# -- masks -------------------------------------------------------------------------------------------------------


def bits(mask: bytes, num_words: int) -> list[int]:
    return np.frombuffer(mask[: 4 * num_words].ljust(4 * num_words, b"\0"), np.int32).tolist()


MASKS = [mask_of(range(n, VOCAB, 1 + n % 5), VOCAB) for n in range(60)] + [b"", b"\xff", bytes(500)]


@given(st.lists(st.lists(st.none() | st.sampled_from(MASKS), min_size=1, max_size=30), min_size=1, max_size=12))
def test_slots_hold_the_masks_of_the_step(steps: list[list[bytes | None]]) -> None:
    ring = MaskRing(CPU)
    num_words = -(-VOCAB // 32)
    for masks in steps:
        slots = ring.place([None if mask is None else bytes(bytearray(mask)) for mask in masks], VOCAB)
        assert [slot < 0 for slot in slots] == [mask is None for mask in masks]
        for mask, slot in zip(masks, slots, strict=True):
            if mask is not None:
                assert ring.masks[slot].tolist() == bits(mask, num_words)
        ring.release()


def test_a_mask_that_is_there_is_not_copied_again() -> None:
    ring = MaskRing(CPU)
    fixed, other = mask_of([1, 2], VOCAB), mask_of([5], VOCAB)
    slots = ring.place([fixed, other, bytes(bytearray(fixed)), fixed], VOCAB)
    assert slots == [0, 1, 0, 0]
    ring.masks.fill_(77)
    assert ring.place([bytes(bytearray(other)), None, fixed], VOCAB) == [1, -1, 0]
    assert ring.masks.eq(77).all()
    assert ring.place([mask_of([7], VOCAB)], VOCAB) == [2]


def test_a_wider_vocabulary_and_larger_steps_get_a_new_ring() -> None:
    ring = MaskRing(CPU)
    ring.place([MASKS[0]], VOCAB)
    wide = mask_of([1000], 1001)
    slots = ring.place([wide], 1001)
    assert ring.masks[slots[0]].tolist() == bits(wide, 32)
    many = [mask_of([n], 1001) for n in range(200)]
    slots = ring.place(many, 1001)
    assert ring.masks[slots].tolist() == [bits(mask, 32) for mask in many]


# -- the kernels -------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_properties_hold_in_the_interpreter() -> None:
    check_properties("tests/model/draw_properties.py")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "bf16"), (86, "fp16"), (90, "bf16"), (90, "fp32"), (100, "bf16")]
)
def test_kernels_compile_within_registers(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels, compiled without a GPU, must fit into the registers of one program, and use no approximate operation."""
    from tests.lora.compiled import SHARED_MEMORY, usage
    from tests.model.draw_compiled import compile_all

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in compile_all(capability, dtype):
        assert kernel.metadata.shared <= SHARED_MEMORY[capability], kernel.name
        registers, spilled = usage(kernel, capability, tmp_path)
        assert registers <= 128, kernel.name  # two programs of 8 warps at a time
        assert not spilled, kernel.name
        code = kernel.asm["ptx"]
        for inexact in ("approx", "div.full", ".ftz"):
            assert inexact not in code, f"{kernel.name} computes with {inexact}"
        if kernel.name not in ("count_tokens", "place_biases"):
            is_wide = "ld.global.v4" in code or "ld.global.v2.b64" in code
            assert is_wide, f"{kernel.name} does not load 16 bytes at a time"
