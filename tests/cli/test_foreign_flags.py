"""Flags of other servers: each has the same meaning here, is read as another flag, or is refused with the flag to use
instead."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle.cli import main
from bridle.cli.app import app
from bridle.cli.foreign_flags import advice, in_our_words, meant_elsewhere
from bridle.compat.cli_flags import FLAGS, MODEL, SERVE_MODEL, TAKEN, row_of, rows_of, spellings
from dev.coming_from import NAMES, names
from tests.conftest import IS_FULL
from tests.sources import ROOT

ARGUMENTS = {name: each for each in app["serve"].assemble_argument_collection() for name in each.names}
LMTP_ARGUMENTS = {name: each for each in app["serve-model"].assemble_argument_collection() for name in each.names}
#: Flags of `bridle serve` that mean something else in another server; the page says what.
OTHER_MEANING = {("SGLang", "--max-total-tokens"), ("llama.cpp", "--tools")}
SAME = [row for row in FLAGS if row.is_same]
REFUSED = [row for row in FLAGS if row.name not in TAKEN and row.name not in ARGUMENTS]


def with_value(flag: str, arguments: dict[str, Any] = ARGUMENTS) -> list[str]:
    """Return the flag with a value that is not its default."""
    kind = arguments[flag].hint
    options = [each for part in (kind, *get_args(kind)) if get_origin(part) is Literal for each in get_args(part)]
    if options:
        return [flag, str(options[-1])]
    return [flag] if kind is bool else [flag, "3"]


@cache
def meaning(*words: str) -> dict[str, Any]:
    """Return the parsed arguments of a command line."""
    _, bound, _ = app.parse_args(in_our_words(words), exit_on_error=False, print_error=False)
    bound.apply_defaults()
    return dict(bound.arguments)


def takes(*words: str) -> bool:
    """Return whether the parser accepts a flag, and the flag changes a setting."""
    return meaning("serve", "demo", *words) != usual("serve")


@cache
def usual(command: str) -> dict[str, Any]:
    """Return the parsed arguments of a command without flags."""
    return meaning(command, "demo")


def takes_no_value(flag: str) -> bool:
    return flag not in ARGUMENTS or ARGUMENTS[flag].hint is bool


def takes_by_default(flag: str) -> bool:
    """Return whether a flag only states the default."""
    return flag in ("--prefix-caching", "--chunked-prefill", "--warm-up")


def some(names: list[str]) -> list[str]:
    """Return a third of the flags, or all with `BRIDLE_FULL`, because parsing each flag takes a while."""
    return names if IS_FULL else names[::3]


def read(*words: str) -> list[str]:
    return in_our_words(["serve", *words])[1:]


def test_the_same_flags_are_there() -> None:
    names = list(dict.fromkeys(row.name for row in SAME))
    assert all(name not in TAKEN and name in spellings(name) for name in names)
    for name in some(names):
        assert takes(*with_value(name)), name


def test_flags_of_lmqls_server(capsys: pytest.CaptureFixture[str]) -> None:
    for row in SERVE_MODEL:
        if row.is_same:
            words = with_value(row.name, LMTP_ARGUMENTS)
            assert meaning("serve-model", "demo", *words) != usual("serve-model"), row
        else:
            assert main(["serve-model", "demo", row.name, "3"]) == 2
            assert row.why in " ".join(capsys.readouterr().err.split())


def test_other_names_are_read_as_the_flags_that_are_here() -> None:
    """Foreign flags are translated to bridle's own flags, which the parser accepts."""
    for name, row in TAKEN.items():
        flag, *fixed = row.here.split()
        if row.here == MODEL:
            assert read(name, "folder", "--x") == read(f"{name}=folder", "--x") == ["folder", "--x"]
        elif fixed or takes_no_value(flag):
            assert read(name, "--x") == [flag, *fixed, "--x"]
        else:
            assert read(name, "a", "--x") == [flag, "a", "--x"] and read(f"{name}=a", "--x") == [f"{flag}=a", "--x"]
        if row.further:
            further = [f"{row.further}=b", f"{row.further}=c", "--x"]
            assert read(name, "a", "b", "c", "--x") == [flag, "a", *further]
    for here in some(list(dict.fromkeys(row.here for row in TAKEN.values() if row.here != MODEL))):
        flag, *fixed = here.split()
        assert takes(*([flag, *fixed] if fixed or takes_no_value(flag) else with_value(flag))) is not takes_by_default(
            flag
        )


def test_other_names_on_every_command() -> None:
    for row in FLAGS:
        assert not row.is_shown or row.name in ARGUMENTS[row.here].names, row


def test_what_is_not_here_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for row in REFUSED:
        told = advice(row.name.replace("*", "x9"))
        assert told is not None and (row.why or row.here) in told, row
        assert row.is_family or read(row.name) == [row.name], row
    for row in REFUSED[:: len(REFUSED) // 8]:
        assert main(["serve", "demo", row.name.replace("*", "x9")]) == 2
        told = " ".join(capsys.readouterr().err.split())
        assert "Unknown option" in told and (row.why or row.here) in told, row


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--tools", "read_file,exec_shell_command"),
            "llama.cpp's --tools has another meaning: bridle's --tools is a file",
        ),
        (("--max-total-tokens", "999999"), "SGLang's --max-total-tokens has another meaning: bridle gives this name"),
    ],
    ids=lambda value: value[0].strip("-") if isinstance(value, tuple) else "",
)
def test_an_error_says_what_another_server_means_by_the_flag(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {name for _, name in OTHER_MEANING} >= {words[0]}
    assert main(["serve", "demo", "--control", "off", "--port", "0", *words]) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert not list(meant_elsewhere(["serve", *words], "something else"))


def test_rows_are_about_something() -> None:
    for row in (*FLAGS, *SERVE_MODEL):
        assert row.here or row.why, row
        assert not row.is_family or not row.here, row
        here = row.here.split()[0] if row.here else MODEL
        assert here == MODEL or here in ARGUMENTS or row in SERVE_MODEL, row
        if not row.here:
            also = {(system, row.name) for system in row.systems}
            assert row.name not in ARGUMENTS or also <= OTHER_MEANING, row
        for page in re.findall(r"docs/[a-z-]+\.md", row.why):
            assert (ROOT / page).is_file(), row
    per_system = [(system, row.name) for row in (*FLAGS, *SERVE_MODEL) for system in row.systems]
    assert len(per_system) == len(set(per_system))


def test_reasons_name_what_is_here() -> None:
    of_others = {"--config", "--install-completion", "--json-size", "--admin"}
    for row in FLAGS:
        assert set(re.findall(r"--[a-z][a-z-]+", row.why)) <= ARGUMENTS.keys() | of_others, row


@pytest.mark.parametrize("file", NAMES, ids=lambda file: str(file.stem))
def test_no_flag_is_missing(file: Path) -> None:
    listed = tomllib.loads(file.read_text(encoding="utf-8"))
    flags = names(listed, "flags")
    assert len(flags) >= 8 or "flags" not in listed or listed["words"]  # of a library, of a file of settings
    assert len(flags) == len(set(flags)) and not [name for name in flags if row_of(listed["system"], name) is None]


def test_flags_are_known_however_they_are_written() -> None:
    assert advice("--tensor_parallel_size=2") == advice("--tensor-parallel-size") == "here it is --shards"
    assert advice("--cont-batching") == "the feature is always on and needs no flag"
    assert advice("--frobnicate") is None
    assert advice("-t") == "llama.cpp: here it is --num-threads; AICI: use --tokenizer"
    assert in_our_words(["serve", "--kv_cache_memory_bytes", "1GiB"]) == ["serve", "--kv-memory", "1GiB"]


def test_a_slip_of_our_own_flag_is_not_taken_for_a_family() -> None:
    assert rows_of("--log-formt") and advice("--log-formt", ["--log-format"]) is None
    assert advice("--log-formt") is not None


#: A model's flag has its value: the flag alone is nobody's word.
WORDS = st.sampled_from(
    [*zip(["demo", "-A", "--aici-rtarg", "--port", "3", "--", "-x", "--tp=2", "-tp", "a=b"]), ("--model", "demo")]
)


@given(st.lists(WORDS, max_size=8).map(lambda groups: [word for group in groups for word in group]))
def test_our_own_words_stay_as_they_are(words: list[str]) -> None:
    """Translated words do not change again, nor do words after `--` or words for the runtime."""
    ours = in_our_words(["serve", *words])
    assert in_our_words(ours) == ours
    plain = [word for word in words if word not in ("-tp", "--model") and not word.startswith("--tp")]
    assert in_our_words(plain) == plain
    if "--" in words[:1]:
        assert ours == ["serve", *words]


def test_arguments_of_the_runtime_are_not_ours_to_read() -> None:
    words = ["serve", "-A", "-tp", "--aici-rtarg", "--model", "-tp", "2"]
    assert in_our_words(words) == ["serve", "-A", "-tp", "--aici-rtarg", "--model", "--shards", "2"]


def test_help_knows_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "gpu-memory-utilization"]) == 0
    assert "set --kv-memory in bytes" in " ".join(capsys.readouterr().out.split())
