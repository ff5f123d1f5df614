"""Generated programs try to write what policies forbid: scripts in JavaScript, programs in JSON and Wasm modules, on
each API. The programs force tokens, sample with masks and biases, roll back, splice, fork, log, store variables and
fail."""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from bridle.aici.client import RuntimeConfig, RuntimePool
from bridle.aici.protocol import LOCAL
from bridle.config import EngineConfig
from bridle.http import HttpSettings, create_app
from bridle.http.openai.batch import answer_batch, read_requests
from bridle.serving import LoadedModel, ModelRegistry
from bridle.serving.controller_runtime import upload_module
from bridle.serving.policies import PolicyRegistry, read_policies
from tests.aici.guests import END, Step, by_branch, force, guest2, mask, result, sample, say, splice, store
from tests.conftest import IS_FULL
from tests.http.harness import saying, scripted_model, tokenizer, tokenizer_folder
from tests.http.routes import ROUTES
from tests.lmtp.harness import Setup

NO_RULES = read_policies({})
RULES = read_policies(
    {
        "policy": [
            {"name": "words", "kind": "phrases", "phrases": ["forbidden"]},
            {"name": "never", "kind": "pattern", "pattern": "q[0-9]{2}", "action": "end", "seen": True},
            {"name": "mail", "kind": "redact", "what": ["email"]},
        ]
    }
)
SECRETS = ("forbidden", "q42", "ann@example.org")
#: What attackers are made of: secrets, their halves, and other ways to write them.
PIECES = (
    *(*SECRETS, "for", "bidden", "FOR", "b", "\u200b", "BID", "den", "q", "4", "2", "ann@exam", "ple.org", " ", "x"),
    *("ａｎｎ＠example．org", "an\u00adn@exam\u034fple.org", "ann\u200b@exam", "\u00ad", "４", "ｆｏr", "\u034f"),
)
LONG = 40


def leaks(said: list[str]) -> list[str]:
    """Return the secrets that a reader sees in the texts."""
    seen = [unicodedata.normalize("NFKC", re.sub("[\u200b\u00ad\u034f]", "", text)) for text in said]
    phrase = any("forbidden" in text.lower() for text in seen)
    return ["forbidden"] * phrase + [secret for secret in SECRETS[1:] if any(secret in text for text in seen)]


# -- attackers ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attack:
    """A user's request: a controller with its argument, and fields of a completion."""

    controller: str | None
    argument: Any
    fields: dict[str, Any]


def script(random: Random) -> str:
    """Return a random program in JavaScript."""

    def piece() -> str:
        return json.dumps(random.choice(PIECES))

    def statement(depth: int) -> str:
        kinds = "fffggocblrrasle" if depth < 2 else "fgb"
        match random.choice(kinds):
            case "f":
                return f"await fixed({piece()})"
            case "g":
                return f"await gen({{ regex: {json.dumps(again(random.choice(PIECES)))}, maxTokens: 9 }})"
            case "o":
                return f"await gen({{ options: [{piece()}, {piece()}] }})"
            case "c":
                return f"await gen({{ choice: [{piece()}], maxTokens: 30 }})"
            case "b":
                (token, *_) = spelled(random.choice(PIECES))
                return f"await gen({{ bias: [[{token}, 90]], maxTokens: {random.randint(1, 6)} }})"
            case "l":
                return f"{{ const l = new Label(); {statement(depth + 1)}; await l.rewind(); {statement(depth + 1)} }}"
            case "r":
                return f"{{ const l = new Label(); {statement(depth + 1)}; await l.fixedAfter({piece()}) }}"
            case "a":
                return f"if (await fork(2)) {{ {statement(depth + 1)} }} else {{ {statement(depth + 1)} }}"
            case "s":
                return f"setVar('v', {piece()}); appendVar('v', {piece()})"
            case "e" if random.random() < 0.3:
                return f"throw new Error({piece()} + {piece()})"
            case _:
                return f"console.log({piece()} + {piece()})"

    lines = [statement(0) for _ in range(random.randint(2, 6))]
    names = 'import { Label, setVar, appendVar } from "aici"\n'
    return names + "start(async () => {\n" + "\n".join(lines) + "\n})"


def program(random: Random) -> dict[str, Any]:
    """Return a random program in JSON."""

    def text() -> dict[str, Any]:
        parts = [{"String": {"str": random.choice(PIECES)}} for _ in range(random.randint(1, 3))]
        return {"Concat": {"parts": parts}}

    def step(depth: int) -> dict[str, Any]:
        match random.choice("ffgckls" if depth < 2 else "fg"):
            case "f":
                return {"Fixed": {"text": text()}}
            case "g":
                return {
                    "Gen": {
                        "rx": again(random.choice(PIECES)),
                        "max_tokens": 9,
                        "stmts": [{"Set": {"var": "v", "expr": text()}}],
                    }
                }
            case "c":
                return {"Choose": {"options": {"Concat": {"parts": [text(), text()], "list": True}}}}
            case "k":
                return {"Fork": {"branches": [[step(depth + 1)], [step(depth + 1), step(depth + 1)]]}}
            case "l":
                return {"Fixed": {"text": text(), "following": "prompt"}}
            case _:
                return {"Gen": {"max_tokens": 4, "stop_at": random.choice(PIECES)}}

    return {"steps": [step(0) for _ in range(random.randint(2, 5))]}


def module(random: Random) -> bytes:
    """Return a random Wasm module, with one step for each of its callbacks."""
    size = tokenizer().vocab_size

    def step(depth: int = 0) -> Step:
        tokens = spelled(random.choice(PIECES))
        match random.choice("ffffrsmnkly" if depth < 1 else "ffrs"):
            case "f":
                return force(tokens)
            case "r":
                return force(tokens, backtrack=random.randint(1, 3))
            case "s":
                return sample(tokens, size)
            case "m":
                put = {"when_sampled": [], "backtrack": 1, "ff_tokens": spelled(random.choice(PIECES))}
                return [mask(tokens, size), result({"branches": [{"sample_mask": "#", "splices": [put]}]})]
            case "n":
                put = {"when_sampled": tokens[:1], "backtrack": 0, "ff_tokens": tokens[1:]}
                return [mask(tokens, size), result({"branches": [{"sample_mask": "#", "splices": [put]}]})]
            case "k":
                ways = [splice(tokens), splice(spelled(random.choice(PIECES)))]
                return [result({"branches": ways})]
            case "l":
                return [say(random.choice(PIECES) + random.choice(PIECES)), *force(tokens)]
            case _:
                return [store("v", random.choice(PIECES).encode().hex()), *force(tokens)]

    steps = [step() for _ in range(random.randint(3, 10))]
    apart = [by_branch(force(spelled("bid")), force(spelled("den")))]  # what is forced differs between forks
    return guest2([*steps, apart if random.random() < 0.2 else END, END])


def again(text: str) -> str:
    """Return a regular expression that matches one or more repetitions of a text."""
    return f"({text.replace('.', '[.]')})+"


@cache
def spelled(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


# -- the APIs ------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """A server with policies, and clients on each of its APIs."""

    model: LoadedModel
    client: httpx.AsyncClient
    app: Any
    lmtp: Setup
    book: PolicyRegistry

    async def post(self, route: str, attack: Attack, **more: Any) -> list[str]:
        fields = dict(attack.fields) if route in ("/v1/completions", "/v1/chat/completions") else {}
        fields |= {next(name for name in ROUTES[route][0] if name.startswith("max_")): LONG} | more
        if attack.controller is not None:
            fields |= {"controller": attack.controller, "controller_arg": attack.argument}
        body = ROUTES[route][0] | fields
        if route == "/generate":
            body = {"inputs": "Say", "parameters": body}
        answer = await self.client.post(route, json=body)
        assert answer.status_code < 600
        if answer.headers["content-type"].startswith("text/event-stream"):
            return streamed(answer.text)
        return strings(answer.json())

    async def run(self, attack: Attack) -> list[str]:
        if attack.controller is None:
            return []
        return await self.post("/v1/run", attack)

    async def batch(self, attack: Attack) -> list[str]:
        body = {"prompt": "Say", "max_tokens": LONG, **attack.fields}
        if attack.controller is not None:
            body |= {"controller": attack.controller, "controller_arg": attack.argument}
        line = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": body}).encode()
        return [text async for answer in answer_batch(self.app, read_requests([line]), 1) for text in strings(answer)]

    async def over_lmtp(self, attack: Attack) -> list[str]:
        wire = self.lmtp.connect()
        more: dict[str, Any] = {"prompt": "Say", "max_tokens": LONG, "text": True}
        if attack.controller is not None:
            more |= {"controller": attack.controller, "controller_arg": attack.argument}
        told = await wire.ask("GENERATE", **more)
        tokens = [each["token"] for each in told if isinstance(each.get("token"), int)]
        texts = "".join(str(each.get("text", "")) for each in told)
        return [texts, tokenizer().decode(tokens), *(text for each in told for text in strings(each))]


APIS: dict[str, Callable[[World, Attack], Awaitable[list[str]]]] = {
    "run": World.run,
    "completions": lambda world, attack: world.post("/v1/completions", attack),
    "completions, streamed": lambda world, attack: world.post("/v1/completions", attack, stream=True, rewind="event"),
    "chat": lambda world, attack: world.post("/v1/chat/completions", attack),
    "chat, streamed": lambda world, attack: world.post("/v1/chat/completions", attack, stream=True),
    "responses": lambda world, attack: world.post("/v1/responses", attack),
    "messages": lambda world, attack: world.post("/v1/messages", attack, stream=True),
    "generate": lambda world, attack: world.post("/generate", attack),
    "LMTP": World.over_lmtp,
    "batch": World.batch,
}


def strings(value: Any) -> list[str]:
    """Return all texts in an answer."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for each in inner for text in strings(each)]


def streamed(body: str) -> list[str]:
    """Return all texts in a stream of events, and the joined text of each output."""
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    found: dict[Any, str] = {}
    for event in events:
        for choice in event.get("choices") or event.get("forks") or [event]:
            if choice.get("type", "").endswith((".done", ".completed")):
                continue
            for kind in ("text", "content", "logs"):
                pieces = named(choice, kind)
                if pieces:
                    key = choice.get("index"), kind
                    found[key] = found.get(key, "") + "".join(pieces)
    return [*found.values(), *strings(events)]


def named(value: Any, name: str) -> list[str]:
    """Return all texts in fields with the given name."""
    if isinstance(value, list):
        return [text for each in value for text in named(each, name)]
    if not isinstance(value, dict):
        return []
    own = [value[name]] if isinstance(value.get(name), str) else []
    return own + [text for key, each in value.items() if key != name for text in named(each, name)]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[RuntimePool]:
    """Yield the control runtime of a test's model. The runtime ends with the model."""
    arguments = ("--store", str(tmp_path / "store"), "--wasm-max-step-time", "500")
    size = tokenizer().vocab_size
    patient = ("--limit", "max_init_time=10000", "--limit", "max_prepare_wait=600000")
    pool = RuntimePool(RuntimeConfig(str(tokenizer_folder()), num_logits=size, extra_args=(*arguments, *patient)), size)
    yield pool
    pool.shutdown()


@pytest.fixture
async def world(runtime: RuntimePool) -> AsyncIterator[World]:
    book = PolicyRegistry(current=RULES)
    reply = "Say forbidden q42 to ann@example.org. "
    model = scripted_model(
        next_token=saying(reply), max_model_len=1024, runtime=runtime, config=EngineConfig(step_timeout=5.0)
    )
    app = create_app(ModelRegistry([model]), HttpSettings(policies=book))
    lmtp = Setup(model)
    lmtp.host.policies = book
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield World(model, client, app, lmtp, book)
    await lmtp.close()
    model.close()


def attack(random: Random, runtime: RuntimePool) -> Attack:
    fields: dict[str, Any] = random.choice([{}, {"stop": ["den"]}, {"n": 2}, {"stop": ["@"]}])
    fields = fields | random.choice([{"temperature": 0.0}, {"seed": random.randrange(99)}])
    match random.choice("jjjddww-"):
        case "j":
            return Attack("jsctrl", script(random), fields)
        case "d":
            return Attack("declctrl", program(random), fields)
        case "w":
            return Attack(upload_module(runtime, module(random), LOCAL).module_id, "", fields)
        case _:
            banned = {str(token): 100 for token in spelled(random.choice(PIECES))[:1]}
            return Attack(None, None, fields | {"logit_bias": banned})


async def test_programs_say_what_is_forbidden_only_where_nothing_holds_them(world: World, runtime: RuntimePool) -> None:
    plain = Attack("jsctrl", "await $`forbidden`", {})
    for seed, api in enumerate([*APIS] * (3 if IS_FULL else 2)):
        one = plain if seed < len(APIS) else await asyncio.to_thread(attack, Random(seed), runtime)
        if one is plain:
            world.book.current = NO_RULES
            assert leaks(await APIS[api](world, one)) == ["forbidden"]
            world.book.current = RULES
        said = await APIS[api](world, one)
        assert not leaks(said), (seed, api, one, said)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
async def test_none_of_ten_thousand_programs_says_it(world: World, runtime: RuntimePool, part: int) -> None:
    apis = list(APIS)
    for seed in range(1_000 * (part + 1), 1_000 * (part + 2)):
        one = await asyncio.to_thread(attack, Random(seed), runtime)
        said = await APIS[apis[seed % len(apis)]](world, one)
        assert not leaks(said), (seed, one, said)
