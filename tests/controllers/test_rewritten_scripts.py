"""Tests of scripts under policies that replace text: only the matched text is replaced, and a script sees the replaced
output."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridle.aici.client import RuntimePool, WasmController
from bridle.config import EngineConfig
from bridle.controllers import standard
from bridle.engine import Engine
from bridle.engine.guardrails.guardrails import Guardrails, TextRule
from bridle.engine.request import Request
from bridle.sampling import SamplingParams
from bridle.testing.scripted import ScriptedExecutor
from bridle.testing.text import PieceDecoder
from tests.aici.conftest import BOS, EOS, VOCAB_SIZE
from tests.aici.steering import SharedRuntime
from tests.conftest import IS_FULL
from tests.controllers.pykit import _BYTES, Parrot, Scripts

DECODER = PieceDecoder([_BYTES.get(token, bytes([token & 0xFF])) for token in range(VOCAB_SIZE)])
GUARD = Guardrails((TextRule("fruit", "red apple", "replace", "[fruit]", is_late=True, max_length=10),))
RETRY = Guardrails((TextRule("fruit", "red apple", max_length=10),))


class Guarded(Scripts):
    """Scripts under guardrails, over a fake model that continues its line from the prompt on, whatever text was
    forced."""

    def __init__(self, pool: RuntimePool, module: str, guard: Guardrails, lines: tuple[str, ...]) -> None:
        super().__init__(pool, module)
        executor = ScriptedExecutor(
            VOCAB_SIZE, 512, 4, eos_token_ids=(EOS,), max_model_len=2000, next_token=Parrot(lines)
        )
        config = EngineConfig(step_timeout=20.0)
        self.engine = Engine(executor, config, pools=[SharedRuntime(pool)], decoder=DECODER)
        self.guard = guard

    def add_module(self, name: str, module: str | None, argument: str = "", **sampling: object) -> None:
        params = SamplingParams(max_tokens=500, temperature=0.0)
        controller = WasmController(module or "", argument)
        self.engine.add(Request(name, (BOS, *b"Q:"), params, controller=controller, guard=self.guard))
        self.events[name] = []


@pytest.fixture(scope="module", params=["js", "py"])
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def pool(language: str, request: pytest.FixtureRequest) -> RuntimePool:
    found: RuntimePool = request.getfixturevalue("script_pool" if language == "js" else "py_pool")
    return found


def written(language: str, acts: list[tuple[str, str]], label_at: int) -> str:
    """Return a script that forces texts (`fixed`) and generates until a text (`gen`); a label precedes act
    `label_at`."""
    js, py = ["const all = new Label(); let told = ''"], ["every, told = aici.Label(), ''"]
    for number, (kind, text) in enumerate(acts):
        if number == label_at:
            js.append("const some = new Label()")
            py.append("some = aici.Label()")
        shown = json.dumps(text)
        if kind == "fixed":
            js.append(f"await fixed({shown})")
            py.append(f"await aici.FixedTokens({shown})")
        else:
            js.append(f"told = await gen({{ stopAt: {shown}, maxTokens: 40 }})")
            py.append(f"told = await aici.gen_text(stop_at={shown}, max_tokens=40)")
    js.append("console.log(JSON.stringify([all.textSince(), some.textSince(), told, getTokens().length]))")
    py.append("print(json.dumps([every.text_since(), some.text_since(), told, len(aici.get_tokens())]))")
    if language == "js":
        head = 'import { Label, fixed, gen, getTokens, start } from "aici"\nstart(async () => {\n'
        return head + "\n".join(js) + "\n})"
    body = "\n    ".join(py)
    return f"import json\nimport pyaici.server as aici\nasync def main():\n    {body}\naici.start(main())"


def ran(pool: RuntimePool, language: str, guard: Guardrails, acts: list[tuple[str, str]], label_at: int = 0) -> Guarded:
    module = Scripts(pool, "").upload(standard.load(f"{language}ctrl"))
    lines = ("".join(text for _, text in acts),)
    scripts = Guarded(pool, module, guard, lines)
    scripts.script(written(language, acts, label_at))
    return scripts


def saw(scripts: Guarded) -> list[object]:
    (line,) = [line for line in scripts.logs("a").splitlines() if line.startswith('["')]
    found: list[object] = json.loads(line)
    return found


WORDS = st.lists(st.sampled_from(["red", " apple", " red apple", "green ", "é", ". ", "pp"]), min_size=1, max_size=4)


@pytest.mark.few(1)
@settings(max_examples=15 if IS_FULL else 6)
@given(st.lists(WORDS.map("".join), min_size=1, max_size=4), st.integers(0, 3))
@example(["One red apple and two green pears. "], 0)
@example(["One red", " apple and", " two red apple.", "red apple"], 2)
def test_what_is_fixed_stays_but_for_the_match(pool: RuntimePool, language: str, texts: list[str], at: int) -> None:
    acts = [("fixed", text) for text in [*texts, "!"]]
    scripts = ran(pool, language, GUARD, [*acts, ("gen", "?")], min(at, len(texts) - 1))
    assert scripts.error() == ""
    whole = "".join(texts).replace("red apple", "[fruit]") + "!"
    assert scripts.text().startswith(whole)
    every, some, _, num_tokens = saw(scripts)
    assert every == scripts.text() and num_tokens == 3 + len(scripts.tokens("a"))
    assert isinstance(some, str) and scripts.text().endswith(some)


def test_what_is_drawn_is_what_is_there(pool: RuntimePool, language: str) -> None:
    module = Scripts(pool, "").upload(standard.load(f"{language}ctrl"))
    scripts = Guarded(pool, module, GUARD, ("One red apple and two pears.", "One [fruit] and two pears."))
    scripts.script(written(language, [("fixed", "One red"), ("gen", "pears.")], 1))
    assert scripts.text() == "One [fruit] and two pears."
    assert saw(scripts)[:3] == ["One [fruit] and two pears.", "[fruit] and two pears.", "[fruit] and two pears."]


def test_what_is_drawn_another_way_is_what_is_there(pool: RuntimePool, language: str) -> None:
    module = Scripts(pool, "").upload(standard.load(f"{language}ctrl"))
    scripts = Guarded(pool, module, RETRY, ("One red apple.",))
    scripts.script(written(language, [("fixed", "One"), ("gen", ".")], 1))
    every, some, told, _ = saw(scripts)
    assert "red apple" not in scripts.text() and every == scripts.text() and some == told


def test_a_constraint_of_a_script_begins_again(pool: RuntimePool, language: str) -> None:
    for pattern, is_right in (("[a-z]+ [a-z]+ and pears", False), ("([a-z]+ [a-z]+|.fruit.) and pears", True)):
        js = f"await gen({{ regex: {json.dumps(pattern)}, maxTokens: 60 }})"
        py = f"await aici.gen_text(regex={json.dumps(pattern)}, max_tokens=60)"
        script = f'import {{ gen, start }} from "aici"\nstart(async () => {{ {js} }})'
        if language == "py":
            script = f"import pyaici.server as aici\nasync def main():\n    {py}\naici.start(main())"
        module = Scripts(pool, "").upload(standard.load(f"{language}ctrl"))
        scripts = Guarded(pool, module, GUARD, ("Q:red apple and pears",))
        scripts.script(script)
        if is_right:
            assert scripts.error() == "" and scripts.text() == "[fruit] and pears"
        else:
            assert "a policy has changed the text, and what is there now does not fit" in scripts.error()
