"""Tests that the generated Python module matches the committed `.proto` file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT

pytest.importorskip("grpc_tools")


def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run([ROOT / "scripts" / "proto", tmp_path], check=True, env={**os.environ, "VENV": sys.prefix})
    for name in ("shard_pb2.py", "shard_pb2.pyi"):
        path = Path("bridle/distributed/proto") / name
        assert (tmp_path / path).read_text() == (ROOT / path).read_text(), "run scripts/proto"
