"""Aligned sampling: outputs under a constraint have the probabilities that the model gives them among the allowed
outputs.

A mask alone distorts probabilities: a token keeps its full probability even if almost all of its continuations are
forbidden. So each output keeps a trie of tried tokens, with the probability mass that is left below each (ASAp, Park et
al., arXiv 2405.21047). A token is sampled with its probability times the share of its continuations that may still be
allowed. If the share of the continuations turns out to be smaller, the output continues only with a certain
probability, the ratio of the two shares. Otherwise it restarts. An attempt that is not restarted has exactly the
model's distribution among the allowed outputs. After the last permitted restart, the output always continues. This
module uses no tokenizer and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

#: Maximum number of nodes of a trie. A full trie no longer changes, and its output is not restarted again.
MAX_NODES = 1 << 14
#: Logit bias of a token whose continuations are all forbidden. The bias is finite, so that the token still counts as
#: allowed.
_LEAST = -80.0


@dataclass(slots=True)
class MassNode:
    """A node of the trie, for a beginning of the output that was tried. `chance` is the probability of the last token
    of the beginning that the node stands for. `left` is the share of this beginning's continuations that may still be
    allowed. `kept` is the share that the mask left for the next token (None: not known yet)."""

    chance: float = 1.0
    left: float = 1.0
    kept: float | None = None
    children: dict[int, MassNode] = field(default_factory=dict)

    def refresh(self) -> None:
        """Compute `left` from the children, which are the next tokens that were tried."""
        if self.kept is not None:
            removed = math.fsum(child.chance * (1.0 - child.left) for child in self.children.values())
            self.left = max(self.kept - removed, 0.0)


@dataclass(slots=True)
class AlignedSampling:
    """The trie of one output, and the path of the output's current text in it: node i of the path follows i tokens.
    `random(number)` returns a number from 0 to 1 for check `number`."""

    random: Callable[[int], float]
    restarts_left: int
    path: list[MassNode] = field(default_factory=lambda: [MassNode()])
    num_nodes: int = 1
    num_checks: int = 0
    must_restart: bool = False

    def fork(self, random: Callable[[int], float]) -> AlignedSampling:
        """Return the state for a fork of the output, without the attempts that the output made earlier."""
        return AlignedSampling(random, self.restarts_left, [MassNode() for _ in self.path], len(self.path))

    def biases(self) -> tuple[tuple[int, float], ...]:
        """Return biases for the next token's logits: for each tried token, the logarithm of the probability mass that
        is left below it."""
        tried = self.path[-1].children.items()
        return tuple((token, max(math.log(max(child.left, 1e-300)), _LEAST)) for token, child in tried)

    def advance(self, token: int, chance: float, kept: float) -> bool:
        """Record the next token, which has the probability `chance`. The mask left tokens whose probabilities add up to
        `kept`. Returns whether the output continues. If the output does not continue, `must_restart` is set."""
        node = self.path[-1]
        before, node.kept = node.left, kept
        for each in reversed(self.path):
            each.refresh()
        self.num_checks += 1
        is_full = self.num_nodes >= MAX_NODES
        may_restart = len(self.path) > 1 and self.restarts_left > 0 and not is_full
        if may_restart and self.random(self.num_checks) * before >= node.left:
            self.must_restart = True
            return False
        child = node.children.get(token)
        if child is None:
            child, self.num_nodes = MassNode(chance), self.num_nodes + 1
            if not is_full:
                node.children[token] = child
        self.path.append(child)
        return True

    def restart(self) -> None:
        """Restart the text from its first token."""
        self.restarts_left -= 1
        self.must_restart = False
        self.truncate(0)

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first `num_tokens` tokens of the text."""
        del self.path[num_tokens + 1 :]
