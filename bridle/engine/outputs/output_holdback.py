"""Holds back tokens from the client that could become part of a banned phrase or of text that a policy forbids.

`OutputProcessor` asks this module which tokens to send after a new token, and whether tokens remain if all are banned.
The module uses only token events.
"""

from __future__ import annotations

from dataclasses import replace

from bridle.engine.guardrails.guardrail_matcher import GuardrailMatcher
from bridle.engine.guardrails.guardrails import GuardrailMatch, Guardrails, RuleFailed
from bridle.engine.interfaces import TextDecoder
from bridle.engine.outputs.stop_strings import OutputText, Released
from bridle.engine.sequence import Sequence
from bridle.outputs import TokenEvent

#: Number of last tokens of a prompt with which forbidden text may begin.
_MAX_LEAD_TOKENS = 256


def watch_of(seq: Sequence, guard: Guardrails, decoder: TextDecoder) -> GuardrailMatcher:
    """Return a matcher that applies the rules and starts with the end of the prompt."""
    most = _MAX_LEAD_TOKENS if guard.looks_through else min(guard.reach, _MAX_LEAD_TOKENS)
    num_tokens = min(len(seq.tokens), most)
    at = len(seq.tokens) - num_tokens
    state = decoder.open(seq.tokens[:at], seq.sampling.skip_special_tokens)
    lead = "".join([state.push(token) for token in seq.tokens[at:]])
    return GuardrailMatcher(guard, guard.tail(lead))


def push_guarded(seq: Sequence, text: OutputText, guard: Guardrails, token: int, forced: bool) -> Released:
    """Return the effect of a new token on a text with guardrails. If a rule fails, the text counts as forbidden."""
    usage = seq.output.usage
    try:
        released = text.push(token, forced)
    except RuleFailed as failure:
        return Released("", num_banned=1, hit=GuardrailMatch(replace(failure.rule, action="fail")))
    for budget in guard.budgets if released.hit is None else ():
        if budget.max_work is not None and usage.sampled_tokens + usage.forced_tokens >= budget.max_work:
            return released._replace(hit=GuardrailMatch(budget))
    return released


def hold(seq: Sequence, text: OutputText, event: TokenEvent) -> list[TokenEvent]:
    """Hold back a new token; return the tokens to send. Text of the returned tokens cannot become part of a banned
    phrase. Each held token has the text up to its end, so that held text can be removed later."""
    output = seq.output
    output.held.append(event)
    num_settled = min(text.num_settled - text.num_told, len(output.held))
    if num_settled <= 0:
        return []
    hidden = "".join([each.text for each in output.held])
    settled, kept = output.held[:num_settled], output.held[num_settled:]
    *pieces, rest = text.split(hidden, sum(len(each.text) for each in output.unsent), num_settled)
    output.held = [replace(each, text="" if i else rest) for i, each in enumerate(kept)]
    output.num_retries = 0
    text.goes_by_last = False
    output.bans = {at: tokens for at, tokens in output.bans.items() if at >= seq.num_prompt + text.num_told}
    return [replace(each, text=piece) for each, piece in zip(settled, pieces, strict=True)]


def trim(seq: Sequence, num_chars: int) -> int:
    """Remove characters from the end of the text that is not sent yet. An earlier held token may contain the text of
    removed tokens. Returns the number of removed characters."""
    output, left = seq.output, num_chars
    for each in reversed(output.unsent):
        kept = max(len(each.text) - left, 0)
        left, each.text = left - len(each.text) + kept, each.text[:kept]
    for number in reversed(range(len(output.held))):
        text = output.held[number].text
        kept = max(len(text) - left, 0)
        left, output.held[number] = left - len(text) + kept, replace(output.held[number], text=text[:kept])
    return num_chars - left


def release(seq: Sequence) -> list[TokenEvent]:
    """Stop holding back tokens. Returns the events that were held back."""
    held, seq.output.held = seq.output.held, []
    if held and seq.output.text is not None:
        seq.output.text.num_told += len(held)
    return held


def find_alternative(seq: Sequence) -> bool:
    """Return whether the output may continue in another way if bans leave no token to sample.

    A ban on the first token of a phrase may exclude other texts too. So bans on first tokens are removed. Until text is
    released, phrases are then banned at their last token, which excludes no other text. If still no token is left, the
    last sampled token before this position is banned.
    """
    text, meter = seq.output.text, seq.output.meter
    if not seq.output.bans.get(len(seq.tokens)):
        return False
    if meter is not None and meter.usage.rewound_runs and not meter.is_given_up:
        meter.is_given_up = True
        seq.output.bans.clear()
        seq.clamp_computed()
        return True
    if text is None:
        return False
    if text.goes_by_last:
        seq.output.num_banned = text.num_since_drawn()
        return seq.output.num_banned > 0
    text.goes_by_last = True
    seq.output.bans.clear()
    seq.clamp_computed()
    return True
