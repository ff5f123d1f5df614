"""Tests that traces record the module of a controller's name. A replay uses that module, even if the name now means
another module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridle import LLM
from bridle.aici.client import WasmController
from bridle.controllers import standard
from bridle.controllers.composition import compose
from bridle.errors import InvalidRequest
from bridle.serving import LoadedModel
from bridle.serving.controller_runtime import LOCAL_ADMIN, find_module, tag_module, upload_module
from bridle.serving.requests.steering import control_of
from bridle.serving.tracing.replay import moved_names, replay
from bridle.serving.tracing.trace_header import modules_of, ran_form
from bridle.structured_output import Regex
from bridle.traces import EndRecord, Trace, TraceHeader, parse
from bridle.traces.compare import compare
from bridle.traces.format import encode_trace
from tests.aici.guests import END, TRAP, force, guest2, sample
from tests.http.controlled import VOCAB_SIZE, controlled_model, ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    with controlled_model(tmp_path_factory.mktemp("store")) as made:
        yield made


def upload(model: LoadedModel, text: str, tag: str) -> str:
    """Upload a controller that forces a text, give it the tag, and return its module id."""
    control = control_of(model)
    module: str = upload_module(control, guest2([force(ids(text)), END]), LOCAL_ADMIN).module_id
    tag_module(control, module, [tag], LOCAL_ADMIN)
    return module


def traced(model: LoadedModel, controller: object) -> Trace:
    llm = LLM(model)
    (output,) = llm.generate("hello", controller=controller, max_tokens=6, seed=3, trace=True, use_tqdm=False)
    assert output.trace is not None
    (trace,) = parse(encode_trace(output.trace))  # as it is in a file
    return trace


def test_a_tag_that_moved_replays_what_ran(model: LoadedModel) -> None:
    first = upload(model, "one", "moving")
    old = traced(model, WasmController("moving"))
    assert modules_of(old) == (("moving", first),)
    assert moved_names(model, old) == []
    second = upload(model, "two", "moving")
    assert first != second
    assert not compare(old, traced(model, WasmController("moving"))).is_same
    again = replay(model, old)
    found = compare(old, again)
    assert found.is_same, found.sentences
    assert modules_of(again) == ((first, first),)
    assert moved_names(model, old) == [
        f"The name 'moving' means module {second} now; the request was controlled by {first}, which is run."
    ]
    assert moved_names(model, again) == []


def test_each_of_several_controllers_is_told(model: LoadedModel) -> None:
    module = upload(model, "one", "inner")
    free = upload_module(control_of(model), guest2([sample(range(VOCAB_SIZE), VOCAB_SIZE)]), LOCAL_ADMIN).module_id
    tag_module(control_of(model), free, ["outer"], LOCAL_ADMIN)
    both = compose(WasmController("outer"), WasmController("inner"), Regex("[a-z]+"))
    old = traced(model, both)
    assert modules_of(old) == (("outer", free), ("inner", module))
    upload(model, "two", "inner")
    form = ran_form(old)
    assert form is not None
    assert [part.get("wasm", {}).get("module") for part in form["composed"]] == [free, module, None]
    assert compare(old, replay(model, old)).is_same


def test_what_failed_is_told_too(model: LoadedModel) -> None:
    module = upload_module(control_of(model), guest2([[TRAP]]), LOCAL_ADMIN).module_id
    tag_module(control_of(model), module, ["failing"], LOCAL_ADMIN)
    old = traced(model, WasmController("failing"))
    assert modules_of(old) == (("failing", module),)
    upload(model, "one", "failing")
    assert compare(old, replay(model, old)).is_same


def test_a_module_that_is_gone_is_named(model: LoadedModel) -> None:
    upload(model, "one", "going")
    old = traced(model, WasmController("going"))
    gone = [
        replace(each, modules=(("going", "f" * 64),)) if isinstance(each, EndRecord) else each for each in old.records
    ]
    with pytest.raises(InvalidRequest, match=r"f{64} \('going' then\), which is not stored on this machine"):
        replay(model, Trace(old.header, gone))
    (told,) = moved_names(model, Trace(old.header, [EndRecord(0, 0, modules=(("nobody", "f" * 64),))]))
    assert told.startswith("The name 'nobody' means nothing now")


def test_what_a_name_means_is_found_without_a_download(model: LoadedModel) -> None:
    control = control_of(model)
    module = standard.manifest()["yesno"].sha256
    assert find_module(control, module) == module  # also where nobody has asked for it by name
    assert find_module(control, "yesno") == module
    assert find_module(control, "gh:microsoft/aici/yesno/latest") == module
    assert find_module(control, "gh:nobody/nothing") == ""
    assert find_module(control, "0" * 64) == ""


PARTS = st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=6)


@given(PARTS)
def test_each_name_is_exchanged_for_what_it_meant(names: list[str | None]) -> None:
    parts = [
        {"constraint": {"regex": "x"}} if name is None else {"wasm": {"module": name, "argument": str(number)}}
        for number, name in enumerate(names)
    ]
    meant = tuple((name, f"{number:064x}") for number, name in enumerate(names) if name is not None)
    form = {"name": "all", **(parts[0] if len(parts) == 1 else {"composed": parts})}
    trace = Trace(TraceHeader("a", controller=form), [EndRecord(0, 0, modules=meant)])
    made = ran_form(trace)
    assert made is not None
    for number, part in enumerate(made.get("composed", [made])):
        if names[number] is None:
            assert part.get("constraint") == {"regex": "x"}
        else:
            assert part["wasm"] == {"module": f"{number:064x}", "argument": str(number)}
    assert ran_form(Trace(trace.header)) == form  # of a trace that does not tell, the name stays
