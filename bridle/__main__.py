"""Runs the `bridle` command for `python -m bridle`."""

import sys

from bridle.cli import main

if __name__ == "__main__":
    sys.exit(main())
