"""Random controller programs. A program is a pure function of the controller's view, so that engine and reference run
the same program."""

from __future__ import annotations

from hashlib import blake2b
from random import Random

from bridle.engine.control.decision import Branch, Decision, Splice, mask_of
from bridle.sampling import SamplingParams
from tests.engine.support import Output
from tests.fakes.controller_runtime import Program, Reply, View

VOCAB = 16
OVERRIDES = (None, None, SamplingParams(temperature=0.0), SamplingParams(temperature=2.0, top_k=3))


class RandomProgram:
    """A program with all kinds of decisions. It adds tokens more often than it removes tokens, so that every run ends.

    `verbs` are the kinds of decisions to choose from. `delays` are the delays of its answers, in seconds of the pool's
    clock.
    """

    def __init__(
        self,
        seed: int,
        verbs: str = "ssssmbwffnkrxt",
        delays: tuple[float, ...] = (0.0,),
        max_depth: int = 2,
    ) -> None:
        self.seed, self.verbs, self.delays, self.max_depth = seed, verbs, delays, max_depth

    def __call__(self, view: View) -> Reply:
        seen = repr((self.seed, view.tokens, view.num_prompt, view.sampled, view.path, view.num_asks))
        random = Random(blake2b(seen.encode(), digest_size=8).digest())
        decision = self.decide(random, view)
        log = f"{view.num_asks} " if random.random() < 0.2 else ""
        return Reply(decision, log=log, delay=random.choice(self.delays))

    def decide(self, random: Random, view: View) -> Decision:
        verb = random.choice(self.verbs)
        if verb == "w":
            return Decision.wait() if random.random() < 0.7 else Decision.splice()
        if verb == "f":
            return Decision.splice(0, tokens(random, 4))
        if verb == "r":
            back = min(random.randint(1, 3), len(view.tokens) - 1)
            return Decision.splice(back, tokens(random, 3))
        if verb == "k" and len(view.path) < self.max_depth and random.random() < 0.6:
            return Decision.fork(branch(random, view) for _ in range(random.randint(2, 3)))
        if verb == "t":
            return Decision.stop("enough") if random.random() < 0.2 else Decision.sample()
        return Decision.fork([branch(random, view, verb)])


def tokens(random: Random, at_most: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCAB) for _ in range(random.randint(1, at_most)))


def branch(random: Random, view: View, verb: str | None = None) -> Branch:
    """Return one branch, which usually samples with random steering."""
    verb = verb or random.choice("ssmbnfr")
    if verb in "fr":
        back = min(random.randint(0, 2), len(view.tokens) - 1)
        return Branch(sample=False, splices=(Splice(back, tokens(random, 3)),))
    allowed = random.sample(range(VOCAB), random.randint(1, VOCAB))
    return Branch(
        mask=mask_of(allowed, VOCAB) if verb in "mn" else None,
        bias=((random.randrange(VOCAB), random.choice([-4.0, 3.0])),) if verb == "b" else (),
        sampling=random.choice(OVERRIDES),
        splices=tuple(splice(random, view) for _ in range(random.randint(1, 2))) if verb in "nx" else (),
    )


def splice(random: Random, view: View) -> Splice:
    """Return a splice after a sampled token, which keeps it, replaces it, or removes older tokens as well."""
    back = min(random.choice([0, 0, 1, 1, 2, 3]), len(view.tokens))
    chosen = frozenset(random.sample(range(VOCAB), random.randint(1, 6)))
    return Splice(back, tokens(random, 3), chosen if random.random() < 0.8 else frozenset())


def always(decision: Decision) -> Program:
    """Return a program that makes the same decision every time."""
    return lambda view: decision


def script(*decisions: Decision) -> Program:
    """Return a program that makes the given decisions in order, and then samples without steering."""
    return lambda view: decisions[view.num_asks] if view.num_asks < len(decisions) else Decision.sample()


def error_of(output: Output) -> BaseException:
    assert output.finished is not None
    assert output.finished.error is not None
    return output.finished.error
