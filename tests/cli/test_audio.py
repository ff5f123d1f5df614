"""`bridle generate --audio` and `bridle chat --audio`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.cli import main
from tests.fakes import audio_checkpoints
from tests.multimodal.clips import TEXT, wav


def test_the_command_line_takes_them(tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = audio_checkpoints.make_hearing(tmp_path / "voxtral")
    path, greedy = tmp_path / "it.wav", ["--temperature", "0", "--max-tokens", "4", "--no-stats"]
    path.write_bytes(wav())
    assert main(["generate", str(folder), TEXT, "--chat", "--audio", str(path), *greedy]) == 0
    assert main(["generate", str(folder), TEXT, "--audio", str(path), *greedy]) == 2
    assert "places for 0 sounds" in capsys.readouterr().err
    lines += [TEXT, f"/audio {path}", "/image x.png", "And this?", "/quit"]
    assert main(["chat", str(folder), "--audio", str(path), *greedy]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "1 sound for the next turn" in said and "reads only text and sounds" in said
