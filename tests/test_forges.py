"""Tests that each forge's configuration runs the same commands, and that a developer can run them."""

from __future__ import annotations

import re

import pytest

from tests.sources import ROOT

FORGES = [".github/workflows/ci.yml", ".gitlab-ci.yml"]


def commands(file: str) -> list[str]:
    """Return the commands in a forge's configuration file, with the Python version replaced."""
    found = re.findall(
        r"^ *- (?:run: )?((?:make|scripts/)\S*.*)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE
    )
    return [re.sub(r"\$\{.*?\}+", "VERSION", command) for command in found]


def versions(file: str) -> set[str]:
    return set(re.findall(r'"(3\.\d+)"', (ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("file", FORGES)
def test_a_forge_runs_what_a_developer_runs(file: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    ran = commands(file)
    assert [command.split()[0] for command in ran] == ["make", "make", "make", "make", "scripts/release"]
    assert {command.split()[1] for command in ran[:4]} <= targets and (ROOT / "scripts/release").is_file()


def test_all_forges_run_the_same() -> None:
    first, *others = FORGES
    assert versions(first) >= {"3.11", "3.12", "3.13"}
    for other in others:
        assert commands(other) == commands(first) and versions(other) == versions(first)


def test_actions_are_pinned_by_commit() -> None:
    used = [
        line.split("uses:")[1].split()
        for file in sorted((ROOT / ".github/workflows").glob("*.yml"))
        for line in file.read_text(encoding="utf-8").splitlines()
        if "uses:" in line
    ]
    assert used
    for action, _, version in used:
        assert re.search(r"@[0-9a-f]{40}$", action) and version.startswith("v"), action
