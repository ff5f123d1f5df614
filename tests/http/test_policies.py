"""Tests that an operator's policies apply to all requests on every API, with and without streaming. Admins can read the
policies, and reload the policies file while streams continue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from bridle import LLM
from bridle.aici.client import PolicyPool
from bridle.controllers import Controller, SequenceView
from bridle.controllers.plugins import load_classes
from bridle.engine.control.decision import Decision
from bridle.http import HttpSettings, create_app
from bridle.http.openai.batch import answer_batch, batch_settings, read_requests
from bridle.serving import ModelRegistry
from bridle.serving.policies import PolicyRegistry
from bridle.serving.tenancy.keys import KeyStore
from tests.http.harness import local_client, saying, scripted_model, tokenizer
from tests.http.routes import ROUTES, post, text_of
from tests.lmtp.harness import Setup
from tests.sources import ROOT

SECRETS = ("ann@example.org", "4111 1111 1111 1111", "sk-abcdefghijklmnop1234", "forbidden")
SAYING = "Ask ann@example.org, pay 4111 1111 1111 1111, key sk-abcdefghijklmnop1234, FOR\u200bBIDDEN word."
DONE = "Ask [e-mail], pay [card], key [key], [...] word."
FILE = """
header = true

[[policy]]
name = "secrets"
version = "3"
kind = "redact"

[[policy]]
name = "words"
kind = "phrases"
phrases = ["forbidden"]
action = "replace"
replacement = "[...]"
"""


class Says(Controller):
    """A user's controller that forces a forbidden text token by token."""

    max_rewind = 0

    def __init__(self, text: str = SAYING) -> None:
        self.tokens = tokenizer().encode(text, add_special_tokens=False)
        self.at = 0

    def next(self, view: SequenceView) -> Decision:
        self.at += 1
        if self.at > len(self.tokens):
            return Decision.stop()
        view.log(SAYING)
        return Decision.splice(0, (self.tokens[self.at - 1],))


class Writes(Says):
    """A user's controller that forces a forbidden text in one splice."""

    def next(self, view: SequenceView) -> Decision:
        self.at += 1
        if self.at > 1:
            view.log("sees " + tokenizer().decode(view.generated))
            return Decision.stop()
        return Decision.splice(0, self.tokens)


def says(text: str) -> list[str]:
    plain = text.replace("\u200b", "").lower()
    return [each for each in SECRETS if each in plain]


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> PolicyRegistry:
    path = tmp_path_factory.mktemp("policies") / "policies.toml"
    path.write_text(FILE, encoding="utf-8")
    return PolicyRegistry(path)


@pytest.fixture(scope="module")
def client(book: PolicyRegistry) -> Iterator[TestClient]:
    classes = {**load_classes([]), "Says": Says, "Writes": Writes}
    model = scripted_model(next_token=saying(SAYING), max_model_len=1024)
    with local_client(model, HttpSettings(policies=book, controller_classes=classes)) as made:
        yield made


def length_of(route: str, count: int) -> dict[str, Any]:
    (name,) = [name for name in ROUTES[route][0] if name.startswith("max_")]
    return {name: count}


@pytest.mark.few(7)
@pytest.mark.parametrize("controller", [None, "class:Says", "class:Writes"])
@pytest.mark.parametrize("route", ROUTES)
def test_no_route_says_what_is_forbidden(client: TestClient, route: str, controller: str | None) -> None:
    fields: dict[str, Any] = length_of(route, 200) | ({} if route == "/generate" else {"temperature": 0.0})
    if controller is not None:
        fields["controller"] = controller
    answer = post(client, route, fields)
    text = text_of(answer)
    assert not says(answer.text) and "[e-mail]" in text
    if controller is not None:
        assert text.strip() == DONE
    assert answer.headers["x-bridle-policies"] == "secrets@3, words"


def test_who_gets_no_trace_is_told_why(book: PolicyRegistry, tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    registry = ModelRegistry([scripted_model(next_token=saying(SAYING))])
    with TestClient(create_app(registry, HttpSettings(policies=book), keys=keys)) as client:
        wish = {"x-bridle-trace": "true", "authorization": f"Bearer {keys.add('ann')}"}
        for route in ROUTES:
            answer = post(client, route, length_of(route, 4), **wish)
            assert answer.headers["x-bridle-trace"].startswith("no; a policy holds for this text"), answer.text
            missing = client.get(f"/v1/traces/{answer.headers['x-request-id']}", headers=wish)
            assert missing.status_code == 404 and "a policy applied to its text" in missing.text
        plain = post(client, route, length_of(route, 4), authorization=wish["authorization"])
        assert "x-bridle-trace" not in plain.headers
    registry.close()
    keys.close()


@pytest.mark.few(5)
@pytest.mark.parametrize("controller", [None, "class:Says", "class:Writes"])
@pytest.mark.parametrize("route", [route for route in ROUTES if route not in ("/generate", "/v1/run")])
def test_no_stream_shows_it_at_any_moment(client: TestClient, route: str, controller: str | None) -> None:
    fields: dict[str, Any] = length_of(route, 200) | {"temperature": 0.0, "stream": True}
    if controller is not None:
        fields |= {"controller": controller}
        fields |= {"rewind": "event"} if route.endswith("completions") else {}
    answer = post(client, route, fields)
    answer.raise_for_status()
    assert "[e-mail]" in "".join(texts_in(answer.text)) and not says("".join(texts_in(answer.text)))


def texts_in(stream: str) -> Iterator[str]:
    """Yield the pieces of text in a stream of server-sent events, in order."""
    for line in stream.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if event.get("type", "").endswith((".done", ".completed")):
                continue
            yield from _strings(event, ("text", "content", "delta"))


def _strings(value: Any, names: tuple[str, ...]) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in names and isinstance(inner, str):
                yield inner
            else:
                yield from _strings(inner, names)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, names)


@pytest.mark.few(6)
@pytest.mark.parametrize("count", range(8, 60, 3))
def test_where_the_output_ends_nothing_slips_out(client: TestClient, count: int) -> None:
    """The token limit is tested at every position of the text."""
    fields = {"max_tokens": count, "temperature": 0.0, "stop": ["1111 4"], "logprobs": 1}
    answer = post(client, "/v1/completions", fields)
    assert not says(text_of(answer))
    tokens = answer.json()["choices"][0]["logprobs"]["tokens"]
    assert not says("".join(tokens))


def test_a_prefill_cannot_say_the_first_half(client: TestClient) -> None:
    for prompt, rest in (("Ask ann@exam", "ple.org"), ("pay 4111 1111", " 1111 1111"), ("it is forb", "idden")):
        fields = {"prompt": prompt, "controller": "class:Says", "controller_arg": rest + " then", "max_tokens": 60}
        text = text_of(post(client, "/v1/completions", fields))
        assert rest not in text and "then" in text


async def test_lmtp_and_batches_and_python_hold_to_them(book: PolicyRegistry) -> None:
    model = scripted_model(next_token=saying(SAYING), max_model_len=1024)
    registry = ModelRegistry([model])
    lines = [
        b'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 200, "temperature": 0}}'
    ]
    settings = batch_settings(4)
    app = create_app(registry, HttpSettings(max_requests=settings.max_requests, policies=book))
    (answer,) = [answer async for answer in answer_batch(app, read_requests(lines), 4)]
    text = answer["response"]["body"]["choices"][0]["text"]
    assert "[e-mail]" in text and not says(text)
    setup = Setup(model)
    setup.host.policies = book
    forcing = {"prompt": "x", "max_tokens": 200, "text": True, "controller": "class:Writes"}
    setup.host.classes = {"Writes": Writes}
    told = await setup.connect().ask("GENERATE", **forcing)
    assert "".join(str(each.get("text", "")) for each in told) == DONE
    assert tokenizer().decode([each["token"] for each in told if "token" in each]) == DONE
    told = await setup.connect().ask("GENERATE", prompt="x", max_tokens=200, temperature=0, text=True)
    assert not says("".join(str(each.get("text", "")) for each in told))
    assert not says(tokenizer().decode([each["token"] for each in told if "token" in each]))
    llm = LLM(model, policies=book.path)
    output = (await llm.generate_async(["x"], max_tokens=200, temperature=0.0))[0]
    assert "[e-mail]" in output.outputs[0].text and not says(output.outputs[0].text)
    forced = (await llm.generate_async(["x"], max_tokens=200, controller=Says()))[0].outputs[0]
    assert not says(forced.text) and "[e-mail]" in forced.text and "[e-mail]" in forced.logs and not says(forced.logs)
    whole = (await llm.generate_async(["x"], max_tokens=200, controller=Writes()))[0].outputs[0]
    assert whole.text == DONE and whole.logs == f"sees {DONE}\n"
    await setup.close()


def test_policies_are_listed_read_again_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "policies.toml"
    path.write_text(FILE, encoding="utf-8")
    model = scripted_model(next_token=saying(SAYING), max_model_len=1024)
    fields = {"prompt": "x", "max_tokens": 200, "temperature": 0.0}
    with local_client(model, HttpSettings(policies=PolicyRegistry(path))) as client:

        def said() -> str:
            return text_of(post(client, "/v1/completions", fields))

        assert [each["name"] for each in client.get("/v1/policies").json()["policies"]] == ["secrets", "words"]
        assert not says(said())
        path.write_text(FILE + "\n[[policy]]\nname = 'broken'\nkind = 'nothing'\n", encoding="utf-8")
        refused = client.post("/v1/policies/reload")
        assert refused.status_code == 400 and "nothing" in refused.text and "broken" in refused.text
        assert not says(said())
        assert "broken" in client.get("/v1/policies").json()["error"]
        metrics = client.get("/metrics").text
        path.write_text("", encoding="utf-8")
        assert client.post("/v1/policies/reload").json()["policies"] == []
        assert says(said())
    for line in (
        'bridle_policy_actions_total{action="applied",policy="secrets",version="3"} 2.0',
        'bridle_policy_actions_total{action="applied",policy="words",version=""} 2.0',
        'bridle_policy_actions_total{action="replaced",policy="secrets",version="3"}',
    ):
        assert line in metrics


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/responses"])
def test_a_length_beyond_the_context_is_no_reason_to_refuse(tmp_path: Path, route: str) -> None:
    """A request without a limit gets as many tokens as fit."""
    path = tmp_path / "policies.toml"
    path.write_text("[[policy]]\nname = 'short'\nkind = 'length'\nmax_tokens = 4096\n", encoding="utf-8")
    model = scripted_model(next_token=saying("so"), max_model_len=256)

    def body(text: str) -> dict[str, Any]:
        return {"input": text} if route == "/v1/responses" else {"messages": [{"role": "user", "content": text}]}

    with local_client(model, HttpSettings(policies=PolicyRegistry(path))) as client:
        answer = client.post(route, json=body("Go on"))
        assert answer.status_code == 200 and "so" in answer.text, answer.text
        full = client.post(route, json=body("Go on" * 300))
        assert full.status_code == 400 and "at least 1 new token" in full.text, full.text


def test_the_example_holds_as_it_stands(tmp_path: Path) -> None:
    """The example policies are tested for a user, and for an admin to whom one policy does not apply."""
    keys = KeyStore(tmp_path / "keys.db")
    said = "Of TICKET-12345, ann@example.org and a key: sk-abcdefghijklmnop1234."
    registry = ModelRegistry([scripted_model(max_model_len=1024)])
    book = PolicyRegistry(ROOT / "examples" / "policies.toml")
    settings = HttpSettings(policies=book, controller_classes={"Says": Says})
    with TestClient(create_app(registry, settings, keys=keys)) as client:
        for is_admin in (False, True):
            key = {"authorization": f"Bearer {keys.add(f'user-{is_admin}', is_admin=is_admin)}"}
            fields = {"max_tokens": 120, "controller": "class:Says", "controller_arg": said}
            answer = post(client, "/v1/completions", fields, **key)
            ticket = "TICKET-12345" if is_admin else "[ticket]"
            assert text_of(answer) == f"Of {ticket}, [e-mail] and a key: [key]."
            told = ["secrets@1", "house-words@1", *([] if is_admin else ["no-ticket-numbers"]), "no-loops", "thoughts"]
            assert answer.headers["x-bridle-policies"] == ", ".join(told)
    registry.close()
    keys.close()


def test_users_see_no_policies(book: PolicyRegistry, tmp_path: Path) -> None:
    keys = KeyStore(tmp_path / "keys.db")
    registry = ModelRegistry([scripted_model(next_token=saying(SAYING))])
    with TestClient(create_app(registry, HttpSettings(policies=book), keys=keys)) as client:
        for is_admin, status in ((False, 403), (True, 200)):
            key = {"authorization": f"Bearer {keys.add(f'user-{is_admin}', is_admin=is_admin)}"}
            assert client.get("/v1/policies", headers=key).status_code == status
            assert client.post("/v1/policies/reload", headers=key).status_code == status
    registry.close()
    keys.close()


def test_the_runtime_of_policies_is_shown_once_there_is_one() -> None:
    """Status and metrics show the control runtime of policies separately from the one of users."""

    def never() -> Any:
        raise AssertionError

    model = scripted_model()
    model.demanded = PolicyPool(never)
    with local_client(model) as client:

        def seen() -> tuple[Any, list[str]]:
            metrics = client.get("/metrics").text.splitlines()
            (row,) = client.get("/v1/status").json()["models"]
            return row["policy_control"], [line for line in metrics if line.startswith("bridle_engine_policy_control")]

        assert seen() == (None, [])
        model.demanded.runtime = SimpleNamespace(is_ready=True, num_restarts=2)  # type: ignore[assignment]
        control, metrics = seen()
        assert control == {"is_up": True, "restarts": 2}
        assert [line.rpartition(" ")[2] for line in metrics] == ["1.0", "2.0"]
        model.demanded.runtime = None
    model.close()
