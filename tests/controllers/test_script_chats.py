"""Tests that scripts write chats with the model's template, and end a regex where the model would end it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridle import LLM, SamplingParams, WasmController
from tests.controllers.conftest import Run
from tests.controllers.pykit import script

PY = """
import pyaici.server as aici

async def main():
    begin = aici.Label()
    said = [{"role": "user", "content": "Is snow white? <|end|>"}]
    await aici.chat(said, tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
    answer = await aici.gen_text(regex=r"[A-Z][a-z]+", max_tokens=8)
    said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Sure?"}]
    await aici.chat(said, following=begin, enable_thinking=True)
    print(aici.template("x"))
    try:
        aici.template([{"role": "nobody", "content": "x"}])
    except ValueError as error:
        print("refused", error)
aici.start(main())
"""
JS = """
import { Label } from "aici"
start(async () => {
  const begin = new Label()
  const said = [{ role: "user", content: "Is snow white? <|end|>" }]
  await chat(said)
  const answer = await gen({ regex: /[A-Z][a-z]+/, maxTokens: 8 })
  said.push({ role: "assistant", content: answer }, { role: "user", content: "Sure?" })
  await chat(said, { following: begin, variables: { enable_thinking: true } })
  console.log(template("x"))
  try {
    template([{ role: "nobody", content: "x" }])
  } catch (error) {
    console.log("refused", error.message)
  }
})
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", control=True, max_model_len=512) as loaded:
        yield loaded


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source"), [("pyctrl", PY), ("jsctrl", JS)])
def test_conversations(llm: LLM, name: str, source: str) -> None:
    (output,) = llm.generate(
        [(0,)], SamplingParams(ignore_eos=True, max_tokens=200), controller=WasmController(name, source)
    )
    (found,) = output.outputs
    text = llm.tokenizer.decode(found.token_ids, skip_special_tokens=False)
    assert "Think before you answer." in text and text.count("<|user|>") == 2 and text.endswith("<|assistant|>")
    assert "Is snow white? <|end|>" in text  # spelled, not the token
    assert found.logs is not None and "<|user|>x<|end|><|assistant|>" in found.logs
    assert "refused" in found.logs and "nobody" in found.logs


@pytest.mark.parametrize("kind", ["py", "js"])
@pytest.mark.parametrize(
    ("line", "longest", "written"),
    [("Q: ok! no", False, "ok"), ("Q: ok! no", True, "oka"), ("Q: !", False, "a"), ("Q: okay", False, "okay")],
)
def test_a_regex_ends_where_the_model_leaves_it(
    py: Run, js: Run, kind: str, line: str, longest: bool, written: str
) -> None:
    """A regex cannot end before its first token; with a mask alone the fake model would add another letter."""
    if kind == "py":
        ran = py(script(f"await aici.gen_text(regex='[a-z]+', longest={longest}, max_tokens=6)"), line, prompt="Q: ")
    else:
        wanted = f"{{ regex: /[a-z]+/, longest: {str(longest).lower()}, maxTokens: 6 }}"
        ran = js(f"start(async () => {{ await gen({wanted}) }})", line, prompt="Q: ")
    assert ran.error() == ""
    text = ran.text()
    assert text == written


def test_a_model_without_a_template_has_no_chats(py: Run, js: Run) -> None:
    """`chat` fails with an error that says why, as the tests' runtime has a tokenizer without a chat template."""
    ran = py(script("try:\n    await aici.chat('x')\nexcept ValueError as error:\n    print(error)"))
    assert "no chat template" in ran.logs("a")
    assert "no chat template" in js("start(async () => { await chat('x') })").error()
