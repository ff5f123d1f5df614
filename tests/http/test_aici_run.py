"""Tests of `/v1/run` on a running server: items and their order, forks, marks, variables, counts, and every failure."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bridle.engine.statistics import EngineStatistics
from bridle.outputs import Usage
from bridle.serving import REWIND_MARK, LoadedModel
from tests.aici.guests import (
    END,
    SHOW_MODULE_ARGUMENT,
    TRAP,
    by_branch,
    force,
    guest1,
    guest2,
    mask,
    result,
    say,
    splice,
    store,
)
from tests.http.controlled import (
    ENDLESS,
    VOCAB_SIZE,
    Client,
    controlled_model,
    events_of,
    ids,
    joined,
    last_fork,
    lent,
    pick,
    runs_of,
    text_of,
)
from tests.http.harness import NAME, served
from tests.waiting import PATIENCE, until

LONG = 8_000  # tokens: takes far longer than anything that interrupts it
PROMPT = "The prompt here"  # one token a letter, but for " the" and the like


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with controlled_model(tmp_path_factory.mktemp("store")) as model:
        yield model


@pytest.fixture(scope="module")
def url(model: LoadedModel) -> Iterator[str]:
    with served(lent(model)) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    client = Client(url)
    yield client
    client.close()


def test_a_stream_has_its_items_in_order(client: Client) -> None:
    first, *runs, done = client.run(guest2([pick("a"), pick("b"), END]), prompt=PROMPT)
    assert set(first) == {"id", "object", "created", "model"}
    assert first["id"].startswith("run-") and first["object"] == "initial-run" and first["model"] == NAME
    assert done == "[DONE]"
    assert [item["object"] for item in runs] == ["run"] * len(runs)
    assert text_of(runs) == "ab"
    assert last_fork(runs) | {"text": ""} == {
        "index": 0,
        "text": "",
        "error": "",
        "logs": "",
        "storage": [],
        "finish_reason": "aici-stop",
    }
    assert all("finish_reason" not in fork for item in runs[:-1] for fork in item["forks"])


def test_usage_counts_like_the_original(client: Client) -> None:
    prompt = "x" * 15
    assert len(ids(prompt)) == 15
    for num_tokens, counts in ((1, (1, 15, 17)), (2, (2, 16, 20)), (3, (3, 17, 23))):
        items = client.run(guest2([pick("a"), pick("b"), pick("c")]), prompt=prompt, max_tokens=num_tokens)
        usage = runs_of(items)[-1]["usage"]
        assert (usage["sampled_tokens"], usage["ff_tokens"], usage["cost"]) == counts
        assert last_fork(items)["finish_reason"] == "length"


@pytest.mark.parametrize("waits", [0, 1])
def test_a_prompt_counts_whichever_output_draws(client: Client, waits: int) -> None:
    """The prompt counts because the fork's model input includes it, even if the first output only waits."""
    wait = [result({"branches": [], "wait": {"ms": 20}})]
    fork = [result({"branches": [splice([]), splice([])]})]
    branches = [wait, pick("a")] if waits == 0 else [pick("a"), wait]
    items = client.run(guest2([fork, [by_branch(*branches)], END]), prompt="x" * 15)
    usage = runs_of(items)[-1]["usage"]
    cost = {"sampled_tokens": 1, "ff_tokens": 15 + waits * 0 + (waits == 0), "cost": 17 + (waits == 0)}
    assert usage == cost | Usage().predictions()


def test_forced_tokens_are_text_and_cost_less(client: Client) -> None:
    items = client.run(guest2([force(ids("forced ")), pick("a"), END]), prompt="x" * 5)
    assert text_of(items) == "forced a"
    usage = runs_of(items)[-1]["usage"]
    assert usage["sampled_tokens"] == 1
    assert usage["ff_tokens"] == 5 + len(ids("forced "))


def test_taken_back_text_is_marked(client: Client) -> None:
    wasm = guest2([force(ids("wrong")), pick("!"), force(ids("right"), backtrack=1 + len(ids("wrong"))), END])
    for _ in range(3):  # however the steps happen to be merged
        items = client.run(wasm, prompt="x")
        assert text_of(items) == f"wrong!{REWIND_MARK}right"
        told = [fork["final_text"] for item in runs_of(items) for fork in item["forks"] if "final_text" in fork]
        assert told == ["right"] and last_fork(items)["final_text"] == "right"
    assert "final_text" not in last_fork(client.run(guest2([pick("a"), END]), prompt="x"))  # nothing was taken back


def test_a_fork_repeats_the_text_before_it(client: Client) -> None:
    branches = result({"branches": [splice(ids("-left")), splice(ids("-right"))]})
    wasm = guest2(
        [force(ids("start")), [branches], [by_branch([say("L\n"), *pick("1")], [say("R\n"), *pick("2")])], END]
    )
    items = client.run(wasm, prompt="x")
    assert [text_of(items, index) for index in (0, 1)] == ["start-left1", "start-right2"]
    assert [joined(items, "logs", index) for index in (0, 1)] == ["L\n", "R\n"]
    assert [last_fork(items, index)["finish_reason"] for index in (0, 1)] == ["aici-stop"] * 2
    forks = [[fork["index"] for fork in item["forks"]] for item in runs_of(items)]
    assert forks[-1] == [0, 1] and all(each in ([0], [0, 1]) for each in forks)


def test_logs_variables_and_the_argument(client: Client) -> None:
    wasm = guest2(
        [[SHOW_MODULE_ARGUMENT, store("answer", "3432"), store("answer", "21", op="Append"), *pick("a")], END]
    )
    items = client.run(wasm, {"steps": [1, "é"]}, prompt="x")
    assert joined(items, "logs").startswith('{"steps":[1,"é"]}')
    writes = [write for item in runs_of(items) for fork in item["forks"] for write in fork["storage"]]
    assert writes == [
        {"WriteVar": {"name": "answer", "value": "3432", "op": "Set", "when_version_is": None}},
        {"WriteVar": {"name": "answer", "value": "21", "op": "Append", "when_version_is": None}},
    ]
    assert joined(client.run(wasm, "as it is", prompt="x"), "logs").startswith("as it is")


def test_no_prompt_is_the_start_token(client: Client) -> None:
    usage = runs_of(client.run(guest2([pick("a"), END])))[-1]["usage"]
    assert usage == {"sampled_tokens": 1, "ff_tokens": 1, "cost": 3} | Usage().predictions()


def test_a_run_without_a_controller_generates_plainly(client: Client) -> None:
    items = client.run("none", PROMPT, max_tokens=4)
    assert last_fork(items)["finish_reason"] in ("length", "eos")
    again = client.run("none", 0, prompt=PROMPT, max_tokens=4, model=NAME)
    assert text_of(again) == text_of(items)
    usage = runs_of(items)[-1]["usage"]
    assert usage["ff_tokens"] == len(ids(PROMPT)) + usage["sampled_tokens"] - 1 + 0 * len(items)


def test_a_trap_is_told_in_band(client: Client) -> None:
    items = client.run(guest2([[say("so far\n"), *pick("a")], [TRAP]]), prompt="x")
    fork = last_fork(items)
    assert fork["finish_reason"] == "fail" and "unreachable" in fork["error"]
    logs = joined(items, "logs")
    assert logs.startswith("so far\n") and "unreachable" in logs
    assert items[-1] == "[DONE]"


def test_a_deadlock_is_told_in_band(client: Client) -> None:
    waits = [result({"branches": [], "wait": {"variable": "answer"}})]
    items = client.run(guest2([pick("a"), waits]), prompt="x")
    fork = last_fork(items)
    assert fork["finish_reason"] == "deadlock" and "output 0 waits for variable 'answer'" in fork["error"]
    assert fork["error"] in fork["logs"] and items[-1] == "[DONE]"


@pytest.mark.parametrize("where", ["init", "create"])
def test_a_failure_at_init_is_told_in_band(client: Client, where: str) -> None:
    wasm = guest2([END], **{where: [say("hm\n"), TRAP]})  # type: ignore[arg-type]
    items = client.run(wasm, prompt="x")
    assert items[0]["object"] == "initial-run" and items[-1] == "[DONE]"
    fork = last_fork(items)
    assert fork["finish_reason"] == "fail" and "unreachable" in fork["error"] and "hm" in fork["logs"]


GOOD: dict[str, Any] = {"controller": "none", "controller_arg": "a"}


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({"controller": None}, 400, "controller"),
        ({"controller": ""}, 400, "controller"),
        ({"controller": "x" * 300}, 400, "controller"),
        ({"controller": "no-such-tag"}, 400, "no-such-tag"),
        ({"controller": "f" * 64}, 400, "f" * 64),
        ({"controller": "../etc/passwd"}, 400, "passwd"),
        ({"controller": "gh:someone/else/ctrl"}, 400, "not installed"),
        ({"controller": "gh:x"}, 400, "gh:owner/repo"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0.5}, 400, "top_p"),
        ({"top_p": 0, "temperature": 1}, 400, "top_p"),
        ({"top_k": 5}, 400, "top_k"),
        ({"top_k": 0, "temperature": 1}, 400, "top_k"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 512}, 400, "max_tokens"),
        ({"controller_arg": "word " * 1000}, 400, "prompt"),
        ({"model": "other"}, 404, "other"),
    ],
)
def test_wrong_runs_are_refused(client: Client, changes: dict[str, Any], status: int, word: str) -> None:
    answer = client.post("/v1/run", **(GOOD | changes))
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_malformed_bodies_are_refused(client: Client) -> None:
    json_type = {"content-type": "application/json"}
    assert client.http.post("/v1/run", content=b"{", headers=json_type).status_code == 400
    assert client.post("/v1/run", controller="none").status_code == 400  # controller_arg is required
    assert client.http.post("/v1/run", content=b" " * (5 << 20), headers=json_type).status_code == 413


def leave(url: str, module: str) -> None:
    """Start an endless run, read its first tokens, and disconnect."""
    body = {"controller": module, "controller_arg": "", "prompt": "x", "max_tokens": LONG}
    with httpx.Client(base_url=url, timeout=PATIENCE) as client, client.stream("POST", "/v1/run", json=body) as answer:
        items = events_of(answer.iter_lines())
        while not any(fork["text"] for fork in next(items).get("forks", ())):
            pass


def wait_until_free(model: LoadedModel, num_free: int) -> EngineStatistics:
    """Wait until the engine's thread has no steps left. All resources that will be freed are free then."""

    def look() -> EngineStatistics | None:
        now = model.client.statistics()
        is_free = now.num_running == now.num_waiting == 0 and now.num_free_blocks == num_free
        return now if is_free else None

    found = until(look, "that all is free")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """Yield a model with a long context, and a control runtime that allows few instances."""
    store = tmp_path_factory.mktemp("store")
    with controlled_model(store, "--limit", "max_instances=3", max_model_len=2 * LONG) as model:
        yield model


@pytest.fixture
def roomy_url(roomy: LoadedModel) -> Iterator[str]:
    with served(lent(roomy)) as url:
        yield url


def test_who_leaves_frees_everything_within_two_steps(
    roomy: LoadedModel, roomy_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(roomy_url)
    module, num_free = client.upload(ENDLESS), roomy.client.statistics().num_free_blocks
    client.close()
    cancelled_at: list[int] = []
    cancel = roomy.client.cancel

    def noting(request_id: str) -> None:
        cancel(request_id)
        cancelled_at.append(roomy.client.statistics().num_steps)

    monkeypatch.setattr(roomy.client, "cancel", noting)
    leave(roomy_url, module)
    after = wait_until_free(roomy, num_free)
    until(lambda: cancelled_at)
    # The step under way counts, and one more may begin before the cancel is seen.
    assert after.num_steps - cancelled_at[0] <= 2 + 1


def test_who_leaves_leaves_no_instance(roomy: LoadedModel, roomy_url: str) -> None:
    client = Client(roomy_url)
    module, num_free = client.upload(ENDLESS), roomy.client.statistics().num_free_blocks
    for _ in range(8):  # far more than may be alive at once
        leave(roomy_url, module)
        wait_until_free(roomy, num_free)
    assert text_of(client.run(guest2([pick("a"), END]), prompt="x")) == "a"
    client.close()


def test_a_killed_runtime_ends_its_runs_and_comes_back(roomy: LoadedModel, roomy_url: str) -> None:
    client = Client(roomy_url)
    module = client.upload(ENDLESS)
    assert 'bridle_engine_control_up{model="scripted"} 1.0' in client.http.get("/metrics").text
    assert roomy.control is not None and roomy.control.runtime_pid is not None
    body = {"controller": module, "controller_arg": "", "prompt": "x", "max_tokens": LONG}
    with client.http.stream("POST", "/v1/run", json=body) as answer:
        items = events_of(answer.iter_lines())
        first = [next(items), next(items)]
        os.killpg(roomy.control.runtime_pid, signal.SIGKILL)
        rest = [*first, *items]
    fork = last_fork(rest)
    assert fork["finish_reason"] == "fail" and "runtime" in fork["error"] and rest[-1] == "[DONE]"
    items_again = client.run(module, prompt="x", max_tokens=3)  # waits for the new one
    assert text_of(items_again) == "xxx"
    assert 'bridle_engine_control_restarts_total{model="scripted"} 1.0' in client.http.get("/metrics").text
    client.close()


def test_controllers_of_the_first_generation_run_too(client: Client) -> None:
    go = {"suspend": False, "num_forks": 1, "ff_tokens": []}
    pre = [[result(go | {"ff_tokens": ids("old ")})], [result(go)]]
    mid = [mask(ids("x"), VOCAB_SIZE, new=False), result({"SampleWithBias": {}})]
    stay, stop = [result({"stop": False})], [result({"stop": True})]
    items = client.run(guest1(pre, [mid], [stay, stay, stop]), prompt="x", max_tokens=20)
    fork = last_fork(items)
    assert (fork["error"], fork["finish_reason"]) == ("", "aici-stop")
    assert text_of(items).startswith("old x")


def test_a_run_begins_with_a_conversation(url: str) -> None:
    said = [{"role": "user", "content": "hi"}]

    def run(**body: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/run", json={"controller": "none", "controller_arg": None, "max_tokens": 1} | body)

    def num_fed(**body: Any) -> int:
        answer = run(**body)
        assert answer.status_code == 200, answer.text
        return int(runs_of(list(events_of(iter(answer.text.splitlines()))))[-1]["usage"]["ff_tokens"])

    plain = num_fed(messages=said)
    assert plain > num_fed(prompt="hi")
    assert num_fed(messages=[*said, {"role": "assistant", "content": "Well"}], continue_final_message=True) > plain
    for body, words in (
        ({"messages": said, "prompt": "x"}, "the body has both prompt and messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "the body has tools but no messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": "hi"}, "messages"),
    ):
        refused = run(**body)
        assert refused.status_code in (400, 422) and words in refused.text
