"""Chooses the kernels for this processor by its features, checks their hash, and compares their results once with plain
torch.

Plain torch computes instead if no shared object fits the processor, or if the object was changed or gives wrong
results. `choice()` returns the kernels in use and the reason for the choice.
"""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bridle.cpu_kernels.features import cpu_features
from bridle.cpu_kernels.ggml import TYPES, BlockType, dequantize, quantize
from bridle.cpu_kernels.isa_targets import MANIFEST, TARGETS, IsaTarget
from bridle.cpu_kernels.kernels import Kernels
from bridle.cpu_kernels.layers import AttentionRows, LayerKV, attend
from bridle.cpu_kernels.packing import pack_blocks, pack_float32, pack_int8, plain_fill
from bridle.cpu_kernels.plain_recurrence import PlainRecurrences
from bridle.cpu_kernels.recurrence import RecurrenceKernels, Stretch
from bridle.cpu_kernels.sampling import COLUMNS, SamplingKernels
from bridle.cpu_kernels.threads import num_threads
from bridle.errors import BridleError, InternalError

_log = logging.getLogger(__name__)
_lock = Lock()
_TRIAL_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The choice of kernels: the kernels in use, or None if plain torch computes; and the reason for the choice."""

    kernels: Kernels | None
    reason: str


def kernels() -> Kernels | None:
    """Return the kernels in use; None if plain torch computes. The kernels use the number of threads that is set for
    torch."""
    with _lock:
        chosen = choice().kernels
        if chosen is not None and chosen.threads < (wanted := num_threads()):
            chosen.use_threads(wanted)
    return chosen


@cache
def choice() -> KernelChoice:
    """Choose the kernels for this processor, once per process."""
    reasons = []
    for target in fitting(platform.system(), platform.machine(), cpu_features()):
        try:
            found = load(target)
            try_out(found)
        except (BridleError, OSError) as error:
            _log.warning("CPU kernels %s are not used: %s", target.name, error)
            reasons.append(f"{target.name}: {error}")
            continue
        made = KernelChoice(found, f"{found.name}, {found.lanes} lanes")
        _log.info("CPU kernels: %s", made.reason)
        return made
    reason = "; ".join(reasons) or "none is built for this processor"
    _log.warning("CPU kernels cannot be used, so plain torch computes: %s", reason)
    return KernelChoice(None, reason)


def fitting(system: str, machine: str, features: Set[str]) -> Iterator[IsaTarget]:
    """Yield the instruction-set targets that a machine with these features can run, best first."""
    if system == "Linux":
        machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
        yield from (target for target in TARGETS if target.machine == machine and target.features <= features)


def load(target: IsaTarget) -> Kernels:
    """Open the shared object of an instruction-set target. Raises `InternalError` if its hash differs from the
    manifest."""
    wanted = msgspec.json.decode(MANIFEST.read_bytes(), type=dict[str, str]).get(target.name)
    found = hashlib.sha256(target.path.read_bytes()).hexdigest()
    if found != wanted:
        raise InternalError(f"{target.path.name} has the SHA-256 {found}; the manifest says {wanted}")
    return Kernels(target.name, target.path)


def try_out(found: Kernels) -> None:
    """Try a small product for each weight format, and the kernels for attention, sampling and recurrences. Raises
    `InternalError` if a kernel's result differs from that of torch."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(3, 256, generator=generator)
    weight = torch.randn(33, 256, generator=generator)
    integers = torch.randint(-127, 128, weight.shape, generator=generator, dtype=torch.int8)
    ones = found.matrix(pack_int8(integers, torch.ones(33), found.lanes, found.zero), None)
    scale = rows.abs().amax(1, keepdim=True).div(127)
    want = (torch.round(rows / scale) @ integers.float().t()) * scale  # sums below 2^24: exact in float32, too
    if not torch.equal(found.linear(ones, rows), want):
        raise InternalError("the kernels' 8-bit matrix product differs from torch's")
    for kind in TYPES.values():
        _try_packing(found, kind, generator)
    for name in ("Q8_0", "Q4_0"):
        kind = TYPES[name]
        blocks = quantize(kind, weight)
        matrix = found.matrix(pack_blocks(kind, blocks, found.lanes, found.pack), None)
        want = rows @ dequantize(kind, blocks).t()
        _compare(found.linear(matrix, rows), want, _TRIAL_TOLERANCE, f"{name} product")
    floats = found.matrix(pack_float32(weight, found.lanes), None)
    _compare(found.linear(floats, rows), rows @ weight.t(), 1e-5, "float32 product")
    _try_attention(found, generator)
    _try_sampling(SamplingKernels(found), generator)
    _try_recurrences(RecurrenceKernels(found), generator)


def _try_packing(found: Kernels, kind: BlockType, generator: torch.Generator) -> None:
    blocks = torch.randint(256, (found.lanes + 1, 2 * kind.num_bytes), generator=generator, dtype=torch.uint8)
    have, want = (
        pack_blocks(kind, blocks, found.lanes, fill) for fill in (found.pack, plain_fill(found.lanes, found.zero))
    )
    if not (torch.equal(have.weights, want.weights) and torch.equal(have.scales, want.scales)):
        raise InternalError(f"the kernels pack {kind.name} blocks in another order than torch does")


def _try_attention(found: Kernels, generator: torch.Generator) -> None:
    """Try attention for the last two of five tokens, over two key heads with two query heads each."""
    query, keys, values = (torch.randn(n, heads, 32, generator=generator) for n, heads in ((2, 4), (5, 2), (5, 2)))
    rows = AttentionRows([(0, 2, 5, [(0, 5)])], 5, found.queries // 2)
    have = attend(found, query, LayerKV(keys, values), rows, 0.2)
    by_head = [query.transpose(0, 1), *(x.repeat_interleave(2, 1).transpose(0, 1) for x in (keys, values))]
    mask = torch.ones(2, 5, dtype=torch.bool).tril(3)
    want = scaled_dot_product_attention(by_head[0], by_head[1], by_head[2], attn_mask=mask, scale=0.2)
    _compare(have, want.transpose(0, 1), 1e-5, "attention")


def _try_sampling(found: SamplingKernels, generator: torch.Generator) -> None:
    """Try to sample from each of two rows, and to find their five largest values."""
    work = torch.randn(2, 3 * COLUMNS, generator=generator)
    _try_masks(found, work)
    best, places = work.topk(5)
    largest, ones, half = best[:, 0].contiguous(), torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64)
    tokens, totals = found.draw(work, [0, 1], largest, ones, half)
    told = found.survey(work, places[:, 4].tolist(), torch.full((2, 1), -1.0, dtype=torch.float64), 5)
    fifth = torch.full((2, 1), 5.0)
    want = torch.cat([each.double() for each in (best[:, 4:], fifth, best, places, best[:, :1], totals)], 1)
    if not torch.equal(told, want):
        raise InternalError("the kernels' largest logits or ranks differ from torch's")
    weights = (work - largest[:, None]).exp().double()
    _compare(totals / 2.0**34, weights.sum(1, keepdim=True), 1e-5, "total of weights")
    running = weights.cumsum(1).gather(1, tokens.unsqueeze(1))
    _compare(running, totals / 2.0**35, 2 / float(totals.min() / 2.0**34), "draw")


def _try_masks(found: SamplingKernels, work: Tensor) -> None:
    """Try sampling from the first row without a mask, and from the second row with a mask of every other token."""
    odd = b"\xaa" * (work.shape[1] // 8)
    want, have = work.clone(), work.clone()
    want[1, ::2] = -torch.inf
    found.allow(have, [1], [odd])
    best, places = found.largest(work, [0, 1], [None, odd])
    if not (torch.equal(have, want) and torch.equal(best, want.amax(1)) and torch.equal(places, want.argmax(1))):
        raise InternalError("the kernels' largest logits under token masks differ from torch's")


def _try_recurrences(found: RecurrenceKernels, generator: torch.Generator) -> None:
    """Try the recurrences on two tokens of a sequence with a state, and on one token of another sequence."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    rows, keys, heads, steps = drawn(3, 20), drawn(3, 2, 20), drawn(3, 4, 24), drawn(3, 4).abs()
    rates, skip = -drawn(20, 20).abs(), drawn(20)
    trials: list[tuple[str, tuple[Any, ...], Tensor]] = [
        ("convolve", (rows, drawn(20, 3), skip, True), drawn(3, 20)),
        ("delta_rule", (keys, drawn(3, 2, 20), heads, -steps, steps), drawn(4, 20, 24)),
        ("state_space", (heads, steps, rates[0, :4], keys, drawn(3, 2, 20), skip[:4]), drawn(4, 24, 20)),
        ("scan", (rows, rows.abs(), rates, drawn(3, 20), drawn(3, 20), skip, drawn(3, 20)), drawn(20, 20)),
    ]
    for name, inputs, state in trials:
        results = []
        for each in (found, PlainRecurrences()):
            states, out = (
                (state.clone(), state.clone()),
                torch.empty_like(inputs[2] if name == "delta_rule" else inputs[0]),
            )
            stretches = Stretch(0, 2, states[0], False), Stretch(2, 1, states[1], True)
            getattr(each, name)(*inputs, stretches, out)
            results.append(torch.cat([part.flatten() for part in (out, *states)]))
        _compare(results[0], results[1], 1e-5, f"recurrence {name!r}")


def _compare(have: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    if not float((have - want).abs().max()) <= tolerance * float(want.abs().max()):
        raise InternalError(f"the kernels' {what} differs from torch's")


def sampling_kernels(work: Tensor) -> SamplingKernels | None:
    """Return the kernels that sample from logits like `work`; None if plain torch must sample."""
    if work.device.type != "cpu" or work.dtype is not torch.float32:
        return None
    found = kernels()
    return None if found is None else _sampling(found)


@cache
def _sampling(found: Kernels) -> SamplingKernels:
    return SamplingKernels(found)


def recurrences(device: torch.device, dtype: torch.dtype = torch.float32) -> PlainRecurrences | RecurrenceKernels:
    """Return the C kernels for recurrent layers. If the states are not on a CPU in float32, return the implementation
    in plain torch."""
    found = kernels() if device.type == "cpu" and dtype is torch.float32 else None
    return PlainRecurrences() if found is None else _recurrence(found)


@cache
def _recurrence(found: Kernels) -> RecurrenceKernels:
    return RecurrenceKernels(found)
