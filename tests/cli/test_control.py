"""`bridle run` and related commands with a live server: output, saved files, errors."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.cli import main
from bridle.cli.watch import Stamp
from bridle.serving import LOCAL_ADMIN, REWIND_MARK, LoadedModel, upload_module
from bridle.serving.tenancy.keys import KeyStore
from tests.aici.guests import END, SHOW_MODULE_ARGUMENT, TRAP, by_branch, force, guest2, result, say, splice, store
from tests.http.controlled import ENDLESS, VOCAB_SIZE, controlled_model, ids, lent, pick
from tests.http.harness import served, tokenizer_folder

ECHO = guest2([[SHOW_MODULE_ARGUMENT, *pick("a")], END])
BUSY = guest2(
    [
        [say("begin\n"), store("v", "c3a9"), store("v", "21", op="Append"), *force(ids("wrong"))],
        force(ids("right"), backtrack=len(ids("wrong"))),
        [result({"branches": [splice(ids("-left")), splice(ids("-right"))]})],
        [by_branch([say("L1\nL2"), *pick("1")], [say("R1\n"), *pick("2")])],
        END,
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with controlled_model(tmp_path_factory.mktemp("store")) as model:
        yield model


@pytest.fixture(scope="module")
def url(model: LoadedModel) -> Iterator[str]:
    with served(lent(model)) as url:
        yield url


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The server runs in this process; its log lines are hidden, because these tests do not check them."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def base(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the server's URL for commands. The URL has no trailing slash, so that the command must add one."""
    monkeypatch.setenv("AICI_API_BASE", f"{url}/v1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "echo.wasm").write_bytes(ECHO)
    (folder / "busy.wasm").write_bytes(BUSY)
    (folder / "trap.wasm").write_bytes(guest2([[say("so far\n"), TRAP]]))
    (folder / "bad.wasm").write_bytes(b"not wasm")
    (folder / "script.txt").write_text("the é script")
    (folder / "latin.js").write_bytes(b"// \xe9")
    return folder


def test_a_run_prints_logs_texts_and_sums(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-l", "3", "-u", str(files / "busy.wasm"), "-p", "x" * 15]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[0]: begin"
    done = lines.index("[DONE]")
    assert any(line.startswith("[0]: ") and line.endswith("L1") for line in lines[:done])
    assert {"[0]: L2", "[1]: R1"} <= set(lines[:done])  # also the line that has no end
    assert lines[done + 1 : done + 3] == [
        "[Response] right-left1",
        "[Response] right-right2",
    ]  # not what was taken back
    usage, timing, speed, storage = lines[done + 3 :]
    assert usage.startswith("Usage: sampled_tokens 2, ff_tokens ")
    assert all(name in timing for name in ("http_response", "data0", "first_token", "last_token"))
    assert speed.startswith("Tokens/sec: prompt ")
    assert storage == 'Storage: {"v": "é!"}'


def test_a_run_prints_its_texts(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-u", str(files / "busy.wasm"), "-p", "x" * 15]) == 0
    captured = capsys.readouterr()
    assert captured.out == "right-left1\nright-right2\n" and captured.err == ""


def test_a_run_without_text_says_where_its_logs_are(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-u", str(files / "trap.wasm")]) == 1
    captured = capsys.readouterr()
    assert captured.out == "\n" and "--log-level 3 shows them" in captured.err and "so far" not in captured.out


@pytest.mark.parametrize("words", [["run", "-c", "none", "-p"], ["infer"]])
def test_a_run_is_printed_as_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "hello", "-t", "5", "--json", "-l", "5"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["usage"]["sampled_tokens"] == 5 and told["response"] and len(told["text"]) == 1


def test_everything_is_saved_on_request(files: Path, tmp_path: Path) -> None:
    saved = tmp_path / "new" / "response.json"
    assert main(["run", "-u", str(files / "busy.wasm"), "--prompt", "x", "-t", "40", "--save", str(saved)]) == 0
    data = json.loads(saved.read_text())
    assert list(data) == [
        *("request", "response", "text", "logs", "raw_storage", "storage", "error", "usage", "timing", "tps"),
    ]
    assert data["request"]["prompt"] == "x" and data["request"]["max_tokens"] == 40
    assert data["response"][0]["object"] == "initial-run"
    assert data["logs"][0].startswith("begin\n") and data["logs"][0].endswith("L1\nL2") and data["logs"][1] == "R1\n"
    assert data["text"] == ["right-left1", "right-right2"]
    assert f"wrong{REWIND_MARK}" in "".join(f["text"] for item in data["response"] for f in item.get("forks", ()))
    assert data["raw_storage"] == {"v": "c3a921"} and data["storage"] == {"v": "é!"} and data["error"] == ""
    times = [data["timing"][name] for name in ("http_response", "data0", "first_token", "last_token")]
    assert times == sorted(times)
    assert set(data["tps"]) == {"prompt", "sampling"}


def test_upload_tag_and_run_by_name(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upload", str(files / "echo.wasm"), "-T", "echo-1", "--tag", "echo-2"]) == 0
    captured = capsys.readouterr()
    module = captured.out.strip()
    assert len(module) == 64 and "echo-1" in captured.err and "echo-2" in captured.err
    assert main(["tag", module, "echo-3", "echo-4"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["echo-3", module[:8]],
        ["echo-4", module[:8]],
    ]
    assert main(["tags"]) == 0
    listed = capsys.readouterr().out
    assert all(f"echo-{number}" in listed for number in (1, 2, 3, 4)) and "localhost" in listed and "MiB" in listed
    assert main(["run", "-l", "3", str(files / "script.txt"), "-c", "echo-3"]) == 0
    assert capsys.readouterr().out.startswith("[0]: the é script")


def test_a_module_is_uploaded_and_run(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-l", "3", str(files / "echo.wasm")]) == 0
    assert "[Response] a" in capsys.readouterr().out
    assert main(["run", "-l", "3", str(files / "script.txt"), "-u", str(files / "echo.wasm")]) == 0
    assert capsys.readouterr().out.startswith("[0]: the é script")


def test_watch_runs_again_on_every_save(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.txt"
    script.write_text("first")
    saves: Iterator[Callable[[], object]] = iter(
        [lambda: script.write_text("second"), script.unlink, lambda: script.write_text("third!")]
    )

    def save(seconds: float) -> None:
        """Replaces the pause between two checks of the file: makes the next change to the file instead."""
        action = next(saves, None)
        if action is None:
            raise KeyboardInterrupt
        action()

    monkeypatch.setattr("bridle.cli.watch.sleep", save)
    assert main(["run", "-l", "3", "--watch", str(script), "-u", str(files / "echo.wasm")]) == 130
    captured = capsys.readouterr()
    assert [line for line in captured.out.splitlines() if line.startswith("[0]: ")] == [
        "[0]: first",
        "[0]: second",
        "[0]: third!",
    ]
    assert captured.err.count(f"waiting for {script}") == 3


def test_watch_shows_an_error_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    script = tmp_path / "script.txt"
    script.write_text("x")
    monkeypatch.setattr("bridle.cli.watch.sleep", stop)
    assert main(["run", "-l", "3", "--watch", str(script), "-c", "no-such-tag"]) == 130
    assert "unknown controller 'no-such-tag'" in capsys.readouterr().err
    assert main(["run", "--watch", "-", "-c", "none"]) == 2
    assert "--watch needs a FILE" in capsys.readouterr().err


def test_a_run_that_is_out_of_date_is_left(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endless.wasm").write_bytes(ENDLESS)
    states: Iterator[Stamp] = iter([((1, 1),), ((2, 2),), ((2, 2),), ((2, 2),)])

    def state(paths: Sequence[Path]) -> Stamp:
        found = next(states, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr("bridle.cli.watch.stamp", state)
    assert main(["run", "-l", "3", "--watch", str(tmp_path / "endless.wasm")]) == 130
    captured = capsys.readouterr()
    assert "waiting for" in captured.err and "[DONE]" not in captured.out


def test_a_server_that_says_later_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(seconds / 25)

    monkeypatch.setattr("bridle.cli.control.sleep", wait)
    refusals = ("--limit", "max_prepare_wait=0")  # the first request only begins to compile what ships
    with controlled_model(tmp_path, *refusals) as model, served(lent(model)) as url:
        monkeypatch.setenv("AICI_API_BASE", f"{url}/v1")
        assert main(["run", "-l", "3", "-c", "uppercase", "-p", "x", "-t", "4"]) == 0
        captured = capsys.readouterr()
        assert "[DONE]" in captured.out
        assert captured.err.count("uppercase is being compiled") == len(waits) > 0 and set(waits) == {5.0}
        assert main(["run", "-c", "no-such-tag"]) == 1 and len(waits) == captured.err.count("; waiting")
        monkeypatch.setattr("bridle.cli.control.PATIENCE", 4.0)
        (tmp_path / "new").mkdir()
    with controlled_model(tmp_path / "new", *refusals) as model, served(lent(model)) as url:
        monkeypatch.setenv("AICI_API_BASE", f"{url}/v1")
        assert main(["run", "-c", "uppercase"]) == 1
        assert "(status 429)" in capsys.readouterr().err


def test_the_argument_may_come_from_standard_input(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("piped"))
    assert main(["run", "-l", "3", "-", "-u", str(files / "echo.wasm")]) == 0
    assert capsys.readouterr().out.startswith("[0]: piped")


def test_infer_prints_the_text_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["infer", "hello", "-t", "5"]) == 0
    text = capsys.readouterr().out
    assert main(["infer", "hello", "-t", "5", "-l", "3"]) == 0
    assert f"[Response] {text}" in capsys.readouterr().out


def test_log_level_five_prints_what_the_server_sends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-c", "none", "-p", "x", "-t", "1", "-l", "5"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["object"] == "initial-run"


def test_an_environment_for_serve_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BRIDLE_LOG_LEVEL", "info")
    assert main(["run", "-c", "none", "-p", "x", "-t", "1"]) == 0
    assert "[DONE]" not in capsys.readouterr().out
    monkeypatch.setenv("BRIDLE_RUN_LOG_LEVEL", "info")
    assert main(["run", "-c", "none", "-p", "x", "-t", "1"]) == 0
    assert "[DONE]" in capsys.readouterr().out


def test_a_failed_controller_is_exit_code_1(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "response.json"
    assert main(["run", "-l", "3", "-u", str(files / "trap.wasm"), "--save", str(saved)]) == 1
    captured = capsys.readouterr()
    assert "[0]: so far" in captured.out
    assert captured.err.startswith("bridle: the controller failed: ") and "unreachable" in captured.err
    assert "unreachable" in json.loads(saved.read_text())["error"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run"], 2, "there is nothing to run"),
        (["run", "{files}/script.txt"], 2, "script.txt': give a file with the ending .py, .js, .json or .wasm"),
        (["run", "{files}/nothing.js"], 2, "nothing.js cannot be read: No such file or directory"),
        (["run", "{files}/latin.js"], 2, "latin.js is not text: byte 3 is not UTF-8"),
        (["run", "{files}/none.txt", "-c", "x"], 2, "none.txt"),
        (["run", "-c", "x", "-u", "{files}/echo.wasm"], 2, "not both"),
        (["run", "-u", "{files}/none.wasm"], 2, "No such file"),
        (["run", "-u", "{files}/bad.wasm"], 1, "(status 400)"),
        (["run", "-c", "no-such-tag"], 1, "unknown controller 'no-such-tag'; the standard controllers are"),
        (["run", "-c", "gh:someone/else/ctrl"], 1, "'gh:someone/else/ctrl' is not installed on this server"),
        (["run", "-c", "none", "-l", "loud"], 2, "--log-level is 'loud'"),
        (["tag", "f" * 64, "name"], 1, "unknown module"),
        (["tags", "--base-url", "http://127.0.0.1:9/v1"], 1, "cannot be reached"),
        (["tags", "--base-url", "{url}/elsewhere"], 1, "(status 404)"),
        (["tags", "--base-url", "file:///etc/passwd"], 2, "must be an http or https address such as http"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], code: int, message: str, files: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(files=files, url=url) for word in words]) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("bridle: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_keys_come_from_the_url_or_a_flag(
    model: LoadedModel, tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.db"
    assert main(["keys", "add", "ann", "--keys", str(path)]) == 0
    key = capsys.readouterr().out.strip()
    keys = KeyStore(path)
    with served(lent(model), keys=keys) as url:
        assert main(["tags", "--base-url", f"{url}/v1/"]) == 1
        assert re.search("API key is needed.* give one with --key", capsys.readouterr().err)
        assert main(["tags", "--base-url", f"{url}/v1/", "--key", key]) == 0
        monkeypatch.setenv("AICI_API_BASE", f"{url}/v1/#key={key}")
        assert main(["upload", str(files / "echo.wasm"), "-T", "ann.echo"]) == 0
        assert main(["upload", str(files / "echo.wasm"), "-T", "echo"]) == 1
        assert "may only set tags that start with 'ann.'" in capsys.readouterr().err
        assert main(["keys", "remove", "ann", "--keys", str(path)]) == 0  # counts at once
        assert main(["tags"]) == 1
        assert "does not know" in capsys.readouterr().err
    keys.close()


def test_keys_are_listed_without_telling_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flag = ["--keys", str(tmp_path / "keys.db")]
    assert main(["keys", "add", "ann", *flag]) == 0
    first = capsys.readouterr().out.strip()
    assert main(["keys", "add", "root", "--admin", *flag]) == 0
    second = capsys.readouterr().out.strip()
    assert main(["keys", "list", *flag]) == 0
    listed = capsys.readouterr().out
    assert "ann" in listed and "admin" in listed and first not in listed and second not in listed
    shown = listed.splitlines()[0].split()[0]
    assert main(["keys", "remove", shown, *flag]) == 0
    assert main(["keys", "list", *flag]) == 0
    assert "ann" not in capsys.readouterr().out
    assert main(["keys", "limit", "root", "--weight", "2", "--requests-per-minute", "60", *flag]) == 0
    assert capsys.readouterr().out == "root: 60 requests a minute, weight 2\n"
    assert main(["keys", "list", *flag]) == 0
    assert capsys.readouterr().out.endswith("  60 requests a minute, weight 2\n")
    assert main(["keys", "add", "root", "--group", "red", *flag]) == 0
    capsys.readouterr()
    assert main(["keys", "list", *flag]) == 0
    assert capsys.readouterr().out.endswith("  group red, 60 requests a minute, weight 2\n")
    assert main(["keys", "remove", "root", *flag]) == 0 and main(["keys", "list", *flag]) == 0
    assert "`bridle keys add USER` makes one" in capsys.readouterr().err
    assert main(["keys", "remove", "nobody", *flag]) == 2
    assert main(["keys", "add", "a b", *flag]) == 2
    (tmp_path / "text").write_text("no database at all, but long enough to be looked at as one" * 20)
    assert main(["keys", "list", "--keys", str(tmp_path / "text")]) == 2
    assert "cannot be used as a file of API keys" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["list"], ["remove", "ann"], ["limit", "ann"]])
def test_a_file_of_keys_that_is_not_there_is_not_made(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "misspelled.db"
    assert main(["keys", *words, "--keys", str(path)]) == 2
    assert f"there is no file of API keys {path}" in capsys.readouterr().err and not path.exists()


@pytest.mark.slow  # `aici/test_runner.py` replays one, `traces/test_replay.py` with the command
def test_a_recorded_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, trace = tokenizer_folder(), tmp_path / "trace.jsonl"
    config = RuntimeConfig(str(folder), extra_args=("--store", str(tmp_path / "store")), trace=trace)
    pool = RuntimePool(config, VOCAB_SIZE)
    upload_module(pool, ECHO, LOCAL_ADMIN)
    pool.shutdown()
    words = ["replay", str(trace), str(folder), "--control-store", str(tmp_path / "other")]
    assert main(words) == 0
    assert capsys.readouterr().out == "3 exchanges, 0 with another reply\n"  # ping, tokens, mk_module
    trace.write_text(trace.read_text().replace(f'"wasm_size":{len(ECHO)}', '"wasm_size":1'))
    assert main(words) == 1
    shown = capsys.readouterr().out
    assert "trace.jsonl:4: mk_module" in shown and "1 with another reply" in shown
    assert main(["explain", str(trace)]) == 0
    told = capsys.readouterr().out
    assert "3 exchanges with the control runtime" in told and "of which 0 were answered with an error" in told
    assert main(["test", str(trace), "--tokenizer", str(folder), "--json"]) == 1
    (tested,) = json.loads(capsys.readouterr().out)["traces"]
    assert (tested["outcome"], tested["trace"]) == ("different", "trace.jsonl")
    assert tested["sentences"][0] == "trace.jsonl:4: mk_module"
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"bridle-{os.getpid()}-")]


def test_the_runtime_takes_all_arguments(tmp_path: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runtime"]) == 2
    assert "--server" in capsys.readouterr().err
