"""Tests of starting a control runtime, and of the message when it does not start. The tests use a tiny checkpoint and
real processes."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest

from bridle import LLM, SamplingParams, WasmController
from bridle.aici.runtime.options import chat_settings_of, make_parser
from bridle.config import ModelConfig
from bridle.errors import BridleError, InvalidRequest, UnsupportedFeature
from bridle.outputs import FinishReason
from bridle.serving import ControlSettings, load_model
from bridle.serving.controller_runtime import as_control, guess_num_logits
from bridle.serving.models import model_components
from bridle.tokenizer.chat_settings import ChatSettings
from tests.aici.guests import END, force, guest2, say
from tests.fakes.tiny_checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


def left_behind() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"bridle-{os.getpid()}-")]


def test_llm_runs_wasm_controllers(folder: Path, tmp_path: Path) -> None:
    wasm = tmp_path / "guest.wasm"
    patient = ("--wasm-max-step-time", "5000")
    with LLM(str(folder), control=ControlSettings("on", args=patient, store=tmp_path / "store")) as llm:
        tokens = llm.tokenizer.encode("forced", add_special_tokens=False)
        wasm.write_bytes(guest2([[say("hello\n"), *force(tokens)], END]))
        module = llm.upload(wasm, tags=["mine"])
        assert llm.upload(wasm.read_bytes()) == module
        sampling = SamplingParams(max_tokens=20, temperature=0)
        controllers = [WasmController(module), WasmController("mine"), None, WasmController("unknown")]
        outputs = llm.generate(["a", "b", "c", "d"], sampling, controller=controllers, use_tqdm=False)
        assert [output.text for output in outputs[:2]] == ["forced", "forced"]
        assert outputs[0].outputs[0].logs == "hello\n"
        assert outputs[0].outputs[0].finish_reason is FinishReason.CONTROLLER
        assert len(outputs[2].outputs[0].token_ids) == 20
        assert "unknown controller" in str(outputs[3].outputs[0].error)
        assert guess_num_logits(folder) == llm.info.vocab_size
    assert not left_behind()


def test_without_a_runtime_llm_says_what_to_do(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        with pytest.raises(UnsupportedFeature, match="control=True"):
            llm.generate("a", controller=WasmController("x"), use_tqdm=False)
        with pytest.raises(UnsupportedFeature, match="control=True"):
            llm.upload(b"")


BROKEN = [
    ({"runtime": "/no/such/runtime"}, "/no/such/runtime"),
    ({"runtime": sys.executable, "args": ("-c", "x")}, "ended while it started"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("options", "message"), BROKEN)
def test_a_runtime_that_does_not_start(
    folder: Path, options: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig(str(folder))
    with pytest.raises((BridleError, OSError), match=message):
        load_model(config, control=ControlSettings("on", **options))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        model = load_model(config, control=ControlSettings("auto", **options))  # type: ignore[arg-type]
    assert model.control is None
    model.close()
    assert "controllers are off: " in caplog.text and message in caplog.text
    assert not left_behind()


def test_missing_packages_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "bridle.serving.controller_runtime.find_spec", lambda name: None if name == "wasmtime" else object()
    )
    config = ModelConfig(str(folder))
    with pytest.raises(UnsupportedFeature, match=r"wasmtime not installed; pip install 'bridle-llm\[aici\]'"):
        load_model(config, control=ControlSettings("on"))
    with caplog.at_level(logging.WARNING):
        load_model(config, control=ControlSettings("auto")).close()
    assert "controllers are off: wasmtime not installed" in caplog.text
    assert ControlSettings("on", runtime="/some/runtime").obstacle() is None  # that one brings its own


def test_a_model_that_does_not_load_leaves_no_runtime(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(BridleError):
        load_model(ModelConfig(str(tmp_path)), control=ControlSettings("on", store=tmp_path / "store"))
    assert not left_behind()


@pytest.mark.parametrize(
    ("options", "param"),
    [({"mode": "maybe"}, "control"), ({"dialect": 3}, "aici_dialect"), ({"start_timeout": 0}, None)],
)
def test_wrong_settings_are_refused_by_name(options: dict[str, object], param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        ControlSettings(**options)  # type: ignore[arg-type]
    assert refused.value.param == (param or "start_timeout")


def test_what_callers_may_pass() -> None:
    settings = ControlSettings("auto")
    assert as_control(settings) is settings
    assert (as_control(True).mode, as_control(False).mode, as_control(None).mode) == ("on", "off", "off")
    with pytest.raises(InvalidRequest, match="control is 'yes'"):
        as_control("yes")  # type: ignore[arg-type]


def test_a_runtime_gets_its_own_arguments_alone(tmp_path: Path) -> None:
    own = ControlSettings(store=tmp_path, args=("--futex-like",)).runtime_config(tmp_path, 300)
    words = own.arguments("/x-")
    assert ["--store", str(tmp_path), "--futex-like"] == words[-3:] and "300" in words
    other = ControlSettings(runtime="/bin/rt", args=("-x",), dialect=1).runtime_config(tmp_path, 300)
    words = other.arguments("/x-")
    assert words[0] == "/bin/rt" and words[-1] == "-x" and "--store" not in words and "--logits-size" not in words


SETTINGS = [ChatSettings(), ChatSettings(tool_prompt="refuse"), ChatSettings(parse_special_text=True),
            ChatSettings(tool_prompt="refuse", parse_special_text=True)]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
def test_scripts_get_the_operators_settings_for_conversations(
    settings: ChatSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, ...]] = []
    monkeypatch.setattr(model_components, "begin_control", lambda control, *_: begun.append(control.args))
    config = ModelConfig(str(folder), tool_prompt=settings.tool_prompt, parse_special_text=settings.parse_special_text)
    for runtime in (None, "/bin/rt"):  # another runtime does not know these flags
        model_components.begin_control_of(config, folder, ControlSettings("on", runtime=runtime, args=("--stay",)))
    assert chat_settings_of(make_parser().parse_args(begun[0])) == settings and begun[0][-1] == "--stay"
    assert begun[1] == ("--stay",)


def test_an_upload_may_take_longer_than_any_compile() -> None:
    def seconds(*args: str) -> float:
        return ControlSettings(args=args).runtime_config(Path("t"), None).call_timeout

    assert seconds() == seconds("--limit", "max_compile_time=10") == 900
    assert seconds("--limit=max_compile_time=1000000", "--limit", "max_prepare_wait=10") == 2_000
