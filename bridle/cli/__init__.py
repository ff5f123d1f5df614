"""The `bridle` command. `main` is its entry point; `app` holds the tree of commands, one module each.

Modules of this package import no heavy package at their top, because `bridle --help` must not wait for torch.
"""

from bridle.cli.run import main

__all__ = ["main"]
