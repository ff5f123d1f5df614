"""The worked exchange of dialect 2, and each of its rules, against a runtime in its own processes."""

from __future__ import annotations

from tests.aici.conftest import CAPABLE, EOS, VOCAB_SIZE, Start
from tests.aici.guests import END, force, guest2, sample, say
from tests.aici.llm_side import Llm

BRANCH = {"temperature": None, "splices": []}


def test_the_worked_exchange(llm2: Llm) -> None:
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
    splice = {"when_sampled": [], "backtrack": 0, "ff_tokens": [11, 12, 13]}
    assert answer["result"] == {"branches": [{"sample_mask": None, "temperature": None, "splices": [splice]}]}
    data = llm2.mid({"id": 5, "tokens": [11, 12, 13]})
    assert llm2.answer(data, 5)["result"] == {"branches": [{"sample_mask": 0, **BRANCH}]}
    assert llm2.row(data, 0, VOCAB_SIZE) == [65, 66]
    assert llm2.next(5, (65,))["result"] == {"branches": []}
    assert llm2.mid(freed=(5,))["seqs"] == {}
    assert llm2.answer(llm2.mid({"id": 5}), 5)["error"] == "unknown sequence 5"
