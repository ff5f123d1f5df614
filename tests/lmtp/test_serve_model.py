"""Tests of LMQL's option names, and of their meaning in bridle."""

from __future__ import annotations

from typing import Any

import pytest

from bridle.cli import serve_model
from bridle.cli.app import app
from bridle.cli.serve_model import LmtpOptions
from bridle.errors import InvalidRequest


def settings_of(*words: str) -> Any:
    """Return the settings that a command line results in."""
    _, bound, _ = app.parse_args(["serve-model", *words], exit_on_error=False, print_error=False)
    given = {"lmtp": LmtpOptions(), "models": serve_model.ModelSetOptions(), "access": serve_model.AccessOptions()}
    given |= {name: bound.arguments[name] for name in given if name in bound.arguments}
    return serve_model.serve_settings(bound.args[0], given["lmtp"], given["models"], given["access"])


def test_defaults_are_where_lmql_looks() -> None:
    settings = settings_of("demo")
    assert (settings.host, settings.port) == ("localhost", 8080)
    assert settings.model.device == "auto" and settings.log_format == "auto"
    assert settings_of("demo", "--log-format", "json").log_format == "json"


def test_chats_beside_lmtp_have_their_formats() -> None:
    words = ["--tool-format", "hermes", "--reasoning-format", "deepseek_r1", "--tool-prompt", "refuse"]
    model = settings_of("demo", *words).model
    assert (model.tool_format, model.reasoning_format, model.tool_prompt) == ("hermes", "deepseek_r1", "refuse")
    with pytest.raises(InvalidRequest, match="tool_format is 'nobody'"):
        settings_of("demo", "--tool-format", "nobody")


@pytest.mark.parametrize("flag", ["--batch_size", "--batch-size"])
def test_names_may_be_written_as_lmql_does(flag: str) -> None:
    assert settings_of("demo", flag, "4", "--host", "0.0.0.0", "--port", "9").engine.max_num_seqs == 4


@pytest.mark.parametrize(
    ("words", "dtype", "quantization"),
    [
        (["--dtype", "float16"], "float16", "none"),
        (["--dtype", "8bit"], "auto", "int8"),
        (["--bits", "8"], "auto", "int8"),
        (["--bits", "16"], "float16", "none"),
        ([], "auto", "none"),
    ],
)
def test_flags_choose_types_of_weights(words: list[str], dtype: str, quantization: str) -> None:
    model = settings_of("demo", *words).model
    assert (model.dtype, model.quantization) == (dtype, quantization)


def test_pages_of_an_origin_may_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the origin may call HTTP and LMTP, like with `bridle serve`."""
    origin, seen = "http://page.example", []
    assert settings_of("demo", "--cors-origin", origin).http.cors_origins == (origin,)
    monkeypatch.setattr(serve_model, "serve_sockets", lambda settings, limits, lmtp: seen.append(limits))
    app(["serve-model", "demo", "--cors-origin", origin, "--silent"], result_action="return_value")
    assert [limits.allowed_origins for limits in seen] == [(origin,)]


def test_a_type_that_there_is_not() -> None:
    with pytest.raises(InvalidRequest, match="dtype is '4bit'"):
        settings_of("demo", "--dtype", "4bit")


def test_static_in_either_word_and_not_with_auto() -> None:
    for flag in ("--static", "--single_thread"):
        assert settings_of("demo", flag).models.is_static
        with pytest.raises(InvalidRequest, match="static cannot be combined with"):
            settings_of("auto", flag)


def test_a_folder_answers_to_its_path_and_its_name(tmp_path: Any) -> None:
    settings = settings_of(str(tmp_path))
    assert settings.aliases == (str(tmp_path),)
    assert settings_of("demo").aliases == ()


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert settings_of("demo", "--cuda").model.device == "cpu"
    assert "No CUDA device" in capsys.readouterr().err


def test_what_clients_send_is_shown_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    serve_model.say_short("GENERATE {}\n\x1b[31m")
    serve_model.say_short("x" * 5_000)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "GENERATE {}\\n\\x1b[31m"
    assert second.endswith("... (5000 characters)") and len(second) < 2_100
