"""Tests of adapters in the Python API: one for all prompts or one for each, in sessions and in scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bridle import LLM, ChatSession, SamplingParams
from bridle.errors import AdapterRefused, InvalidRequest, UnknownAdapter
from tests.fakes import tiny_checkpoints
from tests.http.harness import scripted_model
from tests.lora.kit import write_adapter as write_lora
from tests.serving.fake_adapters import FakeHome, with_adapters, write_adapter

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    """Yield an `LLM` with the adapters `french` and `german`, whose generated text depends on the adapter."""
    model = scripted_model(spread=4096)
    with_adapters(model)
    folder = write_adapter(tmp_path / "any")
    with LLM(model, adapters={"french": folder, "german": str(folder)}) as llm:
        yield llm


def test_each_prompt_of_a_call_has_its_own(llm: LLM) -> None:
    names = [None, "french", "german", "french", "scripted", ""]
    texts = [output.text for output in llm.generate(["Say it"] * len(names), GREEDY, adapter=names)]
    base, french, german = texts[:3]
    assert len({base, french, german}) == 3
    assert texts[3:] == [french, base, base]
    assert [output.text for output in llm.generate(["Say it"] * 2, GREEDY, adapter="french")] == [french, french]
    assert llm.stream("Say it", GREEDY, adapter="german").read() == german
    scores = llm.score(["Say it", "Say it"], adapter=["french", None])
    assert scores[0].total != scores[1].total
    with pytest.raises(InvalidRequest, match="adapter has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, adapter=["french"])


def test_what_is_unknown_is_told_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(UnknownAdapter, match="no adapter 'nobody'"):
        llm.generate(["a", "b"], GREEDY, adapter=["french", "nobody"])
    with pytest.raises(InvalidRequest, match="adapter is 5; must be a name"):
        llm.generate("a", GREEDY, adapter=5)  # type: ignore[arg-type]
    assert llm.statistics().num_requests == 0


def test_adapters_come_and_go(llm: LLM, tmp_path: Path) -> None:
    assert [info.name for info in llm.adapters] == ["french", "german"]
    before = llm.generate("Say it", GREEDY, adapter="french")[0].text
    llm.unload_adapter("french")
    with pytest.raises(UnknownAdapter):
        llm.generate("Say it", GREEDY, adapter="french")
    info = llm.load_adapter("french", write_adapter(tmp_path / "other", rank=3, scale=1.0))
    assert (info.rank, info.state) == (3, "host")
    assert llm.generate("Say it", GREEDY, adapter="french")[0].text != before
    with pytest.raises(AdapterRefused, match="the rank is 100"):
        llm.load_adapter("wide", write_adapter(tmp_path / "wide", rank=100))
    assert [info.name for info in llm.adapters] == ["german", "french"]


def test_a_session_keeps_its_adapter(llm: LLM, tmp_path: Path) -> None:
    session = llm.session(adapter="french", sampling=GREEDY)
    answer = session.send("Hello")
    assert answer == llm.chat([{"role": "user", "content": "Hello"}], GREEDY, adapter="french")[0].text
    assert answer != llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0].text
    session.save(tmp_path / "talk.json")
    again = ChatSession.load(llm, tmp_path / "talk.json")
    assert again.options == {"adapter": "french"}
    assert again.send("And?") == session.fork().send("And?")
    others = [llm.session(adapter=name, sampling=GREEDY) for name in (None, "french", "german")]
    assert len(set(ChatSession.together(others, ["Hello"] * 3))) == 3


def test_a_bad_adapter_closes_what_was_loaded_for_it(tmp_path: Path) -> None:
    model = scripted_model()
    home = with_adapters(model, FakeHome())
    home.broken.add("torn")
    with pytest.raises(AdapterRefused, match="changed"):
        LLM(model, adapters={"torn": write_adapter(tmp_path / "torn")})
    assert model.client.is_healthy  # it is the caller's
    assert model.adapters.list() == () and not home.files
    model.close()


def test_a_damaged_adapter_is_one_clear_error_until_it_is_mended(tmp_path: Path) -> None:
    """The adapter's files change after it was added, and before the first request uses it."""
    with LLM(str(tiny_checkpoints.cached_checkpoint("llama")), num_blocks=16, block_size=16) as llm:
        pool = llm.model.adapter_pool
        assert pool is not None
        weights = write_lora(tmp_path / "a", pool.limits.layers) / "adapter_model.safetensors"
        llm.model.adapters.add("a", str(tmp_path / "a"))
        good = weights.read_bytes()
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        (output,) = llm.generate([[5, 6, 7]], GREEDY, adapter="a")
        error = output.outputs[0].error
        assert isinstance(error, AdapterRefused) and "have changed since it was added" in str(error)
        for _ in range(3):
            with pytest.raises(AdapterRefused, match="have changed since it was added"):
                llm.generate([[5, 6, 7]], GREEDY, adapter="a")
        assert llm.adapters[0].state == "failed" and llm.statistics().num_requests == 1
        assert llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].error is None
        weights.write_bytes(good)
        assert llm.generate([[5, 6, 7]], GREEDY, adapter="a")[0].outputs[0].error is None
