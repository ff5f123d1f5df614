"""Runs a parser on damaged input in a separate process, whose memory and processor time are limited."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

from bridle.distributed.child_process import die_with_parent
from dev.fuzz.mutations import mutate
from dev.fuzz.parsers import PARSERS, Parse, Parser

#: Processor seconds and bytes that one input may take.
CPU_SECONDS = 5.0
MEMORY = 512 << 20
_MAX_FINDINGS = 20
#: The file with the seed of the input that is being parsed.
_NUMBER = "seed"


class TookTooLong(BaseException):
    """An input that took more than `CPU_SECONDS` of processor time. It is a `BaseException`, so that no handler in a
    parser catches it."""


@dataclass
class Outcome:
    """Counts of running one parser. `findings` are errors that no parser may raise, by the seed of their input.
    `growth` is the growth of the process's memory in bytes."""

    num_read: int = 0
    num_refused: int = 0
    growth: int = 0
    findings: dict[int, str] = field(default_factory=dict)

    @property
    def num_inputs(self) -> int:
        return self.num_read + self.num_refused + len(self.findings)


def run_parser(name: str, first_seed: int, count: int) -> Outcome:
    """Run `count` inputs. A crash of the process is a finding; a new process continues with the next input."""
    total, seed, end = Outcome(), first_seed, first_seed + count
    while seed < end and len(total.findings) < _MAX_FINDINGS:
        part = _run_apart(name, seed, end)
        seed = end if not part.findings else max(part.findings) + 1
        total.num_read += part.num_read
        total.num_refused += part.num_refused
        total.growth = max(total.growth, part.growth)
        total.findings |= part.findings
    return total


def _run_apart(name: str, seed: int, end: int) -> Outcome:
    """Run the inputs from `seed` on in a new process, until one of them is a finding."""
    with tempfile.TemporaryDirectory(prefix="bridle-fuzz-") as folder:
        command = [sys.executable, "-m", "dev.fuzz.harness", name, str(seed), str(end), folder]
        run = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # noqa: S603
        if run.returncode == 0:
            return msgspec.json.decode(run.stdout, type=Outcome)
        noted = Path(folder) / _NUMBER
        number = int(noted.read_text()) if noted.exists() else seed
        return Outcome(findings={number: f"the process ended with status {run.returncode}"})


def main(name: str, seed: int, end: int, folder: Path) -> None:
    """Run the inputs in this process, and print the outcome as JSON."""
    die_with_parent(os.getppid())
    parser = PARSERS[name]
    examples, parse = parser.examples(), parser.open(folder)
    for example in examples:
        parse(example)  # loads libraries now
    before = _resident()
    limit = _mapped() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with (folder / _NUMBER).open("wb", buffering=0) as file:
        outcome = run_inputs(parser, examples, parse, _noted(range(seed, end), file))
    outcome.growth = max(_resident() - before, 0)
    sys.stdout.buffer.write(msgspec.json.encode(outcome))


def _noted(seeds: Iterable[int], file: BinaryIO) -> Iterator[int]:
    """Write each seed to a file before it is used, because its input may end the process."""
    for seed in seeds:
        file.seek(0)
        file.write(b"%d" % seed)
        yield seed


def run_inputs(parser: Parser, examples: Sequence[bytes], parse: Parse, seeds: Iterable[int]) -> Outcome:
    """Run the inputs of these seeds, until one of them is a finding. That input's files and memory are freed when its
    process ends."""
    outcome = Outcome()
    for seed in seeds:
        try:
            with _timed():
                parse(mutate(examples, seed))
            outcome.num_read += 1
        except parser.refusals:
            outcome.num_refused += 1
        except BaseException as error:
            outcome.findings[seed] = "".join(traceback.format_exception(error)[-3:])
            break
    return outcome


@contextmanager
def _timed() -> Iterator[None]:
    """Limit the processor time within the block; the time of other processes does not count."""

    def stop(number: int, frame: object) -> None:
        raise TookTooLong(f"more than {CPU_SECONDS:g} s of processor time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _pages() -> list[int]:
    with open("/proc/self/statm") as file:
        return [int(number) * resource.getpagesize() for number in file.read().split()]


def _mapped() -> int:
    return _pages()[0]


def _resident() -> int:
    return _pages()[1]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
