"""Tests of loading progress: it counts bytes, in the order of stages, as a bar on a terminal and as log lines
elsewhere."""

from __future__ import annotations

import io
import json
import logging
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers.utils import logging as library_logging

from bridle import LLM
from bridle.config import ModelConfig
from bridle.load_progress import LoggedSteps, PrintedSteps, on_download, shown, watched
from bridle.model.loading import load_executor
from bridle.serving.models.loading import load_model
from bridle.serving.models.model_loader import ModelManager
from bridle.serving.models.model_slot import Slot
from tests.fakes import encoder_checkpoints, tiny_checkpoints
from tests.gguf.kit import pair
from tests.serving.loaders import FakeLoader
from tests.waiting import PATIENCE

Told = list[tuple[str, float]]


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("bridle.load_progress")]


def test_each_phase_of_loading_is_told_before_it_begins() -> None:
    told: list[str] = []
    load_model(ModelConfig("demo"), progress=lambda stage, share: told.append(stage)).close()
    stages = list(dict.fromkeys(told))
    assert stages[:3] == ["reading the tokenizer", "importing libraries", "finding the model"]


# -- shown ---------------------------------------------------------------------------------------------------------


def test_a_log_gets_a_line_for_each_stage_and_more_for_long_ones(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="bridle")
    told = [
        (0.0, "downloading", 0.0),
        (1.0, "downloading", 0.5),  # it has only begun
        (6.0, "downloading", 0.55),
        (6.1, "downloading", 0.56),
        (20.0, "downloading", 0.6),  # hardly more
        (21.0, "downloading", 0.9),
        (21.1, "reading weights", 0.05),
        (30.0, "reading weights", 0.7),
    ]
    times = iter([at for at, _, _ in told])
    steps = LoggedSteps("Loading m", clock=lambda: next(times))
    for _, stage, share in told:
        steps(stage, share)
    assert lines_of(caplog) == [
        "Loading m: downloading",
        "Loading m: downloading, 55%",
        "Loading m: downloading, 90%",
        "Loading m: reading weights",
        "Loading m: reading weights, 70%",
    ]
    debugged = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert debugged == ["Loading m: reading weights"]  # it came soon after a line


def test_a_short_task_logs_its_begin_and_its_end_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bridle")
    steps = LoggedSteps("Loading m", clock=lambda: 1.0)
    for stage, share in (
        ("finding the model", 0.0),
        ("reading weights", 0.5),
        ("reading weights", 0.8),
        ("ready", 1.0),
    ):
        steps(stage, share)
    assert lines_of(caplog) == ["Loading m: finding the model", "Loading m: ready"]


def test_a_long_stage_that_began_soon_after_a_line_is_told_after_some_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bridle")
    times = iter([1.0, 2.0, 4.0, 6.5, 7.0])
    steps = LoggedSteps("Loading m", clock=lambda: next(times))
    for stage, share in (("finding the model", 0.0), *(("downloading", share) for share in (0.0, 0.01, 0.02, 0.03))):
        steps(stage, share)
    assert lines_of(caplog) == ["Loading m: finding the model", "Loading m: downloading, 2%"]


def test_a_terminal_gets_a_bar_and_a_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="bridle")
    screen, file = (Console(file=io.StringIO(), force_terminal=is_one, width=90) for is_one in (True, False))
    for console in (screen, file):
        with shown("Loading m", console=console) as report:
            report("reading weights", 0.25)
            on_download()(0.5)
    drawn = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "Loading m: downloading" in drawn and "50%" in drawn
    assert file.file.getvalue() == ""  # type: ignore[attr-defined]
    assert lines_of(caplog) == ["Loading m: reading weights", "Loading m: downloading"]
    with shown("Loading m", is_wanted=False, console=screen) as report:
        report("reading weights", 0.5)
        on_download()(0.75)
    assert screen.file.getvalue() == drawn  # type: ignore[attr-defined]


def test_the_nearest_watcher_is_told_of_a_download() -> None:
    outer: Told = []
    inner: Told = []
    with watched(lambda *told: outer.append(told)):
        with watched(lambda *told: inner.append(told)):
            on_download()(0.25)
        on_download()(0.5)
    on_download()(0.75)
    assert (outer, inner) == ([("downloading", 0.5)], [("downloading", 0.25)])


def test_a_python_program_is_told_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="bridle")
    path = str(tiny_checkpoints.cached_checkpoint("llama"))
    with LLM(path, num_blocks=8, warm_up=False, max_model_len=64):
        pass
    told = lines_of(caplog)
    assert f"Loading {path}: reading weights" in told and told[-1] == f"Loading {path}: ready"
    caplog.clear()
    with LLM(path, num_blocks=8, warm_up=False, max_model_len=64, use_tqdm_on_load=False):
        pass
    assert not lines_of(caplog)


def test_a_server_shows_each_model_that_it_loads_at_the_start() -> None:
    seen: list[tuple[str, str, float]] = []

    class Shown:
        def __init__(self, title: str) -> None:
            self.title = title

        def __enter__(self) -> Any:
            return lambda stage, share: seen.append((self.title, stage, share))

        def __exit__(self, *exc: object) -> None:
            pass

    keeper = ModelManager(FakeLoader({"a": 1, "b": 1}))
    slots = [Slot(name, ModelConfig(name)) for name in ("a", "b")]
    keeper.fill(slots, False, Shown)  # type: ignore[arg-type]
    wanted = [(f"Loading {name}", *told) for name in "ab" for told in (("reading weights", 0.5), ("ready", 1.0))]
    assert seen == wanted
    keeper.close()


# -- by bytes ------------------------------------------------------------------------------------------------------


def told_by(path: Path, **settings: Any) -> Told:
    told: Told = []
    config = ModelConfig(str(path), device="cpu", num_blocks=8, warm_up=False, **settings)
    load_executor(config, lambda *each: told.append(each)).close()
    return told


def check_moves(told: Told, stage: str, begin: float, end: float, least: int) -> None:
    """Check that the bar never moves back, ends full, and moves at least `least` times within a stage."""
    assert all(before <= after + 1e-9 for (_, before), (_, after) in pairwise(told))
    assert told[-1] == ("ready", 1.0)
    shares = [share for what, share in told if what == stage]
    assert shares[0] >= begin and shares[-1] == pytest.approx(end)
    assert len({*shares}) >= least


def in_shards(folder: Path, out: Path) -> Path:
    """Write the checkpoint with one file for each of its tensors."""
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (out / path.name).write_bytes(path.read_bytes())
    homes = {}
    for number, (name, tensor) in enumerate(load_file(folder / "model.safetensors").items()):
        homes[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, out / homes[name], metadata={"format": "pt"})
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return out


def test_weights_are_told_by_bytes_over_all_files(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoints.cached_checkpoint("llama")
    sizes = {name: t.nbytes for name, t in load_file(checkpoint / "model.safetensors").items()}
    told = told_by(in_shards(checkpoint, tmp_path))
    check_moves(told, "reading weights", 0.05, 0.7, len(sizes))
    steps = [b - a for (_, a), (what, b) in pairwise(told) if what == "reading weights"]
    largest = max(sizes.values()) / sum(sizes.values())
    assert max(steps) == pytest.approx(0.65 * largest)
    assert library_logging.set_tqdm_hook(None) is None  # the library's hook was given back


def test_experts_that_the_library_joins_are_counted() -> None:
    check_moves(told_by(tiny_checkpoints.cached_checkpoint("qwen3_moe")), "reading weights", 0.05, 0.7, 10)


def test_a_gguf_file_is_told_by_bytes() -> None:
    check_moves(told_by(pair("llama", "Q8_0")[1]), "reading weights", 0.05, 0.7, 8)


def test_quantizing_is_told_by_weights() -> None:
    told = told_by(
        tiny_checkpoints.cached_checkpoint("llama", hidden_size=64, intermediate_size=128), quantization="int8"
    )
    check_moves(told, "packing weights", 0.75, 0.95, 4)


def test_a_model_that_pools_tells_too(tmp_path: Path) -> None:
    folder = encoder_checkpoints.make_sentence_model("bert", tmp_path / "bert")
    check_moves(told_by(folder), "reading weights", 0.05, 0.9, 8)


# -- printed -------------------------------------------------------------------------------------------------------


class Screen(io.StringIO):
    """Captured output, with an event that is set by each write."""

    def __init__(self) -> None:
        super().__init__()
        self.has_line = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        self.has_line.set()
        return written


def test_a_long_task_prints_where_there_is_no_terminal() -> None:
    screen = Screen()
    with PrintedSteps("Checking m", Console(file=screen, force_terminal=False), silence=0.01) as report:
        report("comparing [all]", 0.25)
        assert screen.has_line.wait(PATIENCE)
        screen.has_line.clear()
        assert screen.has_line.wait(PATIENCE)  # and again, though nothing more was reported
    assert "Checking m: comparing [all], 25%, 0 s so far\n" in screen.getvalue()


def test_a_short_task_prints_nothing() -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with shown("Checking m", prints=True, console=console) as report:
        report("comparing", 0.25)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "line"), [(12.4, "Loading m, 12 s so far"), (100.0, "Loading m, 100 s so far")])
def test_a_task_without_stages_tells_its_time(seconds: float, line: str) -> None:
    assert PrintedSteps("Loading m", Console()).line(seconds) == line
