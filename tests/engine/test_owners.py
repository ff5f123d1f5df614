"""Tests that each part of a sequence has one owner: no other module of the engine writes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import get_args, get_type_hints

import pytest

from bridle.engine import Sequence, sequence_state
from tests.sources import PACKAGE, tree

#: The files that write each part. `Sequence` itself keeps its parts in step with its tokens.
OWNERS = {
    "queue": {"sequence_queues", "lora_scheduler", "encoder_scheduler", "prefill_sharing", "stored_blocks"},
    "kv": {"scheduler", "sequence_queues", "block_manager", "state_manager", "draft_model", "stored_blocks"},
    "control": {"controller_manager", "controller_output", "input_processor"},
    "draws": {"sample_planner"},
    "drafts": {"speculation", "proposer_selection", "proposers"},
    "output": {"output_processor", "policy_enforcement", "output_holdback", "constraint_floor", "best_of"},
    "trace": {"trace_recorder"},
}
ALWAYS = {"sequence", "sequence_state"}
#: What changes a list in place.
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", "add", "update"}


def kind_of(hint: type) -> type:
    """Return the class of a part of a sequence. The type of an optional part is `Part | None`."""
    rest = set(get_args(hint)) - {type(None)}
    return rest.pop() if len(rest) == 1 and type(None) in get_args(hint) else hint


KINDS = {name: kind_of(hint) for name, hint in get_type_hints(Sequence).items()}
PARTS = {name: kind for name, kind in KINDS.items() if name in OWNERS}
FILES = sorted((PACKAGE / "engine").rglob("*.py"))


def written(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions to which a statement or a call writes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple) else [target]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield target
        case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in CHANGES:
            yield value


def parts_written(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Part and line of all writes to sequences in a file: `seq.kv.x = 1`, and `kv.x = 1` after `kv = seq.kv`."""
    for node in ast.walk(module):
        for target in written(node):
            part = part_of(target)
            if part is not None:
                yield part, target.lineno


def part_of(target: ast.expr) -> str | None:
    """Return the part of a sequence to which an expression belongs, from its fields: `a.kv.b`, `kv.b[1:]`,
    `a.output.usage.c`."""
    names: list[str] = []
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        if isinstance(target, ast.Attribute):
            names.append(target.attr)
        target = target.value
    if isinstance(target, ast.Name):
        names.append(target.id)
    for inner, outer in pairwise(names):
        if outer in PARTS and inner in {field.name for field in fields(PARTS[outer])}:
            return outer
    return None


def test_every_part_is_known() -> None:
    parts = {name for name, kind in KINDS.items() if is_dataclass(kind) and name != "request"}
    assert parts - {"sampling", "vectors"} == set(OWNERS)  # these are values that never change
    states = {value for name, value in vars(sequence_state).items() if name.endswith("State")}
    assert states == set(PARTS.values())
    names = [field.name for kind in PARTS.values() for field in fields(kind)]
    assert len(names) == len(set(names))  # a field belongs to one part


def test_only_its_owner_writes_a_part_and_every_owner_does() -> None:
    written_by = {(path.stem, part): line for path in FILES for part, line in parts_written(tree(path))}
    wrong = {place: line for place, line in written_by.items() if place[0] not in OWNERS[place[1]] | ALWAYS}
    assert not wrong, f"these write what is not their own: {wrong}"
    assert {(owner, part) for part, owners in OWNERS.items() for owner in owners} <= set(written_by)


def test_tokens_are_written_where_outputs_grow() -> None:
    """A sequence's tokens and its fixed properties are written only in `Sequence`, except for the new tokens of an
    output."""
    own = {"tokens", "num_prompt", "max_len", "stopping", "sampling", "request", "key", "stop_ids", "index"}
    places = [
        path.stem
        for path in FILES
        for node in ast.walk(tree(path))
        for target in written(node)
        if isinstance(target, ast.Attribute) and target.attr in own and ast.unparse(target.value).endswith("seq")
    ]
    assert set(places) == {"output_processor"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seq.kv.num_computed = 1", "kv"),
        ("a.b.control.pending_ask, x = 1, 2", "control"),
        ("kv = seq.kv\nkv.block_table[0] = 3", "kv"),
        ("seq.output.usage.sampled_tokens += 1", "output"),
        ("seq.output.unsent.append(3)", "output"),
        ("del child.kv.block_table[1:]", "kv"),
        ("x = seq.kv.num_computed", None),
    ],
)
def test_writing_is_seen(text: str, part: str | None) -> None:
    assert next((name for name, _ in parts_written(ast.parse(text))), None) == part
