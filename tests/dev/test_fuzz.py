"""Parsers of untrusted bytes accept or refuse any input. `python -m dev.fuzz` runs any number of inputs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bridle.errors import BridleError, ProtocolError
from dev.fuzz import harness
from dev.fuzz.harness import run_inputs, run_parser
from dev.fuzz.mutations import mutate
from dev.fuzz.parsers import PARSERS, Parser

MANY = int(os.environ.get("BRIDLE_FUZZ_INPUTS", "20000"))


@pytest.mark.few(7)
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_refuses_damaged_input(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    examples, parse = parser.examples(), parser.open(tmp_path)
    for example in examples:
        parse(example)
    found = run_inputs(parser, examples, parse, range(150))
    assert found.findings == {}
    assert found.num_refused or name == "lmtp"  # which gives refusals as values


@pytest.mark.slow
@pytest.mark.timeout(7_200)
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_stays_within_its_bounds(name: str) -> None:
    found = run_parser(name, 1_000_000, MANY)
    assert found.findings == {}
    assert found.num_inputs == MANY
    assert found.growth < 64 << 20


def test_the_same_seed_gives_the_same_input() -> None:
    examples = [b"12 apples", b"another example"]
    inputs = [mutate(examples, seed) for seed in range(200)]
    assert inputs == [mutate(examples, seed) for seed in range(200)]
    assert len(set(inputs)) > 150


def _never_ends(data: bytes) -> None:
    while True:
        pass


def _refuses(data: bytes) -> None:
    raise ProtocolError("no")


@pytest.mark.parametrize(
    ("parse", "text"), [(_never_ends, "TookTooLong"), (lambda data: data[1 << 30], "IndexError"), (_refuses, None)]
)
def test_the_harness_finds_what_is_no_refusal(
    parse: Callable[[bytes], None], text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "CPU_SECONDS", 0.05)
    parser = Parser(lambda: [b"x"], lambda folder: parse)
    found = run_inputs(replace(parser, refusals=(BridleError,)), [b"x"], parse, range(3))
    assert (found.num_refused, len(found.findings)) == ((3, 0) if text is None else (0, 1))
    assert text is None or text in found.findings[0]
