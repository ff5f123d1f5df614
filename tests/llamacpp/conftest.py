"""What GGUF files are unpacked into goes to a folder of the tests' own."""

from __future__ import annotations

from tests.gguf.conftest import _own_cache

__all__ = ["_own_cache"]
