"""Extracts the text of calls from a chat template's rendering of a turn with calls."""

from __future__ import annotations

import re

from bridle.chat.tool_parsers.text_alignment import common_prefix, common_suffix
from bridle.tokenizer.template_probes import CONTENT, KEYS, NAMES, ProbeCall, Prober

#: Values of string arguments, by key: words that occur in no template.
VALUES = ("zvala", "zvalb")
STRINGS = dict(zip(KEYS, VALUES, strict=True))
#: The minimum length of a text that counts as the beginning of a turn, and of a tag that counts as its mark.
_MIN_HEAD, _MIN_MARK = 8, 8
_END_MARK = re.compile(r"<[^<>\s]*(?:end|eot|eos|eom|im_|return|role_end|message_sep|SPECIAL_12)[^<>]*>|\[e~\[|</s>")


def calls_text(prober: Prober, calls: list[ProbeCall], ends: tuple[str, ...]) -> str | None:
    """Return the text of calls without the beginning and the end of the turn; None if the template does not render
    them."""
    text = prober.turn(calls)
    if text is None or NAMES[calls[0].number] not in text:
        return None
    text = text[_start_of_calls(prober, calls, text) :].lstrip()
    behind = max(text.rfind(each) + len(each) for each in (*VALUES, *KEYS, NAMES[calls[-1].number]) if each in text)
    marks = re.findall(r"<[^<>\s]+>", _turn_head(prober))[:2]
    marks = [each for each in marks if len(each) > _MIN_MARK and each not in text[:behind]]
    cut = _end_of_turn(text[behind:], _ordinary_end(prober), (*ends, *marks))
    return text[: behind + cut].rstrip()


def _start_of_calls(prober: Prober, calls: list[ProbeCall], text: str) -> int:
    """Return the position where calls begin: after the text with which every turn begins, with or without content and
    reasoning."""
    limit = text.index(NAMES[calls[0].number])
    begin = max((text.rfind(head, 0, limit) + len(head) for head in _heads(prober) if head in text[:limit]), default=0)
    for ordinary in (prober.generation_prompt(), prober.turn(content=CONTENT)):
        head = "" if ordinary is None else ordinary.partition(CONTENT)[0].rstrip()
        if head and text.startswith(head):
            begin = max(begin, len(head))
    beside = prober.turn(calls, content=CONTENT)
    if beside is not None and CONTENT in beside:
        before = beside.partition(CONTENT)[2].partition(NAMES[calls[0].number])
        shared = common_suffix(before[0], text[:limit]) if before[1] else ""
        begin = max(begin, limit - len(shared)) if shared else begin
    return min(begin, limit)


def _heads(prober: Prober) -> list[str]:
    """Return texts that begin an assistant's turn. The texts include different parts of the end of the user's turn."""
    shared = _turn_head(prober)
    tags = [found.start() for found in re.finditer("<", shared) if len(shared) - found.start() >= len(shared) / 2]
    heads = [shared[start:] for start in tags] if len(shared) > _MIN_HEAD else []
    return heads + [plain for head in heads if len(plain := _THOUGHT_TAG.sub("", head)) > _MIN_HEAD]


#: Matches a tag that opens reasoning, at the end of a prompt.
_THOUGHT_TAG = re.compile(r"<[^<>]*(?:think|reason|thought)[^<>]*>\s*\Z", re.IGNORECASE)


def _turn_head(prober: Prober) -> str:
    """Return the common beginning of the assistant's turns, as complete tags."""
    shared = common_prefix(prober.generation_prompt() or "", prober.turn(content=CONTENT) or "")
    cut = shared.rfind("<")
    return shared[:cut] if cut > 0 and ">" not in shared[cut:] else shared


def _ordinary_end(prober: Prober) -> str:
    """Return the text that the template writes after the content of a turn without calls."""
    text = prober.turn(content=CONTENT)
    return text.rpartition(CONTENT)[2] if text and CONTENT in text else ""


def _end_of_turn(tail: str, ordinary: str, ends: tuple[str, ...]) -> int:
    """Return the position in `tail`, the text after the last argument, where the end of the turn begins."""
    places = [tail.find(each) for each in (*ends, ordinary.strip()) if each and each in tail]
    if not places and (found := _END_MARK.search(tail)) and not _closes_calls(found[0]):
        places.append(found.start())
    return min(places, default=len(tail))


def _closes_calls(mark: str) -> bool:
    return any(word in mark.lower() for word in ("call", "tool", "action", "invoke", "param"))
