"""Handles forced tokens that are less likely than the request's `constraint_floor` allows."""

from __future__ import annotations

from bridle.engine.outputs.constraint_meter import ForcedRun
from bridle.engine.outputs.output_processor import OutputProcessor
from bridle.engine.sequence import Sequence
from bridle.errors import ControllerError


def apply_floor(seq: Sequence, progress: OutputProcessor) -> bool:
    """Apply the request's action to an output with a run of forced tokens below `constraint_floor`. Returns whether
    other tokens replace the tokens that were sampled in this step."""
    run, seq.output.unlikely = seq.output.unlikely, None
    meter, action = seq.output.meter, seq.sampling.on_constraint_floor
    assert run is not None and meter is not None
    if action == "refuse":
        progress.fail(seq, _refusal(seq, run, progress))
        return True
    if action == "flag" or run.start <= seq.num_prompt or not meter.may_rewind():
        return False
    _rewind(seq, run, progress)
    return True


def _refusal(seq: Sequence, run: ForcedRun, progress: OutputProcessor) -> ControllerError:
    text = progress.spell(seq, run)
    return ControllerError(
        f"constraint_floor: got {seq.sampling.constraint_floor:g}; the constraint forces {text!r}, whose "
        f"log-probability is {run.logprob:.2f}. Allow what the model would write, "
        "lower the floor, or send on_constraint_floor='flag'."
    )


def _rewind(seq: Sequence, run: ForcedRun, progress: OutputProcessor) -> None:
    """Roll back the run of forced tokens and the token before it, and ban the token before the run at its place."""
    output, position = seq.output, run.start - 1
    token, num_tokens = seq.tokens[position], len(seq.tokens) - position
    assert output.meter is not None
    output.ending = None  # the ending may have waited for this score
    progress.rewind(seq, num_tokens)
    output.meter.usage.rewound_runs += 1
    output.bans.setdefault(position, set()).add(token)
    progress.policing.note_change(seq, num_tokens)
