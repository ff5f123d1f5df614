"""Tests of help, mistakes on the command line, and the precedence of settings."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import bridle
from bridle.cli import main
from bridle.cli.limit_options import LimitOptions
from bridle.config import EngineConfig, ModelConfig
from bridle.errors import EngineClosed, InternalError, UnsupportedModel
from bridle.http.settings import HttpSettings, ServeSettings
from bridle.serving import ControlSettings, ModelSet
from bridle.serving.models.engine_supervisor import RestartPolicy

COMMANDS = (
    *("serve", "generate", "chat", "check", "bench", "doctor"),
    *("run", "infer", "upload", "tag", "tags", "replay"),
)

#: Settings of engines, in a suite that switches the KV store of servers off.
ENGINE = EngineConfig(kv_store="off")


@dataclass
class Served:
    """The settings with which `serve` was called, and an error for it to raise."""

    calls: list[ServeSettings] = field(default_factory=list)
    error: BaseException | None = None

    def serve(self, settings: ServeSettings, fronts: object = ()) -> None:
        self.calls.append(settings)
        if self.error is not None:
            raise self.error


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    fake = Served()
    monkeypatch.setattr("bridle.http.server.run.serve", fake.serve)
    return fake


@pytest.mark.few(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_usage_variables_and_no_empty_defaults(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: bridle {command}" in shown
    assert "BRIDLE_" in shown
    assert "[default: ()]" not in shown and "[default: False]" not in shown


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_version_prints_name_and_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"bridle {bridle.__version__}"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from bridle.cli import main; main(['serve', '--help']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], 'Unknown command "serv". Did you mean "serve"?'),
        (["serve", "--port", "x"], 'unable to convert "x" into int'),
        (["serve", "--port", "99999"], "port is 99999; must be between 0 and 65535"),
        (["serve", "--bogus"], "Unknown option: --bogus"),
        (["serve", "--max-num-seqs", "lots"], "'lots' is not a number such as 4096 or 32k"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs is 0; must be at least 1"),
        (["serve", "--dtype", "int3"], "int3"),
        (["generate"], "generate takes [MODEL] PROMPT, but got 0 words"),
        (["generate", "a", "b", "c"], "got 3 words; put the prompt in quotes"),
        (["generate", "demo"], "got the model 'demo' alone; add a text"),
        (["generate", "hello", "--temperature", "-1"], "temperature is -1.0; must be at least 0"),
        (["keys", "remove"], "(see: bridle keys remove --help)"),
        (["serve", "demo", "--config", "file"], "--config stands before the command: bridle --config FILE COMMAND"),
        (
            ["serve", "--mem-fraction-static=2"],
            "set --kv-memory in bytes; by default, the server measures the free memory (see: bridle",
        ),
        (["serve", "--tensor-parallel-size=x"], 'Invalid value for --shards: unable to convert "x"'),
        (["serve", "-m"], "the model needs no flag: `bridle serve MODEL`"),
        (["check"], "MODEL"),
        (["serve", "--control", "maybe"], "maybe"),
        (["serve", "--aici-dialect", "3"], "3"),
        (["serve", "--trusted-proxy", "everywhere"], "trusted_proxies: 'everywhere' does not appear to be"),
        (["serve", "--keys", "k.db", "--no-auth"], "keys and no_auth cannot be combined"),
        (["serve", "--static", "auto"], "static cannot be combined with the model auto"),
        (["serve", "--static", "--allow-hub", "org/name"], "static serves only the models of the command line"),
        (["serve", "auto"], "no model may be loaded: give models_dir, allow_hub, allow_pull or a model_alias"),
        (["serve", "--model-alias", "name"], "model_alias is 'name'; must be NAME=MODEL"),
        (["serve", "--max-model-memory", "0"], "max_model_memory is 0; must be at least 1"),
        (["tag", "abc"], "TAG"),
        (["bench", "everything"], "everything"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("bridle: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not served.calls


def test_serve_without_flags_has_the_default_settings(served: Served) -> None:
    assert main(["serve"]) == 0
    assert served.calls == [ServeSettings(models=ModelSet(allow_pull=True), engine=ENGINE)]
    assert main(["serve", "--static"]) == main(["serve", "demo"]) == main(["serve", "--no-allow-pull"]) == 0
    closed = ServeSettings(models=ModelSet(), engine=ENGINE)
    assert served.calls[1:] == [ServeSettings(models=ModelSet(is_static=True), engine=ENGINE), closed, closed]


def test_flags_become_settings(served: Served) -> None:
    words = (
        "serve org/name --port 0 --max-num-seqs 1k --kv-memory 1GiB --no-prefix-caching --revision v2"
        " --served-name mine --alias a --alias b --max-requests 2k --cors-origin * --log-format json"
    )
    assert main(words.split()) == 0
    assert served.calls == [
        ServeSettings(
            model=ModelConfig(model="org/name", revision="v2", kv_memory=1 << 30),
            models=ModelSet(("org/name",)),
            engine=replace(ENGINE, max_num_seqs=1000, enable_prefix_caching=False),
            http=HttpSettings(max_requests=2000, cors_origins=("*",)),
            port=0,
            name="mine",
            aliases=("a", "b"),
            log_format="json",
        )
    ]


def test_flags_of_models_on_demand_become_settings(served: Served) -> None:
    words = (
        "serve one two --model-alias gpt-4=one --model-alias big=org/big --models-dir folder --allow-hub org/name"
        " --max-model-memory 2GiB --load-timeout 5"
    )
    assert main(words.split()) == 0
    aliases = (("gpt-4", "one"), ("big", "org/big"))
    models = ModelSet(("one", "two"), aliases, Path("folder"), ("org/name",), max_memory=2 << 30)
    http = HttpSettings(load_timeout=5)
    assert served.calls == [ServeSettings(model=ModelConfig("one"), models=models, engine=ENGINE, http=http)]


def test_flags_of_access_and_control_become_settings(served: Served) -> None:
    words = (
        "serve --keys keys.db --trusted-proxy 10.0.0.0/8 --trusted-proxy ::1 --control on --aici-rt ./rt"
        " --aici-rtarg=--one -A two -A --three=3 --aici-dialect 1 --aici-trace trace.jsonl --control-store folder"
    )
    assert main(words.split()) == 0
    (settings,) = served.calls
    assert (settings.keys, settings.no_auth) == (Path("keys.db"), False)
    assert settings.http.trusted_proxies == ("10.0.0.0/8", "::1")
    args = ("--one", "two", "--three=3")
    assert settings.control == ControlSettings("on", "./rt", args, 1, Path("trace.jsonl"), Path("folder"))


def test_flags_of_limits_become_settings(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Limits are set by the command line, the environment and a settings file."""
    monkeypatch.setenv("BRIDLE_MAX_CONNECTIONS", "2k")
    (tmp_path / "settings.yaml").write_text("serve:\n  send-timeout: 2.5\n  max-header-bytes: 8KiB\n")
    words = f"--config {tmp_path / 'settings.yaml'} serve --payload-limit 1MiB --max-prompt-tokens 32k --max-prompts 2"
    assert main(words.split()) == 0
    (settings,) = served.calls
    http = HttpSettings(max_body_bytes=1 << 20, max_prompt_tokens=32_000, max_prompts=2, send_timeout=2.5)
    assert (settings.http, settings.max_connections, settings.max_header_bytes) == (http, 2000, 8 << 10)


def test_flags_of_restarts_become_settings(served: Served) -> None:
    assert main(["serve", "--watchdog-timeout", "9", "--max-engine-restarts", "2"]) == 0
    (settings,) = served.calls
    assert settings.restarts == RestartPolicy(9, 2)
    assert main(["serve", "--watchdog-timeout", "-1"]) == 2


def test_the_defaults_of_limits_are_those_of_the_settings(served: Served) -> None:
    assert main(["serve"]) == 0
    (settings,) = served.calls
    assert LimitOptions().add_to(settings) == settings == ServeSettings(models=ModelSet(allow_pull=True), engine=ENGINE)


def test_environment_fills_in(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRIDLE_PORT", "9000")
    monkeypatch.setenv("BRIDLE_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("BRIDLE_DTYPE", "bfloat16")
    assert main(["serve", "--port", "9001"]) == 0
    (settings,) = served.calls
    assert settings.model == ModelConfig(dtype="bfloat16")
    assert (settings.engine.max_num_seqs, settings.port) == (7, 9001)


def test_bad_environment_names_its_variable(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BRIDLE_PORT", "many")
    assert main(["serve"]) == 2
    assert "BRIDLE_PORT" in capsys.readouterr().err


def test_a_misspelled_variable_is_told(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BRIDLE_PORT", "9000")
    monkeypatch.setenv("BRIDLE_MAX_REQUSTS", "3")
    assert main(["serve"]) == 0 and served.calls[0].port == 9000
    assert capsys.readouterr().err == (
        "bridle: BRIDLE_MAX_REQUSTS is not a setting of bridle and has no effect; is it BRIDLE_MAX_REQUESTS?\n"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [(UnsupportedModel("no such model"), 2), (EngineClosed("gone"), 1), (KeyboardInterrupt(), 130)],
)
def test_an_error_ends_with_its_exit_code_and_one_line(
    error: BaseException, code: int, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.error = error
    assert main(["serve"]) == code
    shown = capsys.readouterr().err
    assert shown == ("" if code == 130 else f"bridle: {error}\n")


def test_a_file_that_cannot_be_used_is_one_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.error = PermissionError(13, "Permission denied", "/somewhere/trace.jsonl")
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "bridle: /somewhere/trace.jsonl: Permission denied\n"
    served.error = OSError(9, "Bad file descriptor")  # of no file that anybody named: a bug
    with pytest.raises(OSError, match="Bad file descriptor"):
        main(["serve"])


def test_a_missing_package_is_told_with_its_extra(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.error = ModuleNotFoundError("No module named 'grpc.aio'", name="grpc.aio")
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "bridle: grpc.aio is not installed: pip install 'bridle-llm[cluster]'\n"
    served.error = ModuleNotFoundError("No module named 'bridle.nothing'", name="bridle.nothing")
    with pytest.raises(ModuleNotFoundError):
        main(["serve"])


def test_our_own_bugs_keep_their_traceback(served: Served) -> None:
    served.error = InternalError("block 3 has two owners")
    with pytest.raises(InternalError):
        main(["serve"])


def test_a_settings_file_fills_in(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bridle.yaml"
    file.write_text("serve:\n  max-num-seqs: 7\n  max-requests: 99\n  port: 9123\ngenerate:\n  stats: false\n")
    monkeypatch.setenv("BRIDLE_MAX_REQUESTS", "98")
    assert main(["--config", str(file), "serve", "demo", "--port", "9124"]) == 0
    assert main([f"--config={file}", "serve", "demo"]) == 0
    monkeypatch.setenv("BRIDLE_CONFIG", str(file))
    assert main(["serve", "demo"]) == 0
    first, second, third = served.calls
    assert (first.engine.max_num_seqs, first.http.max_requests, first.port) == (7, 98, 9124)
    assert (second.engine.max_num_seqs, second.port) == (7, 9123) and third == second
    monkeypatch.delenv("BRIDLE_CONFIG")
    assert main(["serve", "demo"]) == 0 and served.calls[3].engine.max_num_seqs is None


def test_a_settings_file_may_name_arguments(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "bridle.yaml"
    file.write_text("serve:\n  model: [demo, org/name]\n  model-alias: small=demo\n")
    assert main(["--config", str(file), "serve"]) == 0
    assert main(["--config", str(file), "serve", "other"]) == 0
    assert [settings.models.models for settings in served.calls if settings.models] == [
        ("demo", "org/name"),
        ("other",),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no settings file"),
        ("serve:\n  max-requsts: 7\n", "Did you mean --max-requests?"),
        ("serve:\n  tensor-parallel-size: 7\n", "here it is --shards"),
        ("serve: [", "while parsing"),
        ("serve: demo", "must be a mapping"),
    ],
)
def test_a_bad_settings_file_is_named(
    text: str | None, message: str, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bridle.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["--config", str(file), "serve"]) == 2
    assert message in capsys.readouterr().err and not served.calls
    assert main(["--config"]) == 2


def test_completion_knows_commands_and_flags() -> None:
    from bridle.cli.app import app

    script = app.generate_completion(shell="bash")
    assert "run-batch" in script and "--max-num-seqs" in script
