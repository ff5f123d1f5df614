"""Tests of dialect 1: its rules, and the exchange of the original protocol document, replayed field by field."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import numpy as np

from tests.aici.conftest import EOS, PATIENT, VOCAB_SIZE, Start
from tests.aici.guests import (
    END,
    SHOW_ARGUMENT,
    TRAP,
    by_branch,
    force,
    guest1,
    guest2,
    mask,
    result,
    sample,
    say,
    splice,
)
from tests.aici.llm_side import Llm

GO = [result({"suspend": False, "num_forks": 1, "ff_tokens": []})]
SUSPEND = [result({"suspend": True, "num_forks": 1, "ff_tokens": []})]
STOP_PRE = [result({"suspend": False, "num_forks": 0, "ff_tokens": []})]
STAY = [result({"stop": False})]
STOP = [result({"stop": True})]
SAMPLE = {"SampleWithBias": {}}


def forced(*tokens: int) -> list[str]:
    return [result({"suspend": False, "num_forks": 1, "ff_tokens": list(tokens)})]


def among(*tokens: int) -> list[str]:
    return [mask(tokens, VOCAB_SIZE, new=False), result(SAMPLE)]


def splicing(backtrack: int, *tokens: int) -> list[str]:
    return [result({"Splice": {"backtrack": backtrack, "ff_tokens": list(tokens)}})]


def bind(llm: Llm, module: str, seq: int, arg: Any = "") -> dict[str, Any]:
    """Instantiate a controller, run its first pre callback, and return the data."""
    req_id, reply = llm.instantiate(module, arg)
    assert reply == {"type": "ok", "data": {}, "$rid": reply["$rid"]}
    return step(llm, pre=[(seq, req_id)])


def step(
    llm: Llm,
    post: list[tuple[int, list[int], int]] | None = None,
    pre: list[tuple[int, str]] | None = None,
    freed: list[int] | None = None,
) -> dict[str, Any]:
    reply = llm.main(
        op="post_pre_process",
        post_ops=[{"id": i, "tokens": t, "backtrack": b} for i, t, b in post or []],
        pre_ops=[{"id": i, "req_id": r} for i, r in pre or []],
        freed=freed or [],
    )
    assert reply["type"] == "ok", reply
    data: dict[str, Any] = reply["data"]
    return data


def mid(llm: Llm, *ops: int | tuple[int, int]) -> dict[str, Any]:
    listed = [{"id": op, "clone_id": None} if isinstance(op, int) else {"id": op[0], "clone_id": op[1]} for op in ops]
    reply = llm.main(op="mid_process", ops=listed)
    assert reply["type"] == "ok", reply
    data: dict[str, Any] = reply["data"]
    return data


def row(llm: Llm, index: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(llm.bin[4 * VOCAB_SIZE * index : 4 * VOCAB_SIZE * (index + 1)], "<f4")


def allowed(llm: Llm, index: int) -> list[int]:
    values = row(llm, index)
    assert set(np.unique(values)) <= {0.0, -100.0}
    return [int(t) for t in np.flatnonzero(values == 0)]


def plain(seq_result: dict[str, Any]) -> dict[str, Any]:
    """Return a SeqResult without its run time, after a check that the time is present and a multiple of ten."""
    assert set(seq_result) == {"error", "result", "storage", "logs", "micros"}
    assert isinstance(seq_result["micros"], int) and seq_result["micros"] % 10 == 0
    return {k: v for k, v in seq_result.items() if k != "micros"}


def ok(value: Any, logs: str = "") -> dict[str, Any]:
    return {"error": "", "result": value, "storage": [], "logs": logs}


def test_the_exchange_of_the_document(llm1: Llm) -> None:
    text = 'FIXED "Ultimate answer is to the life, universe and everything is "\nGEN-OPT {regex: /\\d\\d/}\n'
    fixed = [29, 18, 96, 64, 12, 34, 33, 30, 27, 28, 34, 29, 19, 85]
    going = {"suspend": False, "num_forks": 1, "ff_tokens": []}
    module = guest1(pre=[[say(text), *forced(*fixed)], GO], mid=[among(*b"0123456789")], post=[STAY, STAY, STOP])
    assert llm1.main(op="ping") == {"type": "ok", "data": {"pong": 1}}
    assert llm1.main(op="tokens") == {"type": "ok", "data": {"vocab_size": VOCAB_SIZE}}
    made = llm1.side(op="mk_module", binary=base64.b64encode(module).decode(), user="localhost", admin=True)
    module_id = hashlib.sha256(module).hexdigest()
    assert set(made) == {"type", "data", "$rid"} and made["type"] == "ok"
    assert set(made["data"]) == {"module_id", "wasm_size", "compiled_size", "time"}
    assert (made["data"]["module_id"], made["data"]["wasm_size"]) == (module_id, len(module))
    names = ["jsctrl-latest", "jsctrl-2024-01-30-2145"]
    tagged = llm1.side(op="set_tags", module_id=module_id, tags=names, user="localhost", admin=True)
    infos = tagged["data"]["tags"]
    assert [info["tag"] for info in infos] == names
    for info in infos:
        assert set(info) == {"tag", "module_id", "updated_at", "updated_by", "wasm_size", "compiled_size"}
        assert info["updated_by"] == "localhost" and info["module_id"] == module_id
        assert info["compiled_size"] == made["data"]["compiled_size"] and info["updated_at"] > 1_700_000_000
    listed = llm1.side(op="get_tags", user="localhost", admin=True)["data"]["tags"]
    assert {info["tag"] for info in listed} >= set(names)
    assert [i["updated_at"] for i in listed] == sorted((i["updated_at"] for i in listed), reverse=True)

    req_id = "run-062a793f-a83f-4198-a792-9dfc39f623a6"
    reply = llm1.side(
        op="instantiate", req_id=req_id, prompt=[1], module_id="jsctrl-latest", module_arg="async function main()"
    )
    assert reply == {"type": "ok", "data": {}, "$rid": reply["$rid"]}
    reply = llm1.main(op="post_pre_process", post_ops=[], pre_ops=[{"id": 2, "req_id": req_id}], freed=[])
    assert set(reply) == {"type", "data"} and set(reply["data"]) == {"post_seqs", "pre_seqs"}
    assert reply["data"]["post_seqs"] == {} and set(reply["data"]["pre_seqs"]) == {"2"}
    assert plain(reply["data"]["pre_seqs"]["2"]) == ok({**going, "ff_tokens": fixed}, text)
    reply = llm1.main(op="mid_process", ops=[{"id": 2, "clone_id": None}])
    assert set(reply["data"]) == {"seqs", "num_seqs"} and reply["data"]["num_seqs"] == 1
    assert plain(reply["data"]["seqs"]["2"]) == ok(None)
    assert allowed(llm1, 0) == list(b"0123456789")
    data = step(llm1, post=[(2, [52], 0)])
    assert plain(data["post_seqs"]["2"]) == ok({"stop": False})
    assert plain(data["pre_seqs"]["2"]) == ok(going)
    mid(llm1, 2)
    data = step(llm1, post=[(2, [50], 0)])
    assert plain(data["post_seqs"]["2"]) == ok({"stop": True})
    assert plain(data["pre_seqs"]["2"]) == ok(going)
    data = step(llm1, freed=[2])
    assert data["post_seqs"] == {} and set(data["pre_seqs"]) == {"2"}  # a freed one gets a last pre
    assert step(llm1) == {"post_seqs": {}, "pre_seqs": {}}


def test_errors_of_the_instance_fail_the_request(llm1: Llm) -> None:
    module = llm1.upload(guest1([GO], [among(1)], [STAY], create=[say("the reason\n"), TRAP]))
    _, reply = llm1.instantiate(module)
    assert reply["type"] == "error" and reply["is_user_error"] is True
    assert "the reason" in reply["error"] and "unreachable" in reply["error"] and "data" not in reply


def test_wrong_ids_fail_the_whole_request_before_anything_is_done(llm1: Llm) -> None:
    module = llm1.upload(guest1([GO, STOP_PRE], [among(1)], [STAY]))
    req_id, _ = llm1.instantiate(module)
    for request in (
        {"post_ops": [{"id": 99, "tokens": []}], "pre_ops": [{"id": 3, "req_id": req_id}], "freed": []},
        {"post_ops": [], "pre_ops": [{"id": 3, "req_id": req_id}, {"id": 4, "req_id": "nobody"}], "freed": []},
        {"post_ops": [], "pre_ops": [{"id": 3, "req_id": req_id}, {"id": 3, "req_id": req_id}], "freed": []},
    ):
        reply = llm1.main(op="post_pre_process", **request)
        assert reply["type"] == "error", request
    data = step(llm1, pre=[(3, req_id)], freed=[12345])
    assert data["pre_seqs"]["3"]["result"]["num_forks"] == 1
    for ops in ([{"id": 3}, {"id": 77}], [{"id": 8, "clone_id": 9}], [{"id": 8, "clone_id": 3}]):
        assert llm1.main(op="mid_process", ops=ops)["type"] == "error"
    assert step(llm1, freed=[3])["pre_seqs"]["3"]["result"]["num_forks"] == 0


def test_bias_rows_stand_in_op_order(llm1: Llm) -> None:
    modules = [
        guest1([GO], [among(70 + i)], [STAY]) if i != 2 else guest1([GO], [[result(SAMPLE)]], [STAY]) for i in range(4)
    ]
    for seq, wasm in enumerate(modules):
        bind(llm1, llm1.upload(wasm), 20 + seq)
    data = mid(llm1, 23, 20, 22, 21)
    assert data["num_seqs"] == 4 and [plain(data["seqs"][s]) for s in data["seqs"]] == [ok(None)] * 4
    assert [allowed(llm1, i) for i in range(4)] == [[73], [70], [], [71]]
    assert set(row(llm1, 2)) == {-100.0}  # sample, but never returned a set
    step(llm1, freed=[20, 21, 22, 23])


def test_a_stop_and_splices_answer_as_dialect_1_says(llm1: Llm) -> None:
    wasm = guest1(
        [GO], [[result('"Stop"')], splicing(0, 9, 8), splicing(2, 9, 8), splicing(0)], [[SHOW_ARGUMENT, *STAY]]
    )
    bind(llm1, llm1.upload(wasm), 30, "x")
    step(llm1, post=[(30, [1, 2, 3, 4, 5], 0)])
    assert mid(llm1, 30)["seqs"]["30"]["result"] is None and allowed(llm1, 0) == [EOS]
    assert mid(llm1, 30)["seqs"]["30"]["result"] == {"ff_tokens": [9, 8], "backtrack": 0}
    assert allowed(llm1, 0) == [9]
    assert mid(llm1, 30)["seqs"]["30"]["result"] == {"ff_tokens": [9, 8], "backtrack": 3}  # the sample counts
    assert allowed(llm1, 0) == list(range(VOCAB_SIZE))
    told = step(llm1, post=[(30, [9, 8], 3)])["post_seqs"]["30"]["logs"]
    assert told == '{"tokens":[9,8],"backtrack":2}'
    answer = mid(llm1, 30)["seqs"]["30"]
    assert "must remove or append tokens" in answer["error"] and answer["result"] is None
    step(llm1, freed=[30])


def test_rounds_of_forced_tokens(llm1: Llm) -> None:
    rounds = guest1([*[forced(i) for i in range(10)], GO], [among(1)], [STAY])
    data = bind(llm1, llm1.upload(rounds), 31)
    assert data["pre_seqs"]["31"]["result"] == {"suspend": False, "num_forks": 1, "ff_tokens": list(range(10))}
    endless = guest1([forced(1)], [among(1)], [STAY])
    data = bind(llm1, llm1.upload(endless), 32)
    assert "10 rounds" in data["pre_seqs"]["32"]["error"]
    stopping = guest1([forced(5), forced(6)], [among(1)], [STAY, STOP])
    data = bind(llm1, llm1.upload(stopping), 33)
    assert data["pre_seqs"]["33"]["result"] == {"suspend": False, "num_forks": 0, "ff_tokens": [6]}
    step(llm1, freed=[31, 32, 33])


def test_suspended_until_it_goes_on(llm1: Llm) -> None:
    data = bind(llm1, llm1.upload(guest1([SUSPEND, SUSPEND, GO], [among(1)], [STAY])), 34)
    assert data["pre_seqs"]["34"]["result"] == {"suspend": True, "num_forks": 1, "ff_tokens": []}
    assert step(llm1)["pre_seqs"]["34"]["result"]["suspend"] is True
    assert step(llm1, freed=[34])["pre_seqs"]["34"]["result"]["suspend"] is False


def test_the_fork_of_appendix_b(llm1: Llm) -> None:
    three = [result({"suspend": False, "num_forks": 3, "ff_tokens": []})]
    branches = by_branch(among(77), among(91), splicing(2, 9, 8))
    wasm = guest1([three, GO], [[SHOW_ARGUMENT, branches]], [[SHOW_ARGUMENT, *STAY]], create=[say("made\n")])
    req_id, _ = llm1.instantiate(llm1.upload(wasm), prompt=[1, 2, 3, 4])
    data = step(llm1, pre=[(2, req_id)])
    assert data["pre_seqs"]["2"]["logs"] == "made\n"  # what was said while it was made shows up here
    assert data["pre_seqs"]["2"]["result"]["num_forks"] == 3
    data = mid(llm1, 2, (3, 2), (4, 2))
    assert data["num_seqs"] == 3
    assert [data["seqs"][s]["logs"] for s in "234"] == ['{"fork_group":[2,3,4]}'] * 3
    assert [data["seqs"][s]["result"] for s in "234"] == [None, None, {"ff_tokens": [9, 8], "backtrack": 3}]
    assert [allowed(llm1, 0), allowed(llm1, 1)] == [[77], [91]]
    data = step(llm1, post=[(2, [77], 0), (3, [91], 0), (4, [9, 8], 3)])
    assert [data["post_seqs"][s]["logs"] for s in "234"] == [
        '{"tokens":[77],"backtrack":0}',
        '{"tokens":[91],"backtrack":0}',
        '{"tokens":[9,8],"backtrack":2}',
    ]
    step(llm1, freed=[2, 3, 4])


def test_errors_of_each_phase(llm1: Llm) -> None:
    bad_post = llm1.upload(guest1([GO], [among(1)], [[say("before\n"), TRAP]]))
    bind(llm1, bad_post, 40)
    data = step(llm1, post=[(40, [5], 0)])
    post = data["post_seqs"]["40"]
    assert "unreachable" in post["error"] and post["result"] == {"stop": True} and post["logs"] == "before\n"
    assert "Previous WASM Error" in data["pre_seqs"]["40"]["error"]
    bad_pre = llm1.upload(guest1([[TRAP]], [among(1)], [STAY]))
    data = bind(llm1, bad_pre, 41)
    pre = data["pre_seqs"]["41"]
    assert "unreachable" in pre["error"]
    assert pre["result"] == {"suspend": False, "num_forks": 1, "ff_tokens": []}
    bad_mid = llm1.upload(guest1([GO], [[TRAP]], [STAY]))
    bind(llm1, bad_mid, 42)
    good = llm1.upload(guest1([GO], [among(66)], [STAY]))
    bind(llm1, good, 43)
    data = mid(llm1, 42, 43)
    assert "unreachable" in data["seqs"]["42"]["error"] and plain(data["seqs"]["43"]) == ok(None)
    assert allowed(llm1, 1) == [66]
    data = mid(llm1, 42, 43)
    assert "Previous WASM Error" in data["seqs"]["42"]["error"]
    step(llm1, freed=[40, 41, 42, 43])


def test_too_many_rows_for_the_region(start: Start) -> None:
    llm = start(*PATIENT, "--wasm-max-forks", "2000", "--limit", "max_total_forks=5000")
    many = [result({"suspend": False, "num_forks": 1100, "ff_tokens": []})]
    bind(llm, llm.upload(guest1([many], [among(1)], [STAY])), 1)
    ops = [{"id": 1}, *[{"id": 2 + i, "clone_id": 1} for i in range(1050)]]
    reply = llm.main(op="mid_process", ops=ops)
    assert reply["type"] == "error" and "shared memory of masks is too small" in reply["error"]


def test_a_prompt_may_be_a_string(llm1: Llm) -> None:
    show = llm1.upload(guest1([GO], [among(1)], [STAY], init=[SHOW_ARGUMENT]))
    for seq, prompt, tokens in ((50, "", [259]), (51, "he", [259, 32, 256])):
        req_id, reply = llm1.instantiate(show, prompt=prompt)
        assert reply["type"] == "ok"
        logs = step(llm1, pre=[(seq, req_id)])["pre_seqs"][str(seq)]["logs"]
        assert logs.replace(" ", "") == str({"prompt": tokens}).replace("'", '"').replace(" ", "")
        step(llm1, freed=[seq])


def test_instantiation_of_later_engines_runs_the_first_pre(start: Start) -> None:
    llm = start("--dialect", "1b", *PATIENT)
    module = llm.upload(guest1([[say("hi\n"), *forced(7, 8)], GO, [say("third\n"), *GO]], [among(1)], [STAY]))
    req_id, reply = llm.instantiate(module)
    assert plain(reply["data"]) == ok({"suspend": False, "num_forks": 1, "ff_tokens": [7, 8]}, "hi\n")
    assert plain(step(llm, pre=[(1, req_id)])["pre_seqs"]["1"]) == ok(
        {"suspend": False, "num_forks": 1, "ff_tokens": []}
    )
    assert step(llm, post=[(1, [9], 0)])["pre_seqs"]["1"]["logs"] == "third\n"
    _, reply = llm.instantiate(llm.upload(guest1([GO], [among(1)], [STAY], create=[TRAP])))
    assert reply["type"] == "ok" and "unreachable" in reply["data"]["error"] and reply["data"]["result"] is None
    for first in (SUSPEND, STOP_PRE):
        _, reply = llm.instantiate(llm.upload(guest1([first], [among(1)], [STAY])))
        assert "must neither suspend nor stop" in reply["data"]["error"]


def test_a_modern_guest_under_an_old_engine(llm1: Llm) -> None:
    """D2 guests are called in the pre phase, and the mid phase returns their answers."""
    fork = [result({"branches": [splice([]), splice([5, 6]), splice([7], 2), {"sample_mask": None, **splice([9])}]})]
    wasm = guest2(
        [
            force([11, 12]),  # goes on at once, with these tokens
            [result({"branches": [splice([])]})],  # a noop: suspend
            sample([65], VOCAB_SIZE),
            force([1], backtrack=2),
            fork,
            [SHOW_ARGUMENT, *END],
        ]
    )
    data = bind(llm1, llm1.upload(wasm), 60)
    assert data["pre_seqs"]["60"]["result"] == {"suspend": False, "num_forks": 1, "ff_tokens": [11, 12]}
    assert step(llm1)["pre_seqs"]["60"]["result"]["ff_tokens"] == []
    mid(llm1, 60)
    assert allowed(llm1, 0) == [65]
    assert step(llm1, post=[(60, [65], 0)])["pre_seqs"]["60"]["result"]["num_forks"] == 1
    assert mid(llm1, 60)["seqs"]["60"]["result"] == {"ff_tokens": [1], "backtrack": 3}
    assert step(llm1, post=[(60, [1], 3)])["pre_seqs"]["60"]["result"]["num_forks"] == 4
    data = mid(llm1, 60, (61, 60), (62, 60), (63, 60))
    assert [data["seqs"][str(s)]["result"] for s in (60, 61, 62, 63)] == [
        {"ff_tokens": [], "backtrack": 1},
        {"ff_tokens": [5, 6], "backtrack": 0},
        {"ff_tokens": [7], "backtrack": 3},
        {"ff_tokens": [9], "backtrack": 0},
    ]
    assert allowed(llm1, 1) == [5]
    post = [(60, [], 1), (61, [5, 6], 0), (62, [7], 3), (63, [9], 0)]
    data = step(llm1, post=post, freed=[60, 61, 62, 63])
    assert data["pre_seqs"]["62"]["logs"].replace(" ", "").startswith('{"backtrack":2,"tokens":[7]')
    assert '"fork_group":[60,61,62,63]' in data["pre_seqs"]["62"]["logs"]
    assert [data["pre_seqs"][str(s)]["result"]["num_forks"] for s in (60, 61, 62, 63)] == [0, 0, 0, 0]


def test_a_modern_guest_that_forks_behind_forced_tokens(llm1: Llm) -> None:
    """An old engine cannot take forced tokens and a fork together: it gets the tokens first, and the fork in the next
    step."""
    fork = [result({"branches": [splice([5]), splice([6])]})]
    data = bind(llm1, llm1.upload(guest2([force([11, 12]), fork, END])), 70)
    assert data["pre_seqs"]["70"]["result"] == {"suspend": False, "num_forks": 1, "ff_tokens": [11, 12]}
    assert mid(llm1, 70)["seqs"]["70"]["result"] == {"ff_tokens": [], "backtrack": 1}
    assert step(llm1, post=[(70, [], 1)])["pre_seqs"]["70"]["result"] == {
        "suspend": False,
        "num_forks": 2,
        "ff_tokens": [],
    }
    data = mid(llm1, 70, (71, 70))
    assert [data["seqs"][str(s)]["result"]["ff_tokens"] for s in (70, 71)] == [[5], [6]]
    step(llm1, post=[(70, [5], 0), (71, [6], 0)], freed=[70, 71])
