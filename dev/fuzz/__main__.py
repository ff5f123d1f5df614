"""The command line: runs parsers on damaged inputs and prints the findings. The exit status is 1 if there are
findings."""

from __future__ import annotations

import argparse
import sys
import time

from dev.fuzz.harness import run_parser
from dev.fuzz.parsers import PARSERS


def main() -> int:
    """Run the named parsers, or all."""
    parser = argparse.ArgumentParser(prog="python -m dev.fuzz")
    parser.add_argument("names", nargs="*", metavar="PARSER", help=f"some of {', '.join(PARSERS)}; default: all")
    parser.add_argument("-n", "--inputs", type=int, default=2_000, help="inputs of each parser; default: 2000")
    parser.add_argument("--seed", type=int, default=0, help="number of the first input; default: 0")
    options = parser.parse_args()
    has_findings = False
    for name in options.names or PARSERS:
        began = time.monotonic()
        outcome = run_parser(name, options.seed, options.inputs)
        print(
            f"{name:16} {outcome.num_inputs:8} inputs {outcome.num_read:8} read {outcome.num_refused:8} refused "
            f"{len(outcome.findings):4} findings {outcome.growth >> 20:4} MiB more {time.monotonic() - began:7.1f} s"
        )
        for seed, text in outcome.findings.items():
            has_findings = True
            print(f"-- {name} --seed {seed}\n{text}")
    return int(has_findings)


if __name__ == "__main__":
    sys.exit(main())
