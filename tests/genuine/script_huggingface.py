"""Run with the genuine `huggingface_hub` client; the argument is a server's address. Fails if anything is off."""

import json
import sys

from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

url = sys.argv[1]
client = InferenceClient(model=url, token="none")
PROMPT = "The capital of France is"
QUESTION = [{"role": "user", "content": "Is snow white?"}]


def check_text() -> None:
    assert client.text_generation(PROMPT, max_new_tokens=8) == PROMPT + " Paris."
    assert client.text_generation(PROMPT, max_new_tokens=8, return_full_text=False) == " Paris."
    answer = client.text_generation(PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, top_n_tokens=2)
    assert answer.details.finish_reason == "eos_token" and answer.details.prefill and answer.details.tokens


def check_adapter() -> None:
    plain = client.text_generation(PROMPT, max_new_tokens=8)
    other = client.text_generation(PROMPT, max_new_tokens=8, adapter_id="pirate")
    assert other.startswith(PROMPT) and other != plain
    assert client.text_generation(PROMPT, max_new_tokens=8, adapter_id="demo") == plain
    pieces = list(client.text_generation(PROMPT, max_new_tokens=8, adapter_id="pirate", stream=True))
    assert PROMPT + "".join(pieces) == other
    named = InferenceClient(base_url=url + "/v1", token="none")
    assert named.chat_completion(QUESTION, model="pirate", max_tokens=8, temperature=0.0).model == "pirate"


def check_stream() -> None:
    pieces = list(client.text_generation(PROMPT, max_new_tokens=8, stream=True))
    assert "".join(pieces).startswith(" Paris.")
    events = list(client.text_generation(PROMPT, max_new_tokens=2, stream=True, details=True))
    assert events[-1].details.finish_reason == "length" and events[-1].generated_text


def check_chat() -> None:
    answer = client.chat_completion(QUESTION, max_tokens=10, seed=1, temperature=0.0)
    assert answer.choices[0].message.content.startswith("Yes") and answer.usage.completion_tokens > 0
    chunks = client.chat_completion(QUESTION, max_tokens=10, stream=True, temperature=0.0)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices).startswith("Yes")
    other = InferenceClient(base_url=url + "/v1", token="none")
    assert other.chat.completions.create(model="demo", messages=QUESTION, max_tokens=10).choices


def check_structure() -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}},
        "required": ["name"],
        "additionalProperties": False,
    }
    formats = (
        {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
        {"type": "json_object", "value": schema},
    )
    for response_format in formats:
        answer = client.chat_completion(QUESTION, max_tokens=60, response_format=response_format)
        assert set(json.loads(answer.choices[0].message.content)) == {"name"}
    number = client.text_generation("A number: ", grammar={"type": "regex", "value": "[0-9]{3}"}, max_new_tokens=9)
    assert number.removeprefix("A number: ").isdigit()


def check_errors() -> None:
    for fields in ({"temperature": -1.0}, {"max_new_tokens": 1_000_000}, {"adapter_id": "nobody"}):
        for stream in (False, True):
            try:
                answer = client.text_generation("x", stream=stream, **fields)
                list(answer)
            except ValidationError as error:
                refusal = str(error)
            else:
                raise AssertionError(f"{fields} was not refused")
            assert refusal.startswith("Input validation error"), refusal


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok")
