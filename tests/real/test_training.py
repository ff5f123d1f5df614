"""Tests that the example's training loop improves a small real model on a recipe's questions that were not in
training."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.recipes import calculator
from tests.real.controlled import controlled
from tests.real.material import model_path

pytest.importorskip("peft", reason="PEFT is not here: pip install 'bridle-llm[bench]'")
from examples.training.improve_recipe import Learner, Plan, improve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_a_recipe_is_right_more_often(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with controlled("smollm2", request, tmp_path / "store") as llm:
        learner = Learner(str(model_path("smollm2")), tmp_path / "adapter")
        before, after = improve(llm, learner, calculator.RECIPE, Plan(rounds=1, held_out=60))
    assert after > before + 0.1
