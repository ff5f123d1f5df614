"""Estimates of decoding on a GPU, from counted bytes, launches and rounds, for comparison with measurements.

    python -m scripts.card.estimates                       # a table in Markdown
    python -m scripts.card.estimates --measured gpu.jsonl  # with a column of what `scripts/card-run` measured

A step consists of matrix products, attention, the kernel that joins attention's partial results, and small kernels. A
kernel's time is the longer of two: the time to read its bytes, and the time of its rounds of programs. Each round waits
for memory once. There is a gap between two launches in a graph. Counts follow from the kernels' own sizes. The speeds
were measured on an H100, so they are guesses for another GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROWS, CONTEXTS = (1, 16, 64, 256), (1_024, 16_384)
#: Kernels of a layer and around all layers, as docs/models.md counts them; of each layer, two are attention and join.
LAYER_LAUNCHES, STEP_LAUNCHES = 10, 6


@dataclass(frozen=True, slots=True)
class Card:
    """Speeds of a GPU. `shared` is the number of attention programs that run on one multiprocessor at the same time."""

    name: str = "H100"
    copy_bytes: float = 3.0e12
    l2_bytes: float = 5.5e12
    product_share: float = 0.85  # of `copy_bytes`, which products of few rows reach
    products: float = 7.0e14
    multiprocessors: int = 132
    shared: int = 3
    gap: float = 0.7e-6  # between two launches of a graph
    small: float = 1.8e-6  # a kernel over a row
    round: float = 1.1e-6  # of attention: 64 keys and values that two buffers load ahead of
    wait: float = 0.6e-6  # a load that another one's address depends on


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes of a model: weights that a step reads for few rows and for many rows (many rows use all experts), and
    attention heads. `windowed` layers attend to at most `window` positions."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    dim: int
    step_bytes: float
    all_bytes: float
    active_weights: float
    windowed: int = 0
    window: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * 2 * self.kv_heads * self.dim

    def read_bytes(self, rows: int) -> float:
        """Return the bytes of weights that a step of `rows` tokens reads, with the expected share of experts that these
        tokens select."""
        if not self.experts:
            return self.step_bytes
        missed = (1 - self.experts_per_token / self.experts) ** rows
        shared = self.step_bytes - (self.all_bytes - self.step_bytes) / (self.experts / self.experts_per_token - 1)
        return shared + (self.all_bytes - shared) * (1 - missed)


#: Weights in bfloat16, of gpt-oss's experts in 4.25 bits.
MODELS = (
    Model("Llama-3-8B", 32, 32, 8, 128, 15.0e9, 15.0e9, 7.5e9),
    Model("Qwen3-0.6B", 28, 16, 8, 128, 1.19e9, 1.19e9, 0.6e9),
    Model("gpt-oss-20B", 24, 64, 8, 64, 3.8e9, 13.0e9, 3.6e9, windowed=12, window=128, experts=32, experts_per_token=4),
)


@dataclass(frozen=True, slots=True)
class Attention:
    """Seconds of one layer's attention, and of joining its partial results."""

    attend: float
    join: float


def attention(model: Model, rows: int, context: int, card: Card, chunk: int = 256, keys: int = 64) -> Attention:
    """Estimate one layer. A fixed number of programs share the work, as in `rows.py`."""
    splits = -(-context // chunk)
    works = rows * splits * model.kv_heads
    waves = -(-works // (card.multiprocessors * card.shared))
    rounds = -(-min(chunk, context) // keys)
    part_bytes = rows * splits * model.heads * (model.dim + 2) * 4
    read = (rows * context * model.token_bytes + part_bytes) / card.copy_bytes
    # A work waits for its own numbers, its sequence's and the first entries of the block table; a join for its
    # sequence's, and then once for each tile, whose loads are under way at once.
    attend = max(read, waves * (3 * card.wait + rounds * card.round))
    return Attention(attend, max(part_bytes / card.l2_bytes, (1 + join_rounds(splits)) * card.wait))


def join_rounds(splits: int) -> int:
    """Return the number of tiles of partial results that the join of one token reads one after the other. The sizes of
    tiles are those of `paged_join`."""
    few, many = 8, 32
    return 1 if splits <= few else -(-splits // many)


@dataclass(frozen=True, slots=True)
class Estimate:
    """One line of the table of estimates; times are in milliseconds."""

    model: str
    rows: int
    context: int
    floor: float
    products: float
    attention: float
    join: float
    small: float

    @property
    def step(self) -> float:
        return self.products + self.attention + self.join + self.small


def estimate(model: Model, rows: int, context: int, card: Card) -> Estimate:
    """Estimate a decode step of `rows` sequences, each after `context` tokens."""
    weights = model.read_bytes(rows)
    windowed = attention(model, rows, min(context, model.window or context), card)
    full = attention(model, rows, context, card)
    num_full = model.layers - model.windowed
    seen = num_full * context + model.windowed * min(context, model.window or context)
    small = (LAYER_LAUNCHES - 6) * model.layers + STEP_LAUNCHES
    gaps = LAYER_LAUNCHES * model.layers + STEP_LAUNCHES
    products = max(weights / (card.product_share * card.copy_bytes), 2 * model.active_weights * rows / card.products)
    return Estimate(
        model.name,
        rows,
        context,
        1e3 * (weights + rows * seen * model.token_bytes) / card.copy_bytes,
        1e3 * products,
        1e3 * (num_full * full.attend + model.windowed * windowed.attend),
        1e3 * (num_full * full.join + model.windowed * windowed.join),
        1e3 * (small * card.small + gaps * card.gap),
    )


def table(card: Card, measured: dict[tuple[str, int, int], float]) -> Iterator[str]:
    """Lines of Markdown."""
    yield f"Estimates for one {card.name}: milliseconds of a decode step, by what it consists of."
    yield ""
    yield "| model | rows | context | floor | products | attention | join | small | estimate | share | measured |"
    yield "| --- " * 11 + "|"
    for model in MODELS:
        for context in CONTEXTS:
            for rows in ROWS:
                each = estimate(model, rows, context, card)
                step = measured.get((model.name, rows, context))
                times = (each.floor, each.products, each.attention, each.join, each.small, each.step)
                cells = [model.name, rows, context, *(f"{time:.2f}" for time in times)]
                cells += [f"{each.floor / each.step:.2f}", "" if step is None else f"{step:.2f}"]
                yield f"| {' | '.join(map(str, cells))} |"


#: Parts of the validation whose figures are set beside a model's: the shapes are close to each other.
_PARTS = {"8b": "Llama-3-8B", "0.6b": "Qwen3-0.6B"}


def read_measured(path: Path) -> dict[tuple[str, int, int], float]:
    """Return the measured milliseconds of bridle's greedy steps, by model, number of sequences and context."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        figure = json.loads(line)
        is_ours = figure.get("what") == "decode" and figure.get("peer") == "bridle" and "top_p" not in figure
        if is_ours and figure["part"] in _PARTS:
            found[_PARTS[figure["part"]], figure["batch"], figure["context"]] = figure["step_ms"]
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts.card.estimates")
    parser.add_argument("--measured", type=Path, help="gpu.jsonl of scripts/card-run")
    options = parser.parse_args(arguments)
    print("\n".join(table(Card(), {} if options.measured is None else read_measured(options.measured))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
