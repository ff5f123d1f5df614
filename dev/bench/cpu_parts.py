"""The parts of `bridle bench cpu`: the comparisons, their order, and their estimated time.

A part is the smallest unit of measurement that can be selected. A part's name contains the model and the measurement,
and for a comparison also the formats and the size. `--parts` selects parts by substrings of their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.bench.settings import BenchSettings
from bridle.errors import InvalidRequest
from dev.bench.cpu_limits import BYTES, CpuCase, CpuLimits

#: Groups of compared forms by name. The first form of a group is compared with the others. The values are names of
#: peers.
GROUPS = {
    "float32": ("transformers float32", "bridle float32"),
    "8-bit": ("llama.cpp Q8_0", "bridle int8", "bridle Q8_0"),
    "4-bit": ("llama.cpp Q4_0", "bridle Q4_0"),
    "Q4_K_M": ("llama.cpp Q4_K_M", "bridle Q4_K_M"),
}
#: Measured services on top of the engine.
SERVICES = ("http", "control", "lmtp")
#: Maximum prompt tokens of a case for transformers.
MAX_TRANSFORMERS = 1 << 13
#: Estimates before the first measurement: the share of the limits that is reached, seconds to load per byte of weights,
#: and seconds of one service.
_GUESSED_SHARE, _LOAD_SECONDS, _SERVICE_SECONDS = 0.4, 4e-9, 90.0


@dataclass(frozen=True, slots=True)
class BenchPart:
    """A part: the comparison `group`, one of `GROUPS`, in a `case`; or one of `SERVICES`, which have no case."""

    model: str
    group: str
    case: CpuCase | None = None

    @property
    def name(self) -> str:
        if self.case is None:
            return f"{self.model} {self.group}"
        return f"{self.model} {self.case.kind} {self.group} {self.case.batch}x{self.case.context}"

    @property
    def peers(self) -> tuple[str, ...]:
        """The programs that this part compares, if they are available."""
        if self.case is None:
            return ()
        too_long = self.case.batch * self.case.context > MAX_TRANSFORMERS
        return tuple(name for name in GROUPS[self.group] if not (too_long and name.startswith("transformers")))


def cases(settings: BenchSettings) -> list[CpuCase]:
    """Return the cases to measure, the smallest of each kind first."""
    batches = settings.batches or ((1, 16) if settings.quick else (1, 4, 16, 64))
    contexts = (128,) if settings.quick else (128, 1024)
    prompts = (256,) if settings.quick else (256, 2048)
    decoding = [CpuCase("decode", batch, context) for context in contexts for batch in batches]
    return decoding + [CpuCase("prefill", 1, length) for length in prompts]


def parts(settings: BenchSettings) -> list[BenchPart]:
    """Return all requested parts, ordered so that each program is loaded once for a group. Raises `InvalidRequest` if
    no part is selected."""
    models = settings.model_sizes or (("20m",) if settings.quick else ("0.5b", "1.5b"))
    all_parts = [part for model in models for part in _of_model(model, settings)]
    wanted = [part for part in all_parts if not settings.parts or any(text in part.name for text in settings.parts)]
    if not wanted:
        raise InvalidRequest(
            f"no part's name contains {' or '.join(map(repr, settings.parts))}; "
            f"there are {', '.join(repr(part.name) for part in all_parts)}",
            "parts",
        )
    return wanted


def _of_model(model: str, settings: BenchSettings) -> Iterator[BenchPart]:
    for group in GROUPS:
        yield from (BenchPart(model, group, case) for case in cases(settings))
    for service in SERVICES:
        yield BenchPart(model, service)


def num_steps(settings: BenchSettings) -> int:
    """Return the number of timed decoding steps."""
    return 16 if settings.quick else 48


def guess_seconds(part: BenchPart, checkpoint: BenchCheckpoint, limits: CpuLimits, settings: BenchSettings) -> float:
    """Estimate how long a part takes, from the speed of memory and arithmetic units."""
    if part.case is None:
        return _SERVICE_SECONDS / (4 if settings.quick else 1)
    seconds = 0.0
    prompt = CpuCase("prefill", 1, part.case.context)
    rounds = 1 if part.case.kind == "decode" else num_rounds(part.case, settings)
    for peer in part.peers:
        form = peer.rpartition(" ")[2]
        tokens = part.case.batch * part.case.context
        work = rounds * limits.seconds(checkpoint, form, prompt, tokens)
        if part.case.kind == "decode":
            work += num_steps(settings) * limits.seconds(checkpoint, form, part.case, part.case.batch)
        seconds += work / _GUESSED_SHARE + checkpoint.step_bytes / 4 * BYTES[form] * _LOAD_SECONDS
    return seconds


def num_rounds(case: CpuCase, settings: BenchSettings) -> int:
    """Return the number of rounds in which the prompts of a case are read."""
    return 2 if settings.quick or case.batch * case.context > 1024 else 5
