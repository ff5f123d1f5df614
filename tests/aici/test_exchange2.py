"""Tests of dialect 2: its rules and its example exchange, with a runtime in its own processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.aici.conftest import CAPABLE, EOS, PATIENT, VOCAB_SIZE, Start
from tests.aici.guests import (
    END,
    NOOP,
    SHOW_ARGUMENT,
    SHOW_MODULE_ARGUMENT,
    SHOW_SELF,
    by_branch,
    force,
    guest1,
    guest2,
    load,
    mask,
    result,
    sample,
    say,
    splice,
    store,
)
from tests.aici.llm_side import Llm

BRANCH = {"temperature": None, "splices": []}


def told(answer: dict[str, Any]) -> Any:
    """Return the process argument that a guest printed."""
    return json.loads(answer["logs"])


def forked(llm: Llm, parent: int, *children: int) -> dict[str, Any]:
    """Run the step after a fork, in which no sequence has new tokens, and return its data."""
    ops = [{"id": parent}]
    ops += [{"id": child, "clone_id": parent, "clone_idx": i} for i, child in enumerate(children, 1)]
    return llm.mid(*ops)


def test_the_exchange_of_the_specification_gives_its_answers(llm2: Llm) -> None:
    assert llm2.main(op="ping") == {"type": "ok", "data": {"pong": 1}}
    tokens = llm2.main(op="tokens")["data"]
    assert (tokens["vocab_size"], tokens["eos_token_id"]) == (VOCAB_SIZE, EOS)
    module = llm2.upload(guest2([[say("FIXED ...\n"), *force([11, 12, 13])], sample([65, 66], VOCAB_SIZE), END]))
    req_id, reply = llm2.instantiate(module, "...", prompt=[1])
    assert reply["type"] == "ok"
    data = reply["data"]
    assert {k: data[k] for k in ("error", "result", "storage", "logs")} == {
        "error": "",
        "result": {"prompt": [1]},
        "storage": [],
        "logs": "",
    }
    assert data["micros"] % 10 == 0
    first = llm2.mid({"id": 5, "req_id": req_id})
    assert first["dtype"] == "f32" and first["mask_num_bytes"] == 4 * first["mask_num_elts"]
    assert first["mask_num_elts"] == (VOCAB_SIZE + 1000) // 64 * 64 and first["num_masks"] == 1
    answer = llm2.settle(first, 5)
    assert answer["logs"] == "FIXED ...\n" and answer["error"] == "" and answer["storage"] == []
    forced = {"when_sampled": [], "backtrack": 0, "ff_tokens": [11, 12, 13]}
    assert answer["result"] == {"branches": [{"sample_mask": None, "temperature": None, "splices": [forced]}]}
    data = llm2.mid({"id": 5, "tokens": [11, 12, 13]})
    assert llm2.answer(data, 5)["result"] == {"branches": [{"sample_mask": 0, **BRANCH}]}
    assert llm2.row(data, 0, VOCAB_SIZE) == [65, 66]
    assert llm2.next(5, (65,))["result"] == {"branches": []}
    assert llm2.mid(freed=(5,))["seqs"] == {}
    assert llm2.answer(llm2.mid({"id": 5}), 5)["error"] == "unknown sequence 5"


def test_what_a_guest_is_told(llm2: Llm) -> None:
    show = [SHOW_ARGUMENT, *sample([65], VOCAB_SIZE)]
    first = [SHOW_ARGUMENT, SHOW_MODULE_ARGUMENT, SHOW_SELF, *sample([65], VOCAB_SIZE)]
    answer = llm2.start(llm2.upload(guest2([first, show])), 10, {"a": [1, "é"]})
    argument = {"backtrack": 0, "tokens": [], "sampled": None, "fork_group": [10]}
    text, _, rest = answer["logs"].partition("}")
    assert json.loads(text + "}") == argument
    assert json.loads(rest[: -len("10")]) == {"a": [1, "é"]} and rest.endswith("10")
    answer = llm2.settle(llm2.mid({"id": 10, "tokens": [65], "sampled": 65}), 10)
    assert told(answer) == {**argument, "tokens": [65], "sampled": 65}
    op = {"id": 10, "backtrack": 1, "tokens": [3, 4], "sampled": 7}
    answer = llm2.settle(llm2.mid(op), 10)
    assert told(answer) == {"backtrack": 1, "tokens": [3, 4], "sampled": 7, "fork_group": [10]}
    llm2.mid(freed=(10,))


def test_the_prompt_may_be_rewritten(llm2: Llm) -> None:
    module = llm2.upload(guest2([END], prompt=[5, 6, 7], init=[SHOW_ARGUMENT]))
    _, reply = llm2.instantiate(module, prompt=[1, 2])
    assert reply["data"]["result"] == {"prompt": [5, 6, 7]}
    assert json.loads(reply["data"]["logs"]) == {"prompt": [1, 2]}


def test_failures_of_instantiation_show_the_logs(llm2: Llm) -> None:
    _, reply = llm2.instantiate(llm2.upload(guest2([END], create=[say("so far\n"), "(unreachable)"])))
    assert reply["type"] == "ok" and reply["data"]["logs"] == "so far\n" and reply["data"]["result"] is None
    assert "unreachable" in reply["data"]["error"] and "backtrace" in reply["data"]["error"]


def test_masks_in_order_of_their_making(llm2: Llm) -> None:
    """Several masks in one call, several sequences, and mask rows that no result uses."""
    two = [
        mask([1], VOCAB_SIZE),
        mask([2], VOCAB_SIZE),
        mask([3, EOS], VOCAB_SIZE),
        result({"branches": [{"sample_mask": "$2", **BRANCH}, {"sample_mask": "$0", **BRANCH}]}),
    ]
    module, other = llm2.upload(guest2([NOOP, two])), llm2.upload(guest2([NOOP, sample([77], VOCAB_SIZE)]))
    llm2.start(module, 1)
    llm2.start(other, 2)
    data = llm2.mid({"id": 1}, {"id": 2})
    answers = [llm2.answer(data, seq)["result"]["branches"] for seq in (1, 2)]
    rows = [[branch["sample_mask"] for branch in answer] for answer in answers]
    assert sorted(rows[0] + rows[1]) == list(range(data["num_masks"])) == [0, 1, 2]
    allowed = [llm2.row(data, row, VOCAB_SIZE) for row in (*rows[0], *rows[1])]
    assert allowed == [[3, EOS], [1], [77]]
    llm2.mid(freed=(1, 2))


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "bool"])
def test_other_types_of_masks(start: Start, dtype: str) -> None:
    llm = start(*CAPABLE, "--bias-dtype", dtype)
    llm.start(llm.upload(guest2([NOOP, sample([0, 9, 255, EOS], VOCAB_SIZE)])), 1)
    data = llm.mid({"id": 1})
    assert data["dtype"] == dtype
    elements = data["mask_num_elts"]
    size = 4 * (elements + 31) // 32 if dtype == "bool" else 2 * elements
    assert data["mask_num_bytes"] == size
    assert llm.row(data, 0, VOCAB_SIZE) == [0, 9, 255, EOS]


def test_splices_and_the_temperature_are_in_the_answer(llm2: Llm) -> None:
    conditional = {"when_sampled": [65, 66], "backtrack": 2, "ff_tokens": [1]}
    always = {"when_sampled": [], "backtrack": 0, "ff_tokens": [2]}
    step = [
        mask([65], VOCAB_SIZE),
        result({"branches": [{"sample_mask": "#", "temperature": 0.5, "splices": [conditional, always]}]}),
    ]
    llm2.start(llm2.upload(guest2([NOOP, step, force([9], backtrack=2)])), 3)
    answer = llm2.next(3, (4, 5, 6))["result"]
    assert answer == {"branches": [{"sample_mask": 0, "temperature": 0.5, "splices": [conditional, always]}]}
    assert llm2.next(3, (2,))["result"]["branches"][0]["splices"][0]["backtrack"] == 2
    llm2.mid(freed=(3,))


def test_a_fork_copies_everything(llm2: Llm) -> None:
    """A fork copies unexported globals, memory and shared variables. The fork group is in the order of the branches."""
    three = [store("x", "61"), result({"branches": [splice([]), splice([]), splice([])]})]
    after = [SHOW_ARGUMENT, by_branch([*force([1])], [*force([2])], [*force([3])])]
    later = [load("x"), by_branch([store("x", "62", "Append")], [store("x", "62", "Append")]), *END]
    llm2.start(llm2.upload(guest2([NOOP, three, after, later])), 30)
    assert len(llm2.next(30)["result"]["branches"]) == 3
    ops = [
        {"id": 32, "clone_id": 30, "clone_idx": 2},
        {"id": 30},
        {"id": 31, "clone_id": 30, "clone_idx": 1},
    ]
    data = llm2.mid(*ops)
    for seq, token in ((30, 1), (31, 2), (32, 3)):
        answer = llm2.settle(data, seq)
        assert answer["result"]["branches"][0]["splices"][0]["ff_tokens"] == [token]
        assert told(answer)["fork_group"] == [30, 31, 32]
    data = llm2.mid(*({"id": 30 + i, "tokens": [i + 1]} for i in range(3)))
    versions = {
        json.loads(llm2.settle(data, s)["logs"].split("}}")[0] + "}}")["ReadVar"]["value"] for s in (30, 31, 32)
    }
    assert versions <= {"61", "6162", "616262", "61626262"} and "61" in versions
    llm2.mid(freed=(30, 31, 32))


def test_forks_are_limited(llm2: Llm) -> None:
    """Sixteen sequences run, including the parent. Each further fork is refused separately, as in the original AICI."""
    many = [result({"branches": [splice([]) for _ in range(20)]})]
    llm2.start(llm2.upload(guest2([NOOP, many, NOOP])), 200)
    assert len(llm2.next(200)["result"]["branches"]) == 20
    data = forked(llm2, 200, *range(201, 220))
    errors = [llm2.answer(data, seq)["error"] for seq in range(200, 220)]
    assert errors[:16] == [""] * 16 and all("limit of 16 forks" in error for error in errors[16:])
    llm2.mid(freed=tuple(range(200, 220)))
    llm2.start(llm2.upload(guest2([NOOP, END])), 50)
    extra = [{"id": 51 + i, "clone_id": 50, "clone_idx": 1} for i in range(16)]
    data = llm2.mid({"id": 50}, *extra)
    errors = [llm2.answer(data, seq)["error"] for seq in range(50, 67)]
    assert sum("limit of 16 forks" in error for error in errors) == 1 and errors[0] == ""
    llm2.mid(freed=tuple(range(50, 67)))


def test_forks_in_a_life_are_limited(start: Start) -> None:
    llm = start(*CAPABLE, "--limit", "max_total_forks=5")
    two = [result({"branches": [splice([]), splice([])]})]
    llm.start(llm.upload(guest2([NOOP, two])), 1)
    for child in range(2, 6):
        llm.next(1)
        forked(llm, 1, child)
        llm.mid(freed=(child,))
    assert "more than 5 sequences in the life of one request" in llm.next(1)["error"]


def test_ops_that_make_no_sense_fail_alone(llm2: Llm) -> None:
    module = llm2.upload(guest2([NOOP]))
    llm2.start(module, 70)
    req_id, _ = llm2.instantiate(module)
    data = llm2.mid(
        {"id": 70},
        {"id": 71},
        {"id": 72, "req_id": "nobody"},
        {"id": 73, "clone_id": 99, "clone_idx": 1},
        {"id": 74, "clone_id": 70},
        {"id": 75, "req_id": req_id, "clone_id": 70, "clone_idx": 1},
    )
    assert llm2.answer(data, 70)["error"] == ""
    expected = {71: "unknown sequence", 72: "unknown req_id", 73: "has no op", 74: "clone_idx", 75: "both"}
    for seq, text in expected.items():
        assert text in llm2.answer(data, seq)["error"]
        assert llm2.answer(data, seq)["result"] is None
    data = llm2.mid({"id": 70, "req_id": req_id})
    assert "exists already" in llm2.answer(data, 70)["error"]
    reply = llm2.main(op="mid_process", freed=[], ops=[{"id": 70}])
    assert "lacks backtrack or tokens" in reply["data"]["seqs"]["70"]["error"]
    llm2.side(op="discard", req_id=req_id)
    llm2.mid(freed=(70,))
    assert "unknown req_id" in llm2.answer(llm2.mid({"id": 76, "req_id": req_id}), 76)["error"]


def test_variables_are_read_and_written_with_versions(llm2: Llm) -> None:
    steps = [
        [load("v"), *NOOP],
        [store("v", "00ff"), store("v", "10", "Append"), *NOOP],
        [load("v"), store("v", "aa", when=7), store("w", "bb", when=1), *NOOP],
        [store("v", "cc", when=2), load("v"), *NOOP],
    ]
    answer = llm2.start(llm2.upload(guest2(steps)), 80)
    assert told(answer) == {"VariableMissing": {}} and answer["storage"] == []
    answer = llm2.next(80)
    assert answer["logs"] == '{"WriteVar":{"version":1}}{"WriteVar":{"version":2}}'
    assert answer["storage"] == [
        {"WriteVar": {"name": "v", "value": "00ff", "op": "Set", "when_version_is": None}},
        {"WriteVar": {"name": "v", "value": "10", "op": "Append", "when_version_is": None}},
    ]
    answer = llm2.next(80)
    found = '{"ReadVar":{"version":2,"value":"00ff10"}}'
    assert answer["logs"] == found + found + '{"VariableMissing":{}}'  # a conflict tells what is there
    assert [c["WriteVar"]["value"] for c in answer["storage"]] == ["aa", "bb"]  # also those that lost
    assert llm2.next(80)["logs"] == '{"WriteVar":{"version":3}}{"ReadVar":{"version":3,"value":"cc"}}'
    llm2.mid(freed=(80,))
    llm2.start(llm2.upload(guest2([[load("v"), *NOOP]])), 81)
    answer = llm2.start(llm2.upload(guest2([[load("v"), say(""), *NOOP]])), 82)
    assert told(answer) == {"VariableMissing": {}}  # another request sees nothing
    llm2.mid(freed=(81, 82))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("caps", "step", "text"),
    [
        (("--cap-ff-tokens", "--cap-backtrack"), [result({"branches": [splice([1]), splice([2])]})], "cannot fork"),
        (("--cap-fork", "--cap-backtrack"), force([1]), "cannot fast-forward"),
        (("--cap-fork", "--cap-backtrack"), NOOP, "cannot fast-forward"),
        (("--cap-fork", "--cap-ff-tokens"), force([1], backtrack=1), "cannot backtrack"),
    ],
)
def test_what_the_engine_cannot_do(start: Start, caps: tuple[str, ...], step: list[str], text: str) -> None:
    llm = start(*caps, *PATIENT)
    assert text in llm.start(llm.upload(guest2([step])), 1)["error"]


def test_replacing_the_sample_needs_no_backtracking(start: Start) -> None:
    llm = start("--cap-ff-tokens", *PATIENT)
    replace = [
        mask([65], VOCAB_SIZE),
        result({"branches": [{"sample_mask": "#", "splices": [{"backtrack": 1, "ff_tokens": [1]}]}]}),
    ]
    deeper = [
        mask([65], VOCAB_SIZE),
        result({"branches": [{"sample_mask": "#", "splices": [{"backtrack": 2, "ff_tokens": [1]}]}]}),
    ]
    assert llm.start(llm.upload(guest2([replace])), 1)["error"] == ""
    assert "cannot backtrack" in llm.start(llm.upload(guest2([deeper])), 2)["error"]


def test_capabilities_are_told_to_guests(start: Start) -> None:
    config = "".join(
        f"(call $putn (call $config (i32.const {place}) (i32.const {length})))"
        for place, length in ((512, 4), (520, 9), (530, 9), (540, 4))
    )
    data = '(data (i32.const 512) "fork") (data (i32.const 520) "backtrack") (data (i32.const 530) "ff_tokens")'
    llm = start("--cap-ff-tokens", *PATIENT)
    module = llm.upload(guest2([[config, "(call $print_out)", *NOOP]], raw=data))
    assert llm.start(module, 1)["logs"] == "0010"


def test_additions_reach_the_engine(llm2: Llm) -> None:
    branch = {
        "sample_mask": "#",
        "splices": [],
        "sampling": {"top_p": 0.5, "top_k": 3},
        "bias": [[65, 1.5]],
        "top_logprobs": 4,
        "control_vectors": {"polite": 0.5},
    }
    module = guest2([[mask([65], VOCAB_SIZE), result({"branches": [branch]})], [SHOW_ARGUMENT, *END]])
    answer = llm2.start(llm2.upload(module), 90)
    assert answer["result"]["branches"] == [{**branch, "sample_mask": 0, "temperature": None}]
    candidates = [[65, -0.5], [66, -1.5]]
    shown = told(llm2.next(90, (65,), candidates=candidates, probes=[0.5, -2.0]))
    assert (shown["candidates"], shown["probes"]) == (candidates, [0.5, -2.0])
    llm2.mid(freed=(90,))
    assert "discard" in llm2.main(op="tokens")["data"]["extensions"]


def test_waiting_for_a_variable(llm2: Llm) -> None:
    """The runtime answers for the waiting guest until another sequence has written the variable."""
    two = [result({"branches": [splice([]), splice([])]})]
    wait = [result({"branches": [splice([])], "wait": {"variable": "go"}})]
    write = [store("go", "01"), *NOOP]
    llm2.start(llm2.upload(guest2([NOOP, two, [by_branch(wait, NOOP)], [SHOW_SELF, *write], END])), 95)
    llm2.next(95)
    data = forked(llm2, 95, 96)
    assert llm2.settle(data, 95)["result"]["branches"][0]["wait"] is True
    for _ in range(3):
        answer = llm2.next(95)
        assert answer["logs"] == "" and answer["result"]["branches"][0]["wait"] is True
    assert llm2.next(96)["logs"].startswith("96")
    assert llm2.next(95)["logs"].startswith("95")  # now it was called
    llm2.mid(freed=(96, 95))


def test_waiting_for_a_time_and_bad_waits(llm2: Llm) -> None:
    wait = [result({"branches": [splice([])], "wait": {"ms": 1}})]
    answer = llm2.start(llm2.upload(guest2([wait, [say("awake"), *END]])), 97)
    for _ in range(10_000):
        if answer["logs"] == "awake":
            break
        answer = llm2.next(97)
    assert answer["result"] == {"branches": []}
    for bad in ({}, {"ms": -1}):
        step = [result({"branches": [splice([])], "wait": bad})]
        assert "wait" in llm2.start(llm2.upload(guest2([step])), 98)["error"]
        llm2.mid(freed=(98,))
    busy = [result({"branches": [splice([1])], "wait": {"ms": 5}})]
    assert "must not do anything else" in llm2.start(llm2.upload(guest2([busy])), 99)["error"]
    llm2.mid(freed=(97, 99))


def test_an_old_guest_under_a_modern_engine(llm2: Llm) -> None:
    """The pre, mid and post callbacks of a D1 guest become branches of D2."""
    go = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
    pre = [
        [say("pre "), result({"suspend": True, "num_forks": 1, "ff_tokens": []})],
        [result({"suspend": False, "num_forks": 1, "ff_tokens": [7, 8]})],
        go,
        [result({"suspend": False, "num_forks": 2, "ff_tokens": []})],
        go,
    ]
    mids = [
        [mask([65, 66], VOCAB_SIZE, new=False), result({"SampleWithBias": {}})],
        [
            SHOW_ARGUMENT,
            by_branch(
                [result({"Splice": {"backtrack": 1, "ff_tokens": [3]}})],
                [result({"SampleWithBias": {}})],
            ),
        ],
        [result('"Stop"')],
    ]
    post = [[SHOW_ARGUMENT, result({"stop": False})]]
    noop = {
        "sample_mask": None,
        "temperature": None,
        "splices": [{"when_sampled": [], "backtrack": 0, "ff_tokens": []}],
    }
    answer = llm2.start(llm2.upload(guest1(pre, mids, post)), 110)
    assert answer["logs"] == "pre " and answer["result"]["branches"] == [{**noop, "wait": True, "waits_for": []}]
    forced = {"when_sampled": [], "backtrack": 0, "ff_tokens": [7, 8]}
    assert llm2.next(110)["result"]["branches"][0]["splices"] == [forced]
    data = llm2.mid({"id": 110, "tokens": [7, 8]})
    answer = llm2.settle(data, 110)
    assert answer["logs"] == '{"tokens":[7,8],"backtrack":0}'
    assert answer["result"]["branches"] == [{"sample_mask": 0, **BRANCH}]
    assert llm2.row(data, 0, VOCAB_SIZE) == [65, 66]
    answer = llm2.next(110, (65,))
    assert answer["result"]["branches"] == [noop, noop]  # a wish to fork
    data = forked(llm2, 110, 111)
    answers = [llm2.settle(data, seq) for seq in (110, 111)]
    assert [a["logs"] for a in answers] == ['{"fork_group":[110,111]}'] * 2
    taken = {"when_sampled": [], "backtrack": 1, "ff_tokens": [3]}
    assert answers[0]["result"]["branches"][0]["splices"] == [taken]
    assert answers[1]["result"]["branches"] == [{"sample_mask": 0, **BRANCH}]
    assert llm2.row(data, 0, VOCAB_SIZE) == list(range(VOCAB_SIZE))  # no set: not constrained
    answer = llm2.next(110, (3,), backtrack=1, sampled=None)
    assert answer["result"] == {"branches": []} and '"backtrack":1' in answer["logs"]
    llm2.mid(freed=(110, 111))


def test_an_early_guest_with_the_old_bias_call(llm2: Llm) -> None:
    """In D2.0 the bias call returns nothing, `sample_mask` is always 0, and init_prompt returns nothing."""
    from tests.aici import guests

    functions = guests._callback("aici_init_prompt", [[result({})]]) + guests._callback(
        "aici_mid_process",
        [[mask([3, 4], VOCAB_SIZE, new=False), result({"branches": [{"sample_mask": 0, "splices": []}]})]],
    )
    wasm = guests._build(functions, (), "(func $bias (param i32))")
    req_id, reply = llm2.instantiate(llm2.upload(wasm), prompt=[9])
    assert reply["data"]["result"] == {"prompt": [9]}
    data = llm2.mid({"id": 120, "req_id": req_id})
    assert llm2.settle(data, 120)["result"]["branches"][0]["sample_mask"] == 0
    assert llm2.row(data, 0, VOCAB_SIZE) == [3, 4]
    llm2.mid(freed=(120,))


def test_a_guest_that_does_nothing_is_asked_many_times_in_a_step(llm2: Llm) -> None:
    """The guest is called until it acts, at most the allowed number of times."""
    counting = guest2([*[[say(f"{number} "), *NOOP] for number in range(10)], sample([65], VOCAB_SIZE), NOOP])
    llm2.start(llm2.upload(counting), 300)
    answer = llm2.next(300, turns=4)
    assert answer["logs"] == "1 2 3 4 " and answer["result"]["branches"][0]["turns"] == 4
    answer = llm2.next(300, turns=90)
    assert answer["logs"] == "5 6 7 8 9 " and answer["result"]["branches"][0]["sample_mask"] is not None
    answer = llm2.next(300, (65,), turns=90)
    assert answer["result"]["branches"][0]["turns"] == 90
    assert llm2.next(300, turns=10**6)["result"]["branches"][0]["turns"] == 100  # the limit
    assert "turns" not in llm2.next(300)["result"]["branches"][0]
    waiting = guest2([[result({"branches": [], "wait": {"variable": "x", "newer_than": 0}})]])
    llm2.start(llm2.upload(waiting), 301)
    assert llm2.next(301, turns=70)["result"]["branches"][0]["turns"] == 70  # it is not called at all
    llm2.mid(freed=(300, 301))
