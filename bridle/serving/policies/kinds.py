"""Compiles each kind of policy from its settings. A compiled policy consists of rules for texts, additional
controllers, or limits. A new kind of policy is one function in `KINDS`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import regex

from bridle.controllers.plugins import make_demanded
from bridle.controllers.thinking import ThinkingBudget, sentence_tokens, tags_of
from bridle.engine.guardrails import guardrails
from bridle.engine.guardrails.text_normalization import Reading, fold
from bridle.errors import BridleError, InvalidRequest, UnsupportedFeature
from bridle.sampling_values import MAX_WATERMARK_CONTEXT, Watermark
from bridle.serving.policies.fields import PolicyFields
from bridle.structured_output.spec import parse as parse_constraint
from bridle.watermark import read_key

if TYPE_CHECKING:
    from bridle.engine.interfaces import ExecutorInfo
    from bridle.tokenizer import Tokenizer


class ForModel(Protocol):
    """The properties of a model that policies need."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def info(self) -> ExecutorInfo: ...


#: Makes a controller for one model; None if the policy does not concern the model.
MakeController = Callable[[ForModel], object | None]

_ACTIONS = ("retry", "end", "replace")
_HASH = re.compile(r"[0-9a-f]{64}")
_MOST_MATCH = 8_192


@dataclass(frozen=True, slots=True)
class CompiledPolicy:
    """The compiled form of a policy. `allowed` is a pattern for the permitted characters."""

    texts: tuple[guardrails.TextRule, ...] = ()
    loops: tuple[guardrails.LoopRule, ...] = ()
    budgets: tuple[guardrails.BudgetRule, ...] = ()
    max_tokens: int | None = None
    allowed: str | None = None
    controller: MakeController | None = None
    watermark: Watermark | None = None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The fields that every kind of policy has."""

    name: str
    version: str
    on_failure: guardrails.OnFailure

    def rule(self, pattern: str, **more: Any) -> guardrails.TextRule:
        """Return a rule of this policy for texts."""
        return guardrails.TextRule(self.name, pattern, version=self.version, on_failure=self.on_failure, **more)


def _action(fields: PolicyFields, default: guardrails.Action = "retry") -> tuple[guardrails.Action, str]:
    """Return the action for a match, and the text that replaces the match."""
    action = cast("guardrails.Action", fields.choice("action", _ACTIONS, default))
    replacement = fields.text("replacement", most=200)
    if replacement and action != "replace":
        raise fields.error("replacement", f"goes with action 'replace', not {action!r}")
    return action, replacement


def _checked(fields: PolicyFields, key: str, rule: guardrails.TextRule) -> guardrails.TextRule:
    """Return a rule after checking that its pattern is valid and its replacement does not match the rule."""
    try:
        pattern = guardrails.compiled(rule.pattern)
        is_empty = pattern.search("") is not None
    except (regex.error, RecursionError, OverflowError) as error:
        raise fields.error(key, f"is not a valid pattern: {error}") from None
    if is_empty:
        raise fields.error(key, "matches the empty text; must match at least one character")
    if rule.action == "replace" and guardrails.Guardrails((rule,)).clean(rule.replacement) != rule.replacement:
        raise fields.wrong("replacement", rule.replacement, "a text that the policy allows")
    return rule


def _phrases(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    phrases, is_exact, is_whole = fields.texts("phrases"), fields.flag("exact"), fields.flag("whole_words")
    action, replacement = _action(fields)
    seen = [phrase if is_exact else fold(phrase) for phrase in phrases]
    for phrase, each in zip(phrases, seen, strict=True):
        if not each.strip():
            raise fields.wrong("phrases", phrase, "a list of phrases with characters that are seen")
    words = "|".join(regex.escape(each) for each in sorted(set(seen), key=len, reverse=True))
    pattern = rf"\b(?:{words})\b" if is_whole else words
    longest = max(map(len, seen))
    rule = own.rule(
        pattern,
        action=action,
        replacement=replacement,
        reading="written" if is_exact else "folded",
        is_late=is_whole or action == "replace",
        max_length=max(longest + 1, 2),
    )
    return CompiledPolicy((_checked(fields, "phrases", rule),))


def _pattern(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    pattern, is_anyway = fields.need("pattern", str), fields.flag("ignore_case")
    action, replacement = _action(fields)
    most = fields.count("max_length", guardrails.MAX_MATCH, most=_MOST_MATCH) or guardrails.MAX_MATCH
    whole = f"(?i:{pattern})" if is_anyway else pattern
    is_late = action == "replace" or fields.flag("longest")
    reading: Reading = "seen" if fields.flag("seen") else "written"
    rule = own.rule(whole, action=action, replacement=replacement, is_late=is_late, max_length=most, reading=reading)
    return CompiledPolicy((_checked(fields, "pattern", rule),))


#: Secrets that can be redacted: pattern, maximum length of a match, replacement, and a check of the match.
_SECRETS: Mapping[str, tuple[str, int, str, str]] = {
    "email": (
        # Quotes and markup before an address are not part of it, as in `mail='ann@example.org'`.
        r"[\p{L}\p{N}_](?:[\p{L}\p{N}_=]|(?<!=)[.!#$%&'*+/?^`{|}~-]){0,63}@"
        r"(?:[\p{L}\p{N}](?:[\p{L}\p{N}-]{0,61}[\p{L}\p{N}])?[.\u3002]){1,8}\p{L}{2,24}",
        330,
        "[e-mail]",
        "",
    ),
    "card": (r"(?<!\p{Nd})\p{Nd}(?:[ \u00a0.\-\u2010-\u2015]?\p{Nd}){12,18}", 64, "[card]", "card"),
    "key": (
        r"(?<![A-Za-z0-9])(?:sk-[A-Za-z0-9_-]{16,200}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{36,100}"
        r"|github_pat_[A-Za-z0-9_]{22,100}|glpat-[A-Za-z0-9_-]{20,60}|xox[abpros]-[A-Za-z0-9-]{10,100}"
        r"|AIza[A-Za-z0-9_-]{35}|hf_[A-Za-z0-9]{30,60}|brd-[A-Za-z0-9_-]{43}"
        r"|eyJ[A-Za-z0-9_-]{10,400}\.eyJ[A-Za-z0-9_-]{10,1200}\.[A-Za-z0-9_-]{10,400})",
        2_048,
        "[key]",
        "",
    ),
}


#: Readings in which a secret is searched, because invisible characters may hide the secret's boundaries in one of these
#: readings.
_READINGS: tuple[Reading, ...] = ("seen", "written")


def _redact(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    what, replacement = fields.texts("what", tuple(_SECRETS)), fields.pop("replacement", str)
    rules = []
    for name in what:
        if name not in _SECRETS:
            raise fields.wrong("what", name, f"of {', '.join(_SECRETS)}")
        pattern, longest, usual, check = _SECRETS[name]
        text = usual if replacement is None else replacement
        for reading in _READINGS:
            rule = own.rule(
                pattern,
                action="replace",
                replacement=text,
                is_late=True,
                check=check,
                max_length=longest,
                reading=reading,
            )
            rules.append(_checked(fields, "replacement", rule))
    return CompiledPolicy(tuple(rules))


def _loops(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    times = fields.count("times", 8, least=2, most=1_000) or 8
    most = fields.count("max_length", 200, most=_MOST_MATCH) or 200
    least = fields.count("min_length", 1, most=most) or 1
    total = fields.count("min_total", 40, most=1 << 20) or 40
    return CompiledPolicy(loops=(guardrails.LoopRule(own.name, times, least, most, total, own.version),))


def _length(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    tokens, chars, work = (fields.count(key, None) for key in ("max_tokens", "max_chars", "max_work"))
    if tokens is None and chars is None and work is None:
        raise fields.error("max_tokens", "is missing; must be a number, or else max_chars or max_work")
    budgets = () if chars is None and work is None else (guardrails.BudgetRule(own.name, chars, work, own.version),)
    return CompiledPolicy(budgets=budgets, max_tokens=tokens)


def _characters(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    allowed = fields.need("allowed", str)
    action, replacement = _action(fields)
    rule = own.rule(f"[^{allowed}]", action=action, replacement=replacement, is_late=action == "replace", max_length=2)
    return CompiledPolicy((_checked(fields, "allowed", rule),), allowed=f"[{allowed}]*" if action == "retry" else None)


def _constraint(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    form = fields.need("constraint", dict)
    try:
        constraint = parse_constraint(form)
    except BridleError as error:
        raise fields.error("constraint", f"cannot be used: {error}") from None
    return CompiledPolicy(controller=lambda model: constraint)


def _thinking(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    budget = fields.count("max_tokens", None, least=0)
    if budget is None:
        raise fields.error("max_tokens", "is missing; must be an integer")
    said = fields.pop("message", str)

    def make(model: ForModel) -> object | None:
        text = model.tokenizer
        tags = tags_of(text)
        sentence = text.chat_settings.thinking_budget_message if said is None else said
        return None if tags is None else ThinkingBudget(*tags, budget, sentence_tokens(text, sentence, tags))

    return CompiledPolicy(controller=make)


def _wasm(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    module, argument = fields.need("module", str), fields.text("argument", most=1 << 16)
    if not _HASH.fullmatch(module):
        raise fields.wrong("module", module, "the SHA-256 of a module in 64 hexadecimal digits")

    def make(model: ForModel) -> object:
        from bridle.serving.controller_runtime import LOCAL_ADMIN, ControlSettings

        obstacle = ControlSettings().obstacle()
        if obstacle is not None:
            raise UnsupportedFeature(f"no control runtime can be started: {obstacle}", "policies")
        from bridle.aici.client.reference import WasmController

        return WasmController(module, argument, LOCAL_ADMIN, is_demanded=True)

    return CompiledPolicy(controller=make)


def _watermark(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    key_file, context = fields.need("key_file", str), fields.count("context", 1, most=MAX_WATERMARK_CONTEXT) or 1
    gamma, delta = fields.anything("gamma"), fields.anything("delta")
    try:
        key = read_key(key_file)
        mark = Watermark(0.25 if gamma is None else gamma, 2.0 if delta is None else delta, key, context)
    except InvalidRequest as error:
        raise fields.error(str(error.param).rpartition(".")[2], f"cannot be used: {error}") from None
    return CompiledPolicy(watermark=mark)


def _python(fields: PolicyFields, own: PolicySettings) -> CompiledPolicy:
    place, argument = fields.need("class", str), fields.anything("argument")
    try:
        controller = make_demanded(place, argument)
    except BridleError as error:
        raise fields.error("class", f"cannot be used: {error}") from None
    return CompiledPolicy(controller=lambda model: controller)


#: All kinds of policies, by name.
KINDS: Mapping[str, Callable[[PolicyFields, PolicySettings], CompiledPolicy]] = {
    "phrases": _phrases,
    "pattern": _pattern,
    "redact": _redact,
    "loops": _loops,
    "length": _length,
    "characters": _characters,
    "constraint": _constraint,
    "thinking": _thinking,
    "wasm": _wasm,
    "python": _python,
    "watermark": _watermark,
}


def allowed_tokens(model: ForModel, patterns: Sequence[str]) -> bytes:
    """Return the mask of the tokens that may occur in a text whose characters all patterns must allow. Tokens that
    contain only part of a character are allowed, and so are tokens without text."""
    tokenizer, known = model.tokenizer, [guardrails.compiled(pattern) for pattern in patterns]
    row = bytearray((model.info.vocab_size + 31) // 32 * 4)
    for token in range(model.info.vocab_size):
        text = tokenizer.token_text(token) if token < tokenizer.vocab_size else ""
        is_part = "\ufffd" in text or token in tokenizer.special_token_ids
        if is_part or all(each.fullmatch(text) for each in known):
            row[token >> 3] |= 1 << (token & 7)
    return bytes(row)
