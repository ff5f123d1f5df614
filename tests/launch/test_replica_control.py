"""Tests of Wasm controllers with several replicas, which share one store, have a runtime each, and may be lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bridle.aici.client import WasmController
from bridle.aici.protocol import Auth
from bridle.config import EngineConfig, ModelConfig
from bridle.engine import Request
from bridle.launch.replicas import LaunchedReplicas, load_replicated
from bridle.outputs import Finished, FinishReason, Log
from bridle.sampling import SamplingParams
from bridle.serving import LoadedModel, tag_module, upload_module
from bridle.serving.controller_runtime import ControlSettings
from tests.aici.guests import END, guest2, sample, say
from tests.launch.kit import Crowd, Reader
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ADMIN = Auth("localhost", True)
VOCAB_SIZE = 3072  # of the demo model
ENDLESS = guest2([[say("a "), *sample([65, 66, 67], VOCAB_SIZE)]])
SHORT = guest2([sample([66], VOCAB_SIZE), END])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    control = ControlSettings("on", args=("--limit", "max_prepare_wait=600000"), store=tmp_path_factory.mktemp("store"))
    config = ModelConfig("demo", num_blocks=256, num_threads=1)
    made = load_replicated(config, EngineConfig(), 2, control=control)
    yield made
    made.close()


def steered(module: str, number: int, max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return Request(
        f"{module[:4]}-{number}-{max_tokens}", (5, 6, 7, number), sampling, controller=WasmController(module)
    )


def run(model: LoadedModel, *made: Request) -> list[Reader]:
    crowd = Crowd(model.client, list(made))
    crowd.join()
    return crowd.readers


def test_one_upload_is_known_to_every_replica(model: LoadedModel) -> None:
    assert model.control is not None
    module = upload_module(model.control, SHORT, ADMIN).module_id
    tag_module(model.control, module, ["short"], ADMIN)
    assert isinstance(model.client, LaunchedReplicas)
    for reader in run(model, *(steered(name, number, 9) for name in (module, "short") for number in range(6))):
        assert reader.reasons == {FinishReason.CONTROLLER}, reader.events
        assert reader.outputs == {0: [66]}


def test_an_output_goes_on_when_its_replica_is_killed(model: LoadedModel) -> None:
    assert model.control is not None and isinstance(model.client, LaunchedReplicas)
    module = upload_module(model.control, ENDLESS, ADMIN).module_id
    expected = run(model, *(steered(module, number, 200) for number in range(6)))
    crowd = Crowd(model.client, [steered(module, number, 200) for number in range(6)])
    assert crowd.wait(120)
    pid = model.client.children[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    crowd.join()
    for reader, before in zip(crowd.readers, expected, strict=True):
        assert reader.reasons == {FinishReason.LENGTH}, [e for e in reader.events if isinstance(e, Finished)]
        assert reader.outputs == before.outputs
        assert logs(reader) == logs(before)


def logs(reader: Reader) -> str:
    """Return the controller's log without the runtime's warnings about late answers."""
    said = "".join(event.text for event in reader.events if isinstance(event, Log))
    return "".join(line for line in said.splitlines(True) if "⏳" not in line)


def test_the_store_survives_its_runtime(model: LoadedModel) -> None:
    control = model.control
    assert control is not None and control.runtime_pid is not None
    os.killpg(control.runtime_pid, signal.SIGKILL)
    until(lambda: control.num_restarts == 1 and control.is_ready)
    assert upload_module(control, SHORT, ADMIN).module_id == upload_module(control, SHORT, ADMIN).module_id
