"""Environment of child processes, and a guarantee that no child outlives its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from bridle.logs import log_variables

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0
_OPTIONS = "BRIDLE_"


def child_environment() -> dict[str, str]:
    """Return the environment for a child process: this process's environment without the variables that set flags. The
    child gets its flags on its command line. The child's logs have the same format as this process's logs."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_OPTIONS)}
    return ours | log_variables()


def die_with_parent(parent: int) -> None:
    """End this process at once when process `parent`, which started it, ends.

    On Linux the kernel kills this process, even if it is stopped. On other systems a thread checks the parent every
    second. The parent must start this process from a thread that lives as long as the child should, because Linux
    treats that thread as the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl was called
            os._exit(1)
    else:
        threading.Thread(target=_poll, args=(parent,), name="bridle-parent", daemon=True).start()


def _poll(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
