"""The third check of a model: compares a run with packed steps and a paged cache with the eager attention of
transformers. Three sequences run through chunked prefill, decodes and mixed steps over scattered blocks. The logits of
every position are compared with those of one eager pass per sequence. In both runs, sliding windows are narrowed, so
that even short sequences exceed them. The number of keys that an indexer selects is also reduced. If layers are
recurrent, the first sequence is also rolled back to a copy of its state. The copy of the state continues in another
slot, as after a fork.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bridle.cpu_kernels.linear import in_floats
from bridle.engine.scheduling.step_plan import PlanRow, StateSave
from bridle.model.attention import ATTENTION_NAME, PagedAttention
from bridle.model.batch_inputs import pack_step
from bridle.model.geometry import Geometry
from bridle.model.kernels import create_kernel
from bridle.model.kv_cache import KVCache
from bridle.model.runner import ModelRunner
from bridle.model.sequence_state import CachedRequestState
from bridle.model.state_pool import StatePool

TRIAL_WINDOW = 12
TRIAL_BLOCK = 4
#: One state for each of the trial's three sequences, a copy, and a copy of the copy.
_TRIAL_STATES = 5
#: Largest error that rounding explains, relative to the largest logit.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Outcome of a comparison. Errors are absolute differences of logits, to be compared with `largest_logit`."""

    model: str
    family: str
    kernel: str
    dtype: str
    num_layers: int
    num_positions: int
    num_steps: int
    max_error: float
    largest_logit: float
    tolerance: float
    num_same_greedy: int
    windows: tuple[int, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Return whether all logits are equal within the tolerance. NaN never is."""
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "equal" if self.is_equal else "DIFFERENT"
        lines = [
            f"{self.model} ({self.family}, {self.num_layers} layers, {self.dtype}, kernel {self.kernel}): {verdict}",
            f"  largest logit error   {self.max_error:.3g} (limit {self.tolerance:.3g}, logits up to "
            f"{self.largest_logit:.3g})",
            f"  same greedy token     {self.num_same_greedy} of {self.num_positions} positions",
            f"  packed run            {self.num_steps} steps: chunked prefill, decodes, mixed",
        ]
        if self.windows:
            shown = ", ".join(str(window) for window in self.windows)
            lines.append(f"  sliding windows       {shown} (compared at {TRIAL_WINDOW})")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def compare_with_eager(
    model: nn.Module,
    geometry: Geometry,
    device: torch.device,
    *,
    kernel: str = "auto",
    max_tokens: int = 96,
    notes: tuple[str, ...] = (),
    prepare: Callable[[], None] = lambda: None,
    floats: bool = False,
) -> ParityReport:
    """Compare a loaded model's results in packed steps over a paged cache with the eager attention of transformers.

    `prepare` is called between the eager and the packed pass, while windows are narrowed, and may change the model. All
    changes of the model, except those by `prepare`, are undone. With `floats`, quantized layers are computed in
    floating point.
    """
    config: Any = model.config
    dtype = next(model.parameters()).dtype
    sequences = _trial_sequences(geometry.vocab_size, max_tokens, getattr(model, "media_ids", frozenset()))
    windows = sorted({layer.window for layer in geometry.layers.values() if layer.window is not None})
    with narrowed(model, TRIAL_WINDOW), in_floats() if floats else nullcontext():
        expected = [_eager_logits(model, tokens, device) for tokens in sequences]
        prepare()
        runner = trial_runner(model, geometry, kernel, dtype, device, sum(map(len, sequences)))
        found, num_steps = run_packed(runner, sequences, device)
    want, have = torch.cat(expected).float(), torch.cat(found).float()  # [positions, V]
    scale = float(want.abs().max())
    return ParityReport(
        model=str(getattr(config, "_name_or_path", "") or type(model).__name__),
        family=config.model_type,
        kernel=runner.attention.kernel.name,
        dtype=str(dtype).removeprefix("torch."),
        num_layers=len(geometry.layers.keys() | geometry.states.keys()),
        num_positions=want.shape[0],
        num_steps=num_steps,
        max_error=_largest_error(want, have),
        largest_logit=scale,
        tolerance=TOLERANCES.get(dtype, 1e-1) * max(1.0, scale),
        num_same_greedy=int((want.argmax(-1) == have.argmax(-1)).sum()),
        windows=tuple(windows),
        notes=notes,
    )


def _largest_error(want: Tensor, have: Tensor) -> float:
    """Return the largest absolute difference between two logits tensors. Both logits tensors must have infinities at
    the same positions, because some models forbid ids by infinite logits. NaN counts as infinite."""
    same = want == have
    error = torch.where(same, torch.zeros_like(want), (want - have).abs())
    return float(torch.nan_to_num(error, nan=float("inf")).max())


def _trial_sequences(vocab_size: int, max_tokens: int, avoided: Set[int] = frozenset()) -> list[list[int]]:
    """Return a long, a medium and a short sequence of random tokens, the same in each call. The sequences do not
    contain the ids in `avoided`, such as image placeholders."""
    generator = torch.Generator().manual_seed(20)
    lengths = (max_tokens, max(3, max_tokens // 2), max(2, max_tokens // 5))
    drawn = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    other = next(token for token in range(3, vocab_size) if token not in avoided)
    return [[other if token in avoided else token for token in tokens] for tokens in drawn]


def _eager_logits(model: Any, tokens: list[int], device: torch.device) -> Tensor:
    """Return logits [L, V] of one plain pass with the model's own attention."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=device)
            whole = getattr(model, "whole", model)  # of a text part: it may change what goes in and comes out
            return whole(input_ids=ids, use_cache=False).logits[0]  # type: ignore[no-any-return]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def trial_runner(
    model: nn.Module, geometry: Geometry, kernel: str, dtype: torch.dtype, device: torch.device, num_tokens: int
) -> ModelRunner:
    """Return a runner whose cache holds `num_tokens` tokens in small blocks."""
    chosen = create_kernel(kernel, device, dtype)
    block_size = 256 if chosen.name == "varlen" else TRIAL_BLOCK
    cache = KVCache(geometry, num_tokens // block_size + 8, block_size, dtype, device)
    states = StatePool(geometry.states, _TRIAL_STATES, device) if geometry.states else None
    return ModelRunner(model, PagedAttention(cache, chosen, states))


def run_packed(runner: ModelRunner, sequences: list[list[int]], device: torch.device) -> tuple[list[Tensor], int]:
    """Return logits [L, V] of every position of each sequence, computed in mixed steps over scattered blocks."""
    cache = runner.attention.cache
    free = list(range(cache.num_blocks))
    free = free[1::2] + free[0::2]  # neighbors are two blocks apart: no sequence is one run
    mirrors = [CachedRequestState() for _ in sequences]
    for mirror, tokens in zip(mirrors, sequences, strict=True):
        mirror.tokens = list(tokens)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    num_steps = 0
    while any(done[i] < len(tokens) for i, tokens in enumerate(sequences)):
        rows = []
        for i, tokens in enumerate(sequences):
            chunk = min(_chunk(i, num_steps), len(tokens) - done[i])
            if chunk:
                rows.append((i, _trial_row(runner, i, done[i], chunk, len(sequences[0]) // 2)))
                needed = -(-(done[i] + chunk) // cache.block_size) - len(mirrors[i].blocks)
                mirrors[i].add_blocks(free.pop(0) for _ in range(needed))
        step = pack_step([row for _, row in rows], [mirrors[i] for i, _ in rows], cache.block_size, device)
        logits = runner.run(step)
        for (i, row), part in zip(rows, torch.split(logits, [row.num_logits for _, row in rows]), strict=True):
            parts[i].append(part)
            done[i] += row.num_scheduled
        num_steps += 1
    found = [torch.cat(part) for part in parts]
    if runner.attention.states is not None:
        start = len(sequences[0]) // 2
        found[0] = torch.cat([found[0][:start], _continue_copy(runner, mirrors[0], start)])
        num_steps += 1
    return found, num_steps


def _trial_row(runner: ModelRunner, sequence: int, start: int, length: int, saved: int) -> PlanRow:
    """Return a batch row of the trial. The first sequence's recurrent state is copied after `saved` of its tokens."""
    row = PlanRow(sequence, start, length, num_logits=length)
    if runner.attention.states is not None:
        row.state = sequence
        if sequence == 0 and start < saved <= start + length:
            row.saves = (StateSave(saved, _TRIAL_STATES - 2),)
    return row


def _continue_copy(runner: ModelRunner, mirror: CachedRequestState, start: int) -> Tensor:
    """Return logits [L, V] of the first sequence from position `start` on. The logits are computed from the sequence's
    saved state, which is first copied to another slot."""
    attention, length = runner.attention, len(mirror.tokens) - start
    assert attention.states is not None
    attention.states.copy([(_TRIAL_STATES - 2, _TRIAL_STATES - 1)])
    row = PlanRow(0, start, length, num_logits=length, state=_TRIAL_STATES - 1)
    return runner.run(pack_step([row], [mirror], attention.cache.block_size, attention.cache.device))


def _chunk(sequence: int, step: int) -> int:
    """Return the number of tokens of a sequence that one step of the trial computes. Each sequence has long chunks,
    short chunks and single tokens, at different times."""
    return (17, 1, 9, 1, 2, 30, 1)[(step + 2 * sequence) % 7]


@contextmanager
def narrowed(model: nn.Module, size: int) -> Iterator[None]:
    """Inside the `with` block, narrow every sliding window to `size` tokens, and let indexers select at most `size`
    positions. Both the paged and the eager pass use the narrow windows."""
    config: Any = model.config
    holders = [config.get_text_config(), config, *model.modules()]
    holders += [holder.config for holder in model.modules() if hasattr(holder, "config")]
    before: list[tuple[Any, str, int]] = []
    for holder in holders:
        for name in ("sliding_window", "index_topk"):
            value = vars(holder).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > size:
                before.append((holder, name, value))
                setattr(holder, name, size)
    try:
        yield
    finally:
        for holder, name, value in reversed(before):
            setattr(holder, name, value)
