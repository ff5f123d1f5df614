"""Tests of steps that a script defines, in both versions of AICI's interface, of forks, and of waits for variables and
times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.outputs import Finished
from tests.aici.conftest import EOS, VOCAB_SIZE, tokenizer  # noqa: F401 -- a fixture
from tests.controllers.conftest import Run, named
from tests.controllers.pykit import PRELUDE, script
from tests.sources import ROOT

PAGE = (ROOT / "docs" / "scripts-python.md").read_text(encoding="utf-8")


def test_what_the_page_shows_runs(py: Run) -> None:
    question, chat, vowel = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    compile(chat, "chat", "exec")  # such scripts run in test_script_chats.py, with a template
    asked = py(question, "Q: Is Paris the capital of France?\nA: Yes")
    assert asked.error() == "" and asked.text().endswith("A: Yes") and "the model says  Yes\n" in asked.logs("a")
    ending = "async def main():\n    await Vowel()\n\n\naici.start(main())\n"
    ran = py(f"import pyaici.server as aici\n\n{vowel}\n\n{ending}", "Q: e", prompt="Q: ")
    assert ran.error() == "" and ran.text() in set("aeiou") and "wrote" in ran.logs("a")


def test_a_step_of_the_second_generation(py: Run) -> None:
    ran = py(
        script(
            """
class Vowels(aici.NextToken):
    def mid_process(self):
        allowed = aici.TokenSet()
        for vowel in b"aeiou":
            allowed[vowel] = True
        return aici.MidProcessResult.bias(allowed)
    def post_process(self, backtrack, tokens):
        print(backtrack, tokens, len(self.fork_group))

vowel = Vowels()
assert await vowel == [101], vowel.curr_tokens
assert await vowel == [97] and not vowel.finished
anything = await aici.NextToken()
assert anything == [98], anything
"""
        ),
        "Q: eab",
        prompt="Q: ",
    )
    assert (ran.error(), ran.text(), ran.logs("a")) == ("", "eab", "0 [101] 1\n0 [97] 1\n")


def test_a_step_of_the_first_generation(py: Run) -> None:
    """A step of the first version is called before, during and after sampling, gets its tokens, and ends the output
    itself."""
    ran = py(
        script(
            """
class Old(aici.NextToken):
    asked = 0
    def pre_process(self):
        self.asked += 1
        print("pre", self.asked)
        return aici.PreProcessResult.suspend() if self.asked < 3 else aici.PreProcessResult.continue_()
    def mid_process(self):
        return aici.MidProcessResult.splice(1, tokens=aici.tokenize("xy"))
    def post_process(self, tokens):
        print("post", tokens)
        return aici.PostProcessResult.continue_()

class Forced(aici.PreToken):
    def pre_process(self):
        return aici.PreProcessResult.ff_tokens_pre(aici.tokenize("!"))

class Last(aici.NextToken):
    def mid_process(self):
        only = aici.TokenSet()
        only[aici.eos_token()] = True
        return aici.MidProcessResult.bias(only)
    def post_process(self, tokens):
        return aici.PostProcessResult.from_tokens(tokens)

await aici.FixedTokens("ab")
assert await Old() == [120, 121]
assert await Forced() == [33]
await Last()
print("never")
"""
        )
    )
    assert ran.error() == ""
    assert ran.tokens("a") == [*b"axy!", EOS]
    assert ran.logs("a").splitlines() == ["FIXED 'ab'", "pre 1", "pre 2", "pre 3", "post [120, 121]"]


def test_forks_of_the_first_generation(py: Run) -> None:
    ran = py(
        script(
            """
class Split(aici.PreToken):
    def pre_process(self):
        return aici.PreProcessResult.fork(2)

class SplitDraw(aici.NextToken):
    def pre_process(self):
        return aici.PreProcessResult.fork(2)
    def mid_process(self):
        number = self.fork_group.index(aici.self_seq_id())
        return aici.MidProcessResult.splice(0, aici.tokenize("uv"[number]))

split = Split()
await split
await aici.FixedTokens(str(split.fork_group.index(aici.self_seq_id())))
await SplitDraw()
"""
        )
    )
    assert sorted(ran.text(index=i) for i in range(4)) == ["0u", "0v", "1u", "1v"]


def test_callbacks_need_no_coroutine(py: Run) -> None:
    ran = py(
        f"""{PRELUDE}
class Two(aici.AiciCallbacks):
    def init_prompt(self, prompt):
        self.seen = [len(prompt)]
    def mid_process(self, fork_group):
        if len(self.seen) == 3:
            return aici.MidProcessResult.stop()
        return aici.MidProcessResult([aici.Branch(aici.all_tokens())])
    def post_process(self, backtrack, tokens):
        self.seen.append(tokens)
        print(self.seen)

aici.register(Two())
""",
        "Q: yes",
        prompt="Q: ",
    )
    assert (ran.error(), ran.text(), ran.logs("a")) == ("", "ye", "[4, [121]]\n[4, [121], [101]]\n")


def test_noops_skips_and_conditional_splices_have_names(py: Run) -> None:
    """A step's answer may do nothing, skip a sample, or splice tokens depending on the sampled token."""
    ran = py(
        script(
            """
class Answers(aici.NextToken):
    def __init__(self, result):
        super().__init__()
        self.result = result
    def mid_process(self):
        return self.result

assert await Answers(aici.MidProcessResult.noop()) == []
assert await Answers(aici.MidProcessResult.skip()) == []
await aici.Noop()
swap = aici.Splice(when_sampled=[121], backtrack=1, ff_tokens=[89])
assert await Answers(aici.MidProcessResult([aici.Branch(aici.all_tokens(), [swap])])) == [89]
kept = aici.Splice(when_sampled=[1], backtrack=1, ff_tokens=[2])
assert await Answers(aici.MidProcessResult([aici.Branch(aici.all_tokens(), [kept])])) == [101]
assert await Answers(aici.MidProcessResult.bias(aici.all_tokens(), temperature=0.1)) == [115]
empty = aici.TokenSet()
constrained = aici.ConstrainedToken(lambda: aici.ChooseConstraint(["ab"]))
assert await constrained == [97] and not constrained.finished
assert await constrained == [98] and constrained.finished
await aici.StopToken()
print("never")
"""
        ),
        "Q: yes. es Yes",
        prompt="Q: ",
    )
    assert (ran.error(), ran.text(), ran.logs("a")) == ("", "Yesab", "")


def test_a_step_that_claims_to_be_fixed_and_is_not(py: Run) -> None:
    """Texts that the script forced earlier are written before a step that wrongly claims to be fixed."""
    ran = py(
        script(
            """
class Claims(aici.NextToken):
    def is_fixed(self):
        return True
    def mid_process(self):
        digits = aici.TokenSet()
        aici.RegexConstraint("[0-9]").allow_tokens(digits)
        return aici.MidProcessResult.bias(digits)

await aici.FixedTokens("ab")
assert await Claims() == [ord("7")]
await aici.FixedTokens("c")
"""
        ),
        "ab7",
    )
    assert (ran.error(), ran.text()) == ("", "ab7c")


def test_a_constraint_of_ones_own_that_allows_nothing(py: Run) -> None:
    ran = py(
        script(
            """
class Nothing(aici.Constraint):
    def allow_tokens(self, token_set):
        token_set.set_all(False)

step = aici.ConstrainedToken(lambda: Nothing())
assert await step == [aici.eos_token()] and step.finished
"""
        )
    )
    assert ran.error() == "" and "doesn't allow any tokens; adding EOS" in ran.logs("a")


def test_a_set_is_kept_beyond_its_step(py: Run) -> None:
    """A script can read a constraint's allowed tokens in later steps, after the engine has freed the step's mask."""
    ran = py(
        script(
            """
digits = aici.RegexConstraint("[0-9]+")
kept = aici.TokenSet()
digits.allow_tokens(kept)
await aici.gen_text(max_tokens=2)
assert kept[ord("7")] and not kept[ord("x")] and kept.num_set() == 10
"""
        ),
        "Q: ab",
        prompt="Q: ",
    )
    assert (ran.error(), ran.text()) == ("", "ab")


# -- forks and waiting -------------------------------------------------------------------------------------


def test_forks_share_variables_and_wait_for_each_other(py: Run) -> None:
    ran = py(
        script(
            """
number = await aici.fork(3)
await aici.FixedTokens(f"{number}:")
word = await aici.gen_text(max_tokens=1)
if number == 0:
    words = await aici.wait_vars("w1", "w2")
    aici.set_var("all", word.encode() + b"".join(words))
else:
    await aici.Noop()
    aici.set_var(f"w{number}", word)
""",
            call="test",
        ),
        "Q: 0:a",
        "Q: 1:b",
        "Q: 2:c",
        prompt="Q: ",
    )
    assert [ran.text(index=i) for i in range(3)] == ["0:a", "1:b", "2:c"]
    assert ran.variables()["all"] == b"abc"
    assert all(ran.logs("a", i).endswith("TEST OK\n") for i in range(3))


def test_forks_by_branches_and_forks_of_forks(py: Run) -> None:
    ran = py(
        script(
            """
import random
texts = ["x", "y"]
first = await aici.fork([aici.Branch(splices=[aici.Splice(ff_tokens=aici.tokenize(t))]) for t in texts])
second = await aici.fork(2)
await aici.FixedTokens(f"{first}{second}")
aici.append_var("dice", f"{random.random()} ")
"""
        )
    )
    assert sorted(ran.text(index=i) for i in range(4)) == ["x00", "x01", "y10", "y11"]
    assert len(set(ran.variables()["dice"].split())) == 4


def test_too_many_forks_are_refused_one_by_one(py: Run) -> None:
    ran = py(script("await aici.fork(20)"))
    refused = [error for error in (ran.error(index=index) for index in range(20)) if error]
    assert len(refused) == 4 and all("16" in error and "fork" in error for error in refused)  # the others go on
    assert "at least one" in py(script("await aici.fork(0)")).error()


def test_waiting_for_what_nobody_sets(py: Run) -> None:
    ran = py(script("await aici.wait_vars('never')"))
    assert ran.error() and all(end.reason.value == "error" for end in ran.events["a"] if isinstance(end, Finished))


def test_waiting_with_a_deadline(py: Run) -> None:
    ran = py(
        script(
            """
await aici.sleep(0.01)
aici.set_var("there", "yes")
assert await aici.wait_vars("there", timeout=60) == [b"yes"]
try:
    await aici.wait_vars("never", timeout=0.01)
except TimeoutError as error:
    print(error)
""",
            call="test",
        )
    )
    assert ran.error() == ""
    assert ran.logs("a") == "variable 'never' was not set within 0.01 seconds\nTEST OK\n"


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_waiting_for_no_sensible_time(py: Run, seconds: float) -> None:
    assert "wait" in py(script(f"await aici.sleep(float('{seconds}'))")).error()


# -- an engine of the first generation ---------------------------------------------------------------------


def test_under_an_engine_of_the_first_generation(tokenizer: Path, py_store: Path) -> None:  # noqa: F811
    """Scripts run also under the first version of the protocol, which calls a controller in three phases."""
    times = ("--wasm-max-step-time", "2000", "--wasm-max-pre-step-time", "2000")
    limits = ("max_prepare_wait=800000", "max_init_time=10000")
    args = ("--store", str(py_store), *times, *(word for limit in limits for word in ("--limit", limit)))
    pool = RuntimePool(RuntimeConfig(str(tokenizer), dialect=1, extra_args=args), VOCAB_SIZE)
    try:
        body = """
await aici.FixedTokens("Q: ")
place = aici.Label()
await aici.gen_text(max_tokens=9)
await aici.FixedTokens("no", following=place)
number = await aici.fork(2)
await aici.gen_text(options=[["a", "b"], ["c"]][number])
"""
        ran = named(pool, "pyctrl")(script(body, call="test"), "Q: yes", "nob")
        assert [ran.text(index=i) for i in range(2)] == ["Q: nob", "Q: noc"], ran.error()
    finally:
        pool.shutdown()
