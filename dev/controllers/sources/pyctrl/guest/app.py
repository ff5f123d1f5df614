"""The component: what the host calls, `create`, `start` and `next`, on the script's behalf.

Whatever a script does wrong ends in its log as a traceback of its own lines, and in one line as the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import wit_world
from componentize_py_types import Err
from pyaici import driver, sequence, tokens
from pyaici.sequence import Candidate
from sandbox import output, script, surroundings

surroundings.close()


class _Session:
    """The sequence that this instance serves."""

    def __init__(self) -> None:
        self._is_first = True
        self._failure: script.Failed | None = None

    def start(self, prompt: list[int]) -> None:
        """The script runs to where it first needs the model. What goes wrong is told in the first step."""
        sequence.begin(prompt)
        try:
            _attempt(lambda: driver.registered().init_prompt(prompt))
        except script.Failed as failure:
            self._failure = failure

    def next(self, step: dict[str, Any]) -> dict[str, Any]:
        """What comes next, or the text of an error."""
        try:
            if self._failure is not None:
                raise self._failure
            return dict(_attempt(lambda: self._ask(step)))
        except script.Failed as failure:
            return {"error": str(failure)}

    def _ask(self, step: dict[str, Any]) -> dict[str, Any]:
        """Tell the script what was done, ask it what comes next."""
        callbacks = driver.registered()
        sequence.state.sampled = step.get("sampled")
        sequence.state.candidates = [Candidate(*pair) for pair in step.get("candidates") or ()]
        sequence.state.changes += step.get("changes") or ()
        sequence.state.probes = step.get("probes") or []
        is_first, self._is_first = self._is_first, False
        answer = driver.ask(callbacks, step, is_first=is_first).lower()
        if answer.get("branches") and (scales := sequence.take_scales()):
            answer["branches"] = [{**branch, "control_vectors": scales} for branch in answer["branches"]]
        return answer


_session = _Session()


class WitWorld(wit_world.WitWorld):
    """The world `controller`. The tool makes an object of it for each export, so nothing is kept in it."""

    def create(self, argument: str) -> None:
        surroundings.enter()
        try:
            _attempt(lambda: script.run(argument))
        except script.Failed as failure:
            raise Err(str(failure)) from None

    def start(self, prompt: str) -> str:
        _session.start(json.loads(prompt))
        return prompt

    def next(self, step: str) -> str:
        return json.dumps(_session.next(json.loads(step)))


def _attempt(action: Callable[[], Any]) -> Any:
    """Run code of the script. Raises `script.Failed` with what to tell the user."""
    try:
        result = action()
        tokens.end_call()
        return result
    except script.Failed:
        raise
    except BaseException as error:
        raise script.explain(error) from None
    finally:
        output.flush()
