"""Tests of choices next to other requests and features: these do not change the chosen options."""

from __future__ import annotations

from typing import Any

import pytest

from bridle.controllers import PythonControllerPool
from bridle.controllers.composition import compose
from bridle.controllers.python import Controller, SequenceView
from bridle.engine.control.decision import Decision
from bridle.errors import InternalError
from bridle.outputs import FinishReason
from bridle.structured_output import Choice, Constraint, JsonSchema
from bridle.testing.async_executor import LateScriptedExecutor
from tests.structured_output.kit import Lab, text_vocabulary

CITIES = Choice(["paris", "rome", "madrid", "madras", "name", "no"])
THING = JsonSchema(
    {
        "type": "object",
        "properties": {"city": {"enum": [*CITIES.options]}, "ok": {"type": "boolean"}, "n": {"type": "integer"}},
        "required": ["city", "ok", "n"],
        "additionalProperties": False,
    }
)
CONSTRAINTS = pytest.mark.parametrize("constraint", [CITIES, THING], ids=["choice", "inside"])
TEMPERATURES = (0.0, 15.0)

_plain: dict[str, list[tuple[int, ...]]] = {}


def outputs(constraint: Constraint, lab: dict[str, Any] | None = None, **fields: Any) -> list[tuple[int, ...]]:
    """Return the tokens of requests that run together at several temperatures and seeds. `lab` has engine options."""
    with Lab(text_vocabulary(), seed=7, **(lab or {})) as made:
        asked = [
            made.request(constraint, (1, 2, 3, 4, 5, number), temperature=temperature, seed=number, **fields)
            for number in range(3)
            for temperature in TEMPERATURES
        ]
        return [tuple(found[0].tokens) for found in made.run(*asked)]


def plain_outputs(constraint: Constraint) -> list[tuple[int, ...]]:
    """Return the tokens of the same requests with default settings."""
    if constraint.key not in _plain:
        _plain[constraint.key] = outputs(constraint)
    return _plain[constraint.key]


@pytest.mark.few(9)
@CONSTRAINTS
@pytest.mark.parametrize(
    ("lab", "fields"),
    [
        ({"scripted": LateScriptedExecutor}, {}),
        ({"max_num_seqs": 2}, {}),
        ({"max_num_batched_tokens": 3}, {}),
        ({"num_blocks": 24}, {}),
        ({"faults": {2: InternalError("once")}}, {}),
        ({"sample_faults": {1: InternalError("once")}}, {}),
        ({"sample_faults": {2: InternalError("once")}, "scripted": LateScriptedExecutor}, {}),
        ({}, {"logprobs": 0}),
        ({}, {"logprobs": 2, "prompt_logprobs": 1}),
        ({}, {"speculate": 4}),
        ({}, {"speculate": 6, "prediction_ids": tuple(b'{"city": "rome')}),
        ({"scripted": LateScriptedExecutor}, {"speculate": 4}),
        ({}, {"n": 2}),
        ({}, {"stop": ("zzz",)}),
    ],
    ids=lambda value: ",".join(f"{name}" for name in value) or "-",
)
def test_what_goes_on_around_a_choice_changes_no_token(
    constraint: Constraint, lab: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert outputs(constraint, lab, **fields) == plain_outputs(constraint)


class Watcher(Controller):
    """A controller that allows every token."""

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample()


@CONSTRAINTS
def test_a_choice_beside_a_controller_is_masked(constraint: Constraint) -> None:
    vocab = text_vocabulary()
    with Lab(vocab, pools=[PythonControllerPool(vocab.size)], is_composed=True, record=True) as lab:
        output = lab.run_one(compose(Watcher(), constraint))
        assert output.finished is not None and output.finished.reason is FinishReason.CONTROLLER
        assert not any(batch.scores for batch in lab.executor.batches)
