"""Tests of two runs side by side in the playground, and of traces as files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bridle.traces import Trace, TraceHeader, encode_trace, parse
from tests.http.browser import opened
from tests.http.playground_kit import MARKS, complete, settle, steer, text_of
from tests.waiting import until

pytestmark = MARKS


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
    """Pretend that the model has adapters, because only the sent request is tested."""
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


def copied_link(page: Any, kind: str) -> str:
    """Copy a link to the program or the trace. Wait until the clipboard has the new link, because it may still have the
    other link."""
    page.get_by_role("button", name="Copy", exact=False).first.click()
    page.get_by_role("button", name=f"Link to the {kind}").click()
    page.get_by_text("Copied").wait_for()

    def link() -> str | None:
        text: str = page.evaluate("navigator.clipboard.readText()")
        return text if f"#{kind}=" in text else None

    return until(link, f"the link to the {kind}") or ""


def test_links_carry_programs_and_traces(browser: Any, playground_url: str) -> None:
    """Another browser opens both links. The program is shown but does not run, and the trace is shown token by
    token."""
    with opened(browser, playground_url, permissions=["clipboard-read", "clipboard-write"]) as page:
        steer(page, "Regex", "A telephone number")
        settle(page)
        text = text_of(page)
        links = [copied_link(page, kind) for kind in ("program", "trace")]
    with opened(browser, playground_url) as page:
        page.goto(links[0])
        page.locator(".editor .cm-content").get_by_text("[0-9]{3}-[0-9]{4}").wait_for()
        assert page.locator(".run").count() == 0
        page.goto("about:blank")
        page.goto(links[1])
        settle(page)
        assert text_of(page) == text
        page.goto("about:blank")
        page.goto(links[1][:-9])
        page.get_by_text("The link cannot be read").wait_for()
