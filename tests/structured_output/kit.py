"""Common parts of the constraints' tests: small vocabularies, matchers without a child process, and an engine that runs
them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridle.config import EngineConfig
from bridle.controllers.composite_pool import with_composed
from bridle.engine.engine import Engine
from bridle.engine.interfaces import ControllerPool
from bridle.engine.request import Request
from bridle.outputs import Event, Finished, Forked, Log, Rewind, TokenEvent
from bridle.sampling import SamplingParams
from bridle.structured_output import Constraint, ConstraintLimits, GrammarVocabulary
from bridle.structured_output.grammar import grammar_of
from bridle.structured_output.matcher import Matcher
from bridle.testing.scripted import ScriptedExecutor
from tests.fakes.compile_children import thrifty_pool

EOS = 0
#: Texts whose splitting depends on what stands around them.
ODD = (
    "\n\n\nx  y\t\t\n 'tis don't I'LL 12345 1.5e10 ((/home _message (`x`) \"x\": [1,  2]  "
    "Größe “naïve” 北京 😀😀 <b> ~/a *a\\n"
)
_ids = itertools.count()


def vocabulary(pieces: Iterable[str], size: int | None = None) -> GrammarVocabulary:
    """Return a vocabulary in which token 0 ends a text, and `pieces` are the other tokens. Tokenization is greedy."""
    tokens = [b"<end>", *(piece.encode() for piece in pieces)]
    by_bytes = {data: token for token, data in enumerate(tokens) if token}

    def encode(text: str) -> list[int]:
        data, found = text.encode(), []
        while data:
            token = next((by_bytes[data[:n]] for n in range(len(data), 0, -1) if data[:n] in by_bytes), None)
            if token is None:
                raise ValueError(f"no token spells {data!r}")
            found.append(token)
            data = data[len(tokens[token]) :]
        return found

    return GrammarVocabulary(tokens, (EOS,), (EOS,), encode, size)


def text_vocabulary() -> GrammarVocabulary:
    """Return a vocabulary of all ASCII characters and some longer tokens. Five logits rows have no token."""
    longer = ('{"', '":', '": ', '", "', "the", " the", "name", "true", "12", "  ", "ab", "abc", "yes", "no", '"}')
    return vocabulary([*map(chr, range(1, 128)), *longer], size=1 + 127 + len(longer) + 5)


def allows(vocab: GrammarVocabulary, constraint: Constraint, text: str) -> bool:
    """Return whether the constraint allows the whole text, character by character."""
    walk = matcher(vocab, constraint)
    for char in text:
        token = ord(char)
        if walk.is_complete or not tokens_of(walk.mask()) & {token}:
            return False
        walk.commit([token])
    return walk.is_complete or walk.is_accepting


def matcher(vocab: GrammarVocabulary, constraint: Constraint) -> Matcher:
    """Return the constraint's matcher, compiled in this process."""
    return Matcher(vocab, grammar_of(constraint))


def tokens_of(mask: bytes) -> set[int]:
    """Return the tokens that a mask allows."""
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def forbidden_pairs(vocab: GrammarVocabulary, text: str) -> list[tuple[bytes, bytes]]:
    """Return the pairs of tokens that the tokenizer writes for `text` although canonical masks forbid them."""
    tokens = vocab.written(text)
    return [
        (vocab.text_of((a,)), vocab.text_of((b,))) for a, b in itertools.pairwise(tokens) if not vocab.pairs.has(a, b)
    ]


def spell(vocab: GrammarVocabulary, tokens: Iterable[int]) -> str:
    return vocab.text_of(tokens).decode()


def generate(
    vocab: GrammarVocabulary, start: Matcher, rng: random.Random, prefer: Sequence[str] = (), max_tokens: int = 600
) -> str | None:
    """Return a random text that the matcher allows; None if it did not end. Every other step takes a token that begins
    with one of `prefer`, or the end, if allowed."""
    walk = start.copy()
    out: list[int] = []
    closing = {t for t, data in enumerate(vocab.tokens) if data[:1].decode("latin-1") in prefer} | {EOS}
    while len(out) < max_tokens:
        if walk.is_complete:
            return spell(vocab, out)
        allowed = sorted(tokens_of(walk.mask()))
        close = [token for token in allowed if token in closing]
        token = rng.choice(close if close and rng.random() < 0.5 else allowed)
        if token == EOS:
            return spell(vocab, out)
        walk.commit([token])
        out.append(token)
    return None


@dataclass
class Output:
    """An output as a client has it."""

    tokens: list[int] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    logs: str = ""
    finished: Finished | None = None


class Lab:
    """A scripted model with constraints, on a device of the class `scripted`. `draft` predicts draft tokens. If
    `is_composed`, a request may have several controllers."""

    def __init__(
        self,
        vocab: GrammarVocabulary,
        *,
        pools: Sequence[ControllerPool] = (),
        limits: ConstraintLimits | None = None,
        draft: ScriptedExecutor | None = None,
        scripted: type[ScriptedExecutor] = ScriptedExecutor,
        is_composed: bool = False,
        **options: Any,
    ) -> None:
        self.vocab = vocab
        options = {"num_blocks": 256, "block_size": 4, "eos_token_ids": (EOS,), **options}
        self.executor = scripted(vocab_size=vocab.size, **options)
        self.pool = thrifty_pool(lambda: vocab, limits)
        self.draft = draft
        config = EngineConfig(step_timeout=30.0)
        all_pools: Sequence[ControllerPool] = [self.pool, *pools]
        if is_composed:
            all_pools = with_composed(all_pools, vocab.size)
        self.engine = Engine(self.executor, config, pools=all_pools, draft=draft)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()
        assert not self.pool.live
        assert not self.executor.violations
        assert self.draft is None or not self.draft.violations

    def request(self, controller: object, prompt: Sequence[int] = (1, 2), **sampling: object) -> Request:
        sampling = {"temperature": 0.0, "max_tokens": 60, "seed": 1, **sampling}
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        return Request(f"r{next(_ids)}", tuple(prompt), params, controller=controller)

    def run(self, *requests: Request) -> list[dict[int, Output]]:
        """Run the requests, and return the outputs of each request by index."""
        outputs: dict[str, dict[int, Output]] = {request.id: {} for request in requests}
        for request in requests:
            self.engine.add(request)
        for event in self.events():
            _note(outputs[event.request_id], event)
        return [outputs[request.id] for request in requests]

    def run_one(self, controller: object, **options: object) -> Output:
        return self.run(self.request(controller, **options))[0][0]  # type: ignore[arg-type]

    def events(self) -> Iterator[Event]:
        while self.engine.has_work:
            yield from self.engine.step()
            self.engine.check_integrity()


def _note(outputs: dict[int, Output], event: Event) -> None:
    if isinstance(event, Forked):
        parent = outputs.get(event.parent, Output())
        outputs[event.index] = Output(parent.tokens.copy(), parent.forced.copy())
    elif isinstance(event, TokenEvent):
        output = outputs.setdefault(event.index, Output())
        output.tokens.append(event.token)
        output.forced.append(event.forced)
    elif isinstance(event, Rewind) and event.num_tokens:
        output = outputs[event.index]
        del output.tokens[-event.num_tokens :], output.forced[-event.num_tokens :]
    elif isinstance(event, Log):
        outputs.setdefault(event.index, Output()).logs += event.text
    elif isinstance(event, Finished):
        outputs.setdefault(event.index, Output()).finished = event
