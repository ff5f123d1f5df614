"""`bridle doctor` finds faults of an installation, and does not fail because of them."""

from __future__ import annotations

import shutil
import socket
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from bridle.cli import doctor, setup_probes
from bridle.model import resolve_model


def test_busy_port_is_noted() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        findings = {finding.subject: finding for finding in doctor.examine(port)}
    assert findings["port"].level == "note"
    assert str(port) in findings["port"].text
    assert "--port" in findings["port"].advice


def test_broken_probe_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def _memory() -> None:
        raise OSError("no /proc here")

    monkeypatch.setattr(doctor, "_memory", _memory)
    findings = {finding.subject: finding for finding in doctor.examine(0)}
    assert findings["memory"].level == "problem"
    assert findings["memory"].text == "OSError: no /proc here"
    assert findings["port"].level == "ok"


def test_problem_sets_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_: [doctor.Finding("problem", "disk", "full", "make room")])
    assert doctor.doctor() == 1
    shown = capsys.readouterr().out
    assert "problem disk: full" in shown
    assert "make room" in shown


def test_missing_packages_of_the_control_runtime_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridle.serving.controller_runtime.find_spec", lambda name: None)
    findings = {finding.subject: finding for finding in doctor.examine(0)}
    assert findings["controllers"].level == "note"
    assert "pip install 'bridle-llm[aici]'" in findings["controllers"].advice


# -- what is around the program ----------------------------------------------------------------------------------


def test_variables_that_are_no_flags_are_problems() -> None:
    (finding,) = setup_probes.variables({"BRIDLE_MAX_NUMSEQS": "3", "BRIDLE_PORT": "80", "BRIDLE_CONFIG": "x", "A": ""})
    assert (finding.level, finding.subject) == ("problem", "BRIDLE_MAX_NUMSEQS")
    assert "BRIDLE_MAX_NUM_SEQS" in finding.advice


@pytest.mark.parametrize(
    ("content", "text", "advice"),
    [
        ("serve:\n  prot: 3\n", "'prot' is unknown", "is it port?"),
        ("serv:\n  port: 3\n", "'serv' is unknown", "is it serve?"),
        ("serve: [\n", "cannot be read", "unset BRIDLE_CONFIG"),
        (None, "cannot be read", "unset BRIDLE_CONFIG"),
    ],
)
def test_a_broken_settings_file_is_a_problem(content: str | None, text: str, advice: str, tmp_path: Path) -> None:
    path = tmp_path / "bridle.yaml"
    if content is not None:
        path.write_text(content)
    (finding,) = setup_probes.settings_file({"BRIDLE_CONFIG": str(path)})
    assert finding.level == "problem" and text in finding.text and advice in finding.advice


def test_a_good_settings_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bridle.yaml"
    path.write_text("serve:\n  port: 3\n  max_num_seqs: 2\nkeys add:\n  admin: true\n")
    assert [finding.level for finding in setup_probes.settings_file({"BRIDLE_CONFIG": str(path)})] == ["ok"]
    assert not list(setup_probes.settings_file({}))


def test_packages_that_are_missing_or_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("jinja2", "wasmtime"):
            raise metadata.PackageNotFoundError(name)
        return "1.0" if name == "cyclopts" else real(name)

    real = metadata.version
    wanted = ["jinja2>=3.1", "cyclopts>=5", 'wasmtime>=50; extra == "aici"']
    monkeypatch.setattr(setup_probes.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(setup_probes.metadata, "version", version)
    found = {finding.subject: finding for finding in setup_probes.packages()}
    assert found["jinja2"].level == found["cyclopts"].level == "problem"
    assert (
        "version 1.0; >=5 is needed" in found["cyclopts"].text
        and "pip install 'cyclopts>=5'" in found["cyclopts"].advice
    )
    assert found["aici"].level == "note" and "wasmtime is not installed" in found["aici"].text
    assert found["aici"].advice == "pip install 'bridle-llm[aici]'"


def test_keys_that_others_can_read_are_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bridle.serving.controller_runtime.data_folder", lambda: tmp_path)
    keys = tmp_path / "keys.db"
    keys.touch(mode=0o600)
    assert not list(setup_probes.files())
    keys.chmod(0o644)
    (finding,) = setup_probes.files()
    assert finding.level == "problem" and finding.advice == f"chmod 600 {keys}"


def test_a_data_folder_that_takes_no_files_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("bridle.serving.controller_runtime.data_folder", lambda: tmp_path / "file" / "data")
    (finding,) = setup_probes.files()
    assert (finding.level, finding.subject) == ("problem", "data folder")


def test_proxies_and_traces_of_the_environment() -> None:
    proxy = {"HTTP_PROXY": "http://proxy:3128"}
    assert [finding.subject for finding in setup_probes.surroundings(proxy)] == ["proxy"]
    assert not list(setup_probes.surroundings(proxy | {"NO_PROXY": "localhost"}))
    (traces,) = setup_probes.surroundings({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"})
    assert traces.level == "ok" and "http://a:4318" in traces.text


def test_traces_without_their_packages_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (traces,) = setup_probes.surroundings({"OTEL_TRACES_EXPORTER": "otlp"})
    assert traces.level == "problem" and "bridle-llm[otel]" in traces.advice


def test_little_room_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 1024))
    found = {finding.subject: finding for finding in setup_probes.limits()}
    assert "ulimit -n" in found["descriptors"].advice and found["disk"].level == "note"
    assert "--shm-size" in found["shared memory"].advice if "shared memory" in found else True


def test_a_model_is_looked_at(tmp_path: Path) -> None:
    demo, chat = setup_probes.model("demo")
    assert demo.level == "ok" and "context" in demo.text
    assert "tool calls in the format hermes (<tool_call> " in chat.text
    assert "reasoning between <think> and </think>" in chat.text
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (broken,) = setup_probes.model(str(tmp_path))
    assert broken.level == "problem"
    (elsewhere,) = setup_probes.model("owner/nothing-like-it")
    assert elsewhere.level == "note" and "not on this disk" in elsewhere.text


def test_calls_that_are_not_understood_are_noted(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(resolve_model("demo"), folder)
    odd = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c }}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(odd)
    _, chat = setup_probes.model(str(folder))
    assert chat.level == "note" and "--tool-format" in chat.advice
    assert "tool calls in an unknown format, so requests with tools are refused; " in chat.text


@pytest.mark.parametrize(("features", "level"), [(None, "ok"), (frozenset(), "note")])
def test_kernels_are_told(features: frozenset[str] | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridle.cpu_kernels import library

    if features is not None:
        monkeypatch.setattr(library, "cpu_features", lambda: features)
    library.choice.cache_clear()
    (finding,) = doctor._kernels()
    library.choice.cache_clear()
    if features is None and not list(library.fitting(*_this_machine())):
        level = "note"
    assert finding.level == level and "quantized models compute with" in finding.text


def _this_machine() -> tuple[str, str, frozenset[str]]:
    import platform

    from bridle.cpu_kernels.features import cpu_features

    return platform.system(), platform.machine(), cpu_features()
