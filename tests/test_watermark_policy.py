"""Tests of an operator's watermark: requests cannot avoid it, and `bridle detect` finds it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from bridle import LLM, Controller, Decision, SamplingParams, SequenceView
from bridle.cli import main
from bridle.engine.engine import Engine
from bridle.errors import UnsupportedFeature
from bridle.sampling_values import Watermark
from bridle.structured_output import Regex
from bridle.testing.scripted import ScriptedExecutor
from bridle.watermark import detect, read_key
from tests.engine.support import make_request


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    return path


@pytest.fixture(scope="module")
def marked(key_file: Path) -> Any:
    policy = {"name": "mark", "kind": "watermark", "key_file": str(key_file), "delta": 12.0}
    with LLM("demo", policies={"policy": [policy]}, max_model_len=512, num_blocks=256) as llm:
        yield llm


class Plainly(Controller):
    """A controller that samples each token with its own sampling parameters."""

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(sampling=SamplingParams(temperature=0.9))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "fields",
    [
        {"watermark": False},
        {"watermark": {"gamma": 0.5, "delta": 0.0}},
        {"controller": Plainly()},
        {"constraint": Regex("[a-z ,.]{300}")},
    ],
    ids=["off", "weaker", "controller", "constraint"],
)
def test_nothing_in_a_request_leaves_it_out(marked: LLM, key_file: Path, fields: dict[str, Any]) -> None:
    asked = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 150, **fields}
    output = marked.generate("Once upon a time", use_tqdm=False, **asked)[0].outputs[0]
    found = detect(output.token_ids, read_key(key_file), 0.25)
    assert found.z > 5.0 and found.p_value < 1e-5


class Remote(ScriptedExecutor):
    """A fake of an executor in another process."""

    is_up = True
    on_change = None


def test_shards_do_not_get_the_key() -> None:
    request = make_request(watermark=Watermark(key="ab" * 32))
    for executor in (Remote(), ScriptedExecutor()):
        engine = Engine(executor)
        with (
            pytest.raises(UnsupportedFeature, match="key is not sent to shards")
            if executor.__class__ is Remote
            else (nullcontext())
        ):
            engine.check(request)
        engine.close()


def test_draft_tokens_change_nothing(marked: LLM) -> None:
    asked = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "max_tokens": 60, "use_tqdm": False}
    texts = {marked.generate("a b a b a b", speculate=count, **asked)[0].text for count in (0, 4)}
    assert len(texts) == 1


def test_the_command_finds_the_mark_of_its_key_alone(
    marked: LLM, key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, other = tmp_path / "text", tmp_path / "other"
    output = marked.generate("Once upon a time", max_tokens=200, seed=1, ignore_eos=True, use_tqdm=False)[0]
    text.write_text(output.text, encoding="utf-8")
    other.write_text("another key of the same length")
    for key, code in ((key_file, 0), (other, 1)):
        assert main(["detect", str(text), "--model", "demo", "--key-file", str(key)]) == code
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["z-score", "p-value", "tokens"]
        assert (float(lines[0].split()[1]) > 4.0) is (code == 0)
    assert main(["detect", str(text), "--model", "demo", "--key-file", str(tmp_path / "none")]) not in (0, 1)
