"""Tests of scripts that choose among texts: the engine scores each whole text, while a mask would decide by the first
token."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from bridle.aici.client import RuntimePool
from bridle.aici.runtime.scored_choices import scored_texts, spelled
from bridle.aici.runtime.vocabulary import RuntimeVocabulary
from bridle.config import EngineConfig
from bridle.controllers import standard
from bridle.engine import Engine
from bridle.engine.request import Request
from bridle.outputs import PromptEvent
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from tests.aici.conftest import BOS, EOS, VOCAB_SIZE
from tests.aici.steering import SharedRuntime
from tests.controllers.pykit import Scripts

CITIES = ["paris", "rome", "madrid", "porto"]
_ids = itertools.count()


class RandomScripts(Scripts):
    """An engine that runs scripts over a fake model with random logits."""

    def __init__(self, pool: RuntimePool, module: str, seed: int) -> None:
        super().__init__(pool, module)
        self.executor = ScriptedExecutor(
            VOCAB_SIZE,
            512,
            4,
            eos_token_ids=(EOS,),
            max_model_len=2000,
            seed=seed,
            record=True,
            max_num_batched_tokens=1024,
        )
        self.engine = Engine(self.executor, EngineConfig(step_timeout=20.0), pools=[SharedRuntime(pool)])

    def num_scoring(self, source: str) -> int:
        """Return the number of steps of a script that compute several options side by side."""
        num_before = len(self.executor.plans)
        assert self.script(source, temperature=0.0, name=f"count-{next(_ids)}").startswith("Q: item ")
        return sum(len(plan.rows) > 1 for plan in self.executor.plans[num_before:])

    def score(self, before: str, text: str) -> float:
        """Return the log-probability of a text, scored as the end of a prompt in a request of its own."""
        prompt = (BOS, *(before + text).encode())
        sampling = SamplingParams(max_tokens=0, prompt_logprobs=0)
        self.engine.add(Request(f"score-{next(_ids)}", prompt, sampling))
        events = [event for _ in iter(lambda: self.engine.has_work, False) for event in self.engine.step()]
        (found,) = [event for event in events if isinstance(event, PromptEvent)]
        return math.fsum(each.logprob for each in found.logprobs[-len(text) :] if each is not None)


def run(pool: RuntimePool, module: str, seed: int, options: str) -> tuple[str, str]:
    """Return the text that a script generates, and the city with the highest score."""
    scripts = RandomScripts(pool, module, seed)
    best = max(CITIES, key=lambda city: scripts.score("Q: ", city))
    source = f"start(async () => {{ await fixed('Q: '); await gen({options}) }})"
    return scripts.script(source, temperature=0.0).removeprefix("Q: "), best


def test_a_choice_is_the_best_text_as_a_whole(script_pool: RuntimePool) -> None:
    module = Scripts(script_pool, "").upload(standard.load("jsctrl"))
    given, masked_differs = json.dumps(CITIES), 0
    for seed in range(5):
        for name in ("choice", "options"):
            text, best = run(script_pool, module, seed, f"{{ {name}: {given} }}")
            assert text == best
        text, best = run(script_pool, module, seed, f"{{ constraint: {{ choice: {given}, scored: false }} }}")
        assert text in CITIES
        masked_differs += text != best
    assert masked_differs  # a mask chooses by the first letter


@pytest.mark.parametrize(
    ("kind", "spec", "texts"),
    [
        ("choice", '["a", "b", "a"]', (b"a", b"b")),
        ("constraint", '{"choice": ["a", "b"]}', (b"a", b"b")),
        ("constraint", '{"choice": ["a", "b"], "scored": false}', ()),
        ("constraint", '{"regex": "a|b"}', ()),
        ("regex", "a|b", ()),
        ("choice", "[", ()),
    ],
)
def test_which_constraints_are_scored(kind: str, spec: str, texts: tuple[bytes, ...]) -> None:
    assert scored_texts(kind, spec) == texts


@pytest.mark.parametrize(
    ("texts", "tokens"),
    [
        ([b"a", b"bc"], [[97], [98, 99]]),
        ([b"a"], []),
        ([b"a", b""], []),
        ([b"a", b"\xff"], []),
        ([b"a"] * 2, []),
        ([bytes([97 + i % 26, 97 + i // 26 % 26, 97 + i // 676]) for i in range(4_097)], []),
    ],
)
def test_texts_that_cannot_be_scored_are_masked(texts: list[bytes], tokens: list[list[int]]) -> None:
    vocabulary = RuntimeVocabulary([bytes([byte]) for byte in range(256)], 0, lambda text: list(text.encode()))
    assert spelled(vocabulary, texts) == tokens


@pytest.mark.parametrize(
    "given",
    [
        "constraint=lambda: HostConstraint('choice', json.dumps({}))",
        "options={}",
    ],
)
def test_a_choice_in_python_is_the_best_text_as_a_whole(py_pool: RuntimePool, given: str) -> None:
    for seed in range(3):
        scripts = RandomScripts(py_pool, "pyctrl", seed)
        best = max(CITIES, key=lambda city: scripts.score("Q: ", city))
        assert scripts.script(in_python(given.format(CITIES)), temperature=0.0).removeprefix("Q: ") == best


def in_python(given: str) -> str:
    """Return a Python script that generates one text."""
    return f"""
import json
import pyaici.server as aici
from pyaici.constraints import HostConstraint

async def main():
    await aici.FixedTokens("Q: ")
    await aici.gen_text({given})

aici.start(main())
"""


def test_a_thousand_options_of_a_script_are_scored_in_one_pass(script_pool: RuntimePool, py_pool: RuntimePool) -> None:
    many = [f"item {number:03}" for number in range(1_000)]
    python = RandomScripts(py_pool, "pyctrl", 0)
    assert python.num_scoring(in_python(f"options={many}")) == 1
    javascript = RandomScripts(script_pool, Scripts(script_pool, "").upload(standard.load("jsctrl")), 0)
    source = f"start(async () => {{ await fixed('Q: '); await gen({{ options: {many} }}) }})"
    assert javascript.num_scoring(source) == 1
