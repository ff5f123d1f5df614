"""Run with the genuine `huggingface_hub` client against a model that sees; the arguments are a server's address, a file
with a picture and another one. Fails if anything is off."""

import base64
import sys
from pathlib import Path

from huggingface_hub import InferenceClient

url = sys.argv[1]
client = InferenceClient(model=url, token="none")
FIRST, SECOND = (base64.b64encode(Path(name).read_bytes()).decode() for name in sys.argv[2:4])


def said(picture: str) -> list:
    return [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
                {"type": "text", "text": "Describe this image in one sentence."},
            ],
        }
    ]


def check_chat() -> None:
    answers = [
        client.chat_completion(messages=said(picture), max_tokens=8, temperature=0.0) for picture in (FIRST, SECOND)
    ]
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens > 16
    texts = [answer.choices[0].message.content for answer in answers]
    assert texts[0] != texts[1]
    chunks = client.chat_completion(messages=said(FIRST), max_tokens=8, temperature=0.0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == texts[0]


def check_text() -> None:
    texts = [
        client.text_generation(
            f"![](data:image/png;base64,{picture})What is it?", max_new_tokens=8, return_full_text=False
        )
        for picture in (FIRST, SECOND)
    ]
    assert texts[0] != texts[1]
    prompt = f"![](data:image/png;base64,{FIRST})What is it?"
    how = {"stream": True, "details": True, "return_full_text": False}
    events = list(client.text_generation(prompt, max_new_tokens=8, **how))
    assert events[-1].generated_text == texts[0]


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok")
