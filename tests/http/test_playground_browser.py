"""The playground in a real browser: what people do there, and what a hostile text may not."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bridle.config import ModelConfig
from bridle.serving import ModelRegistry, load_model
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.tenancy.keys import KeyStore
from bridle.traces import Trace, TraceHeader, encode_trace, parse
from tests.http.browser import chromium, opened
from tests.http.harness import saying, scripted_model, served, serving, tokenizer
from tests.sources import ROOT
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

WEB = ROOT / "web"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script><b>bold</b> &lt;i&gt;"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as made:
        yield made


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the demo model, with programs."""
    control = ControlSettings("on", store=tmp_path_factory.mktemp("store"))
    with served(load_model(ModelConfig("demo", kv_memory=64 << 20), control=control)) as made:
        yield made


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url) as made:
        yield made


def go(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name, exact=True).click()


def settle(page: Any, state: str = "done") -> None:
    page.locator("main .state").first.wait_for()
    page.wait_for_selector(f"main .state.{state} >> nth=0")


def text_of(page: Any, index: int = 0) -> str:
    """The text of a run without its prompt."""
    chunks = page.locator(".tokens").nth(index).locator(":scope > .chunk")
    return "".join(chunks.all_text_contents())


def complete(page: Any, prompt: str = "Once upon a time") -> None:
    go(page, "Complete")
    page.get_by_label("Prompt").fill(prompt)
    page.keyboard.press("Control+Enter")
    settle(page)


def steer(page: Any, language: str, example: str) -> None:
    go(page, "Steer")
    page.get_by_label("Language").select_option(label=language)
    page.get_by_label("Example").select_option(label=example)
    page.get_by_role("button", name="Run", exact=True).click()


def write(page: Any, text: str) -> None:
    """Replace the program."""
    page.locator(".editor .cm-content").click()
    page.keyboard.press("Control+a")
    page.locator(".editor .cm-content").evaluate(PASTE, text)


PASTE = """(element, text) => {
  const clipboardData = new DataTransfer()
  clipboardData.setData("text/plain", text)
  element.dispatchEvent(new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }))
}"""


# -- chat ----------------------------------------------------------------------------------------------------


def test_a_chat_branches_and_is_there_again(page: Any) -> None:
    page.get_by_label("Message").fill("Tell me a short story.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    first = text_of(page)
    assert len(first) > 20
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("2/2").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("button", name="Earlier version").click()
    page.get_by_text("1/2").wait_for()
    assert text_of(page) == first
    page.locator(".message.user").hover()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("What can you do?")
    page.locator(".editing").get_by_role("button", name="Send").click()
    page.locator(".message.user").get_by_text("2/2").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.locator(".message.user").get_by_role("button", name="Earlier version").click()
    page.locator(".said-text").get_by_text("Tell me a short story.").wait_for()
    page.reload()
    page.get_by_label("History").get_by_role("button", name="Tell me a short story.", exact=True).click()
    page.locator(".message.assistant .said-text").wait_for()
    assert page.locator(".message.assistant .said-text").inner_text().strip() == first.strip()


def test_an_answer_forks_at_an_alternative(page: Any) -> None:
    page.get_by_label("Message").fill("Tell me a short story.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    before = text_of(page)
    page.locator(".message.assistant .t").nth(4).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    page.get_by_role("button", name="Regenerate").wait_for()
    page.locator(".message.assistant").get_by_text("2/2").wait_for()
    kept = "".join(page.locator(".message.assistant .t").all_text_contents()[:4])
    assert before.startswith(kept) and page.locator(".message.assistant .t.forced").count() == 1


def test_stop_stops(browser: Any) -> None:
    may_go = threading.Event()

    def next_token(prefix: Any) -> int:
        if len(prefix) > 40:
            may_go.wait(PATIENCE)
        return tokenizer().encode("x", add_special_tokens=False)[0]

    with served(scripted_model(next_token=next_token)) as url, opened(browser, url) as page:
        try:
            go(page, "Complete")
            page.get_by_role("button", name="Generate").click()
            page.locator("main .state.running").wait_for()
            page.locator(".t.sampled").first.wait_for()
            page.locator(".run-head").get_by_role("button", name="Stop").click()
            settle(page, "stopped")
        finally:
            may_go.set()
        assert page.locator(".notice").count() == 0


def reading(page: Any, *modalities: str) -> None:
    """Claim that the model reads this; what is sent is what matters."""
    row = {"id": "sees", "state": "loaded", "task": "generate", "input_modalities": ["text", *modalities]}
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": [row]}))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json={"error": {"message": "seen"}}))
    page.reload()


@pytest.mark.parametrize(
    ("modality", "kind", "tag"), [("image", "png", "img"), ("audio", "wav", "audio"), ("video", "mp4", "video")]
)
def test_files_travel_with_the_message(page: Any, modality: str, kind: str, tag: str) -> None:
    reading(page, "image", "audio", "video")
    file = {"name": f"it.{kind}", "mimeType": f"{modality}/{kind}", "buffer": b"\0" * 64}
    page.get_by_label("Attach pictures, sounds and videos").set_input_files(file)
    page.locator(".attached button").wait_for()
    page.get_by_label("Message").fill("What is it?")
    with page.expect_request("**/v1/chat/completions") as asked:
        page.keyboard.press("Enter")
    part, said = asked.value.post_data_json["messages"][-1]["content"]
    assert part["type"] == f"{modality}_url" and said["text"] == "What is it?"
    assert part[f"{modality}_url"]["url"].startswith(f"data:{modality}/{kind};base64,")
    page.locator(f".message.user {tag}").wait_for()
    page.locator(".notice").get_by_text("seen").wait_for()


def test_what_a_model_does_not_read_is_told_in_words(page: Any) -> None:
    reading(page, "audio")
    page.get_by_label("Attach sounds").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": b"x"})
    page.locator(".notice").get_by_text("The model reads sounds; a.png is a picture.").wait_for()
    large = {"name": "long.wav", "mimeType": "audio/wav", "buffer": bytes((16 << 20) + 1)}
    page.get_by_label("Attach sounds").set_input_files(large)
    page.locator(".notice").get_by_text("long.wav has 16.0 MiB; at most 16 are taken.").wait_for()
    assert page.locator(".attached").count() == 0


# -- tokens --------------------------------------------------------------------------------------------------


def test_the_keyboard_walks_along_tokens(page: Any) -> None:
    complete(page)
    page.locator(".tokens").focus()
    page.keyboard.press("Home")
    assert page.locator("#inspector .origin").inner_text().startswith("Part of the prompt")
    page.keyboard.press("End")
    page.locator("#inspector").get_by_text("Drawn by the model").wait_for()
    assert page.locator("#inspector .odd").count() == 5
    assert "all tokens" in page.locator("#inspector").inner_text()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "inspector"
    page.keyboard.press("Tab")  # to the first alternative
    assert page.evaluate("document.activeElement.className") == "odd"
    page.get_by_role("slider", name="Time line of steps").focus()
    page.keyboard.press("Home")
    assert page.get_by_role("slider").get_attribute("aria-valuenow") == "0"


def test_a_cached_prompt_shows(page: Any) -> None:
    prompt = "Once upon a time there was a dog. " * 8
    complete(page, prompt)
    page.get_by_role("button", name="Generate again").click()
    page.locator(".prompt-text .t.cached").first.wait_for()


def test_a_text_forks_and_goes_on(page: Any) -> None:
    complete(page)
    before = page.locator(".tokens .t").all_text_contents()
    page.locator(".tokens > .chunk .t").nth(3).click()
    chosen = page.locator("button.odd code").first.inner_text().replace("␣", " ")
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    after = page.locator(".tokens .t").all_text_contents()
    at = page.locator(".prompt-text .t").count() + 3
    assert after[:at] == before[:at] and after[at] == chosen


def test_colours_can_tell_probabilities(page: Any) -> None:
    complete(page)
    page.get_by_label("Colours").select_option("probability")
    page.locator(".t.p0").first.wait_for()


# -- steering ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "example", "pattern"),
    [
        ("JavaScript", "A sum", r"19 \+ 23 = [0-9]+"),
        ("JavaScript", "Taking back", r"Once upon a time there was.*"),
        ("JavaScript", "A list", r"Three animals:\n1\. [a-z]+\n2\. [a-z]+\n3\. [a-z]+\n"),
        ("Python", "Yes or no", r"Q: Is Paris the capital of France\?\nA: (Yes|No)"),
        ("JSON program", "A sum, used again", r"12 \+ 13 = ([0-9]+), so half of it is not \1"),
        ("JSON program", "A choice", r"The sky is (blue|green|a lie)\."),
        ("Regex", "Lower case", r"[a-z ]+[.]"),
        ("Regex", "A telephone number", r"[0-9]{3}-[0-9]{4}"),
        ("Regex", "Words without an e", r"( [a-df-z]+){4,8}[.]"),
        ("JSON schema", "A list of numbers", r"\[(-?[0-9]+, ){2,4}-?[0-9]+\]"),
        ("Lark", "Greetings", r"(Hello|Good day|Welcome), [A-Z][a-z]{2,8}!"),
    ],
)
def test_every_example_steers(page: Any, language: str, example: str, pattern: str) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.locator("input[name=seed]").fill("7")
    page.locator("input[name=temperature]").fill("0")
    steer(page, language, example)
    settle(page)
    page.get_by_label("fold what was taken back").check() if page.locator(".fold").count() else None
    text = "".join(page.locator(".tokens > .chunk").evaluate_all(SHOWN))
    assert re.fullmatch(pattern, text, re.DOTALL), text


#: The text of chunks without what was taken back, nor its signs.
SHOWN = """chunks => chunks.map(chunk => [...chunk.childNodes].filter(node => !node.matches?.(".fold, .rewound"))
    .map(node => node.textContent).join(""))"""


def test_forks_are_a_tree(page: Any) -> None:
    steer(page, "JavaScript", "Forks that ask")
    settle(page)
    items = page.get_by_role("treeitem")
    assert items.count() == 3
    items.nth(2).click()
    page.get_by_role("treeitem", selected=True).filter(has_text="bird").wait_for()
    assert page.locator(".said dt").all_inner_texts() == ["bird"]
    assert "FIXED" in page.locator(".log").inner_text()
    items.nth(2).press("ArrowUp")
    page.get_by_role("treeitem", selected=True).filter(has_text="dog").wait_for()


def test_what_was_taken_back_folds(page: Any) -> None:
    steer(page, "JavaScript", "Taking back")
    settle(page)
    assert page.locator("s.rewound").count() > 0
    page.get_by_label("fold what was taken back").check()
    page.locator("s.rewound").first.wait_for(state="detached")
    page.locator(".fold").first.click()
    page.locator("s.rewound").first.wait_for()


@pytest.mark.parametrize(
    ("language", "program", "line"),
    [
        ("JavaScript", "await $`one`\n\nnull.x\n", 3),
        ("JavaScript", "await $`one`\nlet = = 2\n", 2),
        ("Python", "import pyaici.server as aici\n\nasync def main():\n    1 / 0\n\naici.start(main())\n", 4),
        ("JSON program", '{"steps": [\n {"Fixed": {"text": {"String": {"str": "a"}}}},\n {"Gen": {"rx": 1}}\n]}', 3),
        ("Lark", "start: a\na: b\n", 2),
        ("JSON schema", '{\n  "type": \n}', 3),
    ],
)
def test_errors_are_at_their_line(page: Any, language: str, program: str, line: int) -> None:
    go(page, "Steer")
    page.get_by_label("Language").select_option(label=language)
    page.locator(".editor .cm-content").wait_for()
    write(page, program)
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".outcome .notice").wait_for()
    at = page.locator(".editor .cm-line").nth(line - 1)
    at.locator(".cm-lintRange-error, .cm-lintPoint-error").first.wait_for(state="attached")


def test_a_steered_text_forks_under_its_constraint(page: Any) -> None:
    steer(page, "Regex", "A telephone number")
    settle(page)
    page.locator(".tokens > .chunk .t").nth(1).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", text_of(page)), text_of(page)


# -- comparing, traces, programs -----------------------------------------------------------------------------


def test_two_runs_stand_side_by_side(page: Any) -> None:
    page.get_by_role("tab", name="Settings").click()
    page.locator("input[name=temperature]").fill("1.5")
    complete(page)
    page.get_by_role("button", name="Compare").last.click()
    seed = re.search(r"seed (\d+)", page.get_by_label("Left run").locator("option:checked").inner_text())
    assert seed is not None
    page.get_by_label("Seed of the second run").fill(seed[1])
    page.get_by_role("button", name="Run beside").click()
    page.get_by_text("The texts are the same").wait_for()
    page.get_by_label("Seed of the second run").fill(str(int(seed[1]) + 1))
    page.get_by_role("button", name="Run beside").click()
    page.get_by_text("tokens differ").wait_for()
    assert page.locator(".t.differs").count() > 0


def test_the_second_run_may_have_another_adapter(page: Any) -> None:
    """Adapters are only claimed here; what is sent is what matters."""
    row = {"object": "model", "state": "loaded", "task": "generate", "parent": None}
    rows = [row | {"id": "demo"}, row | {"id": "terse", "parent": "demo"}, row | {"id": "other", "parent": "another"}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": rows}))
    page.reload()
    complete(page)
    page.get_by_role("button", name="Compare").last.click()
    choice = page.get_by_label("Adapter of the second run")
    assert choice.locator("option").all_inner_texts() == ["the same adapter", "no adapter", "terse"]
    for chosen, sent in (("terse", "terse"), ("no adapter", None), ("the same adapter", None)):
        choice.select_option(label=chosen)
        with page.expect_request("**/v1/completions") as asked:
            page.get_by_role("button", name="Run beside").click()
        body = asked.value.post_data_json
        assert (body.get("adapter"), body["model"]) == (sent, "demo")
        settle(page, "failed" if sent else "done")


def test_several_models_are_chosen_from(browser: Any) -> None:
    """Each view asks the chosen model, which is remembered; the second of two runs may have another one."""
    models = [
        scripted_model(name=name, next_token=saying(said)) for name, said in (("one", "Good day."), ("two", "Bye."))
    ]
    with serving(ModelRegistry(models)) as url, opened(browser, url) as page:
        choice = page.locator("#model")
        choice.locator("option").nth(1).wait_for(state="attached")
        assert choice.locator("option").all_inner_texts() == ["one", "two"]
        complete(page)
        assert text_of(page) == "Good day."
        choice.select_option("two")
        complete(page)
        assert text_of(page) == "Bye."
        go(page, "Steer")
        page.get_by_label("Language").select_option(label="Regex")
        page.locator(".editor .cm-content").wait_for()
        write(page, "[A-Z][a-z]+[.]")
        page.get_by_role("button", name="Run", exact=True).click()
        settle(page)
        assert text_of(page) == "Bye."
        page.reload()
        choice.locator("option:checked").get_by_text("two").wait_for(state="attached")
        go(page, "Chat")
        page.get_by_label("Message").fill("hello")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".message.assistant .who").inner_text().startswith("two")
        assert text_of(page) == "Bye."
        choice.select_option("one")
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_text("2/2").wait_for()
        page.get_by_role("button", name="Regenerate").wait_for()
        assert page.locator(".message.assistant .who").inner_text().startswith("one")
        assert text_of(page) == "Good day."
        complete(page)
        page.get_by_role("button", name="Compare").last.click()
        page.get_by_label("Model of the second run").select_option("two")
        page.get_by_role("button", name="Run beside").click()
        page.get_by_text("tokens differ").wait_for()
        assert (text_of(page), text_of(page, 1)) == ("Good day.", "Bye.")


def test_a_fork_survives_a_reload(page: Any) -> None:
    complete(page)
    page.locator(".tokens > .chunk .t").nth(3).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    before, told = page.locator(".tokens .t").all_text_contents(), page.locator(".ancestry").inner_text()
    page.wait_for_function(KEPT, arg=2)
    page.reload()
    go(page, "Complete")
    page.get_by_label("History").get_by_role("button", name="Once upon a time").first.click()
    page.locator(".ancestry").wait_for()
    assert page.locator(".tokens .t").all_text_contents() == before
    assert page.locator(".ancestry").inner_text() == told
    assert page.locator(".tokens > .chunk .t.forced").count() == 1


#: Whether so many runs are in the browser's database.
KEPT = """count => new Promise(done => {
  const asked = indexedDB.open("bridle-playground", 1)
  asked.onsuccess = () => {
    const counted = asked.result.transaction("runs").objectStore("runs").count()
    counted.onsuccess = () => { asked.result.close(); done(counted.result >= count) }
  }
})"""


def test_traces_are_saved_and_opened(page: Any, tmp_path: Path) -> None:
    complete(page)
    text = text_of(page)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save trace").click()
    path = tmp_path / "trace.jsonl"
    saved.value.save_as(path)
    (trace,) = parse(path.read_bytes())
    assert trace.header.model == "demo"
    page.get_by_label("Trace file").set_input_files(path)
    page.get_by_label("History").get_by_text("trace.jsonl").wait_for()
    assert text_of(page) == text
    path.write_text("no trace\n")
    page.get_by_label("Trace file").set_input_files(path)
    page.get_by_text("Line 1 is not JSON").wait_for()
    path.write_bytes(encode_trace(Trace(TraceHeader("runtime-1", runtime={"dialect": 2}))))
    page.get_by_label("Trace file").set_input_files(path)
    page.get_by_text("Line 1 begins the trace of a control runtime").wait_for()


def test_what_is_copied_does_the_same(browser: Any, url: str) -> None:
    with opened(browser, url, permissions=["clipboard-read", "clipboard-write"]) as page:
        complete(page, 'It\'s a "test": ')
        text = text_of(page)
        copied = {}
        for name in ("As curl", "As Python", "As JavaScript"):
            page.get_by_role("button", name="Copy").click()
            page.get_by_role("button", name=name).click()
            page.get_by_text("Copied").wait_for()
            copied[name] = page.evaluate("navigator.clipboard.readText()")
    options: Any = {"capture_output": True, "text": True, "check": True, "timeout": PATIENCE}
    curl = subprocess.run([*shlex.split(copied["As curl"].replace("\\\n", "")), "-sS"], **options).stdout
    assert json.loads(curl)["choices"][0]["text"] == text
    assert subprocess.run([sys.executable, "-c", copied["As Python"]], **options).stdout == text + "\n"
    assert "fetch(" in copied["As JavaScript"] and "It's a" in copied["As JavaScript"]


# -- keys, errors, hostile texts -----------------------------------------------------------------------------


def test_keys_are_asked_for_and_kept_for_the_session(browser: Any, tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    key = store.add("ann")
    registry = ModelRegistry([scripted_model(name="secret", next_token=saying("good day"))])
    with serving(registry, keys=store) as url, opened(browser, url) as page:
        page.get_by_text("an API key is needed").wait_for()
        assert "secret" not in page.content()
        page.locator("#key").fill("wrong")
        page.get_by_role("button", name="Use").click()
        page.get_by_text("the API key is not known here").wait_for()
        page.locator("#key").fill(key)
        page.get_by_role("button", name="Use").click()
        page.locator("#model option").get_by_text("secret").wait_for(state="attached")
        page.get_by_label("Message").fill("hi")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert text_of(page) == "good day"
        assert key not in page.evaluate("JSON.stringify(localStorage)")
        assert page.evaluate("sessionStorage.getItem('key')") == key


def test_a_server_that_is_gone_is_told_in_words(browser: Any) -> None:
    with served(scripted_model()) as url, opened(browser, url) as page:
        go(page, "Complete")
        page.get_by_label("Prompt").wait_for()
        page.context.set_offline(True)
        page.get_by_role("button", name="Generate").click()
        page.get_by_text("The server cannot be reached").wait_for()
        page.context.set_offline(False)
        page.get_by_role("tab", name="Settings").click()
        page.locator("input[name=temperature]").fill("-3")
        page.get_by_role("button", name="Generate").click()
        page.locator(".notice").get_by_text("temperature").wait_for()


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


def test_a_hostile_text_stays_text(browser: Any, tmp_path: Path) -> None:
    with served(scripted_model(next_token=saying(HOSTILE))) as url, opened(browser, url) as page:
        page.get_by_label("Message").fill(HOSTILE)
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Regenerate").wait_for()
        assert text_of(page) == HOSTILE
        page.reload()
        page.get_by_label("History").get_by_role("button", name=HOSTILE[:20]).first.click()
        page.locator(".message.assistant .said-text").wait_for()
        assert page.locator(".message.assistant .said-text").inner_text() == HOSTILE
        complete(page, HOSTILE)
        path = tmp_path / f"{HOSTILE.replace('/', '')[:60]}.jsonl"
        path.write_text(hostile_trace())
        page.get_by_label("Trace file").set_input_files(path)
        page.get_by_role("treeitem").first.wait_for()
        page.locator(".tokens > .chunk .t").first.click()
        page.locator("button.odd, .odd").first.wait_for()
        assert page.locator("img, b:has-text('bold'), main script").count() == 0
        assert HOSTILE in page.locator(".log").inner_text() and HOSTILE in text_of(page)


# -- looks ---------------------------------------------------------------------------------------------------

#: Where pictures for the documentation go, if anybody wants them.
PICTURES = os.environ.get("BRIDLE_PICTURES")
VIEWS = ("Chat", "Complete", "Steer", "Compare")


def picture(page: Any, name: str) -> None:
    """Take one, and reduce its colours, since it stands in the repository."""
    import io

    from PIL import Image

    data = page.screenshot(animations="disabled")
    assert len(data) > 5_000
    if PICTURES:
        image = Image.open(io.BytesIO(data)).convert("RGB").quantize(128, dither=Image.Dither.NONE)
        image.save(Path(PICTURES) / f"playground-{name}.png", optimize=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_theme_has_its_colours(browser: Any, url: str, scheme: Any) -> None:
    with opened(browser, url, color_scheme=scheme) as page:
        dark = "document.body && getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0] < 100"
        assert page.evaluate(dark) is (scheme == "dark")
        if scheme == "light":
            page.get_by_role("tab", name="Settings").click()
            page.locator("input[name=seed]").fill("5")
            steer(page, "JavaScript", "Taking back")
            settle(page)
            page.locator(".tokens .t.rewound").nth(2).click()
            picture(page, "steer")
        else:
            page.get_by_label("Message").fill("Tell me a short story.")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Regenerate").wait_for()
            page.get_by_role("button", name="Details").click()
            page.locator(".message.assistant .t").nth(8).click()
            picture(page, "chat")
        page.get_by_role("button", name="Theme").click()  # light
        assert page.evaluate(dark) is False
        page.get_by_role("button", name="Theme").click()
        assert page.evaluate(dark) is True


def test_it_fits_a_phone(browser: Any, url: str) -> None:
    with opened(browser, url, width=390, height=800, has_touch=True, is_mobile=True, device_scale_factor=2) as page:
        for view in VIEWS:
            go(page, view)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        complete(page)
        page.locator(".tokens > .chunk .t").nth(4).tap()
        page.locator(".panel.open .odd").first.wait_for()
        picture(page, "phone")
        page.get_by_role("button", name="Close details").tap()
        page.get_by_role("button", name="History").tap()
        page.locator(".sidebar.open").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_everything_that_can_be_pressed_has_a_name(page: Any) -> None:
    complete(page)
    steer(page, "JavaScript", "Forks that ask")
    settle(page)
    for view in VIEWS:
        go(page, view)
        for role in ("button", "combobox", "textbox", "tab", "slider"):
            found = page.get_by_role(role).evaluate_all(NAMES)  # at one moment: some come and go
            assert [html for name, html in found if not name.strip()] == []


NAMES = """elements => elements.filter(each => each.checkVisibility()).map(each => [
    each.ariaLabel || each.textContent || each.title ||
        [...(each.labels ?? [])].map(label => label.textContent).join(""),
    each.outerHTML])"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The rules of accessibility as a program, from the packages that the page is built with."""
    packages = WEB / "node_modules"
    if not (packages / "axe-core").is_dir():
        npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
        if npm is None:
            pytest.skip("no npm here")
        for name in ("package.json", "package-lock.json"):
            shutil.copy(WEB / name, folder)
        install = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        fetched = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
        if fetched.returncode != 0:
            pytest.skip(f"the packages cannot be fetched here: {fetched.stderr.strip()[-200:]}")
        packages = folder / "node_modules"
    return (packages / "axe-core/axe.min.js").read_text(encoding="utf-8")


#: What breaks a rule, and where.
BROKEN = """async () => (await axe.run(document, { resultTypes: ["violations"] })).violations.flatMap(
    rule => rule.nodes.map(node => `${rule.id}: ${rule.help}: ${node.html.slice(0, 200)}`))"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_view_breaks_a_rule_of_accessibility(browser: Any, axe: str, tmp_path: Path, scheme: Any) -> None:
    """Names, roles, contrasts, order of headings: what axe-core finds without a person."""
    path = tmp_path / "hostile.jsonl"
    path.write_text(hostile_trace())

    def check(what: str) -> None:
        assert page.evaluate(BROKEN) == [], what

    with served(scripted_model(next_token=saying("Good day to you."))) as url:
        with opened(browser, url, color_scheme=scheme) as page:
            page.evaluate(axe)
            check("an empty chat")
            page.get_by_label("Message").fill("hello")
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Regenerate").wait_for()
            page.get_by_role("button", name="Details").click()
            page.locator(".message.assistant .t").nth(2).click()
            check("a chat, and one of its tokens")
            go(page, "Complete")
            check("a prompt")
            complete(page)
            page.locator(".tokens > .chunk .t").nth(2).click()
            page.get_by_role("button", name="Copy").click()
            check("a text, one of its tokens, and a menu")
            page.get_by_label("Trace file").set_input_files(path)
            page.get_by_role("treeitem").first.wait_for()
            check("forks, variables, a log, what failed")
            page.get_by_label("Colours").select_option("probability")
            page.get_by_role("tab", name="Settings").click()
            check("probabilities, settings")
            page.get_by_label("Colours").select_option("origin")
            go(page, "Steer")
            page.locator(".editor .cm-content").wait_for()
            check("a program")
            go(page, "Compare")
            check("two runs")
        with opened(browser, url, color_scheme=scheme, width=390, height=800, has_touch=True, is_mobile=True) as page:
            page.evaluate(axe)
            complete(page)
            page.locator(".tokens > .chunk .t").nth(2).tap()
            page.locator(".panel.open .odd").first.wait_for()
            check("a phone, and the details of a token")


def test_sentences_are_told_as_they_come(browser: Any) -> None:
    """A screen reader gets whole sentences, once each, and the end; earlier content is not read."""
    said = "One fine day. It was late, and the sun had gone! Then nothing"
    with served(scripted_model(next_token=saying(said))) as url, opened(browser, url) as page:
        complete(page, "Tell")
        page.locator(".spoken p").get_by_text("End of the text.").wait_for(state="attached")
        told = page.locator(".spoken p").all_text_contents()
        assert "".join(told[:-1]) == said and told[-1] == "End of the text."
        assert all(re.search(r"[.!] $", each) for each in told[:-2])
        assert page.locator(".spoken").get_attribute("aria-live") == "polite"
        page.wait_for_function(KEPT, arg=1)
        page.reload()
        go(page, "Complete")
        page.get_by_label("History").get_by_role("button", name="Tell").first.click()
        page.locator(".tokens > .chunk .t").first.wait_for()
        assert page.locator(".spoken p").count() == 0


#: Lets a clock go on by a millisecond whenever it is looked at, and counts what is read or written as JSON in one task,
#: and the objects that the database copies at once.
BURSTS = """(() => {
  let now = 0
  performance.now = () => ++now
  window.bursts = { most: 0, total: 0, copied: 0 }
  let burst = 0
  for (const name of ["parse", "stringify"]) {
    const act = JSON[name]
    JSON[name] = (...given) => {
      bursts.most = Math.max(bursts.most, ++burst)
      bursts.total++
      return act(...given)
    }
  }
  const objects = value => typeof value !== "object" || value === null ? 0
    : Object.values(value).reduce((sum, each) => sum + objects(each), 1)
  const put = IDBObjectStore.prototype.put
  IDBObjectStore.prototype.put = function (value) {
    bursts.copied = Math.max(bursts.copied, objects(value))
    return put.call(this, value)
  }
  const { port1, port2 } = new MessageChannel()
  port1.onmessage = () => { burst = 0; port2.postMessage(null) }
  port2.postMessage(null)
})()"""


def answer_with(page: Any, num_tokens: int) -> None:
    """Let each completion have the given number of tokens, all of them at once."""
    odds = {"logprob": -0.7, "rank": 1, "top": [[1, -0.7], [2, -1.2]], "texts": [" dog", " cat"]}
    record = {"type": "token", "output": 0, "step": 1, "token": 1, "text": " dog", "spelled": " dog"}
    prompt = {"type": "prompt", "output": 0, "step": 1, "tokens": [7], "texts": ["Once"]}

    def event(trace: dict[str, Any]) -> str:
        choice = {"index": 0, "text": trace.get("text", ""), "trace": [trace], "finish_reason": None}
        return "data: " + json.dumps({"choices": [choice]}) + "\n\n"

    body = event(prompt) + event(record | {"draw": {"before": odds}}) * num_tokens + "data: [DONE]\n\n"
    page.route("**/v1/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_many_events_at_once_leave_the_page_to_its_reader(page: Any) -> None:
    """A page that fell behind finds thousands of events: it reads some, lets the browser work, and continues."""
    answer_with(page, 3000)
    go(page, "Complete")
    page.get_by_label("Prompt").wait_for()
    page.evaluate(BURSTS)
    page.get_by_label("Prompt").press("Control+Enter")
    settle(page)
    bursts = page.evaluate("bursts")
    assert bursts["total"] >= 3000
    assert bursts["most"] <= 100, bursts
    assert "3,000 tokens" in page.locator(".summary").inner_text()


def test_a_long_run_is_kept_and_brought_back_in_turns(page: Any) -> None:
    """A run of thousands of records, and a fork at its last token, which inherits as many: no task writes or reads more
    than some of them, the database copies next to no objects, and all is there again."""
    answer_with(page, 3000)
    page.add_init_script(BURSTS)
    page.reload()
    complete(page)
    page.wait_for_function(KEPT, arg=1)
    page.locator(".tokens > .chunk .t").nth(2999).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    page.wait_for_function(KEPT, arg=2)
    told = page.locator(".summary").inner_text()
    assert "6,000 tokens" in told and "per second" in told
    wrote = page.evaluate("bursts")
    assert wrote["total"] >= 2 * 3000 + 3000 + 6000  # events that were read; records, and pieces with records
    page.reload()
    go(page, "Complete")
    entries = page.get_by_label("History").locator("ul .open")
    entries.nth(1).wait_for()
    entries.first.click()
    page.locator(".ancestry").wait_for()
    assert page.locator(".summary").inner_text() == told
    assert page.locator(".tokens > .chunk .t").count() == 6000
    assert page.locator(".tokens > .chunk .t.forced").count() == 1
    brought = page.evaluate("bursts")
    assert brought["total"] >= 3000 + 6000
    assert max(wrote["most"], brought["most"]) <= 100, (wrote, brought)
    assert wrote["copied"] <= 30, wrote


#: Keeps a run as pages did that kept records as objects.
EARLIER = """records => new Promise(done => {
  const asked = indexedDB.open("bridle-playground", 1)
  asked.onsuccess = () => {
    const kept = { id: "1700000000000-1", made: 1700000000000, kind: "complete", title: "An earlier run", records,
      request: { path: "v1/completions", body: {} }, error: "", requestId: "", seconds: 0, firstToken: 0, program: null,
      header: null, ancestor: null }
    const change = asked.result.transaction("runs", "readwrite")
    change.objectStore("runs").put(kept)
    change.oncomplete = () => { asked.result.close(); done() }
  }
})"""


def test_a_run_that_an_earlier_page_kept_is_shown(page: Any) -> None:
    texts = ["One", " fine", " day"]
    page.evaluate(EARLIER, [{"type": "token", "output": 0, "step": 1, "token": 1, "text": text} for text in texts])
    page.reload()
    go(page, "Complete")
    page.get_by_label("History").get_by_role("button", name="An earlier run").click()
    settle(page)
    assert page.locator(".tokens > .chunk .t").all_text_contents() == texts


#: Counts pictures, long tasks, and what is put into the page.
WATCH = """() => {
  window.seen = { pictures: [], long: [], added: 0 }
  let last = performance.now()
  new PerformanceObserver(list => seen.long.push(...list.getEntries().map(each => each.duration)))
    .observe({ type: "longtask" })
  new MutationObserver(all => all.forEach(each => (seen.added += each.addedNodes.length)))
    .observe(document.querySelector("main"), { childList: true, subtree: true })
  const tick = now => {
    seen.pictures.push(now - last)
    last = now
    if (!seen.isOver) requestAnimationFrame(tick)
  }
  requestAnimationFrame(tick)
}"""
SEEN = """() => {
  seen.isOver = true
  const times = seen.pictures.sort((a, b) => a - b)
  const at = share => Math.round(times[Math.floor((times.length - 1) * share)])
  const long = Math.round(seen.long.reduce((a, b) => a + b, 0))
  return { added: seen.added, told: `${times.length} pictures, ${at(0.5)} ms in the median, ` +
    `${at(0.95)} ms for 95 of 100, ${at(1)} ms at worst, ${seen.long.length} tasks of more than 50 ms with ${long} ms` }
}"""


def test_64_outputs_stream_at_once(browser: Any) -> None:
    """10,000 tokens in 64 outputs, live. Times are printed, not judged. What is judged: a token of the shown output is
    put into the page once, an output into the tree once, and nothing is put there again."""
    word = tokenizer().encode(" dog", add_special_tokens=False)[0]
    with served(scripted_model(next_token=lambda prefix: word)) as url, opened(browser, url) as page:
        settings = json.dumps({"n": "64", "max_tokens": "156"})
        page.evaluate("settings => localStorage.setItem('bridle.sampling', settings)", settings)
        page.reload()
        go(page, "Complete")
        page.get_by_label("Prompt").wait_for()
        page.evaluate(WATCH)
        page.get_by_label("Prompt").press("Control+Enter")
        settle(page)
        seen = page.evaluate(SEEN)
        print(seen["told"])
        assert page.get_by_role("treeitem").count() == 64
        assert "9,984 tokens" in page.locator(".summary").inner_text()
        assert 156 <= seen["added"] <= 156 + 64 + 100


def long_trace(num_tokens: int = 10_000, num_forks: int = 64) -> str:
    odds = {"logprob": -0.7, "rank": 1, "top": [[5, -0.7], [6, -1.2]], "texts": [" one", " two"]}
    cost = {"num_rows": 64, "num_tokens": 64, "forward": 0.01, "wait": 0.0, "sample": 0.001}
    lines: list[dict[str, Any]] = [
        {"type": "header", "version": 1, "request_id": "long", "model": "demo"},
        {"type": "prompt", "output": 0, "step": 1, "tokens": [1], "texts": ["Once"]},
    ]

    def token(output: int, at: int) -> dict[str, Any]:
        text = " word\n" if at % 40 == 39 else f" w{at}"
        return {"type": "token", "output": output, "step": at, "at": at, "token": 5, "text": text, "spelled": text,
                "draw": {"before": odds}, "cost": cost}  # fmt: skip

    lines += [token(0, at) for at in range(num_tokens)]
    for fork in range(1, num_forks):
        lines.append({"type": "fork", "output": fork, "step": num_tokens, "parent": 0, "num_tokens": num_tokens})
        lines += [token(fork, num_tokens + at) for at in range(20)]
        lines.append({"type": "end", "output": fork, "step": num_tokens + 20, "reason": "stop"})
    return "".join(json.dumps(line) + "\n" for line in lines)


#: Scrolls the text from its beginning to its end, and says how long the pictures in between took.
SCROLL = """async () => {
  const box = document.querySelector(".page"), times = []
  let last = performance.now()
  for (let step = 0; step <= 60; step++) {
    box.scrollTop = (box.scrollHeight - box.clientHeight) * step / 60
    await new Promise(requestAnimationFrame)
    times.push(performance.now() - last)
    last = performance.now()
  }
  times.sort((a, b) => a - b)
  return { median: times[30], worst: times[60] }
}"""


def test_long_texts_with_many_forks_are_shown(browser: Any, url: str, tmp_path: Path) -> None:
    """Times are printed, not judged: machines differ. That most of a long text is not drawn, being out of sight, is."""
    path = tmp_path / "long.jsonl"
    path.write_text(long_trace())
    with opened(browser, url) as page:
        began = page.evaluate("performance.now()")
        page.get_by_label("Trace file").set_input_files(path)
        page.locator(".tokens .t").nth(10_000).wait_for(state="attached")
        opening = page.evaluate("performance.now()") - began
        assert page.get_by_role("treeitem").count() == 64
        scrolled = page.evaluate(SCROLL)
        began = page.evaluate("performance.now()")
        page.get_by_role("treeitem").nth(63).click()
        page.locator(".tokens .t").nth(10_020).wait_for(state="attached")
        switching = page.evaluate("performance.now()") - began
        drawn = page.evaluate(
            "[...document.querySelectorAll('.chunk.block')].filter(each => each.querySelector('.t').checkVisibility("
            "{ contentVisibilityAuto: true })).length"
        )
        chunks = page.locator(".chunk.block").count()
        assert chunks > 100 and 0 < drawn < chunks / 4
        print(
            f"opened in {opening:.0f} ms, another fork in {switching:.0f} ms, scrolled at {scrolled}, {drawn}/{chunks}"
        )
