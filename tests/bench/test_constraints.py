"""The benchmark of constraints measures texts that fit, on vocabularies of the right size. Times are never asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.bench import BenchSettings
from bridle.engine.control.decision import mask_of
from bridle.engine.scheduling.step_plan import SampleBatch, SampleRow, StepPlan
from bridle.sampling import SamplingParams
from dev.bench.constraints import MaskedExecutor, _answers, _p50_p99, _steps, cases, made_up_vocabulary
from dev.bench.constraints_model import beside_free


def test_vocabularies_are_as_large_as_they_should_be() -> None:
    vocabulary = made_up_vocabulary(3000)
    assert vocabulary.size == len(set(vocabulary.tokens)) == 3000
    assert vocabulary.eos == (2999,)


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
