"""Measures the quality loss of quantization on one text: the change of perplexity, and how often the most probable
token stays the same. To try a quantized form, quantized layers temporarily replace the model's layers, which stay
unchanged. So several quantized forms can be tried on one loaded model. `choose_form` selects the fastest form whose
loss is within its bound."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bridle.errors import InvalidRequest
from bridle.model.added_tokens import refuse_renumbered
from bridle.model.geometry import Geometry
from bridle.model.parity import run_packed, trial_runner
from bridle.model.quantize import are_experts, is_large, is_worthwhile, make_quantized, quantize_experts

_log = logging.getLogger(__name__)

#: Forms that `auto` chooses from, the fastest for a single sequence first.
CANDIDATES = ("q4_0", "int8")
#: Share of positions whose most probable token must stay the same.
MIN_AGREEMENT = 0.95
#: Maximum tokens of the text.
MAX_TOKENS = 256
#: The default text: prose, a list, code and figures.
SAMPLE = """The harbour was quiet when the ferry came in. Two men stood on the quay, their collars turned up against the
wind, and watched the lights move slowly past the breakwater. "She is late," said the older one. "She is always
late in November," said the other, and they both laughed, because it was true. In 1987 a storm had held her at
sea for nine hours, and when she finally tied up, the captain walked to the inn without a word and slept until
noon.

What to bring: warm clothes, a map of the island, water for a day, and a torch with fresh batteries. The path to
the lighthouse is 4.5 kilometres long and climbs 120 metres; allow about an hour and a half each way. Dogs must
be kept on a lead.

def mean(numbers):
    total = 0.0
    for number in numbers:
        total += number
    return total / len(numbers) if numbers else 0.0

The function above returns zero for an empty list. A better design might raise an error, since the mean of
nothing is not defined; which of the two is right depends on who calls it. Water boils at 100 degrees Celsius at
sea level, light travels about 300,000 kilometres in a second, and the capital of France is Paris.
"""


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of a quantized form compared with the loaded model, over a text of `positions` tokens."""

    form: str
    positions: int
    agreement: float
    perplexity: float
    perplexity_before: float

    def __str__(self) -> str:
        return (
            f"{self.form}: same likeliest token at {self.agreement:.1%} of {self.positions} positions, perplexity "
            f"{self.perplexity:.4g} (before: {self.perplexity_before:.4g})"
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    likeliest: Tensor  # [L]
    perplexity: float


def read_tokens(folder: Path, text: str, max_tokens: int = MAX_TOKENS) -> list[int]:
    """Return the first `max_tokens` tokens of `text`. Raises `InvalidRequest` if the text has less than 2 tokens."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.exists():
        raise InvalidRequest(f"{folder} has no tokenizer.json, which is needed to tokenize a text", "text")
    backend = Tokenizer.from_file(str(path))
    refuse_renumbered(folder, backend)
    tokens: list[int] = backend.encode(text).ids[:max_tokens]
    if len(tokens) < 2:
        raise InvalidRequest(f"text has {len(tokens)} tokens; at least 2 are needed", "text")
    return tokens


def measure_forms(
    model: nn.Module, geometry: Geometry, device: torch.device, forms: Sequence[str], tokens: Sequence[int]
) -> Iterator[Quality]:
    """Yield the quality of each quantized form on the text `tokens`."""
    before = _read(model, geometry, device, tokens)
    for form in forms:
        with answered_by(model, lambda module, form=form: _quantized(module, form)):  # type: ignore[misc]
            after = _read(model, geometry, device, tokens)
        same = float((after.likeliest == before.likeliest).float().mean())
        yield Quality(form, len(tokens), same, after.perplexity, before.perplexity)


def choose_form(model: nn.Module, geometry: Geometry, device: torch.device, folder: Path) -> str:
    """Return the fastest quantized form whose most probable tokens agree with the model's at a share of at least
    `MIN_AGREEMENT` of positions. Return `none` if there is no such form. The log has the measured agreement of each
    form."""
    candidates = [form for form in CANDIDATES if is_worthwhile(form)]
    try:
        tokens = read_tokens(folder, SAMPLE)
    except (InvalidRequest, OSError, ValueError) as error:
        form = "int8" if "int8" in candidates else "none"
        _log.warning("quantization auto uses %s without a quality check: %s", form, error)
        return form
    for quality in measure_forms(model, geometry, device, candidates, tokens):
        is_taken = quality.agreement >= MIN_AGREEMENT
        _log.info("quantization auto %s %s (bound: %.0f %%)", _verb(is_taken), quality, 100 * MIN_AGREEMENT)
        if is_taken:
            return quality.form
    _log.info("quantization auto leaves the weights unchanged")
    return "none"


def _verb(is_taken: bool) -> str:
    return "takes" if is_taken else "leaves"


@contextmanager
def answered_by(model: nn.Module, make: Callable[[Any], nn.Module]) -> Iterator[None]:
    """Inside the `with` block, `make(module)` replaces each linear layer or set of experts that would be quantized."""
    layers = [m for m in model.modules() if (type(m) is nn.Linear and is_large(m)) or are_experts(m)]
    try:
        for layer in layers:
            vars(layer)["forward"] = make(layer).forward
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _quantized(module: Any, form: str) -> nn.Module:
    return make_quantized(module, form) if isinstance(module, nn.Linear) else quantize_experts(module, form)


def _read(model: Any, geometry: Geometry, device: torch.device, tokens: Sequence[int]) -> _Reading:
    dtype = next(model.parameters()).dtype
    runner = trial_runner(model, geometry, "auto", dtype, device, len(tokens))
    (logits,), _ = run_packed(runner, [list(tokens)], device)
    scores = logits[:-1].float().log_softmax(-1)  # [L - 1, V]
    nexts = torch.tensor(tokens[1:], device=device).unsqueeze(1)
    return _Reading(logits.argmax(-1), math.exp(-float(scores.gather(1, nexts).mean())))
