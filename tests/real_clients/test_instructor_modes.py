"""Tests of all modes of the real instructor with a scripted model that writes the object in a code fence, bare, or as a
call. The scripted model also covers modes for which the demo model is too small."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http.harness import saying, scripted_model, served, tokenizer
from tests.real_clients.environment import PYTHON, foreign_python, run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parent / "script_instructor_modes.py"
BARE = '{"name": "Ada", "age": 36}'
CALL = '{"name": "Person", "arguments": ' + BARE + "}"


def writes_what_is_asked_for(prefix: Any) -> int:
    """Return the next token of a code fence, a call or a bare object, as the prompt and the text so far require."""
    said = tokenizer().decode(list(prefix), skip_special_tokens=False)
    prompt, _, begun = said.rpartition("assistant")
    if "<tool_call>" in begun or "Call it." in prompt:
        return calling(prefix)
    return fenced(prefix) if "```json" in prompt or "codeblock" in prompt else bare(prefix)


bare, fenced = saying(BARE), saying(f"```json\n{BARE}\n```")
calling = saying(f"<tool_call>\n{CALL}\n</tool_call>")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with served(scripted_model(next_token=writes_what_is_asked_for, max_model_len=4_000)) as url:
        yield url


def test_each_mode_gives_the_object(server: str) -> None:
    printed = run_script(foreign_python(*PYTHON["script_instructor.py"]), SCRIPT, server)
    assert printed.count(" ok\n") == SCRIPT.read_text(encoding="utf-8").count("def check_") > 0
