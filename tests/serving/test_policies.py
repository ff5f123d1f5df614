"""Tests of policies files: errors name file, policy, key and value. The tests also check the policies of a request, and
the engine's form of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bridle.controllers import Controller, SequenceView
from bridle.controllers.composition import MAX_CONTROLLERS, Composed, user_controllers
from bridle.controllers.thinking import ThinkingBudget
from bridle.engine.control.decision import Decision, mask_allows, mask_of
from bridle.errors import InvalidRequest
from bridle.outputs import FinishReason
from bridle.sampling import SamplingParams
from bridle.serving import OutputCollector, build_request
from bridle.serving.policies import PolicyContext, PolicyRegistry, PolicySet, read_policies
from bridle.serving.tenancy.keys import Identity
from bridle.structured_output import Regex
from tests.http.harness import saying, scripted_model, tokenizer
from tests.sources import ROOT

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"kind": "phrases"}, "policy 1: name is None"),
    ({"name": "a b", "kind": "phrases"}, "name is 'a b'"),
    ({"name": "a"}, "policy 'a': kind is missing"),
    ({"name": "a", "kind": "spell"}, "policy 'a': kind is 'spell'; must be one of phrases"),
    ({"name": "a", "kind": "phrases"}, "policy 'a': phrases is missing"),
    ({"name": "a", "kind": "phrases", "phrases": []}, "phrases is []"),
    ({"name": "a", "kind": "phrases", "phrases": ["\u200b"]}, "phrases is"),
    ({"name": "a", "kind": "phrases", "phrases": ["x"], "colour": 1}, "colour is not a setting"),
    ({"name": "a", "kind": "phrases", "phrases": ["x"], "order": "b"}, "order is 'b'; must be an integer"),
    ({"name": "a", "kind": "phrases", "phrases": ["x"], "on_failure": "b"}, "on_failure is 'b'; must be one of end"),
    ({"name": "a", "kind": "phrases", "phrases": ["x"], "replacement": "y"}, "replacement goes with"),
    ({"name": "a", "kind": "phrases", "phrases": ["x"], "models": "y"}, "models is 'y'"),
    ({"name": "a", "kind": "pattern", "pattern": "("}, "pattern is not a valid pattern"),
    ({"name": "a", "kind": "pattern", "pattern": "x*"}, "pattern matches the empty text"),
    ({"name": "a", "kind": "pattern", "pattern": "x", "action": "replace", "replacement": "xx"}, "replacement is 'xx'"),
    ({"name": "a", "kind": "redact", "what": ["face"]}, "what is 'face'"),
    ({"name": "a", "kind": "length"}, "max_tokens is missing"),
    ({"name": "a", "kind": "length", "max_tokens": 0}, "max_tokens is 0"),
    ({"name": "a", "kind": "characters", "allowed": "z-a"}, "allowed is not a valid pattern"),
    ({"name": "a", "kind": "constraint", "constraint": {"regxe": "a"}}, "constraint cannot be used"),
    ({"name": "a", "kind": "thinking"}, "max_tokens is missing"),
    ({"name": "a", "kind": "wasm", "module": "latest"}, "module is 'latest'"),
    ({"name": "a", "kind": "python", "class": "nowhere:Nothing"}, "class cannot be used"),
    ({"name": "a", "kind": "watermark"}, "key_file is missing; must be a text"),
    ({"name": "a", "kind": "watermark", "key_file": "/none"}, "key_file cannot be used"),
    ({"name": "a", "kind": "loops", "times": 1}, "times is 1; must be between 2"),
]


@pytest.mark.parametrize(("table", "what"), MISTAKES, ids=[what for _, what in MISTAKES])
def test_a_mistake_is_told_by_its_place(table: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_policies({"policy": [table]})
    assert what in str(caught.value) and str(caught.value).startswith("policies: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    for text, what in (
        ("[[policy", "not a valid TOML file"),
        ("colour = 1", "'colour' is not a setting"),
        ("header = 1", "header is 1"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidRequest, match=what) as caught:
            read_policies(path)
        assert str(path) in str(caught.value)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_policies(tmp_path / "none.toml")
    twice = {"name": "a", "kind": "loops"}
    with pytest.raises(InvalidRequest, match="two policies have the name 'a'"):
        read_policies({"policy": [twice, twice]})


def test_a_mistake_in_a_file_that_is_read_again_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[[policy]]\nname = "a"\nkind = "loops"', encoding="utf-8")
    book = PolicyRegistry(path)
    before = book.current
    path.write_text("[[policy]]", encoding="utf-8")
    with pytest.raises(InvalidRequest):
        book.reload()
    assert book.current is before and book.error is not None
    path.write_text('[[policy]]\nname = "b"\nkind = "loops"', encoding="utf-8")
    assert [policy.name for policy in book.reload().policies] == ["b"] and book.error is None


def test_the_example_can_be_read() -> None:
    names = [policy.name for policy in read_policies(ROOT / "examples" / "policies.toml").policies]
    assert names[0] == "secrets" and names[-1] == "thoughts"


def test_a_policy_holds_for_whom_it_names() -> None:
    loops = {"kind": "loops"}
    tables = [
        {"name": "all", **loops, "order": 5},
        {"name": "model", **loops, "models": ["script*"], "routes": ["/v1/*"]},
        {"name": "users", **loops, "roles": ["user"], "users": ["ann", "b*"]},
        {"name": "lmtp", **loops, "routes": ["lmtp"], "adapters": ["french"]},
    ]
    policies = read_policies({"policy": tables}).policies

    def chosen(user: Identity, route: str, adapter: str | None = None) -> list[str]:
        asking = PolicyContext.of("scripted", adapter, user, route)
        return [policy.name for policy in policies if policy.applies(asking)]

    assert chosen(Identity("root", True), "POST /v1/run") == ["model", "all"]
    assert chosen(Identity("ann", False), "LMTP GENERATE", "french") == ["users", "lmtp", "all"]
    assert chosen(Identity("eve", False), "POST /generate") == ["all"]
    assert chosen(Identity("bob", False), "llm") == ["users", "all"]


class Forces(Controller):
    max_rewind = 0

    def __init__(self, text: str) -> None:
        self.tokens = tokenizer().encode(text, add_special_tokens=False)

    def next(self, view: SequenceView) -> Decision:
        done = len(view.generated)
        return Decision.splice(0, self.tokens[done : done + 1]) if done < len(self.tokens) else Decision.stop()


class Writes(Forces):
    """A controller that writes the text in one splice, and then logs the text that it sees."""

    def next(self, view: SequenceView) -> Decision:
        if view.generated:
            view.log(tokenizer().decode(view.generated))
            return Decision.stop()
        return Decision.splice(0, self.tokens)


class Idle(Controller):
    """An operator's policy class that allows everything."""

    max_rewind = 0


class Only(Controller):
    """An operator's policy class that allows only certain tokens."""

    max_rewind = 0

    def __init__(self, text: str = "xyz") -> None:
        self.tokens = tokenizer().encode(text, add_special_tokens=False)

    def next(self, view: SequenceView) -> Decision:
        return Decision.sample(mask_of(self.tokens, view.vocab_size))


class Broken(Only):
    def next(self, view: SequenceView) -> Decision:
        raise RuntimeError("what it wants is secret")


class Unmade(Only):
    def start(self, prompt: tuple[int, ...]) -> None:
        raise RuntimeError("what it wants is secret")


def run(*tables: dict[str, Any], controller: Any = None, reply: str = "hello there", **fields: Any) -> Any:
    """Return the output of one request with these policies."""
    model = scripted_model(next_token=saying(reply))
    try:
        policies: PolicySet = read_policies({"policy": list(tables)})
        applied = policies.select(PolicyContext(model.name), model)
        sampling = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **fields})
        request = build_request(model, "Say", sampling, controller=controller, policies=applied)
        collector = OutputCollector(request, "Say")
        for batch in model.client.submit(request):
            collector.add(batch)
        return collector.output.outputs[0]
    finally:
        model.close()


def python(name: str, **more: Any) -> dict[str, Any]:
    return {"name": "mine", "kind": "python", "class": f"{__name__}:{name}", **more}


def test_an_operators_class_holds_for_what_is_drawn_and_what_is_forced() -> None:
    assert set(run(python("Only"), max_tokens=9).text) <= set("xyz")
    output = run(python("Only"), controller=Forces("xya"))
    assert output.error is not None and output.text == "xy"
    assert "policy mine and controller 1 (forces) cannot be reconciled at position" in str(output.error)
    assert "token" not in str(output.error)


@pytest.mark.parametrize("name", ["Broken", "Unmade"])
def test_a_policy_that_fails_ends_the_output_unless_it_may_be_left_out(name: str) -> None:
    output = run(python(name))
    assert output.text == "" and str(output.error) == "policy mine failed"
    assert run(python(name, on_failure="skip")).text == "hello there"
    assert run(python(name, on_failure="skip"), controller=Forces("abc")).text == "abc"


def test_demanded_controllers_do_not_count_among_a_users() -> None:
    many = [Forces("ab") for _ in range(MAX_CONTROLLERS)]
    from bridle.controllers.composition import compose

    output = run(python("Only", argument="ab"), controller=compose(*many))
    assert output.text == "ab" and output.error is None


def test_what_a_request_brought_is_told_apart() -> None:
    mine = Forces("a")
    model = scripted_model()
    applied = read_policies({"policy": [python("Only")]}).select(PolicyContext(model.name), model)
    request = build_request(model, "Say", SamplingParams(), controller=mine, policies=applied)
    model.close()
    assert isinstance(request.controller, Composed) and user_controllers(request.controller) is mine
    assert request.controller.names == ["policy mine", "forces"]


def test_lengths_and_loops_end_outputs() -> None:
    short = run({"name": "a", "kind": "length", "max_tokens": 3}, max_tokens=40)
    assert len(short.token_ids) == 3 and short.finish_reason is FinishReason.LENGTH
    chars = run({"name": "a", "kind": "length", "max_chars": 5})
    assert chars.finish_reason is FinishReason.LENGTH and 5 <= len(chars.text) <= 8
    work = run({"name": "a", "kind": "length", "max_work": 4})
    assert work.finish_reason is FinishReason.LENGTH and len(work.token_ids) == 4
    loop = run({"name": "a", "kind": "loops", "times": 4, "min_total": 8}, controller=Forces("x" + "ab" * 20))
    assert loop.text == "xabababab" and loop.finish_reason is FinishReason.CONTROLLER


def test_a_constraint_holds_beside_what_a_request_brings() -> None:
    form = {"name": "a", "kind": "constraint", "constraint": {"regex": "[0-9]{3}"}}
    assert run(form).text.isdigit() and len(run(form).text) == 3
    assert run(form, controller=Forces("123")).text == "123"
    assert run(form, controller=Forces("abc")).error is not None


FRUIT = {"name": "fruit", "kind": "phrases", "phrases": ["red apple"], "action": "replace", "replacement": "[fruit]"}


def test_what_a_policy_puts_in_place_has_to_fit_a_constraint() -> None:
    form = Regex("One (red apple|.fruit.) and two pears")
    output = run(FRUIT, controller=form, reply="One red apple and two pears")
    assert output.text == "One [fruit] and two pears" and output.error is None
    output = run(FRUIT, controller=Regex("One red apple and two pears"))
    told = str(output.error)
    assert told.startswith("constraint: got a regex; the text that policy fruit inserts must fit it, but token")
    assert "'[" in told and "after" not in told and told.endswith("or leave out what the policy replaces.")
    beside = run(FRUIT, python("Idle"), controller=Regex("One red apple and two pears"))
    assert "controller 1 (regex): constraint: got a regex; the text that policy fruit inserts" in str(beside.error)


@pytest.mark.parametrize("count", [1, 6])
def test_a_script_beside_others_writes_all_but_the_match(count: int) -> None:
    text = "One red apple and two green pears. " * count
    output = run(FRUIT, python("Idle"), controller=Writes(text), max_tokens=500)
    assert (
        output.error is None
        and output.text == text.replace("red apple", "[fruit]")
        and output.logs == output.text + "\n"
    )


def test_characters_are_masked_ahead_and_held_to_when_forced() -> None:
    table = {"name": "a", "kind": "characters", "allowed": "a-h"}
    output = run(table, max_tokens=12, ignore_eos=True)
    assert output.error is None and len(output.token_ids) == 12 and set(output.text) <= set("abcdefgh")
    forced = run(table, controller=Forces("abz"))
    assert forced.text == "ab" and "policy a forbids what is forced" in str(forced.error)
    model = scripted_model()
    guard = read_policies({"policy": [table]}).select(PolicyContext(model.name), model).guard
    model.close()
    assert guard is not None and guard.allowed is not None
    (token,) = tokenizer().encode("z", add_special_tokens=False)
    assert not mask_allows(guard.allowed, token)


def test_thoughts_are_closed_when_their_budget_is_used_up() -> None:
    budget = ThinkingBudget(opening=1, closing=2, budget=2)
    view = SequenceView([5, 1], 2, 8)
    assert budget.next(view) == Decision.sample()
    view.tokens += [6, 7]
    assert budget.next(view) == Decision.splice(0, (2,))
    view.tokens += [2]
    (branch,) = budget.next(view).branches
    assert branch.mask is not None and not mask_allows(branch.mask, 1) and mask_allows(branch.mask, 2)


def test_beam_search_is_refused() -> None:
    from bridle.controllers.beams import BeamSearch

    with pytest.raises(InvalidRequest, match="policies apply"):
        run({"name": "a", "kind": "redact"}, controller=BeamSearch(2, 8))
