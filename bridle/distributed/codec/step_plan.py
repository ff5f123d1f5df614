"""Encodes and decodes step plans. `decode_plan(encode_plan(plan))` equals `plan`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from bridle.distributed.codec.columns import check_lengths, item, shares
from bridle.distributed.codec.control_vectors import add_vectors, read_probes, read_spans
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine.multimodal.multimodal_inputs import PlaceholderRange, Runs
from bridle.engine.scheduling.step_plan import BlockCopy, ForkRow, PlanRow, StateCopy, StateSave, StepPlan

_NO_GRID = 0, 0, 0


def encode_plan(plan: StepPlan) -> pb.Plan:
    """Encode the step plan as columns."""
    rows = plan.rows
    message = pb.Plan(
        step=plan.step,
        seq_ids=[row.seq_id for row in rows],
        starts=[row.start for row in rows],
        num_scheduled=[row.num_scheduled for row in rows],
        num_logits=[row.num_logits for row in rows],
        num_kept=[row.num_kept for row in rows],
        num_new_tokens=[len(row.new_tokens) for row in rows],
        num_kept_blocks=[row.num_kept_blocks for row in rows],
        num_new_blocks=[len(row.new_blocks) for row in rows],
        num_prompt=[row.num_prompt for row in rows],
        new_tokens=chain.from_iterable([row.new_tokens for row in rows]),
        new_blocks=chain.from_iterable([row.new_blocks for row in rows]),
        freed=plan.freed,
    )
    if any(row.adapter is not None for row in rows):
        _add_adapters(message, rows)
    if any(row.runs for row in rows):
        _add_runs(message, rows)
    if any(row.vectors or row.probes for row in rows):
        add_vectors(message, rows)
    if plan.forks:
        message.fork_parents.extend(fork.parent for fork in plan.forks)
        message.fork_children.extend(fork.child for fork in plan.forks)
        message.fork_num_tokens.extend(fork.num_tokens for fork in plan.forks)
        message.fork_num_blocks.extend(fork.num_blocks for fork in plan.forks)
    if plan.copies:
        message.copy_sources.extend(copy.source for copy in plan.copies)
        message.copy_targets.extend(copy.target for copy in plan.copies)
    if any(row.state >= 0 for row in rows):
        _add_states(message, rows)
    if plan.state_copies:
        message.state_copy_sources.extend(copy.source for copy in plan.state_copies)
        message.state_copy_targets.extend(copy.target for copy in plan.state_copies)
    return message


def _add_states(message: pb.Plan, rows: Sequence[PlanRow]) -> None:
    message.states.extend(row.state for row in rows)
    if any(row.saves for row in rows):
        message.num_saves.extend(len(row.saves) for row in rows)
        message.save_positions.extend(save.position for row in rows for save in row.saves)
        message.save_slots.extend(save.slot for row in rows for save in row.saves)


def _add_adapters(message: pb.Plan, rows: Sequence[PlanRow]) -> None:
    numbers: dict[str, int] = {}
    for row in rows:
        number = 0 if row.adapter is None else numbers.setdefault(row.adapter, len(numbers) + 1)
        message.adapters.append(number)
    message.adapter_names.extend(numbers)


def _add_runs(message: pb.Plan, rows: Sequence[PlanRow]) -> None:
    numbers: dict[bytes, int] = {}
    for row in rows:
        message.num_runs.append(len(row.runs))
        for run in row.runs:
            message.run_positions.append(run.position)
            message.run_lengths.append(run.length)
            message.run_offsets.append(run.offset)
            message.run_media.append(numbers.setdefault(run.key, len(numbers)))
            message.run_grids.extend(run.grid or _NO_GRID)
            message.run_is_mutual.append(run.is_mutual)
    message.media.extend(numbers)
    paces = [run.pace for row in rows for run in row.runs]
    if any(pace != 1.0 for pace in paces):
        message.run_paces.extend(paces)


def decode_plan(message: pb.Plan) -> StepPlan:
    """Decode a step plan. Raises `ProtocolError` if the message's columns have inconsistent lengths."""
    what = f"plan of step {message.step}"
    seq_ids = list(message.seq_ids)
    columns = (message.starts, message.num_scheduled, message.num_logits, message.num_kept, message.num_kept_blocks)
    counts = list(message.num_new_tokens), list(message.num_new_blocks)
    check_lengths(what, len(seq_ids), *columns, *counts, message.num_prompt)
    rows = map(
        PlanRow,
        seq_ids,
        message.starts,
        message.num_scheduled,
        message.num_logits,
        message.num_kept,
        shares(message.new_tokens, counts[0], what),
        message.num_kept_blocks,
        shares(message.new_blocks, counts[1], what),
        message.num_prompt,
        _adapters(message, len(seq_ids), what),
        _runs(message, len(seq_ids), what),
        _states(message, len(seq_ids), what),
        _saves(message, len(seq_ids), what),
        read_spans(message, len(seq_ids), what),
        read_probes(message, len(seq_ids), what),
    )
    forks, copies = _forks(message, what), _copies(message, what)
    return StepPlan(message.step, list(rows), forks, list(message.freed), copies, _state_copies(message, what))


def _adapters(message: pb.Plan, num_rows: int, what: str) -> Sequence[str | None]:
    if not message.adapters:
        return [None] * num_rows
    check_lengths(what, num_rows, message.adapters)
    names = [None, *message.adapter_names]
    return [item(names, number, what) for number in message.adapters]


def _runs(message: pb.Plan, num_rows: int, what: str) -> Sequence[Runs]:
    if not message.num_runs:
        return [()] * num_rows
    check_lengths(what, num_rows, message.num_runs)
    columns = message.run_positions, message.run_lengths, message.run_media, message.run_offsets
    num_runs, grids = len(message.run_positions), list(message.run_grids)
    looks = message.run_is_mutual, message.run_paces or [1.0] * num_runs
    check_lengths(what, num_runs, *columns, *looks)
    check_lengths(what, 3 * num_runs, grids)
    keys = list(message.media)
    runs = []
    for i, (position, length, number, offset, *look) in enumerate(zip(*columns, *looks, strict=True)):
        time, height, width = grids[3 * i : 3 * i + 3]
        grid = (time, height, width) if (time, height, width) != _NO_GRID else None
        runs.append(PlaceholderRange(position, length, item(keys, number, what), offset, grid, *look))
    return shares(runs, list(message.num_runs), what)


def _forks(message: pb.Plan, what: str) -> list[ForkRow]:
    columns = message.fork_parents, message.fork_children, message.fork_num_tokens, message.fork_num_blocks
    check_lengths(what, len(message.fork_parents), *columns)
    return list(map(ForkRow, *columns))


def _copies(message: pb.Plan, what: str) -> list[BlockCopy]:
    check_lengths(what, len(message.copy_sources), message.copy_targets)
    return list(map(BlockCopy, message.copy_sources, message.copy_targets))


def _states(message: pb.Plan, num_rows: int, what: str) -> Sequence[int]:
    if not message.states:
        return [-1] * num_rows
    check_lengths(what, num_rows, message.states)
    return list(message.states)


def _saves(message: pb.Plan, num_rows: int, what: str) -> Sequence[tuple[StateSave, ...]]:
    if not message.num_saves:
        return [()] * num_rows
    check_lengths(what, num_rows, message.num_saves)
    check_lengths(what, len(message.save_positions), message.save_slots)
    return shares(list(map(StateSave, message.save_positions, message.save_slots)), list(message.num_saves), what)


def _state_copies(message: pb.Plan, what: str) -> list[StateCopy]:
    check_lengths(what, len(message.state_copy_sources), message.state_copy_targets)
    return list(map(StateCopy, message.state_copy_sources, message.state_copy_targets))
