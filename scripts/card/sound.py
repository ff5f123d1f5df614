"""A pytest plugin for tests on a GPU: it ends a test worker whose device was lost, so that xdist starts another worker.

After an illegal memory access, every further CUDA call of the process fails. Without this plugin, all later tests of
the worker would fail.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

_LOST = 70


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    yield
    if not is_sound():
        os._exit(_LOST)


def is_sound() -> bool:
    """Return whether the device still answers; true if this process uses no device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print(f"the device is lost: {error}", file=sys.stderr)
        return False
    return True
