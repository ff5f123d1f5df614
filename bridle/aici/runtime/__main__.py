"""The program `python -m bridle.aici.runtime`, which `bridle runtime` starts."""

import os
import sys

_PARENT = os.getppid()  # read first, because the parent may end at any moment

from bridle.aici.runtime.main import main  # noqa: E402
from bridle.logs import log_failures  # noqa: E402

if __name__ == "__main__":
    log_failures()
    sys.exit(main(parent=_PARENT))
