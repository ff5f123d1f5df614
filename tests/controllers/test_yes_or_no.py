"""Tests that whole words decide, however many tokens each has, in the standard controller `yesno` and in a Python
class."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bridle import LLM, Controller, Decision, SamplingParams, WasmController
from bridle.controllers import SequenceView
from bridle.serving import LoadedModel
from bridle.tokenizer import Tokenizer
from tests.fakes.tiny_checkpoints import save_tokenizer
from tests.http.controlled import controlled_model, lent

#: How a tokenizer splits the two words: what it merges, and whether it puts a space before (a token of its own here).
SPLITS: dict[str, tuple[list[str], bool, tuple[int, int]]] = {
    "1 and 1": (["e s", "Y es", "N o"], False, (1, 1)),
    "2 and 1": (["e s", "N o"], False, (2, 1)),
    "3 and 2": ([], False, (3, 2)),
    "the first in common": (["e s", "N o"], True, (3, 2)),
}


def _save(folder: Path, merges: Sequence[str], has_prefix: bool) -> None:
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    for merge in merges:
        data["model"]["merges"].append(merge.split())
        data["model"]["vocab"].setdefault(merge.replace(" ", ""), len(data["model"]["vocab"]))
    data["pre_tokenizer"]["add_prefix_space"] = has_prefix
    path.write_text(json.dumps(data))


@dataclass
class Wish:
    """A fake model that gives one word's tokens a high logit, and the token `other` an even higher one."""

    tokens: list[int]
    other: int

    def __call__(self, prefix: Sequence[int]) -> list[float]:
        row = [0.0] * 512  # more than there are tokens
        for token in self.tokens:
            row[token] = 500.0
        row[self.other] = 900.0
        return row


@pytest.fixture(scope="module", params=SPLITS)
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    merges, has_prefix, sizes = SPLITS[request.param]
    folder = tmp_path_factory.mktemp("tokenizer")
    _save(folder, merges, has_prefix)
    text = Tokenizer.load(folder)
    words = [text.encode(word, add_special_tokens=False) for word in ("Yes", "No")]
    assert tuple(map(len, words)) == sizes
    assert (words[0][0] == words[1][0]) == has_prefix
    wish = Wish([], text.encode("z", add_special_tokens=False)[-1])

    def row(prefix: Sequence[int]) -> list[float]:
        return wish(prefix)[: text.vocab_size]

    with controlled_model(tmp_path_factory.mktemp("store"), next_token=row, folder=folder) as model:
        yield model, wish, words


class YesOrNo(Controller):
    """A Python controller that does the same as the standard controller `yesno`."""

    def __init__(self, *words: list[int]) -> None:
        self.words = words  # each a list of tokens, as many as the tokenizer makes of it

    def next(self, view: SequenceView) -> Decision:
        done = list(view.generated)
        rest = [word[len(done) :] for word in self.words if word[: len(done)] == done]
        return Decision.sample(view.mask_of(tokens[0] for tokens in rest)) if all(rest) else Decision.stop()


@pytest.mark.few(3)
@pytest.mark.parametrize("answer", [0, 1])
def test_the_whole_word_decides(split: tuple[LoadedModel, Wish, list[list[int]]], answer: int) -> None:
    model, wish, words = split
    wish.tokens = [token for token in words[answer] if token not in words[1 - answer]]
    llm = LLM(lent(model))
    for controller in (WasmController("yesno"), YesOrNo(*words)):
        (output,) = llm.generate("Is it so?", SamplingParams(temperature=0), controller=controller, use_tqdm=False)
        assert output.outputs[0].error is None
        assert list(output.outputs[0].token_ids) == words[answer], (output.text, controller)
