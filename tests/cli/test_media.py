"""`bridle generate` and `bridle chat` with `--image` and `--audio`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bridle.cli import main
from tests.fakes import audio_checkpoints, vision_checkpoints
from tests.multimodal.clips import TEXT, wav

GREEDY = ["--temperature", "0", "--max-tokens", "6", "--no-stats"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(vision_checkpoints.make_seeing("llava", tmp_path_factory.mktemp("eyes") / "llava"))


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pictures") / "it.png"
    Image.fromarray(np.random.RandomState(0).randint(0, 255, (24, 30, 3), dtype=np.uint8)).save(path)
    return str(path)


def test_generate_takes_an_image(folder: str, picture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", folder, "What is it?", "--chat", "--image", picture, *GREEDY, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["generate", folder, "What is it?", "--chat", *GREEDY, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert report["usage"]["prompt_tokens"] == text["usage"]["prompt_tokens"] + 16
    assert main(["generate", folder, "<image>What is it?", "--image", picture, *GREEDY]) == 0
    capsys.readouterr()
    assert main(["generate", folder, "What is it?", "--image", picture, *GREEDY]) == 2
    assert "placeholders for 0 images, each '<image>', but 1 were sent" in capsys.readouterr().err


def test_a_conversation_sees(folder: str, picture: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines += ["What is it?", "/image no-such.png", f"/image {picture}", "And this?", "/quit"]
    assert main(["chat", folder, "--image", picture, *GREEDY]) == 0
    said = capsys.readouterr().out
    assert "no-such.png cannot be read" in said.replace("\n", " ")
    assert "1 image for the next turn" in said


def test_models_of_text_say_that_they_see_nothing(picture: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "demo", "x", "--image", picture, *GREEDY]) == 2
    assert "reads only text" in capsys.readouterr().err
    assert main(["chat", "demo", "--image", picture, *GREEDY]) == 2
    assert "reads only text" in capsys.readouterr().err


def test_the_command_line_takes_them(tmp_path: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = audio_checkpoints.make_hearing(tmp_path / "voxtral")
    path, greedy = tmp_path / "it.wav", ["--temperature", "0", "--max-tokens", "4", "--no-stats"]
    path.write_bytes(wav())
    assert main(["generate", str(folder), TEXT, "--chat", "--audio", str(path), *greedy]) == 0
    assert main(["generate", str(folder), TEXT, "--audio", str(path), *greedy]) == 2
    assert "placeholders for 0 sounds" in capsys.readouterr().err
    lines += [TEXT, f"/audio {path}", "/image x.png", "And this?", "/quit"]
    assert main(["chat", str(folder), "--audio", str(path), *greedy]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "1 sound for the next turn" in said and "reads only text and sounds" in said
