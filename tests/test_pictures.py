"""Tests of images on every API: the same image and text give the same prompt and the same answer as transformers."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from bridle import LLM, ChatSession
from bridle.cli import main
from bridle.distributed.replica_messages import MAX_MEDIA_BYTES
from bridle.engine.multimodal.encoder_cache import MAX_HELD_BYTES
from bridle.engine.request import Request
from bridle.errors import InvalidRequest, MediaRefused, UnsupportedFeature
from bridle.http.settings import BODY_BYTES, SEEING_BODY_BYTES
from bridle.lmtp.client import Client, MemoryCarrier
from bridle.model.executor_builder import MEDIA_MEMORY
from bridle.multimodal import ImageHosts, MediaLimits
from bridle.multimodal.limits import LEAST_SIDE, MOST_RATIO, MOST_SIDE
from bridle.multimodal.reader import KEPT_BYTES
from bridle.serving.tenancy.keys import Identity
from bridle.tokenizer import Tokenizer
from tests.fakes import vision_checkpoints
from tests.http.certificates import make_certificate
from tests.lmtp.harness import Setup
from tests.multimodal.picture_server import png as drawn_png
from tests.multimodal.picture_server import served_pictures
from tests.sources import ROOT

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6}
TEXT = "What is it?"


def picture(seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 255, (24, 30, 3), dtype=np.uint8))


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


def encoded(seed: int = 0) -> str:
    return base64.b64encode(png(seed)).decode()


def url(seed: int = 0) -> str:
    return f"data:image/png;base64,{encoded(seed)}"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = vision_checkpoints.make_seeing("llava", tmp_path_factory.mktemp("eyes") / "llava")
    with LLM(str(folder), num_blocks=128, block_size=4) as loaded:
        yield loaded


def places(request: Request) -> tuple[tuple[int, int], ...]:
    return tuple((run.position, run.length) for run in request.runs)


PARTS = [{"type": "image_url", "image_url": {"url": url()}}, {"type": "text", "text": TEXT}]


def test_every_api_makes_the_same_prompt(llm: LLM, http: TestClient, submitted: list[Request]) -> None:
    said = [{"role": "user", "content": PARTS}]
    chat = http.post("/v1/chat/completions", json={"messages": said, **GREEDY}).json()
    answer = chat["choices"][0]["message"]["content"]
    assert chat["usage"]["prompt_tokens"] == len(submitted[0].prompt) > 16
    flat = [{"role": "user", "content": [{"type": "image_url", "image_url": url()}, PARTS[1]]}]
    assert (
        http.post("/v1/chat/completions", json={"messages": flat, **GREEDY}).json()["choices"][0]["message"]["content"]
        == answer
    )
    source = {"type": "base64", "media_type": "image/png", "data": encoded()}
    blocks = [{"type": "image", "source": source}, PARTS[1]]
    found = http.post("/v1/messages", json={"messages": [{"role": "user", "content": blocks}], **GREEDY}).json()
    assert found["content"][0]["text"] == answer
    items = [{"type": "input_image", "image_url": url()}, {"type": "input_text", "text": TEXT}]
    asked = {"input": [{"role": "user", "content": items}], "temperature": 0.0, "max_output_tokens": 6}
    response = http.post("/v1/responses", json=asked).json()
    assert response["output"][0]["content"][0]["text"] == answer
    values: list[Any] = [picture(), png(), np.asarray(picture()), url()]
    for value in values:
        parts = [{"type": "image", "image": value}, PARTS[1]]
        output = llm.chat([{"role": "user", "content": parts}], **GREEDY)[0]
        assert output.outputs[0].message is not None
        assert output.outputs[0].message.content == answer
    assert {request.prompt for request in submitted} == {submitted[0].prompt}
    assert {places(request) for request in submitted} == {places(submitted[0])}


async def test_lmtp_takes_them(llm: LLM, submitted: list[Request]) -> None:
    """LMTP announces images as an extension. The same image and text give the same prompt as on other APIs."""
    wanted = llm.generate({"prompt": f"<image>{TEXT}", "multi_modal_data": {"image": png()}}, **GREEDY)[0].outputs[0]
    setup = Setup(llm.model)
    wire = setup.connect()
    try:
        (hello,) = await wire.ask("MODEL_INFO", model=llm.model.name)
        assert hello["model_info"]["lmtp"]["images"] is True
        asked = {"model": llm.model.name, "prompt": f"<image>{TEXT}", **GREEDY}
        (*_, last) = found = await wire.ask("GENERATE", **asked, images=[url()])
        assert last.get("finish_reason"), last
        assert [body["token"] for body in found] == list(wanted.token_ids)
        for wrong, why in [
            ({"images": [url(), url()]}, "placeholders for 1 images"),
            ({"images": [5]}, r"images\[0\] is a int"),
            ({"images": "x"}, "must be a list"),
            ({"images": ["http://127.0.0.1:1/x.png"]}, "does not fetch"),
            ({"images": [url()], "save": "b"}, "cannot be saved"),
        ]:
            (body,) = await wire.ask("GENERATE", **asked, **wrong)
            assert re.search(why, body["error"]), body
        serve = partial(setup.server.serve, identity=Identity("bob", False))
        async with Client(MemoryCarrier(serve), llm.model.name) as client:
            stream = await client.generate(f"<image>{TEXT}", images=[url()], max_tokens=6, temperature=0.0)
            assert [token.token for token in await stream.read()] == list(wanted.token_ids)
    finally:
        await setup.server.close()
    assert {(request.prompt, places(request)) for request in submitted} == {(submitted[0].prompt, places(submitted[0]))}


def test_sessions_see_and_encode_once(llm: LLM) -> None:
    before = llm.statistics().num_media_encoded
    session = ChatSession(llm, **GREEDY)
    picture = {"type": "image_url", "image_url": {"url": url(91)}}
    session.send([{"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}]}])
    session.send("And now?")
    assert llm.statistics().num_media_encoded == before + 1
    again = ChatSession.from_dict(llm, json.loads(json.dumps(session.to_dict())))
    assert again.turns == session.turns
    fork = again.fork()
    assert fork.send("Once more") == session.send("Once more")
    assert llm.statistics().num_media_encoded == before + 1


def large_url() -> str:
    """Return the URL of an image that has more bytes than a text body may have."""
    file = io.BytesIO()
    Image.fromarray(np.random.RandomState(3).randint(0, 255, (1400, 1200, 3), dtype=np.uint8)).save(file, "PNG")
    assert len(file.getvalue()) > BODY_BYTES
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_bodies_have_room_for_pictures(http: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [{"type": "image_url", "image_url": {"url": large_url()}}, PARTS[1]]
    body = {"messages": [{"role": "user", "content": parts}], **GREEDY}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    monkeypatch.setattr("bridle.http.state.SEEING_BODY_BYTES", BODY_BYTES)
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 413 and f"at most {BODY_BYTES} bytes" in refused.text


def test_batch_files_take_them(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch file may also contain images that have more bytes than a text body may have."""
    folder = str(llm.model.pictures.folder) if llm.model.pictures else ""
    lines = []
    for name, given in (("small", url()), ("large", large_url()), ("odd", "data:image/png;base64,AAAA")):
        parts = [{"type": "image_url", "image_url": {"url": given}}, PARTS[1]]
        body = {"messages": [{"role": "user", "content": parts}], **GREEDY}
        lines.append(json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}))
    file, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text("\n".join(lines))
    assert main(["run-batch", str(file), "-o", str(answers), "--model", folder, "--control", "off"]) == 1, (
        capsys.readouterr()
    )
    found = {each["custom_id"]: each["response"] for each in map(json.loads, answers.read_text().splitlines())}
    assert {name: each["status_code"] for name, each in found.items()} == {"small": 200, "large": 200, "odd": 400}


def metrics_of(http: TestClient) -> dict[str, float]:
    lines = [
        line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if line.startswith("bridle_engine")
    ]
    return {name.partition("{")[0].removeprefix("bridle_engine_media_"): float(value) for name, _, value in lines}


def test_a_picture_is_encoded_once_and_counted(llm: LLM, http: TestClient) -> None:
    """The second request finds the image's features in the cache. No features stay in use after the requests."""
    before = metrics_of(http)
    for _ in range(2):
        llm.generate({"prompt": f"twice<image>{TEXT}", "multi_modal_data": {"image": png(92)}}, **GREEDY)
    after = metrics_of(http)
    assert after["encoded_total"] - before["encoded_total"] == after["found_total"] - before["found_total"] == 1
    assert after["seconds_total"] > before["seconds_total"]
    assert after["bytes"] - before["bytes"] == 16 * 32 * 4  # rows of numbers
    assert after["held_bytes"] == 0
    assert all(
        f"bridle_engine_media_{name}`" in PAGE for name in ("bytes", "held_bytes", "encoded_total", "found_total")
    )


def test_prompts_take_pictures_of_every_kind(
    llm: LLM, http: TestClient, submitted: list[Request], tmp_path: Path
) -> None:
    file = tmp_path / "it.png"
    file.write_bytes(png())
    answers = [
        llm.generate({"prompt": f"<image>{TEXT}", "multi_modal_data": {"image": value}}, **GREEDY)[0].outputs[0].text
        for value in (picture(), str(file), file, [png()], url())
    ]
    answers.append(llm.generate(f"<image>{TEXT}", multi_modal_data={"image": png()}, **GREEDY)[0].outputs[0].text)
    native = http.post(
        "/generate",
        json={"inputs": f"![]({url()}){TEXT}", "parameters": {"max_new_tokens": 6, "do_sample": False}},
    ).json()
    assert {*answers, native["generated_text"]} == {answers[0]}
    assert {(request.prompt, places(request)) for request in submitted} == {(submitted[0].prompt, places(submitted[0]))}


def test_streams_say_the_same(http: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": PARTS}], **GREEDY}
    whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == whole


def test_a_picture_is_encoded_once_and_told_from_others(llm: LLM) -> None:
    before = llm.statistics().num_media_encoded

    def ask(*seeds: int) -> list[str]:
        return [
            llm.generate({"prompt": f"{seed}<image>", "multi_modal_data": {"image": png(seed)}}, **GREEDY)[0]
            .outputs[0]
            .text
            for seed in seeds
        ]

    first = ask(41, 42, 43)
    assert ask(41, 42, 43) == first
    assert llm.statistics().num_media_encoded - before == 3
    several = llm.generate(
        [{"prompt": f"{seed}<image>", "multi_modal_data": {"image": png(seed)}} for seed in (41, 42, 43)], **GREEDY
    )
    assert [output.outputs[0].text for output in several] == first


def test_tenants_share_no_picture(llm: LLM, submitted: list[Request]) -> None:
    given = {"prompt": "<image>", "multi_modal_data": {"image": png(77)}}
    before = llm.statistics().num_media_encoded
    for tenant in ("", "a", "b"):
        llm.generate(given, tenant=tenant, **GREEDY)
    assert len({request.runs[0].key for request in submitted}) == 3
    assert llm.statistics().num_media_encoded - before == 3


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    with served_pictures() as place:
        yield place


def named(address: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a request of each HTTP API whose image is at the given address."""
    part = {"type": "image_url", "image_url": {"url": address}}
    block = {"type": "image", "source": {"type": "url", "url": address}}
    item = {"type": "input_image", "image_url": address}
    asked = {"type": "input_text", "text": TEXT}
    return [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part, PARTS[1]]}], **GREEDY}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [block, PARTS[1]]}], **GREEDY}),
        ("/v1/responses", {"input": [{"role": "user", "content": [item, asked]}], "max_output_tokens": 6}),
        ("/generate", {"inputs": f"![]({address}){TEXT}", "parameters": {"max_new_tokens": 6}}),
    ]


async def test_pictures_of_listed_hosts_are_fetched(
    llm: LLM, http: TestClient, submitted: list[Request], elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each API gives the same prompt as if the image itself had been sent."""
    assert llm.model.pictures is not None
    monkeypatch.setattr(llm.model.pictures, "hosts", ImageHosts([f"http://{elsewhere}"]))
    address = f"http://{elsewhere}/it.png"
    own = llm.model.pictures.read(drawn_png())
    for path, body in named(address):
        assert http.post(path, json=body).status_code == 200
    llm.chat([{"role": "user", "content": [{"type": "image", "image": address}, PARTS[1]]}], **GREEDY)
    llm.generate({"prompt": "<image>", "multi_modal_data": {"image": address}}, **GREEDY)
    setup = Setup(llm.model)
    wire = setup.connect()
    asked = {"model": llm.model.name, "prompt": "<image>", "images": [address], **GREEDY}
    try:
        assert (await wire.ask("GENERATE", **asked))[-1].get("finish_reason")
    finally:
        await setup.server.close()
    assert [request.media[0].arrays for request in submitted] == [own.medium.arrays] * 7
    for path, body in named("http://127.0.0.1:1/it.png"):
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 422) and "this server may not fetch from that host" in answer.text
    monkeypatch.setattr(llm.model.pictures, "hosts", ImageHosts())
    for path, body in named(address):
        answer = http.post(path, json=body)
        assert answer.status_code in (400, 422) and "this server does not fetch" in answer.text
    assert len(submitted) == 7


def test_a_pictures_server_is_trusted_by_its_certificate(
    llm: LLM, http: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrusted image server gives a one-sentence error on each API."""
    assert llm.model.pictures is not None
    files = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    with served_pictures(*files) as place:
        monkeypatch.setattr(llm.model.pictures, "hosts", ImageHosts([f"{place}=127.0.0.1/32"]))
        asked = named(f"https://{place}/it.png")
        for path, body in asked:
            assert http.post(path, json=body).status_code == 200
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
        for path, body in asked:
            answer = http.post(path, json=body)
            assert answer.status_code in (400, 422) and "has an untrusted certificate" in answer.text


def test_so_many_requests_fetch_at_once(
    llm: LLM, http: TestClient, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert llm.model.pictures is not None
    monkeypatch.setattr(llm.model.pictures, "hosts", ImageHosts([f"http://{elsewhere}"]))
    monkeypatch.setattr(llm.model, "_fetching", threading.Semaphore(0))
    path, body = named(f"http://{elsewhere}/it.png")[0]
    answer = http.post(path, json=body)
    assert answer.status_code in (429, 503) and "requests are fetching images" in answer.text
    assert http.post(path, json={**body, "messages": [{"role": "user", "content": PARTS}]}).status_code == 200


def test_the_command_line_lists_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["generate", "demo", "x", "--allow-image-host", "a.org", "--allow-image-host", "a.org/x"]
    assert main(given) != 0
    assert "image_hosts has 'a.org/x'; it must be a host without a path" in capsys.readouterr().err


REFUSED: list[tuple[Any, str]] = [
    ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}], "this server does not fetch"),
    ([{"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}], "this server does not fetch"),
    ([{"type": "image", "image": "/etc/hostname"}], "this server does not fetch"),
    ([{"type": "input_image", "file_id": "file-1"}], "this server stores no files"),
    ([{"type": "image_url", "image_url": {}}], "has no image"),
    ([{"type": "image", "source": {"type": "file"}}], "must have the type base64"),
    ([{"type": "image_url", "image_url": "data:image/svg+xml;base64,AAAA"}], "is of type 'image/svg+xml'"),
    ([{"type": "image_url", "image_url": "data:image/png;base64,AA AA"}], "not valid base64"),
    ([{"type": "image_url", "image_url": "data:image/png,AAAA"}], "must be data:image/"),
    ([{"type": "image_url", "image_url": "data:image/png;base64,"}], "is empty"),
    ([{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}], "cannot be read"),
    ([*PARTS, {"type": "text", "text": "see <image>"}], "which is the placeholder of images"),
    ([PARTS[0]] * 17, "17 images were sent; at most 16"),
    ([{"type": "input_audio", "input_audio": {}}], "reads only text and images"),
]


@pytest.mark.parametrize(("parts", "why"), REFUSED)
def test_what_cannot_be_read_is_refused_in_one_sentence(http: TestClient, parts: Any, why: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}], **GREEDY})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert why in message
    assert "0x" not in message


_SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
_VIDEO = {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [_SOUND]}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [_SOUND]}]}),
        ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [_VIDEO]}]}),
        ("/generate", {"inputs": "What is it? ![](data:video/mp4;base64,AAAA)"}),
        ("/generate", {"inputs": "![](data:audio/wav;base64,AAAA)"}),
    ],
)
def test_sound_and_video_are_refused_with_what_is_read(http: TestClient, path: str, body: dict[str, Any]) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400 or (path == "/generate" and answer.status_code == 422)
    assert "'llava' reads only text and images" in answer.text


def test_placeholders_and_pictures_are_as_many(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="placeholders for 1 images, each '<image>', but 2 were sent"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": [png(), png()]}}, **GREEDY)
    with pytest.raises(UnsupportedFeature, match="reads only text and images; no sounds can be sent"):
        llm.generate({"prompt": "x", "multi_modal_data": {"audio": b"x"}}, **GREEDY)
    with pytest.raises(MediaRefused, match="no-such"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": "no-such.png"}}, **GREEDY)
    assert llm.generate("typed <image>", **GREEDY)[0].outputs[0].text  # without pictures it is text


PAGE = (ROOT / "docs" / "pictures.md").read_text(encoding="utf-8")


def test_the_pages_program_runs(llm: LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "cat.png").write_bytes(png())
    assert llm.model.pictures is not None
    given = {
        "llava-hf/llava-1.5-7b-hf": str(llm.model.pictures.folder),
        "data:image/png;base64,iVBORw0KGgo...": url(),
        '"cat.png"': repr(str(tmp_path / "cat.png")),
    }
    for name, value in given.items():
        assert name in program
        program = program.replace(name, value)
    names: dict[str, Any] = {}
    exec(compile(program, "pictures.md", "exec", dont_inherit=True), names)
    names["llm"].close()
    assert len(capsys.readouterr().out.strip()) > 2


def test_the_pages_figures() -> None:
    limits = MediaLimits()
    assert limits.max_images == 16 and "in a request | 16 |" in PAGE
    assert (limits.max_image_bytes, limits.max_total_bytes) == (16 << 20, 24 << 20) and "16 MiB; 24 MiB" in PAGE
    assert (LEAST_SIDE, MOST_SIDE, MOST_RATIO) == (2, 16_384, 200) and "2 to 16,384 pixels, at most 200 times" in PAGE
    assert limits.max_pixels == 64_000_000 and "64 million" in PAGE
    assert limits.max_shown_pixels == 2_000_000 and "more than 2 million pixels" in PAGE
    assert KEPT_BYTES == 256 << 20 and MAX_MEDIA_BYTES == 48 << 20 and "48 MiB of arrays" in PAGE
    assert limits.max_array_bytes == 512 << 20 and "request's images | 512 MiB |" in PAGE
    assert MAX_HELD_BYTES == 1 << 30 and "unfinished requests | 1 GiB; beyond this limit, a request gets 429 |" in PAGE
    assert (
        MEDIA_MEMORY == {"cpu": 256 << 20, "cuda": 1 << 30}
        and SEEING_BODY_BYTES == 32 << 20
        and "(`--max-body-bytes`, 32 MiB)" in PAGE
    )


def test_a_processors_template_goes_before_the_tokenizers(tmp_path: Path) -> None:
    folder = vision_checkpoints.make_seeing("llava", tmp_path)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "mine: {{ messages[0]['content'] }}"}))
    assert Tokenizer.load(folder).chat_template.text.startswith("mine")


def test_templates_that_know_no_parts_get_places(llm: LLM) -> None:
    template = "{% for message in messages %}{{ message['content'] }}|{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "image", "image": png()}, {"type": "text", "text": "b"}]
    output = llm.chat([{"role": "user", "content": parts}], chat_template=template, **GREEDY)[0]
    tokens = output.prompt_token_ids
    assert tokens is not None
    before, places = tokens[: tokens.index(vision_checkpoints.IMAGE)], tokens.count(vision_checkpoints.IMAGE)
    assert llm.tokenizer.decode(before) == "a\n" and places == 16
    said = [{"role": "user", "content": [parts[1], {"type": "text", "text": "<image>"}]}]
    with pytest.raises(InvalidRequest, match="which is the placeholder of images"):
        llm.chat(said, chat_template=template, **GREEDY)


LOOK = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Look!"},
    {"role": "assistant", "content": "", "tool_calls": [LOOK]},
]
SHOWN = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "image_url", "image_url": {"url": url()}}]}
SOURCE = {"type": "base64", "media_type": "image/png", "data": encoded()}
#: A tool's result that is a picture, as each API has it.
RESULTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [*CALLED, SHOWN]},
    "/v1/run": {"messages": [*CALLED, SHOWN], "controller": "none", "controller_arg": None},
    "/v1/responses": {
        "input": [
            CALLED[0],
            {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "call_1",
                "output": [{"type": "input_image", "image_url": url()}],
            },
        ]
    },
    "/v1/messages": {
        "messages": [
            CALLED[0],
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [{"type": "image", "source": SOURCE}],
                    }
                ],
            },
        ]
    },
    "/api/chat": {
        "messages": [
            CALLED[0],
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
            },
            {"role": "tool", "tool_name": "look", "content": "", "images": [encoded()]},
        ],
        "stream": False,
    },
}


@pytest.mark.parametrize("route", RESULTS)
def test_tools_may_answer_with_pictures(http: TestClient, submitted: list[Request], route: str) -> None:
    answer = http.post(route, json={**RESULTS[route], **GREEDY})
    assert answer.status_code == 200, answer.text
    assert len(submitted[0].runs) == 1


def test_a_controller_sees_placeholders_and_constraints_hold(llm: LLM) -> None:
    given = {"prompt": "<image>", "multi_modal_data": {"image": png()}}
    assert llm.generate(given, choice=["yes", "no"], max_tokens=9)[0].outputs[0].text in ("yes", "no")
