"""Runs a parser on damaged input in a process of its own, whose memory and processor time are bounded."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from bridle.distributed.child_process import die_with_parent
from dev.fuzz.mutations import mutate
from dev.fuzz.parsers import PARSERS, Parse, Parser

#: Processor seconds and bytes that one input may take.
CPU_SECONDS = 5.0
MEMORY = 512 << 20
_MAX_FINDINGS = 20


class TookTooLong(BaseException):
    """An input took more than `CPU_SECONDS`. No handler of a parser catches it."""


@dataclass
class Outcome:
    """Counts of one parser's run. `findings` are errors that no parser may raise, by the seed of their input;
    `growth` is by how many bytes the memory of the process grew."""

    num_read: int = 0
    num_refused: int = 0
    growth: int = 0
    findings: dict[int, str] = field(default_factory=dict)

    @property
    def num_inputs(self) -> int:
        return self.num_read + self.num_refused + len(self.findings)


def run_parser(name: str, first_seed: int, count: int) -> Outcome:
    """Run `count` inputs. A process that dies is a finding; the next one continues behind its input."""
    total, seed, end = Outcome(), first_seed, first_seed + count
    context = multiprocessing.get_context("spawn")
    while seed < end and len(total.findings) < _MAX_FINDINGS:
        at: Synchronized[int] = context.Value("q", seed)
        ours, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="bridle-fuzz-") as folder:
            process = context.Process(target=_work, args=(name, seed, end, at, theirs, Path(folder)))
            process.start()
            theirs.close()
            try:
                part: Outcome = ours.recv()
            except EOFError:
                process.join()
                part = Outcome(findings={at.value: f"the process ended with status {process.exitcode}"})
            process.join()
        ours.close()
        seed = end if not part.findings else max(part.findings) + 1
        total.num_read += part.num_read
        total.num_refused += part.num_refused
        total.growth = max(total.growth, part.growth)
        total.findings |= part.findings
    return total


def _work(name: str, seed: int, end: int, at: Synchronized[int], results: Connection, folder: Path) -> None:
    die_with_parent(os.getppid())
    parser = PARSERS[name]
    examples, parse = parser.examples(), parser.open(folder)
    for example in examples:
        parse(example)  # libraries are loaded now
    before = _resident()
    limit = _mapped() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    outcome = run_inputs(parser, examples, parse, _noting(seed, end, at))
    outcome.growth = max(_resident() - before, 0)
    results.send(outcome)


def _noting(seed: int, end: int, at: Synchronized[int]) -> Iterator[int]:
    for number in range(seed, end):
        at.value = number
        yield number


def run_inputs(parser: Parser, examples: Sequence[bytes], parse: Parse, seeds: Iterable[int]) -> Outcome:
    """Run the inputs of these seeds until one is a finding: what that input leaves behind ends with its process."""
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
    """Bound the processor time of the block: what others compute meanwhile does not count."""

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
