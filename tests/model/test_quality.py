"""Tests of the quality loss of quantization, measured on a text, and of the limit for `quantization="auto"`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from bridle.cli import main
from bridle.config import ModelConfig
from bridle.errors import InvalidRequest
from bridle.model import load_executor, quality
from bridle.model.check import check_quality
from bridle.model.hub_lookup import resolve_model
from bridle.model.quality import SAMPLE, Quality, answered_by, read_tokens
from bridle.model.quantize import make_quantized
from tests.model.driver import argmax_sampler

DEMO = resolve_model("demo")


def test_forms_are_measured_on_a_text() -> None:
    eight, four = check_quality(DEMO, ["q8_0", "q4_0"], SAMPLE)
    assert (eight.form, four.form) == ("q8_0", "q4_0") and eight.positions == four.positions > 100
    assert 1.0 >= eight.agreement > four.agreement > 0.5
    assert abs(eight.perplexity / eight.perplexity_before - 1) < 0.05 < four.perplexity / four.perplexity_before
    assert "same likeliest token at" in str(eight)


def test_layers_are_their_own_again_after_a_trial() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
    rows = torch.randn(2, 64)
    before = model(rows)
    with answered_by(model, lambda linear: make_quantized(linear, "q4_0")):
        assert not torch.equal(model(rows), before)
    assert torch.equal(model(rows), before)


@pytest.mark.parametrize(
    ("agreements", "taken"),
    [
        ({"q4_0": 0.96, "int8": 0.99}, "q4_0"),
        ({"q4_0": 0.9, "int8": 0.95}, "int8"),
        ({"q4_0": 0.9, "int8": 0.94}, "none"),
    ],
)
def test_auto_takes_the_fastest_form_that_keeps_the_bound(
    agreements: dict[str, float], taken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def measure(model: object, geometry: object, device: object, forms: list[str], tokens: object):
        return (Quality(form, 10, agreements[form], 2.0, 2.0) for form in forms)

    monkeypatch.setattr(quality, "measure_forms", measure)
    monkeypatch.setattr(quality, "is_worthwhile", lambda form: True)
    with caplog.at_level(logging.INFO):
        executor = load_executor(ModelConfig(quantization="auto", num_blocks=8), sampler=argmax_sampler)
    names = {type(module).__name__ for module in executor.runner.model.modules()}
    assert ("QuantizedLinear" in names, "Int8Linear" in names) == (taken == "q4_0", taken == "int8")
    assert (f"takes {taken}" in caplog.text) if taken != "none" else ("leaves the weights unchanged" in caplog.text)


def test_a_text_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="at least 2 are needed"):
        read_tokens(DEMO, "")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        read_tokens(tmp_path, SAMPLE)


def test_check_reports_quality(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("Once upon a time there was a little girl who lived near the forest.", encoding="utf-8")
    assert main(["check", "demo", "--quantization", "int8", "--text", str(text)]) == 0
    said = capsys.readouterr().out
    assert "equal" in said and "int8: same likeliest token at" in said and "perplexity" in said
