"""Tests that decode(encode(m)) = m for every message, and that messages have exactly the specified keys."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from bridle.aici import protocol as p
from bridle.aici import replies as r
from bridle.aici.client import WasmController
from bridle.aici.client.instantiate_messages import instantiation
from bridle.engine.request import Request
from bridle.errors import ProtocolError

ids = st.integers(0, 2**40)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=4)
counts = st.integers(0, 2**31 - 1)
texts = st.text(max_size=8)
rids = st.one_of(st.none(), st.text(min_size=1, max_size=8))
auths = st.one_of(st.none(), st.fixed_dictionaries({"user": texts, "is_admin": st.booleans()}))
numbers = st.floats(allow_nan=False, allow_infinity=False)

mid_ops = st.one_of(
    st.builds(p.MidOp, id=ids, clone_id=st.one_of(st.none(), ids)),
    st.builds(
        p.MidOp,
        id=ids,
        backtrack=counts,
        tokens=tokens,
        sampled=st.one_of(st.none(), st.integers(0, 9)),
        req_id=st.one_of(st.none(), texts),
        clone_id=st.one_of(st.none(), ids),
        clone_idx=st.one_of(st.none(), counts),
        candidates=st.one_of(st.none(), st.lists(st.tuples(st.integers(0, 9), numbers), max_size=3)),
    ),
)
requests = st.one_of(
    st.builds(p.Ping, rid=rids, auth=auths),
    st.builds(p.Tokens, rid=rids),
    st.builds(p.Stop),
    st.builds(
        p.PostPreProcess,
        post_ops=st.lists(st.builds(p.PostOp, id=ids, tokens=tokens, backtrack=counts), max_size=3),
        pre_ops=st.lists(st.builds(p.PreOp, id=ids, req_id=texts), max_size=3),
        freed=st.lists(ids, max_size=3),
    ),
    st.builds(
        p.MidProcess,
        ops=st.lists(mid_ops, max_size=3),
        freed=st.one_of(st.just(UNSET), st.lists(ids, max_size=3)),
        deadline_ms=st.one_of(st.none(), numbers),
    ),
    st.builds(p.MkModule, binary=texts, rid=rids, auth=auths),
    st.builds(p.GetTags, rid=rids),
    st.builds(p.GetModule, module_id=st.text(max_size=9), rid=rids),
    st.builds(p.SetTags, module_id=texts, tags=st.lists(texts, max_size=3), rid=rids),
    st.builds(p.Instantiate, req_id=texts, prompt=st.one_of(tokens, texts), module_id=texts),
    st.builds(p.Discard, req_id=texts, rid=rids),
)
commands = st.one_of(
    st.builds(r.StorageCommand, read=st.builds(r.ReadVar, name=texts)),
    st.builds(
        r.StorageCommand,
        write=st.builds(r.WriteVar, name=texts, value=texts, op=st.sampled_from(["Set", "Append"])),
    ),
)
splices = st.builds(r.SpliceReply, when_sampled=tokens, backtrack=counts, ff_tokens=tokens)
branches = st.builds(
    r.BranchReply,
    sample_mask=st.one_of(st.none(), counts),
    temperature=st.one_of(st.none(), numbers),
    splices=st.lists(splices, max_size=2),
    sampling=st.one_of(st.just(UNSET), st.dictionaries(texts, numbers, max_size=2)),
    bias=st.one_of(st.just(UNSET), st.lists(st.tuples(st.integers(0, 9), numbers), max_size=2)),
    wait=st.one_of(st.just(UNSET), st.booleans()),
)


def results(result: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(
        ids,
        st.builds(
            r.SeqResult,
            error=texts,
            result=st.one_of(st.none(), result),
            storage=st.lists(commands, max_size=2),
            logs=texts,
            micros=counts,
        ),
        max_size=3,
    )


pre_results = st.builds(r.PreResult, suspend=st.booleans(), num_forks=counts, ff_tokens=tokens)
tag_infos = st.builds(
    r.TagInfo, tag=texts, module_id=texts, updated_at=ids, updated_by=texts, wasm_size=ids, compiled_size=ids
)
datas = st.one_of(
    st.builds(r.Pong),
    st.builds(r.TokensData, vocab_size=counts, eos_token_id=st.one_of(st.just(UNSET), counts)),
    st.builds(
        r.PostPreData, post_seqs=results(st.builds(r.PostResult, stop=st.booleans())), pre_seqs=results(pre_results)
    ),
    st.builds(
        r.MidData1,
        seqs=results(st.builds(r.MidResult, ff_tokens=tokens, backtrack=counts)),
        num_seqs=counts,
    ),
    st.builds(
        r.MidData2,
        seqs=results(st.builds(r.Branches, branches=st.lists(branches, max_size=2))),
        dtype=texts,
        first_mask_byte_offset=ids,
        mask_num_bytes=ids,
        mask_num_elts=ids,
        num_masks=ids,
    ),
    st.builds(r.ModuleData, module_id=texts, wasm_size=ids, compiled_size=ids, time=ids),
    st.builds(r.TagsData, tags=st.lists(tag_infos, max_size=2)),
    st.builds(r.PromptResult, prompt=tokens),
)


@given(requests)
def test_requests_survive_the_wire(message: p.Request) -> None:
    assert p.decode_request(p.encode(message)) == message


@given(datas, st.one_of(st.just(UNSET), texts))
def test_replies_survive_the_wire(data: Any, rid: Any) -> None:
    reply = r.Ok(data, rid)
    assert r.decode_reply(p.encode(reply), type(data)) == reply


@given(texts, st.booleans(), st.one_of(st.just(UNSET), texts))
def test_failures_survive_the_wire(error: str, is_user_error: bool, rid: Any) -> None:
    for reply in (r.ErrorReply(error, is_user_error, rid), r.JsonFailure(error)):
        assert r.decode_reply(p.encode(reply), r.Pong) == reply


@given(st.binary(max_size=60))
def test_garbage_gives_one_of_two_errors(data: bytes) -> None:
    with pytest.raises((ProtocolError, msgspec.DecodeError)):
        p.decode_request(data)


@pytest.mark.parametrize("data", [b'{"\xff": 1}', b'{"data": ' + b"[" * 100_000, b"\xff"])
def test_text_that_is_broken_or_too_deep_is_malformed(data: bytes) -> None:
    with pytest.raises((ProtocolError, msgspec.DecodeError)):
        p.decode_request(data)
    with pytest.raises(ProtocolError):
        r.decode_reply(data, r.ModuleData)
    p.rid_of(data)


def wire(message: Any) -> Any:
    return json.loads(p.encode(message))


def test_what_stands_on_the_wire() -> None:
    assert wire(r.Ok(r.Pong())) == {"type": "ok", "data": {"pong": 1}}
    assert wire(r.ErrorReply("x")) == {"type": "error", "error": "x", "is_user_error": False}
    assert wire(r.JsonFailure("x")) == {"type": "json-error", "error": "x"}
    assert wire(r.Ok(r.TokensData(3))) == {"type": "ok", "data": {"vocab_size": 3}}
    assert wire(r.SeqResult()) == {"error": "", "result": None, "storage": [], "logs": "", "micros": 0}
    assert wire(r.BranchReply()) == {"sample_mask": None, "temperature": None, "splices": []}
    assert wire(p.MidProcess(ops=[], freed=[3])) == {"op": "mid_process", "ops": [], "freed": [3]}
    command = r.StorageCommand(write=r.WriteVar("a", "00ff", "Set"))
    assert wire(command) == {"WriteVar": {"name": "a", "value": "00ff", "op": "Set", "when_version_is": None}}


def test_dialects_are_told_apart_by_freed() -> None:
    one = p.decode_request(b'{"op":"mid_process","ops":[{"id":2,"clone_id":null}]}')
    two = p.decode_request(b'{"op":"mid_process","freed":[],"ops":[{"id":2,"backtrack":0,"tokens":[],"x":1}]}')
    assert isinstance(one, p.MidProcess) and one.dialect == 1 and one.ops[0].tokens is UNSET
    assert isinstance(two, p.MidProcess) and two.dialect == 2 and two.ops[0].tokens == []


@pytest.mark.parametrize(
    ("text", "argument"),
    [('"a\\n\\u00e9"', "a\né"), ("null", "null"), ('{"a": 1}', '{"a": 1}'), ("[1, 2]", "[1, 2]")],
)
def test_a_string_argument_goes_as_it_is(text: str, argument: str) -> None:
    request = p.decode_request(
        f'{{"op":"instantiate","req_id":"r","prompt":[1],"module_id":"m","module_arg":{text}}}'.encode()
    )
    assert isinstance(request, p.Instantiate) and request.argument == argument


TRACE = "00-" + "1a" * 16 + "-" + "2b" * 8 + "-01"


@pytest.mark.parametrize("told", [None, "no", 7, ["00"], TRACE.upper(), TRACE + "0"])
def test_a_trace_that_is_none_is_ignored(told: object) -> None:
    data = msgspec.json.encode({"op": "ping", "traceparent": told})
    assert p.trace_of(p.decode_request(data)) is None


def test_the_trace_of_a_request_goes_along_with_its_instance() -> None:
    request = Request("r", (1, 2), controller=WasmController("m"), metadata={"traceparent": TRACE})
    message, _ = instantiation(request, 2)
    assert p.trace_of(p.decode_request(p.encode(message))) == TRACE
    plain, _ = instantiation(Request("r", (1, 2), controller=WasmController("m")), 2)
    assert b"traceparent" not in p.encode(plain)  # as it always was


def test_a_message_says_who_asks() -> None:
    assert p.auth_of(p.Ping()) == p.LOCAL
    assert p.auth_of(p.Ping(auth="root")) == p.LOCAL
    assert p.auth_of(p.Ping(auth={"user": "eva", "is_admin": True, "more": 1})) == p.Auth("eva", True)
    with pytest.raises(ProtocolError, match="is_admin"):
        p.auth_of(p.Ping(auth={"user": "eva"}))


def test_reply_ids_of_requests_that_make_no_sense() -> None:
    assert p.rid_of(b'{"op":"nonsense","$rid":"7"}') == "7"
    assert p.rid_of(b'{"op":"ping","$rid":7}') is UNSET
    assert p.rid_of(b"[") is UNSET
    assert p.rid_of(b"[1]") is UNSET
