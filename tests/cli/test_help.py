"""`bridle help` finds what the help pages say, whole pages or single flags."""

from __future__ import annotations

import pytest

from bridle.cli import main
from bridle.cli.help_search import _entries, flag_names


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["help", *words])
    return code, " ".join(capsys.readouterr().out.split())


def test_flags_are_found_by_words_of_their_description(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "kv", "memory")
    assert code == 0
    assert "--kv-memory (Model; bridle serve, shard" in text and "BRIDLE_KV_MEMORY" in text
    assert text.count("Memory for the KV cache") == 1  # though several commands have it
    assert "--port" not in text


def test_commands_come_before_flags_and_names_before_texts(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = shown(capsys, "api", "key")
    assert text.startswith("bridle keys") and text.index("--key (Server") < text.index("--keys (Access")


@pytest.mark.parametrize("word", ["MAX_NUM_SEQS", "--max-num-seqs", "bridle_max_num_seqs", "Max num seqs"])
def test_a_flag_is_found_however_it_is_spelled(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, *word.lower().split())
    assert code == 0 and "--max-num-seqs" in text


def test_a_command_is_its_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "keys", "limit")
    assert code == 0 and text.startswith("Usage: bridle keys limit")
    assert shown(capsys)[1].startswith("Usage: bridle COMMAND")


def test_what_is_not_there_is_told_with_what_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shown(capsys, "temprature")
    assert code == 1 and "is it one of temperature" in text
    assert "see bridle --help" in shown(capsys, "xyzzyx")[1]


def test_the_page_of_serve_has_groups(capsys: pytest.CaptureFixture[str]) -> None:
    main(["serve", "--help"])
    page = capsys.readouterr().out
    for heading in ("Server", "Access", "Controllers", "Processes", "Models on demand", "Model", "Batching"):
        assert f"─ {heading} ─" in page
    assert "─ Parameters ─" not in page  # nothing is left over


def test_every_flag_says_what_it_is_for() -> None:
    silent = [entry.names for entry in _entries() if not entry.text]
    assert not silent
    assert {"port", "max-num-seqs", "allowed-host", "otlp-endpoint"} <= flag_names()["serve"]
