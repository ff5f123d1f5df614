"""Random programs as trees, in three forms: WebAssembly, plain Python, and the form of the naive reference.

A node is one decision. It has one child for each branch, with the branch's next decision.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from bridle.controllers import Controller, SequenceView
from bridle.engine.control.decision import Branch, Decision, Splice, mask_of
from bridle.sampling import SamplingParams
from tests.aici.conftest import VOCAB_SIZE
from tests.aici.guests import Step, guest2, mask, result
from tests.fakes.controller_runtime import View

MAX_DEPTH = 10
PROMPT_TOKENS = 6


@dataclass
class Way:
    """One branch: sample among `allowed` (at `temperature`) with `splices`, or apply the only splice if `allowed` is
    None."""

    allowed: list[int] | None
    splices: list[tuple[list[int], int, list[int]]] = field(default_factory=list)  # (when_sampled, backtrack, tokens)
    temperature: float | None = None


@dataclass
class Node:
    """A decision. A node without branches stops the output. A program has at most one mask in a call, like the guest
    library of the original AICI."""

    ways: list[Way] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)
    number: int = 0


def make(random: Random, length: int = PROMPT_TOKENS, depth: int = 0, forks: int = 0) -> Node:
    """Return a random tree. `length` is the minimum number of tokens that the sequence has at this node."""
    verb = random.choice("ssssmmffrrwwkkt") if depth < MAX_DEPTH else "t"
    if verb == "t" and depth > 2:
        return Node()
    if verb == "k" and forks < 2:
        ways = [_way(random, random.choice("fr"), length) for _ in range(random.randint(2, 3))]
        if random.random() < 0.5:
            ways[random.randrange(len(ways))] = _way(random, "m", length)
        forks += 1
    else:
        ways = [_way(random, verb, length)]
    children = [make(random, _after(way, length), depth + 1, forks) for way in ways]
    return Node(ways, children)


def _way(random: Random, verb: str, length: int) -> Way:
    if verb == "w":
        return Way(None, [([], 0, [])])
    if verb in "fr":
        back = random.randint(1, min(3, length - 1)) if verb == "r" and length > 1 else 0
        return Way(None, [([], back, _tokens(random))])
    allowed = random.sample(range(200), random.randint(1, 150))
    splices = []
    if verb == "m":
        for _ in range(random.randint(1, 2)):
            when = random.sample(allowed, min(len(allowed), 40)) if random.random() < 0.8 else []
            splices.append((when, random.randint(0, min(3, length)), _tokens(random)))
    return Way(allowed, splices, random.choice([None, None, 0.0, 2.0]))


def _tokens(random: Random) -> list[int]:
    return [random.randrange(200) for _ in range(random.randint(1, 4))]


def _after(way: Way, length: int) -> int:
    """Return the minimum number of tokens after a branch."""
    if way.allowed is None:
        (_, back, tokens) = way.splices[0]
        return length - back + len(tokens)
    after = [length + 1 - back + len(tokens) for _, back, tokens in way.splices]
    return min([length + 1, *after])


# -- for the engine and the reference --------------------------------------------------------------------------


def decide(node: Node, sampling: SamplingParams) -> Decision:
    """Return the decision that a node describes."""
    if not node.ways:
        return Decision.stop()
    return Decision.fork(_branch(way, sampling) for way in node.ways)


def _branch(way: Way, sampling: SamplingParams) -> Branch:
    splices = tuple(Splice(back, tuple(tokens), frozenset(when)) for when, back, tokens in way.splices)
    if way.allowed is None:
        return Branch(sample=False, splices=splices)
    override = None if way.temperature is None else sampling.with_(temperature=way.temperature)
    return Branch(mask=mask_of(way.allowed, VOCAB_SIZE), sampling=override, splices=splices)


def lookup(root: Node, view: View) -> Node:
    """Return the node of the program that the reference has reached."""
    forks, node = dict(view.path), root
    for ask in range(view.num_asks):
        node = node.children[forks.get(ask, 0)]
    return node


class TreeController(Controller):
    """A controller that runs the program in plain Python."""

    def __init__(self, root: Node, sampling: SamplingParams) -> None:
        self.root, self.sampling = root, sampling
        self.node: Node | None = None
        self.branch = 0

    def next(self, view: SequenceView) -> Decision:
        self.node = self.root if self.node is None else self.node.children[self.branch]
        self.branch = 0
        return decide(self.node, self.sampling)

    def fork(self, branch: int) -> TreeController:
        other = copy.copy(self)
        other.branch = branch
        return other


# -- as WebAssembly --------------------------------------------------------------------------------------------


def compile_program(root: Node) -> bytes:
    """Return the program as a Wasm controller. Its state is the number of the node that answered last."""
    nodes = list(_number(root))
    moves = "".join(
        f"(if (i32.and (i32.eq (global.get $state) (i32.const {node.number})) (i32.eq (local.get $i) (i32.const {i})))"
        f" (then (return (i32.const {child.number}))))\n"
        for node in nodes
        for i, child in enumerate(node.children)
    )
    raw = f"""(global $state (mut i32) (i32.const -1))
    (func $move (result i32) (local $i i32)
      (if (i32.lt_s (global.get $state) (i32.const 0)) (then (return (i32.const 0))))
      (local.set $i (call $my_index))
      {moves} (unreachable))"""
    acts = "".join(
        f"(if (i32.eq (global.get $state) (i32.const {node.number})) (then {chr(10).join(_act(node))} (return)))\n"
        for node in nodes
    )
    return guest2([["(global.set $state (call $move))", acts, "(unreachable)"]], raw=raw)


def _number(root: Node) -> Iterator[Node]:
    waiting, count = [root], 0
    while waiting:
        node = waiting.pop()
        node.number, count = count, count + 1
        waiting += node.children
        yield node


def _act(node: Node) -> Step:
    masks = [mask(way.allowed, VOCAB_SIZE) for way in node.ways if way.allowed is not None]
    branches = [
        {
            "sample_mask": None if way.allowed is None else "#",
            "temperature": way.temperature,
            "splices": [{"when_sampled": w, "backtrack": b, "ff_tokens": t} for w, b, t in way.splices],
        }
        for way in node.ways
    ]
    return [*masks, result({"branches": branches})]
