"""The arithmetic of the LMTP benchmark, and its queries against a scripted server. Times are never asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridle.bench.checkpoints import BenchCheckpoint
from bridle.errors import InvalidRequest
from bridle.lmtp.server import websocket_front
from dev.bench.lmql import lmql_python
from dev.bench.lmtp import LmtpFigure, LmtpWorkload, Load, compare
from tests.http.harness import NAME, scripted_model, served


def figure(server: str, speed: float, scores: float, outputs: list[list[int]]) -> LmtpFigure:
    return LmtpFigure("small", server, 2, speed, 0.1, 0.2, scores, outputs)


def test_ratios_are_beside_the_real_server() -> None:
    figures = [figure("lmql", 10.0, 4.0, [[1], [2]]), figure("bridle", 50.0, 2.0, [[1], [3]])]
    compare(figures)
    assert [each.ratio for each in figures] == [1.0, 5.0]
    assert [each.score_ratio for each in figures] == [1.0, 0.5]
    assert [each.same for each in figures] == [1.0, 0.5]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letters.txt").write_text("dear")
    with pytest.raises(InvalidRequest, match="no virtual environment"):
        lmql_python(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["letters.txt"]


async def test_queries_use_what_they_ask_for_and_repeat_themselves() -> None:
    workload = LmtpWorkload(num_shared=16, num_rounds=3, num_bursts=1)
    with served(scripted_model(), fronts=[websocket_front()]) as url:
        checkpoint = BenchCheckpoint("small", Path(NAME), vocab_size=200, num_parameters=1, step_bytes=1, token_bytes=1)
        loads = [Load(url, checkpoint, workload, 2) for _ in range(2)]
        first, second = [await load.run("bridle") for load in loads]
    assert first.outputs == second.outputs
    assert len(first.outputs) == 2 and all(3 <= len(output) <= 24 for output in first.outputs)
    assert first.tokens_per_second > 0 and first.scores_per_second > 0 and first.first_token_p95 > 0
