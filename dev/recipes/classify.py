"""Cases of the recipe `classify`: sentences of film reviews, rated by twenty people each, from the data of
vaderSentiment (MIT licence)."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Sequence
from random import Random

from bridle import LLM
from dev.recipes import data
from dev.recipes.recipe import Answer, Case, Recipe
from examples.recipes.classify import ASK, CLASSES, calibrated, scores

_INNER, _FILE = "additional_resources/hutto_ICWSM_2014.tar.gz", "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
_FORM = {"gbnf": "root ::= " + " | ".join(f'"{each}"' for each in CLASSES) + "\n"}
_CLEAR, _LENGTH = 1.0, 240  # minimum distance of a rating from 0, on a scale from -4 to 4; maximum characters
_NUM_UNLABELLED = 64


def cases(count: int, seed: int) -> list[Case]:
    """Return the same number of cases of both classes. The seed determines their order."""
    rated = _rated()
    Random(seed).shuffle(rated)
    sides = ([each for each in rated if each[1] < 0], [each for each in rated if each[1] > 0])
    turns = [each for pair in zip(*sides, strict=False) for each in pair][:count]
    return [Case(key, _asked(text), CLASSES[rating > 0], _FORM, {"TEXT": text}) for key, rating, text in turns]


def is_right(case: Case, text: str) -> bool:
    """Return whether the text names only one class, the right one."""
    named = [each for each in CLASSES if each in text.lower()]
    return named == [case.known]


def steer(llm: LLM, asked: Sequence[Case]) -> list[Answer]:
    """Return the most probable class of each text. The unlabelled texts that calibrate the probabilities are not among
    the cases."""
    others = _others({case.id for case in asked})
    found = calibrated(scores(llm, [case.constants["TEXT"] for case in asked]), scores(llm, others))
    return [Answer(f"{CLASSES[each.index(max(each))]} {max(each):.4f}", 1) for each in found]


def _others(used: set[str]) -> list[str]:
    rated = [each for each in _rated() if each[0] not in used]
    return [text for _, _, text in Random(0).sample(rated, _NUM_UNLABELLED)]


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": ASK.format(classes=" or ".join(CLASSES), text=text)}]


def _rated() -> list[tuple[str, float, str]]:
    """Return sentences with clear ratings as (number, rating, text), from an archive inside the package's archive."""
    path = data.find("vaderSentiment-*.tar.gz", "pip download --no-deps --no-binary :all: vaderSentiment -d")
    with tarfile.open(path) as package:
        inner = next(each for each in package.getmembers() if each.name.endswith(_INNER))
        content = package.extractfile(inner)
        assert content is not None
        with tarfile.open(fileobj=io.BytesIO(content.read())) as archive:
            file = archive.extractfile(_FILE)
            assert file is not None
            lines = [line.split("\t") for line in file.read().decode("utf-8", "replace").splitlines()]
    rows = [(key, float(rating), text) for key, rating, text in lines]
    return [row for row in rows if abs(row[1]) >= _CLEAR and len(row[2]) <= _LENGTH]


RECIPE = Recipe("classify.py", 8, cases, is_right, steer=steer)
