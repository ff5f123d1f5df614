"""How many cores a container leaves, and how many threads compute then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bridle.cgroups import num_cores
from bridle.model import device_defaults


def test_a_control_group_bounds_the_cores(tmp_path: Path) -> None:
    (tmp_path / "service" / "app").mkdir(parents=True)
    outer, inner = tmp_path / "service" / "cpu.max", tmp_path / "service" / "app" / "cpu.max"
    membership = tmp_path / "membership"
    membership.write_text("0::/service/app\n")
    allowed = num_cores(tmp_path, tmp_path / "nothing")
    assert allowed >= 1
    inner.write_text("max 100000\n")
    outer.write_text("6400000 100000\n")
    assert num_cores(tmp_path, membership) == min(allowed, 64)
    outer.write_text("50000 100000\n")
    assert num_cores(tmp_path, membership) == 1
    inner.write_text("no number\n")
    assert num_cores(tmp_path, membership) == 1
    group = tmp_path / "cpu" / "box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    membership.write_text("4:cpu,cpuacct:/box\n0::/\n")
    assert num_cores(tmp_path, membership) == allowed
    (group / "cpu.cfs_quota_us").write_text("80000\n")
    assert num_cores(tmp_path, membership) == 1


def test_no_more_threads_compute_than_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("bridle.model.device_defaults.num_cores", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    for threads in (64, 2, 1):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        device_defaults.choose_threads(None)
    device_defaults.choose_threads(5)  # who asks for more gets more
    assert chosen == [2, 5]
