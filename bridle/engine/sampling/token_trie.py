"""A trie of token sequences (options), one of which is chosen. Options with a common beginning share edges, and each
edge is scored once.

Node 0 is the root. A *probe* is a path of tokens that goes through the model. The logits rows of such a path score the
edges that leave the nodes on the path. Edges of the root need no path, because the end of the prompt predicts their
tokens. This module does not use the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Tokens = tuple[int, ...]
#: Minimum probability that an option keeps after its longer options are subtracted, because of rounding.
_LEAST = 1e-12


@dataclass(slots=True)
class Probe:
    """Tokens from the root to a node. `nodes` are the nodes on the path whose edges are scored, by depth."""

    tokens: Tokens
    nodes: dict[int, int] = field(default_factory=dict)


class TokenTrie:
    """The trie of `options`; no option may be empty. `logprobs[node]` is the log-probability of the edge that leads to
    a node, once it is known."""

    def __init__(self, options: Sequence[Tokens]) -> None:
        self.children: list[dict[int, int]] = [{}]
        self._parents, self._tokens = [0], [0]
        self.ends = [self._add(option) for option in options]
        self.logprobs: dict[int, float] = {}

    def _add(self, option: Tokens) -> int:
        node = 0
        for token in option:
            known = self.children[node].get(token)
            if known is None:
                known = self.children[node][token] = len(self.children)
                self.children.append({})
                self._parents.append(node)
                self._tokens.append(token)
            node = known
        return node

    def probes(self) -> list[Probe]:
        """Return the smallest set of paths that scores every edge which does not begin at the root."""
        made: list[Probe] = []
        covered: set[int] = set()
        for node, edges in enumerate(self.children):
            if node and edges and not any(self.children[child] for child in edges.values()):
                path = self._path(node)
                probe = Probe(tuple(self._tokens[each] for each in path))
                probe.nodes = {depth: each for depth, each in enumerate(path, 1) if each not in covered}
                covered.update(path)
                made.append(probe)
        return made

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def scores(self) -> list[float]:
        """Return the log-probability of each option: the text begins with the option, but not with a longer option.
        Without the second condition, a short option would always be likelier than a longer option that begins with
        it."""
        totals = [0.0] * len(self.children)
        for node in range(1, len(self.children)):  # parents come before their children
            totals[node] = totals[self._parents[node]] + self.logprobs[node]
        longer = self._longer()
        return [totals[node] + _without(longer[node] - totals[node]) for node in self.ends]

    def _longer(self) -> list[float]:
        """Return, for each node, the log-probability of all options below the node, counted from the root."""
        totals, ends = [0.0] * len(self.children), set(self.ends)
        for node in range(1, len(self.children)):
            totals[node] = totals[self._parents[node]] + self.logprobs[node]
        below = [-math.inf] * len(self.children)
        for node in range(len(self.children) - 1, 0, -1):
            whole = totals[node] if node in ends else below[node]
            below[self._parents[node]] = _sum(below[self._parents[node]], whole)
        return below


def _sum(one: float, other: float) -> float:
    """Return the logarithm of the sum of two probabilities that are given as logarithms."""
    high, low = max(one, other), min(one, other)
    return high if low == -math.inf else high + math.log1p(math.exp(low - high))


def _without(share: float) -> float:
    """Return the logarithm of 1 minus a probability that is given as a logarithm."""
    return math.log(max(1.0 - math.exp(share), _LEAST)) if share > -math.inf else 0.0
