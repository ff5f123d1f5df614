"""Time to spell tokens as they come, beside decoding each whole text once at its end.

Streaming needs the text after every token; decoding everything anew each time would cost more with every
token. The share of one decode at the end is the price of having the text early.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bridle.bench.phases import MachineLimits, Phases
from bridle.bench.settings import BenchSettings

if TYPE_CHECKING:
    from rich.console import Console

_TEXT = "Once upon a time a small boat sailed to an island. Ünïcode, 日本語 and 🙂 came along. "
_PART = "spelling tokens"
_TEXT_SECONDS = 1e-3  # of one such text, as `MachineLimits.python` has it


def measure(settings: BenchSettings, console: Console, phases: Phases) -> dict[str, Any]:
    """Microseconds per token, pushed one by one and decoded at once, with the demo model's tokenizer."""
    with phases.part(_PART):
        figures = _figures(10 if settings.quick else 100)
    console.print(
        f"{figures['tokens']} tokens: {figures['streamed_microseconds']:.2f} us each when streamed, "
        f"{figures['once_microseconds']:.2f} us each when decoded at once"
    )
    return figures


def guesses(settings: BenchSettings, limits: MachineLimits) -> dict[str, float]:
    """About how many seconds it takes."""
    return {_PART: limits.python(3.0 + (10 if settings.quick else 100) * _TEXT_SECONDS)}


def _figures(num_texts: int) -> dict[str, Any]:
    from bridle.model import resolve_model
    from bridle.tokenizer import Detokenizer, Tokenizer

    tokenizer = Tokenizer.load(str(resolve_model("demo")))
    tokens = tokenizer.encode(_TEXT * num_texts, add_special_tokens=False)
    begin = time.perf_counter()
    whole = tokenizer.decode(tokens)
    once = time.perf_counter() - begin
    begin = time.perf_counter()
    state = Detokenizer(tokenizer).open((), skip_special_tokens=True)
    pieces = [state.push(token) for token in tokens]
    pieces.append(state.flush())
    streamed = time.perf_counter() - begin
    if "".join(pieces) != whole:
        raise RuntimeError("the streamed text differs from the whole")
    return {
        "tokens": len(tokens),
        "streamed_microseconds": 1e6 * streamed / len(tokens),
        "once_microseconds": 1e6 * once / len(tokens),
    }
