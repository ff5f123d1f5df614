"""Tests of Wasm controllers on GENERATE: clients that request events see rollbacks and forks, and other clients see
only final text."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from bridle.aici.protocol import Auth
from bridle.controllers.composition import parts_of
from bridle.errors import InvalidRequest
from bridle.http.openai.schemas import SamplingFields
from bridle.lmtp.messages import Generate
from bridle.lmtp.server.requests import generation_of
from bridle.serving.controller_runtime import upload_module
from bridle.serving.tenancy.keys import Identity
from bridle.structured_output import Regex
from tests.aici.guests import END, TRAP, by_branch, force, guest2, result, say, splice
from tests.http.controlled import ENDLESS, controlled_model, ids, lent, pick
from tests.lmtp.harness import Object, Setup, running
from tests.serving.fakes import served_by

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
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with controlled_model(tmp_path_factory.mktemp("modules"), next_token=_unhurried) as model:
        yield model


def _unhurried(prefix: Sequence[int]) -> int:
    """Return the next token. Long texts come slowly, so that an output still runs when a slow reader cancels it."""
    if len(prefix) > 50:
        time.sleep(0.02)
    return 70


@pytest.fixture
async def setup(model: Any) -> AsyncIterator[Setup]:
    async with running(lent(model)) as setup:
        yield setup


def upload(model: Any, wasm: bytes) -> str:
    return str(upload_module(model.control, wasm, Auth("ann", True)).module_id)


async def run(setup: Setup, wasm: bytes, *, extended: bool = True, **fields: Any) -> list[Object]:
    wire = setup.connect()
    if extended:
        await wire.hello()
    name = upload(setup.model, wasm)
    await wire.send("GENERATE", stream_id=1, prompt=ids("x"), text=True, controller=name, max_tokens=40, **fields)
    found: list[Object] = []
    while not found or await_more(found):
        kind, body = await wire.next()
        found.append({"kind": kind, **body})
    return found


def await_more(found: list[Object]) -> bool:
    num_forks = sum(body.get("event") == "fork" for body in found)
    num_ends = sum(bool(body.get("finish_reason")) for body in found)
    return not any("error" in body for body in found) and num_ends < 1 + num_forks


def replayed(found: list[Object]) -> dict[int, str]:
    """Return the text of each branch, as a client assembles it from events."""
    texts = {0: ""}
    for body in found:
        branch = body.get("branch", 0)
        if body.get("event") == "fork":
            texts[branch] = texts[body["parent"]]
        elif body.get("event") == "rewind" and body["num_chars"]:
            texts[branch] = texts[branch][: -body["num_chars"]]
        elif body["kind"] == "TOKEN":
            texts[branch] += body.get("text") or ""
    return texts


async def test_rewinds_are_told_or_never_seen(setup: Setup) -> None:
    told = await run(setup, REWINDING, rewind="event")
    assert any(body.get("event") == "rewind" for body in told)
    assert replayed(told) == {0: "right"}
    for extended in (False, True):
        held = await run(setup, REWINDING, extended=extended)
        assert all(body["kind"] == "TOKEN" for body in held)
        assert "".join(body["text"] for body in held) == "right"
        assert [body["token"] for body in held] == ids("right")


async def test_forks_are_told_or_the_first_branch_is_sent(setup: Setup) -> None:
    told = await run(setup, FORKING, rewind="event")
    assert any(body.get("event") == "fork" for body in told)
    assert replayed(told) == {0: "start-left1", 1: "start-right2"}
    assert {body["text"] for body in told if body.get("event") == "log"} == {"L\n", "R\n"}
    held = await run(setup, FORKING, extended=False)
    assert "".join(body["text"] for body in held) == replayed(told)[0]


async def test_a_trap_ends_its_stream(setup: Setup) -> None:
    found = await run(setup, guest2([[say("so far\n"), *pick("a")], [TRAP]]), extended=False)
    assert found[-1]["code"] == "controller_error"
    assert "unreachable" in found[-1]["error"]


async def test_cancel_ends_a_controller(setup: Setup) -> None:
    wire = setup.connect()
    await wire.hello()
    name = upload(setup.model, ENDLESS)
    await wire.send("GENERATE", stream_id=1, prompt=ids("x"), controller=name, max_tokens=400, rewind="event")
    while (await wire.next())[0] != "TOKEN":
        pass
    await wire.send("CANCEL", stream_id=1)
    assert (await wire.stream(1))[-1]["code"] == "cancelled"
    await setup.settle()


async def test_an_unknown_controller_is_named(setup: Setup) -> None:
    (body,) = await setup.connect().ask("GENERATE", prompt=[5], controller="nope")
    assert "nope" in body["error"]


async def engine_request(model: Any, **fields: Any) -> Any:
    asked = Generate(stream_id=1, model=model.name, prompt=(1, 2), **fields)
    generation = await generation_of(await served_by(model, Identity("ann", False)), asked, ())
    return generation.parts[0].request


@pytest.mark.parametrize(
    ("fields", "ignores"),
    [
        ({"controller": "some"}, True),
        ({"controller": "some", "options": {"ignore_eos": False}}, False),
        ({"controller": "none"}, False),
        ({}, False),
        ({"options": {"ignore_eos": True}}, True),
    ],
)
async def test_a_controller_decides_when_its_output_ends(model: Any, fields: Any, ignores: bool) -> None:
    """The controller decides the end of its output unless the client sets a limit, as over HTTP."""
    assert (await engine_request(model, **fields)).sampling.ignore_eos is ignores


async def test_several_controllers_in_order(model: Any) -> None:
    """The order is the controller in `controller`, the list in `controllers`, and then the constraint. `none` means no
    controller."""
    further = ("b", {"controller": "c", "controller_arg": {"d": 1}}, "none")
    request = await engine_request(
        model, controller="a", controller_arg="x", controllers=further, constraint={"regex": "a+"}
    )
    *wasm, form = parts_of(request.controller)
    assert [(each.module, each.argument) for each in wasm] == [("a", "x"), ("b", ""), ("c", '{"d":1}')]
    assert form == Regex("a+")
    assert request.sampling.ignore_eos
    alone = await engine_request(model, controllers=("none", "b"))
    assert alone.controller.module == "b"
    assert (await engine_request(model, controllers=("none",))).controller is None


async def test_controllers_beside_a_constraint(setup: Setup) -> None:
    further = [upload(setup.model, guest2([pick("xyz")]))]
    found = await run(setup, guest2([pick("vxy")]), controllers=further, constraint={"regex": "[w-z]{3}"})
    assert re.fullmatch("[xy]{3}", "".join(body.get("text", "") for body in found))


@pytest.mark.parametrize("argument", [None, "text", {"a": [1, 2], "é": None}, [1.5, True]])
async def test_an_argument_is_the_same_text_as_over_http(model: Any, argument: Any) -> None:
    fields = SamplingFields(controller="some", controller_arg=argument)
    serving = await served_by(model, Identity("ann", False))
    over_http = serving.steering(fields, fields.form()).controller
    assert (await engine_request(model, controller="some", controller_arg=argument)).controller == over_http


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"controller": ""}, "the name in controller has 0 characters; must have 1 to 200"),
        ({"controller": "x" * 201}, "the name in controller has 201 characters; must have 1 to 200"),
        ({"controllers": ("x", 5)}, r"controllers\[1\] is 5; must be a name, or an object with controller and"),
        (
            {"controllers": ({"controller": "x", "arg": 1},)},
            r"controllers\[0\] has an unknown field 'arg'; its fields are controller",
        ),
        (
            {"controllers": ({"controller": "none", "controller_arg": "x"},)},
            "controller_arg is given without a controller",
        ),
        ({"controllers": ("x",) * 9}, "controllers has 9 entries; at most 8"),
        ({"controller": "x", "controllers": ("x",) * 8}, "the request has 9 controllers; at most 8"),
        ({"controllers": ("x",) * 8, "constraint": {"regex": "a+"}}, "the request has 9 controllers; at most 8"),
        ({"controller_arg": "x"}, "controller_arg is given without a controller"),
        ({"controller": "none", "controller_arg": "x"}, "controller_arg is given without a controller"),
    ],
)
async def test_what_does_not_go_together_is_refused(model: Any, fields: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await engine_request(model, **fields)
