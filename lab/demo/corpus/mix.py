"""The mixture: how often each kind of exercise comes, and the documents they are put into.

`document` is the whole generator: everything about one document follows from the
random generator it is given. A document holds only exercises of its split.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lab.demo.corpus import chats, facts, lists, records, stories, sums, tools
from lab.demo.corpus.document import BOS, EOS, Exercise, Message, Piece, ToolSpec, chat_pieces
from lab.demo.corpus.split import Split, split_of

Maker = Callable[[random.Random], Exercise]

EXERCISES: tuple[tuple[Maker, tuple[float, float, float, float, float]], ...] = (
    (facts.question, (16.0, 10.0, 6.0, 10.0, 8.0)),
    (facts.statement, (12.0, 8.0, 5.0, 10.0, 10.0)),
    (facts.short_answer, (2.0, 3.0, 4.0, 6.0, 6.0)),
    (facts.yes_no, (18.0, 20.0, 75.0, 22.0, 14.0)),
    (sums.question, (8.0, 5.0, 4.0, 6.0, 6.0)),
    (sums.completion, (4.0, 5.0, 5.0, 10.0, 14.0)),
    (sums.difference, (2.0, 4.0, 2.0, 5.0, 6.0)),
    (sums.thought, (4.0, 5.0, 4.0, 6.0, 10.0)),
    (lists.any_list, (9.0, 16.0, 6.0, 10.0, 10.0)),
    (tools.any_call, (9.0, 9.0, 5.0, 8.0, 8.0)),
    (tools.named_call, (2.0, 6.0, 3.0, 8.0, 10.0)),
    (tools.no_call, (1.5, 2.0, 1.5, 2.0, 2.0)),
    (records.any_request, (4.0, 4.0, 2.0, 4.0, 4.0)),
    (records.continuation, (0.5, 0.3, 0.2, 0.4, 0.4)),
    (stories.request, (1.5, 1.0, 0.7, 1.2, 1.2)),
    (chats.small_talk, (2.0, 1.0, 0.7, 1.0, 1.0)),
    (chats.unknown, (1.0, 1.0, 0.7, 1.0, 1.0)),
    (chats.role, (2.0, 3.0, 1.5, 3.0, 3.0)),
    (chats.copying, (2.0, 8.0, 2.0, 6.0, 6.0)),
    (chats.reading, (1.0, 4.0, 3.0, 8.0, 14.0)),
    (facts.checked, (0.0, 0.0, 6.0, 5.0, 5.0)),
    (facts.larger, (0.0, 0.0, 4.0, 2.0, 2.0)),
)
"""Every kind of exercise with its share among those drawn in the five stages of training.

Facts and sums come first, then counting and copying, then comparing what is known with what is said (yes or
no), then a bit of everything; the last stage polishes what takes longest to learn.
"""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The shares of the kinds of exercises and of the forms of documents."""

    shares: tuple[float, ...]
    forms: tuple[float, float, float, float, float]
    """Cumulative shares of drills, stories, questions with answers, conversations with and without memory."""
    thinking: float
    """Share of conversations under the thinking hint. Their earlier turns have lost their thoughts, which teaches the
    model to skip thinking; so there are none in the end."""


_FORMS = (
    (0.10, 0.13, 0.18, 0.22, 0.34),
    (0.04, 0.05, 0.09, 0.14, 0.28),
    (0.01, 0.02, 0.05, 0.07, 0.11),
    (0.03, 0.05, 0.09, 0.13, 0.22),
    (0.05, 0.07, 0.11, 0.15, 0.22),
)
_THINKING = (0.1, 0.1, 0.1, 0.1, 0.0)
STAGES = tuple(
    Mixture(tuple(shares[stage] for _, shares in EXERCISES), forms, thinking)
    for stage, (forms, thinking) in enumerate(zip(_FORMS, _THINKING, strict=True))
)
"""The mixtures of the stages, in order."""

_THOUGHTS = {
    "fact": "I recall: {answer}",
    "yes/no": "I check the claim.",
    "list": "I go through the items in order.",
    "record": "I write one JSON object.",
    "chat": "This is small talk.",
    "copy": "I repeat the words.",
    "reading": "I look for the name in the text.",
}
"""What the model thinks, when it is asked to, before an answer that needs no steps."""

_MAKERS = [maker for maker, _ in EXERCISES]
_PLAIN_ONLY = (facts.statement, sums.completion, records.continuation)


def draw(rng: random.Random, maker: Maker, split: Split) -> Exercise:
    """An exercise of one kind that lies in the split."""
    while True:
        exercise = maker(rng)
        if split_of(exercise.key) == split:
            return exercise


def document(
    rng: random.Random, split: Split = "train", max_chars: int = 700, mixture: Mixture = STAGES[0]
) -> list[Piece]:
    """One training text. `max_chars` bounds how far conversations and stories are drawn out."""
    choice = rng.random()
    if choice < mixture.forms[0]:
        return _plain("", sums.drill(rng, split))
    if choice < mixture.forms[1]:
        return _plain("", stories.story(rng, rng.randrange(2, max(4, max_chars // 160)))[0])
    if choice < mixture.forms[2]:
        return _questions_and_answers(rng, split)
    if choice < mixture.forms[3]:
        return _conversation(rng, split, rng.randrange(200, max_chars), _told(rng, split), mixture)
    if choice < mixture.forms[4]:
        return _conversation(rng, split, rng.randrange(200, max_chars), None, mixture)
    return _single(rng, draw(rng, rng.choices(_MAKERS, mixture.shares)[0], split))


def long_document(
    rng: random.Random, split: Split = "train", max_chars: int = 5200, mixture: Mixture = STAGES[0]
) -> list[Piece]:
    """A conversation or story filling most of the context, with something to remember from its beginning."""
    if rng.random() < 0.25:
        return _plain("", stories.story(rng, rng.randrange(8, max_chars // 160))[0])
    told = _told(rng, split) if rng.random() < 0.7 else None
    return _conversation(rng, split, rng.randrange(max_chars // 3, max_chars), told, mixture)


def _plain(given: str, text: str) -> list[Piece]:
    return [Piece(BOS, False), Piece(given + text + EOS, True)]


def _single(rng: random.Random, exercise: Exercise) -> list[Piece]:
    if not exercise.messages or (exercise.prompt and rng.random() < 0.2):
        return _plain(exercise.prompt, exercise.completion)
    messages = list(exercise.messages)
    if not exercise.is_alone and rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": chats.system_text(rng)})
    thoughts = _THOUGHTS.get(exercise.category)
    thinking = exercise.thinking or bool(
        thoughts and not exercise.is_alone and not exercise.tools and rng.random() < 0.05
    )
    if thinking and thoughts:
        messages[-1] = messages[-1] | {"reasoning_content": thoughts.format(answer=messages[-1]["content"])}
    return chat_pieces(messages, exercise.tools, thinking)


def _questions_and_answers(rng: random.Random, split: Split) -> list[Piece]:
    makers = (facts.question, facts.yes_no, sums.question)
    pairs = [draw(rng, rng.choice(makers), split) for _ in range(rng.randrange(2, 6))]
    return _plain("", "Questions and answers:\n" + "\n".join(pair.prompt + pair.completion for pair in pairs))


def _conversation(
    rng: random.Random, split: Split, max_chars: int, told: tuple[Exercise, Exercise] | None, mixture: Mixture
) -> list[Piece]:
    """Exercises one after the other up to a length; what is told first is asked last."""
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": chats.system_text(rng)})
    if told is not None:
        messages += told[0].messages
    thinking = rng.random() < mixture.thinking
    offered: tuple[ToolSpec, ...] = ()
    if not thinking and rng.random() < 0.2:
        call = draw(rng, tools.any_call, split)
        offered = call.tools
        messages += call.messages
    length = sum(len(message["content"]) for message in messages)
    while length < max_chars:
        turn = _turn(rng, split, thinking, mixture)
        messages += turn
        length += sum(len(message["content"]) + 12 for message in turn)
    if told is not None:
        messages += told[1].messages
    return chat_pieces(messages, offered, thinking)


def _told(rng: random.Random, split: Split) -> tuple[Exercise, Exercise]:
    while True:
        pair = chats.memory(rng)
        if split_of(pair[0].key) == split:
            return pair


def _turn(rng: random.Random, split: Split, thinking: bool, mixture: Mixture) -> tuple[Message, ...]:
    if thinking:
        return draw(rng, sums.thought, split).messages
    pairs = [pair for pair in zip(_MAKERS, mixture.shares, strict=True) if pair[0] not in _PLAIN_ONLY]
    makers, shares = [maker for maker, _ in pairs], [share for _, share in pairs]
    while True:
        maker = rng.choices(makers, shares)[0]
        exercise = draw(rng, maker, split)
        if not (exercise.is_alone or exercise.tools or exercise.thinking):
            return exercise.messages
