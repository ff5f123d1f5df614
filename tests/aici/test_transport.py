"""Tests of both kinds of synchronization end to end, the envelope of messages, tags, and the runtime's own options."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aici.conftest import CAPABLE, EOS, VOCAB_SIZE, Start
from tests.aici.guests import END, SHOW_MODULE_ARGUMENT, guest2, sample, say
from tests.aici.llm_side import Llm
from tests.waiting import PATIENCE, until


@pytest.mark.few(1)
@pytest.mark.parametrize("futex", [False, True], ids=["semaphores", "futex"])
def test_everything_over_either_synchronization(start: Start, futex: bool) -> None:
    llm = start(*CAPABLE, futex=futex)
    assert llm.main(op="ping") == {"type": "ok", "data": {"pong": 1}}
    reply = llm.side(op="ping")
    assert reply["data"] == {"pong": 1}
    module = llm.upload(guest2([sample([65], VOCAB_SIZE)]))
    llm.start(module, 1)
    for _ in range(5):
        data = llm.mid({"id": 1, "tokens": [65], "sampled": 65})
        assert llm.row(data, 0, VOCAB_SIZE) == [65]
    if futex:  # nobody can attach a second time; the bias region keeps its name
        assert llm.leftovers() == [f"{llm.prefix[1:]}bin-shm"]


def test_a_message_that_is_no_request_gets_an_error(llm2: Llm) -> None:
    assert llm2.raw("main", b"{")["type"] == "json-error"
    assert set(llm2.raw("side", b"not json")) == {"type", "error"}
    for channel in ("main", "side"):
        reply = llm2.raw(channel, b'{"op":"nonsense","$rid":"r1"}')
        assert reply["type"] == "error" and reply["$rid"] == "r1" and reply["is_user_error"] is False
        assert "data" not in reply and "nonsense" in reply["error"]
        assert "$rid" not in llm2.raw(channel, b'{"op":"ping","$rid":17}')
        assert llm2.raw(channel, b'{"op":"ping","$rid":"r2"}')["$rid"] == "r2"
        assert llm2.raw(channel, b"[1,2]")["type"] == "error"
        bad = llm2.raw(channel, b'{"op":"get_tags","$auth":{"user":1},"$rid":"r3"}')
        assert bad["type"] == "error" and "malformed $auth" in bad["error"] and bad["$rid"] == "r3"
    assert "belong" in llm2.side(op="mid_process", ops=[], freed=[])["error"]


def test_replies_come_in_any_order(llm2: Llm) -> None:
    """Many requests are in flight on the side channel, and each gets its reply by its id."""
    modules = [guest2([END], create=[say(str(i))]) for i in range(6)]
    rids = [llm2.begin_side(op="mk_module", binary=base64.b64encode(m).decode()) for m in modules]
    rids += [llm2.begin_side(op="ping") for _ in range(6)]
    replies = [llm2.end_side(rid) for rid in reversed(rids)]
    assert all(reply["type"] == "ok" for reply in replies)
    assert len({reply["data"]["module_id"] for reply in replies[6:]}) == 6


def test_a_second_upload_is_not_compiled(llm2: Llm) -> None:
    wasm = base64.b64encode(guest2([END], create=[say("unique to this test")])).decode()
    first = llm2.side(op="mk_module", binary=wasm)["data"]
    second = llm2.side(op="mk_module", binary=wasm, user="somebody else")["data"]
    assert second == {**first, "time": 0}


def test_the_compile_cache_survives_a_restart(start: Start, tmp_path: Path) -> None:
    wasm = guest2([END])
    module = start(*CAPABLE, store=tmp_path).upload(wasm)
    compiled = list((tmp_path / "compiled").iterdir())
    assert len(compiled) == 1 and module in compiled[0].name
    before = compiled[0].stat().st_mtime_ns
    again = start(*CAPABLE, store=tmp_path)
    assert again.start(module, 1)["result"] == {"branches": []}
    compiled[0].write_bytes(compiled[0].read_bytes()[:-100])  # damaged on disk
    third = start(*CAPABLE, store=tmp_path)
    assert third.start(module, 1)["result"] == {"branches": []}
    assert compiled[0].stat().st_mtime_ns != before  # made anew


def test_tags_over_the_wire(llm2: Llm) -> None:
    module = llm2.upload(guest2([[SHOW_MODULE_ARGUMENT, *END]]))
    denied = llm2.side(op="set_tags", module_id=module, tags=["mine"], user="eva")
    assert denied["type"] == "error" and denied["is_user_error"] is True and "'eva.'" in denied["error"]
    assert llm2.side(op="set_tags", module_id=module, tags=["x"])["type"] == "error"  # nobody is local, no admin
    tags = llm2.side(op="set_tags", module_id=module, tags=["eva.x"], user="eva")["data"]["tags"]
    assert [(t["tag"], t["updated_by"], t["module_id"]) for t in tags] == [("eva.x", "eva", module)]
    assert llm2.start("eva.x", 9, "by tag")["logs"] == "by tag"
    llm2.mid(freed=(9,))
    _, reply = llm2.instantiate("no.such.tag")
    assert reply["type"] == "error" and "unknown controller 'no.such.tag'" in reply["error"]
    _, reply = llm2.instantiate("gh:someone/else/ctrl")
    assert reply["type"] == "error" and "downloads are not allowed" in reply["error"]


def test_a_restricted_runtime_takes_no_modules_and_no_tags(start: Start, store: Path) -> None:
    llm = start("--restricted", *CAPABLE)
    wasm = base64.b64encode(guest2([END])).decode()
    for request in ({"op": "mk_module", "binary": wasm}, {"op": "set_tags", "module_id": "0" * 64, "tags": ["a"]}):
        assert "--restricted" in llm.side(admin=True, user="root", **request)["error"]


def run(*args: str, tokenizer: Path, store: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bridle.aici.runtime", "-t", str(tokenizer), "--store", str(store), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_installing_from_the_command_line(start: Start, tokenizer: Path, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.wasm"
    main = '(func (export "aici_main") (param i32) (call $putn (local.get 0)) (call $print_out))'
    file.write_bytes(
        guest2(
            [END],
            create=[SHOW_MODULE_ARGUMENT],
            raw=main,
        )
    )
    done = run("-m", str(file), "--tag", "cli", "--gh-module", "gh:o/r", tokenizer=tokenizer, store=store)
    assert done.returncode == 0, done.stderr
    module = done.stdout.strip()
    llm = start(*CAPABLE)
    for name in (module, "cli", "gh:o/r"):
        assert llm.start(name, 1, "yes")["error"] == ""
        llm.mid(freed=(1,))
    ran = run("-m", module, "--run", tokenizer=tokenizer, store=store)
    assert ran.stdout == f'{module}\n{{"steps":[]}}7', ran
    trie = tmp_path / "trie"
    assert run("--save-tokenizer", str(trie), "--dialect", "2", tokenizer=tokenizer, store=store).returncode == 0
    assert trie.read_bytes()[:4] == (0x558B6FD3).to_bytes(4, "little")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "--server"),
        (("--server", "--name", "nothing"), "prefix"),
        (("--server", "--name", "/nobody-made-this-"), "engine must create"),
        (("--server", "--limit", "speed=3"), "NAME=N"),
        (("--module", "nowhere.wasm"), "nowhere.wasm"),
        (("--server", "-t", "klingon"), "gpt2"),
        (("--server", "--logits-size", "10"), "logits_size is 10"),
    ],
)
def test_mistakes_on_the_command_line(tokenizer: Path, store: Path, args: tuple[str, ...], text: str) -> None:
    done = run(*args, tokenizer=tokenizer, store=store)
    assert done.returncode != 0 and text in done.stderr


def test_the_vocabulary_is_as_large_as_the_logits(start: Start) -> None:
    llm = start(*CAPABLE, "--logits-size", "300")
    assert llm.main(op="tokens")["data"]["vocab_size"] == 300
    llm.start(llm.upload(guest2([sample([299], 300)])), 1)
    assert llm.row(llm.mid({"id": 1}), 0, 300) == [299]


def test_a_stop_message_ends_all_processes(start: Start) -> None:
    llm = start()
    assert llm.main(op="ping")["type"] == "ok"
    llm.send("side", b'{"op":"stop"}')
    assert llm.process.wait(PATIENCE) == 0
    until(lambda: not llm.descendants())


def test_the_trie_of_the_host(llm2: Llm, tokenizer: Path) -> None:
    """A guest reads the token trie that the specification prescribes for this vocabulary."""
    dump = """(local $i i32) (drop (call $read_blob (call $token_trie) (i32.const 0x40000) (i32.const 0x80000)))"""
    show = dump.replace("(local $i i32) ", "") + "(call $print (i32.const 0x40000) (i32.const 28))"
    size = "(call $putn (call $read_blob (call $token_trie) (i32.const 0) (i32.const 0))) (call $print_out)"
    answer = llm2.start(llm2.upload(guest2([[size, *END]])), 200)
    nodes = 1 + 256 + 2
    assert answer["logs"] == str(28 + 8 * nodes + 4 * VOCAB_SIZE + 256 + 4)
    answer = llm2.start(llm2.upload(guest2([[show, *END]])), 201)
    assert answer["error"] == ""
    llm2.mid(freed=(200, 201))


def test_a_guest_tokenizes_as_the_engine_does(llm2: Llm) -> None:
    """Merges apply, names of special tokens are recognized, and an incomplete end is tokenized greedily."""

    def tokens(text: bytes, seq: int) -> str:
        place = "".join(f"\\{byte:02x}" for byte in text)
        call = f"""(drop (call $read_blob (call $tokenize (i32.const 600) (i32.const {len(text)}))
          (i32.const 1024) (i32.const 400)))"""
        count = 8
        show = "".join(
            f"(call $putn (i32.load (i32.const {1024 + 4 * i}))) (call $putc (i32.const 32))" for i in range(count)
        )
        wasm = guest2([[call, show, "(call $print_out)", *END]], raw=f'(data (i32.const 600) "{place}")')
        logs = llm2.start(llm2.upload(wasm), seq)["logs"]
        llm2.mid(freed=(seq,))
        return str(logs)

    assert tokens(b"hello", 210).startswith("256 257 111 0 ")
    assert tokens(b"a</s>", 211).startswith(f"97 {EOS} 0 ")
    assert tokens("é".encode()[:1] + b"", 212).startswith("195 0 ")
    assert tokens(b"he\xc3he", 213).startswith("256 195 256 0 ")


def test_a_guest_has_no_files_no_wall_clock_and_no_randomness_of_its_own(llm2: Llm) -> None:
    calls = {
        "no files": (
            "(call $path_open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)"
            " (i64.const 0) (i64.const 0) (i32.const 0) (i32.const 0))",
            "8",
        ),
        "bad descriptor": ("(call $fd_write (i32.const 3) (i32.const 16) (i32.const 1) (i32.const 24))", "8"),
        "wall clock": ("(call $clock (i32.const 0) (i64.const 1) (i32.const 32))", "63"),
        "monotonic clock": ("(call $clock (i32.const 1) (i64.const 1) (i32.const 32))", "0"),
        "random": ("(call $random (i32.const 0x40000) (i32.const 8))", "0"),
    }
    steps = "".join(f"(call $putn {call}) (call $putc (i32.const 44))" for call, _ in calls.values())
    clock = "(call $putn (i32.load (i32.const 32)))"
    answer = llm2.start(llm2.upload(guest2([[steps, clock, "(call $print_out)", *END]])), 220)
    assert answer["logs"] == ",".join(expected for _, expected in calls.values()) + ",0"
    llm2.mid(freed=(220,))


def test_a_clock_if_the_operator_wants_one(start: Start) -> None:
    llm = start(*CAPABLE, "--wasm-timer-resolution-us", "1")
    read = "(drop (call $clock (i32.const 1) (i64.const 1) (i32.const 32)))"
    show = "(call $putn (i64.gt_u (i64.load (i32.const 32)) (i64.const 0))) (call $print_out)"
    assert llm.start(llm.upload(guest2([[read, show, *END]])), 1)["logs"] == "1"
