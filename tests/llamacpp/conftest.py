"""Fixtures for tests that unpack GGUF files into a temporary folder instead of the user's cache."""

from __future__ import annotations

from tests.gguf.conftest import _own_cache

__all__ = ["_own_cache"]
