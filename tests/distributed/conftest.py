"""Let only tests of silent processes treat silence as a failure, because shared machines pause at random."""

from __future__ import annotations

import pytest

from bridle.distributed import group, replica_link
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _silence_is_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "SILENCE_SECONDS", PATIENCE)
    monkeypatch.setattr(replica_link, "SILENCE_SECONDS", PATIENCE)
