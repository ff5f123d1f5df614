"""Helpers for tests of the playground in a real browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sources import ROOT
from tests.waiting import until

#: What marks each of these test files: they take long, and one browser at a time is enough.
MARKS = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

WEB = ROOT / "web"
VIEWS = ("Chat", "Complete", "Steer", "Compare", "Server")
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b> &lt;i&gt;"


def go(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def settle(page: Any, state: str = "done") -> None:
    page.locator("main .state").first.wait_for()
    page.wait_for_selector(f"main .state.{state} >> nth=0")


def text_of(page: Any, index: int = 0) -> str:
    """Return the text of a run without its prompt."""
    chunks = page.locator(".tokens").nth(index).locator(":scope > .chunk")
    return "".join(chunks.all_text_contents())


def answer_of(page: Any) -> str:
    """Return the visible text of the chat's last answer."""
    text: str = page.locator(".message.assistant").last.locator(".markdown").last.inner_text()
    return text


def show_tokens(page: Any) -> None:
    """Show the answers of the chat token by token."""
    page.get_by_role("button", name="Tokens", exact=True).last.click()
    page.locator(".message.assistant .t").first.wait_for()


def complete(page: Any, prompt: str = "Once upon a time") -> None:
    go(page, "Complete")
    page.get_by_label("Prompt").fill(prompt)
    page.keyboard.press("Control+Enter")
    settle(page)


def steer(page: Any, language: str, example: str, *, is_message: bool = False) -> None:
    go(page, "Steer")
    plainly(page)
    page.get_by_label("as a message").set_checked(is_message)
    page.get_by_label("Language").select_option(label=language)
    page.get_by_label("Example").select_option(label=example)
    page.get_by_role("button", name="Run", exact=True).click()


def plainly(page: Any) -> None:
    """Let programs continue the plain prompt, and start no second run without the program."""
    page.get_by_label("as a message").uncheck()
    page.get_by_label("unsteered twin").uncheck()


def write(page: Any, text: str) -> None:
    """Replace the program in the editor."""
    page.locator(".editor .cm-content").click()
    page.keyboard.press("Control+a")
    page.locator(".editor .cm-content").evaluate(PASTE, text)


#: The pattern of the example "A date".
DATE = (
    "(January|February|March|April|May|June|July|August|September|October|November|December) [1-3]?[0-9], [12][0-9]{3}"
)
#: The examples of the page, and what their texts must be under the model's greedy choice.
EXAMPLES = {
    ("JavaScript", "Yes or no, and why"): r"(Yes|No), because [^.\n]{10,120}[.]",
    ("JavaScript", "A capital"): r"The capital of France is [A-Z][a-z]+, a city\.",
    ("JavaScript", "Forks that ask"): r"Once upon a time there was a cat that[a-z ,]+\.",
    ("JavaScript", "Taking back"): r"Once upon a time there was.*",
    ("JavaScript", "A list"): r"Three animals:\n1\. ([a-z]+)\n2\. (?!\1)([a-z]+)\n3\. (?!\1|\2)[a-z]+\n",
    ("Python", "Yes or no"): r"Q: Is Paris the capital of France\?\nA: (Yes|No)",
    ("Python", "Forks"): r"A number: [0-9]",
    ("JSON program", "A word, used again"): r"The capital of France is( [A-Z][a-z]+), so\1 is in France\.",
    ("JSON program", "A choice"): r"The color of grass is (green|blue|black)\.",
    ("Regex", "A date"): DATE,
    ("Regex", "One sentence"): r"The [A-Za-z ]{10,50}[.]",
    ("Regex", "A telephone number"): r"[0-9]{3}-[0-9]{4}",
    ("Regex", "Words without an e"): r"[A-DF-Z][a-df-z]{0,9}( [a-df-z]{1,9}){3,9}[.]",
    ("JSON schema", "A person"): r'\{.*"name".*"age".*"color": ?"(red|green|blue)".*\}',
    ("JSON schema", "A list of numbers"): r"\[(-?[0-9]+, ){2,4}-?[0-9]+\]",
    ("Lark", "Sums"): r"[1-9(][0-9+()]+",
    ("Lark", "Greetings"): r"(Hello|Good day|Welcome), [A-Z][a-z]{2,8}!",
}


def be_greedy(page: Any) -> None:
    """Let each run write the same text."""
    page.get_by_role("tab", name="Settings").click()
    page.locator("input[name=seed]").fill("7")
    page.locator("input[name=temperature]").fill("0")


def run_example(page: Any, language: str, example: str, *, is_message: bool = False) -> str:
    """Run an example with temperature 0, and return its text without rolled-back tokens."""
    be_greedy(page)
    steer(page, language, example, is_message=is_message)
    settle(page)
    page.get_by_label("fold what was rolled back").check() if page.locator(".fold").count() else None
    return "".join(page.locator(".tokens > .chunk").evaluate_all(SHOWN))


PASTE = """(element, text) => {
  const clipboardData = new DataTransfer()
  clipboardData.setData("text/plain", text)
  element.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }))
}"""


def ask(page: Any, text: str) -> None:
    """Send a message in the chat, and wait for the answer."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").last.wait_for()


#: The text of chunks without what was rolled back, nor its signs.
SHOWN = """chunks => chunks.map(chunk => [...chunk.childNodes].filter(node => !node.matches?.(".fold, .rewound"))
    .map(node => node.textContent).join(""))"""


NUM_KEPT = """() => new Promise(done => {
  const asked = indexedDB.open("bridle-playground")
  asked.onsuccess = () => {
    const counted = asked.result.transaction("runs").objectStore("runs").count()
    counted.onsuccess = () => { asked.result.close(); done(counted.result) }
  }
})"""


def until_kept(page: Any, count: int) -> None:
    """Wait until the page's database has `count` runs. Playwright's `wait_for_function` does not wait for promises."""
    until(lambda: page.evaluate(NUM_KEPT) >= count, f"that {count} runs are kept")


def answer_with(page: Any, num_tokens: int) -> None:
    """Let each completion arrive at once, with the given number of tokens."""
    odds = {"logprob": -0.7, "rank": 1, "top": [[1, -0.7], [2, -1.2]], "texts": [" dog", " cat"]}
    record = {"type": "token", "output": 0, "step": 1, "token": 1, "text": " dog", "spelled": " dog"}
    prompt = {"type": "prompt", "output": 0, "step": 1, "tokens": [7], "texts": ["Once"]}

    def event(trace: dict[str, Any]) -> str:
        choice = {"index": 0, "text": trace.get("text", ""), "trace": [trace], "finish_reason": None}
        return "data: " + json.dumps({"choices": [choice]}) + "\n\n"

    body = event(prompt) + event(record | {"draw": {"before": odds}}) * num_tokens + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def hostile_trace() -> str:
    lines: list[dict[str, Any]] = [
        {"type": "header", "version": 1, "request_id": HOSTILE, "model": HOSTILE},
        {"type": "prompt", "output": 0, "step": 1, "tokens": [1], "texts": [HOSTILE]},
        {"type": "token", "output": 0, "step": 1, "token": 2, "text": HOSTILE, "spelled": HOSTILE, "by": HOSTILE,
         "draw": {"before": {"logprob": -1.0, "rank": 2, "top": [[3, -0.5]], "texts": [HOSTILE]}}},
        {"type": "fork", "output": 1, "step": 1, "parent": 0, "num_tokens": 1},
        {"type": "log", "output": 0, "step": 1, "text": HOSTILE},
        {"type": "variable", "output": 0, "step": 1, "name": HOSTILE, "value": "PGltZz4="},
        {"type": "end", "output": 0, "step": 2, "reason": HOSTILE, "error": HOSTILE},
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def check_picture(page: Any) -> None:
    """Take a screenshot, which must not be blank."""
    assert len(page.screenshot(animations="disabled")) > 5_000


#: What breaks a rule, and where.
BROKEN = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.flatMap(
    rule => rule.nodes.map(node => `${rule.id}: ${rule.help}: ${node.html.slice(0, 200)}`))"""

#: An answer with what Markdown has.
MARKDOWN = """# A title

Some **bold** text, `inline`, and $a^2 + b^2$.

```python
def double(n):
    return 2 * n
```

| Name | Age |
| --- | ---: |
| Ann | 7 |

- [x] done
- [link](https://example.org/) and [trap](javascript:alert(1))
- ![image](https://example.org/a.png)

$$\\frac{1}{2}$$

<img src=x onerror=alert(1)><script>alert(2)</script>
"""

#: Selects tokens of the shown text, from one to another.
SELECT = """([from, to]) => {
  const all = document.querySelectorAll(".tokens > .chunk .t")
  const range = document.createRange()
  range.setStartBefore(all[from])
  range.setEndAfter(all[to])
  document.getSelection().removeAllRanges()
  document.getSelection().addRange(range)
}"""
