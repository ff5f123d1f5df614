"""Tests that the playground streams, stores and shows long runs in small parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.http.browser import opened
from tests.http.harness import scripted_model, served, tokenizer
from tests.http.playground_kit import MARKS, answer_with, complete, go, settle, until_kept

pytestmark = MARKS


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
  // A message begins a task. Browsers do not promise the order of messages of two channels: watch the page's own.
  const { set } = Object.getOwnPropertyDescriptor(MessagePort.prototype, "onmessage")
  Object.defineProperty(MessagePort.prototype, "onmessage", {
    set(act) {
      set.call(this, event => {
        burst = 0
        act.call(this, event)
      })
    },
  })
})()"""


def test_many_events_at_once_leave_the_page_to_its_reader(page: Any) -> None:
    """A page with thousands of waiting events reads some of them, lets the browser work, and continues."""
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
    """Store a run of thousands of records, and a fork at its last token that shares these records. No browser task
    writes or reads more than a few records, and the database copies almost no objects. After a reload, all records are
    present."""
    answer_with(page, 3000)
    page.add_init_script(BURSTS)
    page.reload()
    complete(page)
    until_kept(page, 1)
    page.locator(".tokens > .chunk .t").nth(2999).click()
    page.locator("button.odd").first.click()
    page.locator(".ancestry").wait_for()
    settle(page)
    until_kept(page, 2)
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
  const asked = indexedDB.open("bridle-playground")
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
    """The page shows a stream of 10,000 tokens in 64 outputs. Times are printed, but not asserted. The test asserts
    that each token of the shown output and each output in the tree is added to the page exactly once."""
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


#: Scrolls the text from its beginning to its end as a wheel does, a part of a screen per frame, and says how long the
#: frames took.
SCROLL = """async num => {
  const box = document.querySelector(".page"), times = []
  box.scrollTop = 0
  await new Promise(requestAnimationFrame)
  let last = await new Promise(requestAnimationFrame)
  for (let step = 1; step <= num; step++) {
    box.scrollTop = (box.scrollHeight - box.clientHeight) * step / num
    const now = await new Promise(requestAnimationFrame)
    times.push(now - last)
    last = now
  }
  times.sort((a, b) => a - b)
  const at = share => Math.round(times[Math.floor((num - 1) * share)])
  return { median: at(0.5), p95: at(0.95), worst: at(1) }
}"""
#: Frames of the way through the text.
NUM_FRAMES = 300


def test_long_texts_with_many_forks_are_shown(browser: Any, playground_url: str, tmp_path: Path) -> None:
    """Times are printed but not asserted, because machines differ. The test asserts that the browser does not draw the
    invisible part of a long text."""
    path = tmp_path / "long.jsonl"
    path.write_text(long_trace())
    with opened(browser, playground_url) as page:
        began = page.evaluate("performance.now()")
        page.get_by_label("Trace file").set_input_files(path)
        page.locator(".tokens .t").nth(10_000).wait_for(state="attached")
        opening = page.evaluate("performance.now()") - began
        assert page.get_by_role("treeitem").count() == 64
        assert page.evaluate("document.querySelectorAll('*').length") < 10_000 + 64 * 8 + 1_000  # one fork is drawn
        scrolled = page.evaluate(SCROLL, NUM_FRAMES)
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
            f"opened in {opening:.0f} ms, another fork in {switching:.0f} ms, ms per frame {scrolled}, {drawn}/{chunks}"
        )
