"""Drafted tokens on the command line, under the names of vLLM and llama.cpp, too."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import control, loading, main
from bridle.cli.app import app
from bridle.cli.serve import EngineOptions, ModelOptions, serve
from bridle.cli.speculation_options import SpeculationOptions
from bridle.config import EngineConfig, ModelConfig
from bridle.errors import InvalidRequest
from bridle.http.settings import ServeSettings
from bridle.sampling import AUTO_DRAFTS


def parsed(*words: str) -> tuple[str | None, int | None]:
    command, bound, _ = app.parse_args(["serve", "demo", *words], exit_on_error=False, print_error=False)
    assert command is serve
    model, engine = bound.arguments.get("model", ModelOptions()), bound.arguments.get("engine", EngineOptions())
    return model.draft_model, engine.to_config().speculate


def configured(text: str | None, draft_model: str | None = None, speculate: int | None = None) -> ServeSettings:
    settings = ServeSettings(
        model=ModelConfig("demo", draft_model=draft_model), engine=EngineConfig(speculate=speculate)
    )
    return SpeculationOptions(speculative_config=text).add_to(settings)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (None, None)),
        (("--draft-model", "small", "--speculate", "auto"), ("small", AUTO_DRAFTS)),
        (("--model-draft", "small", "--draft-max", "8"), ("small", 8)),
        (("--speculative-model", "small", "--num-speculative-tokens", "5"), ("small", 5)),
        (("--speculate", "off"), (None, 0)),
    ],
)
def test_flags_have_the_names_of_others_too(words: tuple[str, ...], expected: object) -> None:
    assert parsed(*words) == expected


@pytest.mark.parametrize(
    ("text", "draft_model", "speculate"),
    [
        (None, None, None),
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}', None, 4),
        ('{"method": "draft_model", "model": "small", "num_speculative_tokens": 5}', "small", 5),
        ('{"model": "small"}', "small", None),
    ],
)
def test_vllms_config_is_read(text: str | None, draft_model: str | None, speculate: int | None) -> None:
    settings = configured(text)
    assert (settings.model.draft_model, settings.engine.speculate) == (draft_model, speculate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ('{"method": "eagle", "model": "a"}', "method is 'eagle'"),
        ('{"method": "draft_model"}', "without a model"),
        ('{"num_speculative_tokens": 3}', "neither a method nor a model"),
        ('{"model": 3}', "must be the name of a model"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "must be an integer"),
        ('{"method": "ngram", "acceptance_method": "x"}', "'acceptance_method'"),
    ],
)
def test_what_means_nothing_here_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        configured(text)


def test_the_config_stands_alone() -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined with"):
        configured('{"method": "ngram"}', speculate=4)


@pytest.mark.parametrize("words", [("run", "-"), ("infer", "Once")])
def test_a_server_is_told_how_much_to_draft(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[dict[str, Any]] = []

    def keep(_api: Any, body: dict[str, Any], *_: Any) -> int:
        bodies.append(body)
        return 0

    monkeypatch.setattr(control, "_run", keep)
    monkeypatch.setattr("sys.stdin", io.StringIO("text"))
    assert main([*words, "-c", "mine", "--speculate", "auto"]) == main(["infer", "Once"]) == 0
    assert [body.get("speculate") for body in bodies] == [AUTO_DRAFTS, None]


@pytest.mark.parametrize(("words", "expected"), [((), None), (("--speculate", "auto"), AUTO_DRAFTS)])
def test_a_batch_is_drafted_for_as_told(
    words: tuple[str, ...], expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: list[EngineConfig] = []

    def load(_config: ModelConfig, engine: EngineConfig, *_: Any) -> Any:
        configs.append(engine)
        raise InvalidRequest("no model in this test", "MODEL")

    monkeypatch.setattr(loading, "loaded_model", load)
    file = tmp_path / "asked.jsonl"
    file.write_text(json.dumps({"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "Say"}}))
    assert main(["run-batch", str(file), *words]) == 2
    assert [engine.speculate for engine in configs] == [expected]
