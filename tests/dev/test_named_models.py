"""Tests that the table of models by name agrees with the survey of architectures and the table of GGUF families."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.model.support_checks import KNOWN_FAMILIES, RECURRENT_FAMILIES
from dev.bench.family_trial import SERVED, _try
from dev.bench.named_models import NAMED_MODELS, named_rows, named_table, states_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert named_table(states_of(text)) in text


def test_each_model_has_a_result() -> None:
    """Every trial of a model is in the survey. A model is served if the tests compare its family."""
    states = states_of(PAGE.read_text(encoding="utf-8"))
    assert {trial for model in NAMED_MODELS for trial in model.trials} <= states.keys()
    assert len({model.name for model in NAMED_MODELS}) == len(NAMED_MODELS) == 62
    folders = {name: folder for name, _, folder, _ in named_rows(states)}
    for model in NAMED_MODELS:
        families = {trial.partition("/")[0] for trial in model.trials}
        if families and families <= KNOWN_FAMILIES | RECURRENT_FAMILIES:
            assert folders[model.name] == "yes"


def test_a_cause_is_named() -> None:
    rows = named_rows({"qwen3/causal": "refused: encoder-decoder"})
    assert rows[0][2] == "no: encoder-decoder" and rows[3][2] == "no: untried"
    assert rows[0][3] == "`qwen3`" and {row[0]: row[3] for row in rows}["LFM3"] == "no: llama.cpp lacks it"


@pytest.mark.slow
@pytest.mark.parametrize("trial", sorted({trial for model in NAMED_MODELS for trial in model.trials}))
def test_the_survey_still_holds(trial: str, tmp_path: Path) -> None:
    """Each architecture is tried again, with a tiny checkpoint that has all kinds of its layers."""
    wanted = states_of(PAGE.read_text(encoding="utf-8"))[trial]
    family, kind = trial.split("/")
    state, reason = _try(family, kind, tmp_path)
    assert (state == SERVED) == (wanted == SERVED), reason
