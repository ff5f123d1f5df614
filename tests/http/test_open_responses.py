"""Tests of the Open Responses specification beyond OpenAI's older API: required fields, phases, namespaces of tools,
files, compaction. All tests run the server in this process, with and without streaming."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from bridle.chat.files import MAX_FILE_BYTES, MAX_FILES
from bridle.config import EngineConfig, ModelConfig
from bridle.http import create_app
from bridle.http.openai.responses.routes import KEPT_BYTES
from bridle.serving import ModelRegistry, load_model
from tests.http.harness import local_client, saying, scripted_model
from tests.http.tool_calls import HERMES, a_tokenizer, events_of
from tests.multimodal.picture_server import served_pictures

#: What the specification's schema of a response requires, and of which type it is.
REQUIRED: dict[str, Any] = {
    **dict.fromkeys(("id", "object", "status", "model", "service_tier", "truncation"), str),
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("parallel_tool_calls", "store", "background"), bool),
    **dict.fromkeys(("created_at", "completed_at", "top_logprobs"), int),
    **dict.fromkeys(("output", "tools"), list),
    **dict.fromkeys(("text", "reasoning", "usage", "metadata"), dict),
}
NULLABLE = ("incomplete_details", "previous_response_id", "instructions", "error", "max_output_tokens")
NULLABLE += ("max_tool_calls", "safety_identifier", "prompt_cache_key")
CALL = '<tool_call>\n{"name": "mail__send", "arguments": {"to": "me"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
SEND = {"type": "function", "name": "send", "parameters": PARAMETERS}
MAIL = {"type": "namespace", "name": "mail", "description": "Letters", "tools": [SEND]}


def clients(said: str) -> Iterator[TestClient]:
    text = a_tokenizer(HERMES)
    config = EngineConfig()
    with local_client(
        scripted_model(text=text, next_token=saying(said, text), max_model_len=2048, config=config)
    ) as client:
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """Yield a client of a model that writes "Yes"."""
    yield from clients("Yes.")


@pytest.fixture(scope="module")
def calling() -> Iterator[TestClient]:
    """Yield a client of a model that writes a word, and then calls a function of a namespace."""
    yield from clients("Well. \n" + CALL)


def ask(client: TestClient, said: Any, **options: Any) -> dict[str, Any]:
    body = {"input": said, "temperature": 0, "max_output_tokens": 100} | options
    answer = client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = events_of(answer)[-1]["response"] if options.get("stream") else answer.json()
    return found


def refusal(client: TestClient, said: Any, **options: Any) -> str:
    answer = client.post("/v1/responses", json={"input": said} | options)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_all_that_the_schema_requires(client: TestClient, stream: bool) -> None:
    options = {"tools": [{"type": "function", "name": "f"}], "prompt_cache_key": "k", "safety_identifier": "s"}
    response = ask(client, "Well?", stream=stream, max_tool_calls=3, **options)
    assert {name: type(response[name]) for name in REQUIRED} == REQUIRED
    assert set(NULLABLE) < set(response)
    assert (response["prompt_cache_key"], response["safety_identifier"], response["max_tool_calls"]) == ("k", "s", 3)
    tool = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    assert response["tools"] == [tool]
    assert client.get(f"/v1/responses/{response['id']}").json() == response


def test_a_response_that_is_not_complete_has_no_time_of_completion(client: TestClient) -> None:
    begun = events_of(client.post("/v1/responses", json={"input": "Well?", "stream": True}))[0]["response"]
    assert (begun["status"], begun["completed_at"]) == ("in_progress", None)
    cut = ask(client, "Well?", max_output_tokens=1)
    assert (cut["status"], cut["completed_at"]) == ("incomplete", None)


def test_the_sampling_that_held_is_told(client: TestClient) -> None:
    response = ask(client, "Well?", temperature=0.5, top_p=0.25, presence_penalty=1, frequency_penalty=-1)
    names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
    assert [response[name] for name in names] == [0.5, 0.25, 1, -1]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_before_calls_are_commentary_and_the_last_one_is_the_answer(
    client: TestClient, calling: TestClient, stream: bool
) -> None:
    assert [item["phase"] for item in ask(client, "Well?", stream=stream)["output"]] == ["final_answer"]
    output = ask(calling, "Well?", stream=stream, tools=[MAIL])["output"]
    assert [(item["type"], item.get("phase")) for item in output] == [
        ("message", "commentary"),
        ("function_call", None),
    ]


def test_phases_of_earlier_messages_are_taken(client: TestClient) -> None:
    said = [
        {"role": "assistant", "phase": "commentary", "content": "I look."},
        {"role": "assistant", "phase": "final_answer", "content": "Four."},
        {"role": "user", "content": "Again?"},
    ]
    one = [{"role": "assistant", "content": "I look.\nFour."}, said[-1]]
    assert ask(client, said)["usage"]["input_tokens"] == ask(client, one)["usage"]["input_tokens"]
    assert "input[0].phase is 'loud'" in refusal(client, [said[0] | {"phase": "loud"}])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_back_with_its_namespace(calling: TestClient, stream: bool) -> None:
    first = ask(calling, "Well?", stream=stream, tools=[MAIL])
    call = first["output"][-1]
    assert (call["name"], call["namespace"], json.loads(call["arguments"])) == ("send", "mail", {"to": "me"})
    assert first["tools"][0] == MAIL
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sent."}
    again = ask(calling, [result], previous_response_id=first["id"], stream=stream, tools=[MAIL])
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0  # the call stands as it was written
    listed = calling.get(f"/v1/responses/{again['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed] == ["message", "message", "function_call", "function_call_output"]
    assert listed[2]["namespace"] == "mail"


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "send", "namespace": "mail"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "mail__send"}]},
    ],
)
def test_a_function_of_a_namespace_can_be_demanded(demo_server: str, choice: dict[str, Any]) -> None:
    city = {"type": "object", "properties": {"to": {"enum": ["Rome", "Oslo"]}}, "required": ["to"]}
    mail = MAIL | {"tools": [SEND | {"parameters": city, "strict": True}]}
    body = {"input": "Well?", "tools": [mail, SEND], "tool_choice": choice, "parallel_tool_calls": False}
    call = httpx.post(demo_server + "/v1/responses", json=body).json()["output"][0]
    assert (call["name"], call["namespace"]) == ("send", "mail")


def test_tools_of_the_server_are_left_out_and_said_so(client: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    tools = [{"type": kind} for kind in ("web_search", "web_search_2025_08_26", "local_shell", "web_search")]
    response = ask(client, "Well?", tools=[*tools, SEND])
    assert [tool["type"] for tool in response["tools"]] == ["function"]
    assert "there are no tools" in refusal(client, "Well?", tools=tools, tool_choice="required")


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"type": "custom", "name": "x"}, "tools[0] is of type 'custom'; only tools of type function"),
    ({"type": "namespace", "tools": [SEND]}, "tools[0].name is None"),
    ({"type": "namespace", "name": "a", "tools": "x"}, "tools[0].tools must be a list of functions"),
    ({"type": "namespace", "name": "a", "tools": [{"type": "custom"}]}, "tools[0].tools[0] is of type 'custom'"),
    ({"type": "namespace", "name": "a", "tools": [SEND] * 200}, "functions; at most 128"),
    ({"type": "namespace", "name": "a", "tools": [SEND] * 2}, "tools has function 'a__send' 2 times"),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "message"), BAD_TOOLS)
def test_bad_tools_are_told(client: TestClient, tool: dict[str, Any], message: str) -> None:
    assert message in refusal(client, "Well?", tools=[tool])


def test_a_result_needs_its_call(client: TestClient) -> None:
    said = [{"type": "function_call_output", "call_id": "call_x", "output": "Sent."}]
    assert "input[0].call_id is 'call_x'; no earlier function_call" in refusal(client, said)


# -- files -----------------------------------------------------------------------------------------------------------


def a_file(data: bytes, kind: str = "text/plain", **fields: Any) -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "input_file", "filename": "notes.txt", "file_data": url} | fields


def with_file(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_text", "text": "Read."}, part]}]


def test_a_text_file_is_read(client: TestClient) -> None:
    as_text = 'Read.\n<file name="notes.txt">\nÉté\n</file>'
    whole = ask(client, as_text)
    data = "Été".encode()
    bare = {"type": "input_file", "filename": "notes.txt", "file_data": base64.b64encode(data).decode()}
    for part in (a_file(data), bare, a_file(b"\xef\xbb\xbf" + data)):
        response = ask(client, with_file(part))
        assert response["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
        listed = client.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
        assert listed[0]["content"][1] == part  # as it came


def test_a_chat_reads_files_too(client: TestClient) -> None:
    part = {"type": "file", "file": {"filename": "notes.txt", "file_data": a_file(b"Hey")["file_data"]}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Read."}, part]}]
    plain = [{"role": "user", "content": 'Read.\n<file name="notes.txt">\nHey\n</file>'}]
    counts = []
    for each in (messages, plain):
        answer = client.post("/v1/chat/completions", json={"messages": each, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        counts.append(answer.json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


BAD_FILES: list[tuple[dict[str, Any], str]] = [
    (a_file(b"%PDF-1.1\nthe rest"), "input[0].content[1] is a PDF; only text files are accepted"),
    (a_file(b"\xff\xfe\xff"), "input[0].content[1] is no text in UTF-8"),
    (a_file(b"a\0b"), "input[0].content[1] is no text in UTF-8"),
    (a_file(b"a", filename="a\nb"), "filename must be a printable text"),
    (a_file(b"a", file_id="file_1"), "this server stores no files"),
    ({"type": "input_file", "file_data": "data:text/plain,abc"}, "file_data must be base64"),
    ({"type": "input_file", "file_data": "!"}, "is not valid base64"),
    ({"type": "input_file", "file_data": "A" * (2 * MAX_FILE_BYTES)}, f"a file may have {MAX_FILE_BYTES} bytes"),
    ({"type": "input_file", "filename": "a"}, "has no file"),
    ({"type": "input_file", "file_url": "http://a.example/b"}, "file_url: this server fetches no URLs"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_bad_files_are_told(client: TestClient, part: dict[str, Any], message: str) -> None:
    assert message in refusal(client, with_file(part))


def test_files_are_counted(client: TestClient) -> None:
    said = [{"role": "user", "content": [a_file(b"a")] * (MAX_FILES + 1)}]
    assert f"input has {MAX_FILES + 1} files; at most {MAX_FILES}" in refusal(client, said)


def test_a_file_at_an_address_is_fetched_from_listed_hosts_alone() -> None:
    with served_pictures() as place:
        config = ModelConfig("demo-sees", num_blocks=512, image_hosts=(f"http://{place}",))
        with local_client(load_model(config)) as client:
            whole = ask(client, 'Read.<file name="notes.txt">\nHey\n</file>')  # its template joins parts so
            for path in ("notes.txt", "to/_notes.txt"):
                part = {"type": "input_file", "filename": "notes.txt", "file_url": f"http://{place}/{path}"}
                told = ask(client, with_file(part))
                assert told["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
            for url, message in (
                (f"http://{place}/it.png", "is no text in UTF-8"),
                (f"http://{place}/lost", "127.0.0.1 answered with status 404"),
                ("http://a.example/b", "this server may not fetch from that host"),
            ):
                assert message in refusal(client, with_file({"type": "input_file", "file_url": url}))


# -- compaction ------------------------------------------------------------------------------------------------------


def compact(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses/compact", json={"model": "scripted"} | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


SAID: list[dict[str, Any]] = [
    {"role": "user", "content": "We start on Tuesday."},
    {"role": "assistant", "content": "Good."},
    {"role": "user", "content": [{"type": "input_text", "text": "At nine."}]},
]


def test_a_conversation_is_made_shorter_and_gone_on_from(client: TestClient) -> None:
    made = compact(client, input=SAID)
    assert (made["object"], set(made)) == ("response.compaction", {"id", "object", "created_at", "output", "usage"})
    assert made["usage"]["output_tokens"] > 0
    *kept, item = made["output"]
    assert [message["content"][0]["text"] for message in kept] == ["We start on Tuesday.", "At nine."]
    assert all({"id", "status", "role", "type"} <= set(message) for message in kept)
    assert item["type"] == "compaction"
    spelled = [*SAID[::2], {"role": "assistant", "content": "Summary of the conversation so far:\nYes."}]
    more = {"role": "user", "content": "And?"}
    tokens = [ask(client, [*said, more])["usage"]["input_tokens"] for said in (made["output"], spelled)]
    assert tokens[0] == tokens[1]


def test_a_stored_conversation_is_made_shorter(client: TestClient) -> None:
    first = ask(client, "We start on Tuesday.")
    made = compact(client, previous_response_id=first["id"])
    assert [item["type"] for item in made["output"]] == ["message", "compaction"]
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404


def test_only_so_much_is_kept(client: TestClient) -> None:
    long = {"role": "user", "content": [{"type": "input_text", "text": "a", "note": "x" * KEPT_BYTES}]}
    made = compact(client, input=[SAID[0], long, SAID[2]])
    assert [item.get("role") for item in made["output"]] == ["user", None]


def test_what_cannot_be_compacted_is_told(client: TestClient) -> None:
    for body, message in (
        ({"input": SAID}, "model is required"),
        ({"model": "scripted"}, "input is empty; must have at least one item"),
        ({"model": "scripted", "input": "x", "previous_response_id": "resp_1"}, "no response 'resp_1' is kept"),
    ):
        answer = client.post("/v1/responses/compact", json=body)
        assert answer.status_code in (400, 404)
        assert message in answer.json()["error"]["message"]
    item = {"type": "compaction", "encrypted_content": "gAAAA"}
    assert "encrypted_content is not a summary from this server" in refusal(client, [item, SAID[0]])


# -- several models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}),
    ],
)
def test_one_of_several_models_has_to_be_named(path: str, body: dict[str, Any]) -> None:
    models = [scripted_model(name="one"), scripted_model(name="two")]
    registry = ModelRegistry(models)
    with TestClient(create_app(registry), raise_server_exceptions=False) as client:
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "model is missing; choose one of this server's models: one, two" in answer.text
        assert client.post(path, json=body | {"model": "two"}).status_code in (200, 400)
    registry.close()


def test_messages_of_chats_have_annotations(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Well?"}]})
    assert answer.json()["choices"][0]["message"]["annotations"] == []
