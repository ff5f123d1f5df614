"""Tests of images with shards: the router decides which image features stay, and the shard encodes. Outputs equal those
of one process, also after a lost connection."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig

from bridle.config import EngineConfig, ModelConfig
from bridle.distributed.group_media import GroupMedia, MemberMedia
from bridle.distributed.media_calls import find_media, parts_of
from bridle.distributed.proto import shard_pb2 as pb
from bridle.engine import Engine, Request
from bridle.engine.interfaces import Executor
from bridle.engine.multimodal.encoder_cache import EncoderCache
from bridle.engine.multimodal.multimodal_inputs import MediaArray, MultiModalItem, PlaceholderRange
from bridle.errors import MediaRefused, ProtocolError, ShardUnavailable, UnsupportedFeature, UnsupportedModel
from bridle.launch.launcher import LaunchedShard, launch_shard, shard_arguments
from bridle.launch.replicas import load_replicated
from bridle.model.loading import load_executor
from bridle.model.tensor_parallel import read_plan
from bridle.multimodal import open_reader
from bridle.outputs import Finished, TokenEvent
from bridle.sampling import SamplingParams
from bridle.serving.controller_runtime import ControlSettings
from bridle.serving.models.loading import load_model
from bridle.testing.scripted import ScriptedExecutor
from bridle.tokenizer import Tokenizer
from tests.distributed.kit import Said, hosted, said_by
from tests.fakes import audio_checkpoints, vision_checkpoints


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = vision_checkpoints.make_seeing(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig(str(folder), num_blocks=96, block_size=4, num_threads=1)


def requests(folder: Path) -> list[Request]:
    """Return one request with text, and three with images. The first two images are the same."""
    reader, tokenizer = open_reader(folder), Tokenizer.load(folder)
    assert reader is not None
    name = tokenizer.token_text(reader.placeholder)
    made = [Request("text", tuple(range(5, 30)), SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))]
    for number, seed in enumerate((1, 1, 2)):
        image = Image.fromarray(np.random.RandomState(seed).randint(0, 255, (24, 30, 3), dtype=np.uint8))
        prompt = tokenizer.encode(f"say {number}: {name} now", add_special_tokens=False)
        tokens, sights = reader.place(prompt, [reader.read(image)], tokenizer)
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=1 + number % 2)
        made.append(Request(f"r{number}", tokens, sampling, media=sights.media, runs=sights.runs))
    return made


def engine_over(executor: Executor) -> Engine:
    """Return an engine without prefix caching, so that each round needs all image features. Its chunks split images."""
    device = find_media(executor)
    assert device is not None
    return Engine(
        executor, EngineConfig(max_num_batched_tokens=24, enable_prefix_caching=False), media=EncoderCache(device)
    )


def rounds(
    executor: Executor, folder: Path, between: Callable[[], None] = lambda: None, lost_at: int = 0
) -> tuple[list[Said], int]:
    """Return the outputs of three runs, with `between` called before one of them, and the number of encoded images."""
    engine = engine_over(executor)
    try:
        found = []
        for number in range(3):
            if number == lost_at:
                between()
            found.append(said_by(engine, requests(folder)))
        return found, engine.statistics().num_media_encoded
    finally:
        engine.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["paligemma", "qwen3_vl"])
def test_a_shard_says_what_the_model_says_here(family: str, folders: Callable[[str], Path]) -> None:
    """A shard gives a local model's output, even after a lost connection, when it has dropped all images."""
    folder = folders(family)
    expected, num_encoded = rounds(load_executor(config_of(folder)), folder)
    num_media = len({medium.key for request in requests(folder) for medium in request.media})
    assert expected[0]["r1", 0] != expected[0]["r2", 0] and num_encoded == num_media
    behind = load_executor(config_of(folder))
    with hosted(behind) as host:
        there = host.connect()

        def lose() -> None:
            assert there.link is not None
            there.link.cut("a test")
            host.wait_free()
            assert behind.media is not None

        found, num_encoded = rounds(there, folder, lose, lost_at=1)
        assert found == expected
        assert there.num_losses == 1
        assert num_encoded == 2 * num_media  # once before the loss and once after it


@pytest.mark.parametrize("modality", ["audio", "video"])
def test_sounds_and_videos_go_to_a_shard(modality: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    is_sound, random = modality == "audio", np.random.RandomState(1)
    folder = audio_checkpoints.make_hearing(tmp_path) if is_sound else folders("qwen2_5_vl")
    reader, tokenizer = open_reader(folder), Tokenizer.load(folder)
    assert reader is not None
    shown = random.randint(0, 255, (6, 24, 30, 3), dtype=np.uint8), 8.0
    one = reader.read(random.randn(5_000).astype(np.float32) if is_sound else shown, modality=modality)
    name = tokenizer.token_text(reader.senses[modality].placeholder)
    tokens, sights = reader.place(tokenizer.encode(f"say {name} now", add_special_tokens=False), [one], tokenizer)
    assert [run.pace for run in sights.runs] == [1.0 if is_sound else 1.5]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    request = Request("r", tokens, sampling, media=sights.media, runs=sights.runs)

    def said(executor: Executor) -> Said:
        engine = engine_over(executor)
        try:
            return said_by(engine, [request])
        finally:
            engine.close()

    expected = said(load_executor(config_of(folder)))
    with hosted(load_executor(config_of(folder))) as host:
        assert said(host.connect()) == expected


def test_a_loss_while_pictures_are_encoded(folders: Callable[[str], Path]) -> None:
    folder = folders("qwen3_vl")
    expected, _ = rounds(load_executor(config_of(folder)), folder)
    behind = load_executor(config_of(folder))
    assert behind.media is not None
    encode, num_calls = behind.media.encode, 0
    with hosted(behind) as host:
        there = host.connect()

        def encode_and_lose(medium: MultiModalItem) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                assert there.link is not None
                there.link.cut("a test")
            encode(medium)

        behind.media.encode = encode_and_lose  # type: ignore[method-assign]
        assert rounds(there, folder)[0] == expected
        assert there.num_losses == 1


def test_what_a_shard_refuses_ends_one_request(folders: Callable[[str], Path]) -> None:
    folder = folders("qwen3_vl")
    with hosted(load_executor(config_of(folder))) as host:
        there = host.connect()
        engine = engine_over(there)
        good = requests(folder)[1]
        odd = MultiModalItem(b"?" * 16, good.media[0].arrays, good.media[0].num_rows - 1)
        run = PlaceholderRange(good.runs[0].position, odd.num_rows, odd.key, 0, good.runs[0].grid)
        bad = Request("bad", good.prompt, good.sampling, media=(odd,), runs=(run,))
        for request in (bad, good):
            engine.add(request)
        errors: dict[str, Exception | None] = {}
        while engine.has_work:
            errors |= {event.request_id: event.error for event in engine.step() if isinstance(event, Finished)}
        assert isinstance(errors["bad"], MediaRefused) and "embeddings of this image" in str(errors["bad"])
        assert errors["r0"] is None
        engine.close()


def test_a_model_of_text_alone_takes_none() -> None:
    with hosted(ScriptedExecutor(num_blocks=8, block_size=4)) as host:
        there = host.connect()
        assert there.media is None
        assert there.link is not None
        medium = MultiModalItem(b"x", (MediaArray("a", "uint8", (1,), b"1"),), 1)
        with pytest.raises(UnsupportedFeature, match="served for text only"):
            there.link.encode_medium(parts_of(medium))
        there.close()


class Eyes:
    """A device that records its requests, and fails on chosen requests."""

    def __init__(self) -> None:
        self.epoch, self.max_bytes, self.row_bytes = 0, 100, 4
        self.calls: list[tuple[str, bytes]] = []
        self.fault: Exception | None = None

    def num_bytes(self, medium: MultiModalItem) -> int:
        return 4 * medium.num_rows

    def encode(self, medium: MultiModalItem) -> None:
        self.calls.append(("encode", medium.key + medium.arrays[0].data))
        if self.fault is not None:
            raise self.fault

    def drop(self, key: bytes) -> None:
        self.calls.append(("drop", key))

    def clear(self) -> None:
        self.calls.append(("clear", b""))


class Seeing(ScriptedExecutor):
    def __init__(self) -> None:
        super().__init__(num_blocks=8, block_size=4)
        self.media = Eyes()


@pytest.fixture
def ranks() -> Iterator[tuple[GroupMedia, Eyes, MemberMedia, Eyes]]:
    mine, theirs = Eyes(), Seeing()
    member = MemberMedia(theirs)

    def tell(request: pb.StepRequest) -> None:
        assert member.handle(pb.StepRequest.FromString(request.SerializeToString()))

    yield GroupMedia(mine, tell), mine, member, theirs.media
    member.thread.shutdown()


MEDIUM = MultiModalItem(b"k" * 16, (MediaArray("a", "uint8", (3,), b"123"),), 2)


def test_all_ranks_encode(ranks: Any) -> None:
    group, mine, member, theirs = ranks
    group.encode(MEDIUM)
    assert theirs.calls == mine.calls  # from now on plans may name it
    group.drop(MEDIUM.key)
    group.clear()
    member.thread.submit(lambda: None).result()
    assert mine.calls == theirs.calls
    assert mine.calls == [("encode", MEDIUM.key + b"123"), ("drop", MEDIUM.key), ("clear", b"")]


def test_what_rank_0_cannot_encode_no_rank_keeps(ranks: Any) -> None:
    group, mine, member, theirs = ranks
    mine.fault = theirs.fault = MediaRefused("odd")
    with pytest.raises(MediaRefused):
        group.encode(MEDIUM)
    member.thread.submit(lambda: None).result()
    assert theirs.calls == [("encode", MEDIUM.key + b"123"), ("drop", MEDIUM.key)]


def test_a_rank_that_fell_behind_says_so(ranks: Any) -> None:
    group, _, member, theirs = ranks
    theirs.fault = MemoryError("mine alone")
    with pytest.raises(MemoryError):
        group.encode(MEDIUM)
    with pytest.raises(ProtocolError, match="was not received"):
        member.handle(pb.StepRequest(medium_ready=MEDIUM.key))
    with pytest.raises(ProtocolError, match="before the message that begins"):
        member.handle(pb.StepRequest(medium_part=pb.MediumPart(data=b"1")))


def test_a_rank_that_is_gone_is_no_fault_of_a_picture() -> None:
    def tell(request: pb.StepRequest) -> None:
        raise BrokenPipeError

    with pytest.raises(ShardUnavailable):
        GroupMedia(Eyes(), tell).encode(MEDIUM)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "smolvlm"])
def test_the_text_part_says_whether_a_model_can_be_shared(family: str, folders: Callable[[str], Path]) -> None:
    settings = AutoConfig.from_pretrained(folders(family))
    if family == "smolvlm":
        assert "layers.*.self_attn.q_proj" in read_plan(settings, 2)
        return
    why = "_text' has no tensor-parallel plan" if family == "qwen3_vl" else "_text' has the unsupported style"
    with pytest.raises(UnsupportedModel, match=family + why):
        read_plan(settings, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [0, 2])
def test_served_models_take_pictures_behind_shards(num_replicas: int, folders: Callable[[str], Path]) -> None:
    """The models are loaded like in the server, with one shard or with replicas that have a shard each."""
    folder = folders("llava")
    expected = rounds(load_executor(config_of(folder)), folder)[0][0]
    if num_replicas:
        model = load_replicated(config_of(folder), EngineConfig(), num_replicas, shards=1)
    else:
        launch = partial(launch_shard, stands_by=False)
        model = load_model(config_of(folder), control=ControlSettings("off"), executors=launch)
    try:
        assert model.pictures is not None
        found: Said = {}

        async def play(request: Request) -> None:
            async for events in model.client.submit(request):
                for event in events:
                    if isinstance(event, TokenEvent):
                        found.setdefault((event.request_id, event.index), []).append(event.token)

        async def play_all() -> None:
            await asyncio.gather(*map(play, requests(folder)))

        asyncio.run(play_all())
        assert found == expected
    finally:
        model.shutdown()


@pytest.mark.slow
def test_the_next_shard_encodes_again(folders: Callable[[str], Path]) -> None:
    folder = folders("llava")
    expected, _ = rounds(load_executor(config_of(folder)), folder)
    there = launch_shard(config_of(folder), stands_by=False)
    assert isinstance(there, LaunchedShard)
    found, num_encoded = rounds(there, folder, there.child.kill, lost_at=1)
    assert found == expected and there.num_losses == 1 and num_encoded == 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "paligemma2", "qwen2_vl", "internvl"])
def test_two_ranks_say_what_one_process_says(family: str, folders: Callable[[str], Path]) -> None:
    config = config_of(folders(family))
    command = [sys.executable, "-m", "bridle", "shard", *shard_arguments(config), "--shards", "2"]
    found, _ = rounds(LaunchedShard(command, name="group of two"), folders(family))
    assert found == rounds(load_executor(config), folders(family))[0]
