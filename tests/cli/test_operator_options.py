"""An operator's policies and tools on the commands that load a model themselves, and on `serve-model`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import chat, generate, main, serve_model
from bridle.http.settings import ServeSettings
from bridle.serving.models.loading import LoadedModel
from tests.fakes.tiny_checkpoints import make_checkpoint, save_tokenizer

QUICK = ["--kv-memory", "8MiB", "--max-tokens", "20", "--temperature", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = make_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    save_tokenizer(made)  # with a chat template
    return str(made)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    policies, tools = tmp_path / "policies.toml", tmp_path / "tools.toml"
    policies.write_text('[[policy]]\nname = "short"\nkind = "length"\nmax_tokens = 3\n', encoding="utf-8")
    tools.write_text('[tools.floor]\npython = "math:floor"\n', encoding="utf-8")
    return ["--policies", str(policies), "--tools", str(tools)]


def test_a_prompt_is_held_to_policies_and_has_tools(
    folder: str, files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[LoadedModel] = []
    build = generate.build_request

    def noted(loaded: LoadedModel, *rest: Any) -> Any:
        models.append(loaded)
        return build(loaded, *rest)

    monkeypatch.setattr(generate, "build_request", noted)
    lengths = []
    for flags in ([], files):
        assert main(["generate", folder, "Say", "--json", *QUICK, *flags]) == 0
        lengths.append(json.loads(capsys.readouterr().out)["usage"]["completion_tokens"])
    assert lengths[0] > lengths[1] == 3
    assert [list(model.tools.counts()) for model in models if model.tools is not None] == [[], ["floor"]]


def test_a_chat_is_held_to_policies(
    folder: str, files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat.TerminalChat, "run", lambda self: self.say("Hi"))
    assert main(["chat", folder, *QUICK, *files]) == 0
    assert " 3 out" in capsys.readouterr().out


def test_lmqls_server_has_both(files: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeSettings] = []
    monkeypatch.setattr(serve_model, "serve_sockets", lambda settings, *rest: seen.append(settings))
    assert main(["serve-model", "demo", "--silent", *files]) == 0
    (settings,) = seen
    assert settings.http.policies is not None and settings.tools is not None
    assert [policy.name for policy in settings.http.policies.current.policies] == ["short"]
    assert list(settings.tools.counts()) == ["floor"]
    settings.tools.close()


def test_what_is_wrong_with_a_file_is_said_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["generate", "no-such-model", "hi"], ["chat", "no-such-model"], ["serve-model", "no-such-model"]):
        for flag in ("--policies", "--tools"):
            assert main([*command, flag, "absent.toml"]) == 2
            assert "absent.toml cannot be read: No such file" in capsys.readouterr().err
