"""Enforces banned phrases and an operator's policies on outputs.

`output_holdback` has not sent the forbidden text to the client yet, so this module can roll it back. After the
rollback, other tokens are sampled or the output ends, depending on the rule.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from bridle.engine.guardrails.guardrails import BudgetRule, GuardrailMatch, RuleFailed, TextRule
from bridle.engine.interfaces import Change, TextDecoder
from bridle.engine.sequence import Sequence
from bridle.engine.statistics import EngineStatistics
from bridle.errors import BridleError, ControllerError, InvalidRequest
from bridle.outputs import FinishReason

#: Maximum number of times in a row that an output is rolled back and continued with other tokens.
MAX_RETRIES = 256
Tokens = Seq[int]
_DONE = {"retry": "retried", "end": "ended", "replace": "replaced", "fail": "failed"}


class Changes(Protocol):
    """The changes that a `PolicyEnforcer` makes to an output; `OutputProcessor` implements them."""

    def rewind(self, seq: Sequence, num_tokens: int) -> None: ...
    def drop_held(self, seq: Sequence, num_tokens: int) -> None: ...
    def finish(self, seq: Sequence, reason: FinishReason, stop: int | str | None = None) -> None: ...
    def fail(self, seq: Sequence, error: BridleError) -> None: ...


class PolicyEnforcer:
    """Enforces the rules of an output by calling methods of `changes`."""

    def __init__(self, changes: Changes, statistics: EngineStatistics, decoder: TextDecoder | None) -> None:
        self._changes = changes
        self._statistics = statistics
        self._decoder = decoder

    def end_by(self, seq: Sequence, hit: GuardrailMatch) -> bool:
        """End an output because a rule matched."""
        self._note(hit.policy, hit.rule.version, "ended")
        is_budget = isinstance(hit.rule, BudgetRule)
        reason = FinishReason.LENGTH if is_budget else FinishReason.CONTROLLER
        self._changes.finish(seq, reason, None if is_budget else f"policy {hit.policy}")
        return True

    def _note(self, name: str, version: str, action: str) -> None:
        """Count an action of a policy for the metrics."""
        self._statistics.policies[f"{name} {version} {action}"] += 1

    def ban(self, seq: Sequence) -> tuple[int, ...] | None:
        """Roll back the tokens of forbidden text. Returns the tokens with which a policy replaces the forbidden text.
        Returns None if the output ended, or if other tokens will be sampled. If other tokens are sampled, the first
        forbidden token is banned at its position. After too many attempts, the output ends with an error."""
        output, num_tokens, hit = seq.output, seq.output.num_banned, seq.output.hit
        output.num_banned, output.hit = 0, None
        replaced = None
        if hit is not None:
            replaced = self._ban_by(seq, hit, num_tokens)
        else:
            self._ban_phrase(seq, num_tokens)
        if replaced is None:
            self.note_change(seq, num_tokens)
        return replaced

    def note_change(self, seq: Sequence, num_removed: int, num_added: int = 0, policy: str = "") -> None:
        """Record a change at the end of the sequence that a policy made and the controller did not decide. The
        controller is notified of the policy's change."""
        if seq.control.pool is not None:
            seq.output.changes.append(Change(len(seq.tokens), num_removed, num_added, policy))

    def take_changes(self, seq: Sequence) -> tuple[Change, ...]:
        """Return the changes that policies made since the last call, and clear the list."""
        changes, seq.output.changes = seq.output.changes, []
        return tuple(changes)

    def _ban_phrase(self, seq: Sequence, num_tokens: int) -> None:
        """Roll back a banned phrase of the request."""
        output = seq.output
        position = len(seq.tokens) - num_tokens
        token = seq.tokens[position]
        self._changes.rewind(seq, num_tokens)
        output.bans.setdefault(position, set()).add(token)
        output.num_retries += 1
        if output.num_retries > MAX_RETRIES:
            message = f"{MAX_RETRIES} ways to go on all led to one of the banned_phrases"
            self._changes.fail(seq, InvalidRequest(message, "banned_phrases"))

    def _ban_by(self, seq: Sequence, hit: GuardrailMatch, num_tokens: int) -> tuple[int, ...] | None:
        """Roll back text that a rule forbids, and take the action that the rule names."""
        output, rule, changes = seq.output, hit.rule, self._changes
        assert output.text is not None and isinstance(rule, TextRule)
        token, is_drawn = seq.tokens[-num_tokens], output.text.is_drawn(num_tokens)
        spelled, kept = self._spelled(seq, hit, rule, num_tokens) if rule.action == "replace" else ((), ())
        changes.rewind(seq, num_tokens)
        self._note(rule.policy, rule.version, _DONE[rule.action])
        output.num_retries += 1
        if rule.action == "fail":
            changes.fail(seq, ControllerError(f"policy {rule.policy} failed"))
        elif rule.action == "end":
            changes.finish(seq, FinishReason.CONTROLLER, f"policy {rule.policy}")
        elif output.num_retries > MAX_RETRIES:
            message = f"policy {rule.policy}: {MAX_RETRIES} ways to go on all led to what it forbids"
            changes.fail(seq, ControllerError(message))
        elif rule.action == "replace":
            self.note_change(seq, num_tokens - len(kept), len(spelled), rule.policy)
            return *spelled, *kept
        elif not is_drawn:
            message = f"policy {rule.policy} forbids what is forced at position {len(seq.tokens)}"
            changes.fail(seq, ControllerError(message))
        else:
            output.bans.setdefault(len(seq.tokens), set()).add(token)
        return None

    def _spelled(self, seq: Sequence, hit: GuardrailMatch, rule: TextRule, num_tokens: int) -> tuple[Tokens, Tokens]:
        """Return the tokens that replace the last `num_tokens` tokens of a sequence. The result includes tokens after
        the match that stay unchanged. The last unchanged token may end inside a character."""
        assert seq.output.text is not None and self._decoder is not None
        before, behind, num_kept = seq.output.text.around(hit, num_tokens)
        spelled = self._decoder.tokens_of(before + rule.replacement + behind)
        return spelled, seq.tokens[len(seq.tokens) - num_kept :]

    def close(self, seq: Sequence) -> str:
        """Remove forbidden text from the text that is held back at the end of the output. Returns the held-back text
        without the forbidden text."""
        output = seq.output
        if output.text is None:
            return ""
        try:
            closed = output.text.close("".join([event.text for event in output.held]))
        except RuleFailed:
            closed = len(output.held), ""
        if closed is None:
            return ""
        num_tokens, text = closed
        self._changes.drop_held(seq, min(num_tokens, len(output.held)))
        self._note(*output.text.closed_by, "replaced")
        return text
