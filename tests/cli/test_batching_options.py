"""The router's batching options as flags, in the environment and in a settings file, and the largest step of a
shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridle.cli import main
from bridle.cli.options import CapacityOptions
from bridle.config import EngineConfig, ModelConfig
from bridle.http.settings import ServeSettings
from bridle.launch.launcher import shard_arguments

KNOBS: dict[str, Any] = {
    "max_batch_prefill_tokens": 128,
    "max_batch_total_tokens": 4_096,
    "max_waiting_tokens": 7,
    "waiting_served_ratio": 1.5,
    "max_input_tokens": 100,
    "max_total_tokens": 200,
}
EXPECTED = EngineConfig(**KNOBS, max_num_seqs=9, chunked_prefill=False, kv_store="off")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings with which `serve` was called."""
    calls: list[ServeSettings] = []
    monkeypatch.setattr("bridle.http.server.run.serve", lambda settings, fronts=(): calls.append(settings))
    return calls


def test_flags_set_how_steps_are_batched(served: list[ServeSettings]) -> None:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in KNOBS.items()]
    assert main(["serve", *words, "--max-batch-size=9", "--max-concurrent-requests=5", "--no-chunked-prefill"]) == 0
    (settings,) = served
    assert settings.engine == EXPECTED
    assert settings.http.max_requests == 5


def test_variables_set_how_steps_are_batched(served: list[ServeSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KNOBS.items():
        monkeypatch.setenv(f"BRIDLE_{name.upper()}", str(value))
    monkeypatch.setenv("BRIDLE_MAX_BATCH_SIZE", "9")
    monkeypatch.setenv("BRIDLE_CHUNKED_PREFILL", "false")
    monkeypatch.setenv("BRIDLE_MAX_CONCURRENT_REQUESTS", "5")
    assert main(["serve"]) == 0
    (settings,) = served
    assert (settings.engine, settings.http.max_requests) == (EXPECTED, 5)


def test_a_settings_file_means_what_the_flags_do(served: list[ServeSettings], tmp_path: Path) -> None:
    lines = [f"  {name.replace('_', '-')}: {value}\n" for name, value in KNOBS.items()]
    lines += ["  max-batch-size: 9\n", "  max-concurrent-requests: 5\n", "  chunked-prefill: false\n"]
    file = tmp_path / "bridle.yaml"
    file.write_text("serve:\n" + "".join(lines))
    assert main(["--config", str(file), "serve"]) == 0
    (settings,) = served
    assert (settings.engine, settings.http.max_requests) == (EXPECTED, 5)


def test_without_a_warm_up(served: list[ServeSettings]) -> None:
    assert main(["serve", "--no-warm-up"]) == 0
    assert served[0].model == ModelConfig(warm_up=False)


def test_a_shard_is_told_what_it_makes_room_for() -> None:
    config = ModelConfig("demo", kv_tokens=900, step_tokens=128, step_seqs=9, num_sharers=2, warm_up=False)
    words = shard_arguments(config)
    assert words == [
        "demo", "--kv-tokens", "900", "--num-sharers", "2", "--step-tokens", "128", "--step-seqs", "9", "--no-warm-up",
    ]  # fmt: skip
    capacity = CapacityOptions(kv_tokens=900, step_tokens=128, step_seqs=9, num_sharers=2, warm_up=False)
    assert capacity.add_to(ModelConfig("demo")) == config
    of_router = replace(config, image_hosts=("a.example",), control_vectors=("polite=polite.gguf",))
    assert shard_arguments(of_router) == words
