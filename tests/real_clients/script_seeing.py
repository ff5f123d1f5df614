"""Checks with the real `huggingface_hub` and `text-generation` clients and a model that takes images; the arguments are
a server's address and two image files."""

import asyncio
import base64
import sys
from pathlib import Path

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from text_generation import AsyncClient, Client

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


def check_event_loop() -> None:
    """The asyncio client works under the method names of OpenAI's client."""

    async def ask() -> str:
        loop_client = AsyncInferenceClient(model=url, token="none")
        chunks = await loop_client.chat.completions.create(
            messages=said(FIRST), max_tokens=8, temperature=0.0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])

    whole = client.chat.completions.create(messages=said(FIRST), max_tokens=8, temperature=0.0)
    assert asyncio.run(ask()) == whole.choices[0].message.content != ""


def check_other_tasks() -> None:
    """Requests for tasks that a text-generating model cannot do are refused, not answered wrongly."""
    picture = base64.b64decode(FIRST)
    for ask in (
        lambda: client.image_to_text(picture),
        lambda: client.visual_question_answering(picture, "What is it?"),
    ):
        try:
            print(ask())
        except HfHubHTTPError as error:
            assert 400 <= error.response.status_code < 500, error
        else:
            raise AssertionError("it was answered")


def check_text_generation() -> None:
    """TGI's own client sends an image in Markdown, and gets the same text whole and streamed."""
    prompts = [f"![](data:image/png;base64,{picture})What is it?" for picture in (FIRST, SECOND)]
    own = Client(url, timeout=60)
    texts = [own.generate(prompt, max_new_tokens=8).generated_text for prompt in prompts]
    assert texts[0] != texts[1]
    events = list(own.generate_stream(prompts[0], max_new_tokens=8))
    assert events[-1].generated_text == texts[0]

    async def stream() -> str:
        return [event async for event in AsyncClient(url, timeout=60).generate_stream(prompts[0], max_new_tokens=8)][
            -1
        ].generated_text

    assert asyncio.run(stream()) == texts[0]


for name, check in list(globals().items()):
    if name.startswith("check_"):
        check()
        print(name, "ok")
