"""Fixtures for tests that unpack GGUF files into a temporary folder instead of the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("unpacked")
        patch.setenv("BRIDLE_CACHE", str(folder))
        yield folder
