"""Tests of controllers on the OpenAI routes: forks as choices, logs and variables next to them, and the three ways to
report text that is rolled back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bridle.cli import main
from bridle.serving import REWIND_MARK, LoadedModel
from tests.aici.guests import (
    END,
    SHOW_MODULE_ARGUMENT,
    TRAP,
    by_branch,
    force,
    guest2,
    load,
    result,
    sample,
    say,
    splice,
    store,
)
from tests.http.controlled import VOCAB_SIZE, Client, controlled_model, ids, pick
from tests.http.harness import NAME, served, tokenizer

HI = [{"role": "user", "content": "Hi"}]
REWINDING = guest2([force(ids("wrong")), pick("!"), force(ids("right"), backtrack=1 + len(ids("wrong"))), END])
FORKING = guest2(
    [
        force(ids("start")),
        [result({"branches": [splice(ids("-left")), splice(ids("-right"))]})],
        [by_branch([say("L\n"), *pick("1")], [say("R\n"), *pick("2")])],
        END,
    ]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with controlled_model(tmp_path_factory.mktemp("store")) as model:
        yield model


@pytest.fixture(scope="module")
def client(model: LoadedModel) -> Iterator[Client]:
    with served(model) as url:
        client = Client(url)
        yield client
        client.close()


@pytest.fixture(scope="module")
def names(client: Client) -> dict[str, str]:
    """Return the module ids by controller name."""
    return {"rewinding": client.upload(REWINDING), "forking": client.upload(FORKING)}


def complete(client: Client, **body: Any) -> Any:
    answer = client.post("/v1/completions", **({"prompt": "x", "max_tokens": 50} | body))
    answer.raise_for_status()
    return answer.json()


def chunks(client: Client, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """Return the choices of a stream's chunks."""
    given = {"messages": HI} if "chat" in path else {"prompt": "x"}
    items = client.stream(path, stream=True, max_tokens=50, **(given | body))
    assert items.pop() == "[DONE]"
    return [choice for item in items for choice in item["choices"]]


def followed(choices: list[Any], index: int = 0) -> str:
    """Return the text of a choice, as a client assembles it from events with rewind `event`."""
    text = ""
    for choice in choices:
        if choice["index"] == index:
            num_chars = choice.get("rewind", {}).get("chars", 0)
            assert num_chars <= len(text)
            text = text[: len(text) - num_chars] + (choice["text"] if "text" in choice else text_of_delta(choice))
    return text


def text_of_delta(choice: Any) -> str:
    return choice["delta"].get("content") or ""


def test_a_controller_rides_on_a_completion(client: Client, names: dict[str, str]) -> None:
    answer = complete(client, controller=names["rewinding"])
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("right", "stop")
    details = answer["usage"]["completion_tokens_details"]
    num_wrong, num_right = len(ids("wrong")), len(ids("right"))
    assert details["sampled_tokens"] == 1
    assert details["forced_tokens"] == num_wrong + num_right
    assert details["rewound_tokens"] == num_wrong + 1
    assert answer["usage"]["completion_tokens"] == num_right
    assert "logs" not in choice and "storage" not in choice and "forked_from" not in choice


def test_a_controller_rides_on_a_chat_with_the_official_client(client: Client, names: dict[str, str]) -> None:
    with openai.OpenAI(base_url=f"{client.http.base_url}/v1", api_key="none", max_retries=0) as official:
        extra = {"controller": names["rewinding"], "controller_arg": {"a": 1}}
        answer = official.chat.completions.create(model=NAME, messages=HI, extra_body=extra)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "right"


def test_held_text_never_changes(client: Client, names: dict[str, str]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for more in ({}, {"rewind": "hold"}):
            got = chunks(client, path, controller=names["rewinding"], **more)
            assert followed(got) == "right"
            assert not any("rewind" in choice for choice in got)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_events_tell_what_is_taken_back(client: Client, names: dict[str, str], path: str) -> None:
    got = chunks(client, path, controller=names["rewinding"], rewind="event")
    assert followed(got) == "right"
    for choice in got:
        assert set(choice.get("rewind", {})) <= {"tokens", "chars"}
    slow = guest2([pick("a"), pick("b"), force(ids("c"), backtrack=1), *[pick("d")] * 3, force([], backtrack=2), END])
    assert followed(chunks(client, path, controller=client.upload(slow), rewind="event")) == "acd"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_marks_stand_where_text_was_taken_back(client: Client, names: dict[str, str], path: str) -> None:
    got = chunks(client, path, controller=names["rewinding"], rewind="mark")
    assert followed(got) == f"wrong!{REWIND_MARK}right"


def test_forks_are_further_choices(client: Client, names: dict[str, str]) -> None:
    answer = complete(client, controller=names["forking"])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["text"] for choice in answer["choices"]] == ["start-left1", "start-right2"]
    assert [choice["logs"] for choice in answer["choices"]] == ["L\n", "R\n"]
    assert "forked_from" not in answer["choices"][0] and answer["choices"][1]["forked_from"] == 0
    chat = client.post("/v1/chat/completions", messages=HI, controller=names["forking"]).json()
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["start-left1", "start-right2"]
    assert [choice.get("forked_from") for choice in chat["choices"]] == [None, 0]


@pytest.mark.parametrize("rewind", ["hold", "event", "mark"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_forks_stream_as_further_choices(client: Client, names: dict[str, str], path: str, rewind: str) -> None:
    got = chunks(client, path, controller=names["forking"], rewind=rewind)
    assert [followed(got, index) for index in (0, 1)] == ["start-left1", "start-right2"]
    assert {choice["index"]: choice["forked_from"] for choice in got if "forked_from" in choice} == {1: 0}
    logs = ["".join(choice.get("logs", "") for choice in got if choice["index"] == index) for index in (0, 1)]
    assert logs == ["L\n", "R\n"]
    assert sorted(choice["index"] for choice in got if choice["finish_reason"]) == [0, 1]


def test_forks_of_several_prompts_have_numbers_of_their_own(client: Client, names: dict[str, str]) -> None:
    body = {"prompt": ["x", "y"], "controller": names["forking"]}
    whole = complete(client, **body)["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole] == ["start-left1"] * 2 + ["start-right2"] * 2
    assert [choice.get("forked_from") for choice in whole] == [None, None, 0, 1]
    got = chunks(client, **body)
    assert [followed(got, index) for index in range(4)] == [choice["text"] for choice in whole]
    origins = {choice["index"]: choice["forked_from"] for choice in got if "forked_from" in choice}
    assert sorted(origins) == [2, 3] and sorted(origins.values()) == [0, 1]


COUNTING = guest2([[store("x", "61", "Append"), load("x"), *sample(ids("abcdefgh"), VOCAB_SIZE)], END])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_choice_has_a_controller_for_itself(client: Client, path: str) -> None:
    """Each choice has its own instance, variables and random numbers. The prompt is counted once, and a seed repeats a
    choice."""
    module = client.upload(COUNTING)
    body = {"messages": HI} if "chat" in path else {"prompt": "x"}
    more = {"controller": module, "n": 4, "temperature": 5.0, "seed": 7}
    answer = client.post(path, **body, **more).json()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all('"version":1,"value":"61"' in choice["logs"] for choice in choices)
    assert [choice["seed"] for choice in choices] == [7, 8, 9, 10]
    alone = client.post(path, **body, **{**more, "n": 1, "seed": 9}).json()
    texts = [choice["message"]["content"] if "chat" in path else choice["text"] for choice in choices]
    only = alone["choices"][0]
    assert texts[2] == (only["message"]["content"] if "chat" in path else only["text"])
    assert answer["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 4
    got = chunks(client, path, **more)
    assert {choice["index"] for choice in got} == {0, 1, 2, 3}
    assert [followed(got, index) for index in range(4)] == texts if "chat" in path else True


def test_choices_that_fork(client: Client, names: dict[str, str]) -> None:
    """The numbers of forks follow those of the requested choices, whatever choice a fork comes from."""
    choices = complete(client, controller=names["forking"], n=2)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == ["start-left1"] * 2 + ["start-right2"] * 2
    assert sorted(choice["forked_from"] for choice in choices[2:]) == [0, 1]
    chat = client.post("/v1/chat/completions", messages=HI, controller=names["forking"], n=2).json()
    assert [choice.get("forked_from") for choice in chat["choices"]] == [None, None, 0, 1]


def test_logs_variables_and_the_argument(client: Client) -> None:
    wasm = guest2([[SHOW_MODULE_ARGUMENT, store("v", "6869"), *pick("a")], END])
    module = client.upload(wasm)
    command = {"WriteVar": {"name": "v", "value": "6869", "op": "Set", "when_version_is": None}}
    (choice,) = complete(client, controller=module, controller_arg=[1])["choices"]
    assert choice["logs"].startswith("[1]") and choice["storage"] == [command]
    got = chunks(client, controller=module, controller_arg="text")
    assert "".join(choice.get("logs", "") for choice in got).startswith("text")
    assert [write for choice in got for write in choice.get("storage", [])] == [command]


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": HI, "max_tokens": 20}),
    ("/v1/responses", {"input": "Hi"}),
]


@pytest.mark.parametrize(("path", "body"), OTHERS)
def test_other_apis_tell_logs_and_variables_in_the_end(client: Client, path: str, body: dict[str, Any]) -> None:
    module = client.upload(guest2([[say("one\n"), *pick("a")], [say("two\n"), store("v", "6869"), *pick("b")], END]))
    whole = client.post(path, controller=module, **body).json()
    assert whole["logs"].startswith("one\ntwo\n") and len(whole["storage"]) == 1
    sent = client.stream(path, controller=module, stream=True, **body)
    events = [event for event in sent if event != "[DONE]"]
    (told,) = [event.get("response", event) for event in events if "logs" in event.get("response", event)]
    assert told["logs"] == whole["logs"] and told["storage"] == whole["storage"]


@pytest.mark.parametrize(("path", "body"), OTHERS)
def test_streams_without_a_word_for_rewinds_hold(
    client: Client, names: dict[str, str], path: str, body: dict[str, Any]
) -> None:
    for policy in ("event", "mark"):
        answer = client.post(path, controller=names["rewinding"], rewind=policy, stream=True, **body)
        assert answer.status_code == 400 and "it must be 'hold'" in answer.json()["error"]["message"]
    sent = client.stream(path, controller=names["rewinding"], stream=True, **body)
    events = [event for event in sent if event != "[DONE]"]
    deltas = [event.get("delta") for event in events]
    assert "".join(delta if isinstance(delta, str) else (delta or {}).get("text", "") for delta in deltas) == "right"


def test_each_of_the_best_has_a_controller_for_itself(client: Client) -> None:
    module = client.upload(guest2([[say("log\n"), *sample(ids("abcdefgh"), VOCAB_SIZE)] for _ in range(6)] + [END]))
    fields = {"controller": module, "best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 20}
    answer = client.post("/generate", inputs="x", parameters=fields).json()
    runs = [answer["details"], *answer["details"]["best_of_sequences"]]
    assert len({run["seed"] for run in runs}) == 3 and all(run["logs"].startswith("log\n") for run in runs)
    means = [sum(row["logprob"] for row in run["tokens"]) / len(run["tokens"]) for run in runs]
    assert means == sorted(means, reverse=True)


def test_log_probabilities_follow_rewinds(client: Client) -> None:
    wasm = guest2([pick("a"), pick("b"), force(ids("c"), backtrack=1), pick("d"), END])
    module = client.upload(wasm)
    (whole,) = complete(client, controller=module, logprobs=0)["choices"]
    assert whole["text"] == "acd" and whole["logprobs"]["tokens"] == ["a", "c", "d"]
    tokens: list[str] = []
    offsets: list[int] = []
    for choice in chunks(client, controller=module, logprobs=0, rewind="event"):
        num_taken = choice.get("rewind", {}).get("tokens", 0)
        del tokens[len(tokens) - num_taken :], offsets[len(offsets) - num_taken :]
        tokens += (choice["logprobs"] or {}).get("tokens", [])
        offsets += (choice["logprobs"] or {}).get("text_offset", [])
    assert tokens == ["a", "c", "d"] and offsets == [0, 1, 2]


def test_echo_shows_the_prompt_that_was_used(client: Client) -> None:
    module = client.upload(guest2([pick("a"), END], prompt=ids("other ")))
    answer = complete(client, controller=module, echo=True)
    assert answer["choices"][0]["text"] == "other a"
    assert answer["usage"]["prompt_tokens"] == len(ids("other "))


def test_the_end_token_belongs_to_the_controller(client: Client) -> None:
    from tests.aici.guests import sample

    eos = tokenizer().eos_token_ids[0]
    module = client.upload(guest2([pick("a"), sample([eos], VOCAB_SIZE), pick("b"), END]))
    assert complete(client, controller=module)["choices"][0]["text"] == "ab"
    assert complete(client, controller=module, ignore_eos=False)["choices"][0]["text"] == "a"


def test_a_trap_is_an_error_with_logs(client: Client) -> None:
    module = client.upload(guest2([[say("so far\n"), *pick("a")], [TRAP]]))
    answer = client.post("/v1/completions", prompt="x", controller=module)
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["code"].startswith("controller") and "unreachable" in error["message"]
    assert error["logs"].startswith("so far\n")
    items = client.stream("/v1/completions", prompt="x", controller=module, stream=True)
    assert "unreachable" in items[-1]["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"controller": "no-such-tag"}, "controller"),
        ({"controller": ""}, "controller"),
        ({"controller": 5}, "controller"),
        ({"controller_arg": "x"}, "controller_arg"),
        ({"controller": "t", "best_of": 2}, "best_of"),
        ({"controller": "t", "n": 2, "best_of": 3}, "best_of"),
        ({"controller": "t", "rewind": "maybe"}, "rewind"),
        ({"controller": "t", "rewind": "mark", "logprobs": 1, "stream": True}, "rewind"),
    ],
)
def test_what_does_not_go_together(client: Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/completions", prompt="x", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_tool_calls_cannot_be_taken_back(client: Client) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": HI, "controller": "t", "rewind": "event", "stream": True, "tools": tools}
    answer = client.post("/v1/chat/completions", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "rewind"


def test_no_controller_is_no_controller(client: Client) -> None:
    plain = complete(client, max_tokens=5, seed=1)
    assert complete(client, max_tokens=5, seed=1, controller="none")["choices"] == plain["choices"]


# -- several controllers on one request -----------------------------------------------------------------------------

ROUTES: list[tuple[str, dict[str, Any], tuple[str | int, ...]]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": 9}, ("choices", 0, "text")),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 9}, ("choices", 0, "message", "content")),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 9}, ("output", 0, "content", 0, "text")),
    ("/v1/messages", {"model": NAME, "messages": HI, "max_tokens": 9}, ("content", 0, "text")),
    ("/generate", {"inputs": "x"}, ("generated_text",)),
]


@pytest.fixture(scope="module")
def letters(client: Client) -> list[str]:
    """Return the module ids of two controllers that each allow some letters. Both allow only `x` and `y`."""
    return [client.upload(guest2([pick(text)])) for text in ("vxy", "xyz")]


@pytest.mark.parametrize(("path", "body", "where"), ROUTES)
def test_several_controllers_and_a_constraint_on_every_route(
    client: Client, letters: list[str], path: str, body: dict[str, Any], where: tuple[str | int, ...]
) -> None:
    one, other = letters
    for named in (
        {"controllers": letters},
        {"controller": one, "controllers": [{"controller": other, "controller_arg": "x"}]},
    ):
        given = named | {"constraint": {"regex": "[w-z]{3}"}}
        asked = body | ({"parameters": given | {"max_new_tokens": 9}} if path == "/generate" else given)
        answer = client.post(path, **asked)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        for step in where:
            found = found[step]
        assert re.fullmatch("[xy]{3}", found)
    wrong = {"controllers": [5]}
    refused = client.post(path, **(body | ({"parameters": wrong} if path == "/generate" else wrong)))
    assert refused.status_code in (400, 422)
    assert "controllers[0] is 5; must be a name" in refused.text


def test_several_controllers_of_a_run(client: Client, letters: list[str]) -> None:
    one, other = letters
    body = {"controller": one, "controller_arg": "", "prompt": "x", "constraint": {"regex": "[w-z]{3}"}}
    texts = [
        "".join(fork["text"] for item in items if item != "[DONE]" for fork in item.get("forks", ()))
        for items in (
            client.stream("/v1/run", **body, controllers=[other]),
            client.stream("/v1/run", **(body | {"controller": "none", "controller_arg": None}), controllers=letters),
            client.stream("/v1/run", prompt="x", constraint=body["constraint"], controllers=letters),
        )
    ]
    assert all(re.fullmatch("[xy]{3}", text) for text in texts), texts
    refused = client.post("/v1/run", prompt="x", controllers=[])
    assert refused.status_code in (400, 422) and "controller is required" in refused.text


def test_a_schema_beside_a_controller_that_forces_text(client: Client) -> None:
    """The controller writes the beginning with other tokens than the schema would force. The schema checks these tokens
    and ends the text."""
    name = client.upload(guest2([force(ids('{"n": ')), pick("0123456789}")]))
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema | {"additionalProperties": False}}}
    answer = complete(client, controller=name, response_format=form)
    assert re.fullmatch(r'\{"n": \d+\}', answer["choices"][0]["text"])
    wrong = client.upload(guest2([force(ids('{"m":')), pick("0")]))
    refused = client.post("/v1/completions", prompt="x", max_tokens=9, controller=wrong, response_format=form)
    assert refused.status_code == 422
    told = refused.json()["error"]["message"]
    assert "and 2 (json_schema) cannot be reconciled at position" in told
    assert re.search(r"forces token \d+, which the other controller forbids", told)


def test_controllers_on_the_command_line(client: Client, letters: list[str], tmp_path: Path) -> None:
    one, other = letters
    flags = ["--base-url", str(client.http.base_url), "--save", str(tmp_path / "report.json")]
    assert main(["infer", "x", "-c", one, "--ctrl", other, "--regex", "[w-z]{3}", *flags]) == 0
    (text,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["text"]
    assert re.fullmatch("[xy]{3}", text)
    (tmp_path / "argument").write_text("x", encoding="utf-8")
    words = ["run", str(tmp_path / "argument"), "-c", one, "-c", other, "--prompt", "x", "--max-tokens", "3"]
    assert main([*words, *flags]) == 0
    (text,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["text"]
    assert re.fullmatch("[xy]{3}", text)
