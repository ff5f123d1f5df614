"""Tests of adapters with several replicas: each replica gets the list of all adapters, and a registry sees the replicas
as one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from bridle.config import EngineConfig, ModelConfig
from bridle.distributed.adapter_messages import AdapterFetched, AdapterMessage
from bridle.distributed.codec.errors import pack_error
from bridle.distributed.replica_adapters import HomeServer, ReplicatedLoRAStore
from bridle.distributed.replica_messages import encode, read_by_replica, read_by_router
from bridle.errors import AdapterRefused, EngineClosed, UnknownAdapter, UnsupportedFeature
from bridle.lora import AdapterFiles, open_adapter
from bridle.sampling import SamplingParams
from bridle.serving import OutputCollector, build_request, load_model
from bridle.serving.lora.adapter_registry import AdapterRegistry
from bridle.serving.models.loading import LoadedModel
from bridle.serving.outputs.output_collector import collect
from tests.fakes import tiny_checkpoints
from tests.lora.kit import SECONDS, Bench, write_adapter


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> AdapterFiles:
    return open_adapter(write_adapter(tmp_path_factory.mktemp("adapter")))


class Wires:
    """Two replicas without sockets, whose messages are still encoded and decoded."""

    def __init__(self, files: AdapterFiles) -> None:
        self.router = ReplicatedLoRAStore(self.send)
        self.benches = [Bench(files, 2, 3) for _ in range(2)]
        self.served = [self.serve(number) for number in range(2)]

    def serve(self, number: int) -> HomeServer:
        def answer(message: AdapterFetched) -> None:
            decoded = read_by_router(encode(message))
            assert isinstance(decoded, AdapterFetched)
            self.router.note_fetched(number, decoded)

        return HomeServer(self.benches[number].pool, answer)

    def send(self, number: int, message: AdapterMessage) -> None:
        decoded = read_by_replica(encode(message))
        assert decoded == message
        self.served[number].handle(message)

    def bring_up(self, number: int) -> None:
        limits = self.benches[number].pool.limits
        self.router.note_up(number, msgspec.msgpack.decode(msgspec.msgpack.encode(limits), type=type(limits)))

    def tell_news(self) -> None:
        for number, served in enumerate(self.served):
            self.router.note_news(number, served.news())


@pytest.fixture
def wires(files: AdapterFiles) -> Iterator[Wires]:
    made = Wires(files)
    yield made
    for bench in made.benches:
        bench.pool.close()


def test_each_replica_knows_what_was_added_before_and_after(wires: Wires, files: AdapterFiles) -> None:
    with pytest.raises(UnsupportedFeature):
        wires.router.check(files)
    wires.bring_up(0)
    wires.router.check(files)
    wires.router.add("a", files)
    wires.bring_up(1)
    wires.router.add("b", files)
    for bench in wires.benches:
        for key in ("a", "b"):
            bench.pool.open(key)
    wires.router.remove("a")
    for bench in wires.benches:
        with pytest.raises(UnknownAdapter):
            bench.pool.open("a")


def test_what_one_replica_has_is_there(wires: Wires, files: AdapterFiles) -> None:
    wires.bring_up(0)
    wires.bring_up(1)
    wires.router.add("a", files)
    assert wires.router.status("a").state == "known"
    wires.benches[0].device.fault = AdapterRefused("damaged here", "source")
    wires.router.fetch("a").result(SECONDS)
    while wires.benches[0].pool.status("a").state != "failed" or wires.benches[1].pool.status("a").state != "host":
        wires.benches[0].changed.wait(0.01)
    wires.benches[1].pool.open("a")
    wires.tell_news()
    assert (wires.router.status("a").state, wires.router.status("a").num_users) == ("host", 1)
    wires.router.note_lost(1)
    assert wires.router.status("a").error == "damaged here"


def test_what_no_replica_can_read_fails(wires: Wires, files: AdapterFiles) -> None:
    wires.router.add("a", files)
    future = wires.router.fetch("a")
    assert not future.done()  # until there is a replica at all
    for bench in wires.benches:
        bench.device.fault = AdapterRefused("damaged", "source")
    wires.bring_up(0)
    with pytest.raises(AdapterRefused, match="damaged"):
        future.result(SECONDS)
    with pytest.raises(UnknownAdapter):
        wires.router.fetch("b")


def test_nobody_waits_for_what_is_closed_or_removed(wires: Wires, files: AdapterFiles) -> None:
    wires.router.add("a", files)
    wires.router.add("b", files)
    removed, closed = wires.router.fetch("a"), wires.router.fetch("b")
    wires.router.remove("a")
    wires.router.close()
    with pytest.raises(UnknownAdapter):
        removed.result(0)
    with pytest.raises(EngineClosed):
        closed.result(0)


def test_nobody_waits_for_what_a_lost_replica_might_have_read(wires: Wires, files: AdapterFiles) -> None:
    for number in range(2):
        wires.served[number] = HomeServer(None, lambda message: None)  # each takes its time
        wires.bring_up(number)
    wires.router.add("a", files)
    refused = AdapterFetched("a", pack_error(AdapterRefused("damaged", "source")))
    future = wires.router.fetch("a")
    wires.router.note_fetched(0, refused)
    assert not future.done()
    wires.router.note_lost(1)
    with pytest.raises(AdapterRefused, match="damaged"):
        future.result(0)
    again = wires.router.fetch("a")
    wires.router.note_lost(0)
    assert not again.done()  # the next one may do better
    wires.bring_up(0)
    wires.router.note_fetched(0, AdapterFetched("a", None))
    again.result(0)


def test_a_router_that_leaves_takes_its_adapters_along(wires: Wires, files: AdapterFiles) -> None:
    wires.bring_up(0)
    wires.router.add("a", files)
    wires.router.fetch("a").result(SECONDS)
    bench = wires.benches[0]
    bench.changed.clear()
    wires.served[0].close()
    assert bench.changed.wait(SECONDS)
    assert not bench.device.host


async def say(model: LoadedModel, folder: Path) -> list[str]:
    """Return the model's outputs without and with two adapters."""
    assert isinstance(model.adapters, AdapterRegistry)
    for seed, name in enumerate(("poet", "clerk")):
        model.adapters.add(name, str(write_adapter(folder / name, rank=8, seed=seed)))
    await model.adapters.ready("poet")
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    texts = []
    for name in (None, "poet", "clerk", model.name):
        request = build_request(model, [5, 6, 7, 8], greedy, adapter=name)
        done = await collect(model.client.submit(request), OutputCollector(request))
        texts.append(str(done.outputs[0].token_ids))
    return texts


@pytest.mark.slow
async def test_replicas_say_what_one_process_says(tmp_path: Path) -> None:
    from bridle.launch.replicas import load_replicated

    config = ModelConfig(str(tiny_checkpoints.cached_checkpoint("llama")), num_blocks=64, block_size=16, num_threads=1)
    found: list[list[str]] = []
    loaders: tuple[Callable[[], LoadedModel], ...] = (
        lambda: load_model(config),
        lambda: load_replicated(config, EngineConfig(), 2),
    )
    for load in loaders:
        model = load()
        try:
            found.append(await say(model, tmp_path))
        finally:
            model.close()
    assert found[0] == found[1]
    assert len(set(found[0])) == 3
