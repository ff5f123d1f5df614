"""A plugin of pytest for tests on a GPU: ends a worker whose device was lost, so that xdist puts another in its place.

After an illegal access every further call of CUDA in the process fails: without this all later tests of the worker
would.
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
    """Return whether the device still answers; true where this process has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except Exception as error:
        print(f"the device is lost: {error}", file=sys.stderr)
        return False
    return True
