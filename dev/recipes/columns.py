"""Four ways to answer a case, each a column of the table: the model alone, a grammar in one request, the recipe, and
llama-server's grammar."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bridle import LLM, RequestOutput, WasmController
from dev.recipes.recipe import Answer, Case, Recipe

COLUMNS = ("alone", "mask", "steering", "llama-server")
#: Number of llama-server's requests that run at once.
SLOTS = 8
_SECONDS = 1800.0


def in_process(column: str, recipe: Recipe, llm: LLM, cases: Sequence[Case]) -> list[Answer]:
    """Return the answers of one of the first three columns, with all cases in one batch. The total time is divided
    evenly among the cases."""
    began = time.perf_counter()
    if column == "steering" and recipe.steer is not None:
        answers = recipe.steer(llm, cases)
    else:
        given = {"alone": _alone, "mask": _masked, "steering": steered}[column](recipe, cases)
        messages = [list(case.messages) for case in cases]
        outputs = llm.chat(messages, temperature=0, max_tokens=recipe.max_tokens, use_tqdm=False, **given)
        answers = [answer_of(output) for output in outputs]
    seconds = (time.perf_counter() - began) / len(cases)
    return [Answer(each.text, each.tokens, seconds) for each in answers]


def answer_of(output: RequestOutput) -> Answer:
    """Return the text of the first output, and the number of computed tokens of all outputs. An output that failed
    counts as an empty text."""
    first, usage = output.outputs[0], output.usage
    return Answer("" if first.error else first.text, usage.sampled_tokens + usage.forced_tokens)


def _alone(recipe: Recipe, cases: Sequence[Case]) -> dict[str, Any]:
    return {}


def _masked(recipe: Recipe, cases: Sequence[Case]) -> dict[str, Any]:
    return {"constraint": [case.form for case in cases]}


def steered(recipe: Recipe, cases: Sequence[Case]) -> dict[str, Any]:
    """Return the arguments of `LLM.chat` that run the recipe's script with the constants of each case."""
    interpreter = "jsctrl" if recipe.file.endswith(".js") else "pyctrl"
    return {"controller": [WasmController(interpreter, recipe.script(case)) for case in cases], "ignore_eos": True}


def over_http(url: str, recipe: Recipe, cases: Sequence[Case]) -> list[Answer]:
    """Return the answers of llama-server with the grammar or schema of each case."""
    began = time.perf_counter()
    pool = ThreadPoolExecutor(SLOTS)
    try:
        answers = list(pool.map(lambda case: _asked(url, recipe, case), cases))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # requests of an interrupted run end with their server
    seconds = (time.perf_counter() - began) / len(cases)
    return [Answer(each.text, each.tokens, seconds) for each in answers]


def _asked(url: str, recipe: Recipe, case: Case) -> Answer:
    body = {"messages": case.messages, "temperature": 0, "max_tokens": recipe.max_tokens, **peer_form(case.form)}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), head)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as reply:  # noqa: S310  (a server that was started here)
            answer = json.load(reply)
    except urllib.error.HTTPError as error:  # for example, a grammar that llama-server refuses
        error.close()
        return Answer("")
    return Answer(answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"])


def peer_form(form: Any) -> dict[str, Any]:
    """Return a constraint as a field of llama-server's requests."""
    if "gbnf" in form:
        return {"grammar": form["gbnf"]}
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form["json_schema"]}}}
