"""`python -m bridle.aici.runtime`: what `bridle runtime` starts."""

from __future__ import annotations

import sys

from bridle.aici.runtime.main import main

if __name__ == "__main__":
    sys.exit(main())
