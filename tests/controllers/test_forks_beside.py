"""Tests that each of two scripts that fork at the same time learns its own branch number."""

from __future__ import annotations

import re

from bridle import LLM, WasmController

FORKS = """await $`A: `
const n = await fork(3)
await $`${["cat", "dog", "bird"][n]}`
console.log("branch" + n)
"""
#: Lets everything through, and notes its number among the branches of each fork.
FOLLOWS = """import { MidProcessResult, NextToken, selfSeqId, start } from "aici"

class Follow extends NextToken {
  midProcess() {
    return MidProcessResult.sample({ mask: "any" })
  }
  postProcess(backtrack, tokens, told) {
    if (told.fork_group.length > 1) console.log("seen" + told.fork_group.indexOf(selfSeqId()))
  }
}
start(async () => {
  for (;;) await new Follow().run()
})
"""


def test_each_script_learns_its_branch() -> None:
    scripts = [WasmController("jsctrl", FORKS), WasmController("jsctrl", FOLLOWS)]
    with LLM("demo", control=True, num_blocks=256) as llm:
        for controllers in (scripts, scripts[::-1]):
            output = llm.generate("x", controllers=controllers, seed=1)[0]
            logs = "".join(each.logs for each in output.outputs)
            assert set(re.findall(r"(?:branch|seen)-?\d", logs)) == {
                f"{word}{n}" for word in ("branch", "seen") for n in range(3)
            }
            assert sorted(each.text.split()[-1] for each in output.outputs) == ["bird", "cat", "dog"]
