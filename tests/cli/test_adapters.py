"""Adapters from the command line: flags, environment, settings files, and the adapters of a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.config import EngineConfig
from bridle.http.settings import ServeSettings
from bridle.serving import AdapterSet, AdapterSpec, ModelRegistry
from bridle.serving.lora.lora_config import AdapterCatalog
from tests.http.harness import serving
from tests.serving.fake_adapters import with_adapters, write_adapter, write_demo_adapter
from tests.serving.fakes import fake_model


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings with which `serve` was called."""
    calls: list[ServeSettings] = []

    def serve(settings: ServeSettings, *_: object, **__: object) -> None:
        calls.append(settings)

    monkeypatch.setattr("bridle.http.server.run.serve", serve)
    return calls


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapters" / "french")


@pytest.mark.parametrize("command", ["serve", "serve-model"])
def test_flags_name_the_adapters_to_serve(command: str, served: list[ServeSettings], folder: Path) -> None:
    words = ["--adapter", f"fr={folder}", "--adapter", "de=org/german@v1", "--adapters-dir", str(folder.parent)]
    assert main([command, "demo", *words, "--allow-adapter", "org/other"]) == 0
    fr, de = AdapterSpec("fr", str(folder)), AdapterSpec("de", "org/german", "v1")
    assert served[0].adapters == AdapterSet((fr, de), folder.parent, ("org/other",))


def test_flags_limit_the_adapters_in_memory(served: list[ServeSettings]) -> None:
    words = ["--max-step-adapters", "8", "--adapter-memory", "64MiB", "--adapter-host-memory", "1GiB"]
    assert main(["serve", *words, "--max-num-seqs", "4"]) == 0
    engine = served[0].engine
    assert (engine.max_step_adapters, engine.adapter_memory, engine.adapter_host_memory) == (8, 64 << 20, 1 << 30)
    assert engine.max_num_seqs == 4
    assert main(["serve"]) == 0
    assert served[1].engine == EngineConfig(kv_store="off")  # as the suite sets it


def test_the_environment_of_text_generation_inference(
    served: list[ServeSettings], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_ADAPTERS", f" org/one , org/two@v2 ,fr={folder}, ")
    assert main(["serve"]) == 0
    named = (AdapterSpec("org/one", "org/one"), AdapterSpec("org/two", "org/two", "v2"), AdapterSpec("fr", str(folder)))
    assert served[0].adapters.named == named
    assert main(["serve", "--adapter", "a=org/one"]) == 0  # the command line wins
    assert served[1].adapters.named == (AdapterSpec("a", "org/one"),)


def test_our_own_environment_and_the_settings_file(
    served: list[ServeSettings], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "bridle.yaml"
    file.write_text(f"serve:\n  adapter:\n    - fr={folder}\n    - org/one\n  adapters-dir: {folder.parent}\n")
    assert main(["--config", str(file), "serve"]) == 0
    specs = (AdapterSpec("fr", str(folder)), AdapterSpec("org/one", "org/one"))
    assert served[0].adapters == AdapterSet(specs, folder.parent)
    monkeypatch.setenv("BRIDLE_ADAPTER", "org/one,org/two")
    assert main(["serve"]) == 0
    assert [spec.name for spec in served[1].adapters.named] == ["org/one", "org/two"]


@pytest.mark.parametrize("value", ["fr=/nowhere", "a=b=c", "a@b@c", "fr="])
def test_a_bad_one_is_refused_before_anything_is_loaded(
    value: str, served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_ADAPTERS", value)
    assert main(["serve"]) == 2
    assert "adapter is" in capsys.readouterr().err and not served


ASK = "The capital of France is"
GREEDY = ("--temperature", "0", "--max-tokens", "8")


@pytest.mark.slow
def test_adapters_in_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pirate = str(write_demo_adapter(tmp_path / "pirate"))
    assert main(["generate", ASK, *GREEDY, "--adapter", pirate, "--no-stats"]) == 0
    generated = capsys.readouterr().out
    assert generated.strip() and "Paris" not in generated
    typed = iter(["/adapter", "/adapter nobody", "Hello!", "/adapter pirate", "Hello!", "/quit"])
    monkeypatch.setattr("rich.console.Console.input", lambda *_: next(typed))
    assert main(["chat", *GREEDY, "--adapter", pirate, "--no-stats"]) == 0
    shown = capsys.readouterr().out
    assert "adapter: none" in shown and "no adapter 'nobody'; known: 'pirate'" in shown and "adapter: pirate" in shown
    assert main(["generate", ASK, "--adapter", str(tmp_path / "nowhere")]) == 2
    assert main(["generate", ASK, "--adapter", f"other:x={pirate}"]) == 2
    assert "is for model 'other', but the loaded model is 'demo'" in capsys.readouterr().err


def test_a_batch_chooses_line_by_line(tmp_path: Path) -> None:
    pirate = write_demo_adapter(tmp_path / "adapters" / "pirate")
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bodies: list[dict[str, Any]] = [{}, {"model": "late"}, {"model": "demo", "adapter": "pirate"}, {"model": "nobody"}]
    lines = [
        {"custom_id": str(number), "url": "/v1/completions", "body": {"prompt": ASK, "temperature": 0} | body}
        for number, body in enumerate(bodies)
    ]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    words = ["--adapter", f"late={pirate}", "--adapters-dir", str(pirate.parent), "-o", str(target)]
    assert main(["run-batch", str(source), *words]) == 1
    answers = {each["custom_id"]: each["response"] for each in map(json.loads, target.read_text().splitlines())}
    texts = [answers[number]["body"]["choices"][0]["text"] for number in "012"]
    assert texts[0] == " Paris." != texts[1] == texts[2]
    assert answers["3"]["status_code"] == 404


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A running server that may load the adapters in the folder."""
    model = fake_model(name="demo")
    with_adapters(model)
    catalog = AdapterCatalog(AdapterSet(folder=folder.parent))
    with serving(ModelRegistry([model], adapters=catalog)) as url:
        monkeypatch.setenv("AICI_API_BASE", url)
        yield url


def _printed(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the words of the lines that were printed since the last call, without lines of the server's log."""
    return [line.split() for line in capsys.readouterr().out.splitlines() if "route=" not in line]


def test_adapters_of_a_running_server(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", "list"]) == 0
    assert _printed(capsys) == [["french", "demo", "loadable"]]
    assert main(["adapters", "load", "mine", "french"]) == 0
    assert [line[:5] for line in _printed(capsys)] == [["mine", "demo", "host", "rank", "2"]]
    assert main(["adapters", "load", "french"]) == 0
    assert main(["adapters", "list", "--model", "demo"]) == 0
    assert [(line[0], line[-1]) for line in _printed(capsys)[-2:]] == [("mine", "q_proj"), ("french", "q_proj")]
    assert main(["infer", "a", "--adapter", "mine"]) == 0
    assert main(["infer", "a", "--adapter", "nobody"]) == 1
    assert "no adapter 'nobody'" in capsys.readouterr().err
    assert main(["adapters", "unload", "mine"]) == 0
    assert main(["adapters", "unload", "mine"]) == 1
    assert "no adapter 'mine'" in capsys.readouterr().err
    assert main(["adapters", "load", "x", "/etc"]) == 1
    assert "the server may not load adapters from" in capsys.readouterr().err
