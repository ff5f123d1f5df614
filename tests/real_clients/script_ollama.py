"""Checks with the real Ollama client; the argument is a server's address. The last check sends the requests that Open
WebUI's source code sends."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx
import ollama

URL = sys.argv[1]
client = ollama.Client(URL)
GREEDY = {"temperature": 0, "num_predict": 60}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
      city: The city
    """
    return f"sunny in {city}"


def check_chat() -> None:
    whole = client.chat("demo", FRANCE, options=GREEDY)
    assert "Paris" in (whole.message.content or "") and whole.done and whole.done_reason == "stop"
    assert whole.eval_count and whole.prompt_eval_count and whole.total_duration
    parts = list(client.chat("demo", FRANCE, stream=True, options=GREEDY))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count


def check_chat_beside_others() -> None:
    async def ask() -> list[str]:
        others = ollama.AsyncClient(URL)
        answers = await asyncio.gather(*(others.chat("demo:latest", FRANCE, options=GREEDY) for _ in range(3)))
        return [answer.message.content or "" for answer in answers]

    assert len(set(asyncio.run(ask()))) == 1


def check_generate() -> None:
    first = client.generate("demo", "What is the capital of France?", options=GREEDY)
    assert "Paris" in (first.response or "") and first.context
    more = client.generate("demo", "And of Norway?", context=first.context, options=GREEDY)
    assert (more.prompt_eval_count or 0) > len(first.context)
    parts = client.generate("demo", "What is the capital of France?", stream=True, options=GREEDY)
    assert "".join(part.response or "" for part in parts) == first.response
    raw = client.generate("demo", "The capital of Norway is", raw=True, options={**GREEDY, "num_predict": 3})
    assert raw.context is None and raw.response
    assert client.generate("demo", keep_alive="5m").done_reason == "load"


def check_formats() -> None:
    answer = client.chat("demo", FRANCE, format=CITY, options=GREEDY)
    assert isinstance(json.loads(answer.message.content or "")["city"], str)
    text = client.generate("demo", "Make a JSON record for the country France.", format="json", options=GREEDY)
    assert (text.response or "").lstrip().startswith("{")


def check_tools() -> None:
    weather = [{"role": "user", "content": "What is the weather in Rome?"}]
    answer = client.chat("demo", weather, tools=[get_weather], options=GREEDY)
    (call,) = answer.message.tool_calls or ()
    assert call.function.name == "get_weather" and "city" in call.function.arguments
    parts = client.chat("demo", weather, tools=[get_weather], stream=True, options=GREEDY)
    streamed = [each for part in parts for each in part.message.tool_calls or ()]
    assert [each.function for each in streamed] == [call.function]
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    more = client.chat("demo", [*weather, answer.message, result], tools=[get_weather], options=GREEDY)
    assert more.message.content


def check_embeddings() -> None:
    both = client.embed("demo", ["Rome", "Oslo"])
    assert len(both.embeddings) == 2 and both.prompt_eval_count
    assert list(client.embeddings("demo", "Rome").embedding) == list(both.embeddings[0])


def check_what_is_here() -> None:
    assert [model.model for model in client.list().models] == ["demo"]
    assert client.ps().models[0].context_length
    shown: Any = client.show("demo")
    assert "completion" in shown.capabilities and shown.template
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"]


def check_refusals() -> None:
    for ask, status, words in (
        (lambda: client.chat("nobody", FRANCE), 404, "not served"),
        (lambda: list(client.chat("nobody", FRANCE, stream=True)), 404, "not served"),
        (lambda: client.chat("demo", FRANCE, options={"top_k": "many"}), 400, "must be of type integer"),
        (lambda: client.pull("smollm2"), 403, "--allow-pull"),
        (lambda: client.delete("demo"), 403, "--allow-pull"),
        (lambda: client.copy("demo", "other"), 400, "--model-alias"),
    ):
        try:
            ask()
        except ollama.ResponseError as error:
            assert (error.status_code, words in error.error) == (status, True), error
        else:
            raise AssertionError(words)


def check_open_webui() -> None:
    with httpx.Client(base_url=URL, timeout=600, headers={"Authorization": "Bearer none"}) as web:
        assert web.get("/api/version").json()["version"].split(".")[0].isdigit()
        names = {model["name"]: model["model"] for model in web.get("/api/tags").json()["models"]}
        assert names == {"demo": "demo"} and web.get("/api/ps").json()["models"][0]["expires_at"]
        assert web.post("/api/show", json={"name": "demo"}).json()["capabilities"]
        body = {"model": "demo", "messages": FRANCE, "stream": True, "options": {"num_ctx": 2048, "temperature": 0}}
        with web.stream("POST", "/api/chat", content=json.dumps(body)) as answer:
            assert answer.headers["content-type"].startswith("application/x-ndjson")
            rows = [json.loads(line) for line in answer.iter_lines()]
        assert rows[-1]["done"] and "Paris" in "".join(row["message"]["content"] for row in rows)
        embedded = web.post("/api/embed", json={"model": "demo", "input": ["a"], "truncate": True}).json()
        assert len(embedded["embeddings"]) == 1
        unload = web.post("/api/generate", json={"model": "demo", "prompt": "", "keep_alive": 0})
        assert "cannot be unloaded" in unload.json()["error"]


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok")
